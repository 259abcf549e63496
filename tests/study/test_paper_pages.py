"""The pages of the papers in `docs/results`, and how they are made: introductions, rows of our own, the summary."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from lamella.study.analysis.analyse import analyse
from lamella.study.keep import add_results, write_results
from lamella.study.papers.judged_papers import result_folders
from lamella.study.papers.matched_rows import run_file_of
from lamella.study.papers.published_tables import PAPERS, read_paper
from lamella.study.records import read_records
from lamella.study.report.write import write_report
from lamella.study.result_files import result_text
from paper_rows import write_articles, write_row

Lamella = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGES = ROOT / "results" / "papers", ROOT / "docs" / "results"
OTHER_STUDIES = ("korean/*", "mpnet")  # in results/, each with a papers.toml
FILES = {page["paper"]: page["file"] for page in tomllib.loads((RESULTS / "papers.toml").read_text("utf-8"))["page"]}
TEXTS = """
title = "What holds"
intro = "About **all** papers, and [readers](readers.md)."
undecided = "More in [another place](there.md)."

[names]
tiny = "the tiny encoder"
dot-warmup = "Dot, with warm-up"

[[page]]
paper = "pce"
file = "layers.md"
title = "Layers"
intro = "Tiny runs; see [readers](readers.md)."

[[page.beyond]]
title = "schedules"
text = "With *warm-up*."
baseline = "pce-table3/dot"
runs = ["dot-*"]

[[page.beyond]]
title = "nothing yet"
baseline = "pce-table2/albert"

[[page.analysis]]
title = "Which questions"
text = "One of *us*."
file = "found.json"
tables = ["only_right", "scores"]
"""


def test_the_pages_in_the_repository_match_the_results(tmp_path: Path) -> None:
    """A paper without results has no page. The test also finds figures that belong to no page."""
    assert set(FILES) == set(PAPERS)
    run_files = {run_file_of(folder.name) for folder in result_folders(RESULTS)}
    pages = {
        paper: file
        for paper, file in FILES.items()
        if run_files & {table.run_file for table in read_paper(paper).table}
    }
    for paper, file in {**pages, **({"all": "README.md"} if pages else {})}.items():
        write_report([RESULTS], tmp_path / file, paper=paper)
    for texts in sorted(path for each in OTHER_STUDIES for path in RESULTS.parent.glob(f"{each}/papers.toml")):
        for page in tomllib.loads(texts.read_text("utf-8"))["page"]:
            write_report([texts.parent], tmp_path / page["file"], paper=page["paper"])
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    others = {"korean-reader.md", "open.md", "readers.md", "tunings.md", "wild.md"}
    present = {path.name: path.read_bytes() for path in PAGES.iterdir() if path.name not in others}
    advice = "make them again: lamella report --paper ID results/FOLDER --out docs/results/FILE --overwrite"
    assert sorted(present) == sorted(made), advice
    assert [name for name in made if made[name] != present[name]] == [], advice


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results of two papers: three seeds of a few rows, and two rows that no paper has."""
    folder = tmp_path_factory.mktemp("collected")
    data = write_articles(folder / "dev.json")
    rows = {
        "pce-table2": {"dot": 20, "albert": 60, "bert": 62},
        "pce-table3": {"dot": 50, "albert": 70, "dot-warmup": 10, "dot-slow": 51, "unplanned": 30},
        "korquad-loss": {"baseline": 30, "start": 90},
    }
    for run_file, wrong_of in rows.items():
        for name, wrong in wrong_of.items():
            for seed in range(3):
                epochs = {"training": {"epochs": 5.0 if run_file == "pce-table3" else 2.0, "batch_size": 12}}
                run = write_row(folder / "runs" / run_file / f"{name}-seed{seed}", data, range(wrong + seed), seed=seed)
                config = json.loads((run / "config.json").read_text())
                (run / "config.json").write_text(json.dumps({**config, **epochs}))
        write_results(add_results(read_records([folder / "runs" / run_file])), folder / "papers" / run_file)
    (folder / "papers" / "papers.toml").write_text(TEXTS)
    runs = [folder / "runs" / "pce-table2" / f"{name}-seed0" for name in ("dot", "albert")]
    found = analyse([str(run) for run in runs], data=str(data), sample=0).numbers
    (folder / "papers" / "found.json").write_text(json.dumps(found))
    (folder / "papers" / "other.json").write_text('{"task": "span"}')
    return folder / "papers"


