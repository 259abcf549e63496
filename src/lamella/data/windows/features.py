"""Cut examples into windows: a question and a slice of its context as tokens, with the offsets of their characters.

Each context is tokenised once, without special tokens, and windows are cut from its tokens by arithmetic. The tokenizer
never truncates, so no input can make it fail. All windows of a data set are stored in a few flat arrays:

    input_ids   [CLS] who built it ? [SEP] the tower was ... [SEP] [CLS] when was ...
    rows        0                                                  31            ...

`doc_stride` is the *overlap* of neighbouring windows, as in transformers; the original BERT code meant the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lamella.config import WindowOptions
from lamella.data.examples import Example
from lamella.data.windows.spans import max_context_owner, window_spans, window_step
from lamella.data.windows.tokens import (
    PIECE,
    Integers,
    SlidingTokens,
    Tokenizing,
    context_tokens,
    remembers_contexts,
    tokenise_questions,
    without_truncation,
)
from lamella.errors import EncoderError, TooManyTokensError
from lamella.progress import progress

FORMAT = 1  # increase it when the same examples are cut into other windows, so that cached ones are not used
SLICE = 1024  # windows in memory at once when all are processed in sequence
LONG = 10 * PIECE  # characters of a context whose tokens are not all kept in memory


@dataclass(frozen=True)
class PairTemplate:
    """The special tokens around a question and a context: `prefix` question `middle` context `suffix`."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    cls: int  # position of the token whose logits mean "no answer"
    pad_id: int
    context_type: int  # token type from the context on; that of the question is 0

    @property
    def special_tokens(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)


@dataclass(frozen=True)
class Features:
    """The windows of examples; arrays have one entry per window unless stated otherwise."""

    examples: Sequence[Example]
    template: PairTemplate
    input_ids: Integers  # of all windows, concatenated
    rows: NDArray[np.int64]  # window w is input_ids[rows[w]:rows[w + 1]]
    example: Integers  # index of the example
    context_begin: Integers  # first position of the context in the window
    context_end: Integers  # one past its last position
    first_token: Integers  # index in the whole context of the token at context_begin
    start: Integers  # label: first position of the answer, `template.cls` for no answer
    end: Integers  # label: last position
    max_context: NDArray[np.bool_]  # per token of input_ids: no other window gives it more context
    offsets: Sequence[Integers]  # per example: [tokens, 2], begin and end character of each context token
    max_seq_length: int  # no window and no padded batch is longer
    lost_answers: int  # answers that touch no token, such as an answer of control characters only
    # The share of the context that `offsets` cover. Those of a long context may be of a part of it only, from the first
    # window on; `first_token` counts from there, too.
    part: float = 1.0

    def __len__(self) -> int:
        return len(self.example)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.rows)

    def characters(self, window: int, start: int, end: int) -> tuple[int, int]:
        """Return the begin and end character in the context of the tokens `start` to `end` (inclusive) of a window.

        Tokens of white space only have an end before their begin: as a slice, the empty string.
        """
        shift = int(self.first_token[window]) - int(self.context_begin[window])
        offsets = self.offsets[self.example[window]]
        return int(offsets[start + shift, 0]), int(offsets[end + shift, 1])


def featurise(
    examples: Sequence[Example],
    tokenizer: Tokenizing,
    windows: WindowOptions,
    *,
    negative_windows: Literal["keep", "drop", "subsample"] = "keep",
    seed: int = 0,
) -> Features:
    """Cut every example into windows.

    A window of an answerable question that does not contain the answer is a negative window, labelled "no answer".
    `negative_windows` keeps all of them, drops them, or keeps one per question (chosen by `seed` and the id).
    """
    with progress("cutting windows", None):
        (features,) = _cut(examples, tokenizer, windows, negative_windows, seed, math.inf)
    return features


