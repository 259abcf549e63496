"""Which windows every optimiser step of a pass takes, and how a pass continues in its middle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lamella.config import TrainingOptions
from lamella.data.examples import Example
from lamella.data.mixture import Mixture
from lamella.data.windows.batches import BucketOrder
from lamella.data.windows.features import Features
from lamella.data.windows.padding import Indices
from lamella.errors import DataError


@dataclass(frozen=True)
class Position:
    """How far a pass has come: steps done in all, the current epoch, steps done in that epoch."""

    step: int = 0
    epoch: int = 0
    place: int = 0


BEGINNING = Position()


@dataclass(frozen=True)
class Step:
    """One optimiser step of the pass."""

    position: Position  # after it
    epoch: float  # epochs done after it
    features: Features
    stratum: int
    batches: Sequence[Indices]

    @property
    def number(self) -> int:
        return self.position.step


class Steps:
    """The steps of a pass. `feed(epoch)` gives the windows of an epoch; augmentation changes them every epoch.

    With a mixture, the windows are those of all epochs, and the mixture decides how often each epoch takes them.

    The first epoch decides how many steps an epoch has. Augmented texts may give a few windows more or fewer: the
    number of steps stays, so that schedules and evaluations stay, and the last epoch ends a little early or late.
    """

    def __init__(
        self,
        feed: Callable[[int], Features],
        options: TrainingOptions,
        fractions: Sequence[float],
        mixture: Mixture | None = None,
    ) -> None:
        self.feed, self.options, self.mixture = feed, options, mixture
        self.cuts = sorted({*options.strata, *fractions})
        first = feed(0)
        self.ranks = question_ranks(map(self._question, first.examples), options.order_seed)
        self.bounds = [max(1, round(cut * len(self.ranks))) for cut in self.cuts]  # of the ranks in each stratum
        self.questions = min(self.bounds[-1], len(self.ranks))  # that the pass takes
        self.first = self._order(first, 0)
        self.windows = sum(map(len, self.first.members))  # that the first epoch takes
        self.per_epoch = len(self.first)
        self.total = total_steps(options, self.per_epoch)
        empty = [fraction for fraction in fractions if not self.count_for(fraction) and self.total]
        if empty:
            raise DataError(
                f"learner.fraction: expected enough questions for at least one window, got none with {empty[0]:g}; "
                "raise it."
            )

    def stratum(self, fraction: float) -> int:
        """Return the last stratum that a learner of this fraction takes."""
        return self.cuts.index(fraction)

    def count_for(self, fraction: float) -> int:
        """Return how many steps of the pass a learner of this fraction takes."""
        last = self.stratum(fraction)
        epochs, rest = divmod(self.total, max(1, self.per_epoch))
        per_epoch = sum(self.first.groups_in(stratum) for stratum in range(min(last + 1, len(self.first.members))))
        partial = [group.stratum <= last for group in self.first.epoch(epochs)] if rest else []
        return epochs * per_epoch + sum(partial[:rest])

    def epochs_done(self, position: Position) -> float:
        """Return how many epochs are done at a position."""
        return position.epoch + (
            position.place / len(self._order(self.feed(position.epoch), position.epoch)) if position.place else 0.0
        )

    def after(self, position: Position) -> Iterator[Step]:
        """Yield the steps that are left."""
        number, epoch, place = position.step, position.epoch, position.place
        while number < self.total:
            features = self.feed(epoch)
            order = self._order(features, epoch)
            for group in order.epoch(epoch, skip=place):
                if number == self.total:
                    return
                number, place = number + 1, place + 1
                position = Position(number, epoch, place)
                yield Step(position, epoch + place / len(order), features, group.stratum, group.batches)
            epoch, place = epoch + 1, 0

    def _order(self, features: Features, epoch: int) -> BucketOrder:
        options = self.options
        rank_of_example = np.array([self.ranks[self._question(example)] for example in features.examples])
        strata = np.searchsorted(self.bounds, rank_of_example[features.example], side="right")
        strata[strata == len(self.bounds)] = -1  # questions in no learner's fraction are not part of the pass
        counts = None
        if self.mixture is not None:
            counts = self.mixture.counts_of(features.examples, epoch)[features.example]
        return BucketOrder(
            features.lengths,
            options.batch_size,
            seed=options.order_seed,
            accumulate=options.accumulate,
            strata=strata,
            counts=counts,
        )

    def _question(self, example: Example) -> str:
        """Return the id of the question that an example is about: a fraction of the data has whole questions."""
        return example.question_id if self.mixture is None else self.mixture.questions[example.id]


def total_steps(options: TrainingOptions, per_epoch: int) -> int:
    """Return the optimiser steps of the whole run: `max_steps` if given, else those of the epochs."""
    if options.max_steps is not None:
        return options.max_steps
    return max(1, round(options.epochs * per_epoch)) if options.epochs else 0


def interval_in_steps(interval: float | str, per_epoch: int) -> float:
    """Convert an interval of the options, epochs or a text such as "300 steps"; the result may be fractional."""
    if isinstance(interval, str):
        return float(interval.partition(" ")[0])
    return interval * per_epoch


def is_due(step: int, every: float) -> bool:
    """Whether a step reaches a multiple of `every` that the step before had not; it may reach several at once."""
    return math.floor(step / every + 1e-9) > math.floor((step - 1) / every + 1e-9)


def question_ranks(ids: Iterable[str], seed: int) -> dict[str, int]:
    """Return the place of every question in one fixed shuffled order; a fraction of the data is a prefix of it."""
    questions = list(dict.fromkeys(ids))
    places = np.random.default_rng([seed, len(questions), 2]).permutation(len(questions))
    return {question: int(place) for question, place in zip(questions, places, strict=True)}
