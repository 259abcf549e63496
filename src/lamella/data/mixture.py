"""The mixture of a training set: how often each epoch takes the questions of each file, and with which contexts.

    train = ["squad.json", { file = "reviews.json", weight = 2, negatives = 0.5 }]

Here an epoch takes each question of `reviews.json` twice, every time with probability 0.5 as a negative (`negatives`).
A question has another negative in every epoch, and another of its contexts if several contain the answer. Everything is
drawn before training, so that the windows of all epochs can be cut, cached and aligned with a teacher's logits once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lamella.config import TrainFile, TrainingOptions
from lamella.data.examples import Example
from lamella.data.negatives import NegativeContexts, Question, group_questions, ids_of, make_negative, single_context
from lamella.errors import DataError
from lamella.progress import progress

MOST_EPOCHS = 16  # that are drawn; longer training repeats them, so that the windows stay few enough for memory

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class FileShare:
    """What the first epoch takes of a file."""

    file: TrainFile
    questions: int  # of the file
    examples: int  # that the epoch takes
    unanswerable: int  # of these


@dataclass(frozen=True)
class Mixture:
    """The examples that any epoch takes, and how often each epoch takes each of them."""

    examples: tuple[Example, ...]
    counts: Counts  # [epochs, examples]
    questions: Mapping[str, str]  # the id of each example's question, by the id of the example
    shares: tuple[FileShare, ...]

    def counts_of(self, examples: Sequence[Example], epoch: int) -> Counts:
        """Return how often an epoch takes each of some examples, which have the ids of the mixture's."""
        counts: Counts = self.counts[epoch % len(self.counts)]
        if len(examples) == len(self.examples):
            return counts
        by_id = dict(zip((example.id for example in self.examples), counts, strict=True))
        return np.array([by_id[example.id] for example in examples], np.int64)


def mix(files: Sequence[tuple[TrainFile, Sequence[Example]]], training: TrainingOptions) -> Mixture | None:
    """Draw the examples of every epoch; None if every epoch takes all examples exactly once."""
    if all(file.plain for file, _ in files):
        return None
    draws = _Draws(_count_epochs(files, training), {name for _, examples in files for name in ids_of(examples)})
    ends = []
    for number, (file, examples) in enumerate(files):
        if file.plain:
            for example in examples:
                draws.take(example.question_id, example)
        else:
            draws.add_drawn(file, examples, np.random.default_rng([training.order_seed, number, 3]))
        ends.append(len(draws.examples))
    counts = draws.counts()
    if not counts.any(axis=1).all():
        raise DataError(
            f"{', '.join(file.file for file, _ in files)}: expected every epoch to take some questions, got an epoch "
            "without any; raise the weights in data.train."
        )
    shares = []
    for (file, examples), begin, end in zip(files, [0, *ends], ends, strict=False):
        taken = counts[0, begin:end]
        unanswerable = np.array([not example.answerable for example in draws.examples[begin:end]], np.bool_)
        questions = len({example.question_id for example in examples})
        shares.append(FileShare(file, questions, int(taken.sum()), int(taken[unanswerable].sum())))
    return Mixture(tuple(draws.examples), counts, draws.questions, tuple(shares))


class _Draws:
    """Collects the examples that epochs take."""

    def __init__(self, epochs: int, ids: Set[str]) -> None:
        self.epochs, self.ids = epochs, ids  # of all files
        self.examples: list[Example] = []
        self.places: dict[tuple[str, str], int] = {}  # by question and example id
        self.taken: list[tuple[int, int]] = []  # epoch and example
        self.questions: dict[str, str] = {}

    def take(self, question: str, example: Example, epoch: int | None = None) -> None:
        """Let one epoch take an example; by default, every epoch."""
        place = self.places.setdefault((question, example.id), len(self.examples))
        if place == len(self.examples):
            self.examples.append(example)
            self.questions[example.id] = question
        self.taken += [(number, place) for number in (range(self.epochs) if epoch is None else [epoch])]

    def add_drawn(self, file: TrainFile, examples: Sequence[Example], rng: np.random.Generator) -> None:
        questions = group_questions(examples)
        contexts = NegativeContexts(examples) if file.negatives else None
        with progress(f"mixing {file.file}", len(questions)) as advance:
            for question in questions:
                self._draw(question, file, contexts, rng)
                advance()

    def _draw(
        self, question: Question, file: TrainFile, contexts: NegativeContexts | None, rng: np.random.Generator
    ) -> None:
        times = int(file.weight) + (rng.random(self.epochs) < file.weight % 1)  # 2.3 is 3 with probability 0.3, else 2
        epochs = np.repeat(np.arange(self.epochs), times)
        negative = rng.random(len(epochs)) < (file.negatives if question.positives else len(question.examples) > 1)
        found = contexts.best(question, int(negative.sum())) if contexts is not None and negative.any() else []
        used = 0
        for epoch, is_negative in zip(epochs.tolist(), negative.tolist(), strict=True):
            if is_negative and found:
                place = used % len(found)
                self.take(question.id, make_negative(question, found[place], self.ids, place), epoch)
                used += 1
            elif question.positives:
                self.take(question.id, question.positives[int(rng.integers(len(question.positives)))], epoch)
            else:
                self.take(question.id, single_context(question), epoch)

    def counts(self) -> Counts:
        counts = np.zeros((self.epochs, len(self.examples)), np.int64)
        epoch, place = np.array(self.taken, np.int64).reshape(-1, 2).T
        np.add.at(counts, (epoch, place), 1)
        return counts


def _count_epochs(files: Sequence[tuple[TrainFile, Sequence[Example]]], training: TrainingOptions) -> int:
    """Return the number of epochs to draw; for a number of steps at least as many as these can take."""
    epochs = training.epochs
    if training.max_steps is not None:
        examples = sum(file.weight * len(group_questions(examples)) for file, examples in files)
        epochs = training.max_steps * training.batch_size * training.accumulate / max(1.0, examples)
    return max(1, min(MOST_EPOCHS, math.ceil(epochs)))