def made(lamella: Lamella, paper: str, results: Path, out: Path) -> str:
    code, _, err = lamella("report", "--paper", paper, results, "--out", out, "--overwrite")
    assert code == 0, err
    return out.read_text(encoding="utf-8")


def test_a_page_has_its_introduction_and_the_runs_of_its_paper(
    collected: Path, tmp_path: Path, lamella: Lamella
) -> None:
    text = made(lamella, "pce", collected, tmp_path / "layers.md")
    assert "# Layers\n\nTiny runs; see [readers](readers.md).\n\nSilva, CS224n" in text
    assert "| encoder | ALBERT, fully tuned | the tiny encoder |" in text
    assert "| training | batches of 12 (BERT: 8), learning rate 3e-5 | 2 epochs, batches of 12 |" in text
    assert "korquad" not in text
    assert "ALBERT and BERT-Base are on one encoder here" in text
    assert "Given, but not in any of the tables: pce-table3/unplanned-seed0, " in text
    assert made(lamella, "pce", collected, tmp_path / "layers.md") == text
    html = made(lamella, "pce", collected, tmp_path / "layers.html")
    assert '<p>Tiny runs; see <a href="readers.md">readers</a>.</p>' in html
    assert "<p>With <em>warm-up</em>.</p>" in html


def test_rows_of_our_own_have_a_table_with_their_difference_from_the_baseline(
    collected: Path, tmp_path: Path, lamella: Lamella
) -> None:
    text = made(lamella, "pce", collected, tmp_path / "layers.md")
    section = text.split("## Beyond the paper: schedules")[1].split("\n## ")[0]
    assert "With *warm-up*." in section
    assert "| Dot Attention | `pce-table3/dot` | 3 | 78.75 | 78.75 ±0.42 [" in section  # 50 to 52 of 240 wrong
    assert "| Dot, with warm-up | `pce-table3/dot-warmup` | 3 | 95.42 |" in section
    assert "published" not in section
    assert "| `pce-table3/dot-warmup` − `pce-table3/dot`, F1 | +16.67 [" in section
    lines = {line.split(" − ")[0]: line for line in section.splitlines() if " − `" in line}
    assert lines["| `pce-table3/dot-warmup`"].endswith("| clearly better |")
    assert lines["| `pce-table3/dot-slow`"].endswith("| not distinguishable |")
    assert "layers-pce-beyond-1.svg" in section
    assert "published" not in (tmp_path / "layers-pce-beyond-1.svg").read_text(encoding="utf-8")
    assert "nothing yet" not in text


def test_an_analysis_is_on_the_page_with_the_tables_that_are_named(
    collected: Path, tmp_path: Path, lamella: Lamella
) -> None:
    text = made(lamella, "pce", collected, tmp_path / "layers.md")
    section = text.split("## Which questions")[1].split("\n## ")[0]
    assert section.startswith("\n\nOne of *us*.\n\nQuestions that only this run gets right, compared with all it")
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| `dot-seed0`", "40"],  # 20 of 240 wrong, and 60
        ["| `albert-seed0`", "0"],
        ["| `dot-seed0`", "91.7"],
        ["| `albert-seed0`", "75.0"],
    ]


def test_the_summary_has_every_finding_with_its_verdict_and_links_the_pages(
    collected: Path, tmp_path: Path, lamella: Lamella
) -> None:
    text = made(lamella, "all", collected, tmp_path / "README.md")
    assert text.split("\n\n")[1:3] == ["# What holds", "About **all** papers, and [readers](readers.md)."]
    assert "- [Layers](layers.md) (Silva, CS224n, Stanford, 2020): " in text
    assert "](korquad.md) (Lee and Kim, KAIST): " in text
    assert "bertvision" not in text
    decided, undecided = text.split("## Findings")[1].split("## Not decided here")
    row = (
        "| Dot-product attention over the layers beats the last layer. | `pce-table2` | `dot` − `albert`, F1 | +0.32 | "
    )
    assert row.replace("table2", "table3").replace("+0.32", "+0.66") in decided  # the same conclusion from other runs
    (line,) = [line for line in decided.splitlines() if line.startswith(row)]
    assert line.endswith(" | 3 | same sign and clear |")
    assert "| Weights in the loss do harm. | `korquad-table2` | not run: no run of answer |" in undecided
    assert "not run: both rows have the same encoder" in undecided
    assert "|\n\nMore in [another place](there.md).\n\n## How to read it" in undecided
    assert not list(tmp_path.glob("*.svg"))


