"""What kept logits say of other windows of the same questions, token by token: matched by the characters they cover.

A token of a teacher is carried over as a label is: an answer that starts with it starts, for the student, at the token
that holds its first character, and one that ends with it ends at the token that holds its last.

    teacher   Un ##happi ##ly             start   Un and ##happi to Unhap (their probabilities add up), ##ly to ##pily
    student   Unhap ##pily                end     Un to Unhap, ##happi and ##ly to ##pily

So no probability is counted twice, and every way to cut a text can teach every other. Of several student tokens within
one of the teacher the first has the start and the last the end; the others have none. What the teacher's window holds
and the student's does not is no answer there, as it is for the labels: it goes to [CLS]. Question and special tokens
are no choice of any kind and are left out, but where both windows are the same, token by token: nothing is lost there.

Nothing here needs torch. Windows are gone through some at a time, so that memory holds the result, the windows of one
teacher, and little else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.data.features import Features
from lamella.data.padding import Indices
from lamella.data.problems import quote
from lamella.errors import DataError
from lamella.inference.stored_logits import HALF_RANGE, StoredLogits
from lamella.progress import progress

OUTPUTS = 2  # starts and ends
CHUNK = 1024  # windows at a time
SHOWN = 40  # characters of a text
APART = 2**32  # more characters than any context has

Floats = NDArray[np.float64]
Numbers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class AlignedLogits:
    """What teachers say of every token of some windows, kept as logits are: fp16, less the largest of each window."""

    rows: Indices  # those of the windows
    values: NDArray[np.float16]  # [O, tokens]; -inf where no teacher says anything
    tops: NDArray[np.float32]  # [O, windows]
    taught: NDArray[np.bool_]  # [windows]
    models: tuple[Mapping[str, str], ...] = ()  # which said it, run by run; empty of a run that does not tell

    def padded(self, windows: Indices, width: int) -> NDArray[np.float32]:
        """Those of some windows, [O, B, T]; pads have -inf."""
        begin = self.rows[windows]
        mask = np.arange(width) < (self.rows[windows + 1] - begin)[:, None]  # [B, T]
        found = np.full((OUTPUTS, *mask.shape), -np.inf, np.float32)
        found[:, mask] = self.values[:, (begin[:, None] + np.arange(width))[mask]]
        return found + self.tops[:, windows, None]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256(self.values.data)
        digest.update(self.tops.data)
        return digest.hexdigest()


def align(folders: Sequence[Path], train: Features, *, temperature: float | None) -> AlignedLogits:
    """What runs with kept logits say of the windows of `train`.

    With a temperature T: the logarithm of the mean of their probabilities, each the softmax of z / T over its own
    window. Without: the mean of their logits z, of those that have one; what lies outside of a window is then left out.
    """
    tokens, windows = len(train.input_ids), len(train)
    values = np.full((OUTPUTS, tokens), -np.inf, np.float16)
    tops = np.zeros((OUTPUTS, windows), np.float32)
    teachers = np.zeros(windows, np.int64)
    counts = np.zeros(values.shape, np.int16) if temperature is None else None  # of teachers that have a logit
    models: list[Mapping[str, str]] = []
    with progress("matching the teachers' tokens", None):
        for folder in folders:
            kept = StoredLogits(folder)
            ours, theirs, contexts = _pair(folder, kept.features, train)
            teachers[ours] += 1
            models.append(kept.model)
            for begin in range(0, len(ours), CHUNK):
                some, lengths = ours[begin : begin + CHUNK], train.lengths[ours[begin : begin + CHUNK]]
                said = _carry_over(kept, train, some, theirs[begin : begin + CHUNK], contexts, temperature)
                at = _ranges(train.rows[some], lengths)
                earlier = values[:, at] + np.repeat(tops[:, some], lengths, axis=1)
                if counts is None:
                    said = np.logaddexp(earlier, said)
                else:
                    counts[:, at] += ~np.isneginf(said)
                    said = _mean(earlier, said, counts[:, at])
                values[:, at], tops[:, some] = _in_halves(said, lengths)
            del kept  # before the next is read
    if counts is None:
        tops -= np.log(np.maximum(teachers, 1)).astype(np.float32)  # from the sum of probabilities to their mean
    return AlignedLogits(train.rows, values, tops, teachers > 0, tuple(models))


def _pair(folder: Path, theirs: Features, train: Features) -> tuple[Indices, Indices, NDArray[np.int64]]:
    """The windows that are taught, the teacher's window for each, and the number of the context of every example of
    ours (-1: not answered). They come in the teacher's order, in which its logits are read.
    """
    place = {example.id: number for number, example in enumerate(theirs.examples)}
    answered = np.array([place.get(example.id, -1) for example in train.examples], np.int64)  # by example of ours
    numbers: dict[str, int] = {}
    contexts = np.full(len(train.examples), -1, np.int64)
    for own in np.flatnonzero(answered >= 0).tolist():
        _check_same_question(folder, train.examples[own], theirs.examples[answered[own]])
        contexts[own] = numbers.setdefault(train.examples[own].context.text, len(numbers))
    ours = np.flatnonzero(answered[train.example] >= 0)
    if not len(ours):
        raise DataError(
            f"{folder}: answers none of the training questions; predict those of data.train with --keep-logits."
        )
    best = _most_overlapping(train, ours, theirs, answered[train.example[ours]])
    order = np.argsort(best, kind="stable")
    return ours[order], best[order], contexts


def _check_same_question(folder: Path, ours: Example, theirs: Example) -> None:
    """An id alone does not make two questions the same one."""
    for what, own, other in (
        ("question", ours.question, theirs.question),
        ("context", ours.context.text, theirs.context.text),
    ):
        if own != other:
            expected, found = _where_they_differ(own, other)
            raise DataError(
                f"{folder}: question {ours.id}: expected the {what} of the training data, {expected}. It kept logits "
                f"of {found}; predict these very questions with --keep-logits."
            )


def _where_they_differ(one: str, other: str) -> Iterator[str]:
    """The beginnings of two texts; of those that begin alike, what stands around the first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((at for at, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))
    begin = max(0, same - SHOWN // 2)
    return (f"{'…' if begin else ''}{quote(text[begin:], SHOWN)}" for text in (one, other))


def _most_overlapping(train: Features, ours: Indices, theirs: Features, wanted: NDArray[np.int64]) -> Indices:
    """For each window of ours the one of theirs, among those of the `wanted` example, that shares most characters with
    it; the earlier one of equals.
    """
    by_example = np.argsort(theirs.example, kind="stable")
    times = np.bincount(theirs.example, minlength=len(theirs.examples))
    first = np.cumsum(times) - times
    candidates = by_example[_ranges(first[wanted], times[wanted])]
    each = np.repeat(np.arange(len(ours)), times[wanted])
    begin, end = _characters(train, ours)
    their_begin, their_end = _characters(theirs, np.arange(len(theirs)))
    shared = np.minimum(end[each], their_end[candidates]) - np.maximum(begin[each], their_begin[candidates])
    shared = np.maximum(shared, 0)  # what lies far off shares no less than what lies near by
    order = np.lexsort((candidates, -shared, each))
    leads = np.cumsum(times[wanted]) - times[wanted]
    best: Indices = candidates[order][leads]
    return best


def _characters(features: Features, windows: Indices) -> tuple[Indices, Indices]:
    """Where the context of each window begins and ends in its text."""
    first = features.first_token[windows]
    last = first + features.context_end[windows] - features.context_begin[windows] - 1
    found = np.zeros((len(windows), 2), np.int64)
    columns = zip(features.example[windows].tolist(), first.tolist(), last.tolist(), strict=True)
    for row, (number, begin, end) in enumerate(columns):
        if begin <= end:
            offsets = features.offsets[number]
            found[row] = offsets[begin, 0], offsets[end, 1]
    return found[:, 0], found[:, 1]


def _carry_over(
    kept: StoredLogits,
    train: Features,
    ours: Indices,
    theirs: Indices,
    contexts: NDArray[np.int64],
    temperature: float | None,
) -> Floats:
    """What one teacher says of the tokens of some windows, one after the other, [O, n]."""
    features = kept.features
    lengths, their_lengths = train.lengths[ours], features.lengths[theirs]
    begins = np.cumsum(lengths) - lengths  # where each window of ours begins in what is returned
    window = np.repeat(np.arange(len(ours)), their_lengths)  # from here on there is an entry for each of their tokens
    at = _ranges(np.zeros_like(their_lengths), their_lengths)
    token = _ranges(features.rows[theirs], their_lengths)
    same = _same(train, ours, features, theirs, token, window, at)
    shift = at - features.context_begin[theirs][window]
    is_context = (shift >= 0) & (at < features.context_end[theirs][window])
    used = same[window] | is_context | (at == features.template.cls)
    window, at, token, shift, is_context = (array[used] for array in (window, at, token, shift, is_context))

    low = int(token.min())
    logits = kept.of_tokens(low, int(token.max()) + 1)[token - low]  # [n, 2]
    _check_finite(kept, theirs, logits, window)
    change = np.flatnonzero(np.diff(window, prepend=-1))  # where each window begins: they all have a [CLS]
    _, chosen, number = np.unique(contexts[train.example[ours]], return_index=True, return_inverse=True)
    own_offsets = [train.offsets[train.example[ours[one]]] for one in chosen]  # a window of each context
    offsets = [features.offsets[features.example[theirs[one]]] for one in chosen]
    before = np.cumsum([0, *map(len, offsets)])
    in_context = before[number[window]] + features.first_token[theirs][window] + shift

    first, last = train.first_token[ours][window], train.context_end[ours][window]
    own_begin = train.context_begin[ours][window]
    found = np.empty((OUTPUTS, int(lengths.sum())))
    for output, places in enumerate(_places(offsets, own_offsets)):
        to = np.full(len(token), -1, np.int64)  # a place in the window of ours
        to[is_context] = places[in_context[is_context]]
        to += own_begin - first
        inside = is_context & (to >= own_begin) & (to < last)
        to = np.where(same[window], at, np.where(inside, to, train.template.cls)) + begins[window]
        scores = logits[:, output].astype(np.float64) / (temperature or 1.0)
        tops = np.maximum.reduceat(scores, change)
        mass = np.exp(scores - tops[window])
        if temperature is None:
            mass[is_context & ~inside & ~same[window]] = 0
        summed = np.bincount(to, mass, minlength=found.shape[1])
        with np.errstate(divide="ignore"):  # log 0: no mass
            found[output] = np.log(summed)
        if temperature is None:
            found[output] += np.repeat(tops + kept.tops[theirs, output], lengths)
        else:
            found[output] -= np.repeat(np.log(np.add.reduceat(mass, change)), lengths)
    return found


def _check_finite(kept: StoredLogits, windows: Indices, logits: NDArray[np.float16], window: Indices) -> None:
    """No model's answers are kept with such, so that the file is damaged; a run would be said to have diverged."""
    bad = ~np.isfinite(kept.tops[windows]).all(axis=1)
    bad[window[~np.isfinite(logits).all(axis=1)]] = True
    if bad.any():
        question = kept.features.examples[kept.features.example[windows[bad.argmax()]]].id
        raise DataError(
            f"{kept.folder}: question {question}: expected finite logits. Found nan or infinite ones; its kept logits "
            "are damaged: predict again with --keep-logits."
        )


def _same(
    train: Features, ours: Indices, features: Features, theirs: Indices, token: Indices, window: Indices, at: Indices
) -> NDArray[np.bool_]:
    """Which windows are the same as the teacher's, token by token."""
    alike = (
        (train.lengths[ours] == features.lengths[theirs])
        & (train.context_begin[ours] == features.context_begin[theirs])
        & (train.first_token[ours] == features.first_token[theirs])
        & (train.template.cls == features.template.cls)
    )
    last = train.rows[ours + 1][window] - 1
    differs = train.input_ids[np.minimum(train.rows[ours][window] + at, last)] != features.input_ids[token]
    found: NDArray[np.bool_] = alike & (np.bincount(window, differs, minlength=len(ours)) == 0)
    return found


def _places(theirs: Sequence[NDArray[Any]], ours: Sequence[NDArray[Any]]) -> Iterator[Indices]:
    """For every token of some contexts of theirs the token of ours to which its start goes, then that of its end.

    As in the labels, the first that ends after its begin and the last that begins before its end; there may be none,
    which is -1 or one past the last. All contexts at once: each is put apart from the others by a number that no place
    in a text reaches.
    """
    lengths, own_lengths = [len(one) for one in theirs], [len(one) for one in ours]
    nothing = np.empty((0, 2), np.int64)
    spans = np.concatenate([nothing, *theirs]) + np.repeat(np.arange(len(theirs)) * APART, lengths)[:, None]
    own = np.concatenate([nothing, *ours]) + np.repeat(np.arange(len(ours)) * APART, own_lengths)[:, None]
    before = np.repeat(np.cumsum([0, *own_lengths])[:-1], lengths)
    yield np.searchsorted(own[:, 1], spans[:, 0], side="right") - before
    yield np.searchsorted(own[:, 0], spans[:, 1], side="left") - 1 - before


def _mean(earlier: NDArray[Any], said: Floats, counts: NDArray[np.int16]) -> Floats:
    """The mean of `counts` logits, from that of all but the last and the last; -inf is none."""
    so_far = np.where(np.isneginf(earlier), 0, earlier)
    last = np.where(np.isneginf(said), so_far, said)
    return np.where(counts > 0, so_far + (last - so_far) / np.maximum(counts, 1), -np.inf)


def _in_halves(said: Floats, lengths: Indices) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Values in half precision less the largest of each window, and these."""
    tops = np.maximum.reduceat(said, np.cumsum(lengths) - lengths, axis=1).astype(np.float32)  # [O, windows]
    tops[np.isneginf(tops)] = 0
    less = said - np.repeat(tops, lengths, axis=1)
    return np.where(np.isneginf(less), less, np.maximum(less, -HALF_RANGE)).astype(np.float16), tops


def _ranges(begins: Numbers, lengths: Numbers) -> Indices:
    """begins[0], begins[0] + 1, …, `lengths[0]` of them; then those from begins[1] on."""
    before = np.cumsum(lengths) - lengths
    ranges: Indices = np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
    return ranges
