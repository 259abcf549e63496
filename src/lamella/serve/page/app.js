// The page: holds what is asked and answered, and draws its parts.

import {card, comparison, differingWords, placesOf, readResult} from "./answers.js";
import {call, storedKey, watchKey} from "./api.js";
import {drawCorrections, judgement, startCorrections, stopMarking} from "./corrections.js";
import {byId, keepingFocus, make, percent, showProblem, speak} from "./dom.js";
import {drawHistory} from "./history.js";
import {layerMaps} from "./layers.js";
import {drawReaders} from "./readers.js";
import {NAME, QUESTIONS, TEXT} from "./sample.js";
import {drawSlider, inHundred, startSlider} from "./slider.js";
import {programs} from "./snippets.js";
import {addText, asked, finishEditing, markPlaces, nameOf, showMark, showText, startTexts, texts} from "./texts.js";

const SLOW = 400;  // milliseconds after which the page shows that it is waiting
const TOP = 6;  // answers that are requested, "no answer" among them

let models = new Map();
let chosen = [];
let answerable = null;  // where the slider stands; null: as the reader is tuned
let current = null;  // the question that is shown: {question, texts, request, response, results}
const entries = [];
let asks = 0;  // so that an answer is not shown that was overtaken by a later question, or by other texts

async function start() {
  startTexts(textsChanged);
  startSlider(moveSlider);
  watchKey(connect);
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(byId("question").value);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.closest("input, textarea, [contenteditable=true]")) {
      event.preventDefault();
      byId("question").select();
    }
  });
  addText(NAME, TEXT, {sample: true});
  byId("question").focus({preventScroll: true});
  await connect();
}

/** Ask the server what it offers: its readers, and whether it keeps corrections. */
async function connect() {
  await loadModels();
  try {
    const {manages_models: corrections} = await call("GET", "info");
    await startCorrections({redraw: draw, entries: () => entries, chosen: () => chosen[0], models: () => models, modelsChanged}, corrections);
    draw();
  } catch (error) {
    showProblem(error.message);
  }
}

/** Compare a reader that was just kept with the one it was made from. */
async function modelsChanged(name) {
  await loadModels();
  chosen = [chosen[0], name].filter((item) => models.has(item));
  drawChoice();
  if (current) await ask(current.question);
}

async function loadModels() {
  try {
    const {models: listed} = await call("GET", "v1/models");
    models = new Map(listed.map((model) => [model.name, model]));
    chosen = chosen.filter((name) => models.has(name));
    if (!chosen.length) chosen = [listed.find((model) => model.default)?.name ?? listed[0].name];
    showProblem(null);
    drawChoice();
    byId("about").textContent = "Texts and questions go to this server and nowhere else.";
  } catch (error) {
    showProblem(error.message);
  }
}

function drawChoice() {
  drawReaders(models, chosen, (names) => {
    chosen = names;
    drawChoice();
    if (current && byId("question").value.trim()) ask(byId("question").value);
  });
}

function textsChanged() {
  current = null;
  stopWaiting();  // for an answer about other texts
  stopMarking();
  const sample = texts.some((item) => item.sample);
  byId("samples").hidden = !sample;
  byId("samples").replaceChildren(...(sample ? [make("span", {class: "quiet"}, "Try: "), ...QUESTIONS.map((question) =>
    make("button", {type: "button", class: "chip", onclick: () => {
      byId("question").value = question;
      ask(question);
    }}, question))] : []));
  draw();
}

