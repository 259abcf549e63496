"""Which run to take for a budget, what is as good and cheaper, and what a bigger budget would buy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.errors import RunError, UsageError
from lamella.study.compare import Against, Contender, compare_with, read_contenders
from lamella.study.records import read_runs

SAVES = 0.1  # a cost counts as lower by this share or more: timings vary by a few percent from run to run


@dataclass(frozen=True)
class Limit:
    """A kind of cost that a budget may limit, and how it is told."""

    option: str
    key: str  # in cost.json
    scale: float  # from there to the unit of the option
    form: str

    def paid(self, one: Contender) -> float | None:
        paid = one.mean_cost(self.key)
        return None if paid is None else paid * self.scale

    def told(self, value: float) -> str:
        return self.form.format(value)


LIMITS = (
    Limit("--max-params", "trainable_parameters", 1, "{:,.0f} trained parameters"),
    Limit("--max-ms", "inference_seconds_per_1000", 1, "{:.2f} ms a question"),  # s for 1,000 are ms for one
    Limit("--max-train-minutes", "train_seconds", 1 / 60, "{:.1f} minutes of training"),
)


@dataclass(frozen=True)
class Recommendation:
    """The best reader within the budget, and its neighbours."""

    best: Contender
    cheaper: Mapping[str, tuple[Against, tuple[str, ...]]]  # not distinguishable from it; in what they cost less
    bigger: Mapping[str, tuple[Against, tuple[str, ...]]]  # better, the next one first; the limits that each breaks
    unknown: tuple[str, ...]  # of which it is not recorded what the budget limits
    left_out: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "best": self.best.to_json(),
            "cheaper": [
                {**against.ours.to_json(), "against_best": against.to_json(), "saves": list(saves)}
                for against, saves in self.cheaper.values()
            ],
            "bigger_budget": [
                {**against.ours.to_json(), "against_best": against.to_json(), "breaks": list(breaks)}
                for against, breaks in self.bigger.values()
            ],
            "unknown_cost": list(self.unknown),
            "left_out": dict(self.left_out),
        }

    def lines(self) -> list[str]:
        told = [limit.told(paid) for limit in LIMITS if (paid := limit.paid(self.best)) is not None]
        lines = [f"take {self.best.name}: F1 {self.best.mean_f1:.2f}" + (f", {', '.join(told)}" if told else "")]
        lines += [str(run.folder) for run in self.best.runs]
        for against, saves in self.cheaper.values():
            lines.append(f"cheaper: {against.verdict}; {against.ours.name} needs {', '.join(saves)}")
        for against, breaks in self.bigger.values():
            lines.append(f"a bigger budget: {against.verdict}; {against.ours.name} needs {', '.join(breaks)}")
        if self.unknown:
            lines.append(f"left out, since their cost is not recorded: {', '.join(self.unknown)}")
        lines += [f"left out: {folder} ({state})" for folder, state in self.left_out.items()]
        return lines


def recommend(
    folders: Sequence[str | Path],
    *,
    max_params: float | None = None,
    max_ms: float | None = None,
    max_train_minutes: float | None = None,
    data: str | None = None,
) -> Recommendation:
    """The best of some runs by F1 within a budget; of equals the cheaper one."""
    budget = {
        limit: value
        for limit, value in zip(LIMITS, (max_params, max_ms, max_train_minutes), strict=True)
        if value is not None
    }
    for limit, value in budget.items():
        if not value >= 0:
            raise UsageError(f"{limit.option}: expected 0 or more. Got {value}.")
    found = read_runs(folders, needs=runs.PREDICTIONS)
    paragraphs, contenders = read_contenders(found, data)
    unknown = [one for one in contenders if any(limit.paid(one) is None for limit in budget)]
    judged = [one for one in contenders if one not in unknown]
    if not judged:
        raise RunError(
            f"{', '.join(map(str, folders))}: no run records what {' and '.join(limit.option for limit in budget)} "
            "limits; train it anew, or score its model with: lamella evaluate DATA --model RUN --out OUT"
        )
    breaks = {one.name: _breaks(one, budget) for one in judged}
    within = [one for one in judged if not breaks[one.name]]
    if not within:
        nearest = min(
            judged, key=lambda one: max((limit.paid(one) or 0) / max(budget[limit], 1e-9) for limit in budget)
        )
        raise RunError(
            f"no run is within the budget; the nearest is {nearest.name}: {', '.join(breaks[nearest.name])}."
        )
    best = min(within, key=_rank)
    others = compare_with(best, [one for one in judged if one is not best], paragraphs)
    cheaper = {
        against.ours.name: (against, saves)
        for against in sorted(others, key=lambda one: _rank(one.ours))
        if not breaks[against.ours.name] and not against.is_clear and (saves := _saves(against.ours, best))
    }
    bigger = {
        against.ours.name: (against, breaks[against.ours.name])
        for against in sorted(others, key=lambda one: one.f1.value)
        if breaks[against.ours.name] and against.f1.value > 0
    }
    return Recommendation(best, cheaper, bigger, tuple(one.name for one in unknown), found.left_out)


def _rank(one: Contender) -> tuple[float, ...]:
    """The best first; F1 that differs in rounding alone is equal, and then less paid comes first."""
    paid = [limit.paid(one) for limit in LIMITS]
    return (-round(one.mean_f1, 7), *(float("inf") if cost is None else cost for cost in paid))


def _breaks(one: Contender, budget: Mapping[Limit, float]) -> tuple[str, ...]:
    """What it needs beyond the budget, in words."""
    return tuple(
        f"{limit.told(paid)} ({limit.option} {most:g})"
        for limit, most in budget.items()
        if (paid := limit.paid(one)) is not None and paid > most
    )


def _saves(one: Contender, best: Contender) -> tuple[str, ...]:
    """In what it costs clearly less than the best, in words; nothing where it costs clearly more in anything."""
    saves = []
    for limit in LIMITS:
        ours, theirs = limit.paid(one), limit.paid(best)
        if ours is None or theirs is None:
            continue
        if ours * (1 - SAVES) > theirs:
            return ()
        if ours < theirs * (1 - SAVES):
            saves.append(f"{limit.told(ours)} instead of {limit.told(theirs).partition(' ')[0]}")
    return tuple(saves)
