// The questions asked so far, with what would be answered where the slider stands now.

import {readResult} from "./answers.js";
import {byId, counted, keepingFocus, make} from "./dom.js";

/** Draw the list; `current` is the entry that is shown, `onChoose` shows another one. */
export function drawHistory(entries, current, calibrationsOf, answerable, onChoose) {
  if (entries.length < 2) {
    byId("history").replaceChildren();
    return;
  }
  const rows = entries.map((entry) => {
    const [now, before] = [answerable, null].map((share) => verdict(entry, calibrationsOf(entry), share));
    return {entry, now, before, changes: now !== before};
  });
  const changed = rows.filter((row) => row.changes).length;
  keepingFocus(byId("history"), () => byId("history").replaceChildren(
    make("h2", {}, "Questions so far"),
    answerable === null ? "" : make("p", {class: "quiet", id: "changes"}, changed
      ? `The slider changes ${counted(changed, "answer")} of ${rows.length}.` : "The slider changes none of these answers."),
    make("ol", {class: "questions"}, rows.toReversed().map(({entry, now, before, changes}) =>
      make("li", {class: entry === current ? "current" : null},
        make("button", {type: "button", "aria-current": entry === current ? "true" : null, onclick: () => onChoose(entry)},
          make("span", {class: "asked"}, entry.question),
          make("span", {class: changes ? "given changed" : "given"}, changes ? make("del", {}, before) : null, changes ? " " : null, now)))))));
}

function verdict(entry, calibrations, answerable) {
  const reading = readResult(entry.results[0], calibrations[0], entry.texts, answerable);
  return reading.best ? reading.best.answer : "no answer";
}
