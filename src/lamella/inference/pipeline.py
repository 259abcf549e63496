"""Answer as the question answering pipeline of transformers 4 did, for code that called it.

Its rules differ from the official ones that `Reader.ask` follows, and are reproduced exactly: a score is a probability
within a window, start times end, and windows are compared by it; spans are widened to whole words; answers that then
differ only in case are one answer, with the sum of their scores.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lamella.config import WindowOptions
from lamella.data.examples import Context, Example
from lamella.data.windows.features import Features, featurise_in_slices
from lamella.data.windows.tokens import without_truncation
from lamella.errors import UnknownNameError, UsageError, counted, shorten
from lamella.inference.arguments import as_list, check_positive, check_text, describe
from lamella.inference.decode import WindowSpans, decode
from lamella.inference.doubts import Doubts
from lamella.inference.predict import iterate_batches
from lamella.inference.protocols import QAModel

_SPACE = re.compile(r"\s")
SHORTEST = 16  # tokens of the shortest window allowed anywhere
WITHOUT_EFFECT = (
    "topk",
    "padding",
    "max_question_len",
    "num_workers",
)  # accepted; with a fast tokenizer they change no answer


def answer_as_pipeline(
    model: QAModel,
    pairs: Sequence[tuple[str, str]],
    most_tokens: int | None = None,
    *,
    top_k: int = 1,
    handle_impossible_answer: bool = False,
    max_answer_len: int = 15,
    max_seq_len: int | None = None,
    doc_stride: int | None = None,
    align_to_words: bool = True,
    batch_size: int = 32,
) -> list[list[dict[str, Any]]]:
    """Return the best answers to every question in its context, with the pipeline's options and defaults.

    Contexts with more than `most_tokens` raise TooManyTokensError.
    """
    longest = max_seq_len or model.windows.max_seq_length
    stride = min(longest // 2, 128) if doc_stride is None else doc_stride
    if longest < SHORTEST or not 0 <= stride < longest:
        raise UsageError(
            f"max_seq_len: expected at least {SHORTEST}, and doc_stride less than that, got {longest} and {stride}."
        )
    windows = WindowOptions(max_seq_length=longest, doc_stride=stride, max_query_length=longest)
    options = model.decoding.model_copy(
        update={
            "n_best_size": top_k * 2 + 10 if align_to_words else top_k,  # widening may make spans equal
            "max_answer_length": max_answer_len,
            "method": "joint",
            "max_context_only": False,
        }
    )
    examples = [Example(str(number), question, Context(text)) for number, (question, text) in enumerate(pairs)]
    tokenizer = without_truncation(model.tokenizer) if align_to_words else None
    collected = [_ContextAnswers(context, tokenizer) for _, context in pairs]
    doubts = Doubts(model.tokenizer, windows)
    for features in featurise_in_slices(examples, model.tokenizer, windows, most_tokens=most_tokens):
        doubts.add(features)
        rows: dict[int, tuple[WindowSpans, int]] = {}
        for padded, logits in iterate_batches(model, features, batch_size):
            spans = decode(logits, padded, options, normalised=True)
            rows.update({int(window): (spans, row) for row, window in enumerate(spans.windows)})
        for window in sorted(rows):  # in text order: among equal answers the first one sets the place
            spans, row = rows[window]
            collected[int(features.examples[features.example[window]].id)].add(features, window, spans, row)
    doubts.warn()
    return [answers.best(top_k, handle_impossible_answer) for answers in collected]


def question_pairs(
    inputs: Sequence[Any], *, question: Any = None, context: Any = None, **named: Any
) -> list[tuple[str, str]]:
    """Return the pairs of question and context in any of the forms that the pipeline took.

    `inputs` are positional: a question and a context, or mappings with both, or one list of mappings. `named` holds the
    same under the names that scikit-learn uses. Examples of transformers (`SquadExample`) count as mappings.
    """
    given = [value for value in named.values() if value is not None]
    if len(inputs) == 2 and all(isinstance(value, str) for value in inputs):
        question, context = inputs
    elif inputs or given:
        rows: Any = (inputs[0] if len(inputs) == 1 else inputs) if inputs else given[0]
        rows = rows if _is_list(rows) else [rows]
        return [_check_pair(pair) for row in rows for pair in _pairs_of(row)]
    return [_check_pair(pair) for pair in _zip_pairs(question, context)]


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that change answers; raise an error for one that the pipeline did not have.

    None is the default of every option, and `topk` the name of `top_k` in its first versions.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if "topk" in options:
        options = {"top_k": options["topk"], **options}
    parameters = inspect.signature(answer_as_pipeline).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        if name not in (*known, *WITHOUT_EFFECT):
            raise UnknownNameError("option", name, known)
    for name in ("top_k", "batch_size", "max_answer_len", "max_seq_len"):
        if name in options:
            check_positive(name, options[name])
    stride = options.get("doc_stride", 0)
    if isinstance(stride, bool) or not isinstance(stride, Integral):
        raise UsageError(f"doc_stride: expected a whole number, got {shorten(stride)}.")
    return {name: value for name, value in options.items() if name in known}


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _pairs_of(row: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of a mapping, which may hold lists, or of an example of transformers."""
    if hasattr(row, "question_text") and hasattr(row, "context_text"):
        return [(row.question_text, row.context_text)]
    if not (isinstance(row, Mapping) and {"question", "context"} <= row.keys()):
        raise UsageError(
            "inputs: expected a question and a context, a mapping with question and context, or a list of such "
            f"mappings, got {describe(row)}."
        )
    return _zip_pairs(row["question"], row["context"])