def join_features(parts: Sequence[Features]) -> Features:
    """Concatenate the windows of several sets that were cut in the same way."""
    first = parts[0]
    before = np.cumsum([0, *(len(part.examples) for part in parts)], dtype=np.int32)
    tokens = np.cumsum([0, *(len(part.input_ids) for part in parts)])
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("input_ids", "context_begin", "context_end", "first_token", "start", "end", "max_context")
    }
    return replace(
        first,
        examples=[example for part in parts for example in part.examples],
        rows=np.concatenate([[0], *(part.rows[1:] + shift for part, shift in zip(parts, tokens, strict=False))]),
        example=np.concatenate([part.example + shift for part, shift in zip(parts, before, strict=False)]),
        offsets=[offsets for part in parts for offsets in part.offsets],
        lost_answers=sum(part.lost_answers for part in parts),
        **columns,
    )


def featurise_in_slices(
    examples: Sequence[Example],
    tokenizer: Tokenizing,
    windows: WindowOptions,
    *,
    size: int = SLICE,
    most_tokens: int | None = None,
    whole_offsets: bool = False,
) -> Iterator[Features]:
    """Yield the windows of all examples, about `size` at a time, each slice cut when it is requested.

    A long context may extend over two slices; its example is then part of both. A very long one is tokenised slice by
    slice, so that memory does not grow with it, unless every slice must have the offsets of the whole context. Contexts
    with more than `most_tokens` raise TooManyTokensError before the first slice.
    """
    contexts = None
    if most_tokens is not None:  # this number fits into memory, so each is tokenised once
        contexts = _tokens_up_to(most_tokens, examples, tokenizer, size)
    in_memory = whole_offsets or contexts is not None or remembers_contexts(tokenizer)
    for begin, end in slices(examples, size=size):
        first = examples[begin]
        if end - begin == 1 and len(first.context.text) > LONG and not first.answers and not in_memory:
            yield from _cut_long(first, tokenizer, windows, size)
        else:
            yield from _cut(examples[begin:end], tokenizer, windows, "keep", 0, size, contexts)


def _tokens_up_to(
    most: int, examples: Sequence[Example], tokenizer: Tokenizing, size: int
) -> dict[str, tuple[Integers, Integers]]:
    """Return the tokens of all contexts; raise TooManyTokensError for more than `most`, without reading on."""
    plain = without_truncation(tokenizer)
    contexts: dict[str, tuple[Integers, Integers]] = {}
    read = 0
    for begin, end in slices(examples, size=size):
        new = [example.context for example in examples[begin:end] if example.context.text not in contexts]
        contexts |= context_tokens(tokenizer, plain, new)
        read += sum(len(contexts[example.context.text][0]) for example in examples[begin:end])
        if read > most:
            raise TooManyTokensError(read, most)
    return contexts


def slices(examples: Sequence[Example], *, size: int = SLICE) -> Iterator[tuple[int, int]]:
    """Yield begin and end indices of groups of examples to cut together; no batch crosses a group."""
    begin = 0
    while begin < len(examples):
        end, characters = begin + 1, len(examples[begin].context.text)
        while end < len(examples) and end - begin < size and characters < LONG:
            characters += len(examples[end].context.text)
            end += 1
        yield begin, end
        begin = end


