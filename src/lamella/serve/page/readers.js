// Choose the readers that answer: one, or several side by side.

import {LETTERS} from "./answers.js";
import {byId, keepingFocus, make} from "./dom.js";

const SHOWN_AT_ONCE = 6;  // more are found by typing

/** Draw the choice of readers; `onChange` gets the names that are chosen. */
export function drawReaders(models, chosen, onChange) {
  const names = [...models.keys()];
  if (names.length < 2) {
    byId("readers").replaceChildren();
    return;
  }
  const full = chosen.length >= LETTERS.length;
  const toggle = (name) => onChange(chosen.includes(name) ? chosen.filter((item) => item !== name) : [...chosen, name]);
  const listed = names.length <= SHOWN_AT_ONCE ? names : chosen;
  const boxes = listed.map((name) => {
    const on = chosen.includes(name);
    const letter = on && chosen.length > 1 ? make("span", {class: `letter r${chosen.indexOf(name)}`}, LETTERS[chosen.indexOf(name)]) : null;
    return make("label", {class: "reader"}, make("input", {type: "checkbox", checked: on, value: name,
      disabled: on ? chosen.length === 1 : full, onchange: () => toggle(name)}), letter, name);
  });
  const search = names.length > SHOWN_AT_ONCE && !full ? [
    make("input", {list: "reader-names", id: "add-reader", "aria-label": "Add a reader", placeholder: "add a reader",
      onchange: (event) => { if (models.has(event.target.value) && !chosen.includes(event.target.value)) toggle(event.target.value); }}),
    make("datalist", {id: "reader-names"}, names.map((name) => make("option", {value: name}))),
  ] : [];
  keepingFocus(byId("readers"), () => byId("readers").replaceChildren(make("fieldset", {class: "readers"},
    make("legend", {}, "Readers", make("span", {class: "quiet"}, " · choose several to compare")), boxes, search)));
}
