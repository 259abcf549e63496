"""Recommend a run for a budget: the best within it, what is as good and cheaper, and what a bigger budget would buy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lamella.errors import RunError, UsageError, counted
from lamella.study.compare import RunPath, select_runs
from lamella.study.compared_readers import THRESHOLD_PROTOCOLS, TIME_COSTS, ComparedReader, group_by_reader, task_lines
from lamella.study.differences import PairedDifference, paired_differences
from lamella.study.pareto import UNKNOWN_DEVICE

MIN_SAVING = 0.1  # a cost counts as lower by this share or more: timings vary by a few percent from run to run


@dataclass(frozen=True)
class Limit:
    """A kind of cost that a budget may limit."""

    option: str
    key: str  # in cost.json
    scale: float  # from cost.json to the unit of the option
    form: str

    @property
    def is_time(self) -> bool:
        """Whether the cost depends on the device that it was measured on."""
        return self.key in TIME_COSTS

    def cost(self, reader: ComparedReader) -> float | None:
        """Return the cost of a reader in the unit of the option; None if it is unknown."""
        cost = reader.mean_cost(self.key)
        return None if cost is None else cost * self.scale

    def describe(self, value: float) -> str:
        """Return a cost with its unit."""
        return self.form.format(value)


LIMITS = (
    Limit("--max-params", "trainable_parameters", 1, "{:,.0f} trained parameters"),
    Limit("--max-ms", "inference_seconds_per_1000", 1, "{:.2f} ms per question"),  # s per 1,000 are ms per question
    Limit("--max-train-minutes", "train_seconds", 1 / 60, "{:.1f} minutes of training"),
)


@dataclass(frozen=True)
class Recommendation:
    """The best reader within the budget, and its alternatives."""

    best: ComparedReader
    readers: tuple[ComparedReader, ...]  # all that were considered
    cheaper: Mapping[str, tuple[PairedDifference, tuple[str, ...]]]  # not distinguishable; what each saves
    bigger: Mapping[str, tuple[PairedDifference, tuple[str, ...]]]  # better, nearest first; the limits each exceeds
    unknown: tuple[str, ...]  # readers that do not record a limited cost
    other_device: Mapping[str, str]  # readers left out because their times were measured on another device
    left_out: Mapping[str, str]  # folders of runs that could not be compared, with the reason

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "best": self.best.to_dict(),
            "metric": self.best.score.key,
            "thresholds": self.best.thresholds,
            "cheaper": [
                {**difference.reader.to_dict(), "against_best": difference.to_dict(), "saves": list(saves)}
                for difference, saves in self.cheaper.values()
            ],
            "bigger_budget": [
                {**difference.reader.to_dict(), "against_best": difference.to_dict(), "breaks": list(exceeded)}
                for difference, exceeded in self.bigger.values()
            ],
            "unknown_cost": list(self.unknown),
            "other_device": dict(self.other_device),
            "left_out": dict(self.left_out),
        }

    def lines(self) -> list[str]:
        """Return the printed form."""
        title = self.best.score.title
        costs = {limit: cost for limit in LIMITS if (cost := limit.cost(self.best)) is not None}
        described = [limit.describe(cost) for limit, cost in costs.items()]
        measured = f" (on {self.best.device or UNKNOWN_DEVICE})" if any(limit.is_time for limit in costs) else ""
        lines = [f"take {self.best.name}: {', '.join([f'{title} {self.best.mean_f1:.2f}', *described])}{measured}"]
        lines += [str(run.folder) for run in self.best.runs]
        lines.append(f"{title} {THRESHOLD_PROTOCOLS[self.best.thresholds]}")
        lines += task_lines(self.readers)
        for difference, saves in self.cheaper.values():
            lines.append(f"cheaper: {difference.verdict}; {difference.reader.name} needs {', '.join(saves)}")
        for difference, exceeded in self.bigger.values():
            lines.append(f"bigger budget: {difference.verdict}; {difference.reader.name} needs {', '.join(exceeded)}")
        if self.unknown:
            readers = counted(len(self.unknown), "reader")
            lines.append(f"left out: {readers} without a recorded cost ({', '.join(self.unknown)})")
        for device, count in Counter(self.other_device.values()).items():
            names = ", ".join(name for name, where in self.other_device.items() if where == device)
            lines.append(f"left out: {counted(count, 'reader')} timed on {device} ({names})")
        lines += [f"left out: {folder} ({reason})" for folder, reason in self.left_out.items()]
        return lines


def recommend(
    runs: RunPath | Sequence[RunPath],
    *,
    max_params: float | None = None,
    max_ms: float | None = None,
    max_train_minutes: float | None = None,
    device: str | None = None,
    data: str | None = None,
) -> Recommendation:
    """Choose the run with the best F1 (classifiers: accuracy) within a budget; among equals, the cheaper one.

    Times from different devices are never compared: if the runs were timed on several, a limit on time needs `device`,
    and readers timed elsewhere are left out.
    """
    budget = {
        limit: value
        for limit, value in zip(LIMITS, (max_params, max_ms, max_train_minutes), strict=True)
        if value is not None
    }
    for limit, value in budget.items():
        if not value >= 0:
            raise UsageError(f"{limit.option}: expected 0 or more, got {value}.")
    selection = select_runs(runs)
    readers = group_by_reader(selection, data)
    unknown = [reader for reader in readers if any(limit.cost(reader) is None for limit in budget)]
    known = [reader for reader in readers if reader not in unknown]
    if not known:
        raise RunError(
            f"{', '.join(str(run.folder) for run in selection.records[:3])}: expected a recorded cost for "
            f"{' and '.join(limit.option for limit in budget)}, got none; "
            "train again, or score the model with: lamella evaluate DATA --model RUN --out OUT"
        )
    judged = _timed_on_one_device(known, budget, device)
    exceeded = {reader.name: _exceeded(reader, budget) for reader in judged}
    within = [reader for reader in judged if not exceeded[reader.name]]
    if not within:
        nearest = min(judged, key=lambda reader: _overrun(reader, budget))
        raise RunError(
            f"expected a run within the budget, got none; the nearest is {nearest.name}: "
            f"{', '.join(exceeded[nearest.name])}."
        )
    best = min(within, key=_rank_among(within))
    differences = paired_differences([reader for reader in judged if reader is not best], best)
    cheaper = {
        difference.reader.name: (difference, saves)
        for difference in sorted(differences, key=lambda difference: _rank_among(judged)(difference.reader))
        if not exceeded[difference.reader.name] and not difference.is_clear
        if (saves := _savings(difference.reader, best))
    }
    bigger = {
        difference.reader.name: (difference, exceeded[difference.reader.name])
        for difference in sorted(differences, key=lambda difference: difference.f1.value)
        if exceeded[difference.reader.name] and difference.f1.value > 0
    }
    return Recommendation(
        best,
        tuple(readers),
        cheaper,
        bigger,
        unknown=tuple(reader.name for reader in unknown),
        other_device={reader.name: reader.device or UNKNOWN_DEVICE for reader in known if reader not in judged},
        left_out=selection.left_out,
    )


def _timed_on_one_device(
    readers: Sequence[ComparedReader], budget: Mapping[Limit, float], device: str | None
) -> list[ComparedReader]:
    """Return the readers timed on `device`; without it, all, if no limit on time needs a single device."""
    counts = Counter(reader.device or UNKNOWN_DEVICE for reader in readers)
    listed = " and ".join(f"{name} ({counted(count, 'reader')})" for name, count in counts.items())
    if device is not None:
        matching = [name for name in counts if device.lower() in name.lower()]
        matching = [name for name in matching if name.lower() == device.lower()] or matching
        if len(matching) != 1:
            raise UsageError(
                f"--device: expected one of the devices that times were measured on ({listed}), got {device!r}."
            )
        return [reader for reader in readers if (reader.device or UNKNOWN_DEVICE) == matching[0]]
    timed = [limit.option for limit in budget if limit.is_time]
    if timed and len(counts) > 1:
        raise UsageError(
            f"{' and '.join(timed)}: expected times from one device, got times from {listed}; choose one with --device."
        )
    return list(readers)


def _rank_among(readers: Sequence[ComparedReader]) -> Any:
    """Return a sort key: best F1 first; F1 that differs only by rounding is equal, and then the cheaper comes first.

    Times break ties only if all the readers were timed on one device.
    """
    one_device = len({reader.device for reader in readers}) == 1
    limits = [limit for limit in LIMITS if one_device or not limit.is_time]

    def key(reader: ComparedReader) -> tuple[float, ...]:
        costs = [limit.cost(reader) for limit in limits]
        return (-round(reader.mean_f1, 7), *(float("inf") if cost is None else cost for cost in costs))

    return key


def _overrun(reader: ComparedReader, budget: Mapping[Limit, float]) -> float:
    """Return by what factor a reader exceeds the limit that it exceeds most."""
    return max((limit.cost(reader) or 0) / max(most, 1e-9) for limit, most in budget.items())


def _exceeded(reader: ComparedReader, budget: Mapping[Limit, float]) -> tuple[str, ...]:
    """Describe the costs of a reader that exceed the budget."""
    return tuple(
        f"{limit.describe(cost)} ({limit.option} {most:g})"
        for limit, most in budget.items()
        if (cost := limit.cost(reader)) is not None and cost > most
    )


def _savings(reader: ComparedReader, best: ComparedReader) -> tuple[str, ...]:
    """Describe the costs clearly below the best reader's; empty if any cost is clearly above."""
    savings = []
    for limit in LIMITS:
        cost, best_cost = limit.cost(reader), limit.cost(best)
        if cost is None or best_cost is None or (limit.is_time and reader.device != best.device):
            continue
        if cost * (1 - MIN_SAVING) > best_cost:
            return ()
        if cost < best_cost * (1 - MIN_SAVING):
            savings.append(f"{limit.describe(cost)} instead of {limit.describe(best_cost).partition(' ')[0]}")
    return tuple(savings)
