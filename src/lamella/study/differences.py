"""Paired differences between readers on the same questions: interval, exact test, and verdict in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lamella.scoring.significance import Difference, bootstrap_differences, mcnemar
from lamella.study.compared_readers import ComparedReader
from lamella.study.records import SPAN

# If each unit went to either reader like a coin toss, all of n agree by chance in 1 of 2^(n-1) cases: 5 in 1 of 16,
# 6 in 1 of 32. Fewer units than this prove nothing.
MIN_UNITS = 6


@dataclass(frozen=True)
class PairedDifference:
    """The difference between a reader and the baseline on the same questions."""

    reader: ComparedReader
    baseline: ComparedReader
    wins: int  # questions with a higher exact match
    losses: int
    p_value: float | None  # of McNemar's exact test; None if the two are means over different numbers of seeds
    exact: float  # the mean difference, in percent
    f1: Difference  # in percent, with its 95 % interval
    resampled: str  # the units of the bootstrap: questions or paragraphs
    units: int  # how many there are

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 0, and is based on enough units."""
        return self.f1.is_clear and self.units >= MIN_UNITS

    @property
    def within_seeds(self) -> bool:
        """Whether the difference is below two of its standard errors between seeds; false if both have a single one."""
        variance = variance_between_seeds(self.reader.f1_of_runs, self.baseline.f1_of_runs)
        return variance is not None and abs(self.f1.value) < 2 * math.sqrt(variance)

    @property
    def verdict(self) -> str:
        """The difference in one sentence, with the better reader first."""
        better, worse, gap = self.reader, self.baseline, self.f1
        if gap.value < 0:
            better, worse, gap = worse, better, Difference(-gap.value, -gap.high, -gap.low)
        unit, title = self.reader.score.unit, self.reader.score.title
        size, interval = _number(gap.value), f"[{_number(gap.low)}, {_number(gap.high)}]"
        if self.is_clear:
            judged = "better on these questions, but within the variation between seeds"
            return (
                f"{better.name} beats {worse.name} by {size} {unit} {interval}: "
                f"{judged if self.within_seeds else 'clearly better'}"
            )
        if float(size.replace("−", "-")) == 0:
            ahead = f"same {title}" if not (gap.low or gap.high) else f"same {title} {interval}"
        else:
            ahead = f"{better.name} is {size} {unit} ahead {interval}"
        if gap.is_clear:
            return f"{better.name} and {worse.name}: too few {self.resampled} to judge; {ahead}"
        return f"{better.name} and {worse.name} are not distinguishable: {ahead}"

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain values."""
        key = self.reader.score.key
        return {
            "won": self.wins,
            "lost": self.losses,
            "mcnemar_p": self.p_value,
            **({"exact": self.exact} if self.reader.task == SPAN else {}),
            key: self.f1.value,
            f"{key}_interval": [self.f1.low, self.f1.high],
            "resampled": self.resampled,
            "clear": self.is_clear,
            "within_seeds": self.within_seeds,
            "verdict": self.verdict,
        }


def paired_differences(readers: Sequence[ComparedReader], baseline: ComparedReader) -> list[PairedDifference]:
    """Compare every reader with the baseline.

    The bootstrap resamples questions between single runs, and paragraphs if either reader has several seeds. The scores
    of a question's contexts depend on each other, so scores per context are resampled by paragraphs too.
    """
    several_contexts, paragraphs = baseline.by_question is not None, baseline.paragraphs
    differences: dict[str, PairedDifference] = {}
    for resampled, units in (("questions", None), ("paragraphs", paragraphs)):
        group = [
            reader
            for reader in readers
            if (max(len(reader.runs), len(baseline.runs)) > 1 or several_contexts) == (resampled == "paragraphs")
        ]
        if not group:
            continue
        exact = np.stack([reader.exact - baseline.exact for reader in group], axis=1)
        f1 = np.stack([reader.f1 - baseline.f1 for reader in group], axis=1)
        wins, losses = (exact > 1e-9).sum(axis=0), (exact < -1e-9).sum(axis=0)
        intervals = [difference.in_percent() for difference in bootstrap_differences(f1, units)]
        p_values, exact_means = mcnemar(wins, losses).tolist(), (100 * exact.mean(axis=0)).tolist()
        for index, reader in enumerate(group):
            differences[reader.name] = PairedDifference(
                reader=reader,
                baseline=baseline,
                wins=int(wins[index]),
                losses=int(losses[index]),
                p_value=p_values[index] if len(reader.runs) == len(baseline.runs) else None,
                exact=exact_means[index],
                f1=intervals[index],
                resampled=resampled,
                units=len(paragraphs) if units is None else len(np.unique(units)),
            )
    return [differences[reader.name] for reader in readers]


def variance_between_seeds(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the variance of the difference of two means over seeds, given the score of each seed.

    A single seed does not show how much it varies, so it is taken to vary like those of the other reader. Without it,
    the lucky seed of a baseline would make a clear difference. None if neither has several seeds.
    """
    variances = [float(np.var(scores, ddof=1)) for scores in (first, second) if len(scores) > 1]
    if not variances:
        return None
    return variances[0] / len(first) + variances[-1] / len(second)


def question_differences(readers: Sequence[ComparedReader], baseline: ComparedReader) -> list[PairedDifference]:
    """Compare every reader with the baseline per question; nothing where each question has a single context."""
    of_questions = [reader.by_question for reader in readers if reader.by_question is not None]
    return paired_differences(of_questions, baseline.by_question) if baseline.by_question is not None else []


def _number(value: float) -> str:
    """Format with one decimal; with two if one would print 0.0 for a number that is not 0. With a real minus sign."""
    text = f"{value:.1f}"
    if float(text) == 0 and value:
        text = f"{value:.2f}"
    return (text.removeprefix("-") if float(text) == 0 else text).replace("-", "−")
