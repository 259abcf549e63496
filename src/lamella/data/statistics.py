"""A data file in numbers: how many, how long, and what a tokenizer makes of it."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lamella.data.examples import Answer, Context
from lamella.data.formats import DataFile


class Tokenizer(Protocol):
    """The part of `tokenizers.Tokenizer` that is used here."""

    def encode_batch(self, input: list[str], is_pretokenized: bool = ..., add_special_tokens: bool = ...) -> Any: ...

    def token_to_id(self, token: str) -> int | None: ...

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

    def num_special_tokens_to_add(self, is_pair: bool) -> int: ...


@dataclass(frozen=True)
class Lengths:
    """How long texts are."""

    mean: float
    longest: int


@dataclass(frozen=True)
class ScriptTokens:
    """The tokens of the texts in one script, and how many of them the tokenizer does not know."""

    tokens: int
    unknown: int
    unknown_rate: float


@dataclass(frozen=True)
class TokenStatistics:
    """What a tokenizer makes of a file; `questions_cut` counts the questions longer than `max_query_length`."""

    contexts: Lengths
    questions: Lengths
    questions_cut: int
    scripts: dict[str, ScriptTokens]


@dataclass(frozen=True)
class Statistics:
    """A file in numbers; lengths in characters. A question asked of several contexts counts once for each."""

    file: str
    format: str
    version: str | None
    articles: int
    contexts: int
    questions: int
    unanswerable: int
    unread: int
    context_length: Lengths
    question_length: Lengths
    answer_length: Lengths
    tokens: TokenStatistics | None = None


def measure(file: DataFile, tokens: TokenStatistics | None) -> Statistics:
    """Count and measure what a file holds."""
    contexts = contexts_of(file)
    answers: list[Answer] = [answer for example in file.examples for answer in example.answers]
    return Statistics(
        file.path,
        file.format,
        file.version,
        articles=len({context.title for context in contexts}),
        contexts=len(contexts),
        questions=len(file.examples),
        unanswerable=sum(not example.answerable for example in file.examples),
        unread=file.unread,
        context_length=_lengths([len(context.text) for context in contexts]),
        question_length=_lengths([len(example.question) for example in file.examples]),
        answer_length=_lengths([len(answer.text) for answer in answers]),
        tokens=tokens,
    )


@dataclass(frozen=True)
class CountedTokens:
    """Token counts of a file's contexts and, one per example, of its questions."""

    contexts: list[int]
    questions: list[int]
    scripts: dict[str, ScriptTokens]
    special_tokens: int

    def statistics(self, max_query_length: int) -> TokenStatistics:
        cut = sum(count > max_query_length for count in self.questions)
        return TokenStatistics(_lengths(self.contexts), _lengths(self.questions), cut, self.scripts)


def count_tokens(file: DataFile, tokenizer: Tokenizer) -> CountedTokens:
    tokenizer = copy.deepcopy(tokenizer)  # the caller's keeps its settings
    tokenizer.no_padding()
    tokenizer.no_truncation()
    unknown = {tokenizer.token_to_id(token) for token in ("[UNK]", "<unk>")} - {None}
    tokens: Counter[str] = Counter()
    unknowns: Counter[str] = Counter()

    def count(texts: Iterable[str]) -> dict[str, int]:
        """The number of tokens of each different text; adds to the counts of its script."""
        counts = {}
        distinct = list(dict.fromkeys(texts))
        for begin in range(0, len(distinct), 1000):
            batch = distinct[begin : begin + 1000]
            for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True):
                ids = encoding.ids
                script = _script(text)
                counts[text] = len(ids)
                tokens[script] += len(ids)
                unknowns[script] += sum(id in unknown for id in ids)
        return counts

    contexts = count(context.text for context in contexts_of(file))
    questions = count(example.question for example in file.examples)
    return CountedTokens(
        [contexts[context.text] for context in contexts_of(file)],
        [questions[example.question] for example in file.examples],
        {
            script: ScriptTokens(number, unknowns[script], unknowns[script] / max(number, 1))
            for script, number in sorted(tokens.items())
        },
        tokenizer.num_special_tokens_to_add(True),
    )


_SCRIPTS = {
    "latin": re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]"),
    "greek": re.compile("[\u0370-\u03ff\u1f00-\u1fff]"),
    "cyrillic": re.compile("[\u0400-\u052f]"),
    "hebrew": re.compile("[\u0590-\u05ff]"),
    "arabic": re.compile("[\u0600-\u06ff\u0750-\u077f]"),
    "devanagari": re.compile("[\u0900-\u097f]"),
    "thai": re.compile("[\u0e00-\u0e7f]"),
    "hangul": re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]"),
    "kana": re.compile("[\u3040-\u30ff]"),
    "han": re.compile("[\u3400-\u4dbf\u4e00-\u9fff]"),
}


def _script(text: str) -> str:
    """The script that most letters of a text are in."""
    if text.isascii():
        return "latin"
    counts = {script: len(letters.findall(text)) for script, letters in _SCRIPTS.items()}
    best = max(counts, key=lambda script: counts[script])
    return best if counts[best] else "other"


def _lengths(lengths: Sequence[int]) -> Lengths:
    return Lengths(round(sum(lengths) / len(lengths), 1), max(lengths)) if lengths else Lengths(0.0, 0)


def contexts_of(file: DataFile) -> list[Context]:
    return list(dict.fromkeys(example.context for example in file.examples))
