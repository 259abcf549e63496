"""The published values: their rows are the runs of `configs/papers`, and their findings agree with the values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lamella.study.papers.published_tables import COST_METRICS, PAPERS, PublishedRow, PublishedTable, read_paper
from lamella.sweep.sweep_plan import read_sweep

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "papers"
TABLES = [table for name in PAPERS for table in read_paper(name).table]
EFFICIENCY = {"l12": 3.27, "l6": 3.30, "l3": 3.07, "l1": 2.32, "l0": 0.67, "l0-a64": 3.10, "l0-a768": 3.35}

# Findings that the published values contradict or cannot decide; each has a note, or ties.
CONTRADICTED = {
    ("bertvision-figure2", "a386-skip-less-data-at-1-fraction0.3", "bert-epochs@1"),
    ("bertvision-classifiers", "tenney-at-1", "bert@2"),
    ("bertvision-figure6", "bert@0.9", "bert@0.8"),
    ("bertvision-figure6", "bert@0.6", "bert@0.5"),
    ("efficiency-table2", "l12-a64", "l12"),
}


def test_every_row_is_a_run_or_a_derived_row_of_its_run_file_and_the_other_way_round(tmp_path: Path) -> None:
    swept = {(file.stem, name) for file in CONFIGS.glob("*.toml") for name in read_sweep([file], tmp_path).names}
    rows = {(table.run_file_of(row), row.run_name) for table in TABLES for row in table.row}
    # The runs that only derived rows are made from, at each of their epochs.
    sources = {("bertvision-span", "bert"), ("bertvision-span", "bert-epochs"), ("bertvision-classification", "bert")}
    assert rows == swept - sources


def test_the_values_support_the_findings_except_where_a_note_contradicts_them() -> None:
    contradicted = set()
    for table in TABLES:
        rows = {row.run: row for row in table.row}
        for finding in table.finding:
            for better, worse in finding.pairs:
                values = rows[better].value(finding.metric), rows[worse].value(finding.metric)
                if values[0] is None or values[1] is None:
                    continue
                if finding.metric in COST_METRICS:
                    agrees = values[1] / values[0] > 1 / (1 + finding.margin)
                else:
                    agrees = values[0] - values[1] + finding.margin > 0
                if not agrees:
                    contradicted.add((table.id, better, worse))
                    assert finding.note or finding.order, finding.text
    assert contradicted == CONTRADICTED


def test_a_finding_is_understood_without_the_one_before() -> None:
    """The summary of all papers puts findings of many tables below one another."""
    first_words = {finding.text.split()[0] for table in TABLES for finding in table.finding}
    assert not first_words & {"So", "It", "They", "This", "These"}


def test_ids_are_unique_and_start_with_their_paper() -> None:
    ids = [table.id for table in TABLES]
    assert len(set(ids)) == len(ids) == 24
    for name in PAPERS:
        assert read_paper(name).id == name
        assert all(table.id.startswith(f"{name}-") for table in read_paper(name).table)


def test_the_guide_shows_how_to_make_every_table() -> None:
    guide = (CONFIGS.parents[1] / "docs" / "how-to" / "reproduce.md").read_text(encoding="utf-8")
    commands = re.findall(r"^lamella report --paper ([a-z0-9-]+) results/", guide, re.MULTILINE)
    assert [table.id for table in TABLES if commands.count(table.id) < 1] == []


def test_figures_without_values_are_named_on_the_pages() -> None:
    """Figures with readable values are tables of their own."""
    drawn = {"pce": range(2, 9), "efficiency": range(3, 6)}
    for name, numbers in drawn.items():
        texts = " ".join([read_paper(name).text, *(table.text for table in read_paper(name).table)])
        named = set()
        for words in re.findall(r"[Ff]igures? (\d(?:, \d)*(?:(?: and| to) \d)?)", texts):
            ends = [int(number) for number in re.findall(r"\d", words)]
            named |= set(range(ends[0], ends[-1] + 1)) if " to " in words else set(ends)
        assert named == set(numbers)


@pytest.mark.parametrize(("run", "value"), EFFICIENCY.items())
def test_the_efficiency_is_that_of_the_paper(run: str, value: float) -> None:
    row = next(row for table in TABLES if table.id.startswith("efficiency") for row in table.row if row.run == run)
    assert row.value("efficiency") == pytest.approx(value, abs=0.006)


def test_one_row_has_one_value_in_all_tables() -> None:
    values: dict[tuple[str, str], dict[tuple[float | None, float | None], list[str]]] = {}
    for table in TABLES:
        for row in table.row:
            if row.f1 is not None:
                of_row = values.setdefault((table.run_file_of(row), row.run_name), {})
                of_row.setdefault((row.exact, row.f1), []).append(table.id)
    different = {run: list(of_row.values()) for run, of_row in values.items() if len(of_row) > 1}
    assert different == {
        ("pce-table2", "dot"): [["pce-table1"], ["pce-table2", "pce-epochs"]],  # the test set and the dev set
        ("pce-table3", "dot"): [["pce-table1"], ["pce-table3", "pce-epochs"]],
        ("pce-table3", "encoder"): [["pce-table1"], ["pce-table3"]],
        ("bertvision-span", "lp-at-0.3"): [["bertvision-table1"], ["bertvision-heads-03"]],  # a misprint
    }


def test_a_finding_about_an_unknown_row_or_without_rows_is_refused() -> None:
    (first, *_) = TABLES
    table = first.model_dump()
    for finding, message in (
        ({"text": "x", "better": "dot", "worse": ["dto"]}, "dto"),
        ({"text": "x", "order": ["dot"]}, "an order of at least two rows"),
        ({"text": "x", "better": "dot"}, "either better and worse"),
        ({"text": "x", "order": ["dot", "albert"], "margin": 0.1, "alike": True}, "a cost and a margin"),
    ):
        with pytest.raises(ValueError, match=message):
            PublishedTable.model_validate({**table, "finding": [finding]})
    with pytest.raises(ValueError, match="label"):
        PublishedRow.model_validate({"run": "dot"})
