// Adapt the reader to the corrections: start, progress, verdict, and the decision to keep it or not.

import {call} from "./api.js";
import {counted, make, showProblem, speak} from "./dom.js";

const EVERY = 1000;  // milliseconds between looks at a running adaptation
const FEW = 30;  // questions below which an interval would promise too much
let timer = null;
let naming = null;  // {job, field}: the field for the name of an adapted reader, kept with what is typed into it

/** Return what can be done with the corrections now; `load` reads their state again. */
export function adaptation(state, page, load) {
  const {corrections, least, adaptation: job} = state;
  clearTimeout(timer);
  if (job) return shown(job, page, load);
  const count = corrections.length;
  if (count < least) {
    const gauge = make("progress", {max: least, value: count, "aria-label": "Corrections"});
    return make("div", {class: "adapt"}, gauge,
      make("p", {class: "quiet"}, `${counted(count, "correction")}. From ${least} on, the reader can learn from them.`));
  }
  if (!state.can_adapt) return make("div", {class: "adapt"}, make("p", {class: "quiet"}, `${counted(count, "correction")}. ${state.why_not}`));
  const name = page.chosen();
  return make("div", {class: "adapt"},
    make("p", {class: "quiet"}, `${counted(count, "correction")}: two thirds to learn from, one third to check what that changes. Nothing is replaced unless you keep it.`),
    make("button", {type: "button", class: "primary", id: "adapt", onclick: async () => {
      await attempt(() => call("POST", "v1/adaptations", {model: name}));
      await load();
    }}, `Adapt the reader ${name}`));
}

function shown(job, page, load) {
  const discard = (label) => make("button", {type: "button", class: "second", onclick: async () => {
    await attempt(() => call("POST", `v1/adaptations/${job.id}/discard`));
    speak("Discarded");
    await load();
  }}, label);
  if (job.state === "training" || job.state === "scoring") {
    timer = setTimeout(async () => {
      const now = await attempt(() => call("GET", `v1/adaptations/${job.id}`));
      if (now) page.adaptationChanged(now);
      else await load();
    }, EVERY);
    const training = job.state === "training";
    return make("div", {class: "adapt"},
      make("p", {}, training ? `Learning from ${job.trained_on} corrections …` : `Checking on the ${job.left_out} left out …`),
      make("progress", {max: 1, value: training ? 0.9 * job.progress : 0.95, "aria-label": "Progress"}),
      make("p", {class: "quiet"}, "You can close this page and come back."), discard("Cancel"));
  }
  if (job.state === "failed") return make("div", {class: "adapt"}, make("p", {class: "notice"}, job.message), discard("Remove"));
  return verdict(job, page, load, discard("Discard"));
}

function verdict(job, page, load, discard) {
  const {verdict: found} = job;
  const row = (label, side, name) => {
    const bar = make("span", {class: `fill ${name}`});
    bar.style.inlineSize = `${100 * side.right / found.questions}%`;
    return make("tr", {}, make("th", {scope: "row"}, label), make("td", {class: "gauge"}, bar),
      make("td", {}, `${side.right} of ${found.questions}`), make("td", {}, side.f1.toFixed(0)));
  };
  if (naming?.job !== job.id) naming = {job: job.id, field: make("input",
    {type: "text", id: "new-name", value: freeName(job.model, page.models()), maxlength: 100, spellcheck: "false"})};
  const {field} = naming;
  const keep = make("button", {type: "button", class: "primary", onclick: async () => {
    const kept = await attempt(() => call("POST", `v1/adaptations/${job.id}/keep`, {name: field.value.trim()}));
    if (kept) {
      speak(`${kept.name} is ready`);
      await page.modelsChanged(kept.name);
    }
    await load();
  }}, "Keep");
  const {value, low, high} = found.f1_difference;
  return make("div", {class: "adapt"},
    make("table", {class: "verdict"}, make("caption", {}, `On ${counted(found.questions, "correction")} that were left out`),
      make("thead", {}, make("tr", {}, make("td", {}), make("td", {}), make("th", {scope: "col"}, "right"), make("th", {scope: "col"}, "F1"))),
      make("tbody", {}, row("before", found.before, "before"), row("after", found.after, "after"))),
    make("p", {class: `result ${found.result}`}, found.sentence),
    make("p", {class: "quiet"}, found.threshold.sentence),
    found.questions < FEW ? null : make("p", {class: "quiet"},
      `Difference in F1: ${signed(value)} (95 % interval ${signed(low)} to ${signed(high)}).`),
    make("div", {class: "line"}, make("label", {for: "new-name"}, "Keep it as"), field),
    make("div", {class: "line"}, keep, discard));
}

const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(0)}`;

function freeName(model, models) {
  for (let number = 1; ; number++) {
    const name = `${model}-adapted${number > 1 ? `-${number}` : ""}`;
    if (!models.has(name)) return name;
  }
}

async function attempt(action) {
  try {
    const value = await action();
    showProblem(null);
    return value;
  } catch (error) {
    showProblem(error.message);
    return null;
  }
}
