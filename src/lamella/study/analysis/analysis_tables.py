"""An analysis as tables, with a row per run: for the terminal, and for the pages of papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lamella.study.records import SPAN

TITLES = {
    "context_length": "by context length in words",
    "question_length": "by question length in words",
    "context_tokens": "by context length in tokens",
    "question_tokens": "by question length in tokens",
    "answer_length": "by answer length in words",
    "question_word": "by question word",
    "answer_position": "by position of the answer in the context",
}
Cell = Callable[[Mapping[str, Any]], Any]
Columns = Mapping[str, Cell]


class AnalysisTable(NamedTuple):
    """A table before layout; each row begins with the name of a run. Titles of columns may have several lines."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def analysis_tables(numbers: Mapping[str, Any]) -> list[AnalysisTable]:
    """Return everything in `analysis.json` except ids; tables without rows are left out."""
    runs = numbers["runs"]
    if numbers["task"] == SPAN:
        tables = [_scores(runs), _second_best(runs), *_groups(runs), _only_right(runs), _near_misses(runs)]
    else:
        tables = [_decisions(runs), *_groups(runs, decisions=True), _only_right(runs)]
    tables += [_layer_weights(runs), _layer_attention(runs)]
    return [table for table in tables if table is not None and table.rows]


def _scores(runs: Sequence[Mapping[str, Any]]) -> AnalysisTable:
    return _table(
        "scores",
        "scores, and number of questions by outcome",
        runs,
        {
            "EM": lambda run: run["exact"],
            "F1": lambda run: run["f1"],
            "HasAns EM": lambda run: run.get("HasAns_exact"),
            "HasAns F1": lambda run: run.get("HasAns_f1"),
            "NoAns EM": lambda run: run.get("NoAns_exact"),
            "right, has answer": lambda run: run["confusion"]["right_has_answer"],
            "answered wrongly": lambda run: run["confusion"]["answered_wrongly"],
            "abstained wrongly": lambda run: run["confusion"]["abstained_wrongly"],
            "right, no answer": lambda run: run["confusion"]["right_no_answer"],
            "answered unanswerable": lambda run: run["confusion"]["answered_the_unanswerable"],
        },
    )


def _decisions(runs: Sequence[Mapping[str, Any]]) -> AnalysisTable:
    return _table(
        "decisions",
        "decisions whether there is an answer, and number of questions by outcome",
        runs,
        {
            "accuracy": lambda run: run["answerability_accuracy"],
            "no-answer F1": lambda run: run["answerability_f1"],
            "HasAns accuracy": lambda run: run.get("HasAns_answerability_accuracy"),
            "NoAns accuracy": lambda run: run.get("NoAns_answerability_accuracy"),
            "right, has answer": lambda run: run["confusion"]["right_has_answer"],
            "wrong, has answer": lambda run: run["confusion"]["abstained_wrongly"],
            "right, no answer": lambda run: run["confusion"]["right_no_answer"],
            "wrong, no answer": lambda run: run["confusion"]["answered_the_unanswerable"],
        },
    )


def _second_best(runs: Sequence[Mapping[str, Any]]) -> AnalysisTable:
    return _table(
        "second_best",
        "the second-best answer where the first is wrong",
        runs,
        {
            "wrong": lambda run: run["second_best"]["wrong"],
            "second is right": lambda run: run["second_best"]["second_right"],
            "% of wrong": lambda run: _percent(run["second_best"]["second_right_share"]),
            "HasAns % of these": lambda run: _percent(run["second_best"]["second_right_has_answer_share"]),
            "HasAns % of right firsts": lambda run: _percent(run["second_best"]["first_right_has_answer_share"]),
        },
    )


def _groups(runs: Sequence[Mapping[str, Any]], *, decisions: bool = False) -> list[AnalysisTable]:
    """Return a table per grouping; all runs are scored on the same questions, so their groups are the same."""
    tables = []
    for name, rows in runs[0]["groups"].items():
        columns = {_heading(row): _group_cell(name, number, decisions) for number, row in enumerate(rows)}
        if columns:
            tables.append(_table(name, f"{'accuracy' if decisions else 'EM / F1'} {TITLES[name]}", runs, columns))
    return tables


