// Small helpers to build the page. Text is always set as text, never as HTML.

/** Create an element: `make("button", {class: "primary", onclick: send}, "Ask")`. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Show a share as a whole percentage; never 0 or 100, because a reader is never certain. */
export function percent(share) {
  if (share < 0.01) return "under 1\u00a0%";
  if (share > 0.99) return "over 99\u00a0%";
  return `${Math.round(100 * share)}\u00a0%`;
}

export const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** Report to screen readers what has changed. */
export function speak(sentence) {
  byId("spoken").textContent = sentence;
}

/** Show a problem in one line, or remove the line. */
export function showProblem(message) {
  byId("problem").textContent = message ?? "";
  byId("problem").hidden = !message;
  if (message) reveal(byId("problem"));
}

/** Bring an element into view. */
export const reveal = (element, block = "nearest") => settle(() => element.scrollIntoView({block}));

/** Scroll, and correct it: paragraphs out of view have an estimated height until they are drawn. */
export function settle(scroll, frames = 5) {
  scroll();
  if (frames) requestAnimationFrame(() => settle(scroll, frames - 1));
}

/** Draw a part of the page again; what had the focus in it has it afterwards. */
export function keepingFocus(part, draw) {
  const focused = part.contains(document.activeElement) ? keyOf(document.activeElement) : null;
  draw();
  if (focused) [...part.querySelectorAll("button, input, summary")].find((element) => keyOf(element) === focused)?.focus();
}

const keyOf = (element) =>
  [element.tagName, element.id, element.ariaLabel, element.type === "checkbox" ? element.value : element.textContent].join();

/** Copy a text; the button confirms it for a moment. */
export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {  // not allowed outside of https and localhost
    button.textContent = "Select the lines and press Ctrl+C";
  }
  speak(button.textContent);
  setTimeout(() => { button.textContent = label; }, 2500);
}
