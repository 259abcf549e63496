"""Align stored logits with other windows of the same questions: tokens are matched by the characters they cover.

A teacher's token is mapped as a label is: an answer that starts with it starts, for the student, at the token that
holds its first character, and one that ends with it ends at the token that holds its last.

    teacher   Un ##happi ##ly             start   Un and ##happi to Unhap (their probabilities add up), ##ly to ##pily
    student   Unhap ##pily                end     Un to Unhap, ##happi and ##ly to ##pily

So no probability is counted twice, and any tokenizer can teach any other. If several student tokens lie within one
token of the teacher, the first gets the start and the last the end; the others get none. What only the teacher's window
holds is no answer for the student, as for the labels: it goes to [CLS]. Question and special tokens cannot be answers
and are left out, unless both windows are the same token by token.

Nothing here needs torch. Windows are processed in chunks, so that memory holds the result, the windows of one teacher,
and little else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.doctor.problems import quote
from lamella.data.examples import Example
from lamella.data.windows.features import Features
from lamella.data.windows.padding import Indices
from lamella.errors import DataError
from lamella.inference.stored_logits import HALF_RANGE, StoredLogits
from lamella.progress import progress

OUTPUTS = 2  # starts and ends
CHUNK = 1024  # windows per chunk
SHOWN = 40  # characters of a text in a message
APART = 2**32  # more characters than any context has: keeps the offsets of contexts apart

Floats = NDArray[np.float64]
Numbers = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class AlignedLogits:
    """The teachers' logits for every token of some windows, stored in fp16, less the largest of each window."""

    rows: Indices  # where each window begins in `values`
    values: NDArray[np.float16]  # [O, tokens]; -inf where no teacher has a logit
    tops: NDArray[np.float32]  # [O, windows]: the largest logit of each
    taught: NDArray[np.bool_]  # [windows]
    models: tuple[Mapping[str, str], ...] = ()  # the teacher of each run; empty for a run that does not record it

    def padded(self, windows: Indices, width: int) -> NDArray[np.float32]:
        """Return the logits of some windows, [O, B, T]; pads have -inf."""
        begin = self.rows[windows]
        mask = np.arange(width) < (self.rows[windows + 1] - begin)[:, None]  # [B, T]
        logits = np.full((OUTPUTS, *mask.shape), -np.inf, np.float32)
        logits[:, mask] = self.values[:, (begin[:, None] + np.arange(width))[mask]]
        return logits + self.tops[:, windows, None]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256(self.values.data)
        digest.update(self.tops.data)
        return digest.hexdigest()


def align(folders: Sequence[Path], train: Features, *, temperature: float | None) -> AlignedLogits:
    """Align the stored logits of runs with the windows of `train`.

    With a temperature T the result is the logarithm of the teachers' mean probability, each the softmax of z / T over
    its own window. Without one it is the mean of their logits z, over the teachers that have one; what lies outside a
    window is then left out.
    """
    tokens, windows = len(train.input_ids), len(train)
    values = np.full((OUTPUTS, tokens), -np.inf, np.float16)
    tops = np.zeros((OUTPUTS, windows), np.float32)
    teachers = np.zeros(windows, np.int64)
    counts = np.zeros(values.shape, np.int16) if temperature is None else None  # of teachers that have a logit
    models: list[Mapping[str, str]] = []
    with progress("matching the teachers' tokens", None):
        for folder in folders:
            stored = StoredLogits(folder)
            taught, teaching, contexts = _pair_windows(folder, stored.features, train)
            teachers[taught] += 1
            models.append(stored.model)
            for begin in range(0, len(taught), CHUNK):
                chunk = taught[begin : begin + CHUNK]
                lengths = train.lengths[chunk]
                logits = _map_logits(stored, train, chunk, teaching[begin : begin + CHUNK], contexts, temperature)
                at = _ranges(train.rows[chunk], lengths)
                earlier = values[:, at] + np.repeat(tops[:, chunk], lengths, axis=1)
                if counts is None:
                    logits = np.logaddexp(earlier, logits)
                else:
                    counts[:, at] += ~np.isneginf(logits)
                    logits = _update_mean(earlier, logits, counts[:, at])
                values[:, at], tops[:, chunk] = _to_half(logits, lengths)
            del stored  # before the next is read
    if counts is None:
        tops -= np.log(np.maximum(teachers, 1)).astype(np.float32)  # from the sum of probabilities to their mean
    return AlignedLogits(train.rows, values, tops, teachers > 0, tuple(models))


