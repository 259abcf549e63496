// The question as a program would send it: curl, Python, and the JSON that comes back.

import {copy, make} from "./dom.js";

/** Return the section "Use it from a program". */
export function programs(entry, needsKey) {
  const kinds = {curl: curl(entry, needsKey), Python: python(entry, needsKey), JSON: JSON.stringify(entry.response, null, 2)};
  const code = make("code", {}, kinds.curl);
  const buttons = Object.keys(kinds).map((kind, number) =>
    make("button", {type: "button", class: "choice", "aria-pressed": String(number === 0), onclick: (event) => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      code.textContent = kinds[kind];
    }}, kind));
  const button = make("button", {type: "button", class: "plain", id: "copy", onclick: (event) => copy(code.textContent, event.currentTarget)}, "Copy");
  return make("details", {class: "fold"}, make("summary", {}, "Use it from a program"),
    make("div", {class: "choices", role: "group", "aria-label": "Language"}, buttons, button),
    make("pre", {tabindex: 0}, code));
}

const address = () => new URL("v1/ask", document.baseURI).href;

function curl({request}, needsKey) {
  const quoted = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $LAMELLA_KEY"` : "";
  return `curl ${address()} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
}

function python({request}, needsKey) {
  const lines = ["import json", ...(needsKey ? ["import os"] : []), "import urllib.request", "", `request = ${literal(request)}`];
  const headers = needsKey
    ? `{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["LAMELLA_KEY"]}`
    : `{"Content-Type": "application/json"}`;
  lines.push(`headers = ${headers}`, `call = urllib.request.Request("${address()}", json.dumps(request).encode(), headers)`,
    "with urllib.request.urlopen(call) as response:", "    result = json.load(response)[\"results\"][0]",
    "print(\"no answer\" if result[\"no_answer\"] else result[\"answers\"][0][\"answer\"])");
  return lines.join("\n");
}

/** Return a value as Python writes it: JSON's strings and numbers are Python's, its constants are not. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{\n${Object.entries(value).map(([key, item]) => `    ${JSON.stringify(key)}: ${literal(item)},`).join("\n")}\n}`;
  }
  return JSON.stringify(value);
}
