"""Compare runs: quality, cost, and whether each differs from a baseline by more than chance."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella import runs as run_folders
from lamella.errors import UsageError, counted
from lamella.study.compared_readers import (
    COST_TITLES,
    THRESHOLD_PROTOCOLS,
    ComparedReader,
    group_by_reader,
    task_lines,
)
from lamella.study.differences import PairedDifference, paired_differences, question_differences
from lamella.study.keep import add_results, write_results
from lamella.study.pareto import ParetoFront, pareto_fronts, timing_devices, unranked
from lamella.study.records import SPAN, RunSelection, read_records
from lamella.study.result_files import SUFFIX

RunPath = str | os.PathLike[str]

MANY_COMPARISONS = 20


def compare(runs: RunPath | Sequence[RunPath], *, baseline: str | None = None, data: str | None = None) -> Comparison:
    """Compare finished runs with a baseline, question by question. No model is run.

    Args:
        runs: Run folders, result files, or folders of either. Runs that differ only in their seeds count as one reader.
        baseline: The name or the folder of the run that the others are compared with; by default the first.
        data: The file with the questions that the runs answered, if the runs do not record it.

    Returns:
        The readers with their scores and costs, and the paired difference of each from the baseline. Print it for a
        table, or pass `rows()` to a DataFrame.

    Example:
        >>> print(lamella.compare(["runs/last", "runs/dot"]))  # doctest: +SKIP
    """
    return compare_records(select_runs(runs, baseline), data=data, baseline=baseline)


def keep_and_compare(
    runs: RunPath | Sequence[RunPath],
    keep: Path,
    *,
    data: str | None = None,
    baseline: str | None = None,
    overwrite: bool = False,
) -> tuple[Comparison | None, list[Path]]:
    """Write the result files of some runs, and compare the runs by them; a single reader is only written."""
    selection = add_results(select_runs(runs, baseline), data)
    readers = group_by_reader(selection, data)
    comparison = compare_records(selection, data=data, baseline=baseline) if len(readers) > 1 else None
    return comparison, write_results(selection, keep, overwrite=overwrite)


@dataclass(frozen=True)
class Comparison:
    """Readers with their scores and costs, and the difference of each from the baseline.

    `print(comparison)` shows a table; `to_dict()` gives everything as plain values; `rows()` gives one flat dict per
    reader, for a DataFrame.
    """

    questions: int
    contexts: int | None  # where questions have several, each with a score of its own
    paragraphs: int
    baseline: ComparedReader
    readers: tuple[ComparedReader, ...]
    differences: Mapping[str, PairedDifference]  # by the name of the reader, without the baseline
    question_differences: Mapping[str, PairedDifference]  # per question, where questions have several contexts
    fronts: tuple[ParetoFront, ...]  # by cost, and for times by device
    left_out: Mapping[str, str]  # folders of runs that could not be compared, with the reason
    thresholds: str = "own"  # of the scores: each model's own, or `crossfit`
    question_thresholds: str = "own"  # of the scores per question

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "questions": self.questions,
            **({"contexts": self.contexts} if self.contexts else {}),
            "metric": self.baseline.score.key,
            "thresholds": self.thresholds,
            "paragraphs": self.paragraphs,
            "baseline": self.baseline.name,
            "runs": [
                {
                    **reader.to_dict(),
                    "against_baseline": self.differences[reader.name].to_dict()
                    if reader.name in self.differences
                    else None,
                    **(
                        {"against_baseline_by_question": self.question_differences[reader.name].to_dict()}
                        if reader.name in self.question_differences
                        else {}
                    ),
                }
                for reader in self.readers
            ],
            "pareto": [front.to_dict() for front in self.fronts],
            "left_out": dict(self.left_out),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dict per reader, the best first: scores, costs, and the difference from the baseline."""
        rows, key = [], self.baseline.score.key
        for reader in self._ranked():
            difference = self.differences.get(reader.name)
            row = {key: value for key, value in reader.to_dict().items() if key != "runs"}
            row |= {
                "seeds": len(reader.runs),
                f"{key}_difference": difference.f1.value if difference else None,
                f"{key}_difference_low": difference.f1.low if difference else None,
                f"{key}_difference_high": difference.f1.high if difference else None,
                "clear": difference.is_clear if difference else None,
                "mcnemar_p": difference.p_value if difference else None,
            }
            if per_question := self.question_differences.get(reader.name):
                row |= {
                    f"question_{key}_difference": per_question.f1.value,
                    f"question_{key}_difference_low": per_question.f1.low,
                    f"question_{key}_difference_high": per_question.f1.high,
                    "question_clear": per_question.is_clear,
                }
            rows.append(row)
        return rows

    def lines(self) -> list[str]:
        """Return the printed form: the table with the best reader first, a sentence per reader, the Pareto fronts."""
        questions, paragraphs = counted(self.questions, "question"), counted(self.paragraphs, "paragraph")
        contexts = f" with {counted(self.contexts, 'context')}" if self.contexts else ""
        titles = self.baseline.score.titles
        lines = [f"{questions}{contexts} about {paragraphs}; baseline: {self.baseline.name}"]
        if self.contexts:
            lines += [
                f"per context: {titles} {THRESHOLD_PROTOCOLS[self.thresholds]}",
                f"per question, by the best answer of all contexts: {titles} "
                f"{THRESHOLD_PROTOCOLS[self.question_thresholds]}",
            ]
        else:
            lines.append(f"{titles} {THRESHOLD_PROTOCOLS[self.thresholds]}")
        lines += task_lines(self.readers)
        devices = timing_devices(self.readers)
        if len(devices) == 1:
            lines.append(f"times measured on {devices[0]}")
        elif devices:
            lines.append(f"times measured on {len(devices)} devices ({'; '.join(devices)}): compare within one only")
        lines += ["", *_table([self._row(reader, bool(devices)) for reader in self._ranked()]), ""]
        ranked = [reader.name for reader in self._ranked() if reader.name in self.differences]
        lines += ["per context:"] if self.contexts else []
        lines += [self.differences[name].verdict for name in ranked]
        if self.contexts:
            lines += ["per question:", *(self.question_differences[name].verdict for name in ranked)]
        if len(self.differences) >= MANY_COMPARISONS:
            lines.append(
                f"{len(self.differences)} comparisons share one baseline: among equal readers 1 in 20 looks clear on "
                "average, and many at once if the baseline was lucky"
            )
        fronts = self._front_lines()
        lines += ["", *fronts] if fronts else []
        lines += [f"left out: {folder} ({reason})" for folder, reason in self.left_out.items()]
        return lines

    def _ranked(self) -> list[ComparedReader]:
        return sorted(self.readers, key=lambda reader: -reader.mean_f1)

    def _front_lines(self) -> list[str]:
        lines = []
        for cost, title in COST_TITLES.items():
            fronts = [front for front in self.fronts if front.cost == cost]
            for front in fronts:
                where = "" if front.device is None else f" on {front.device}"
                lines.append(f"best {self.baseline.score.title} by {title}{where}: {', '.join(front.readers)}")
            if fronts and (missing := unranked(self.readers, cost)):
                lines.append(
                    f"not ranked by {title}: {counted(len(missing), 'reader')} ({', '.join(missing)}), whose cost is "
                    "not recorded or comes from several devices"
                )
        return lines

    def _row(self, reader: ComparedReader, with_device: bool) -> dict[str, str]:
        values = reader.to_dict()
        difference = self.differences.get(reader.name)
        row = {"run": reader.name, "seeds": str(len(reader.runs))}
        score, of_questions = _with_deviation(reader), reader.by_question
        if reader.task == SPAN:
            row |= {"EM": f"{values['exact']:.2f}", "F1": score, "best F1": _cell(values["best_f1"], "{:.2f}")}
        else:
            row |= {"accuracy": score, "no-answer F1": _cell(reader.no_answer_f1, "{:.2f}")}
        if of_questions is not None and reader.task == SPAN:
            row |= {"question EM": f"{of_questions.mean_exact:.2f}", "question F1": _with_deviation(of_questions)}
        elif of_questions is not None:
            row["question accuracy"] = _with_deviation(of_questions)
        if self.thresholds == "own":
            row["threshold"] = _cell(values["threshold"], "{:.2f}")
        for key, title in COST_TITLES.items():
            row[title] = _cell(values[key], "{:,.0f}" if key != "inference_seconds_per_1000" else "{:.2f}")
        if with_device:
            row["device"] = reader.device or "–"
        row["won/lost"] = f"{difference.wins}/{difference.losses}" if difference else ""
        row["p"] = _p_value(difference.p_value) if difference else ""
        return row


