// The layers that an answer was read from, as a heat map: a row for each token, a column for each layer.

import {call} from "./api.js";
import {make} from "./dom.js";

/** Return the section; weights are requested when it is opened. */
export function layerMaps(entry, models) {
  const weighing = entry.results.map(({model}) => models.get(model)).filter((model) => model?.weighs_layers);
  const content = make("div", {class: "maps"});
  const fold = make("details", {class: "fold"}, make("summary", {}, "Which layers was it read from?"), content);
  let loaded = false;
  fold.addEventListener("toggle", async () => {
    if (!fold.open || loaded) return;
    loaded = true;
    if (!weighing.length) {
      content.replaceChildren(make("p", {class: "quiet"}, whyNot(entry)));
      return;
    }
    content.replaceChildren(make("p", {class: "quiet"}, "Reading the layers …"));
    const request = {...entry.request, model: weighing.map(({name}) => name), top_k: 1, layers: true};
    try {
      const {results} = await call("POST", "v1/ask", request);
      content.replaceChildren(explanation(), ...results.map((result) => section(result, results.length > 1)));
    } catch (error) {
      content.replaceChildren(make("p", {class: "quiet"}, error.message));
    }
  });
  return fold;
}

function whyNot({results}) {
  const subject = results.length > 1 ? "These readers use" : "This reader uses";
  return `${subject} only the last layer of the encoder. A reader whose head weighs the layers (mixer "dot" or "scalar_mix") shows them here.`;
}

const explanation = () => make("p", {class: "quiet"},
  "An encoder reads a text in several layers, one on top of the other. The stronger the colour, the more this reader relied on that layer for the word.");

function section(result, several) {
  const answer = result.answers.find((item) => item.layers) ?? (result.best_guess?.layers ? result.best_guess : null);
  const title = several ? [make("h3", {}, result.model)] : [];
  if (!answer) return make("div", {}, ...title, make("p", {class: "quiet"}, "No answer, so no layers to show."));
  return make("div", {}, ...title, ...Object.keys(answer.layers.tokens[0].weights).map((output) => map(answer.layers, output)));
}

function map({layers, tokens}, output) {
  const all = tokens.flatMap((token) => token.weights[output].map(Math.abs));
  const most = Math.max(...all, 1e-9);
  const rows = tokens.map((token) => make("tr", {}, make("th", {scope: "row"}, token.token),
    token.weights[output].map((weight, number) => {
      const cell = make("td", {title: `layer ${layers[number]}: ${weight.toFixed(3)}`, class: Math.abs(weight) / most > 0.55 ? "strong" : null},
        make("span", {}, weight.toFixed(2)));
      cell.style.setProperty("--weight", Math.abs(weight) / most);
      return cell;
    })));
  return make("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": `Layer weights, ${output}`},
    make("table", {class: "map"}, make("caption", {}, `for the ${output} of the answer`),
      make("thead", {}, make("tr", {}, make("th", {scope: "col"}, "layer"), layers.map((layer) => make("th", {scope: "col"}, String(layer))))),
      make("tbody", {}, rows)));
}
