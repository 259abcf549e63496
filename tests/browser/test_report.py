"""The report in a real Chromium: plots drawn, nothing complained of, nothing asked of the network, tables that sort."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lamella.study.report.write import write_report
from made_runs import make_run

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

WAIT = 30.0  # seconds; a busy machine is slow to draw
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--window-size=1280,900",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    """Chromium and its driver, as in Debian's `chromium` and `chromium-driver`; without them the tests are skipped."""
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if absent := [name for name, path in programs.items() if path is None]:
        pytest.skip(f"no browser to open the report in: {' and '.join(absent)} not found (chromium, chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (the extra `dev` has it)")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(programs["chromium"])
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(programs["chromedriver"])))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten runs with everything there is to show."""
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
            },
        )
    write_report([folder / "runs"], folder / "report.html", title="Ten <runs>")
    return folder / "report.html"


def test_everything_is_drawn_without_a_complaint_or_a_request(browser: Chrome, report: Path) -> None:
    see(browser, report)
    assert browser.execute_script("return document.querySelector('h1').textContent") == "Ten <runs>"
    headings = browser.execute_script("return [...document.querySelectorAll('h2')].map(one => one.textContent)")
    assert headings[:5] == ["Runs", "Quality against cost", "Learning curves", "Less data", "Layer weights"]
    plots = browser.execute_script(
        "return [...document.querySelectorAll('.plot')].map(one => [one.getAttribute('aria-label'),"
        " one.querySelectorAll('.scatterlayer .point, .scatterlayer .js-line, .heatmaplayer image').length])"
    )
    assert len(plots) == 3 + 2 + 1 + 1 + 2  # costs, curves, less data, layers, precision-recall and calibration
    assert all(marks > 0 for _, marks in plots), plots
    assert complaints(browser) == []
    asked = [url for url in requests(browser) if not url.startswith(("file:", "data:", "blob:"))]
    assert asked == []


def test_a_script_in_the_page_cannot_reach_the_network(browser: Chrome, report: Path) -> None:
    """The policy, not good manners: what tries to load something is refused."""
    see(browser, report)
    refused = browser.execute_async_script(
        "const done = arguments[0];"
        "document.addEventListener('securitypolicyviolation', event => done(event.effectiveDirective));"
        "fetch('https://example.org/').catch(() => {}); setTimeout(() => done('nothing'), 5000)"
    )
    assert refused == "connect-src"
    complaints(browser)  # of this very request


def test_a_table_sorts_when_its_heading_is_clicked(browser: Chrome, report: Path) -> None:
    see(browser, report)
    column = browser.execute_script(
        "return [...document.querySelectorAll('#runs-table th')].findIndex(one => one.textContent === 'EM')"
    )
    cells = (
        f"return [...document.querySelectorAll('#runs-table tbody td:nth-child({column + 1})')]"
        ".map(one => +one.textContent)"
    )
    by_f1 = browser.execute_script(cells)
    assert by_f1 != sorted(by_f1, reverse=True)
    click = f"document.querySelectorAll('#runs-table th button')[{column}].click()"
    browser.execute_script(click)
    assert browser.execute_script(cells) == sorted(by_f1, reverse=True)
    browser.execute_script(click)
    assert browser.execute_script(cells) == sorted(by_f1)


def test_a_point_tells_which_run_it_is(browser: Chrome, report: Path) -> None:
    see(browser, report)
    browser.execute_script(
        "const plot = document.querySelector('#trade-offs .plot'); plot.scrollIntoView();"
        "Plotly.Fx.hover(plot, [{curveNumber: 1, pointNumber: 0}])"
    )
    said = eventually(browser, "return document.querySelector('#trade-offs .hovertext')?.textContent")
    assert "dot-0" in said
    assert "seed: 0" in said
    assert "F1 40.00" in said


def test_another_run_is_looked_at_closer(browser: Chrome, report: Path) -> None:
    see(browser, report)
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
        "return [...document.querySelectorAll('#samples article mark')].map(one => one.textContent)"
    )
    assert "Huygens" in marks


def test_dark_screens_get_dark_paper_and_plots_that_can_be_read(browser: Chrome, report: Path) -> None:
    see(browser, report)
    look = (
        "return [getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('.plot .xtick text')).fill].map(c => c.match(/\\d+/g).slice(0, 3)"
        ".reduce((a, b) => a + +b, 0) / 3)"
    )
    paper, ink = browser.execute_script(look)
    assert paper > 230
    assert ink < 130
    emulate(browser, dark=True)  # while it is open
    paper, ink = eventually(browser, look, lambda found: found[1] > 130)
    assert paper < 40


def test_a_phone_has_no_page_to_push_sideways(browser: Chrome, report: Path) -> None:
    see(browser, report, width=390)
    assert browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    widest = browser.execute_script(
        "return Math.max(...[...document.querySelectorAll('.plot .main-svg')]"
        ".map(one => one.getBoundingClientRect().right))"
    )
    assert widest <= 390
    assert complaints(browser) == []


def test_paper_gets_light_plots_of_its_own_width_and_the_screen_its_own_again(browser: Chrome, report: Path) -> None:
    see(browser, report)
    emulate(browser, dark=True)
    wide = "return Math.max(...[...document.querySelectorAll('.plot .main-svg')].map(one => one.clientWidth))"
    ink = "return getComputedStyle(document.querySelector('.plot .xtick text')).fill.match(/\\d+/g).map(Number)[0]"
    eventually(browser, ink, lambda found: found > 130)
    before = browser.execute_script(wide)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    eventually(browser, wide, lambda found: found <= 680)
    assert browser.execute_script(ink) < 130
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    eventually(browser, wide, lambda found: found == before)
    assert complaints(browser) == []


def test_one_bare_run_makes_a_page_too(browser: Chrome, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "dev.json").unlink()
    (tmp_path / "run" / "history.jsonl").unlink()
    (tmp_path / "run" / "eval_results.json").unlink()
    write_report([tmp_path / "run"], tmp_path / "report.html")
    see(browser, tmp_path / "report.html", plots=False)
    assert browser.execute_script("return document.querySelector('#runs-table tbody td').textContent") == "run"
    assert complaints(browser) == []


def see(browser: Chrome, page: Path, *, width: int = 1280, plots: bool = True) -> None:
    emulate(browser, dark=False)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    complaints(browser)
    requests(browser)
    browser.get(page.as_uri())
    if plots:
        drawn = (
            "const plots = [...document.querySelectorAll('.plot')];"
            "return plots.length > 0 && plots.every(one => one.querySelector('.main-svg'))"
        )
        eventually(browser, drawn)


def emulate(browser: Chrome, *, dark: bool) -> None:
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def eventually(browser: Chrome, script: str, holds: Callable[[Any], bool] = bool) -> Any:
    until = time.monotonic() + WAIT
    while not holds(found := browser.execute_script(script)):
        assert time.monotonic() < until, f"never came true: {script} (found {found!r})"
        time.sleep(0.1)
    return found


def complaints(browser: Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def requests(browser: Chrome) -> list[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
