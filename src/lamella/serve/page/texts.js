// The texts that are asked: pasted, opened or dropped, shown on the paper with the answers marked in them.

import {call} from "./api.js";
import {byId, counted, keepingFocus, make, reveal, settle, showProblem, speak} from "./dom.js";
import {blocksOf} from "./marks.js";
import {firstOf} from "./offsets.js";

const KINDS = /\.(txt|text|md|markdown|html?|pdf|docx)$/i;

export const texts = [];  // {id, name, text}
let shown = 0;
let editing = false;
let marks = [];  // {id, start, end, kind, label?, title?}
let changed = () => {};
let lastId = 0;

/** Connect buttons, the clipboard and drag and drop; `onChange` is called when the texts are others. */
export function startTexts(onChange) {
  changed = onChange;
  byId("new-text").addEventListener("click", () => addText("", ""));
  byId("open-file").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", (event) => {
    open([...event.target.files]);
    event.target.value = "";
  });
  document.addEventListener("paste", (event) => {
    if (event.target.closest?.("input, textarea, [contenteditable]")) return;
    if (event.clipboardData.files.length) open([...event.clipboardData.files]);
    else if (event.clipboardData.getData("text/plain").trim()) addText("", event.clipboardData.getData("text/plain"));
  });
  let depth = 0;  // dragenter and dragleave are also sent for the elements inside
  let inside = false;  // words of this page that are dragged
  document.addEventListener("dragstart", () => { inside = true; });
  document.addEventListener("dragend", () => { inside = false; });
  const hasFiles = (event) => !inside && [...event.dataTransfer.types].some((type) => type === "Files" || type === "text/plain");
  document.addEventListener("dragenter", (event) => { if (hasFiles(event)) byId("drop").hidden = ++depth < 1; });
  document.addEventListener("dragleave", (event) => { if (hasFiles(event)) byId("drop").hidden = --depth < 1; });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    byId("drop").hidden = true;
    if (inside) return;
    if (event.dataTransfer.files.length) open([...event.dataTransfer.files]);
    else if (event.dataTransfer.getData("text/plain").trim()) addText("", event.dataTransfer.getData("text/plain"));
  });
}

/** Add a text and show it; an empty one is shown for editing. A sample makes room for the first text of one's own. */
export function addText(name, text, {sample = false} = {}) {
  const samples = texts.findIndex((item) => item.sample);
  if (samples >= 0 && !sample) texts.splice(samples, 1);
  const empty = texts.findIndex((item) => !item.text.trim());
  if (empty >= 0) texts.splice(empty, 1);
  texts.push({id: ++lastId, name: name || "", text: text.replace(/\r\n?/g, "\n"), sample});
  shown = texts.length - 1;
  editing = !text.trim();
  textsChanged();
  if (editing) byId("text").querySelector("textarea").focus();
}

/** Mark places in the texts, and show the text that the first of them is in. */
export function markPlaces(places) {
  const same = JSON.stringify(places) === JSON.stringify(marks) && byId("text").querySelector("mark");
  if (same) return;  // moving the slider rarely changes a mark, and drawing a long text takes time
  marks = places;
  const first = places.find((place) => place.kind !== "other") ?? places[0];
  const number = first ? texts.findIndex(({id}) => id === first.id) : -1;
  if (number >= 0) shown = number;
  editing = editing && !texts[shown]?.text.trim();
  draw();
  byId("text").querySelector("mark:not(.other)")?.closest("p") && showMark(false);
}

/** Bring the marked answer into view: always, or only if the paper scrolls by itself. */
export function showMark(always) {
  const mark = byId("text").querySelector("mark:not(.other)") ?? byId("text").querySelector("mark");
  if (!mark) return;
  if (always) reveal(mark, "center");
  else if (scrolls()) showPlace(mark);
}

/** Bring an element of the text into view: on the paper if it scrolls by itself, otherwise on the page. */
export function showPlace(element) {
  settle(() => {
    const paper = byId("text");
    if (!element.isConnected) return;  // the text has been drawn again
    const {top, bottom} = element.getBoundingClientRect();
    if (scrolls()) {
      const offset = top - paper.getBoundingClientRect().top;
      if (offset < 0 || offset > paper.clientHeight - 60) paper.scrollTop += offset - paper.clientHeight / 3;
    } else if (top < byId("marking").offsetHeight || bottom > innerHeight) element.scrollIntoView({block: "center"});
  });
}

const scrolls = () => byId("text").scrollHeight > byId("text").clientHeight + 1;