def test_a_page_has_the_tables_that_its_text_names(collected: Path, tmp_path: Path, lamella: Lamella) -> None:
    some = tmp_path / "papers"
    shutil.copytree(collected, some)
    texts = some / "papers.toml"
    texts.write_text(texts.read_text().replace('title = "Layers"', 'title = "Layers"\ntables = ["pce-table3"]'))
    text = made(lamella, "pce", some, tmp_path / "layers.md")
    assert "(`pce-table3`)" in text
    assert "(`pce-table2`)" not in text
    assert "(`pce-table2`)" in made(lamella, "pce-table2", some, tmp_path / "table.md")


def test_times_of_runs_that_shared_a_device_are_not_shown(collected: Path, tmp_path: Path, lamella: Lamella) -> None:
    shared = tmp_path / "papers"
    shutil.copytree(collected, shared)
    assert "| 60 |" in made(lamella, "pce", shared, tmp_path / "layers.md")
    texts = shared / "papers.toml"
    texts.write_text(texts.read_text().replace('title = "Layers"', 'title = "Layers"\ntimes = false'))
    for paper in ("pce", "pce-table2"):
        text = made(lamella, paper, shared, tmp_path / "layers.md")
        assert "train s, ours" not in text
        assert "Our times" not in text
        assert "| 1,000 |" in text  # other costs are


def test_times_are_those_of_the_runs_that_were_alone_on_the_device(
    collected: Path, tmp_path: Path, lamella: Lamella
) -> None:
    results = tmp_path / "papers"
    shutil.copytree(collected, results)
    texts = results / "papers.toml"
    texts.write_text(texts.read_text().replace('title = "Layers"', 'title = "Layers"\ntimes = ["dot-seed1"]'))
    for seed, seconds in enumerate((500, 77, 900)):
        file = results / "pce-table2" / f"dot-seed{seed}.json"
        content = json.loads(file.read_text())
        content["cost"]["train_seconds"] = seconds
        file.write_text(result_text({key: value for key, value in content.items() if key != "sha256"}))
    text = made(lamella, "pce-table2", results, tmp_path / "layers.md")
    costs = text.split("### Cost")[1]
    (dot,) = [line for line in costs.splitlines() if line.startswith("| Dot Attention | `dot` |")]
    (last,) = [line for line in costs.splitlines() if line.startswith("| ALBERT | `albert` |")]
    assert "| 77 |" in dot
    assert "| 60 |" not in last


def test_mistakes_in_the_texts_get_one_line(collected: Path, tmp_path: Path, lamella: Lamella) -> None:
    texts, out = collected / "papers.toml", tmp_path / "page.md"
    page = "paper = 'pce'\nfile = 'x.md'"
    wrong = {
        "paper = 'pcee'\nfile = 'x.md'": ("expected one of pce, bertvision, efficiency, korquad, got 'pcee'", 1),
        f"{page}\nbeyond = [{{title = 'a', baseline = 'pce-table2/dto'}}]": ("Did you mean 'pce-table2/dot'", 1),
        f"{page}\ntables = ['pce-table9']": ("page.tables: expected some of pce-table1, pce-table2", 1),
        f"{page}\nintor = ''": ("intor", 2),  # a line for each unknown key
        "paper = 'pce": ("broken TOML", 1),
        f"{page}\nanalysis = [{{title = 'a', file = 'none.json'}}]": ("none.json", 1),
        f"{page}\nanalysis = [{{title = 'a', file = 'other.json'}}]": ("expected an analysis.json", 1),
        f"{page}\nanalysis = [{{title = 'a', file = 'found.json', tables = ['scors']}}]": ("Did you mean 'scores'", 1),
    }
    try:
        for page, (message, lines) in wrong.items():
            texts.write_text(f"[[page]]\n{page}\n")
            code, printed, err = lamella("report", "--paper", "pce", collected, "--out", out)
            assert (code in (1, 2), printed, err.count("\n")) == (True, "", lines)
            assert message in err
    finally:
        texts.write_text(TEXTS)
    for paper, given, message in (
        ("efficiency", collected, "expected a folder of results named efficiency-table1"),
        ("all", collected / "pce-table2", "expected a folder that has a folder of result files for each run file"),
    ):
        code, _, err = lamella("report", "--paper", paper, given, "--out", out)
        assert (code, err.count("\n")) == (1, 1)
        assert message in err
    assert not out.exists()