def _pair_windows(folder: Path, teacher: Features, train: Features) -> tuple[Indices, Indices, NDArray[np.int64]]:
    """Return the windows that are taught, the teacher's window for each, and the context number of every example.

    An example that the teacher did not answer has the number -1. Windows come in the teacher's order, in which its
    logits are read.
    """
    place = {example.id: number for number, example in enumerate(teacher.examples)}
    answered = np.array([place.get(example.id, -1) for example in train.examples], np.int64)  # by training example
    numbers: dict[str, int] = {}
    contexts = np.full(len(train.examples), -1, np.int64)
    for number in np.flatnonzero(answered >= 0).tolist():
        example = train.examples[number]
        _check_same_question(folder, example, teacher.examples[answered[number]])
        contexts[number] = numbers.setdefault(example.context.text, len(numbers))
    taught = np.flatnonzero(answered[train.example] >= 0)
    if not len(taught):
        raise DataError(
            f"{folder}: expected stored logits for questions of data.train, found none; predict data.train with "
            "--keep-logits."
        )
    best = _most_overlapping(train, taught, teacher, answered[train.example[taught]])
    order = np.argsort(best, kind="stable")
    return taught[order], best[order], contexts


def _check_same_question(folder: Path, example: Example, answered: Example) -> None:
    """Check that one id means the same question and context in both files."""
    for what, expected, found in (
        ("question", example.question, answered.question),
        ("context", example.context.text, answered.context.text),
    ):
        if expected != found:
            shown, shown_found = _show_difference(expected, found)
            raise DataError(
                f"{folder}: question {example.id}: expected the {what} of the training data, {shown}, found stored "
                f"logits for {shown_found}; predict exactly these questions with --keep-logits."
            )


