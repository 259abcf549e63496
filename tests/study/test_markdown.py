"""The page of results: made of every file there, the same bytes each time, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lamella.errors import LamellaError
from lamella.study.report.markdown import result_page
from lamella.study.result_files import is_result, json_files, read_result

Lamella = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("kept")
PAGES = {"example": (KEPT, KEPT / "page.md"), "results": (ROOT / "results", ROOT / "docs" / "results" / "readers.md")}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KEPT, tmp_path / "kept"))


@pytest.mark.parametrize(("folder", "page"), PAGES.values(), ids=PAGES)
def test_the_page_is_what_the_results_say(folder: Path, page: Path) -> None:
    files = json_files(folder)
    if not files:
        pytest.skip("no results are there yet")
    results = [file for file in files if is_result(json.loads(file.read_text(encoding="utf-8")))]
    assert all(read_result(file).content["name"] == file.stem for file in results)
    made, count = result_page([folder])
    assert count == len(results)
    assert page.read_bytes() == made.encode(), f"make it anew: lamella report {folder} --out {page} --overwrite"


def test_what_the_page_says_of_epochs_is_so() -> None:
    assert "by the best F1: in\nevery run here that was the last one" in PAGES["results"][1].read_text(encoding="utf-8")
    for file in json_files(ROOT / "results"):
        content = json.loads(file.read_text(encoding="utf-8"))
        if is_result(content) and content["command"] == "train":
            assert content["options"]["training.metric"] == "best_f1"
            assert content["scores"]["own"]["epoch"] == content["options"]["training.epochs"], file.name


def test_the_command_writes_the_same_bytes_each_time(kept: Path, tmp_path: Path, lamella: Lamella) -> None:
    out = tmp_path / "page.md"
    for _ in range(2):
        assert lamella("report", kept, "--out", out, "--overwrite")[0] == 0
        assert out.read_bytes() == (KEPT / "page.md").read_bytes()
    code, out_json, _ = lamella("report", kept, "--out", out, "--overwrite", "--json", "--title", "Other")
    assert code == 0
    assert json.loads(out_json)["runs"] == 5
    assert "# Other\n" in out.read_text()
    assert lamella("report", kept, "--out", out)[0] == 2


def test_a_result_that_no_section_shows_is_refused(kept: Path) -> None:
    shutil.copy(kept / "dot-seed0.json", kept / "new.json")
    with pytest.raises(LamellaError, match=r"page\.toml: expected a section for every result\. None shows new\.json"):
        result_page([kept])


def test_another_file_that_no_section_shows_is_refused(kept: Path) -> None:
    (kept / "more.json").write_text("{}")
    with pytest.raises(LamellaError, match=r"None shows more\.json"):
        result_page([kept])


def test_a_number_that_changes_changes_the_page(kept: Path) -> None:
    before, _ = result_page([kept])
    path = kept / "dot-seed0.json"
    content = json.loads(path.read_text())
    content["cost"]["trainable_parameters"] += 2_000
    path.write_text(json.dumps(content))
    after, _ = result_page([kept])
    assert "1,770 (" in after
    assert "2,770 (" in after
    assert before != after


def test_encoder_and_train_data_stand_beside_every_number(kept: Path) -> None:
    page, _ = result_page([kept])
    tables = [line for line in page.splitlines() if line.startswith("| run |")]
    assert len(tables) == 2
    assert all(line.startswith("| run | encoder | train data |") for line in tables)


def test_without_words_all_runs_are_in_one_section(kept: Path) -> None:
    (kept / "page.toml").unlink()
    page, _ = result_page([kept])
    assert page.count("\n## ") == 2  # the runs, and what they stand on
    assert "| compress-seed0 |" in page
    assert "| dot | all-MiniLM-L6-v2 | demo:train, the first 60 | 2 |" in page
    assert "against" not in page
    assert "beats" in page


def test_a_page_says_which_columns_and_which_costs_count(kept: Path) -> None:
    words = kept / "page.toml"
    before, _ = result_page([kept])
    assert "by train s" in before
    assert before.count("\nTimes and memory were measured on") == 2
    chosen = 'columns = ["delta", "training_flops", "f1"]\ncosts = ["trainable_parameters", "training_flops"]\n'
    words.write_text(chosen + words.read_text().replace(', "peak_memory_bytes"', ""))
    after, _ = result_page([kept])
    first, second = (line for line in after.splitlines() if line.startswith("| run |"))
    assert first.endswith("| seeds | delta parameters (% of the encoder) | training FLOPs | F1 |")
    assert "| mixer | learning rate |" in second  # a section's own come first
    assert "Unbeaten at their cost: by parameters, last; by training FLOPs, last." in after
    for absent in ("train s", "ms/question", "Times and memory"):
        assert absent not in after
    words.write_text("costs = []\n" + words.read_text().partition("\n")[2].partition("\n")[2])
    assert "Unbeaten" not in result_page([kept])[0]
    words.write_text('costs = ["train_second"]\n' + words.read_text().partition("\n")[2])
    with pytest.raises(LamellaError, match=r"costs: 'train_second' is none to rank runs by\. Did you mean 'train_s"):
        result_page([kept])


def test_the_flops_of_a_run_are_those_of_all_windows_that_it_learnt_from(kept: Path) -> None:
    path = kept / "dot-seed0.json"
    content = json.loads(path.read_text())
    content["cost"] |= {"training_flops_per_window": 2e9, "train_seconds": 50.0, "windows_per_second": 30.0}
    path.write_text(json.dumps(content))
    (kept / "page.toml").unlink()
    (kept / "page.toml").write_text(
        'columns = ["training_flops"]\n[[section]]\ntitle = "All"\nruns = ["dot-seed0", "*"]\n'
        '[[section]]\ntitle = "Speed"\nfile = "speed.json"\nrows = "rows"\n'
    )
    for name in ("dot-seed1", "last-seed0"):
        (kept / f"{name}.json").unlink()
    assert "| dot-seed0 | all-MiniLM-L6-v2 | demo:train, the first 60 | 3.00 TFLOP |" in result_page([kept])[0]


def test_every_f1_has_an_interval_over_paragraphs(kept: Path) -> None:
    page, _ = result_page([kept])
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| dot-seed0 |")]
    result = read_result(kept / "dot-seed0.json")
    sums = np.bincount(result.paragraphs, result.f1)
    sizes = np.bincount(result.paragraphs)
    drawn = np.random.default_rng(7).integers(len(sums), size=(4000, len(sums)))  # plainly, one draw after the other
    low, high = 100 * np.quantile(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1), [0.025, 0.975])
    told = next(cell for cell in rows[0] if cell.startswith("31.35 ["))
    found = [float(one) for one in told.removeprefix("31.35 [").removesuffix("]").split(", ")]
    assert found == pytest.approx([low, high], abs=0.4)
    assert low < 31.35 < high


def test_the_page_says_what_its_verdicts_are_about(kept: Path) -> None:
    page, _ = result_page([kept])
    assert "Where a run has one seed, a verdict is about these questions and says nothing of other seeds" in page
    assert "Articles are never drawn, and no draw tunes its thresholds anew" in page
    assert "(dot is ahead at 0 questions, last at 3, p = 0.250)" in page  # means of two seeds
    assert "(compress-seed0 alone is right 3 times, dot-seed0 0 times, p = 0.250)" in page


def test_one_run_is_a_page_too(kept: Path) -> None:
    page, count = result_page([kept / "dot-seed0.json"])
    assert count == 1
    assert "| dot-seed0 |" in page
    assert "beats" not in page


def test_a_bar_in_a_name_breaks_no_table(kept: Path) -> None:
    words = kept / "page.toml"
    words.write_text(words.read_text().replace('"MiniLM-L6"', '"Mini|LM"'))
    assert r"| Mini\|LM | bundled train" in result_page([kept])[0]


def test_an_option_that_only_the_files_know_is_a_column(kept: Path) -> None:
    words = kept / "page.toml"
    words.write_text(words.read_text().replace('"learner.mixer"', '"learner.former", "training.patience"', 1))
    with pytest.raises(LamellaError, match=r"learner\.former"):
        result_page([kept])
    path = kept / "compress-seed0.json"
    content = json.loads(path.read_text())
    content["options"]["learner.former"] = 7  # of another version
    path.write_text(json.dumps(content))
    assert "| former | patience |" in result_page([kept])[0]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"last-*"', '"lost-*"', "'Which layers' shows 'lost-*'. No result has that name"),
        ('baseline = "last"', 'baseline = "lats"', "compares with 'lats', which it does not show. Did you mean 'last'"),
        ('"delta"', '"delto"', "has a column 'delto'"),
        (
            '"learner.learning_rate"',
            '"learner.learningrate"',
            "has a column 'learner.learningrate'; expected one of the page's or an option of the run file, as "
            "learner.seed. Did you mean 'learner.learning_rate'",
        ),
        ('file = "speed.json"', 'file = "speedy.json"', "no such file|None shows speed.json"),
        ('file = "speed.json"', 'file = "speed.json"\nruns = ["*"]', "either runs or a file"),
        ('rows = "rows"', 'rows = "lines"', "expected objects to show as rows at lines"),
        ('"ratio"', '"rate"', "expected rate in its rows"),
        ("[names]", "[name]", "did you mean|Did you mean|unknown|not"),
        ("[names]", "[names", "broken TOML"),
    ],
)
def test_wrong_words_are_told(kept: Path, tmp_path: Path, lamella: Lamella, old: str, new: str, said: str) -> None:
    import re

    words = kept / "page.toml"
    assert old in words.read_text()
    words.write_text(words.read_text().replace(old, new, 1))
    code, _, err = lamella("report", kept, "--out", tmp_path / "page.md")
    assert code == 2
    assert re.search(said if "|" in said else re.escape(said), err), err
    assert "Traceback" not in err
    assert not (tmp_path / "page.md").exists()
