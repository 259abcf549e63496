"""Runs side by side: quality, cost, and whether each differs from one of them by more than chance."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella import runs
from lamella.errors import UsageError
from lamella.scoring.metrics import QuestionScores
from lamella.scoring.significance import Difference, bootstrap_differences, mcnemar
from lamella.study.keep import same_questions, with_results, write_results
from lamella.study.records import Found, RunRecord, is_number, read_runs, read_scored
from lamella.study.result_files import SUFFIX, Result

# What is paid for F1, as cost.json names it, with the words and the scale of a table.
COSTS = {"trainable_parameters": "parameters", "train_seconds": "train s", "inference_seconds_per_1000": "ms/question"}
TRAINING_FLOPS = "training_flops"  # of a whole run; no run records it, but it follows from what they do

# Where all of so few agree, each like a coin, that is still no rare chance: 5 do so in 1 of 16 cases, 6 in 1 of 32.
FEWEST = 6


@dataclass(frozen=True, eq=False)
class Contender:
    """A reader to compare: one run, or several that differ in their seeds alone, each question averaged over them."""

    name: str
    runs: tuple[RunRecord, ...]
    exact: NDArray[np.float64]  # a question each
    f1: NDArray[np.float64]
    f1_of_runs: tuple[float, ...]  # in percent

    @cached_property
    def mean_f1(self) -> float:
        """In percent."""
        return 100 * float(self.f1.mean())

    @property
    def deviation(self) -> float | None:
        """Of F1 between the seeds, in percent."""
        return float(np.std(self.f1_of_runs, ddof=1)) if len(self.runs) > 1 else None

    def mean_result(self, key: str) -> float | None:
        return _mean([run.results.get(key) for run in self.runs])

    def mean_cost(self, key: str) -> float | None:
        return _mean([_training_flops(run) if key == TRAINING_FLOPS else run.cost.get(key) for run in self.runs])

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "runs": [str(run.folder) for run in self.runs],
            "exact": 100 * float(self.exact.mean()),
            "f1": self.mean_f1,
            "f1_deviation": self.deviation,
            "best_f1": self.mean_result("best_f1"),
            "threshold": self.mean_result("threshold"),
            **{key: self.mean_cost(key) for key in COSTS},
            **{key: self.mean_cost(key) for key in ("efficiency", "model_bytes", "peak_memory_bytes")},
        }


@dataclass(frozen=True)
class Against:
    """How a contender does against another one, question by question."""

    ours: Contender
    theirs: Contender
    won: int  # questions whose exact match is higher
    lost: int
    p: float | None  # of exact McNemar; None where a mean over more seeds has more ways to be right or wrong
    exact: float  # the mean difference, in percent
    f1: Difference
    resampled: str  # what was drawn: questions or paragraphs
    units: int  # how many of them there are

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out 0, and is made of enough to say so."""
        return self.f1.is_clear and self.units >= FEWEST

    @property
    def within_seeds(self) -> bool:
        """Whether the seeds alone could make as much of a difference: it is under two of its standard errors."""
        variances = [(one.deviation or 0.0) ** 2 / len(one.runs) for one in (self.ours, self.theirs)]
        return abs(self.f1.value) < 2 * math.sqrt(sum(variances))

    @property
    def verdict(self) -> str:
        better, worse, gap = self.ours, self.theirs, self.f1
        if gap.value < 0:
            better, worse, gap = worse, better, Difference(-gap.value, -gap.high, -gap.low)
        verb = "beats" if gap.value > 0 else "equals"
        by = f" by {_number(gap.value)} F1 [{_number(gap.low)}, {_number(gap.high)}]"
        found = "clearly better" if self.is_clear else "not distinguishable"
        if gap.is_clear and not self.is_clear:
            found = f"too few {self.resampled} to tell"
        elif self.is_clear and self.within_seeds:
            found = "better on these questions, but not by more than the seeds differ"
        return f"{better.name} {verb} {worse.name}{by if gap.value or gap.high else ''}: {found}"

    def to_json(self) -> dict[str, Any]:
        return {
            "won": self.won,
            "lost": self.lost,
            "mcnemar_p": self.p,
            "exact": self.exact,
            "f1": self.f1.value,
            "f1_interval": [self.f1.low, self.f1.high],
            "resampled": self.resampled,
            "clear": self.is_clear,
            "within_seeds": self.within_seeds,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Comparison:
    """All contenders against one of them."""

    questions: int
    paragraphs: int
    baseline: Contender
    contenders: tuple[Contender, ...]
    against: Mapping[str, Against]  # by name, the baseline left out
    fronts: Mapping[str, tuple[str, ...]]  # the names that nothing beats at that cost, cheapest first
    left_out: Mapping[str, str]
    thresholds: str = "own"  # at which EM and F1 are: the models' own, or cross-fitted by article

    def to_json(self) -> dict[str, Any]:
        return {
            "questions": self.questions,
            "thresholds": self.thresholds,
            "paragraphs": self.paragraphs,
            "baseline": self.baseline.name,
            "runs": [
                {
                    **one.to_json(),
                    "against_baseline": self.against[one.name].to_json() if one.name in self.against else None,
                }
                for one in self.contenders
            ],
            "pareto": {key: list(names) for key, names in self.fronts.items()},
            "left_out": dict(self.left_out),
        }

    def lines(self) -> list[str]:
        """What is printed: the table, best first, the verdicts, the fronts."""
        ranked = sorted(self.contenders, key=lambda one: -one.mean_f1)
        lines = [f"{self.questions} questions about {self.paragraphs} paragraphs; against {self.baseline.name}"]
        if self.thresholds == "crossfit":
            lines.append("EM and F1 at thresholds that were tuned on the other articles")
        lines.append("")
        lines += _table([self._row(one) for one in ranked])
        lines += ["", *(self.against[one.name].verdict for one in ranked if one.name in self.against)]
        if len(self.against) >= 20:
            lines.append(
                f"{len(self.against)} comparisons share one baseline: between equals 1 in 20 looks clear on average, "
                "and many at once where the baseline was lucky"
            )
        fronts = [f"best F1 by {COSTS[key]}: {', '.join(names)}" for key, names in self.fronts.items() if names]
        lines += ["", *fronts] if fronts else []
        lines += [f"left out: {folder} ({state})" for folder, state in self.left_out.items()]
        return lines

    def _row(self, one: Contender) -> dict[str, str]:
        told = one.to_json()
        against = self.against.get(one.name)
        return {
            "run": one.name,
            "seeds": str(len(one.runs)),
            "EM": f"{told['exact']:.2f}",
            "F1": f"{told['f1']:.2f}" + (f" ±{one.deviation:.2f}" if one.deviation is not None else ""),
            "best_f1": _cell(told["best_f1"], "{:.2f}"),
            "threshold": _cell(told["threshold"], "{:.2f}"),
            **{title: _cell(told[key], "{:,.0f}" if key != "inference_seconds_per_1000" else "{:.2f}")
               for key, title in COSTS.items()},
            "won/lost": f"{against.won}/{against.lost}" if against else "",
            "p": _cell(against.p, "{:.3f}") if against else "",
        }  # fmt: skip


def compare(folders: Sequence[str | Path], *, data: str | None = None, baseline: str | None = None) -> Comparison:
    """Compare the runs of some folders with one of them, the first unless `baseline` names another."""
    return compare_found(read_with(folders, baseline), data=data, baseline=baseline)


def keep_and_compare(
    folders: Sequence[str | Path],
    keep: Path,
    *,
    data: str | None = None,
    baseline: str | None = None,
    overwrite: bool = False,
) -> tuple[Comparison | None, list[Path]]:
    """Write the result files of some runs, and compare them as these files do; those of one reader are only kept."""
    found = with_results(read_with(folders, baseline), data)
    _, readers = read_contenders(found)
    comparison = compare_found(found, baseline=baseline) if len(readers) > 1 else None
    return comparison, write_results(found, keep, overwrite=overwrite)


def read_with(folders: Sequence[str | Path], baseline: str | None) -> Found:
    """The runs of some folders, and of the baseline where that is named by a folder or a file."""
    named = baseline is not None and (_path(baseline).is_dir() or baseline.endswith(SUFFIX))
    return read_runs([*folders, *([baseline] if baseline and named else [])], needs=runs.PREDICTIONS)


def compare_found(found: Found, *, data: str | None = None, baseline: str | None = None) -> Comparison:
    """Compare runs that are read already with one of them."""
    paragraphs, contenders = read_contenders(found, data)
    if len(contenders) < 2:
        raise UsageError(f"compare: expected two readers or more. Got {contenders[0].name} alone.")
    chosen = _find(contenders, baseline) if baseline else contenders[0]
    others = [one for one in contenders if one is not chosen]
    return Comparison(
        questions=len(paragraphs),
        paragraphs=len(set(paragraphs.tolist())),
        baseline=chosen,
        contenders=tuple(contenders),
        against={one.ours.name: one for one in compare_with(chosen, others, paragraphs)},
        fronts={key: tuple(one.name for one in pareto_front(contenders, key)) for key in COSTS},
        left_out=found.left_out,
        thresholds=kept.scored_at if (kept := chosen.runs[0].kept) else "own",
    )


def read_contenders(found: Found, data: str | None = None) -> tuple[NDArray[np.int64], list[Contender]]:
    """The readers among some runs: those that differ in seeds alone are one. With the paragraph of every question.

    Where a result file is among them, all are compared as such files are: at thresholds cross-fitted by article.
    """
    scores: Sequence[QuestionScores | Result]
    if any(run.kept for run in found.runs):
        found = with_results(found, data)
        scores = same_questions(found.runs)
        paragraphs = scores[0].paragraphs
    else:
        examples, scores = read_scored(found.runs, data)
        paragraphs = np.unique([one.context.text for one in examples], return_inverse=True)[1]
    groups: dict[str, list[int]] = {}
    taken: set[tuple[str, Any]] = set()
    for place, run in enumerate(found.runs):
        # A run that repeats the seeds of another adds nothing to a mean, so it stands alone; as does one that has no
        # options to tell by.
        key = json.dumps(run.options, sort_keys=True) if run.config else str(run.folder)
        key = f"{key} {run.folder}" if (key, run.seeds) in taken else key
        taken.add((key, run.seeds))
        groups.setdefault(key, []).append(place)
    contenders: list[Contender] = []
    taken_names = {run.name for run in found.runs}
    for places in groups.values():
        members = tuple(found.runs[place] for place in places)
        name, own = members[0].name, {run.name for run in members}
        if len(members) > 1 and (common := _common_name([run.name for run in members])) not in taken_names - own:
            name = common
            taken_names.add(name)
        contenders.append(
            Contender(
                name=name,
                runs=members,
                exact=np.mean([scores[place].exact for place in places], axis=0),
                f1=np.mean([scores[place].f1 for place in places], axis=0),
                f1_of_runs=tuple(100 * float(scores[place].f1.mean()) for place in places),
            )
        )
    return paragraphs, contenders


def compare_with(theirs: Contender, others: Sequence[Contender], paragraphs: NDArray[np.int64]) -> list[Against]:
    """Every one of `others` against one contender. Between single runs questions are drawn; where there are several
    seeds, paragraphs.
    """
    found: dict[str, Against] = {}
    for resampled, units in (("questions", None), ("paragraphs", paragraphs)):
        wanted = resampled == "paragraphs"
        group = [one for one in others if (max(len(one.runs), len(theirs.runs)) > 1) == wanted]
        if not group:
            continue
        exact = np.stack([one.exact - theirs.exact for one in group], axis=1)
        f1 = np.stack([one.f1 - theirs.f1 for one in group], axis=1)
        won, lost = (exact > 1e-9).sum(axis=0), (exact < -1e-9).sum(axis=0)
        intervals = [one.in_percent() for one in bootstrap_differences(f1, units)]
        gaps = (100 * exact.mean(axis=0)).tolist()
        for place, (one, p) in enumerate(zip(group, mcnemar(won, lost).tolist(), strict=True)):
            found[one.name] = Against(
                ours=one,
                theirs=theirs,
                won=int(won[place]),
                lost=int(lost[place]),
                p=p if len(one.runs) == len(theirs.runs) else None,
                exact=gaps[place],
                f1=intervals[place],
                resampled=resampled,
                units=len(paragraphs) if units is None else len(np.unique(units)),
            )
    return [found[one.name] for one in others]


def pareto_front(contenders: Sequence[Contender], cost: str) -> list[Contender]:
    """Those that no other one beats at the same cost or less, cheapest first; unknown costs take no part."""
    known = [(paid, one) for one in contenders if (paid := one.mean_cost(cost)) is not None]
    front: list[Contender] = []
    for _, one in sorted(known, key=lambda pair: (pair[0], -pair[1].mean_f1)):
        if not front or one.mean_f1 > front[-1].mean_f1 + 1e-9:
            front.append(one)
    return front


def _find(contenders: Sequence[Contender], name: str) -> Contender:
    """By the name of the reader, or by the name or the folder of one of its runs."""
    tests: list[Callable[[Contender], bool]] = [
        lambda one: one.name == name,
        lambda one: any(run.name == name or run.folder.resolve() == _path(name).resolve() for run in one.runs),
    ]
    for test in tests:
        for one in contenders:
            if test(one):
                return one
    known = ", ".join(one.name for one in contenders[:10])
    raise UsageError(f"--baseline {name}: expected one of the runs or its folder. There are {known}.")


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))


