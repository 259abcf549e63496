// The slider: how many of one's questions have an answer, and what the readers would then decide.

import {LETTERS} from "./answers.js";
import {fromSlider, toSlider, tunedFor, turningPoint} from "./decision.js";
import {byId, make} from "./dom.js";

const [LOWEST, HIGHEST] = [toSlider(0.01), toSlider(0.99)];

/** Return a share in words: "50 in 100". */
export function inHundred(share) {
  return `${Math.min(99, Math.max(1, Math.round(100 * share)))} in 100`;
}

/** Build the slider once; `onMove` gets the share, or null when it is back where the reader was tuned. */
export function startSlider(onMove) {
  const input = make("input", {type: "range", id: "share", min: LOWEST, max: HIGHEST, step: 1, list: "turn",
    "aria-describedby": "share-effect"});
  const reset = make("button", {type: "button", class: "plain", id: "share-reset", onclick: () => {
    move(null);
    input.focus();  // the button is hidden now
  }}, "Reset");
  byId("decision").append(
    make("label", {for: "share"}, "How readily should it answer?"),
    make("p", {class: "quiet"}, make("output", {id: "share-value", for: "share"})),
    make("div", {class: "rail"}, input, make("span", {id: "share-turn", class: "turn", "aria-hidden": "true"})),
    make("div", {class: "ends", "aria-hidden": "true"}, make("span", {}, "strict"), make("span", {}, "eager")),
    make("div", {class: "share-foot"}, make("p", {id: "share-effect", class: "quiet"}), reset));
  const move = (share) => onMove(share);
  input.addEventListener("input", () => move(fromSlider(Number(input.value))));
}

/** Show the slider for a result at a share; null: as the reader is tuned. */
export function drawSlider(entry, calibrations, answerable) {
  byId("decision").hidden = false;
  const tuned = tunedFor(calibrations[0]);
  const share = answerable ?? tuned;
  const input = byId("share");
  if (answerable === null) input.value = toSlider(tuned);
  input.setAttribute("aria-valuetext", inHundred(share));
  byId("share-value").textContent = `Expects ${inHundred(share)} questions to have an answer${answerable === null ? ", as tuned" : ""}.`;
  byId("share-reset").hidden = answerable === null;
  const turns = entry.results.map((result, number) => turningPoint(result, calibrations[number]));
  byId("share-turn").hidden = turns[0] === null;
  if (turns[0] !== null) byId("share-turn").style.setProperty("--at", (toSlider(turns[0]) - LOWEST) / (HIGHEST - LOWEST));
  byId("share-effect").textContent = effect(turns, entry.results);
}

function effect(turns, results) {
  if (results.length > 1) {
    const parts = turns.map((turn, number) => (turn === null ? null : `${LETTERS[number]} from ${inHundred(turn)} on`));
    return parts.some(Boolean) ? `This question is answered by ${parts.filter(Boolean).join(", by ")}.` :
      "No setting changes the answers to this question.";
  }
  if (turns[0] === null) return "No setting changes the answer to this question.";
  return `This question is answered from ${inHundred(turns[0])} on.`;
}