def select_runs(runs: RunPath | Sequence[RunPath], baseline: str | None = None) -> RunSelection:
    """Read the runs to compare, and the baseline if it is named by its folder or file."""
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    if baseline is not None and (_path(baseline).is_dir() or baseline.endswith(SUFFIX)):
        paths.append(baseline)
    return read_records(paths, requires=run_folders.PREDICTIONS)


def compare_records(selection: RunSelection, *, data: str | None = None, baseline: str | None = None) -> Comparison:
    """Compare runs that have been read already."""
    readers = group_by_reader(selection, data)
    if len(readers) < 2:
        raise UsageError(f"compare: expected at least two readers, got only {readers[0].name}.")
    chosen = _find_baseline(readers, baseline) if baseline else readers[0]
    others = [reader for reader in readers if reader is not chosen]
    by_question = chosen.by_question
    return Comparison(
        questions=len((by_question or chosen).f1),
        contexts=len(chosen.f1) if by_question else None,
        paragraphs=len(set(chosen.paragraphs.tolist())),
        baseline=chosen,
        readers=tuple(readers),
        differences=_by_reader(paired_differences(others, chosen)),
        question_differences=_by_reader(question_differences(others, chosen)),
        fronts=tuple(front for cost in COST_TITLES for front in pareto_fronts(readers, cost)),
        left_out=selection.left_out,
        thresholds=chosen.thresholds,
        question_thresholds=(by_question or chosen).thresholds,
    )


