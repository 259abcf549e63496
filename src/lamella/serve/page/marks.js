// Show a text with marked places, and find the place of a selection in it.

import {make} from "./dom.js";

const GAPS = /\n[^\S\n]*(?:\n[^\S\n]*)+|\n(?=[^\S\n]*(?:[-*+•]|\d{1,3}[.)]) )/g;  // blank lines; the lines before items of a list
const ITEM = /^\s*(?:[-*+•]|\d{1,3}[.)]) /;
const WRAPPED = {least: 50, most: 180};  // characters per line of a text that was wrapped by hand

/**
 * Return the blocks of a text as elements. A mark is {start, end, kind, label?}, in UTF-16 units; where marks overlap,
 * a piece has the kinds of all. The text in the elements is exactly the source's, so that selections can be located.
 */
export function blocksOf(text, marks) {
  const blocks = [];
  let start = 0;
  for (const gap of [...text.matchAll(GAPS), {index: text.length, 0: ""}]) {
    if (text.slice(start, gap.index).trim()) blocks.push(block(text, start, gap.index, marks));
    start = gap.index + gap[0].length;
  }
  return blocks;
}

function block(text, start, end, marks) {
  const lines = text.slice(start, end).split("\n");
  const wrapped = lines.length > 1 && lines.slice(0, -1).every(
    (line) => line.length >= WRAPPED.least && line.length <= WRAPPED.most && !line.startsWith("|"));  // not a table
  const kinds = {heading: lines.length === 1 && /^#{1,4} /.test(lines[0]), item: ITEM.test(lines[0]), flow: wrapped};
  const element = make("p", {"data-start": start, dir: "auto", class: Object.keys(kinds).filter((kind) => kinds[kind]).join(" ") || null});
  const here = marks.filter((mark) => mark.start < end && mark.end > start);
  const cuts = new Set([start, end]);
  for (const mark of here) cuts.add(Math.max(start, mark.start)).add(Math.min(end, mark.end));
  const places = [...cuts].sort((one, other) => one - other);
  for (let number = 0; number + 1 < places.length; number++) {
    const [from, to] = [places[number], places[number + 1]];
    const covering = here.filter((mark) => mark.start <= from && mark.end >= to);
    const piece = text.slice(from, to);
    element.append(covering.length ? markElement(piece, covering, to) : piece);
  }
  return element;
}

function markElement(piece, covering, end) {
  const kinds = [...new Set(covering.map((mark) => mark.kind))];
  if (kinds.length > 1 && kinds.includes("other")) kinds.splice(kinds.indexOf("other"), 1);
  const labels = covering.filter((mark) => mark.label && mark.end === end).map((mark) => mark.label);
  return make("mark", {class: kinds.join(" "), "data-label": labels.join("") || null, title: covering[0].title}, piece);
}

/** Return the selection within an element that `blocksOf` filled, as {start, end} without white space at its ends. */
export function selectedPlace(element, text) {
  const selection = getSelection();
  if (!selection.rangeCount) return null;
  const range = selection.getRangeAt(0);
  if (!element.contains(range.startContainer) || !element.contains(range.endContainer)) return null;
  let start = place(element, range.startContainer, range.startOffset, true);
  let end = place(element, range.endContainer, range.endOffset, false);
  if (start === null || end === null) return null;
  while (start < end && /\s/.test(text[start])) start++;
  while (end > start && /\s/.test(text[end - 1])) end--;
  return end > start ? {start, end} : null;
}

/** Select a place of the text. */
export function selectPlace(element, {start, end}) {
  const [from, to] = [boundary(element, start, false), boundary(element, end, true)];
  if (from && to) getSelection().setBaseAndExtent(...from, ...to);
}

function place(element, node, offset, isStart) {
  if (node.nodeType !== Node.TEXT_NODE) {  // between elements: take the text that follows, or the text before
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    const point = document.createRange();
    point.setStart(node, offset);
    let before = null;
    for (let next = walker.nextNode(); next; next = walker.nextNode()) {
      if (point.comparePoint(next, 0) >= 0) {
        if (isStart) return place(element, next, 0, true);
        break;
      }
      before = next;
    }
    return before ? place(element, before, before.length, isStart) : null;
  }
  const parent = node.parentElement.closest("[data-start]");
  const range = document.createRange();
  range.setStart(parent, 0);
  range.setEnd(node, offset);
  return Number(parent.dataset.start) + range.toString().length;
}

function boundary(element, offset, isEnd) {
  const blocks = [...element.querySelectorAll("[data-start]")];
  const parent = blocks.findLast((item) => (isEnd ? item.dataset.start < offset : item.dataset.start <= offset));
  if (!parent) return null;
  let rest = offset - parent.dataset.start;
  const walker = document.createTreeWalker(parent, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (rest < node.length || (isEnd && rest === node.length)) return [node, rest];
    rest -= node.length;
  }
  return null;
}