/** Ask a question about all texts, and show what the readers answer. */
async function ask(question) {
  finishEditing();
  const here = asked().map((item) => ({id: item.id, name: nameOf(item), text: item.text}));
  if (!here.length) return showProblem("There is no text yet: paste one, or drop a file on this page.");
  if (!question.trim()) {
    byId("question").focus();
    return showProblem("Type a question first.");
  }
  const request = {
    question: question.trim(),
    context: here.length === 1 ? here[0].text : here.map((item) => item.text),
    ...(chosen.length > 1 ? {model: chosen} : models.get(chosen[0])?.default === false ? {model: chosen[0]} : {}),
    top_k: TOP,
  };
  const turn = ++asks;
  byId("ask").setAttribute("aria-busy", "true");
  const button = byId("ask").querySelector(".primary");
  const slow = setTimeout(() => { if (turn === asks) button.textContent = "Reading …"; }, SLOW);
  try {
    const response = await call("POST", "v1/ask", request);
    if (response.results.some(({model}) => !models.get(model)?.loaded)) await loadModels();  // it is known better now
    if (turn !== asks) return;
    current = {question: request.question, texts: here, request, response, results: response.results};
    const earlier = entries.findIndex((entry) => sameQuestion(entry, current));  // asked again, perhaps of other readers
    if (earlier >= 0) entries.splice(earlier, 1);
    entries.push(current);
    showProblem(null);
    draw();
    const readings = read(current);
    speak(readings.length > 1 ? comparison(readings) : sentence(readings[0]));
  } catch (error) {
    if (turn === asks) showProblem(error.message);
  } finally {
    clearTimeout(slow);
    if (turn === asks) stopWaiting();
  }
}

/** Stop to wait for an answer; if it comes, it is not shown. */
function stopWaiting() {
  asks++;
  byId("ask").querySelector(".primary").textContent = "Ask";
  byId("ask").removeAttribute("aria-busy");
}

const sameQuestion = (one, other) => one.question === other.question && one.texts.length === other.texts.length &&
  one.texts.every(({text}, number) => text === other.texts[number].text);

const calibrationsOf = (entry) => entry.results.map(({model}) => models.get(model)?.calibration ?? null);

function read(entry) {
  const calibrations = calibrationsOf(entry);
  return entry.results.map((result, number) => readResult(result, calibrations[number], entry.texts, answerable));
}

function sentence({best, guess, decision}) {
  if (best) return `Answer: ${best.answer}. Probability ${percent(best.probability)}.`;
  return `No answer. Probability ${percent(decision.naProb)}.${guess ? ` Closest guess: ${guess.answer}.` : ""}`;
}

function draw() {
  drawCorrections();
  drawHistory(entries, current, calibrationsOf, answerable, choose);
  if (!current) {
    for (const id of ["answer", "layers", "program"]) byId(id).replaceChildren();
    byId("decision").hidden = true;
    return;
  }
  drawAnswers();
  drawSlider(current, calibrationsOf(current), answerable);
  byId("layers").replaceChildren(layerMaps(current, models));
  byId("program").replaceChildren(programs(current, Boolean(storedKey())));
}

function drawAnswers() {
  stopMarking();
  const readings = read(current);
  const several = readings.length > 1;
  const cards = readings.map((reading, number) => card(reading, {
    name: current.results[number].model, number, several, manyTexts: current.texts.length > 1,
    onShow: (answer) => {
      showText(answer.id);
      showMark(true);
    },
  }));
  cards.forEach((element, number) => {
    const words = differingWords(readings[number], readings);
    if (words) element.querySelector(".found").replaceChildren(...words);
  });
  const judged = judgement(current, readings[0], several);
  if (judged && !several) cards[0].append(judged);
  const {passages} = current.results[0];
  keepingFocus(byId("answer"), () => byId("answer").replaceChildren(
    several ? make("p", {class: "compared"}, comparison(readings)) : "",
    make("div", {class: several ? "cards several" : "cards"}, cards),
    judged && several ? judged : "",
    passages ? make("p", {class: "quiet"}, `A long text: the ${passages.read} most promising of its ${passages.of} passages were read.`) : ""));
  markPlaces(placesOf(readings));
}

function moveSlider(share) {
  answerable = share;
  if (!current) return;
  drawAnswers();
  drawSlider(current, calibrationsOf(current), answerable);
  drawHistory(entries, current, calibrationsOf, answerable, choose);
  const [reading] = read(current);
  speak(`${share === null ? "As tuned" : inHundred(share)}: ${reading.best ? reading.best.answer : "no answer"}`);
}

/** Show an earlier question; its texts come back if they are gone. */
function choose(entry) {
  for (const item of entry.texts) {
    const here = texts.find(({id}) => id === item.id);
    if (here && here.text === item.text) continue;
    addText(item.name, item.text);
    item.id = texts.at(-1).id;
  }
  stopWaiting();  // for the answer to another question
  current = entry;
  byId("question").value = entry.question;
  draw();
}

start();
