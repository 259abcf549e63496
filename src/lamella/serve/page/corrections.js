// Correct answers: mark the right words or "no answer", keep them on the server, list and undo them.

import {call, respond} from "./api.js";
import {adaptation} from "./adaptation.js";
import {byId, keepingFocus, make, showProblem, speak} from "./dom.js";
import {selectedPlace, selectPlace} from "./marks.js";
import {firstOf, lastOf, pointsOf} from "./offsets.js";
import {showPlace, shownText, showText} from "./texts.js";

let state = null;  // {corrections, least, can_adapt, why_not}; null: this server keeps none
let follow = () => {};  // looks at the selection while an answer is marked
let page = null;  // what the page offers: {redraw, entries, chosen, models, modelsChanged}

/** Load the corrections, if the server keeps them. */
export async function startCorrections(offered, enabled) {
  page = {...offered, adaptationChanged};
  if (!enabled) return;
  await load();
}

async function load() {
  try {
    state = await call("GET", "v1/corrections");
  } catch (error) {
    showProblem(error.message);
  }
  drawCorrections();
}

async function reload() {
  await load();
  if (document.activeElement === document.body) focusList();
}

function adaptationChanged(now) {
  state.adaptation = now;
  drawCorrections();
}

/** Return the line below an answer that asks whether it is right; nothing if the server keeps no corrections. */
export function judgement(entry, reading, several) {
  if (!state) return null;
  const {best, guess} = reading;
  if (entry.kept) {
    return make("p", {class: "judge kept", role: "status"}, make("span", {class: "tick", "aria-hidden": "true"}, "✓ "),
      `Kept: ${entry.kept.answer ?? "no answer"}`, " ",
      make("button", {type: "button", class: "plain", onclick: () => undo(entry.kept.ids, entry)}, "Undo"));
  }
  const button = (label, explained, action, id) =>
    make("button", {type: "button", class: "second", id, title: explained, "aria-label": explained, onclick: action}, label);
  const ask = several ? "Is A right?" : "Is this right?";
  return make("div", {class: "judge", role: "group", "aria-label": ask},
    make("span", {}, ask),
    button("Yes", "Yes, keep it as right", () => (best ? keep(entry, best) : keepNone(entry, guess))),
    button("Mark it", "Mark the right answer in the text", () => startMarking(entry, best ?? guess), "mark-it"),
    best ? button("No answer", "The text has no answer", () => keepNone(entry, best))
      : guess ? button("The guess is", "The guess is right", () => keep(entry, guess)) : null);
}

async function keep(entry, {id, from, to}) {
  const item = entry.texts.find((text) => text.id === id);
  await send(entry, [{question: entry.question, context: item.text, start: pointsOf(item.text, from), end: pointsOf(item.text, to)}],
    item.text.slice(from, to));
}

async function keepNone(entry, near) {
  await send(entry, entry.texts.map((item) => ({question: entry.question, context: item.text, no_answer: true,
    ...(near?.id === item.id ? {near: pointsOf(item.text, near.from)} : {})})), null);
}

async function send(entry, bodies, answer) {
  stopMarking();
  try {
    const kept = [];
    for (const body of bodies) kept.push(await call("POST", "v1/corrections", body));
    entry.kept = {ids: kept.map(({id}) => id), answer};
    showProblem(null);
    speak(`Kept: ${answer ?? "no answer"}`);
  } catch (error) {
    showProblem(error.message);
  }
  await load();
  page.redraw();
  byId("answer").querySelector(".judge button")?.focus();  // the button that was pressed is gone
}

async function undo(ids, entry) {
  try {
    for (const id of ids) await call("DELETE", `v1/corrections/${encodeURIComponent(id)}`);
    speak("Removed");
  } catch (error) {
    showProblem(error.message);
  }
  const owner = entry ?? page.entries().find((item) => item.kept?.ids.includes(ids[0]));
  if (owner) owner.kept = null;
  await load();
  page.redraw();
  focusList();
}

/** Focus the list of corrections, where a button that was pressed is gone. */
const focusList = () => (byId("corrections").querySelector("summary") ?? byId("question")).focus();

