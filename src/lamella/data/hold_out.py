"""Split examples into two sets that share no article, for example to train on one and to evaluate on the other."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import numpy as np

from lamella.data.examples import Example


def hold_out(examples: Sequence[Example], share: float, *, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """Return the examples without, and with, whole articles that hold about a share of the questions.

    Questions on one article are similar, so a split within it would look too good. A question about several contexts
    counts as an article of its own, and so does a context without a title. An article that shares a context with one
    that stays, stays too.
    """
    units = [_unit(example) for example in examples]
    distinct = list(dict.fromkeys(units))
    sizes = dict.fromkeys(distinct, 0)
    for unit in units:
        sizes[unit] += 1
    held: set[Hashable] = set()
    taken, wanted = 0, share * len(examples)
    for place in np.random.default_rng([seed, len(distinct)]).permutation(len(distinct)).tolist():
        unit = distinct[place]
        if abs(taken + sizes[unit] - wanted) < abs(taken - wanted):  # an article that would overshoot is passed over
            held.add(unit)
            taken += sizes[unit]
    held -= _sharing_a_context(examples, units, held)
    kept = [example for example, unit in zip(examples, units, strict=True) if unit not in held]
    return kept, [example for example, unit in zip(examples, units, strict=True) if unit in held]


def _sharing_a_context(
    examples: Sequence[Example], units: Sequence[Hashable], held: Collection[Hashable]
) -> set[Hashable]:
    """Return the articles in `held` that share a context with another article, directly or through others of them."""
    articles: dict[str, set[Hashable]] = {}
    for example, unit in zip(examples, units, strict=True):
        if example.group is None:
            articles.setdefault(" ".join(example.context.text.split()), set()).add(unit)
    shared = [found for found in articles.values() if len(found) > 1]
    sharing: set[Hashable] = set()
    count = -1
    while count < len(sharing):
        count = len(sharing)
        for found in shared:
            if any(unit not in held or unit in sharing for unit in found):
                sharing.update(unit for unit in found if unit in held)
    return sharing


def _unit(example: Example) -> Hashable:
    if example.group is not None:
        return ("group", example.group)
    return ("title", example.context.title) if example.context.title else ("text", example.context.text)
