"""Augmentation: random changes of the examples, different in every epoch.

An augmentation is called with the examples, the epoch and a seed, and returns examples. The change of an example
depends only on the seed, the epoch and the id of the example: not on the other examples, and not on the process.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from lamella.data.examples import Answer, Context, Example
from lamella.registry import register
from lamella.section import Share

Operation = Literal["swap", "delete", "duplicate"]
_WORD = re.compile(r"(\S+)(\s*)")


@register("augmentation", "eda")
class EDA:
    """Swap, delete and duplicate words of the context at random, but not of the answers (EDA, after Wei and Zou).

    A word is a run of characters without white space. The operations run in order; each changes `rate` of the current
    words (5.3 words are 5, or 6 with probability 0.3). With A A as the answer:

        swap        u v A A w   ->   w v A A u       swaps words in pairs; the white space stays in place
        delete      u v A A w   ->   u A A w         removes the white space after the word too; one word always remains
        duplicate   u v A A w   ->   u v v A A w

    Words that an answer touches do not change, and nothing is inserted between them. The same holds for plausible
    answers: otherwise only answerable contexts would have a part that never changes. The number of changed words is
    computed from all words, protected or not, so that the amount of noise does not reveal whether there is an answer. A
    context of a single word is not changed; it is usually text in a script without spaces.

    `ramp` raises the rate linearly from 0 in the first epoch to `rate` in the last. `originals` is the number of
    unchanged copies per augmented example; they follow it *with the same id*. 1 is the even mix of the Korean paper,
    0.5 adds a copy with probability one half.

    Differences from Wei and Zou: they apply each operation to a separate copy, also replace and insert synonyms, swap
    twice as many words, and change at least one word however low the rate.

    `legacy` reproduces the faults of the Korean paper's code, for the runs `*-legacy` of configs/papers/korquad-eda:
    swaps have no effect, the other operations change at least one word even at rate 0, and at a constant rate only
    answerable contexts change (the others have the empty answer, which every word contains, so every word is
    protected). The noise then reveals the label.
    """

    def __init__(
        self,
        *,
        rate: Share = 0.1,
        operations: Annotated[Sequence[Operation], Field(min_length=1)] = ("swap", "delete", "duplicate"),
        schedule: Literal["constant", "ramp"] = "constant",
        originals: Annotated[float, Field(ge=0)] = 0.0,
        legacy: bool = False,
    ) -> None:
        self.rate = rate
        self.operations = tuple(operations)
        self.schedule = schedule
        self.originals = originals
        self.legacy = legacy

    def __call__(self, examples: Sequence[Example], *, epoch: int, epochs: int, seed: int) -> list[Example]:
        """Return the examples of an epoch (counted from 0); an unchanged example is the same object."""
        rate = self.rate_at(epoch, epochs)
        augmented: list[Example] = []
        for example in examples:
            rng = np.random.default_rng([seed, epoch, *example.id.encode("utf-8", "surrogatepass")])
            copies = _round_randomly(self.originals, rng)
            augmented.append(self._change(example, rate, rng))
            augmented += [example] * copies
        return augmented

    def rate_at(self, epoch: int, epochs: int) -> float:
        """Return the rate in an epoch; a single epoch counts as the last."""
        if self.schedule == "constant" or epochs <= 1:
            return self.rate
        return self.rate * min(1.0, epoch / (epochs - 1))

    def _change(self, example: Example, rate: float, rng: np.random.Generator) -> Example:
        if self.legacy and self.schedule == "constant" and not example.answerable:
            return example
        words = _split(example)
        if len(words) < 2:
            return example
        for operation in self.operations:
            free = [index for index, word in enumerate(words) if not word.protected]
            if operation == "swap":
                pairs = 0 if self.legacy else _round_randomly(rate * len(words) / 2, rng)
                _swap(words, rng.permutation(free)[: 2 * pairs].tolist())
            else:
                count = max(1, int(rate * len(words))) if self.legacy else _round_randomly(rate * len(words), rng)
                change = _delete if operation == "delete" else _duplicate
                change(words, rng.permutation(free)[:count].tolist())
        return _join(words, example)


@dataclass(slots=True)
class _Word:
    text: str
    gap: str  # the white space after it
    begin: int  # its position before any change
    protected: bool


def _split(example: Example) -> list[_Word]:
    """Split the context into words; words that an answer touches, or the white space after them, are protected."""
    words = [_Word(match[1], match[2], match.start(), False) for match in _WORD.finditer(example.context.text)]
    begins = [word.begin for word in words]
    for answer in (*example.answers, *example.plausible_answers):
        first = max(0, bisect_right(begins, answer.begin_char) - 1)
        for word in words[first : bisect_left(begins, answer.end_char)]:
            word.protected = True
    return words


def _swap(words: list[_Word], indices: list[int]) -> None:
    for first, second in zip(indices[::2], indices[1::2], strict=False):  # an odd index is not used
        words[first].text, words[second].text = words[second].text, words[first].text


def _delete(words: list[_Word], indices: list[int]) -> None:
    deleted = set(indices if len(indices) < len(words) else indices[1:])
    words[:] = [word for index, word in enumerate(words) if index not in deleted]


def _duplicate(words: list[_Word], indices: list[int]) -> None:
    for index in sorted(indices, reverse=True):
        words.insert(index, _Word(words[index].text, " ", words[index].begin, protected=False))


def _join(words: Sequence[_Word], example: Example) -> Example:
    """Return the example with the changed words; its answers move with the words they are in."""
    before = example.context.text
    length = len(before) - len(before.lstrip())
    pieces = [before[:length]]
    begins, shifts = [0], [0]  # original position and shift of each protected word; no shift before the first
    for word in words:
        if word.protected:
            begins.append(word.begin)
            shifts.append(length - word.begin)
        pieces += word.text, word.gap
        length += len(word.text) + len(word.gap)
    text = "".join(pieces)
    if text == before:
        return example

    def shift(answers: Sequence[Answer]) -> tuple[Answer, ...]:
        return tuple(
            Answer(answer.text, answer.begin_char + shifts[bisect_right(begins, answer.begin_char) - 1])
            for answer in answers
        )

    return replace(
        example,
        context=Context(text, example.context.title),
        answers=shift(example.answers),
        plausible_answers=shift(example.plausible_answers),
    )


def _round_randomly(number: float, rng: np.random.Generator) -> int:
    """Round at random so that the mean is `number`: 2.3 becomes 3 with probability 0.3, else 2."""
    whole = int(number)
    return whole + int(rng.random() < number - whole)
