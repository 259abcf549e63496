"use strict";
// Draws the report from the JSON in the same file. Texts are inserted as text, never as markup.
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const runs = content.runs;
  const main = document.getElementById("report");
  const NAMES = {
    exact: "EM", f1: "F1", best_exact: "best EM", best_f1: "best F1",
    question_exact: "EM per question", question_f1: "F1 per question", HasAns_exact: "HasAns EM", HasAns_f1: "HasAns F1",
    NoAns_exact: "NoAns EM", NoAns_f1: "NoAns F1", pr_f1_ap: "average precision (F1)",
    answerability_accuracy: "answerability accuracy", answerability_f1: "no-answer F1", ece: "ECE",
    threshold: "threshold", epoch: "epoch",
  };
  const COSTS = {
    parameters: "trained parameters", train_seconds: "training, s", inference_seconds: "inference, s per 1,000 questions",
  };
  const COST_PLOTS = { parameters: "By parameters", train_seconds: "By training time", inference_seconds: "By inference time" };
  const TIMES = ["train_seconds", "inference_seconds"]; // depend on the device, so they are ranked for each device apart
  const MANY = 12; // the most curves that can be distinguished by colour and dashes
  const MOST_MIXES = 20; // runs in the heat map
  const FEW_SAMPLES = 6;
  const MOST_NAMES = 40; // points with their names in a plot
  const NAME_PLACES = [[0, -15], [-1, 0], [1, -12], [-1, -12], [1, 0], [0, 15], [1, 12], [-1, 12], [0, -28], [1, -26], [-1, -26], [0, 28], [1, 26], [-1, 26]]; // side, and pixels below: a front runs to the right and up
  const COLOURS = { // distinct for colour-blind eyes; as many dashed lines follow the solid ones
    light: ["#1f6f8b", "#d97918", "#a3171c", "#18a673", "#7782f3", "#5a24d6"],
    dark: ["#6cc0da", "#f0932b", "#c077f5", "#8ff0a0", "#c76b80", "#7f9f57"],
  };
  const scoreKeys = Object.keys(NAMES).filter((key) => runs.some((run) => key in run.scores));
  const qualities = scoreKeys.filter((key) => !["ece", "threshold", "epoch"].includes(key));
  const darkScreen = window.matchMedia("(prefers-color-scheme: dark)");
  const drawings = []; // functions to call when the colours change
  const decides = (run) => run.task === "answerability"; // it only decides whether there is an answer
  const decisionScores = runs.some(decides) ? ["answerability_accuracy", "answerability_f1"] : [];
  let metric = content.metric in NAMES ? content.metric : "f1";
  let printing = false;

  // Helpers

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  function format(value, digits) {
    if (value === null || value === undefined || value === "") return "–";
    if (typeof value !== "number") return String(value);
    if (digits !== undefined) return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential() : value.toLocaleString("en", { maximumFractionDigits: 4 });
  }

  const scoreOf = (run, key = metric) => run.scores[key];
  const hasScore = (run) => typeof scoreOf(run) === "number";
  const ranked = () => [...runs].sort((a, b) => (scoreOf(b) ?? -1) - (scoreOf(a) ?? -1));
  const shortKey = (key) => key.split(".").pop().replaceAll("_", " ");

  function section(id, title, text) {
    const element = make("section", { id }, make("h2", {}, title));
    if (text) element.append(make("p", { class: "quiet" }, text));
    main.append(element);
    document.getElementById("contents").append(make("a", { href: `#${id}` }, title));
    return element;
  }

  function chooser(label, values, chosen, onChoice) {
    const select = make("select", { onchange: () => onChoice(select.value) });
    for (const [value, name] of values) {
      const option = make("option", { value }, name);
      option.selected = value === chosen;
      select.append(option);
    }
    return make("label", {}, label, select);
  }

  // Plots

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  function isDark() {
    return darkScreen.matches && !printing;
  }

  function palette(index) {
    const colours = COLOURS[isDark() ? "dark" : "light"];
    return colours[index % colours.length];
  }

  const isDashed = (index) => index % MANY >= COLOURS.light.length;
  const stroke = (index, more) => ({ color: palette(index), dash: isDashed(index) ? "dash" : "solid", ...more });

  function theme() {
    if (!printing) return Object.fromEntries(["ink", "quiet", "line", "grid", "card", "accent", "faint", "good", "bad"].map((name) => [name, colour(name)]));
    return { ink: "#1c2126", quiet: "#5d6871", line: "#dfe3e6", grid: "#e9ecee", card: "#ffffff", accent: "#1f6f8b", faint: "#aab4bb", good: "#1d7a46", bad: "#b3382c" };
  }

  function axis(title, colours, more = {}) {
    return {
      title: { text: title, standoff: 8, font: { size: 12.5 } }, gridcolor: colours.grid, linecolor: colours.line, zeroline: false,
      automargin: true, ticks: "outside", tickcolor: colours.line, ticklen: 4, ...more,
    };
  }

  // `draw` returns {traces, layout} for the current colours; it is called again whenever these change.
  function plot(parent, title, draw, { wide = false, caption = "" } = {}) {
    const area = make("div", { class: "plot", role: "img", "aria-label": title });
    const figure = make("div", { class: wide ? "card wide" : "card" }, make("h3", {}, title), area);
    if (caption) figure.append(make("p", { class: "quiet" }, caption));
    parent.append(figure);
    const redraw = () => {
      const colours = theme();
      const { traces, layout, height } = draw(colours);
      if (height) area.style.height = `${height}px`;
      return Plotly.react(area, traces, {
        autosize: true, width: printing ? area.clientWidth : undefined,
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 54, r: 14, t: 10, b: 46 },
        font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colours.quiet },
        hoverlabel: { align: "left", bgcolor: colours.card, bordercolor: colours.line, font: { color: colours.ink, size: 12.5 } },
        showlegend: false, hovermode: "closest",
        dragmode: window.matchMedia("(hover: none)").matches ? false : "zoom", // a finger scrolls the page
        ...layout,
      }, { responsive: true, displayModeBar: false });
    };
    drawings.push(redraw); // drawn first once the document is laid out and the width of each plot is known
    return redraw;
  }

  // The names for the first strokes of the palette, below the plots: Plotly's own legend has no room on a phone.
  function legend(parent, names) {
    const list = make("p", { class: "quiet legend" });
    parent.append(list);
    const redraw = () => list.replaceChildren(...names().map((name, index) => make("span", {}, make("i", { style: `background:${isDashed(index) ? `repeating-linear-gradient(90deg, ${palette(index)} 0 4px, transparent 4px 6px)` : palette(index)}` }), name)));
    drawings.push(redraw);
    return redraw;
  }

  // Plotly interprets a few tags in its texts; the names of runs must stay text.
  const plain = (value) => String(value).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  function hover(run) {
    const options = Object.entries(run.options).map(([key, value]) => `${shortKey(key)}: ${plain(format(value))}`);
    const scores = ["exact", "f1", "question_exact", "question_f1", "best_f1", "HasAns_f1", "NoAns_f1", ...decisionScores].filter((key) => key in run.scores)
      .map((key) => `${NAMES[key]} ${format(run.scores[key], 2)}`);
    const costs = Object.keys(COSTS).filter((key) => key in run.cost).map((key) => `${COSTS[key]}: ${format(run.cost[key])}`);
    const device = run.device && TIMES.some((key) => key in run.cost) ? [`timed on ${plain(run.device)}`] : [];
    return [`<b>${plain(run.name)}</b>`, ...options, scores.join(" · "), ...costs, ...device].join("<br>");
  }

  // Tables

  function table(columns, rows, { tall = false, best = null, sorted = null } = {}) {
    const body = make("tbody");
    const head = make("tr");
    let order = sorted;
    const fill = () => {
      const lines = [...rows];
      if (order) {
        const get = columns[order.column].get;
        const missing = (value) => value === null || value === undefined || value === "";
        lines.sort((a, b) => {
          const [x, y] = [get(a), get(b)];
          if (missing(x) || missing(y)) return missing(x) - missing(y);
          const result = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
          return order.down ? -result : result;
        });
      }
      body.replaceChildren(...lines.map((row) => make("tr", row === best ? { class: "best" } : {}, ...columns.map((column) => {
        const text = format(column.get(row), column.digits);
        return make("td", column.text ? { class: "text", title: text } : {}, text);
      }))));
      [...head.children].forEach((cell, index) => {
        if (order && order.column === index) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
        else cell.setAttribute("aria-sort", "none");
      });
    };
    columns.forEach((column, index) => {
      const sort = () => {
        order = { column: index, down: order && order.column === index ? !order.down : !column.text };
        fill();
      };
      head.append(make("th", { scope: "col", ...(column.text ? { class: "text" } : {}) }, make("button", { type: "button", onclick: sort }, column.name)));
    });
    fill();
    return make("div", { class: tall ? "scroll tall" : "scroll", tabindex: "0" }, make("table", {}, make("thead", {}, head), body));
  }

  // Sections

  function about() {
    const data = [...new Set(runs.map((run) => run.data).filter(Boolean))];
    document.getElementById("about").textContent =
      `${runs.length} run${runs.length === 1 ? "" : "s"}${data.length ? ` scored on ${data.join(", ")}` : ""}. Created on ${content.made}.`;
    document.getElementById("foot").textContent = `Created by Lamella ${content.lamella}. This file is self-contained.`;
    const best = ranked()[0];
    if (!hasScore(best)) return;
    const tiles = make("div", { class: "tiles" });
    const tile = (value, name, wide) => tiles.append(make("div", { class: wide ? "tile wide-text" : "tile" }, make("b", {}, value), make("span", {}, name)));
    tile(best.name, runs.length > 1 ? `best of ${runs.length} runs by ${NAMES[metric]}` : "run", true);
    for (const key of [...new Set([metric, ...decisionScores, "f1", "exact", "question_f1", "question_exact"])].filter((key) => key in best.scores)) tile(format(best.scores[key], 2), `${NAMES[key]}, %`);
    if (best.cost.parameters) tile(format(best.cost.parameters), COSTS.parameters);
    if (best.questions) tile(format(best.questions), "questions");
    main.append(tiles);
  }

  function allRuns() {
    const where = section("runs", "Runs", "Click a heading to sort by it; click again to reverse the order.");
    const shown = [...new Set([metric, ...decisionScores, "f1", "exact", "question_f1", "question_exact", "best_f1", "HasAns_f1", "NoAns_f1", "ece", "epoch"])].filter((key) => scoreKeys.includes(key));
    const columns = [
      { name: "run", text: true, get: (run) => run.name },
      ...shown.map((key) => ({ name: NAMES[key], digits: 2, get: (run) => run.scores[key] })),
      ...Object.keys(COSTS).filter((key) => runs.some((run) => key in run.cost)).map((key) => ({ name: COSTS[key], digits: key === "parameters" ? 0 : 1, get: (run) => run.cost[key] })),
      ...(runs.some((run) => run.efficiency !== null) ? [{ name: "(F1 − 50) / log₁₀ parameters", digits: 2, get: (run) => run.efficiency }] : []),
      ...(runs.some((run) => run.device) ? [{ name: "timed on", text: true, get: (run) => run.device }] : []),
      ...content.varied.slice(0, 6).map((key) => ({ name: shortKey(key), text: runs.some((run) => typeof run.options[key] === "string"), get: (run) => run.options[key] })),
      ...(runs.some((run) => run.state !== "finished") ? [{ name: "state", text: true, get: (run) => run.state }] : []),
    ];
    const column = columns.findIndex(({ name }) => name === NAMES[metric]);
    where.append(make("div", { class: "card flows", id: "runs-table" }, table(columns, runs, { tall: true, best: ranked().find(hasScore), sorted: { column: Math.max(column, 0), down: column > 0 } })));
  }

  function tradeOffs() {
    const costs = Object.keys(COSTS).filter((key) => new Set(runs.filter(hasScore).map((run) => run.cost[key]).filter((x) => x > 0)).size > 1);
    if (!costs.length) return;
    const where = section("trade-offs", "Quality and cost", "The line connects the runs that no other run of the same cost or less beats. Higher and further left is better. Costs with a wide range have a logarithmic axis. Times are compared only between runs on the same device. Drag to zoom in, double-click to reset.");
    const redrawCosts = [];
    where.append(make("div", { class: "controls" }, chooser("Score", qualities.map((key) => [key, NAMES[key]]), metric, (value) => {
      metric = value;
      redrawCosts.forEach((redraw) => redraw());
    })));
    const grid = make("div", { class: "grid" });
    where.append(grid);
    for (const cost of costs) {
      const devices = TIMES.includes(cost) ? [...new Set(runs.filter((run) => run.cost[cost] > 0 && qualities.some((key) => key in run.scores)).map((run) => run.device))] : [null];
      redrawCosts.push(plot(grid, COST_PLOTS[cost], (colours) => {
        const points = runs.filter((run) => hasScore(run) && run.cost[cost] > 0).sort((a, b) => a.cost[cost] - b.cost[cost] || scoreOf(b) - scoreOf(a));
        const range = Math.max(...points.map((run) => run.cost[cost])) / Math.min(...points.map((run) => run.cost[cost]));
        const scale = range < 8 ? { type: "linear" } : { type: "log", dtick: range > 50 ? 1 : "D2", exponentformat: "SI" };
        const trace = (some, more) => ({ type: "scatter", x: some.map((run) => run.cost[cost]), y: some.map((run) => scoreOf(run)), text: some.map(hover), hovertemplate: "%{text}<extra></extra>", ...more });
        const traces = devices.flatMap((device, index) => {
          const comparable = devices.length > 1 ? points.filter((run) => run.device === device) : points;
          const colour = devices.length > 1 ? palette(index) : colours.accent;
          let top = -Infinity;
          const front = comparable.filter((run) => scoreOf(run) > top && ((top = scoreOf(run)), true));
          return [
            trace(comparable.filter((run) => !front.includes(run)), { mode: "markers", marker: { size: 9, color: devices.length > 1 ? colour : colours.faint, opacity: devices.length > 1 ? 0.35 : 0.75 } }),
            trace(front, { mode: "lines+markers", line: { shape: "hv", color: colour, width: 1.5 }, marker: { size: 11, color: colour, line: { color: colours.card, width: 1.5 } } }),
          ];
        });
        const names = pointNames(grid, points.map((run) => [run.name, run.cost[cost], scoreOf(run)]), scale.type === "log", colours);
        return { traces, layout: { xaxis: axis(COSTS[cost], colours, scale), yaxis: axis(`${NAMES[metric]}, %`, colours), annotations: names } };
      }));
      if (devices.length > 1) legend(grid.lastElementChild, () => devices.map((device) => device || "device not recorded"));
    }
    const efficient = runs.filter((run) => typeof run.efficiency === "number" && run.cost.parameters > 0);
    if (efficient.length > 1) {
      plot(grid, "Parameter efficiency", (colours) => ({
        traces: [{ type: "scatter", mode: "markers", x: efficient.map((run) => run.cost.parameters), y: efficient.map((run) => run.efficiency), text: efficient.map(hover), hovertemplate: "%{text}<extra></extra>", marker: { size: 10, color: colours.accent } }],
        layout: {
          xaxis: axis(COSTS.parameters, colours, { type: "log", exponentformat: "SI" }), yaxis: axis("(F1 − 50) / log₁₀ parameters", colours),
          annotations: pointNames(grid, efficient.map((run) => [run.name, run.cost.parameters, run.efficiency]), true, colours),
        },
      }));
    }
  }

  // The names of points as annotations, each at the first place around its point where it covers nothing; else left out.
  function pointNames(grid, points, log, colours) {
    if (points.length > MOST_NAMES || window.innerWidth < 560) return [];
    const [width, height] = [Math.max(240, grid.firstElementChild.clientWidth - 110), 270];
    const scaled = (values, size) => {
      const [low, high] = [Math.min(...values), Math.max(...values)];
      return values.map((value) => size * (0.06 + 0.88 * ((value - low) / (high - low || 1))));
    };
    const xs = scaled(points.map(([, x]) => (log ? Math.log10(x) : x)), width);
    const ys = scaled(points.map(([, , y]) => -y), height);
    const taken = xs.map((x, index) => [x - 7, ys[index] - 7, x + 7, ys[index] + 7]);
    const free = (box) => box[0] > -10 && box[2] < width + 10 && taken.every((other) => box[2] <= other[0] || other[2] <= box[0] || box[3] <= other[1] || other[3] <= box[1]);
    return points.flatMap(([name, x, y], index) => {
      const text = name.length > 24 ? `${name.slice(0, 11)}…${name.slice(-12)}` : name;
      const half = 3.1 * text.length;
      for (const [side, below] of NAME_PLACES) {
        const [middle, line] = [xs[index] + side * (10 + half), ys[index] + below];
        const box = [middle - half, line - 7, middle + half, line + 7];
        if (!free(box)) continue;
        taken.push(box);
        return [{ x: log ? Math.log10(x) : x, y, text: plain(text), showarrow: false, xshift: middle - xs[index], yshift: -below, font: { size: 10.5, color: colours.ink } }];
      }
      return [];
    });
  }

  const X_NAMES = { epoch: "epochs", seconds: "training time, s", step: "steps" };

  function learning() {
    const trained = runs.filter((run) => run.curve.loss.length || Object.values(run.curve.evaluations).some((column) => column.length));
    if (!trained.length) return;
    const many = trained.length > MANY;
    const where = section("learning", "Learning curves", "The training loss is averaged over stretches of steps. The dev loss is the plain cross-entropy for all runs, whatever they are trained with. Time is that of training alone.");
    const parts = [...new Set(trained.flatMap((run) => Object.keys(run.curve.parts)))];
    const recorded = (key) => trained.some((run) => (run.curve.evaluations[key] || []).length);
    const axes = Object.keys(X_NAMES).filter((key) => recorded(key) || trained.some((run) => (run.curve[key] || []).length));
    const scores = qualities.filter(recorded);
    const first = scores.includes(metric) ? metric : scores[0];
    const second = { f1: "exact", exact: "f1", question_f1: "f1", question_exact: "exact", answerability_accuracy: "answerability_f1", answerability_f1: "answerability_accuracy" }[first];
    const state = { x: axes[0], loss: "loss", score: first, beside: scores.includes(second) ? second : scores.find((key) => key !== first), all: false };
    const redrawCurves = [];
    const change = (key) => (value) => { state[key] = value; redrawCurves.forEach((redraw) => redraw()); };
    const controls = make("div", { class: "controls" });
    if (scores.length) controls.append(chooser("Score", scores.map((key) => [key, NAMES[key]]), state.score, change("score")));
    if (state.beside) controls.append(chooser("beside", scores.map((key) => [key, NAMES[key]]), state.beside, change("beside")));
    if (axes.length > 1) controls.append(chooser("X axis", axes.map((key) => [key, X_NAMES[key]]), state.x, change("x")));
    if (parts.length) controls.append(chooser("Loss", [["loss", "in total"], ...parts.map((key) => [key, key])], "loss", change("loss")));
    if (many) controls.append(chooser("Runs", [["", `the best ${MANY}`], ["all", `all ${trained.length}`]], "", change("all")));
    where.append(controls);
    const grid = make("div", { class: "grid" });
    where.append(grid);
    const shown = () => { const order = ranked().filter((run) => trained.includes(run)); return state.all ? order : order.slice(0, MANY); };
    const lines = (get, mode) => shown().map((run, index) => {
      const [x = [], y = []] = get(run);
      return { type: "scatter", mode, x, y, name: plain(run.name), line: stroke(index, { width: state.all && many ? 1 : 1.8 }), marker: { size: 5 }, opacity: state.all && many ? 0.6 : 1, hovertemplate: `${plain(run.name)}<br>%{x}: %{y:.3f}<extra></extra>` };
    });
    const ofEvaluations = (key) => lines((run) => [run.curve.evaluations[state.x], run.curve.evaluations[key]], "lines+markers");
    if (trained.some((run) => run.curve.loss.length)) {
      redrawCurves.push(plot(grid, "Training loss", (colours) => ({
        traces: lines((run) => [run.curve[state.x], state.loss === "loss" ? run.curve.loss : run.curve.parts[state.loss]], "lines"),
        layout: { xaxis: axis(X_NAMES[state.x], colours), yaxis: axis(state.loss, colours) },
      })));
    }
    if (recorded("dev_loss")) {
      redrawCurves.push(plot(grid, "Dev loss", (colours) => ({
        traces: ofEvaluations("dev_loss"), layout: { xaxis: axis(X_NAMES[state.x], colours), yaxis: axis("cross-entropy", colours) },
      })));
    }
    for (const place of ["score", "beside"].filter((key) => state[key])) {
      redrawCurves.push(plot(grid, place === "score" ? "Dev score" : "Another dev score", (colours) => ({
        traces: ofEvaluations(state[place]), layout: { xaxis: axis(X_NAMES[state.x], colours), yaxis: axis(`${NAMES[state[place]]}, %`, colours) },
      })));
    }
    if (trained.some((run) => run.curve.tenths)) {
      redrawCurves.push(plot(grid, "Seconds per tenth of an epoch", (colours) => ({
        traces: lines((run) => (run.curve.tenths ? [run.curve.tenths.epoch, run.curve.tenths.seconds] : []), "lines+markers"),
        layout: { xaxis: axis("epochs", colours), yaxis: axis("s", colours, { rangemode: "tozero" }) },
      })));
    }
    redrawCurves.push(legend(where, () => (state.all && many ? [] : shown().map((run) => run.name))));
  }

  function lessData() {
    const lines = new Map();
    for (const run of runs) {
      if (typeof run.fraction !== "number" || run.alike === null || !hasScore(run)) continue;
      if (!lines.has(run.alike)) lines.set(run.alike, new Map());
      const points = lines.get(run.alike);
      points.set(run.fraction, [...(points.get(run.fraction) || []), run]);
    }
    const drawn = [...lines].filter(([, points]) => points.size > 1);
    if (!drawn.length) return;
    const where = section("less-data", "Less training data", "Runs that were trained on different fractions of the questions. Several seeds are averaged; the bars show the lowest and the highest score.");
    // The encoder's own head: the run whose encoder these heads read, as a flat line.
    const bases = new Set(drawn.flatMap(([, points]) => [...points.values()].flat().map((run) => run.base)));
    const references = [...bases].filter(Boolean).map((base) => {
      const scores = runs.filter((run) => run.short_name === base && hasScore(run)).map((run) => scoreOf(run, content.metric));
      return [base, scores.reduce((a, b) => a + b, 0) / scores.length];
    }).filter(([, score]) => Number.isFinite(score));
    plot(where, `${NAMES[content.metric] || "F1"} by fraction of the training questions`, (colours) => ({
      traces: drawn.map(([alike, points], index) => {
        const x = [...points.keys()].sort((a, b) => a - b);
        const scores = x.map((share) => points.get(share).map((run) => scoreOf(run, content.metric)));
        const means = scores.map((some) => some.reduce((a, b) => a + b, 0) / some.length);
        return {
          type: "scatter", mode: "lines+markers", name: plain(alike), x: x.map((share) => 100 * share), y: means,
          line: stroke(index, { width: 2 }), marker: { size: 8 },
          error_y: { type: "data", symmetric: false, array: scores.map((some, i) => Math.max(...some) - means[i]), arrayminus: scores.map((some, i) => means[i] - Math.min(...some)), visible: scores.some((some) => some.length > 1), thickness: 1 },
          hovertemplate: `${plain(alike)}<br>%{x:.3g} % of the questions: %{y:.2f}<extra></extra>`,
        };
      }),
      layout: { xaxis: axis("fraction of the training questions, %", colours, { type: "log", tickvals: [...new Set(drawn.flatMap(([, points]) => [...points.keys()]))].map((share) => 100 * share) }), yaxis: axis(`${NAMES[content.metric] || "F1"}, %`, colours),
        shapes: references.map(([, score]) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: score, y1: score, line: { color: colours.quiet, width: 1.5, dash: "dash" } })),
        annotations: references.map(([base, score]) => ({ xref: "paper", x: 0.01, xanchor: "left", y: score, yanchor: "bottom", showarrow: false, text: `${plain(base)}, the encoder’s own head`, font: { size: 11.5 } })) },
    }));
    legend(where, () => (drawn.length > MANY ? [] : drawn.map(([alike]) => alike)));
  }

  function layers() {
    const mixing = ranked().filter((run) => run.layers);
    const rows = mixing.slice(0, MOST_MIXES).flatMap((run) => Object.entries(run.layers.weights).map(([stream, weights]) => [stream === "both" ? run.name : `${run.name} · ${stream}`, weights, run.layers.numbers]));
    if (!rows.length) return;
    const where = section("layers", "Layer weights", `The weight of each encoder layer: learned, γ·w, or for attention its mean over the tokens of the dev windows; with the best run on top${mixing.length > MOST_MIXES ? ` (${MOST_MIXES} of ${mixing.length})` : ""}. Layer 0 is the output of the embeddings.`);
    const cut = (name) => (name.length > 34 ? `${name.slice(0, 18)}…${name.slice(-14)}` : name);
    plot(where, "Weights by layer", (colours) => {
      const numbers = [...new Set(rows.flatMap(([, , read]) => read))].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : typeof a === "string" ? -1 : 1));
      const most = numbers.length;
      const byNumber = ([, weights, read]) => numbers.map((number) => weights[read.indexOf(number)] ?? null);
      const all = rows.flatMap(([, weights]) => weights);
      const reach = Math.max(...all.map(Math.abs), 1e-9);
      const [minus, zero, plus] = isDark() ? ["#f39a76", "#262d32", "#6cc0da"] : ["#c4532f", "#f3f4f4", "#1f6f8b"];
      const signed = Math.min(...all) < 0;
      const narrow = window.innerWidth < 560;
      return {
        height: 110 + (printing ? 18 : 26) * rows.length,
        traces: [{
          type: "heatmap", x: numbers.map(String), y: rows.map((_, index) => index), z: rows.map(byNumber),
          text: rows.map(([name]) => numbers.map(() => plain(name))), zmin: signed ? -reach : Math.min(...all) * 0.8, zmax: reach, xgap: 2, ygap: 2,
          colorscale: signed ? [[0, minus], [0.5, zero], [1, plus]] : [[0, zero], [1, plus]],
          colorbar: { thickness: 10, outlinewidth: 0, len: 1 }, hovertemplate: "%{text}<br>layer %{x}: %{z:.3f}<extra></extra>",
          texttemplate: most <= 12 && rows.length <= 30 && !narrow ? "%{z:.2f}" : "", hoverongaps: false,
        }],
        layout: {
          xaxis: axis("layer", colours, { type: "category", dtick: most > (narrow ? 7 : 26) ? 2 : 1, tickangle: 0, showgrid: false, ticks: "" }),
          yaxis: axis("", colours, { tickvals: rows.map((_, index) => index), ticktext: rows.map(([name]) => plain(narrow && name.length > 20 ? `…${name.slice(-18)}` : cut(name))), autorange: "reversed", showgrid: false, ticks: "" }),
        },
      };
    }, { wide: true });
  }

  function closer() {
    const known = ranked().filter((run) => run.confusion);
    if (!known.length) return;
    const where = section("closer", "One run in detail", "Scores by kind of question, and how reliable the predicted probability of “no answer” is.");
    let run = known[0];
    const tables = make("div", { class: "grid", id: "groups" });
    const plots = make("div", { class: "grid" });
    const samples = make("div", { id: "samples" });
    const redrawPlots = [];
    const choose = (value) => { run = known[Number(value)]; fill(); redrawPlots.forEach((redraw) => redraw()); };
    if (known.length > 1) where.append(make("div", { class: "controls" }, chooser("Run", known.map((each, index) => [String(index), each.name]), "0", choose)));
    where.append(plots);
    const gap = make("div", { class: "gap" });
    where.append(gap, tables);
    const sampled = known.some((each) => each.answers) ? section("answers", "Sample answers", "Questions from easy to hard: from those that every run gets right to those that none does.") : where;
    sampled.append(samples);

    if (known.some((each) => each.precision_recall)) {
      redrawPlots.push(plot(plots, "Precision and recall", (colours) => ({
        traces: [
          ...known.filter((each) => each !== run && each.precision_recall).map((each) => ({ type: "scatter", mode: "lines", x: each.precision_recall.recall, y: each.precision_recall.precision, line: { color: colours.faint, width: 1 }, opacity: 0.45, hovertemplate: `${plain(each.name)}<extra></extra>` })),
          ...(run.precision_recall ? [{ type: "scatter", mode: "lines", x: run.precision_recall.recall, y: run.precision_recall.precision, line: { color: colours.accent, width: 3 }, hovertemplate: `${plain(run.name)}<br>recall %{x:.1f} %, precision %{y:.1f} %<extra></extra>` }] : []),
        ],
        layout: { xaxis: axis("recall, %", colours, { rangemode: "tozero" }), yaxis: axis("precision, %", colours, { rangemode: "tozero" }) },
      }), { caption: `Questions are answered in order of confidence; an answer counts by its F1.${known.length > 1 ? " Grey: the other runs." : ""}` }));
    }
    if (known.some((each) => each.reliability)) {
      const caption = make("p", { class: "quiet" });
      const redraw = plot(plots, "Calibration of “no answer”", (colours) => {
        const groups = run.reliability;
        caption.textContent = groups ? `${groups.questions.length === 1 ? "One group" : `${groups.questions.length} groups of equal size`}. Expected calibration error (ECE): ${format(groups.ece, 2)} %. The dotted line is perfect calibration.` : "This run stored no probabilities.";
        return {
          traces: [
            { type: "scatter", mode: "lines", x: [0, 100], y: [0, 100], line: { color: colours.faint, dash: "dot", width: 1.5 }, hoverinfo: "skip" },
            ...(groups ? [{ type: "scatter", mode: "lines+markers", x: groups.predicted, y: groups.observed, customdata: groups.questions, line: { color: colours.accent, width: 2 }, marker: { size: 9 }, hovertemplate: "predicted %{x:.1f} %, observed %{y:.1f} %<br>%{customdata} questions<extra></extra>" }] : []),
          ],
          layout: { xaxis: axis("predicted probability of no answer, %", colours, { range: [-2, 102] }), yaxis: axis("observed share without an answer, %", colours, { range: [-4, 104] }) },
        };
      });
      plots.lastElementChild.append(caption);
      redrawPlots.push(redraw);
    }

    const fill = () => {
      const total = Object.values(run.confusion).reduce((a, b) => a + b, 0);
      const card = (title, inner) => make("div", { class: "card" }, make("h3", {}, title), inner);
      tables.replaceChildren(
        card("Outcomes", table([
          { name: "outcome", text: true, get: (row) => row[0] }, { name: "questions", get: (row) => row[1] }, { name: "%", digits: 1, get: (row) => (100 * row[1]) / total },
        ], Object.entries(run.confusion))),
        ...Object.entries(run.groups).filter(([, rows]) => rows.length).map(([name, rows]) => card(name === "answerable" ? "By answerability" : name.endsWith("tokens") ? `By ${name.replace("tokens", "length, in tokens")}` : `By ${name}${name.endsWith("length") ? ", in words" : name.endsWith("position") ? " in the context" : ""}`, table([
          { name: name === "answerable" ? "question" : name, text: true, get: (row) => row.group }, { name: "questions", get: (row) => row.questions },
          ...(decides(run) ? [{ name: "accuracy", digits: 1, get: (row) => row.exact }] : [{ name: "EM", digits: 1, get: (row) => row.exact }, { name: "F1", digits: 1, get: (row) => row.f1 }]),
          { name: "answered, %", digits: 1, get: (row) => row.answered },
        ], rows))));
      showAnswers(samples, run);
    };
    fill();
  }

  // Sample answers

  function verdict(sample, answer) {
    const has = sample.golds.length > 0;
    if (!answer.text) return has ? ["abstained, wrongly", "mid", "abstained"] : ["abstained, correctly", "good", "abstained"];
    if (!has) return ["answered an unanswerable question", "bad", "wrong"];
    if (answer.f1 >= 100) return ["right", "good", "right"];
    return answer.f1 > 0 ? [`partly right, F1 ${format(answer.f1, 0)}`, "mid", "partly"] : ["wrong", "bad", "wrong"];
  }

  function showAnswers(where, run) {
    const samples = content.samples[run.data_set] || [];
    let kind = "all";
    let all = samples.length <= FEW_SAMPLES;
    const list = make("div", { class: "samples" });
    const buttons = make("div", { class: "controls" });
    const more = make("button", { type: "button", class: "pick", onclick: () => { all = true; fill(); } }, "Show more");
    const known = samples.map((sample, index) => [sample, (run.answers || [])[index]]).filter(([, answer]) => answer);
    const thinned = (some) => (all ? some : some.filter((_, index) => index % Math.ceil(some.length / FEW_SAMPLES) === 0));
    const fill = () => {
      const chosen = known.filter(([sample, answer]) => kind === "all" || verdict(sample, answer)[2] === kind);
      list.replaceChildren(...(chosen.length ? thinned(chosen).map(([sample, answer]) => sampleCard(sample, answer)) : [make("p", { class: "quiet" }, "No sample question of this kind.")]));
      [...buttons.children].forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.kind === kind)));
      more.hidden = all || chosen.length <= FEW_SAMPLES;
    };
    for (const name of ["all", "right", "partly", "wrong", "abstained"]) {
      buttons.append(make("button", { type: "button", class: "pick", "data-kind": name, onclick: () => { kind = name; fill(); } }, name));
    }
    const key = make("p", { class: "quiet" }, make("mark", { class: "gold" }, "true answer"), "  ", make("mark", { class: "predicted" }, "predicted"), "  ", make("mark", { class: "gold predicted" }, "both"));
    const heading = make("p", {}, "Answers of ", make("b", {}, run.name), runs.length > 1 ? ", the run selected above." : ".");
    where.replaceChildren(heading, buttons, key, list, make("div", { class: "controls" }, more));
    fill();
  }

  function sampleCard(sample, answer) {
    const [text, tone] = verdict(sample, answer);
    return make("article", { class: "card sample" },
      make("span", { class: `pill ${tone}` }, text),
      make("h3", {}, sample.question),
      make("p", { class: "predicted-text" }, make("span", { class: "quiet" }, "Predicted: "), answer.text || "no answer", make("br"), make("span", { class: "quiet" }, "True: "), sample.golds.join(" / ") || "no answer"),
      marked(sample, answer.text), ...(answer.layers ? [layerStrip(answer.layers)] : []));
  }

  // The weight of every layer where the answer starts and where it ends, as shaded cells.
  function layerStrip({ numbers, read }) {
    const most = Math.max(...read.flatMap(({ weights }) => weights.map(Math.abs)), 1e-9);
    const cell = (weight, index) => make("td", { title: `layer ${numbers[index]}: ${format(weight, 3)}`, style: `background: color-mix(in srgb, var(--${weight < 0 ? "bad" : "accent"}) ${Math.round((90 * Math.abs(weight)) / most)}%, transparent)` });
    const row = ({ output, token, weights }) => make("tr", {}, make("th", { scope: "row" }, `${output}, at “${token}”`), ...weights.map(cell));
    return make("div", { class: "scroll" }, make("table", { class: "strip" },
      make("thead", {}, make("tr", {}, make("th", {}, "layer"), ...numbers.map((number) => make("th", {}, String(number))))),
      make("tbody", {}, ...read.map(row))));
  }

  // The context with its marks. Positions count code points as in Python, not UTF-16 units as in JavaScript.
  function marked(sample, answer) {
    const characters = Array.from(sample.context);
    const gold = new Set();
    const predicted = new Set();
    for (const [begin, end] of sample.spans) for (let position = begin; position < end; position++) gold.add(position);
    if (answer) {
      const sought = Array.from(answer);
      const starts = [];
      for (let at = sample.context.indexOf(answer); at >= 0; at = sample.context.indexOf(answer, at + 1)) starts.push(Array.from(sample.context.slice(0, at)).length);
      const start = starts.find((at) => sought.some((_, i) => gold.has(at + i))) ?? starts[0];
      if (start !== undefined) sought.forEach((_, i) => predicted.add(start + i));
    }
    const text = make("p", { class: "context" }, sample.cut[0] ? "… " : "");
    const kindAt = (position) => [gold.has(position) ? "gold" : "", predicted.has(position) ? "predicted" : ""].filter(Boolean).join(" ");
    for (let begin = 0; begin < characters.length;) {
      let end = begin + 1;
      while (end < characters.length && kindAt(end) === kindAt(begin)) end++;
      const piece = characters.slice(begin, end).join("");
      text.append(kindAt(begin) ? make("mark", { class: kindAt(begin) }, piece) : piece);
      begin = end;
    }
    if (sample.cut[1]) text.append(" …");
    return text;
  }

  function notes() {
    if (!content.notes.length) return;
    section("notes", "Notes").append(make("ul", { class: "notes quiet" }, ...content.notes.map((note) => make("li", {}, note))));
  }

  const sections = [about, allRuns, tradeOffs, learning, lessData, layers, closer, notes];
  sections.forEach((draw) => draw());

  const redrawAll = () => drawings.forEach((redraw) => redraw());
  redrawAll();
  darkScreen.addEventListener("change", redrawAll);
  // Paper is light, and narrower than most screens, so the plots are redrawn for printing.
  const setPrinting = (on) => () => {
    printing = on;
    document.documentElement.classList.toggle("printing", on);
    redrawAll();
  };
  window.addEventListener("beforeprint", setPrinting(true));
  window.addEventListener("afterprint", setPrinting(false));
})();