def _common_name(names: Sequence[str]) -> str:
    """What the names begin with, less the word for a seed: `dot-seed0` and `dot-seed1` are `dot`."""
    shared = "".join(letters[0] for letters in takewhile(lambda one: len(set(one)) == 1, zip(*names, strict=False)))
    return re.sub(r"(order_)?seed[-_=]?\d*$", "", shared).rstrip("-_.+, ") or names[0]


def _training_flops(run: RunRecord) -> float | None:
    """Those of a window, times the windows that it learnt from."""
    parts: list[Any] = [
        run.cost.get(key) for key in ("training_flops_per_window", "windows_per_second", "train_seconds")
    ]
    return math.prod(parts) if all(map(is_number, parts)) else None


def _mean(values: Sequence[Any]) -> float | None:
    return float(np.mean(values)) if all(map(is_number, values)) else None


def _number(value: float) -> str:
    """One place behind the point; two where one would say 0.0 of what is not. With a true minus sign."""
    told = f"{value:.1f}"
    if float(told) == 0 and value:
        told = f"{value:.2f}"
    return (told.removeprefix("-") if float(told) == 0 else told).replace("-", "−")


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Columns of equal width, the first to the left and numbers to the right."""
    titles = list(rows[0])
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in titles}
    lines = [{title: title for title in titles}, *rows]
    return [
        "  ".join(
            f"{row[title]:<{widths[title]}}" if title == titles[0] else f"{row[title]:>{widths[title]}}"
            for title in titles
        ).rstrip()
        for row in lines
    ]
