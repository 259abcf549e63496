"""The Markdown report: made from every result file, the same bytes each time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lamella.errors import LamellaError
from lamella.study.records import read_records
from lamella.study.report.columns import Labels
from lamella.study.report.markdown import markdown_report
from lamella.study.report.page_blocks import Table
from lamella.study.report.provenance_section import provenance_section
from lamella.study.result_files import is_result, json_files, read_result

Lamella = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("kept")
REPORTS = {
    "example": (KEPT, KEPT / "page.md"),
    "results": (ROOT / "results", ROOT / "docs" / "results" / "readers.md"),
    "tunings": (ROOT / "results" / "tunings", ROOT / "docs" / "results" / "tunings.md"),
}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return Path(shutil.copytree(KEPT, tmp_path / "kept"))


@pytest.mark.parametrize(("folder", "report"), REPORTS.values(), ids=REPORTS)
def test_the_report_in_the_repository_matches_the_result_files(folder: Path, report: Path) -> None:
    files = json_files(folder)
    if not files:
        pytest.skip("there are no results yet")
    results = [file for file in files if is_result(json.loads(file.read_text(encoding="utf-8")))]
    assert all(read_result(file).content["name"] == file.stem for file in results)
    text, count = markdown_report([folder])
    assert count == len(results)
    assert report.read_bytes() == text.encode(), f"regenerate it: lamella report {folder} --out {report} --overwrite"


def test_the_provenance_names_the_weights_of_an_encoder_by_their_hash() -> None:
    records = read_records([KEPT]).records
    labels = Labels({"53aa51172d142c89": "a copy in half precision"})
    _, encoders, *_ = provenance_section(records, labels)
    assert isinstance(encoders, Table)
    assert "`53aa51172d142c89…`: a copy in half precision" in {row[1] for row in encoders.rows}


def test_the_statement_about_epochs_is_true() -> None:
    text = " ".join(REPORTS["results"][1].read_text(encoding="utf-8").split())
    assert "In every run here that was the last epoch" in text
    for file in json_files(ROOT / "results"):
        content = json.loads(file.read_text(encoding="utf-8"))
        if is_result(content) and content["command"] == "train":
            assert content["options"]["training.metric"] == "best_f1"
            # The epochs of a mixture differ by a few windows, and so the last may end a step early.
            epochs = content["options"]["training.epochs"]
            assert content["scores"]["own"]["epoch"] == pytest.approx(epochs, abs=0.01), file.name


def test_the_command_writes_the_same_bytes_each_time(kept: Path, tmp_path: Path, lamella: Lamella) -> None:
    out = tmp_path / "page.md"
    for _ in range(2):
        assert lamella("report", kept, "--out", out, "--overwrite")[0] == 0
        assert out.read_bytes() == (KEPT / "page.md").read_bytes()
    code, out_json, _ = lamella("report", kept, "--out", out, "--overwrite", "--json", "--title", "Other")
    assert code == 0
    assert json.loads(out_json)["runs"] == 5
    assert "# Other\n" in out.read_text()
    assert lamella("report", kept, "--out", out)[0] == 1  # the file exists


def test_a_result_without_a_section_is_an_error(kept: Path) -> None:
    shutil.copy(kept / "dot-seed0.json", kept / "new.json")
    with pytest.raises(LamellaError, match=r"page\.toml: expected a section for every result, got none for new\.json"):
        markdown_report([kept])


def test_another_file_without_a_section_is_an_error(kept: Path) -> None:
    (kept / "more.json").write_text("{}")
    with pytest.raises(LamellaError, match=r"got none for more\.json"):
        markdown_report([kept])


def test_a_changed_number_changes_the_report(kept: Path) -> None:
    before, _ = markdown_report([kept])
    path = kept / "dot-seed0.json"
    content = json.loads(path.read_text())
    content["cost"]["trainable_parameters"] += 2_000
    path.write_text(json.dumps(content))
    after, _ = markdown_report([kept])
    assert "1,770 (" in after
    assert "2,770 (" in after
    assert before != after


def test_every_table_names_encoder_and_train_data(kept: Path) -> None:
    page, _ = markdown_report([kept])
    tables = [line for line in page.splitlines() if line.startswith("| run |")]
    assert len(tables) == 2
    assert all(line.startswith("| run | encoder | train data |") for line in tables)


def test_without_a_layout_all_runs_are_in_one_section(kept: Path) -> None:
    (kept / "page.toml").unlink()
    page, _ = markdown_report([kept])
    assert page.count("\n## ") == 2  # the runs, and their provenance
    assert "| compress-seed0 |" in page
    assert "| dot | all-MiniLM-L6-v2 | demo:train, the first 60 | 2 |" in page
    assert "against" not in page
    assert "are not distinguishable" in page


def test_the_layout_chooses_columns_and_costs(kept: Path) -> None:
    layout = kept / "page.toml"
    before, _ = markdown_report([kept])
    assert "by train s on cpu, 1 thread: last;" in before
    assert before.count("\nTimes and memory were measured on") == 2
    chosen = 'columns = ["delta", "training_flops", "f1"]\ncosts = ["trainable_parameters", "training_flops"]\n'
    layout.write_text(chosen + layout.read_text().replace(', "peak_memory_bytes"', ""))
    after, _ = markdown_report([kept])
    first, second = (line for line in after.splitlines() if line.startswith("| run |"))
    assert first.endswith("| seeds | delta parameters (% of the encoder) | training FLOPs | F1 |")
    assert "| mixer | learning rate |" in second  # the columns of a section replace the default ones
    assert "Best F1 for their cost, by parameters: last; by training FLOPs: last." in after
    for absent in ("train s", "ms/question", "Times and memory"):
        assert absent not in after
    layout.write_text("costs = []\n" + layout.read_text().partition("\n")[2].partition("\n")[2])
    assert "Best F1 for their cost" not in markdown_report([kept])[0]
    layout.write_text('costs = ["train_second"]\n' + layout.read_text().partition("\n")[2])
    with pytest.raises(
        LamellaError, match=r"costs: expected a cost to rank runs by, got 'train_second'\. Did you mean 'train_s"
    ):
        markdown_report([kept])


def test_training_flops_count_all_windows_of_the_training(kept: Path) -> None:
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
    assert "| dot-seed0 | all-MiniLM-L6-v2 | demo:train, the first 60 | 3.00 TFLOP |" in markdown_report([kept])[0]


def test_every_f1_has_an_interval_over_paragraphs(kept: Path) -> None:
    page, _ = markdown_report([kept])
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| dot-seed0 |")]
    result = read_result(kept / "dot-seed0.json")
    sums = np.bincount(result.paragraphs, result.f1)
    sizes = np.bincount(result.paragraphs)
    drawn = np.random.default_rng(7).integers(len(sums), size=(4000, len(sums)))  # a plain bootstrap to compare with
    low, high = 100 * np.quantile(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1), [0.025, 0.975])
    cell = next(cell for cell in rows[0] if cell.startswith("31.35 ["))
    interval = [float(end) for end in cell.removeprefix("31.35 [").removesuffix("]").split(", ")]
    assert interval == pytest.approx([low, high], abs=0.4)
    assert low < 31.35 < high


def test_the_report_explains_its_verdicts(kept: Path) -> None:
    page, _ = markdown_report([kept])
    assert "With a single seed, a verdict is about these questions only and not about other seeds" in page
    assert "Articles are not resampled, and thresholds are not tuned again for each resample" in page
    assert "(dot ahead on 0 questions, last on 3, p = 0.250)" in page  # means of two seeds
    assert "(compress-seed0 alone right on 3 questions, dot-seed0 on 0, p = 0.250)" in page


def test_a_single_run_makes_a_report(kept: Path) -> None:
    page, count = markdown_report([kept / "dot-seed0.json"])
    assert count == 1
    assert "| dot-seed0 |" in page
    assert "beats" not in page
    assert "distinguishable" not in page


def test_a_bar_in_a_name_is_escaped(kept: Path) -> None:
    layout = kept / "page.toml"
    layout.write_text(layout.read_text().replace('"MiniLM-L6"', '"Mini|LM"'))
    assert r"| Mini\|LM | bundled train" in markdown_report([kept])[0]


def test_the_names_of_runs_are_no_markup(kept: Path) -> None:
    folder = kept.with_name("named")
    folder.mkdir()
    for name, kind in (("<img src=x>", "last-seed0"), ("a*b*", "dot-seed0")):
        shutil.copy(kept / f"{kind}.json", folder / f"{name}.json")
    text, _ = markdown_report([folder])
    assert "<img" not in text
    assert "a*b" not in text
    assert r"&lt;img src=x> and a\*b\* are not distinguishable" in text
    assert r"a\*b\*, &lt;img src=x>; by ms/question" in text


def test_an_option_of_another_version_can_be_a_column(kept: Path) -> None:
    layout = kept / "page.toml"
    layout.write_text(layout.read_text().replace('"learner.mixer"', '"learner.former", "training.patience"', 1))
    with pytest.raises(LamellaError, match=r"learner\.former"):
        markdown_report([kept])
    path = kept / "compress-seed0.json"
    content = json.loads(path.read_text())
    content["options"]["learner.former"] = 7  # of another version
    path.write_text(json.dumps(content))
    assert "| former | patience |" in markdown_report([kept])[0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"last-*"', '"lost-*"', "section 'Which layers': expected the name of a result, got 'lost-*'."),
        (
            'baseline = "last"',
            'baseline = "lats"',
            "expected a baseline among its runs, got 'lats'. Did you mean 'last'",
        ),
        ('"delta"', '"delto"', "got 'delto'"),
        (
            '"learner.learning_rate"',
            '"learner.learningrate"',
            "expected a column of the report or an option of the run file, such as learner.seed, got "
            "'learner.learningrate'. Did you mean 'learner.learning_rate'",
        ),
        ('file = "speed.json"', 'file = "speedy.json"', "no such file|got none for speed.json"),
        ('file = "speed.json"', 'file = "speed.json"\nruns = ["*"]', "either runs or a file"),
        ('rows = "rows"', 'rows = "lines"', "expected objects to show as rows at lines"),
        ('"ratio"', '"rate"', "expected rate in its rows"),
        ("[names]", "[name]", "did you mean|Did you mean|unknown|not"),
        ("[names]", "[names", "broken TOML"),
    ],
)
def test_a_wrong_layout_is_one_message(
    kept: Path, tmp_path: Path, lamella: Lamella, old: str, new: str, message: str
) -> None:
    import re

    layout = kept / "page.toml"
    assert old in layout.read_text()
    layout.write_text(layout.read_text().replace(old, new, 1))
    code, _, err = lamella("report", kept, "--out", tmp_path / "page.md")
    assert code == 2
    assert re.search(message if "|" in message else re.escape(message), err), err
    assert "Traceback" not in err
    assert not (tmp_path / "page.md").exists()


def test_times_of_different_devices_are_ranked_apart(kept: Path) -> None:
    for name in ("dot-seed0", "dot-seed1"):
        path = kept / f"{name}.json"
        content = json.loads(path.read_text())
        content["cost"] |= {"device": "NVIDIA H200", "train_seconds": 0.1}
        path.write_text(json.dumps(content))
    report, _ = markdown_report([kept])
    assert "by train s on cpu, 1 thread: last; by train s on NVIDIA H200: dot;" in report
    assert "Times and memory were measured on cpu, 1 thread (bf16) for last; on NVIDIA H200 (bf16) for dot." in report