// Marking: the text becomes a read-only editor, so that a caret and a selection work with keys, mouse and touch.
function startMarking(entry, near) {
  const first = near ?? {id: entry.texts[0].id};
  showText(first.id);
  const words = byId("text").querySelector(".words");
  const shown = entry.texts.find(({id}) => id === first.id);
  const attributes = {contenteditable: "true", role: "textbox", "aria-multiline": "true", "aria-readonly": "true", spellcheck: "false",
    "aria-label": `${shown.name}: select the words that answer the question`};
  for (const [name, value] of Object.entries(attributes)) words.setAttribute(name, value);
  for (const type of ["beforeinput", "drop", "paste", "cut"]) words.addEventListener(type, (event) => event.preventDefault());
  const confirm = make("button", {type: "button", class: "primary small", disabled: true}, "Keep");
  const leave = () => {
    stopMarking();
    page.redraw();
    byId("mark-it")?.focus();
  };
  const cancel = make("button", {type: "button", class: "plain", onclick: leave}, "Cancel");
  const chosen = make("span", {class: "chosen"});
  let place = null;
  document.removeEventListener("selectionchange", follow);
  follow = () => {
    const now = selectedPlace(words, shown.text);
    if (!now && place) return;  // a click on the button below moves the selection away
    place = now;
    confirm.disabled = !place;
    chosen.textContent = place ? `“${shorten(shown.text.slice(place.start, place.end))}”` : "Select the words that answer the question.";
  };
  const done = () => {
    follow();  // the browser may not have reported the last change of the selection yet
    if (place) keep(entry, {id: shown.id, from: place.start, to: place.end});
  };
  confirm.addEventListener("click", done);
  document.addEventListener("selectionchange", follow);
  words.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); done(); }
    if (event.key === "Escape") leave();
  });
  const others = entry.texts.length > 1 ? make("label", {class: "which"}, "in ", make("select", {onchange: (event) =>
    startMarking(entry, {id: Number(event.target.value)})}, entry.texts.map((item) => {
    const option = make("option", {value: item.id}, item.name);
    option.selected = item.id === shown.id;
    return option;
  }))) : null;
  byId("marking").replaceChildren(make("div", {class: "marking", role: "group", "aria-label": "Mark the answer"}, chosen, others, confirm, cancel));
  words.focus({preventScroll: true});
  if (near?.from !== undefined) selectPlace(words, {start: near.from, end: near.to});
  follow();
  showPlace((near?.from === undefined ? null : words.querySelector("mark:not(.other)")) ?? words.firstElementChild);
}

/** Leave the marking of an answer. */
export function stopMarking() {
  if (!byId("marking").firstChild) return;
  byId("marking").replaceChildren();
  document.removeEventListener("selectionchange", follow);
  if (byId("text").querySelector(".words[contenteditable]")) showText(shownText().id);  // unless it is drawn already
}

const shorten = (text) => (firstOf(text, 60) === text ? text : `${firstOf(text, 40)} … ${lastOf(text, 15)}`);

/** Draw the list of corrections, and what can be done with them. */
export function drawCorrections() {
  if (!state || (!state.corrections.length && !state.adaptation)) {
    byId("corrections").replaceChildren();
    return;
  }
  const count = state.corrections.length;
  const list = make("ul", {class: "kept-list"}, state.corrections.map(({id, question, answer}) => make("li", {},
    make("span", {class: "asked"}, question), make("span", {class: "given"}, answer ?? "no answer"),
    make("button", {type: "button", class: "plain", "aria-label": `Undo: ${question}`, onclick: () => undo([id])}, "Undo"))));
  const open = byId("corrections").querySelector("details")?.open ?? false;
  keepingFocus(byId("corrections"), () => byId("corrections").replaceChildren(
    make("h2", {}, "Your corrections"),
    adaptation(state, page, reload),
    make("details", {class: "fold slim", open}, make("summary", {}, `Show ${count === 1 ? "it" : `all ${count}`}`), list,
      make("button", {type: "button", class: "plain", onclick: download}, "Download as a SQuAD file"))));
}

async function download() {
  try {
    const file = await (await respond("GET", "v1/corrections/squad.json")).blob();
    const link = make("a", {href: URL.createObjectURL(file), download: "corrections.json"});
    link.click();
    URL.revokeObjectURL(link.href);
    showProblem(null);
  } catch (error) {
    showProblem(error.message);
  }
}