def _cut(
    examples: Sequence[Example],
    tokenizer: Tokenizing,
    windows: WindowOptions,
    negative_windows: str,
    seed: int,
    size: float,
    contexts: Mapping[str, tuple[Integers, Integers]] | None = None,
) -> Iterator[Features]:
    """Yield the windows of examples, at most `size` at a time; one empty result for no examples.

    `contexts` are the tokens of their contexts, if these are tokenised already.
    """
    plain = without_truncation(tokenizer)
    template = pair_template(tokenizer)
    questions = tokenise_questions(plain, [example.question for example in examples])
    if contexts is None:
        contexts = context_tokens(tokenizer, plain, [example.context for example in examples])
    window_room = windows.max_seq_length - template.special_tokens
    question_room = min(windows.max_query_length, window_room - 1)  # leave room for some context
    prefix, middle, suffix = (np.array(ids, np.int32) for ids in (template.prefix, template.middle, template.suffix))
    slice_ = _Slice(template, windows.max_seq_length)
    for example in examples:
        ids, offsets = contexts[example.context.text]
        question = questions[example.question][:question_room]
        answer = _answer_tokens(example, offsets)
        head = np.concatenate([prefix, question, middle])
        spans = window_spans(len(ids), window_room - len(question), windows.doc_stride, windows.stride_is)
        chosen = _choose_windows(spans, example, answer, negative_windows, seed)
        owners = max_context_owner(spans, len(ids))
        slice_.begin(example, offsets, lost=answer is None and example.answerable)
        for number in chosen:
            if len(slice_.columns) >= size:
                yield slice_.features()
                slice_ = _Slice(template, windows.max_seq_length)
                slice_.begin(example, offsets, lost=False)
            first, last = spans[number]
            inside = answer is not None and first <= answer[0] and answer[1] < last
            shift = len(head) - first
            label = (answer[0] + shift, answer[1] + shift) if inside and answer else None
            slice_.add_window(head, ids[first:last], suffix, owners[first:last] == number, first, label)
    yield slice_.features()


