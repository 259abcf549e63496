"""Statistics of a data file: counts, lengths, and token counts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.formats import DataFile
from lamella.languages.hangul import compose_hangul
from lamella.languages.scripts import main_script


class Tokenizer(Protocol):
    """The methods of `tokenizers.Tokenizer` that are used here."""

    def encode_batch(self, input: list[str], is_pretokenized: bool = ..., add_special_tokens: bool = ...) -> Any: ...

    def token_to_id(self, token: str) -> int | None: ...

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

    def num_special_tokens_to_add(self, is_pair: bool) -> int: ...


@dataclass(frozen=True)
class Lengths:
    """Mean and maximum length of texts."""

    mean: float
    longest: int


@dataclass(frozen=True)
class ScriptTokens:
    """The number of tokens of the texts in one script, and how many of them are unknown to the tokenizer."""

    tokens: int
    unknown: int
    unknown_rate: float


@dataclass(frozen=True)
class TokenStatistics:
    """Token counts of a file; `questions_cut` counts the questions longer than `max_query_length`."""

    contexts: Lengths
    questions: Lengths
    questions_cut: int
    scripts: dict[str, ScriptTokens]


@dataclass(frozen=True)
class Statistics:
    """Counts of a file, lengths in characters.

    A question about several contexts counts once, and is unanswerable if none of them contains an answer. `pairs`
    counts it once per context.
    """

    file: str
    format: str
    version: str | None
    articles: int
    contexts: int
    questions: int
    unanswerable: int
    pairs: int  # of a question and a context
    unanswerable_pairs: int
    unread: int
    context_length: Lengths
    question_length: Lengths
    answer_length: Lengths
    tokens: TokenStatistics | None = None


def measure(file: DataFile, tokens: TokenStatistics | None) -> Statistics:
    """Compute the statistics of a file."""
    contexts = contexts_of(file)
    questions: dict[str | int, list[Example]] = {}
    for number, example in enumerate(file.examples):  # by number, as a faulty file may repeat an id
        questions.setdefault(number if example.group is None else example.group, []).append(example)
    answers: list[Answer] = [answer for example in file.examples for answer in example.answers]
    return Statistics(
        file.path,
        file.format,
        file.version,
        articles=len({context.title for context in contexts}),
        contexts=len(contexts),
        questions=len(questions),
        unanswerable=sum(not any(example.answerable for example in group) for group in questions.values()),
        pairs=len(file.examples),
        unanswerable_pairs=sum(not example.answerable for example in file.examples),
        unread=file.unread,
        context_length=_lengths([len(context.text) for context in contexts]),
        question_length=_lengths([len(group[0].question) for group in questions.values()]),
        answer_length=_lengths([len(answer.text) for answer in answers]),
        tokens=tokens,
    )


@dataclass(frozen=True)
class CountedTokens:
    """Token counts of the contexts of a file and, one per example, of its questions."""

    contexts: list[int]
    questions: list[int]
    scripts: dict[str, ScriptTokens]
    special_tokens: int

    @property
    def unknown_rate(self) -> float:
        """The share of all tokens that are unknown to the tokenizer."""
        return sum(script.unknown for script in self.scripts.values()) / max(1, self.tokens)

    @property
    def tokens(self) -> int:
        return sum(script.tokens for script in self.scripts.values())

    def statistics(self, max_query_length: int) -> TokenStatistics:
        cut = sum(count > max_query_length for count in self.questions)
        return TokenStatistics(_lengths(self.contexts), _lengths(self.questions), cut, self.scripts)


def count_tokens(file: DataFile, tokenizer: Tokenizer) -> CountedTokens:
    """Count the tokens of contexts and questions."""
    tokenizer = copy.deepcopy(tokenizer)  # keep the settings of the caller's tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()
    unknown = {tokenizer.token_to_id(token) for token in ("[UNK]", "<unk>")} - {None}
    tokens: Counter[str] = Counter()
    unknowns: Counter[str] = Counter()

    def count(texts: Iterable[str]) -> dict[str, int]:
        """Return the number of tokens of each distinct text; add to the counts of its script."""
        counts = {}
        distinct = list(dict.fromkeys(texts))
        for begin in range(0, len(distinct), 1000):
            batch = distinct[begin : begin + 1000]
            composed = list(map(compose_hangul, batch))  # as windows are
            for text, encoding in zip(batch, tokenizer.encode_batch(composed, add_special_tokens=False), strict=True):
                ids = encoding.ids
                script = main_script(text)
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


def _lengths(lengths: Sequence[int]) -> Lengths:
    return Lengths(round(sum(lengths) / len(lengths), 1), max(lengths)) if lengths else Lengths(0.0, 0)


def contexts_of(file: DataFile) -> list[Context]:
    """Return the distinct contexts of a file."""
    return list(dict.fromkeys(example.context for example in file.examples))
