"""The page at `/` in a real Chromium, on a real server: ask, decide, compare, correct, adapt."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from chromium import emulate, eventually, requests, resize, warnings
from lamella.calibration import Calibration, FeatureWeight
from lamella.decoding_options import DecodingOptions
from lamella.inference.abstention import at_prior
from lamella.inference.no_answer import na_probability
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.validation import check_config
from running_server import running_server
from tiny_reader import WINDOWS, save_tiny_bert, save_tiny_reader

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

MOONS = "🪐 Moons 😀\n\nHuygens discovered Titan in 1655. 🛰️ Cassini discovered Rhea in 1672, and Herschel found Mimas."
SHARES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny readers, which answer at random, and a tiny one whose head weighs the layers."""
    folder = tmp_path_factory.mktemp("page")
    encoder = save_tiny_bert(folder / "encoder", layers=3)
    save_tiny_reader(folder / "models" / "tiny", encoder)
    save_tiny_reader(folder / "models" / "other", encoder, seed=1)
    config = {
        "windows": WINDOWS,
        "encoder": {"name": str(encoder), "tuning": "frozen"},
        "learner": {"mixer": "dot", "layers": "all"},
    }
    ReaderModel(load_encoder(str(encoder)), check_config(config, where="test")).save(folder / "models" / "layered")
    return folder / "models"


@pytest.fixture(scope="module")
def address(models: Path) -> Iterator[str]:
    with running_server(models.parent, "--models", models, OMP_NUM_THREADS="1") as server:
        yield server.address


@pytest.fixture
def page(browser: Chrome, address: str) -> Iterator[Chrome]:
    """The page, just opened. At the end it must have reported no problem, and asked nobody else."""
    open_page(browser, address)
    yield browser
    assert warnings(browser) == []
    assert [url for url in requests(browser) if not url.startswith((address, "data:", "blob:"))] == []


def open_page(browser: Chrome, address: str, *, width: int = 1280) -> None:
    emulate(browser, dark=False)
    resize(browser, width)
    browser.get("about:blank")
    warnings(browser)
    requests(browser)
    browser.get(address)
    eventually(browser, "return document.querySelectorAll('.reader').length >= 3")


def ask(browser: Chrome, question: str) -> str:
    """Type a question, press Enter, and return what the page reports to screen readers."""
    field = browser.find_element("id", "question")
    browser.execute_script("document.getElementById('spoken').textContent = ''")
    field.clear()
    field.send_keys(question, "\n")
    spoken: str = eventually(browser, "return document.getElementById('spoken').textContent")
    return spoken


def paste(browser: Chrome, text: str) -> None:
    browser.execute_script(
        "const data = new DataTransfer(); data.setData('text/plain', arguments[0]);"
        "document.body.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true}))",
        text,
    )


def texts_of(browser: Chrome, selector: str) -> list[str]:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(element => element.textContent)", selector
    )
    return found


def click(browser: Chrome, label: str, within: str = "body") -> None:
    """Click the button with a label, as a mouse does."""
    find = (
        "return [...document.querySelector(arguments[0]).querySelectorAll('button, summary')]"
        ".find(button => button.textContent === arguments[1])"
    )
    button = browser.execute_script(find, within, label)
    assert button is not None, f"no button {label!r} in {texts_of(browser, f'{within} button')}"
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", button)
    button.click()


def await_marked(browser: Chrome, text: str) -> None:
    """Wait until a text is marked: a browser reports a new selection to the page some time after the key."""
    eventually(
        browser, "return document.querySelector('.marking .chosen')?.textContent", lambda shown: shown == f"“{text}”"
    )


def post(address: str, body: Any) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_newcomer_sees_an_answer_with_one_click(page: Chrome) -> None:
    click(page, "When did the probe land on Titan?")
    eventually(page, "return document.querySelector('.card .found')?.textContent === '14 January 2005'")
    assert texts_of(page, "#text mark.answer") == ["14 January 2005"]
    assert "this answer 9" in texts_of(page, ".legend .first")[0]
    assert page.execute_script("return document.activeElement.closest('main') !== null")