/** Show a text by its id, as it is when it is read. */
export function showText(id) {
  const number = texts.findIndex((item) => item.id === id);
  if (number >= 0) shown = number;
  editing = false;
  draw();
}

export const shownText = () => texts[shown];
export const asked = () => texts.filter((item) => item.text.trim());
export const nameOf = (item) => item.name || titleOf(item.text);

async function open(files) {
  for (const file of files) {
    if (!KINDS.test(file.name)) {
      showProblem(`${file.name}: expected a text (txt, md, html, pdf, docx); save it as one of these.`);
      continue;
    }
    speak(`Opening ${file.name}`);
    try {
      const {text} = await call("POST", `v1/text?name=${encodeURIComponent(file.name)}`, file, "application/octet-stream");
      addText(file.name, text);
      showProblem(null);
      speak(`${file.name} is open`);
    } catch (error) {
      showProblem(error.message);
    }
  }
}

function textsChanged() {
  marks = [];
  draw();
  changed();
}

function draw() {
  const current = texts[shown];
  keepingFocus(byId("tabs"), () => byId("tabs").replaceChildren(...texts.map(tab)));
  const paper = byId("text");
  paper.classList.toggle("editing", editing);
  if (!current || editing) paper.replaceChildren(editor(current));
  else {
    const here = marks.filter((mark) => mark.id === current.id);
    paper.replaceChildren(make("div", {class: "words", tabindex: 0, role: "region", "aria-label": nameOf(current)},
      ...blocksOf(current.text, here)), foot(current));
  }
}

function tab(item, number) {
  const found = marks.some((mark) => mark.id === item.id && mark.kind !== "other");
  const label = nameOf(item);
  return make("span", {class: `tab${number === shown ? " shown" : ""}`},
    make("button", {type: "button", class: "title", "aria-pressed": String(number === shown), title: label,
      onclick: () => { shown = number; editing = !item.text.trim(); draw(); }},
    label, found && texts.length > 1 ? make("span", {class: "dot", title: "an answer is here"}) : null),
    make("button", {type: "button", class: "close", "aria-label": `Remove ${label}`, onclick: () => remove(number)}, "×"));
}

function remove(number) {
  texts.splice(number, 1);
  shown = Math.max(0, Math.min(shown, texts.length - 1));
  if (!texts.length) return addText("", "");
  textsChanged();
  byId("tabs").querySelectorAll(".title")[shown].focus();
}

function editor(current) {
  const field = make("textarea", {id: "editor", "aria-label": "Text", spellcheck: "false", dir: "auto",
    placeholder: "Paste or type a text here.\n\nOr drop files anywhere on this page: txt, md, html, pdf, docx.",
    value: current?.text ?? ""});
  const done = make("button", {type: "button", class: "primary small", onclick: () => finish(field.value)}, "Done");
  const size = make("span", {class: "quiet"}, field.value ? counted(field.value.length, "character") : "");
  field.addEventListener("input", () => {
    size.textContent = counted(field.value.length, "character");
    if (texts[shown]) texts[shown].text = field.value;  // so that a question can be asked at once
    marks = [];
    changed();
  });
  field.addEventListener("paste", () => {
    if (!field.value) setTimeout(() => finish(field.value));  // a whole text, and nothing to edit in it
  });
  return make("div", {class: "editor"}, field, make("div", {class: "foot"}, size, done));
}

/** Leave the editor and read the text. */
export function finishEditing() {
  const field = document.getElementById("editor");
  if (field && field.value.trim()) finish(field.value);
}

function finish(text) {
  if (!text.trim()) return;
  if (!texts.length) texts.push({id: ++lastId, name: "", text});
  texts[shown].text = text.replace(/\r\n?/g, "\n");
  editing = false;
  const inside = byId("text").contains(document.activeElement);
  textsChanged();
  if (inside) byId("text").querySelector(".words").focus({preventScroll: true});
}

function foot(current) {
  const words = (current.text.match(/\S+/g) ?? []).length;
  const edit = () => {
    editing = true;
    current.sample = false;
    draw();
    byId("editor").focus();
  };
  return make("div", {class: "foot"},
    make("span", {class: "quiet"}, current.sample ? "A sample text. Paste your own, or drop files on this page." :
      counted(words, "word").replace(/\d+/, (digits) => Number(digits).toLocaleString("en"))),
    make("button", {type: "button", class: "plain", onclick: edit}, "Edit"));
}

function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/^#+ /, "");
  if (!line) return "New text";
  return firstOf(line, 28) === line ? line : `${firstOf(line, 26).replace(/\s+\S*$/, "")} …`;
}
