// The API counts characters as Unicode code points, JavaScript as UTF-16 units: an emoji is one of the former, two of
// the latter. People count what they see, which may have many of both.

const PAIRS = /[\ud800-\udbff][\udc00-\udfff]/;
const LONGEST = 16;  // units of a character as people count it; longer ones count as several
const segmenter = Intl.Segmenter ? new Intl.Segmenter() : null;  // older browsers have none

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

const characters = (text) => (segmenter ? Array.from(segmenter.segment(text), ({segment}) => segment) : Array.from(text));

/** Return the first characters of a text, as people count them: no emoji is cut in two. */
export const firstOf = (text, count) => characters(text.slice(0, LONGEST * count)).slice(0, count).join("");

/** Return the last characters of a text, as people count them. */
export const lastOf = (text, count) => characters(text.slice(-LONGEST * count)).slice(-count).join("");