def test_answers_are_marked_at_the_right_characters_after_emoji(page: Chrome) -> None:
    paste(page, MOONS)
    assert "Answer: Huygens" in ask(page, "Who discovered Titan?")
    shown = page.execute_script(
        "const words = document.querySelector('#text .words'), mark = words.querySelector('mark.answer');"
        "const before = document.createRange(); before.setStart(mark.parentElement, 0); before.setEndBefore(mark);"
        "return [words.textContent, before.toString(), mark.textContent, +mark.parentElement.dataset.start]"
    )
    assert shown == [MOONS.replace("\n\n", ""), "", "Huygens", len(MOONS.split("Huygens")[0].encode("utf-16-le")) // 2]
    assert "Answer: 1672" in ask(page, "When was Rhea discovered?")
    assert texts_of(page, "#text mark.answer") == ["1672"]
    assert texts_of(page, ".samples") == [""]  # the sample text has made room


def test_a_question_is_asked_of_several_files(page: Chrome, tmp_path: Path) -> None:
    (tmp_path / "saturn.html").write_text("<h1>Saturn</h1><p>Christiaan <b>Huygens</b> discovered Titan.</p>")
    (tmp_path / "notes.md").write_text("# Notes\r\n\r\nMars has two moons.\r\nPhobos was found by Asaph Hall.")
    page.find_element("id", "files").send_keys(f"{tmp_path / 'saturn.html'}\n{tmp_path / 'notes.md'}")
    eventually(page, "return document.querySelectorAll('.tab').length === 2")
    assert texts_of(page, ".tab.shown .title") == ["notes.md"]
    assert "Huygens" in ask(page, "Who discovered Titan?")
    assert texts_of(page, ".tab.shown .title") == ["saturn.html"]
    assert "Asaph Hall" in ask(page, "Who found Phobos?")
    assert texts_of(page, ".tab.shown .title") == ["notes.md"]
    assert texts_of(page, "#text mark.answer") == ["Asaph Hall"]
    page.find_element("id", "files").send_keys(str(Path(__file__)))
    assert "expected a text (txt, md, html, pdf, docx)" in eventually(
        page, "return document.getElementById('problem').textContent"
    )


def test_the_slider_decides_as_the_server_would(page: Chrome, address: str) -> None:
    """The arrow keys move it; at every share, the page decides what the server answers for that share."""
    assert "Answer: about ninety minutes" in ask(page, "How long did it send data?")
    assert "No answer" in ask(page, "Who discovered Enceladus?")
    body = page.execute_script(
        "return {question: 'How long did it send data?', context: document.querySelector('#text .words').innerText}"
    )
    questions = ("How long did it send data?", "Who discovered Enceladus?", "What are its lakes filled with?")
    for question in questions:
        plain = post(f"{address}/v1/ask", {**body, "question": question, "top_k": 3})["results"][0]
        calibration = page.execute_async_script(
            "const done = arguments[0]; fetch('v1/models').then(r => r.json()).then(r => done(r.models[0].calibration))"
        )
        for share in SHARES:
            there = post(f"{address}/v1/ask", {**body, "question": question, "top_k": 3, "answerable": share})
            here = decide(page, plain, calibration, share)
            (expected,) = there["results"]
            assert here["noAnswer"] == expected["no_answer"]
            assert here["naProb"] == pytest.approx(expected["na_prob"], abs=1e-9)
            assert here["threshold"] == pytest.approx(expected["threshold"], abs=1e-9)
            spans = [answer for answer in expected["answers"] if answer["answer"]]
            best = expected.get("best_guess") or spans[0]
            assert here["best"] == pytest.approx(best["probability"], abs=1e-9)
    page.find_elements("css selector", "#history button")[1].click()
    assert texts_of(page, ".card .found") == ["about ninety minutes"]
    slider = page.find_element("id", "share")
    slider.send_keys("\ue011")  # Home
    assert texts_of(page, ".card .label") == ["No answer"]
    assert texts_of(page, "#text mark.answer") == []
    assert texts_of(page, "#changes") == ["The slider changes 1 answer of 2."]
    slider.send_keys("\ue010")  # End
    assert texts_of(page, ".card .found") == ["about ninety minutes"]
    assert texts_of(page, "#history .changed") == ["no answer Christiaan Huygens"]
    click(page, "Reset")
    assert texts_of(page, "#history .changed") == []


def decide(page: Chrome, result: Any, calibration: Any, share: float | None) -> Any:
    """Return the decision of the page's own code."""
    return page.execute_async_script(
        "const [result, calibration, share, done] = arguments; import('/page/decision.js').then((module) => {"
        " const decision = module.decide(result, calibration, share);"
        " done({...decision, best: module.answersAt(result, decision)[0]?.probability}); })",
        result,
        calibration,
        share,
    )


@pytest.mark.parametrize(
    "calibration",
    [
        None,
        Calibration(method="temperature", temperature=2.5, bias=-0.3, answerable=0.7),
        Calibration(method="isotonic", odds=[-6, -1, 0, 4, 9], probability=[0.02, 0.3, 0.3, 0.8, 0.97]),
        Calibration(
            method="features",
            bias=0.2,
            features=[FeatureWeight(name="margin", mean=0, scale=1, weight=1)],
            answerable=0.4,
        ),
    ],
    ids=lambda value: value.method if value else "none",
)
def test_every_kind_of_calibration_is_moved_as_in_python(page: Chrome, calibration: Calibration | None) -> None:
    decoding = DecodingOptions(null_score_diff_threshold=-1.5, calibration=calibration)
    sent = calibration and calibration.model_dump(exclude={"fitted_on", "features"})
    for odds in (-7.0, -1.5, -0.4, 2.0, 12.0):
        for share in SHARES:
            moved = at_prior(decoding, share)
            features = calibration is not None and calibration.method == "features"
            shifted = odds + moved.calibration.bias - calibration.bias if features else odds  # type: ignore[union-attr]
            result = {"null_score": odds, "threshold": -1.5, "na_prob": 0.5, "answers": []}
            here = decide(page, result, sent, share)
            assert here["threshold"] == pytest.approx(moved.null_score_diff_threshold, abs=1e-9)
            assert here["noAnswer"] == (shifted > moved.null_score_diff_threshold)
            assert here["naProb"] == pytest.approx(na_probability(np.array([shifted]), moved.calibration)[0], abs=1e-9)


def test_readers_are_compared_side_by_side(page: Chrome) -> None:
    ask(page, "When did the probe land on Titan?")
    page.find_element("css selector", ".reader input[value=tiny]").click()
    eventually(page, "return document.querySelectorAll('.card').length === 2")
    assert texts_of(page, ".card .reader-name") == ["Adefault", "Btiny"]
    assert texts_of(page, ".compared")[0].startswith("They differ")
    assert "A" in page.execute_script("return document.querySelector('#text mark.r0').dataset.label")
    page.find_element("css selector", ".reader input[value=tiny]").click()
    eventually(page, "return document.querySelectorAll('.card').length === 1")


@pytest.mark.parametrize("width", [1280, 360])
def test_four_readers_have_cards_that_can_be_read(browser: Chrome, address: str, width: int) -> None:
    open_page(browser, address, width=width)
    ask(browser, "When did the probe land on Titan?")
    for number, name in enumerate(("tiny", "other", "layered"), 2):
        browser.find_element("css selector", f".reader input[value={name}]").click()
        eventually(browser, f"return document.querySelectorAll('.card').length === {number}")
    assert texts_of(browser, ".card .letter") == ["A", "B", "C", "D"]
    assert "undefined" not in texts_of(browser, "#share-effect")[0]
    assert texts_of(browser, "#history .asked") == []  # still one question
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#text mark')].map(mark => mark.dataset.label)"
    )
    assert set("".join(filter(None, labels))) - {"?"} == set("ABCD")
    widths = browser.execute_script("return [...document.querySelectorAll('.card')].map(card => card.offsetWidth)")
    assert min(widths) >= 160
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert warnings(browser) == []


