"""Split examples into two sets that share no article, for example to train on one and to evaluate on the other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from lamella.data.examples import Example


def hold_out(examples: Sequence[Example], share: float, *, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """Return the examples without, and with, whole articles that hold about a share of the questions.

    Questions on one article are similar, so a split within it would look too good. A question about several contexts
    counts as an article of its own, and so does a context without a title. Articles that share a context, directly or
    through others, are on one side.
    """
    units = [_unit(example) for example in examples]
    distinct = list(dict.fromkeys(units))
    joined = _join_articles(examples, units)
    sizes = dict.fromkeys(joined.values(), 0)
    for unit in units:
        sizes[joined[unit]] += 1
    held: set[Hashable] = set()
    passed_over: set[Hashable] = set()
    taken, wanted = 0, share * len(examples)
    for place in np.random.default_rng([seed, len(distinct)]).permutation(len(distinct)).tolist():
        articles = joined[distinct[place]]
        if articles in held or articles in passed_over:
            continue
        if abs(taken + sizes[articles] - wanted) < abs(taken - wanted):
            held.add(articles)
            taken += sizes[articles]
        else:  # they would overshoot
            passed_over.add(articles)
    kept = [example for example, unit in zip(examples, units, strict=True) if joined[unit] not in held]
    return kept, [example for example, unit in zip(examples, units, strict=True) if joined[unit] in held]


def _join_articles(examples: Sequence[Example], units: Sequence[Hashable]) -> dict[Hashable, Hashable]:
    """Return an article that stands for each article and all that it shares a context with (union-find)."""
    parents: dict[Hashable, Hashable] = {unit: unit for unit in units}

    def find(unit: Hashable) -> Hashable:
        while parents[unit] != unit:
            parents[unit] = unit = parents[parents[unit]]  # shortens the way for the next search
        return unit

    first: dict[str, Hashable] = {}
    for example, unit in zip(examples, units, strict=True):
        other = first.setdefault(" ".join(example.context.text.split()), unit)
        parents[find(unit)] = find(other)
    return {unit: find(unit) for unit in parents}


def _unit(example: Example) -> Hashable:
    if example.group is not None:
        return ("group", example.group)
    return ("title", example.context.title) if example.context.title else ("text", example.context.text)
