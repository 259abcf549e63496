"""Reports of published tables: verdicts on runs with known differences, missing rows, misprints, seeds, mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lamella.study.papers.published_tables import PAPERS, read_paper
from lamella.study.papers.verdicts import CLEAR
from paper_rows import TOTAL, write_articles, write_row
from run_folders import write_files

Lamella = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_articles(tmp_path_factory.mktemp("data") / "dev.json")


def verdicts(lamella: Lamella, id: str, runs: Sequence[Path], out: Path) -> dict[str, str]:
    """The verdicts of a page, by the text of the finding."""
    code, printed, err = lamella("report", "--paper", id, *runs, "--out", out, "--overwrite", "--json")
    assert code == 0, err
    tables = json.loads(printed)["tables"]
    return {finding["finding"]: finding["verdict"] for table in tables for finding in table["findings"]}


def test_each_verdict_occurs(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    runs, page = tmp_path / "pce-table2", tmp_path / "page.md"
    write_row(runs / "dot", data, range(30))
    write_row(runs / "albert", data, range(90))
    write_row(runs / "weighted", data, [*range(4, 90), *range(90, 100)])
    write_row(runs / "bert", data, range(40), encoder="other")
    code, printed, err = lamella("report", "--paper", "pce-table2", runs, "--out", page, "--json")
    assert (code, err) == (0, "")
    (table,) = json.loads(printed)["tables"]
    pairs = {
        (pair["better"], pair["worse"], pair["metric"]): pair
        for finding in table["findings"]
        for pair in finding["comparisons"]
    }
    ahead = pairs["dot", "albert", "f1"]
    assert (ahead["verdict"], ahead["ours"]) == ("same sign and clear", pytest.approx(25.0))
    assert ahead["published"] == pytest.approx(0.317)
    assert pairs["albert", "bert", "f1"]["verdict"] == "reversed"
    leaning = pairs["albert", "weighted", "f1"]
    assert leaning["verdict"] == "same sign"
    assert leaning["interval"][0] < 0 < leaning["ours"]
    assert [finding["verdict"] for finding in table["findings"]] == [
        "same sign and clear", "same sign and clear", "same sign", "same sign and clear", "reversed", "not run",
        "not run"
    ]  # fmt: skip
    write_row(tmp_path / "again" / "albert", data, range(90))
    write_row(tmp_path / "again" / "dot", data, [*range(5, 90), *range(90, 95)])
    found = verdicts(lamella, "pce-table2", [tmp_path / "again"], page)
    assert found["Dot-product attention over the layers beats the last layer."] == "not distinguishable"
    assert found["Readers on ALBERT beat BERT."] == "not run"
    write_row(tmp_path / "again" / "bert", data, range(40))
    text = page_text(lamella, page, "pce-table2", tmp_path / "again")
    assert "not run: both rows have the same encoder" in text


@pytest.fixture
def runs(tmp_path: Path, data: Path) -> Path:
    """Two seeds of dot, one run of the last layer, and a run that is in no table."""
    folder = tmp_path / "runs" / "pce-table2"
    for seed in range(2):
        write_row(folder / f"dot-seed{seed}", data, range(20 + 2 * seed), seed=seed)
    write_row(folder / "albert", data, range(60))
    write_row(folder / "mine<b>", data, range(10))
    return folder


def page_text(lamella: Lamella, out: Path, id: str, *runs: Path) -> str:
    code, _, err = lamella("report", "--paper", id, *runs, "--out", out, "--overwrite")
    assert code == 0, err
    return out.read_text(encoding="utf-8")


def test_the_page_shows_published_values_ours_and_what_is_missing(runs: Path, tmp_path: Path, lamella: Lamella) -> None:
    text = page_text(lamella, tmp_path / "page.md", "pce-table2", runs)
    lines = text.splitlines()
    (dot,) = [line for line in lines if line.startswith("| Dot Attention | `dot` | 2 |")]
    cells = [cell.strip() for cell in dot.split("|")[1:-1]]
    assert cells[3:5] == ["76.88", "91.25"]  # EM: 20 and 22 of 240 wrong
    assert cells[5] == "79.95"
    assert cells[6].startswith("91.25 ±0.59 [")
    assert cells[7] == "+11.30"
    assert "| BERT-Base | `bert` | – | 71.83 | – | 75.04 | – | – | – | – | 0.634 |" in lines
    assert "The comparisons are the papers', the digits are not." in text
    assert "ALBERT: misprint. The loss is printed as that of the dev set." in text
    assert "| `albert` − `bert`, F1 | +4.60 | – | not run: no run of bert |" in text
    assert "Given, but not in the table: mine&lt;b>." in text
    assert "| encoder | ALBERT (of unknown size" in text
    assert "| tiny |" in text
    assert "| train data | SQuAD 2.0 | train |" in text
    assert "1,000" in text
    assert "cpu, 1 thread" in text
    assert "/private" not in text
    svg = (tmp_path / "page-pce-table2.svg").read_text(encoding="utf-8")
    assert "](page-pce-table2.svg)" in text
    ElementTree.fromstring(svg)
    assert svg.count('fill="#0072b2"/>') == 1 + 2 + 2  # the legend, two rows, and their difference in F1 and EM


def test_kept_result_files_give_the_same_page_as_the_run_folders(runs: Path, tmp_path: Path, lamella: Lamella) -> None:
    from_runs = page_text(lamella, tmp_path / "a" / "page.md", "pce-table2", runs)
    kept = tmp_path / "results" / "pce-table2"
    assert lamella("compare", runs, "--keep", kept)[0] == 0
    from_files = page_text(lamella, tmp_path / "b" / "page.md", "pce-table2", kept)
    assert from_files == from_runs.replace("mine&lt;b>", "mine-b")
    assert page_text(lamella, tmp_path / "b" / "page.md", "pce-table2", kept) == from_files


def test_early_result_files_are_judged_at_cross_fitted_thresholds(runs: Path, tmp_path: Path, lamella: Lamella) -> None:
    kept = tmp_path / "results"
    assert lamella("compare", runs, "--keep", kept)[0] == 0
    for file in kept.glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        del content["per_question"]["at_0"], content["sha256"]
        file.write_text(json.dumps(content))
    text = page_text(lamella, tmp_path / "page.md", "pce-table2", kept)
    assert "verdicts are at cross-fitted thresholds here" in text
    assert "same sign and clear" in text.split("## How to read it")[0]


def test_a_difference_within_the_variation_between_seeds_is_not_clear(
    tmp_path: Path, data: Path, lamella: Lamella
) -> None:
    folder = tmp_path / "pce-table2"
    for seed, wrong in enumerate((0, 80)):
        write_row(folder / f"dot-seed{seed}", data, range(wrong), seed=seed)
        write_row(folder / f"albert-seed{seed}", data, range(60), seed=seed)
    found = verdicts(lamella, "pce-table2", [folder], tmp_path / "page.md")
    assert found["Dot-product attention over the layers beats the last layer."] == "same sign"


def test_rows_are_compared_in_the_seeds_that_both_have(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    """The third seed of dot is far worse, and albert has no such seed: without it, both rows are the same."""
    folder, page = tmp_path / "pce-table2", tmp_path / "page.md"
    for seed, wrong in enumerate((20, 30, 90)):
        write_row(folder / f"dot-seed{seed}", data, range(wrong), seed=seed)
        if seed < 2:
            write_row(folder / f"albert-seed{seed}", data, range(wrong), seed=seed)
    write_row(folder / "weighted", data, range(60), seed=7)
    code, printed, err = lamella("report", "--paper", "pce-table2", folder, "--out", page, "--json")
    assert code == 0, err
    (table,) = json.loads(printed)["tables"]
    compared = {
        (pair["better"], pair["worse"]): pair for finding in table["findings"] for pair in finding["comparisons"]
    }
    assert (compared["dot", "albert"]["ours"], compared["dot", "albert"]["runs"]) == (0, [2, 2])
    assert compared["albert", "weighted"]["runs"] == [2, 1], "no seed in common: all runs"


def test_html_escapes_names_and_allows_no_scripts(runs: Path, tmp_path: Path, lamella: Lamella) -> None:
    title = "<script>alert(1)</script>"
    out = tmp_path / "page.html"
    code, _, err = lamella("report", "--paper", "pce-table2", runs, "--out", out, "--title", title)
    assert code == 0, err
    text = out.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "mine&lt;b&gt;" in text
    assert "default-src 'none'" in text
    assert "<svg" in text
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]


def test_a_whole_paper_tells_runs_of_the_same_name_by_their_run_file(
    tmp_path: Path, data: Path, lamella: Lamella
) -> None:
    table2 = write_row(tmp_path / "pce-table2-seed1" / "dot", data, range(20), seed=1).parent
    table3 = write_row(tmp_path / "pce-table3" / "dot", data, range(80), seed=1, epochs=5).parent
    found = verdicts(lamella, "pce", [table2, table3], tmp_path / "pce.md")
    assert found["Dot-product attention is better after 2 epochs than after 5."] == "same sign and clear"
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "pce-table1.svg", "pce-table2.svg", "pce-table3.svg", "pce-epochs.svg"
    }  # fmt: skip
    kept = tmp_path / "kept"
    assert lamella("compare", table2, table3, "--keep", kept)[0] == 0
    assert {file.stem for file in kept.iterdir()} == {"pce-table2-seed1-dot", "pce-table3-dot"}
    assert verdicts(lamella, "pce", [kept], tmp_path / "kept.md") == found


def one_line(lamella: Lamella, *arguments: object) -> str:
    code, out, err = lamella("report", *arguments)
    assert code in (1, 2)
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_mistakes_get_one_line_and_write_nothing(runs: Path, tmp_path: Path, data: Path, lamella: Lamella) -> None:
    out = tmp_path / "page.md"
    err = one_line(lamella, "--paper", "pce-tabel2", runs, "--out", out)
    assert "pce-table2" in err
    assert "korquad-table4" in err
    other = write_row(tmp_path / "other" / "albert", data, range(5), seed=3, learning_rate=0.1)
    err = one_line(lamella, "--paper", "pce-table2", runs, other, "--out", out)
    assert "learner.learning_rate differs" in err
    err = one_line(lamella, "--paper", "pce", other, "--out", out)
    assert "pce-table2 or pce-table3" in err
    assert "paper" not in one_line(lamella, "--paper", "pce-table2", tmp_path / "missing", "--out", out)
    assert not out.exists()
    (tmp_path / "page-pce-table2.svg").write_text("mine")
    assert "exists already" in one_line(lamella, "--paper", "pce-table2", runs, "--out", out)
    assert not out.exists()
    assert (tmp_path / "page-pce-table2.svg").read_text() == "mine"


def test_costs_and_efficiency_are_compared_on_one_device_only(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    folder = tmp_path / "efficiency-table1"
    write_row(folder / "l12", data, range(20), cost={"trainable_parameters": 10**8, "train_seconds": 200.0})
    thin = {"trainable_parameters": 10**7, "train_seconds": 100.0}
    write_row(folder / "l6", data, range(24), cost=thin, learning_rate=0.1)
    found = verdicts(lamella, "efficiency-table1", [folder], tmp_path / "page.md")
    assert found["Freezing the bottom six layers saves training time."] == "same sign"
    efficiency = "Freezing the bottom six layers gains as much F1 for its parameters as no freezing."
    assert found[efficiency] == "same sign and clear"
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "× 1.17 | × 2.00 | same sign" in text
    assert "| 3.30 | 5.71 |" in text  # (90 - 50) / log10(10**7)
    assert "Printed with 2,417,664" not in text
    write_row(tmp_path / "efficiency-table1-b" / "l6", data, range(24), cost={"device": "gpu"})
    text = page_text(
        lamella, tmp_path / "page.md", "efficiency-table1", folder / "l12", tmp_path / "efficiency-table1-b"
    )
    assert "not run: timed on different devices" in text


ANSWERS = {"total_parameters": 10**8, "inference_flops_per_window": 7, "inference_batch_size": 32, "precision": "bf16"}


def test_times_within_the_spread_of_the_same_work_are_not_distinguished(
    tmp_path: Path, data: Path, lamella: Lamella
) -> None:
    """L0-A64 and L12-A64 are one network when they answer, and differ by a factor of 1.4."""
    runs, page = tmp_path / "efficiency-table2", tmp_path / "page.md"
    times = {"l12": 1.0, "l12-a64": 1.4, "l0-a64": 1.0, "l0-a768": 1.3}
    for name, seconds in times.items():
        size = {"total_parameters": 10**8 if name.endswith("a64") else 10**8 + len(name)}
        cost = {**ANSWERS, **size, "inference_seconds_per_1000": seconds}
        write_row(runs / name, data, range(9), cost=cost)
    slower = "Adapters of 768 add to the inference time."
    assert verdicts(lamella, "efficiency-table2", [runs], page)[slower] == "not distinguishable"
    assert "× 1.30 | not distinguishable: times of the same work vary by × 1.40 |" in page.read_text(encoding="utf-8")
    write_row(
        runs / "l0-a768", data, range(9), cost={**ANSWERS, "total_parameters": 1, "inference_seconds_per_1000": 1.5}
    )
    assert verdicts(lamella, "efficiency-table2", [runs], page)[slower] == "same sign"


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(1.05, "same sign"), (0.95, "same sign"), (1.2, "reversed"), (0.8, "reversed")]
)
def test_costs_that_should_be_alike(seconds: float, verdict: str, tmp_path: Path, data: Path, lamella: Lamella) -> None:
    runs = tmp_path / "efficiency-table1"
    for name in ("l12", "l6", "l3", "l1", "l0"):
        time = seconds if name == "l3" else 1.0
        write_row(runs / name, data, range(9), cost={"inference_seconds_per_1000": time}, learning_rate=time)
    found = verdicts(lamella, "efficiency-table1", [runs], tmp_path / "page.md")
    assert found["Freezing layers leaves the inference time as it is."] == verdict
    assert "`l6` / `l12`, ms/question; alike, within 10 % | – | × 1.00" in (tmp_path / "page.md").read_text("utf-8")


def write_history(run: Path, steps: Sequence[dict[str, float]], evaluations: Sequence[dict[str, float]]) -> None:
    """Write the history of a run that was evaluated after every step."""
    events = [
        {"event": event, "step": number, "epoch": number, **values}
        for number, pair in enumerate(zip(steps, evaluations, strict=True), 1)
        for event, values in zip(("step", "evaluation"), pair, strict=True)
    ]
    (run / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize(("sdv", "verdict"), [((0.08, 0.09), "same sign"), ((0.13, 0.08), "not distinguishable")])
def test_the_distance_to_the_teacher_is_compared_beyond_its_variation_between_seeds(
    sdv: tuple[float, float], verdict: str, tmp_path: Path, data: Path, lamella: Lamella
) -> None:
    runs = tmp_path / "korquad-distillation"
    for name, losses in (("sda-3", (0.12, 0.13)), ("sdv-3", sdv)):
        for seed, loss in enumerate(losses):
            run = write_row(runs / f"{name}-seed{seed}", data, range(9), seed=seed, distil={"name": name[:3]})
            steps = [{"loss": 2.0, "distillation": 0.5}, {"loss": 1.0, "distillation": loss}]
            write_history(run, steps, [{"f1": 60.0}, {"f1": 70.0}])
    found = verdicts(lamella, "korquad-table4", [runs], tmp_path / "page.md")
    assert found["With 3 students, SDA is farther from its teacher than SDV."] == verdict
    assert found["With 5 students, SDA is farther from its teacher than SDV."] == "not run"


def test_the_last_training_loss_is_shown_and_compared_where_one_was_published(
    tmp_path: Path, data: Path, lamella: Lamella
) -> None:
    losses = {
        "pce-table2": {"albert": (1.0, 1.04), "dot": (1.05, 1.07), "weighted": (1.3, 1.3), "bert": (1.0, 1.0)},
        "pce-table3": {"albert": (0.5, 0.54), "dot": (1.01, 1.02)},
    }
    for run_file, rows in losses.items():
        for name, values in rows.items():
            for seed, loss in enumerate(values):
                encoder = "other" if name == "bert" else "tiny"
                run = write_row(tmp_path / run_file / f"{name}-seed{seed}", data, range(9), seed=seed, encoder=encoder)
                write_history(run, [{"loss": 2.0}, {"loss": loss}], [{"f1": 60.0}, {"f1": 70.0}])
    page, both = tmp_path / "page.md", [tmp_path / run_file for run_file in losses]
    found = verdicts(lamella, "pce-epochs", both, page)
    assert found["After 5 epochs the training loss of the last layer is lower than after 2."] == "same sign"
    # Less than 10 % lower.
    assert found["After 5 epochs the training loss of dot-product attention is lower than after 2."] == (
        "not distinguishable"
    )
    text = page.read_text("utf-8")
    assert "| loss, published | loss, ours |" in text
    assert "| 0.235 | 0.520 |" in text
    assert "`albert` / `pce-table3/albert`, last training loss | × 2.76 | × 1.96 | same sign |" in text
    assert "Loss, ours: the last training loss that the learning curve keeps" in text
    found = verdicts(lamella, "pce-table2", [both[0]], page)
    assert found["After 2 epochs, BERT and ALBERT have similar training losses."] == "same sign"
    assert found["After 2 epochs, readers on ALBERT with different mixers have similar training losses."] == "reversed"
    assert (
        "`dot` / `albert`, last training loss; alike, within 10 % | × 0.98 | × 1.04 | same sign |" in page.read_text()
    )
    assert "oss, ours" not in page_text(lamella, page, "pce-table1", *both)


@pytest.mark.parametrize(
    ("curves", "verdict"),
    [
        ([(95.0, 91.0), (93.0, 99.0)], "same sign"),
        ([(95.0, 89.0), (93.0, 99.0)], "not distinguishable"),
        ([(95.0, 89.0), (99.0, 80.0)], "reversed"),
        ([(95.0, 89.0)], "reversed"),
        ([()], "not run"),
    ],
)
def test_every_epoch_of_every_seed_must_be_ahead(
    curves: list[tuple[float, ...]], verdict: str, tmp_path: Path, data: Path, lamella: Lamella
) -> None:
    folder = tmp_path / "bertvision-classification"
    for seed, curve in enumerate(curves):
        for name in ("bert@0.2", "tenney-at-0.2"):
            run = write_row(folder / f"{name}-seed{seed}", data, range(TOTAL // 10), seed=seed)  # 90 % are right
            for file in ("predictions.json", "nbest_predictions.json"):
                (run / file).unlink()
            write_files(run, {"eval_results.json": {"answerability_accuracy": 90.0}})
        write_history(run, [{"loss": 1.0}] * len(curve), [{"answerability_accuracy": value} for value in curve])
        record = json.loads((folder / f"bert@0.2-seed{seed}" / "run.json").read_text())
        write_files(folder / f"bert@0.2-seed{seed}", {"run.json": {**record, "command": "evaluate"}})
    text = "At every epoch of its training, the linear model beats BERT after 2/10 of an epoch."
    assert verdicts(lamella, "bertvision-figure3", [folder], tmp_path / "page.md")[text] == verdict
    disagree = "not distinguishable: seeds disagree" in (tmp_path / "page.md").read_text("utf-8")
    assert disagree == (verdict == "not distinguishable")


@pytest.mark.parametrize(
    ("weights", "verdict"),
    [([0.2, 0.3, 0.5], "same sign"), ([0.5, 0.3, 0.2], "reversed"), ([0.25, 0.5, 0.25], "not distinguishable")],
)
def test_the_mean_layer_is_compared_with_that_of_average_pooling(
    weights: list[float], verdict: str, tmp_path: Path, data: Path, lamella: Lamella
) -> None:
    folder = tmp_path / "bertvision-span"
    pooled = write_row(folder / "lp-at-0.3", data, range(9), mixer=[{"name": "scalar_mix"}])
    write_files(pooled, {"layers.json": {"layers": [0, 1, 2], "weights": {"start": {"all": weights}}}})
    write_row(folder / "ap-at-0.3", data, range(9))
    text, page = "The weights of learned pooling favour later layers over earlier ones.", tmp_path / "page.md"
    assert verdicts(lamella, "bertvision-table1", [folder], page)[text] == "not run", "the last layer alone"
    assert "mean layer by weight not recorded" in page.read_text("utf-8")
    write_row(folder / "ap-at-0.3", data, range(9), mixer=[{"name": "average"}])
    assert verdicts(lamella, "bertvision-table1", [folder], page)[text] == verdict
    difference = {"same sign": "+0.30", "reversed": "−0.30"}.get(verdict, "+0.00")
    assert f"`lp-at-0.3` − `ap-at-0.3`, mean layer by weight | – | {difference} | {verdict} |" in page.read_text(
        "utf-8"
    )


def test_a_page_without_runs_shows_the_published_values(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    run = write_row(tmp_path / "something", data, range(5))
    for id in PAPERS:
        code, printed, err = lamella("report", "--paper", id, run, "--out", tmp_path / f"{id}.md")
        assert code == 0, err
        assert "no run has the name of a row" in printed
        text = (tmp_path / f"{id}.md").read_text(encoding="utf-8")
        assert text.count("## ") >= len(read_paper(id).table)
        assert "misprint" in text or id == "korquad"


def test_parts_of_the_questions_decide_findings_about_them(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    """BERT fails on the unanswerable questions, the head on the answerable ones."""
    folder = tmp_path / "bertvision-span-more"
    write_row(folder / "bert@0.3", data, range(1, TOTAL, 8))
    write_row(folder / "a386-skip-at-0.3", data, range(0, TOTAL, 8))
    found = verdicts(lamella, "bertvision-figure4", [folder], tmp_path / "page.md")
    assert found["At 3/10 of an epoch the head is right about more unanswerable questions than BERT."] == CLEAR
    assert found["At 3/10 of an epoch BERT is right about more answerable questions."] == CLEAR


def test_classifiers_are_compared_by_accuracy(tmp_path: Path, data: Path, lamella: Lamella) -> None:
    folder = tmp_path / "bertvision-classification"
    for name, wrong in (("bert@1", [*range(0, 60, 2)]), ("tenney-at-1", [1, 3, 5])):  # even: with an answer
        run = write_row(folder / name, data, wrong)
        for file in ("predictions.json", "nbest_predictions.json"):
            (run / file).unlink()
        write_files(run, {"eval_results.json": {"answerability_accuracy": 100 * (1 - len(wrong) / TOTAL)}})
    found = verdicts(lamella, "bertvision-table4", [folder], tmp_path / "page.md")
    assert found["After 1 epoch the linear model beats BERT."] == CLEAR
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("| BERT 1e | `bert@1` | 76.10 |")]
    cells = [cell.strip() for cell in line.split("|")[3:]]
    assert cells[1].startswith("87.50 [")
    assert cells[3] == f"{100 * 240 / 270:.2f}"  # 120 of 120 unanswerable questions, and 30 others
    span = write_row(tmp_path / "bertvision-classification-b" / "bert@3", data, [])
    assert "of the task answerability" in one_line(
        lamella, "--paper", "bertvision-table4", folder, span, "--out", tmp_path / "new.md"
    )
