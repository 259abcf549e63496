// The description of the API: every route of openapi.json, with its fields and a request that can be sent.

import {WRONG_KEY, fitsHeader, storedKey, watchKey} from "./api.js";
import {byId, make, showProblem} from "./dom.js";

const api = await (await fetch("openapi.json")).json();
watchKey(() => {});
byId("about").append(...prose(api.info.description));
byId("routes").append(...Object.entries(api.paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, route]) => drawRoute(method.toUpperCase(), path, route))));

function drawRoute(method, path, route) {
  const [first, ...more] = (route.description ?? route.summary).split("\n\n");
  const [type, content] = Object.entries(route.requestBody?.content ?? {})[0] ?? [];
  const schema = resolve(content?.schema);
  const parameters = (route.parameters ?? []).map((parameter) => [parameter, make("input", {type: "text", required: parameter.required})]);
  const body = !type ? null : schema ? make("textarea", {spellcheck: "false"}, pretty(exampleOf(schema))) : make("input", {type: "file"});
  const output = make("pre", {hidden: true, tabindex: "0", "aria-live": "polite"});
  const send = async (event) => {
    event.preventDefault();
    const values = parameters.map(([{name, in: place}, input]) => ({name, place, value: encodeURIComponent(input.value)}));
    const filled = values.reduce((address, {name, value}) => address.replace(`{${name}}`, value), path);
    const query = values.filter(({place}) => place === "query").map(({name, value}) => `${name}=${value}`).join("&");
    output.textContent = await answerTo(method, `.${filled}${query && `?${query}`}`, type, schema ? body.value : body?.files[0]);
    output.hidden = false;
  };
  return make("details", {class: "route"},
    make("summary", {}, make("code", {}, `${method} ${path}`), make("span", {class: "quiet"}, prose(first))),
    make("form", {onsubmit: send},
      more.map((paragraph) => make("p", {}, prose(paragraph))),
      schema ? fields(schema) : null,
      parameters.map(([{name}, input]) => make("label", {}, name, input)),
      body ? make("label", {}, schema ? "Body" : "File", body) : null,
      make("button", {class: "primary small"}, "Send"), output,
      make("p", {class: "quiet"}, `Responses: ${Object.entries(route.responses).map(([status, {description}]) =>
        `${status} ${description.replace(/\.$/, "")}`).join("; ")}.`)));
}

/** Send a request, and return the status and the content of its response, or why there is none. */
async function answerTo(method, address, type, body) {
  const key = storedKey();
  const headers = {...(type && {"Content-Type": type}), ...(key && {Authorization: `Bearer ${key}`})};
  showProblem(fitsHeader(key) ? null : WRONG_KEY);
  if (!fitsHeader(key)) return "";
  try {
    const response = await fetch(address, {method, headers, body});
    const text = await response.text();
    try {
      return `${response.status}\n\n${pretty(JSON.parse(text))}`;
    } catch {  // lines of JSON, or figures
      return `${response.status}\n\n${text}`;
    }
  } catch {
    showProblem("The server does not answer; check that it is running, then try again.");
    return "";
  }
}

function fields({properties = {}, required = []}) {
  const rows = Object.entries(properties).map(([name, schema]) => make("tr", {}, make("th", {scope: "row"}, make("code", {}, name)),
    make("td", {}, typeOf(schema), required.includes(name) ? ", required" : ""), make("td", {}, prose(schema.description ?? ""))));
  const heads = ["field", "type", "meaning"].map((text) => make("th", {scope: "col"}, text));
  return make("div", {class: "scroll"}, make("table", {class: "fields"}, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows)));
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((name) => name !== "null").join(" or ");
  return schema.type === "array" ? `list of ${typeOf(schema.items)}${schema.items.type ? "s" : ""}` : schema.type ?? "any";
}

/** Return an example of a body: the schema's own, or one of the examples of its fields. */
function exampleOf(schema) {
  if (schema.examples) return schema.examples[0];
  const given = Object.entries(schema.properties ?? {}).filter(([, field]) => field.examples);
  return Object.fromEntries(given.map(([name, field]) => [name, field.examples[0]]));
}

function resolve(schema) {
  return schema?.$ref ? api.components.schemas[schema.$ref.split("/").at(-1)] : schema;
}

/** Return a text as nodes, with `code` in its own type. */
function prose(text) {
  return text.split("`").map((part, number) => (number % 2 ? make("code", {}, part) : part));
}

function pretty(value) {
  return JSON.stringify(value, null, 2);
}