def test_copies_show_the_curve_of_their_run_or_that_it_was_not_kept(tmp_path: Path, lamella: Lamella) -> None:
    data = write_articles(tmp_path / "dev.json")
    runs = tmp_path / "bertvision-span"
    for name in ("bert@0.1", "bert@0.2", "bert-epochs@1", "bert-epochs@2"):
        write_row(runs / f"{name}-seed0", data, range(9))
        set_command(runs / f"{name}-seed0", "evaluate")
    text = made(lamella, "bertvision-figure6", runs, tmp_path / "page.md")
    assert "Learning curves are missing for the copies of `bert` and `bert-epochs`, whose curves were not kept." in text
    write_row(runs / "bert-epochs-seed0", data, range(9))
    events = [{"event": "evaluation", "step": n, "epoch": n, "f1": 60 + n, "seconds": 4 * n} for n in (1, 2)]
    (runs / "bert-epochs-seed0" / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = made(lamella, "bertvision-figure6", runs, tmp_path / "page.md")
    assert "Learning curves are missing for the copies of `bert`, whose curve was not kept." in text
    assert ">bert-epochs</text>" in (tmp_path / "page-bertvision-figure6-curves.svg").read_text(encoding="utf-8")
    assert "Given, but not in the table" not in text
    write_row(runs / "a386-skip-at-0.3-seed0", data, range(9))
    events = events[:1]
    (runs / "a386-skip-at-0.3-seed0" / "history.jsonl").write_text(json.dumps(events[0]) + "\n")
    text = made(lamella, "bertvision-table3", runs, tmp_path / "table3.md")
    assert "Learning curves are missing for 1 row evaluated once, at the end of training." in text


def set_command(run: Path, command: str) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "command": command}))


def test_a_page_has_curves_and_all_rows_by_cost(tmp_path: Path, lamella: Lamella) -> None:
    data = write_articles(tmp_path / "dev.json")
    rows = {"efficiency-table1": ("l12", "l0"), "efficiency-table2": ("l0-a64", "l0-a768", "l12", "lora")}
    for run_file, names in rows.items():
        for place, name in enumerate(names):
            run = tmp_path / "runs" / run_file / name
            write_row(run, data, range(10 * place), cost={"trainable_parameters": 10 ** (3 + place)})
            events = [{"event": "evaluation", "step": n, "epoch": n, "f1": 60 + n, "seconds": 4 * n} for n in (1, 2)]
            (run / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        write_results(add_results(read_records([tmp_path / "runs" / run_file])), tmp_path / "papers" / run_file)
    beyond = "title = 'others'\nbaseline = 'efficiency-table2/l12'"
    page = f"[[page]]\npaper = 'efficiency'\nfile = 'efficiency.md'\n[[page.beyond]]\n{beyond}\n"
    (tmp_path / "papers" / "papers.toml").write_text(page)
    text = made(lamella, "efficiency", tmp_path / "papers", tmp_path / "efficiency.md")
    figures = {path.name for path in tmp_path.glob("*.svg")}
    assert {"efficiency-table1-curves.svg", "efficiency-costs.svg", "efficiency-efficiency.svg"} <= figures
    assert "efficiency-table1-costs.svg" not in figures  # one figure for the rows of all tables
    assert "## All rows by cost" in text
    drawn = (tmp_path / "efficiency-costs.svg").read_text(encoding="utf-8")
    assert ">lora</text>" in drawn, "a row that the paper does not have"
    made(lamella, "efficiency-table1", tmp_path / "papers", tmp_path / "one" / "page.md")
    assert (tmp_path / "one" / "page-efficiency-table1-costs.svg").is_file()