def _by_reader(differences: Sequence[PairedDifference]) -> dict[str, PairedDifference]:
    return {difference.reader.name: difference for difference in differences}


def _find_baseline(readers: Sequence[ComparedReader], name: str) -> ComparedReader:
    """Find a reader by its name, or by the name or the folder of one of its runs."""
    tests: list[Callable[[ComparedReader], bool]] = [
        lambda reader: reader.name == name,
        lambda reader: any(run.name == name or run.folder.resolve() == _path(name).resolve() for run in reader.runs),
    ]
    for test in tests:
        for reader in readers:
            if test(reader):
                return reader
    known = ", ".join(reader.name for reader in readers[:10])
    raise UsageError(f"--baseline: expected the name or folder of one of the runs ({known}), got {name!r}.")


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))


def _with_deviation(reader: ComparedReader) -> str:
    return f"{reader.mean_f1:.2f}" + (f" ±{reader.deviation:.2f}" if reader.deviation is not None else "")


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _p_value(p_value: float | None) -> str:
    return "<0.001" if p_value is not None and p_value < 0.001 else _cell(p_value, "{:.3f}")


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lay out columns of equal width: words to the left, numbers to the right."""
    titles, left = list(rows[0]), ("run", "device")
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in titles}
    lines = [{title: title for title in titles}, *rows]
    return [
        "  ".join(
            f"{row[title]:<{widths[title]}}" if title in left else f"{row[title]:>{widths[title]}}" for title in titles
        ).rstrip()
        for row in lines
    ]