def _heading(row: Mapping[str, Any]) -> str:
    share = row["has_answer_share"]
    return f"{row['group']}\nn = {row['count']}" + (f"\n{100 * share:.0f} % HasAns" if share < 1 else "")


def _group_cell(name: str, number: int, decisions: bool) -> Cell:
    def cell(run: Mapping[str, Any]) -> str:
        row = run["groups"][name][number]
        return f"{row['exact']:.1f}" if decisions else f"{row['exact']:.1f} / {row['f1']:.1f}"

    return cell


def _only_right(runs: Sequence[Mapping[str, Any]]) -> AnalysisTable | None:
    if runs[0]["only_right"] is None:
        return None
    columns: dict[str, Cell] = {
        "only this run": lambda run: run["only_right"]["count"],
        "HasAns %": lambda run: _percent(run["only_right"]["has_answer_share"]),
        "all right": lambda run: run["right"]["count"],
    }
    for part, unit in (("context", "words"), ("context", "tokens"), ("question", "words"), ("question", "tokens")):
        key = f"mean_{part}_{unit}"
        if all(key in run["right"] for run in runs):  # tokens are not counted without a model
            columns[f"{part} {unit}"] = _described("only_right", key)
            columns[f"{part} {unit}, all right"] = _described("right", key)
    columns["answer words"] = lambda run: run["only_right"]["mean_answer_words"]
    title = "questions that only this run gets right, compared with all it gets right"
    return _table("only_right", title, runs, columns)


def _described(questions: str, key: str) -> Cell:
    return lambda run: run[questions][key]


def _near_misses(runs: Sequence[Mapping[str, Any]]) -> AnalysisTable:
    def column(key: str) -> Cell:
        return lambda run: run["near_misses"][key]

    keys = ("answered_wrongly", "near_misses", "too_long", "too_short", "shifted", "same_words", "start_too_early",
            "start_too_late", "end_too_early", "end_too_late", "mean_extra_words", "mean_missing_words")  # fmt: skip
    columns = {key.replace("_", " "): column(key) for key in keys}
    return _table("near_misses", "wrong answers that overlap a true one", runs, columns)


def _layer_weights(runs: Sequence[Mapping[str, Any]]) -> AnalysisTable:
    rows = [
        {"run": f"{run['run']} {output}", "layers": run["layer_weights"]["layers"], "weights": weights}
        for run in runs
        if run["layer_weights"]
        for output, weights in run["layer_weights"]["weights"].items()
    ]
    return _by_layer("layer_weights", "learned layer weights", rows)


def _layer_attention(runs: Sequence[Mapping[str, Any]]) -> AnalysisTable:
    rows = [
        {"run": f"{run['run']} {output} {kind}", "layers": run["layer_attention"]["layers"], "weights": weights}
        for run in runs
        if run["layer_attention"]
        for output, kinds in run["layer_attention"]["weights"].items()
        for kind, weights in kinds.items()
    ]
    return _by_layer("layer_attention", "mean attention over the layers, by kind of token", rows)


def _by_layer(name: str, title: str, rows: Sequence[Mapping[str, Any]]) -> AnalysisTable:
    """Return a table with a column for every layer that any row has."""

    def column(layer: int | str) -> Cell:
        return lambda row: f"{row['weights'][row['layers'].index(layer)]:.3f}" if layer in row["layers"] else None

    layers = sorted(
        {layer for row in rows for layer in row["layers"]}, key=lambda layer: (isinstance(layer, int), layer)
    )
    return _table(name, title, rows, {str(layer): column(layer) for layer in layers})


def _table(name: str, title: str, runs: Sequence[Mapping[str, Any]], columns: Columns) -> AnalysisTable:
    rows = [[run["run"], *(_cell(value(run)) for value in columns.values())] for run in runs]
    return AnalysisTable(name, title, ["run", *columns], rows)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