def _zip_pairs(question: Any, context: Any) -> list[tuple[Any, Any]]:
    """Return one pair for each question; a single question or context is paired with each of the others."""
    questions, contexts = (
        [value] if isinstance(value, str) else as_list(name, value)
        for name, value in (("question", question), ("context", context))
    )
    longest = max(len(questions), len(contexts))
    questions, contexts = (values * longest if len(values) == 1 else values for values in (questions, contexts))
    if len(questions) != len(contexts):
        raise UsageError(
            f"expected as many questions as contexts, got {counted(len(questions), 'question')} and "
            f"{counted(len(contexts), 'context')}."
        )
    return list(zip(questions, contexts, strict=True))


def _check_pair(pair: tuple[Any, Any]) -> tuple[str, str]:
    for name, text in zip(("question", "context"), pair, strict=True):
        if not check_text(name, text):
            raise UsageError(f"{name}: expected a text, got an empty one.")
    return pair


class _ContextAnswers:
    """The answers in one context; a tokenizer widens them to whole words."""

    def __init__(self, context: str, tokenizer: Tokenizer | None) -> None:
        self.context, self.words = context, None if tokenizer is None else Words(tokenizer, context)
        self.answers: dict[str, dict[str, Any]] = {}
        self.null = math.inf

    def add(self, features: Features, window: int, spans: WindowSpans, row: int) -> None:
        self.null = min(self.null, math.exp(spans.null[row]))
        for start, end, score in zip(spans.start[row], spans.end[row], spans.score[row], strict=True):
            if score == -math.inf:
                break
            begin_char, end_char = features.characters(window, int(start), int(end))
            if self.words is not None:
                begin_char, end_char = self.words.widen(begin_char, end_char)
            text = self.context[begin_char:end_char]
            same = self.answers.get(text.lower())
            if same is None:
                self.answers[text.lower()] = {
                    "score": math.exp(score), "start": begin_char, "end": end_char, "answer": text
                }  # fmt: skip
            else:
                same["score"] += math.exp(score)

    def best(self, top_k: int, handle_impossible_answer: bool) -> list[dict[str, Any]]:
        answers = list(self.answers.values())
        if handle_impossible_answer:
            answers.append({"score": self.null, "start": 0, "end": 0, "answer": ""})
        return sorted(answers, key=lambda answer: -answer["score"])[:top_k]


class Words:
    """The words of a context, as the tokenizer splits them. No word extends across white space."""

    def __init__(self, tokenizer: Tokenizer, context: str) -> None:
        self.tokenizer, self.context = tokenizer, context
        self._spaces = [match.start() for match in _SPACE.finditer(context)]
        # Text without white space may be long, and many answers lie in it: tokenise it once.
        self._tokenise = functools.lru_cache(16)(self._tokens_between)

    def widen(self, begin: int, end: int) -> tuple[int, int]:
        """Return the begin and end of the whole words that a span touches: in "(1895) was", "89" becomes "1895"."""
        before, behind = bisect_left(self._spaces, begin), bisect_left(self._spaces, end)
        first = self._spaces[before - 1] + 1 if before else 0
        last = self._spaces[behind] if behind < len(self._spaces) else len(self.context)
        words, offsets = self._tokenise(first, last)
        touched = words[(offsets[:, 0] < end) & (offsets[:, 1] > begin)]
        if not len(touched) or (touched < 0).any():
            return begin, end
        inside = np.isin(words, touched)
        return int(offsets[inside, 0].min()), int(offsets[inside, 1].max())

    def _tokens_between(self, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the word of each token in a part of the context, -1 for none, and its begin and end."""
        encoding = self.tokenizer.encode(self.context[first:last], add_special_tokens=False)
        words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
        return words, np.array(encoding.offsets, np.int64).reshape(-1, 2) + first
