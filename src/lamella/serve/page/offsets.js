// The API counts characters as Unicode code points, JavaScript as UTF-16 units: an emoji is one of the former, two of
// the latter.

const PAIRS = /[\ud800-\udbff][\udc00-\udfff]/;

/** Return a function that converts an offset in code points to one in UTF-16 units. */
export function unitsOf(text) {
  if (!PAIRS.test(text)) return (points) => points;
  return (points) => {
    let units = 0;
    for (let count = 0; count < points && units < text.length; count++) units += text.codePointAt(units) > 0xffff ? 2 : 1;
    return units;
  };
}

/** Return an offset in UTF-16 units as one in code points. */
export function pointsOf(text, units) {
  const before = text.slice(0, units);
  return PAIRS.test(before) ? Array.from(before).length : before.length;
}
