"""Scores by group of questions: length of context, question and answer, question word, position of the answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lamella.data.examples import Example
from lamella.data.windows.tokens import tokenise_contexts, tokenise_questions
from lamella.encoder.sources import find_local_encoder, model_folder
from lamella.models.base_tokenizer import tokenizer_folder
from lamella.models.tokenizer_file import TOKENIZER, read_tokenizer
from lamella.scoring.metrics import QuestionScores
from lamella.study.analysis.mistake_kinds import TokenCounts, count_words, gold_spans

BINS = 5
QUESTION_WORDS = ("who", "whom", "whose", "what", "which", "when", "where", "why", "how")
SAME_AS = {"whom": "who", "whose": "who"}
OTHER = "other"
_LETTERS = re.compile(r"[^\W\d_]+")


class Grouping(NamedTuple):
    """The names of groups in order, and the group number of each question; -1 for a question in no group."""

    names: list[str]
    group: NDArray[np.int64]


def groupings(examples: Sequence[Example], tokens: TokenCounts | None = None) -> dict[str, Grouping]:
    """Group the questions in every way. Lengths are in words; of several answers, the first counts.

    Where tokens are counted, also by the lengths of context and question in tokens.
    """
    answers = [example.answers[0].text if example.answerable else None for example in examples]
    by_tokens = (
        {}
        if tokens is None
        else {
            "context_tokens": by_quantiles([tokens.contexts[example.context.text] for example in examples]),
            "question_tokens": by_quantiles([tokens.questions[example.question] for example in examples]),
        }
    )
    return {
        "context_length": by_quantiles([count_words(example.context.text) for example in examples]),
        "question_length": by_quantiles([count_words(example.question) for example in examples]),
        **by_tokens,
        "answer_length": by_quantiles([None if text is None else count_words(text) for text in answers]),
        "question_word": by_name([question_word(example.question) for example in examples]),
        "answer_position": by_fifths([_answer_position(example) for example in examples]),
    }


def count_tokens(examples: Sequence[Example], folders: Iterable[Path]) -> TokenCounts | None:
    """Count the tokens of the contexts and questions, as the first run that holds a model does; None if none does."""
    tokenizer = _tokenizer_of_runs(folders)
    return None if tokenizer is None else token_counts(examples, tokenizer)


def token_counts(examples: Sequence[Example], tokenizer: Tokenizer) -> TokenCounts:
    """Count the tokens of the contexts and questions."""
    contexts = tokenise_contexts(tokenizer, [example.context for example in examples])
    questions = tokenise_questions(tokenizer, [example.question for example in examples])
    return TokenCounts(
        {text: len(tokens[0]) for text, tokens in contexts.items()},
        {text: len(tokens) for text, tokens in questions.items()},
    )


def _tokenizer_of_runs(folders: Iterable[Path]) -> Tokenizer | None:
    for folder in folders:
        saved = tokenizer_folder(model_folder(folder), find=find_local_encoder)
        if (saved / TOKENIZER).is_file():
            tokenizer = read_tokenizer(saved)
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer
    return None


def grouped_scores(scores: QuestionScores, grouping: Grouping) -> list[dict[str, Any]]:
    """Return exact match, F1 (in percent) and the share of answered questions, for every group with questions.

    The share of answerable questions is included: a reader that abstains often scores well where it is low.
    """
    rows = []
    for number, name in enumerate(grouping.names):
        where = grouping.group == number
        if count := int(where.sum()):
            exact, f1 = 100 * float(scores.exact[where].mean()), 100 * float(scores.f1[where].mean())
            shares = {
                "has_answer_share": float(scores.answerable[where].mean()),
                "answered_share": float(scores.answered[where].mean()),
            }
            rows.append({"group": name, "count": count, **shares, "exact": exact, "f1": f1})
    return rows


def by_quantiles(values: Sequence[int | None], bins: int = BINS) -> Grouping:
    """Group whole numbers into bins of about equal size, named by their edges, both inclusive.

    Repeated values give fewer bins: 1 1 1 1 2 3 has the edges 1 and 2, so "1", "2" and "3".
    """
    known = np.array([value for value in values if value is not None], np.int64)
    if not len(known):
        return Grouping([], np.full(len(values), -1))
    cuts = np.quantile(known, np.arange(1, bins) / bins, method="inverted_cdf")
    edges = [*(int(cut) for cut in np.unique(cuts) if cut < known.max()), int(known.max())]
    lows = [int(known.min()), *(edge + 1 for edge in edges[:-1])]
    names = [str(low) if low == high else f"{low}–{high}" for low, high in zip(lows, edges, strict=True)]
    group = [-1 if value is None else int(np.searchsorted(edges, value)) for value in values]
    return Grouping(names, np.array(group, np.int64))


def by_fifths(values: Sequence[float | None]) -> Grouping:
    """Group shares between 0 and 1 into five equal bins; 1 itself is in the last."""
    names = [f"{20 * fifth}–{20 * fifth + 20} %" for fifth in range(5)]
    group = [-1 if value is None else min(4, int(5 * value)) for value in values]
    return Grouping(names, np.array(group, np.int64))


def by_name(names: Sequence[str]) -> Grouping:
    """Group by name, the most frequent first, `other` last."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    order = sorted(counts, key=lambda name: (name == OTHER, -counts[name], name))
    return Grouping(order, np.array([order.index(name) for name in names], np.int64))


def question_word(question: str) -> str:
    """Return the first question word of an English question, at any position ("In what year …" gives what).

    "how many" and "how much" are a group of their own, since their answers are numbers.
    """
    letters = [word.lower() for word in _LETTERS.findall(question)]
    for word, following in pairwise([*letters, ""]):
        if word in QUESTION_WORDS:
            return "how many" if word == "how" and following in ("many", "much") else SAME_AS.get(word, word)
    return OTHER


def _answer_position(example: Example) -> float | None:
    """Return where the first true answer begins, as a share of the context."""
    spans = gold_spans(example)
    return spans[0][0] / len(example.context.text) if spans else None