def _show_difference(first: str, second: str) -> Iterator[str]:
    """Quote the beginnings of two texts; if they begin alike, quote around the first difference."""
    pairs = enumerate(zip(first, second, strict=False))
    same = next((at for at, (left, right) in pairs if left != right), min(len(first), len(second)))
    begin = max(0, same - SHOWN // 2)
    return (f"{'…' if begin else ''}{quote(text[begin:], SHOWN)}" for text in (first, second))


def _most_overlapping(train: Features, taught: Indices, teacher: Features, answered: NDArray[np.int64]) -> Indices:
    """Return for each taught window the teacher's window that shares most characters with it; the earlier on a tie.

    `answered` is the teacher's example for each of them.
    """
    by_example = np.argsort(teacher.example, kind="stable")
    times = np.bincount(teacher.example, minlength=len(teacher.examples))
    first = np.cumsum(times) - times
    candidates = by_example[_ranges(first[answered], times[answered])]
    each = np.repeat(np.arange(len(taught)), times[answered])
    begin, end = _character_ranges(train, taught)
    teacher_begin, teacher_end = _character_ranges(teacher, np.arange(len(teacher)))
    shared = np.minimum(end[each], teacher_end[candidates]) - np.maximum(begin[each], teacher_begin[candidates])
    shared = np.maximum(shared, 0)  # a distant window shares no less than a near one
    order = np.lexsort((candidates, -shared, each))
    leads = np.cumsum(times[answered]) - times[answered]
    best: Indices = candidates[order][leads]
    return best


def _character_ranges(features: Features, windows: Indices) -> tuple[Indices, Indices]:
    """Return where the context of each window begins and ends in its text."""
    first = features.first_token[windows]
    last = first + features.context_end[windows] - features.context_begin[windows] - 1
    ranges = np.zeros((len(windows), 2), np.int64)
    columns = zip(features.example[windows].tolist(), first.tolist(), last.tolist(), strict=True)
    for row, (number, begin, end) in enumerate(columns):
        if begin <= end:
            offsets = features.offsets[number]
            ranges[row] = offsets[begin, 0], offsets[end, 1]
    return ranges[:, 0], ranges[:, 1]


def _map_logits(
    stored: StoredLogits,
    train: Features,
    taught: Indices,
    teaching: Indices,
    contexts: NDArray[np.int64],
    temperature: float | None,
) -> Floats:
    """Return one teacher's logits for the tokens of some windows, one window after the other, [O, n]."""
    teacher = stored.features
    lengths, teacher_lengths = train.lengths[taught], teacher.lengths[teaching]
    begins = np.cumsum(lengths) - lengths  # where each taught window begins in what is returned
    # From here on there is an entry for each token of the teacher.
    window = np.repeat(np.arange(len(taught)), teacher_lengths)
    at = _ranges(np.zeros_like(teacher_lengths), teacher_lengths)
    token = _ranges(teacher.rows[teaching], teacher_lengths)
    same = _same_windows(train, taught, teacher, teaching, token, window, at)
    shift = at - teacher.context_begin[teaching][window]
    is_context = (shift >= 0) & (at < teacher.context_end[teaching][window])
    used = same[window] | is_context | (at == teacher.template.cls)
    window, at, token, shift, is_context = (array[used] for array in (window, at, token, shift, is_context))

    low = int(token.min())
    logits = stored.of_tokens(low, int(token.max()) + 1)[token - low]  # [n, 2]
    _check_finite(stored, teaching, logits, window)
    change = np.flatnonzero(np.diff(window, prepend=-1))  # where each window begins: they all have a [CLS]
    _, chosen, number = np.unique(contexts[train.example[taught]], return_index=True, return_inverse=True)
    # The offsets of each context, from any window of it.
    own_offsets = [train.offsets[train.example[taught[place]]] for place in chosen]
    offsets = [teacher.offsets[teacher.example[teaching[place]]] for place in chosen]
    before = np.cumsum([0, *map(len, offsets)])
    in_context = before[number[window]] + teacher.first_token[teaching][window] + shift

    first, last = train.first_token[taught][window], train.context_end[taught][window]
    own_begin = train.context_begin[taught][window]
    mapped = np.empty((OUTPUTS, int(lengths.sum())))
    for output, places in enumerate(_match_tokens(offsets, own_offsets)):
        to = np.full(len(token), -1, np.int64)  # a place in the taught window
        to[is_context] = places[in_context[is_context]]
        to += own_begin - first
        inside = is_context & (to >= own_begin) & (to < last)
        to = np.where(same[window], at, np.where(inside, to, train.template.cls)) + begins[window]
        scores = logits[:, output].astype(np.float64) / (temperature or 1.0)
        tops = np.maximum.reduceat(scores, change)
        mass = np.exp(scores - tops[window])
        if temperature is None:
            mass[is_context & ~inside & ~same[window]] = 0
        summed = np.bincount(to, mass, minlength=mapped.shape[1])
        with np.errstate(divide="ignore"):  # log 0: no mass
            mapped[output] = np.log(summed)
        if temperature is None:
            mapped[output] += np.repeat(tops + stored.tops[teaching, output], lengths)
        else:
            mapped[output] -= np.repeat(np.log(np.add.reduceat(mass, change)), lengths)
    return mapped


def _check_finite(stored: StoredLogits, windows: Indices, logits: NDArray[np.float16], window: Indices) -> None:
    """Check that all logits are finite. No model writes others, so the file would be damaged, and training diverge."""
    bad = ~np.isfinite(stored.tops[windows]).all(axis=1)
    bad[window[~np.isfinite(logits).all(axis=1)]] = True
    if bad.any():
        question = stored.features.examples[stored.features.example[windows[bad.argmax()]]].id
        raise DataError(
            f"{stored.folder}: question {question}: expected finite logits, found nan or infinity; they are damaged: "
            "predict again with --keep-logits."
        )


def _same_windows(
    train: Features,
    taught: Indices,
    teacher: Features,
    teaching: Indices,
    token: Indices,
    window: Indices,
    at: Indices,
) -> NDArray[np.bool_]:
    """Return which windows are the same as the teacher's, token by token."""
    alike = (
        (train.lengths[taught] == teacher.lengths[teaching])
        & (train.context_begin[taught] == teacher.context_begin[teaching])
        & (train.first_token[taught] == teacher.first_token[teaching])
        & (train.template.cls == teacher.template.cls)
    )
    last = train.rows[taught + 1][window] - 1
    differs = train.input_ids[np.minimum(train.rows[taught][window] + at, last)] != teacher.input_ids[token]
    same: NDArray[np.bool_] = alike & (np.bincount(window, differs, minlength=len(taught)) == 0)
    return same


def _match_tokens(offsets: Sequence[NDArray[Any]], own_offsets: Sequence[NDArray[Any]]) -> Iterator[Indices]:
    """Yield, for every token of the teacher's contexts, the student's token for its start, then for its end.

    As for labels, these are the first token that ends after its begin and the last that begins before its end; there
    may be none, which is -1 or one past the last. All contexts are matched at once: each is shifted by a number that no
    offset reaches.
    """
    lengths, own_lengths = [len(spans) for spans in offsets], [len(spans) for spans in own_offsets]
    nothing = np.empty((0, 2), np.int64)
    spans = np.concatenate([nothing, *offsets]) + np.repeat(np.arange(len(offsets)) * APART, lengths)[:, None]
    own = np.concatenate([nothing, *own_offsets])
    own += np.repeat(np.arange(len(own_offsets)) * APART, own_lengths)[:, None]
    before = np.repeat(np.cumsum([0, *own_lengths])[:-1], lengths)
    yield np.searchsorted(own[:, 1], spans[:, 0], side="right") - before
    yield np.searchsorted(own[:, 0], spans[:, 1], side="left") - 1 - before


def _update_mean(earlier: NDArray[Any], latest: Floats, counts: NDArray[np.int16]) -> Floats:
    """Return the mean of `counts` logits, from the mean of all but the latest and the latest; -inf is none."""
    mean = np.where(np.isneginf(earlier), 0, earlier)
    latest = np.where(np.isneginf(latest), mean, latest)
    return np.where(counts > 0, mean + (latest - mean) / np.maximum(counts, 1), -np.inf)


def _to_half(logits: Floats, lengths: Indices) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """Return logits in half precision, less the largest of each window, and the largest."""
    tops = np.maximum.reduceat(logits, np.cumsum(lengths) - lengths, axis=1).astype(np.float32)  # [O, windows]
    tops[np.isneginf(tops)] = 0
    less = logits - np.repeat(tops, lengths, axis=1)
    return np.where(np.isneginf(less), less, np.maximum(less, -HALF_RANGE)).astype(np.float16), tops


def _ranges(begins: Numbers, lengths: Numbers) -> Indices:
    """Concatenate the ranges that begin at `begins` and have these `lengths`."""
    before = np.cumsum(lengths) - lengths
    ranges: Indices = np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))
    return ranges
