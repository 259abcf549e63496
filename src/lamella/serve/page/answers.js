// The answers to a question: a card for each reader, and the places to mark in the texts.

import {answersAt, decide, samePlace} from "./decision.js";
import {make, percent} from "./dom.js";
import {firstOf, lastOf, unitsOf} from "./offsets.js";

export const LETTERS = [..."ABCDEFGH"];  // as many readers as the server answers a question with
const FAINTEST = 0.01;  // probability below which a runner-up is not shown
const AROUND = 90;  // characters of the text shown around an answer
const SHORT = 1500;  // characters of a text that fits on the paper

/** Return what a reader answers at a decision: {decision, best, others, guess}; places are in UTF-16 units. */
export function readResult(result, calibration, asked, answerable) {
  const decision = decide(result, calibration, answerable);
  const spans = answersAt(result, decision).map((answer) => {
    const item = asked[answer.context ?? 0];
    const units = unitsOf(item.text);
    return {...answer, id: item.id, name: item.name, text: item.text, from: units(answer.start), to: units(answer.end)};
  });
  const [first, ...rest] = spans;
  const others = rest.filter((answer) => answer.probability >= FAINTEST);
  return {decision, others, best: decision.noAnswer ? null : first ?? null, guess: decision.noAnswer ? first ?? null : null};
}

/** Return the places to mark: answers in full ink, runners-up and withheld guesses in pale ink. */
export function placesOf(readings) {
  const several = readings.length > 1;
  return readings.flatMap(({best, guess, others}, number) => {
    const letter = several ? LETTERS[number] : null;
    const place = (answer, kind, title) => ({id: answer.id, start: answer.from, end: answer.to, kind, title, label: null});
    const shown = best ? [{...place(best, `answer r${number}`, "the answer"), label: letter}] : [];
    if (guess) shown.push({...place(guess, several ? `guess r${number}` : "guess", "a guess that was withheld"),
      label: several ? `${letter}?` : "?"});
    return several ? shown : [...shown, ...others.map((answer) => place(answer, "other", "a runner-up"))];
  });
}

/** Return the card of one reader. */
export function card(reading, {name, number, several, manyTexts, onShow}) {
  const {decision, best, guess, others} = reading;
  const title = several ? make("p", {class: "reader-name"}, make("span", {class: `letter r${number}`}, LETTERS[number]), name) : null;
  const shown = best ?? guess;
  const parts = best
    ? [make("p", {class: "label"}, "Answer"), make("p", {class: "found", dir: "auto"}, best.answer)]
    : [make("p", {class: "label"}, "No answer"),
      make("p", {class: "found none"}, guess ? "The text does not seem to answer this." : "No answer was found.")];
  if (guess) parts.push(make("p", {class: "guess-line"}, "Closest guess: ", make("q", {}, guess.answer)));
  if (shown) parts.push(surroundings(shown, Boolean(best), {several, manyTexts, onShow}));
  parts.push(bar(reading, several));
  const more = others.filter((answer) => !shown || !samePlace(answer, shown));
  if (more.length && !several) {
    parts.push(make("ul", {class: "others", "aria-label": "Runners-up"}, more.map((answer) =>
      make("li", {}, make("span", {class: "words"}, answer.answer), make("span", {class: "share"}, percent(answer.probability))))));
  }
  return make("article", {class: `card${best ? "" : " none"}`, "data-reader": name}, title, parts);
}

function surroundings(answer, found, {several, manyTexts, onShow}) {
  const {text, from, to} = answer;
  const button = make("button", {type: "button", class: "plain show", onclick: () => onShow(answer)},
    manyTexts ? `Show in ${answer.name}` : "Show in the text");
  if (several) return make("p", {class: "around"}, button);
  const [left, right] = [lastOf(text.slice(0, from), AROUND), firstOf(text.slice(to), AROUND)];
  let before = left.replace(/^[\s\S]*\n\s*\n/, "");
  let after = right.replace(/\n\s*\n[\s\S]*$/, "");
  if (before === left && left.length < from) before = `… ${before.replace(/^\S*\s/, "")}`;
  if (after === right && to + right.length < text.length) after = `${after.replace(/\s\S*$/, "")} …`;
  const short = text.length < SHORT && !manyTexts;  // on a wide screen, the answer is in view on the paper
  return make("p", {class: `around${short ? " short" : ""}`},
    before, make("mark", {class: found ? "answer" : "guess"}, text.slice(from, to)), after, " ", button);
}

/** Draw the probability of the answer, of all others, and of "no answer", with the limit of the decision. */
function bar({decision, best, guess}, several) {
  const {naProb, limit} = decision;
  const first = (best ?? guess)?.probability ?? 0;
  const rest = Math.max(0, 1 - naProb - first);
  const part = (kind, share) => {
    const element = make("span", {class: kind});
    element.style.flexGrow = share;
    return element;
  };
  const mark = make("span", {class: "limit", title: `gives no answer from ${percent(limit)} on`});
  mark.style.insetInlineEnd = `${100 * limit}%`;
  const label = `${best ? "This answer" : "This guess"} ${percent(first)}, other answers ${percent(rest)}, ` +
    `no answer ${percent(naProb)}. The reader gives no answer from ${percent(limit)} on.`;
  return make("div", {class: "odds"},
    make("div", {class: "bar", role: "img", "aria-label": label}, part("first", first), part("rest", rest), part("na", naProb), mark),
    make("div", {class: "legend", "aria-hidden": "true"},
      make("span", {class: "first"}, `${several ? "" : best ? "this answer " : "this guess "}${percent(first)}`),
      make("span", {class: "na"}, `${several ? "none" : "no answer"} ${percent(naProb)}`)),
    several ? null : make("p", {class: "quiet", "aria-hidden": "true"}, "Where the grey passes the line, the reader gives no answer."));
}

/** Return a sentence that compares readers, and the answers with the words that others lack. */
export function comparison(readings) {
  const texts = readings.map(({best}) => best?.answer ?? null);
  if (texts.every((text) => text === null)) return "No reader gives an answer.";
  const first = readings[0].best;
  if (readings.every(({best}) => best && first && best.id === first.id && best.from === first.from && best.to === first.to))
    return `${readings.length === 2 ? "Both" : "All"} readers give the same answer.`;
  const silent = LETTERS.filter((_, number) => number < readings.length && texts[number] === null);
  if (silent.length) return `They differ: ${new Intl.ListFormat("en").format(silent)} ${silent.length === 1 ? "gives" : "give"} no answer.`;
  const overlap = readings.every(({best}) => best.id === first.id && best.from < first.to && best.to > first.from);
  return overlap ? "They agree on the place and differ in its length." : "They differ: they point to different places.";
}

/** Return the words of an answer with those marked that others leave out; null where answers do not overlap. */
export function differingWords(reading, readings) {
  const {best} = reading;
  const others = readings.filter((other) => other !== reading && other.best);
  const overlaps = ({best: other}) => other.id === best.id && other.from < best.to && other.to > best.from;
  if (!best || !others.some(overlaps)) return null;
  const pieces = [];
  for (const match of best.text.slice(best.from, best.to).matchAll(/\S+|\s+/g)) {
    const [from, to] = [best.from + match.index, best.from + match.index + match[0].length];
    const shared = others.every(({best: other}) => other.id === best.id && other.from <= from && other.to >= to);
    pieces.push(shared || !match[0].trim() ? match[0] : make("span", {class: "differs"}, match[0]));
  }
  return pieces;
}
