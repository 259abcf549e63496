"""The HTML report in a real Chromium: plots are drawn, no warnings, no network requests, tables sort."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from chromium import emulate, eventually, requests, resize, warnings
from lamella.study.report.write import write_report
from made_runs import make_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report of ten runs with content for every section; half of them were timed on another device."""
    folder = tmp_path_factory.mktemp("report")
    for number in range(10):
        mixer, fraction = ("dot", "scalar_mix")[number % 2], (0.1, 0.5, 1.0)[number % 3]
        make_run(
            folder / "runs" / f"{mixer}-{number}",
            mixer=mixer,
            seed=number,
            fraction=fraction,
            scores={"exact": 30.0 + number, "f1": 40.0 + 3 * (number % 7), "best_f1": 60.0},
            weights=(np.linspace(-0.2, 0.5, 12).reshape(2, 6), np.ones(2)),
            cost={
                "trainable_parameters": 10 ** (3 + number / 2),
                "train_seconds": 10.0 + number,
                "inference_seconds_per_1000": 5.0 * (number + 1),
                "device": ("NVIDIA H200", "cpu, 2 threads")[number // 5],
                "efficiency": 1.0 + number,
            },
        )
    write_report([folder / "runs"], folder / "report.html", title="Ten <runs>")
    return folder / "report.html"


def test_everything_is_drawn_without_warnings_or_requests(browser: Chrome, report: Path) -> None:
    open_report(browser, report)
    assert browser.execute_script("return document.querySelector('h1').textContent") == "Ten <runs>"
    headings = browser.execute_script("return [...document.querySelectorAll('h2')].map(heading => heading.textContent)")
    assert headings[:5] == ["Runs", "Quality and cost", "Learning curves", "Less training data", "Layer weights"]
    plots = browser.execute_script(
        "return [...document.querySelectorAll('.plot')].map(plot => [plot.getAttribute('aria-label'),"
        " plot.querySelectorAll('.scatterlayer .point, .scatterlayer .js-line, .heatmaplayer image').length])"
    )
    assert len(plots) == 4 + 4 + 1 + 1 + 2  # costs, curves, less data, layers, precision-recall and calibration
    assert all(marks > 0 for _, marks in plots), plots
    # As the encoder counts its layers: 0 would be the embeddings, which these heads do not read.
    numbers = browser.execute_script("return document.querySelector('#layers .plot').data[0].x")
    assert numbers == ["1", "2", "3", "4", "5", "6"]
    assert warnings(browser) == []
    external = [url for url in requests(browser) if not url.startswith(("file:", "data:", "blob:"))]
    assert external == []


def test_times_of_different_devices_have_separate_lines(browser: Chrome, report: Path) -> None:
    """Each device has its own front, so that a run timed on a GPU never displaces one timed on a CPU."""
    open_report(browser, report)
    fronts = browser.execute_script(
        "return [...document.querySelectorAll('#trade-offs .plot')].map(plot => plot.data"
        ".filter(trace => trace.mode === 'lines+markers')"
        ".map(trace => trace.text.map(text => /timed on (.*)/.exec(text)[1])))"
    )
    parameters, training, inference, efficiency = fronts
    assert efficiency == []  # no cost, so no front
    assert len(parameters) == 1
    for by_device in (training, inference):
        assert [set(devices) for devices in by_device] == [{"NVIDIA H200"}, {"cpu, 2 threads"}]
    names = browser.execute_script(
        "return [...document.querySelectorAll('#trade-offs .legend')].map(legend => legend.textContent)"
    )
    assert names == ["NVIDIA H200cpu, 2 threads"] * 2


def test_a_script_in_the_report_cannot_reach_the_network(browser: Chrome, report: Path) -> None:
    """The content security policy blocks every request."""
    open_report(browser, report)
    blocked = browser.execute_async_script(
        "const done = arguments[0];"
        "document.addEventListener('securitypolicyviolation', event => done(event.effectiveDirective));"
        "fetch('https://example.org/').catch(() => {}); setTimeout(() => done('nothing'), 5000)"
    )
    assert blocked == "connect-src"
    warnings(browser)  # of this very request


def test_a_table_sorts_when_its_heading_is_clicked(browser: Chrome, report: Path) -> None:
    open_report(browser, report)
    column = browser.execute_script(
        "return [...document.querySelectorAll('#runs-table th')].findIndex(cell => cell.textContent === 'EM')"
    )
    cells = (
        f"return [...document.querySelectorAll('#runs-table tbody td:nth-child({column + 1})')]"
        ".map(cell => +cell.textContent)"
    )
    by_f1 = browser.execute_script(cells)
    assert by_f1 != sorted(by_f1, reverse=True)
    click = f"document.querySelectorAll('#runs-table th button')[{column}].click()"
    browser.execute_script(click)
    assert browser.execute_script(cells) == sorted(by_f1, reverse=True)
    browser.execute_script(click)
    assert browser.execute_script(cells) == sorted(by_f1)


def test_hovering_over_a_point_shows_its_run(browser: Chrome, report: Path) -> None:
    open_report(browser, report)
    browser.execute_script(
        "const plot = document.querySelector('#trade-offs .plot'); plot.scrollIntoView();"
        "Plotly.Fx.hover(plot, [{curveNumber: 1, pointNumber: 0}])"
    )
    text = eventually(browser, "return document.querySelector('#trade-offs .hovertext')?.textContent")
    assert "dot-0" in text
    assert "seed: 0" in text
    assert "F1 40.00" in text


def test_names_of_points_do_not_overlap(browser: Chrome, report: Path) -> None:
    open_report(browser, report)
    plots = browser.execute_script(
        "const corners = (note) => { const box = note.getBoundingClientRect();"
        " return [box.left, box.top, box.right, box.bottom]; };"
        "return [...document.querySelectorAll('#trade-offs .plot')]"
        ".map(plot => [...plot.querySelectorAll('.annotation')].map(corners))"
    )
    for boxes in plots:
        assert len(boxes) >= 5
        for one, other in itertools.combinations(boxes, 2):
            apart = one[2] <= other[0] + 2 or other[2] <= one[0] + 2 or one[3] <= other[1] + 4 or other[3] <= one[1] + 4
            assert apart, (one, other)


def test_curves_by_time(browser: Chrome, report: Path) -> None:
    open_report(browser, report)
    titles = browser.execute_script(
        "const s = [...document.querySelectorAll('#learning select')]"
        ".find(select => select.textContent.includes('training time'));"
        "s.value = 'seconds'; s.dispatchEvent(new Event('change'));"
        "return [...document.querySelectorAll('#learning .plot')]"
        ".map(plot => [plot.layout.xaxis.title.text, plot.data[0].x])"
    )
    assert [title for title, _ in titles] == ["training time, s"] * 4
    loss, dev_loss, *_ = (x for _, x in titles)
    assert dev_loss == [2, 4]
    assert loss[-1] == 4
    assert len(loss) == 20


def test_another_run_can_be_selected(browser: Chrome, report: Path) -> None:
    open_report(browser, report)
    first, second = (
        browser.execute_script(
            "const s = document.querySelector('#closer select'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('change')); return document.querySelector('#samples b').textContent",
            place,
        )
        for place in ("0", "3")
    )
    assert first != second
    marks = browser.execute_script(
        "return [...document.querySelectorAll('#samples article mark')].map(mark => mark.textContent)"
    )
    assert "Huygens" in marks


def test_dark_mode_has_a_dark_background_and_readable_plots(browser: Chrome, report: Path) -> None:
    open_report(browser, report)
    brightness = (
        "return [getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('.plot .xtick text')).fill].map(c => c.match(/\\d+/g).slice(0, 3)"
        ".reduce((a, b) => a + +b, 0) / 3)"
    )
    background, text = browser.execute_script(brightness)
    assert background > 230
    assert text < 130
    emulate(browser, dark=True)  # while the report is open
    background, text = eventually(browser, brightness, lambda values: values[1] > 130)
    assert background < 40


def test_a_phone_does_not_scroll_sideways(browser: Chrome, report: Path) -> None:
    open_report(browser, report, width=390)
    assert browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    widest = browser.execute_script(
        "return Math.max(...[...document.querySelectorAll('.plot .main-svg')]"
        ".map(plot => plot.getBoundingClientRect().right))"
    )
    assert widest <= 390
    assert warnings(browser) == []


def test_printing_uses_light_plots_of_paper_width_and_is_undone_afterwards(browser: Chrome, report: Path) -> None:
    open_report(browser, report)
    emulate(browser, dark=True)
    width = "return Math.max(...[...document.querySelectorAll('.plot .main-svg')].map(plot => plot.clientWidth))"
    ink = "return getComputedStyle(document.querySelector('.plot .xtick text')).fill.match(/\\d+/g).map(Number)[0]"
    eventually(browser, ink, lambda value: value > 130)
    before = browser.execute_script(width)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    eventually(browser, width, lambda value: value <= 680)
    assert browser.execute_script(ink) < 130
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    eventually(browser, width, lambda value: value == before)
    assert warnings(browser) == []


def test_a_run_without_scores_and_history_makes_a_report(browser: Chrome, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "dev.json").unlink()
    (tmp_path / "run" / "history.jsonl").unlink()
    (tmp_path / "run" / "eval_results.json").unlink()
    write_report([tmp_path / "run"], tmp_path / "report.html")
    open_report(browser, tmp_path / "report.html", plots=False)
    assert browser.execute_script("return document.querySelector('#runs-table tbody td').textContent") == "run"
    assert warnings(browser) == []


def open_report(browser: Chrome, path: Path, *, width: int = 1280, plots: bool = True) -> None:
    emulate(browser, dark=False)
    resize(browser, width)
    warnings(browser)
    requests(browser)
    browser.get(path.as_uri())
    if plots:
        drawn = (
            "const plots = [...document.querySelectorAll('.plot')];"
            "return plots.length > 0 && plots.every(plot => plot.querySelector('.main-svg'))"
        )
        eventually(browser, drawn)
