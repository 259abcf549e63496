"""An analysis as tables for the terminal: a row for every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDTH = 160  # of what is not a terminal, and has no width of its own
TITLES = {
    "context_length": "by words of the context",
    "question_length": "by words of the question",
    "answer_length": "by words of the answer",
    "question_word": "by question word",
    "answer_position": "by place of the answer in the context",
}
Columns = Mapping[str, Callable[[Mapping[str, Any]], Any]]


def print_analysis(numbers: Mapping[str, Any]) -> None:
    """Print everything that `analysis.json` holds, except ids."""
    console = Console(markup=False, emoji=False, highlight=False)  # a name is no markup
    if not console.is_terminal:
        console.width = WIDTH
    left_out = numbers["questions_left_out"]
    but = f"; {left_out} more are not answered by all the runs" if left_out else ""
    console.print(f"{numbers['questions']} questions of {', '.join(numbers['data'])}{but}")
    for name, state in numbers["runs_left_out"].items():
        console.print(f"{name} is left out: {state}")
    runs = numbers["runs"]
    tables = (_scores(runs), _second_best(runs), *_groups(runs), _only_right(runs), _near_misses(runs))
    for table in (*tables, _layer_weights(runs), _layer_attention(runs)):
        for part in _parts(table, console) if table is not None and table.rows else ():
            console.print()
            console.print(part)


class _Rows(NamedTuple):
    """A table before it is laid out: its rows begin with the name of a run."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def _parts(table: _Rows, console: Console) -> list[Table]:
    """A table that fits the console; where it is too wide, several below one another, each as wide as there is room.

    Rich would leave out what does not fit, and with it numbers.
    """
    every = range(1, len(table.columns))
    whole = _laid_out(table, every, narrow=False)
    if _width(whole, console) <= console.width:
        return [whole]
    parts: list[list[int]] = [[]]
    for column in every:
        wider = _laid_out(table, [*parts[-1], column], narrow=True)
        if parts[-1] and _width(wider, console) > console.width:
            parts.append([])
        parts[-1].append(column)
    return [_laid_out(table, part, narrow=True) for part in parts]


def _width(table: Table, console: Console) -> int:
    """Of the table on paper without an edge."""
    return Measurement.get(console, console.options.update(max_width=100_000), table).maximum


def _laid_out(table: _Rows, columns: Sequence[int], *, narrow: bool) -> Table:
    """Some columns beside the names; where they are `narrow`, no wider than the longest word of theirs."""
    laid = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in (0, *columns):
        title, cells = table.columns[column], [row[column] for row in table.rows]
        width = max(map(cell_len, [*title.split(), *cells])) if narrow or not column else None
        laid.add_column(title, width=width, justify="right" if column else "left", overflow="fold")
    for row in table.rows:
        laid.add_row(*(row[column] for column in (0, *columns)))
    return laid


def _scores(runs: Sequence[Mapping[str, Any]]) -> _Rows:
    return _table(
        "scores, and how many questions of each kind",
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
            "answered the unanswerable": lambda run: run["confusion"]["answered_the_unanswerable"],
        },
    )


def _second_best(runs: Sequence[Mapping[str, Any]]) -> _Rows:
    return _table(
        "the second-best answer, where the first is wrong",
        runs,
        {
            "wrong": lambda run: run["second_best"]["wrong"],
            "second is right": lambda run: run["second_best"]["second_right"],
            "% of them": lambda run: _percent(run["second_best"]["second_right_share"]),
            "of these HasAns %": lambda run: _percent(run["second_best"]["second_right_has_answer_share"]),
            "of right firsts HasAns %": lambda run: _percent(run["second_best"]["first_right_has_answer_share"]),
        },
    )


def _groups(runs: Sequence[Mapping[str, Any]]) -> list[_Rows]:
    """All runs are scored on the same questions, so their groups are the same."""
    tables = []
    for name, rows in runs[0]["groups"].items():
        columns = {_heading(row): _group(name, number) for number, row in enumerate(rows)}
        if columns:
            tables.append(_table(f"EM / F1 {TITLES[name]}", runs, columns))
    return tables


def _heading(row: Mapping[str, Any]) -> str:
    share = row["has_answer_share"]
    return f"{row['group']}\nn = {row['count']}" + (f"\n{100 * share:.0f} % HasAns" if share < 1 else "")


def _group(name: str, number: int) -> Callable[[Mapping[str, Any]], Any]:
    def cell(run: Mapping[str, Any]) -> str:
        row = run["groups"][name][number]
        return f"{row['exact']:.1f} / {row['f1']:.1f}"

    return cell


def _only_right(runs: Sequence[Mapping[str, Any]]) -> _Rows | None:
    if runs[0]["only_right"] is None:
        return None
    return _table(
        "questions that only this run gets right, beside all that it gets right",
        runs,
        {
            "only this": lambda run: run["only_right"]["count"],
            "HasAns %": lambda run: _percent(run["only_right"]["has_answer_share"]),
            "context words": lambda run: run["only_right"]["mean_context_words"],
            "question words": lambda run: run["only_right"]["mean_question_words"],
            "answer words": lambda run: run["only_right"]["mean_answer_words"],
            "all right": lambda run: run["right"]["count"],
            "their context words": lambda run: run["right"]["mean_context_words"],
            "their question words": lambda run: run["right"]["mean_question_words"],
        },
    )


def _near_misses(runs: Sequence[Mapping[str, Any]]) -> _Rows:
    def column(key: str) -> Callable[[Mapping[str, Any]], Any]:
        return lambda run: run["near_misses"][key]

    keys = ("answered_wrongly", "near_misses", "too_long", "too_short", "shifted", "same_words", "start_too_early",
            "start_too_late", "end_too_early", "end_too_late", "mean_extra_words", "mean_missing_words")  # fmt: skip
    return _table("wrong answers that overlap a true one", runs, {key.replace("_", " "): column(key) for key in keys})


def _layer_weights(runs: Sequence[Mapping[str, Any]]) -> _Rows:
    rows = [
        {"run": f"{run['run']} {output}", "layers": run["layer_weights"]["layers"], "weights": weights}
        for run in runs
        if run["layer_weights"]
        for output, weights in run["layer_weights"]["weights"].items()
    ]
    return _by_layer("learned weights of the layers", rows)


def _layer_attention(runs: Sequence[Mapping[str, Any]]) -> _Rows:
    rows = [
        {"run": f"{run['run']} {output} {kind}", "layers": run["layer_attention"]["layers"], "weights": weights}
        for run in runs
        if run["layer_attention"]
        for output, kinds in run["layer_attention"]["weights"].items()
        for kind, weights in kinds.items()
    ]
    return _by_layer("mean attention over the layers, by kind of token", rows)


def _by_layer(title: str, rows: Sequence[Mapping[str, Any]]) -> _Rows:
    """A column for every layer that any of the rows has."""

    def column(layer: int | str) -> Callable[[Mapping[str, Any]], Any]:
        return lambda row: f"{row['weights'][row['layers'].index(layer)]:.3f}" if layer in row["layers"] else None

    layers = sorted({layer for row in rows for layer in row["layers"]}, key=lambda one: (isinstance(one, int), one))
    return _table(title, rows, {str(layer): column(layer) for layer in layers})


def _table(title: str, runs: Sequence[Mapping[str, Any]], columns: Columns) -> _Rows:
    rows = [[run["run"], *(_cell(value(run)) for value in columns.values())] for run in runs]
    return _Rows(title, ["run", *columns], rows)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
