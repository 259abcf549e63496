"""The kinds of mistakes that a run makes: pure functions of examples, scores and n-best lists.

An answer is *right* if it matches exactly, as in the metric.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.inference.prediction import Candidate, Prediction
from lamella.scoring.metrics import QuestionScores, score_questions

_WORD = re.compile(r"\S+")


def confusion(scores: QuestionScores) -> dict[str, int]:
    """Count the questions by outcome: two ways to be right, three to be wrong."""
    right = scores.exact == 1
    has, answered = scores.answerable, scores.answered
    return {
        "right_has_answer": int((right & has).sum()),
        "answered_wrongly": int((~right & has & answered).sum()),
        "abstained_wrongly": int((~right & has & ~answered).sum()),
        "right_no_answer": int((right & ~has).sum()),
        "answered_the_unanswerable": int((~right & ~has).sum()),
    }


def second_best(
    examples: Sequence[Example],
    scores: QuestionScores,
    texts: Mapping[str, str],
    predictions: Mapping[str, Prediction],
    *,
    language: str = "en",
) -> dict[str, Any]:
    """Count how often the runner-up is right where the answer is wrong, and how many of these have an answer.

    The runner-up is the most probable candidate with a different text than the answer; it may be "no answer".
    """
    wrong = scores.exact < 1
    missed = [example for example, is_wrong in zip(examples, wrong, strict=True) if is_wrong]
    result: dict[str, Any] = {
        "wrong": len(missed),
        "second_right": 0,
        "second_right_share": None,
        "second_right_has_answer_share": None,
        "first_right_has_answer_share": _share(scores.answerable[~wrong]),
    }
    if missed:
        seconds = {example.id: _runner_up(predictions[example.id], texts[example.id]) for example in missed}
        has_second = np.array([seconds[example.id] is not None for example in missed])
        rescored = score_questions(missed, {id: text or "" for id, text in seconds.items()}, language=language)
        right = (rescored.exact == 1) & has_second
        result["second_right"] = int(right.sum())
        result["second_right_share"] = _share(right)
        result["second_right_has_answer_share"] = _share(rescored.answerable[right])
    return result


def only_right(
    right: Mapping[str, NDArray[np.bool_]], examples: Sequence[Example], tokens: TokenCounts | None = None
) -> dict[str, dict[str, Any]]:
    """Describe, for every run, the questions that it alone gets right."""
    times_right = np.sum(list(right.values()), axis=0)
    return {
        name: describe_questions(
            [example for example, alone in zip(examples, of_run & (times_right == 1), strict=True) if alone], tokens
        )
        for name, of_run in right.items()
    }


class TokenCounts(NamedTuple):
    """The lengths of contexts and questions in tokens, without special ones, by their texts."""

    contexts: Mapping[str, int]
    questions: Mapping[str, int]


def describe_questions(examples: Sequence[Example], tokens: TokenCounts | None = None) -> dict[str, Any]:
    """Return the number, mean lengths and ids of some questions; answer lengths only where there is one.

    Lengths are in words and, of contexts and questions, in tokens, if these are counted.
    """
    answers = [count_words(example.answers[0].text) for example in examples if example.answerable]
    in_tokens = (
        {}
        if tokens is None
        else {
            "mean_context_tokens": _mean([tokens.contexts[example.context.text] for example in examples]),
            "mean_question_tokens": _mean([tokens.questions[example.question] for example in examples]),
        }
    )
    return {
        "count": len(examples),
        "has_answer_share": _share(np.array([example.answerable for example in examples], np.bool_)),
        "mean_context_words": _mean([count_words(example.context.text) for example in examples]),
        "mean_question_words": _mean([count_words(example.question) for example in examples]),
        "mean_answer_words": _mean(answers),
        **in_tokens,
        "ids": [example.id for example in examples],
    }


class BoundaryErrors(NamedTuple):
    """Words that a span has too many (or, if negative, too few) at its start and at its end."""

    start: int
    end: int


def near_misses(
    examples: Sequence[Example],
    scores: QuestionScores,
    texts: Mapping[str, str],
    predictions: Mapping[str, Prediction],
) -> dict[str, Any]:
    """Count wrong answers that overlap a true one: which boundary is off, in which direction, by how many words."""
    wrong = scores.answerable & scores.answered & (scores.exact < 1)
    missed = [example for example, is_wrong in zip(examples, wrong, strict=True) if is_wrong]
    errors = [
        boundary_errors(example, chosen_candidate(predictions[example.id], texts[example.id])) for example in missed
    ]
    near = [error for error in errors if error is not None]
    starts, ends = np.array([error.start for error in near]), np.array([error.end for error in near])
    fewest, most = np.minimum(starts, ends), np.maximum(starts, ends)
    extra, missing = np.maximum(starts, 0) + np.maximum(ends, 0), np.maximum(-starts, 0) + np.maximum(-ends, 0)
    return {
        "answered_wrongly": len(missed),
        "near_misses": len(near),
        "too_long": int(((fewest >= 0) & (most > 0)).sum()),
        "too_short": int(((most <= 0) & (fewest < 0)).sum()),
        "shifted": int(((fewest < 0) & (most > 0)).sum()),
        "same_words": int(((fewest == 0) & (most == 0)).sum()),
        "start_too_early": int((starts > 0).sum()),
        "start_too_late": int((starts < 0).sum()),
        "end_too_early": int((ends < 0).sum()),
        "end_too_late": int((ends > 0).sum()),
        "both_ends_off": int(((starts != 0) & (ends != 0)).sum()),
        "mean_extra_words": _mean(extra),
        "mean_missing_words": _mean(missing),
    }


def boundary_errors(example: Example, span: Candidate | None) -> BoundaryErrors | None:
    """Compare a span with the true answer that it overlaps most; None if it overlaps none.

    Counted in words of the context: "in the red" for "the red house" starts one word early and ends one early, (1, -1).
    """
    if span is None or not span.text:
        return None
    text = example.context.text
    words = [(match.start(), match.end()) for match in _WORD.finditer(text)]
    predicted = _word_range(words, span.begin_char, span.end_char)
    best: tuple[int, int, BoundaryErrors] | None = None
    for begin, end in gold_spans(example):
        if min(end, span.end_char) <= max(begin, span.begin_char):
            continue
        gold = _word_range(words, begin, end)
        errors = BoundaryErrors(gold[0] - predicted[0], predicted[1] - gold[1])
        shared = min(gold[1], predicted[1]) - max(gold[0], predicted[0])
        rank = (shared, -abs(errors.start) - abs(errors.end), errors)
        if best is None or rank[:2] > best[:2]:
            best = rank
    return best and best[2]


def gold_spans(example: Example) -> list[tuple[int, int]]:
    """Return the character spans of the true answers; an answer with a wrong offset is searched in the context."""
    text, spans = example.context.text, []
    for answer in example.answers:
        begin = answer.begin_char
        if text[begin : answer.end_char] != answer.text:
            begin = text.find(answer.text)
        if begin >= 0 and answer.text:
            spans.append((begin, begin + len(answer.text)))
    return list(dict.fromkeys(spans))


def chosen_candidate(prediction: Prediction, text: str) -> Candidate | None:
    """Return the candidate that became the answer."""
    return next((candidate for candidate in prediction.candidates if candidate.text == text), None)


def count_words(text: str) -> int:
    """Count the words of a text, separated by white space."""
    return len(text.split())


def _runner_up(prediction: Prediction, text: str) -> str | None:
    rest = [candidate for candidate in prediction.candidates if candidate.text != text]
    return max(rest, key=lambda candidate: candidate.score).text if rest else None


def _word_range(words: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    """Return the words, from the first to one past the last, that a span of characters touches."""
    touched = [number for number, (first, last) in enumerate(words) if first < end and begin < last]
    return (touched[0], touched[-1] + 1) if touched else (0, 0)


def _share(where: NDArray[np.bool_]) -> float | None:
    return float(where.mean()) if len(where) else None


def _mean(values: Sequence[int] | NDArray[Any]) -> float | None:
    return float(np.mean(values)) if len(values) else None