def test_the_api_is_described_without_other_hosts(page: Chrome, address: str) -> None:
    page.get(f"{address}/docs")
    eventually(page, "return document.querySelectorAll('.route').length > 10")
    named = texts_of(page, ".route > summary code:first-child")
    with urllib.request.urlopen(f"{address}/openapi.json") as response:
        paths = json.load(response)["paths"]
    assert named == [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    page.execute_script("document.querySelector('.route').open = true")
    assert "question" in texts_of(page, ".route .fields th")
    click(page, "Send", ".route")
    answer = eventually(page, "return document.querySelector('.route pre').textContent")
    assert answer.startswith("200")
    assert '"answer": "14 January 2005"' in answer
    page.find_element("id", "key").send_keys("geheim€\t")  # no header can hold it
    click(page, "Send", ".route")
    eventually(page, "return document.getElementById('problem').textContent.includes('not a key')")
    page.execute_script("sessionStorage.clear()")


def test_layers_are_shown_as_a_heat_map(page: Chrome) -> None:
    ask(page, "When did the probe land on Titan?")
    click(page, "Which layers was it read from?")
    assert "only the last layer" in eventually(page, "return document.querySelector('.maps').textContent")
    page.find_element("css selector", ".reader input[value=layered]").click()
    page.find_element("css selector", ".reader input[value=default]").click()
    eventually(page, "return document.querySelector('.card')?.dataset.reader === 'layered'")
    click(page, "Which layers was it read from?")
    eventually(page, "return document.querySelectorAll('.map').length === 2", seconds=120)  # the server imports torch
    heads = texts_of(page, ".map:first-of-type thead th")
    assert heads[:5] == ["layer", "0", "1", "2", "3"]
    row = [float(cell) for cell in texts_of(page, ".map tbody tr:first-child td")[:4]]
    assert sum(row) == pytest.approx(1, abs=0.03)
    strongest = page.execute_script(
        "return [...document.querySelectorAll('.map td')].map(cell => +cell.style.getPropertyValue('--weight'))"
    )
    assert max(strongest) == 1


def test_a_program_can_send_the_same_question(page: Chrome) -> None:
    paste(page, 'It\'s "said" that Huygens discovered Titan. 😀')
    ask(page, "Who discovered Titan?")
    click(page, "Use it from a program")
    commands = {}
    for kind in ("curl", "Python", "JSON"):
        click(page, kind, "#program")
        (commands[kind],) = texts_of(page, "#program code")
    done = subprocess.run([sys.executable, "-c", commands["Python"]], capture_output=True, text=True, check=True)
    assert done.stdout == "Huygens\n"
    result = json.loads(commands["JSON"])
    assert result["results"][0]["answers"][0]["answer"] == "Huygens"
    if shutil.which("curl"):
        done = subprocess.run(["bash", "-c", commands["curl"]], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == result


def test_a_correction_is_marked_adapted_to_judged_and_kept(page: Chrome, address: str, models: Path) -> None:
    for number in range(19):
        text = f"Box {number} holds {number + 40} stones."
        begin = text.index("holds") + 6
        body = {"question": f"How many stones are in box {number}?", "context": text, "start": begin, "end": begin + 2}
        post(f"{address}/v1/corrections", body)
    page.refresh()
    eventually(page, "return document.querySelector('#corrections progress')")
    assert "19 corrections. From 20 on" in texts_of(page, "#corrections .quiet")[0]
    paste(page, "😀 Box 99 holds 77 stones, and it is red.")
    page.find_element("css selector", ".reader input[value=tiny]").click()
    page.find_element("css selector", ".reader input[value=default]").click()
    ask(page, "What colour is box 99?")
    click(page, "Mark it")
    # The last word but the full stop, with the keyboard alone.
    end, left, shift, null = "\ue010", "\ue012", "\ue008", "\ue000"
    control = "\ue009"
    words = page.switch_to.active_element
    assert words.get_attribute("aria-readonly") == "true"
    words.send_keys(control, end, null, left, shift, left, left, left, null)
    await_marked(page, "red")
    words.send_keys("x")  # nothing can be typed
    words.send_keys("\n")
    assert "Kept: red" in eventually(page, "return document.querySelector('.judge.kept')?.textContent")
    assert texts_of(page, "#text .words") == ["😀 Box 99 holds 77 stones, and it is red."]
    with urllib.request.urlopen(f"{address}/v1/corrections/squad.json") as response:
        last = json.load(response)["data"][0]["paragraphs"][-1]["qas"][-1]
    assert last["answers"] == [{"text": "red", "answer_start": 36}]
    click(page, "Adapt the reader tiny")
    eventually(page, "return document.querySelector('.adapt')?.textContent.includes('close this page')")
    page.refresh()  # it goes on
    eventually(page, "return document.querySelector('.verdict') !== null", seconds=180)  # training imports torch
    assert texts_of(page, ".verdict caption") == ["On 7 corrections that were left out"]
    assert "7 questions prove little" in texts_of(page, ".result")[0]
    name = page.find_element("id", "new-name")
    name.clear()
    name.send_keys("mine")
    click(page, "Keep", "#corrections")
    eventually(page, "return document.querySelector('.reader input[value=mine]')?.checked")
    assert (models / "mine" / "model.safetensors").is_file()
    answered = post(
        f"{address}/v1/ask", {"question": "How many?", "context": "Box 3 holds 43 stones.", "model": "mine"}
    )
    assert answered["results"][0]["model"] == "mine"


def test_a_text_can_be_pasted_while_an_answer_is_marked(page: Chrome) -> None:
    ask(page, "When did the probe land on Titan?")
    click(page, "Mark it", ".judge")
    click(page, "Paste a text", ".tools")
    assert page.execute_script("return document.activeElement.id") == "editor"


HOLD = """
const [fetched] = [window.fetch];
window.held = [];
window.fetch = async (path, options) => {
  const response = await fetched(path, options);
  if (path === "v1/ask" && !window.held.length) await new Promise((resolve) => window.held.push(resolve));
  return response;
};
"""  # the first answer arrives when the test lets it


def test_an_answer_that_comes_late_is_not_shown(page: Chrome) -> None:
    paste(page, MOONS)
    page.execute_script(HOLD)
    page.find_element("id", "question").send_keys("Who discovered Titan?\n")
    eventually(page, "return window.held.length")
    ask(page, "When was Rhea discovered?")  # overtakes it
    assert texts_of(page, ".card .found") == ["1672"]
    page.execute_async_script("setTimeout(arguments[0], 500)")  # longer than it takes the page to show that it waits
    assert texts_of(page, "#ask .primary") == ["Ask"]
    page.execute_script("window.held[0]()")
    page.execute_async_script("setTimeout(arguments[0], 100)")
    assert texts_of(page, ".card .found") == ["1672"]


def test_an_answer_that_comes_after_an_earlier_question_was_chosen_is_not_shown(page: Chrome) -> None:
    paste(page, MOONS)
    ask(page, "When was Rhea discovered?")
    ask(page, "Who discovered Titan?")
    page.execute_script(HOLD)
    page.find_element("id", "question").send_keys(" Really?\n")
    eventually(page, "return window.held.length")
    page.execute_script("document.querySelectorAll('#history button')[1].click()")
    assert texts_of(page, ".card .found") == ["1672"]
    page.execute_script("window.held[0]()")
    page.execute_async_script("setTimeout(arguments[0], 300)")
    assert texts_of(page, ".card .found") == ["1672"]
    assert page.execute_script("return document.getElementById('question').value") == "When was Rhea discovered?"
    assert texts_of(page, "#ask .primary") == ["Ask"]


def test_an_answer_about_texts_that_have_changed_is_not_shown(page: Chrome) -> None:
    paste(page, MOONS)
    page.execute_script(HOLD)
    page.find_element("id", "question").send_keys("Who discovered Titan?\n")
    eventually(page, "return window.held.length")
    click(page, "Edit", "#text")
    page.find_element("id", "editor").send_keys("\ue011It is known. ")  # at its begin: all places move
    page.execute_script("window.held[0]()")
    page.execute_async_script("setTimeout(arguments[0], 500)")
    assert page.execute_script("return document.activeElement.id") == "editor"
    assert texts_of(page, ".card, mark") == []
    assert texts_of(page, "#ask .primary") == ["Ask"]
    assert page.execute_script("return document.getElementById('ask').ariaBusy") is None


def test_a_correction_is_undone(page: Chrome) -> None:
    paste(page, "Phobos was found by Asaph Hall.")
    ask(page, "Who wrote Hamlet?")
    before = page.execute_script("return document.querySelectorAll('.kept-list li').length")
    label = "Yes" if texts_of(page, ".card .label") == ["No answer"] else "No answer"
    click(page, label, ".judge")
    assert "Kept: no answer" in eventually(page, "return document.querySelector('.judge.kept')?.textContent")
    eventually(page, "return document.activeElement.textContent === 'Undo'")  # not lost with the button pressed
    page.switch_to.active_element.send_keys("\n")
    eventually(page, "return document.querySelector('.judge.kept') === null")
    assert page.execute_script("return document.querySelectorAll('.kept-list li').length") == before


ADAPTED = """
const fetched = window.fetch;
const side = {right: 3, f1: 50};
const threshold = {sentence: "It has the threshold of the old reader."};
const verdict = {questions: 7, before: side, after: side, result: "unclear", sentence: "Nothing is proven.", threshold,
  f1_difference: {value: 0, low: 0, high: 0}};
const adaptation = {id: "a1", state: "finished", model: "tiny", trained_on: 13, left_out: 7, verdict};
const state = {corrections: [], least: 20, can_adapt: true, why_not: null, adaptation};
window.fetch = async (path, options) => (path === "v1/corrections" ? Response.json(state) : fetched(path, options));
window.connectAgain = () => document.getElementById("key").dispatchEvent(new Event("change"));
window.connectAgain();
"""  # a reader that waits for a name


def test_the_name_for_an_adapted_reader_stays_while_the_page_is_drawn_again(page: Chrome) -> None:
    page.execute_script(ADAPTED)
    eventually(page, "return document.getElementById('new-name')?.value === 'tiny-adapted'")
    name = page.find_element("id", "new-name")
    name.clear()
    name.send_keys("mine", "\ue012")
    page.execute_script(
        "window.drawn = 0; new MutationObserver(() => window.drawn++)"
        ".observe(document.getElementById('corrections'), {childList: true}); connectAgain()"
    )
    eventually(page, "return window.drawn >= 2")
    assert page.execute_script(
        "const {id, value, selectionStart} = document.activeElement; return [id, value, selectionStart]"
    ) == ["new-name", "mine", 3]
    ask(page, "When did the probe land on Titan?")
    assert page.execute_script("return document.getElementById('new-name').value") == "mine"


def test_a_new_key_adds_no_listeners(page: Chrome) -> None:
    page.execute_script(
        "window.added = []; const add = document.addEventListener;"
        "document.addEventListener = (type, ...more) => { added.push(type); add.call(document, type, ...more); };"
    )
    for _ in range(2):
        page.execute_script(
            "document.getElementById('about').textContent = '';"
            "document.getElementById('key').dispatchEvent(new Event('change'))"
        )
        eventually(page, "return document.getElementById('about').textContent")
    page.execute_async_script("setTimeout(arguments[0], 300)")
    assert page.execute_script("return window.added") == []
    ask(page, "When did the probe land on Titan?")
    click(page, "Mark it", ".judge")
    await_marked(page, "14 January 2005")
    page.switch_to.active_element.send_keys("\ue012")  # an arrow key ends the selection, not the choice
    page.execute_async_script("setTimeout(arguments[0], 300)")
    assert texts_of(page, ".marking .chosen") == ["“14 January 2005”"]


def test_names_and_surroundings_do_not_cut_characters(page: Chrome) -> None:
    family = "👩‍👩‍👧"
    paste(page, f"a{family * 120} Titan was discovered by Huygens {family * 120}.")
    assert texts_of(page, ".tab .title") == [f"a{25 * family} …"]
    ask(page, "Who discovered Titan?")
    (around,) = texts_of(page, ".around")
    assert around.startswith("… ")
    assert "👩" not in around.replace(family, "")
    click(page, "Mark it", ".judge")
    page.switch_to.active_element.send_keys("\ue009", "a", "\ue000")  # Ctrl+A
    await_marked(page, f"a{39 * family} … {14 * family}.")


def test_a_download_that_fails_is_reported(page: Chrome, address: str) -> None:
    post(f"{address}/v1/corrections", {"question": "Who?", "context": "Huygens.", "start": 0, "end": 7})
    page.refresh()
    eventually(page, "return document.querySelector('#corrections summary')")
    page.execute_script("window.fetch = async () => { throw new TypeError('Failed to fetch'); }")
    page.find_element("css selector", "#corrections summary").click()
    click(page, "Download as a SQuAD file", "#corrections")
    assert "does not answer" in eventually(page, "return document.getElementById('problem').textContent")


def test_a_long_question_is_not_cut(page: Chrome) -> None:
    """The server has a limit and names it; a field that cuts what is pasted asks another question."""
    field = page.find_element("id", "question")
    field.click()
    page.execute_cdp_cmd("Input.insertText", {"text": "Who? " * 1000})
    assert field.get_property("value") == "Who? " * 1000


def test_everything_can_be_reached_with_the_keyboard(page: Chrome) -> None:
    tab, space = "\ue004", " "
    field = page.switch_to.active_element
    assert field.get_attribute("id") == "question"
    field.send_keys("Who discovered Titan?", "\n")
    eventually(page, "return document.querySelector('.card .found')")
    reached = []
    for _ in range(40):
        page.switch_to.active_element.send_keys(tab)
        reached.append(page.execute_script("return document.activeElement.id || document.activeElement.textContent"))
        if page.execute_script("return document.activeElement.tagName") == "BODY":
            break
    for name in ("Ask", "mark-it", "share", "new-text", "open-file", "Edit", "Use it from a program"):
        assert name in reached, reached
    unnamed = page.execute_script(
        "return [...document.querySelectorAll('button, input, select, textarea, summary')]"
        ".filter(element => element.checkVisibility() && !element.textContent && !element.labels?.length"
        " && !element.ariaLabel).map(element => element.outerHTML)"
    )
    assert unnamed == []
    page.find_element("css selector", "#program summary").send_keys(space)
    assert page.execute_script("return document.querySelector('#program details').open")
    page.find_element("tag name", "body").send_keys("/")
    assert page.switch_to.active_element.get_attribute("id") == "question"


def test_the_focus_is_not_lost_with_what_had_it(page: Chrome) -> None:
    focused = "const {id, className} = document.activeElement; return id || className"
    ask(page, "How long did it send data?")
    for label in (None, "Cancel"):
        page.find_element("id", "mark-it").send_keys("\n")
        if label:
            click(page, label, ".marking")
        else:
            page.switch_to.active_element.send_keys("\ue00c")  # Escape
        assert page.execute_script(focused) == "mark-it"
    page.find_element("id", "share").send_keys("\ue010")  # End
    click(page, "Reset")
    assert page.execute_script(focused) == "share"
    for text in ("First.", "Second."):
        click(page, "Paste a text", ".tools")
        page.switch_to.active_element.send_keys(text)
        click(page, "Done", "#text")
        assert page.execute_script(focused) == "words"
    page.find_element("css selector", ".tab.shown .close").send_keys("\n")
    assert page.execute_script(focused) == "title"
    assert texts_of(page, ".tab .title") == ["First."]


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast(page: Chrome, dark: bool) -> None:
    emulate(page, dark=dark)
    ask(page, "How long did it send data?")
    ratios = page.execute_script(
        """
        const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(channel);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
        const ground = (element) => { for (let at = element; at; at = at.parentElement) {
          const colour = getComputedStyle(at).backgroundColor;
          if (!/, 0\\)$|transparent/.test(colour)) return colour; } };
        const kinds = 'main p, main button, main label, main mark, main span';
        return Object.fromEntries([...document.querySelectorAll(kinds)]
          .filter(element => element.checkVisibility() && element.textContent.trim()).map((element) => {
            const [one, other] = [getComputedStyle(element).color, ground(element)].map(light);
            return [element.className + ':' + element.textContent.slice(0, 20),
              (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05)]; }))
        """
    )
    assert len(ratios) > 15
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_a_phone_does_not_scroll_sideways(browser: Chrome, address: str) -> None:
    open_page(browser, address, width=360)
    wide = "return document.documentElement.scrollWidth"
    assert browser.execute_script(wide) == 360
    paste(browser, "# A heading\n\n" + "Averylongword" * 30 + " was discovered by Christiaan Huygens in 1655.")
    ask(browser, "Who discovered it?")
    for label in ("Which layers was it read from?", "Use it from a program"):
        click(browser, label)
    browser.find_element("css selector", ".reader input[value=tiny]").click()
    eventually(browser, "return document.querySelectorAll('.card').length === 2")
    assert browser.execute_script(wide) == 360
    click(browser, "Show in the text")
    assert eventually(
        browser,
        "const box = document.querySelector('#text mark').getBoundingClientRect();"
        "return box.top >= 0 && box.bottom <= innerHeight",
    )
    assert warnings(browser) == []


IN_VIEW = "const box = {}.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight"


def test_a_phone_shows_what_is_to_be_marked_and_what_went_wrong(browser: Chrome, address: str, tmp_path: Path) -> None:
    open_page(browser, address, width=360)
    for question in ("Who discovered Enceladus?", "When did the probe land on Titan?"):
        ask(browser, question)
        click(browser, "Mark it", ".judge")
        for place in ("getSelection().getRangeAt(0)", "document.querySelector('.marking')"):
            eventually(browser, IN_VIEW.format(place))
        click(browser, "Cancel", ".marking")
    browser.execute_script("document.getElementById('open-file').scrollIntoView({block: 'start', behavior: 'instant'})")
    assert not browser.execute_script(IN_VIEW.format("document.getElementById('ask')"))
    (tmp_path / "scan.pdf").write_text("no PDF")
    browser.find_element("id", "files").send_keys(str(tmp_path / "scan.pdf"))
    eventually(browser, "return !document.getElementById('problem').hidden")
    eventually(browser, IN_VIEW.format("document.getElementById('problem')"))
    warnings(browser)  # of the file that was refused


@pytest.mark.parametrize(("width", "height"), [(1280, 600), (360, 700)])
def test_a_place_in_a_long_text_is_shown(browser: Chrome, address: str, width: int, height: int) -> None:
    """Paragraphs out of view have an estimated height until they are drawn."""
    open_page(browser, address, width=width)
    resize(browser, width, height)
    paste(browser, "\n\n".join(f"The engineer number {n} built a bridge in the year {1000 + n}." for n in range(80)))
    ask(browser, "When did the engineer number 60 build a bridge?")
    assert texts_of(browser, ".card .found") == ["1060"]
    shown = (
        "const [box, paper, bar] = [document.querySelector('#text mark.answer'), document.getElementById('text'),"
        " document.getElementById('marking')].map((element) => element.getBoundingClientRect());"
        "return box.top >= Math.max(0, paper.top, bar.bottom) && box.bottom <= Math.min(innerHeight, paper.bottom)"
    )
    for label in ("Show in the text", "Mark it"):
        browser.execute_script("scrollTo(0, 0)")
        click(browser, label, "#answer")
        browser.execute_async_script("setTimeout(arguments[0], 1500)")
        assert browser.execute_script(shown), label
    browser.switch_to.active_element.send_keys("\ue00c")  # Escape


def test_a_server_with_keys_asks_for_one(browser: Chrome, models: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, models / "tiny", LAMELLA_API_KEYS="secret", OMP_NUM_THREADS="1") as server:
        browser.get(server.address)
        assert "Type the key" in eventually(browser, "return document.getElementById('problem').textContent")
        browser.find_element("id", "key").send_keys("geheim€\t")  # no header can hold it
        eventually(browser, "return document.getElementById('problem').textContent.includes('not a key')")
        browser.find_element("id", "key").clear()
        browser.find_element("id", "key").send_keys("secret\t")
        eventually(browser, "return document.getElementById('problem').hidden")
        ask(browser, "Who discovered Titan?")
        assert texts_of(browser, ".card") != []
    warnings(browser)  # of the requests without a key


def test_words_that_other_readers_leave_out_are_marked(page: Chrome) -> None:
    """Two answers at one place: "about ninety minutes" and "ninety minutes"."""
    text = "It sent data for about ninety minutes."
    places = [(text.index("about"), len(text) - 1), (text.index("ninety"), len(text) - 1)]
    found = page.execute_async_script(
        "const [text, places, done] = arguments; import('/page/answers.js').then((module) => {"
        " const readings = places.map(([from, to]) => ({best: {id: 1, text, from, to, answer: text.slice(from, to)}}));"
        " done([module.comparison(readings), ...readings.map((reading) => module.differingWords(reading, readings)"
        " .filter((piece) => piece.className === 'differs').map((piece) => piece.textContent))]); })",
        text,
        places,
    )
    assert found == ["They agree on the place and differ in its length.", ["about"], []]