def _cut_long(example: Example, tokenizer: Tokenizing, windows: WindowOptions, size: int) -> Iterator[Features]:
    """Yield the same windows as `_cut`, of an example without answers, while its context is tokenised."""
    plain, template = without_truncation(tokenizer), pair_template(tokenizer)
    window_room = windows.max_seq_length - template.special_tokens
    question_room = min(windows.max_query_length, window_room - 1)
    question = tokenise_questions(plain, [example.question])[example.question][:question_room]
    head = np.concatenate([np.array(template.prefix, np.int32), question, np.array(template.middle, np.int32)])
    suffix = np.array(template.suffix, np.int32)
    room = window_room - len(question)
    step = window_step(room, windows.doc_stride, windows.stride_is)
    tokens, number = SlidingTokens(plain, example.context.text), 0
    while True:
        earlier = min(number, (room - 1) // step)  # windows that share tokens with the first of this slice
        first, end = number * step, (number + size - 1) * step + room  # of the slice, in tokens
        tokens.move(first - earlier * step, end + room)
        spans = [(0, min(room, len(tokens.ids)))]  # from the first token in memory
        while spans[-1][1] < len(tokens.ids) and tokens.first + spans[-1][0] + step < end:
            begin = spans[-1][0] + step
            spans.append((begin, min(begin + room, len(tokens.ids))))
        owners = max_context_owner(spans, spans[-1][1])
        own = range(earlier, min(len(spans), earlier + size))
        begin, end = spans[own[0]][0], spans[own[-1]][1]
        offsets = tokens.offsets[begin:end].copy()
        slice_ = _Slice(template, windows.max_seq_length)
        slice_.begin(example, offsets, lost=False)
        for window in own:
            flag = owners[slice(*spans[window])] == window
            slice_.add_window(head, tokens.ids[slice(*spans[window])], suffix, flag, spans[window][0] - begin)
        covered = int(offsets[-1, 1]) - int(offsets[0, 0]) if len(offsets) else 0
        yield replace(slice_.features(), part=max(1, covered) / len(example.context.text))
        if tokens.complete and end == len(tokens.ids):
            return
        number += size


class _Slice:
    """Collects windows."""

    def __init__(self, template: PairTemplate, max_seq_length: int) -> None:
        self.template, self.max_seq_length = template, max_seq_length
        self.examples: list[Example] = []
        self.offsets: list[Integers] = []
        self.pieces: list[Integers] = []
        self.flags: list[NDArray[np.bool_]] = []
        self.columns: list[tuple[int, ...]] = []
        self.lost = 0

    def begin(self, example: Example, offsets: Integers, *, lost: bool) -> None:
        """Add an example; its windows follow."""
        self.examples.append(example)
        self.offsets.append(offsets)
        self.lost += lost

    def add_window(
        self,
        head: Integers,
        ids: Integers,
        suffix: Integers,
        max_context: NDArray[np.bool_],
        first: int,
        label: tuple[int, int] | None = None,
    ) -> None:
        """Add a window of the last example: what is before its context, the context, and what is behind it."""
        end = len(head) + len(ids)
        flag = np.zeros(end + len(suffix), np.bool_)
        flag[len(head) : end] = max_context
        self.pieces += [head, ids, suffix]
        self.flags.append(flag)
        self.columns.append((len(self.examples) - 1, len(head), end, first, *(label or (self.template.cls,) * 2)))

    def features(self) -> Features:
        table = np.array(self.columns, np.int32).reshape(-1, 6).T
        rows = np.zeros(len(self.columns) + 1, np.int64)
        np.cumsum([len(flag) for flag in self.flags], out=rows[1:])
        return Features(
            examples=self.examples,
            template=self.template,
            input_ids=np.concatenate([np.empty(0, np.int32), *self.pieces]),
            rows=rows,
            example=table[0],
            context_begin=table[1],
            context_end=table[2],
            first_token=table[3],
            start=table[4],
            end=table[5],
            max_context=np.concatenate([np.empty(0, np.bool_), *self.flags]),
            offsets=self.offsets,
            max_seq_length=self.max_seq_length,
            lost_answers=self.lost,
        )


def pair_template(tokenizer: Tokenizing) -> PairTemplate:
    """Find out from the tokenizer itself how it joins two texts, without a table of model families."""
    pair = without_truncation(tokenizer).encode("a", "b")
    ids, sequences = pair.ids, pair.sequence_ids
    if 0 not in sequences or 1 not in sequences or tokenizer.cls_token_id not in ids:
        raise EncoderError(
            f"{tokenizer.name_or_path}: expected a tokenizer that joins two texts with a [CLS] token before or between "
            f"them, got {pair.tokens} for the texts 'a' and 'b'; choose another encoder."
        )
    question = [position for position, text in enumerate(sequences) if text == 0]
    context = [position for position, text in enumerate(sequences) if text == 1]
    return PairTemplate(
        prefix=tuple(ids[: question[0]]),
        middle=tuple(ids[question[-1] + 1 : context[0]]),
        suffix=tuple(ids[context[-1] + 1 :]),
        cls=ids.index(tokenizer.cls_token_id),
        pad_id=tokenizer.pad_token_id or 0,
        context_type=pair.type_ids[context[0]],
    )


def _answer_tokens(example: Example, offsets: Integers) -> tuple[int, int] | None:
    """Return the first and last context token that the first answer touches."""
    if not example.answers:
        return None
    answer = example.answers[0]
    first = int(np.searchsorted(offsets[:, 1], answer.begin_char, side="right"))
    last = int(np.searchsorted(offsets[:, 0], answer.end_char, side="left")) - 1
    return (first, last) if first <= last else None


def _choose_windows(
    spans: Sequence[tuple[int, int]], example: Example, answer: tuple[int, int] | None, negatives: str, seed: int
) -> list[int]:
    everything = list(range(len(spans)))
    if negatives == "keep" or not example.answerable:
        return everything
    positive = [n for n in everything if answer and spans[n][0] <= answer[0] and answer[1] < spans[n][1]]
    negative = sorted(set(everything).difference(positive))
    if negatives == "subsample" and negative:
        # Seeded by the id, so that the choice does not depend on the other examples.
        key = [seed, *example.id.encode("utf-8", "surrogatepass")]
        positive.append(negative[int(np.random.default_rng(key).integers(len(negative)))])
    return sorted(positive)
