"""Examples changed a little and at random, anew every epoch.

An augmentation is called with the examples, the epoch and a seed, and returns examples. What it makes of one example
depends on the seed, the epoch and that example's id alone: not on its neighbours, and not on the process it runs in.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from lamella.config import Share
from lamella.data.examples import Answer, Context, Example
from lamella.registry import register

Operation = Literal["swap", "delete", "duplicate"]
_WORD = re.compile(r"(\S+)(\s*)")


@register("augmentation", "eda")
class EDA:
    """Swap, delete and duplicate words of the context at random, sparing the answers (EDA, after Wei and Zou).

    A word is a run of characters without white space. Each operation in its turn changes `rate` of the words it finds;
    5.3 words are 5, or 6 with a chance of 0.3. Where A A is the answer:

        swap        u v A A w   ->   w v A A u       words change places in pairs, the white space between them stays
        delete      u v A A w   ->   u A A w         the white space behind it goes too; one word is always left
        duplicate   u v A A w   ->   u v v A A w

    Words that an answer touches stay as they are, and stay together. So do those of plausible answers: otherwise only
    an answerable context would have a stretch that never changes. How many words change is reckoned from all of them,
    spared or not, so that the amount of noise does not tell whether there is an answer. A context of a single word is
    left alone; as a rule it is text in a script without spaces.

    `ramp` raises the rate evenly from 0 in the first epoch to `rate` in the last. `originals` untouched examples join
    for each augmented one, right behind it and *with the same id*: 1 is the even mix of the Korean paper, 0.5 takes
    each of them with a chance of one half.

    We differ from Wei and Zou, who use each operation on a copy of its own, have synonyms and insertions as well, swap
    twice as many words, and change at least one however low the rate.

    `legacy` has the faults of the Korean paper's code: swaps come to nothing, the other operations change at least one
    word even at rate 0, and at a constant rate only answerable contexts change (the others have the empty answer, which
    every word contains, so every word is spared). Noise then gives the label away.
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
        """The examples of one epoch (counted from 0); one in which nothing changed is the very same object."""
        rate = self.rate_at(epoch, epochs)
        augmented: list[Example] = []
        for example in examples:
            rng = np.random.default_rng([seed, epoch, *example.id.encode("utf-8", "surrogatepass")])
            copies = _rounded(self.originals, rng)
            augmented.append(self._changed(example, rate, rng))
            augmented += [example] * copies
        return augmented

    def rate_at(self, epoch: int, epochs: int) -> float:
        """The rate in an epoch; an only epoch is a last one."""
        if self.schedule == "constant" or epochs <= 1:
            return self.rate
        return self.rate * min(1.0, epoch / (epochs - 1))

    def _changed(self, example: Example, rate: float, rng: np.random.Generator) -> Example:
        if self.legacy and self.schedule == "constant" and not example.answerable:
            return example
        words = _split(example)
        if len(words) < 2:
            return example
        for operation in self.operations:
            free = [place for place, word in enumerate(words) if not word.spared]
            if operation == "swap":
                pairs = 0 if self.legacy else _rounded(rate * len(words) / 2, rng)
                _swap(words, rng.permutation(free)[: 2 * pairs].tolist())
            else:
                count = max(1, int(rate * len(words))) if self.legacy else _rounded(rate * len(words), rng)
                change = _delete if operation == "delete" else _duplicate
                change(words, rng.permutation(free)[:count].tolist())
        return _joined(words, example)


@dataclass(slots=True)
class _Word:
    text: str
    gap: str  # the white space behind it
    begin: int  # where it stood before anything was changed
    spared: bool


def _split(example: Example) -> list[_Word]:
    """The words of the context; spared are those that an answer touches, be it only the white space behind them."""
    words = [_Word(found[1], found[2], found.start(), False) for found in _WORD.finditer(example.context.text)]
    begins = [word.begin for word in words]
    for answer in (*example.answers, *example.plausible_answers):
        first = max(0, bisect_right(begins, answer.begin_char) - 1)
        for word in words[first : bisect_left(begins, answer.end_char)]:
            word.spared = True
    return words


def _swap(words: list[_Word], places: list[int]) -> None:
    for one, other in zip(places[::2], places[1::2], strict=False):  # an odd one stays where it is
        words[one].text, words[other].text = words[other].text, words[one].text


def _delete(words: list[_Word], places: list[int]) -> None:
    gone = set(places if len(places) < len(words) else places[1:])
    words[:] = [word for place, word in enumerate(words) if place not in gone]


def _duplicate(words: list[_Word], places: list[int]) -> None:
    for place in sorted(places, reverse=True):
        words.insert(place, _Word(words[place].text, " ", words[place].begin, spared=False))


def _joined(words: Sequence[_Word], example: Example) -> Example:
    """The example about the changed words, its answers moved along with the words they lie in."""
    before = example.context.text
    length = len(before) - len(before.lstrip())
    pieces = [before[:length]]
    homes, shifts = [0], [0]  # where spared words stood, and how far each has moved; nothing before the first has
    for word in words:
        if word.spared:
            homes.append(word.begin)
            shifts.append(length - word.begin)
        pieces += word.text, word.gap
        length += len(word.text) + len(word.gap)
    text = "".join(pieces)
    if text == before:
        return example

    def moved(answers: Sequence[Answer]) -> tuple[Answer, ...]:
        return tuple(
            Answer(answer.text, answer.begin_char + shifts[bisect_right(homes, answer.begin_char) - 1])
            for answer in answers
        )

    return replace(
        example,
        context=Context(text, example.context.title),
        answers=moved(example.answers),
        plausible_answers=moved(example.plausible_answers),
    )


def _rounded(number: float, rng: np.random.Generator) -> int:
    """A whole number whose mean is `number`: 2.3 is 3 with a chance of 0.3, else 2."""
    whole = int(number)
    return whole + int(rng.random() < number - whole)
