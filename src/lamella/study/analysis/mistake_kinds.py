"""What kinds of mistakes a run makes: pure functions of examples, scores and n-best lists.

An answer is *right* when it matches exactly, as everywhere in the metric.
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
    """Every question in one of five: two ways to be right, three to be wrong."""
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
    """How often the runner-up is right where the answer is wrong, and whether the right ones have an answer.

    The runner-up is the most probable candidate with another text than the answer; "no answer" is one of them.
    """
    wrong = scores.exact < 1
    asked = [example for example, is_wrong in zip(examples, wrong, strict=True) if is_wrong]
    result: dict[str, Any] = {
        "wrong": len(asked),
        "second_right": 0,
        "second_right_share": None,
        "second_right_has_answer_share": None,
        "first_right_has_answer_share": _share(scores.answerable[~wrong]),
    }
    if asked:
        seconds = {one.id: _runner_up(predictions[one.id], texts[one.id]) for one in asked}
        given = np.array([seconds[one.id] is not None for one in asked])
        found = score_questions(asked, {id: text or "" for id, text in seconds.items()}, language=language)
        right = (found.exact == 1) & given
        result["second_right"] = int(right.sum())
        result["second_right_share"] = _share(right)
        result["second_right_has_answer_share"] = _share(found.answerable[right])
    return result


def only_right(right: Mapping[str, NDArray[np.bool_]], examples: Sequence[Example]) -> dict[str, dict[str, Any]]:
    """Of every run the questions that it alone gets right, with their mean lengths in words."""
    times = np.sum(list(right.values()), axis=0)
    return {
        name: described([one for one, alone in zip(examples, mine & (times == 1), strict=True) if alone])
        for name, mine in right.items()
    }


def described(examples: Sequence[Example]) -> dict[str, Any]:
    """Some questions in numbers; lengths in words, that of answers over the questions that have one."""
    answers = [words(one.answers[0].text) for one in examples if one.answerable]
    return {
        "count": len(examples),
        "has_answer_share": _share(np.array([one.answerable for one in examples], np.bool_)),
        "mean_context_words": _mean([words(one.context.text) for one in examples]),
        "mean_question_words": _mean([words(one.question) for one in examples]),
        "mean_answer_words": _mean(answers),
        "ids": [one.id for one in examples],
    }


class Boundaries(NamedTuple):
    """Words that a span has too many (or, negative, too few) at its start and at its end."""

    start: int
    end: int


def near_misses(
    examples: Sequence[Example],
    scores: QuestionScores,
    texts: Mapping[str, str],
    predictions: Mapping[str, Prediction],
) -> dict[str, Any]:
    """Wrong answers that overlap a true one: which boundary is off, to which side, by how many words."""
    wrong = scores.answerable & scores.answered & (scores.exact < 1)
    asked = [example for example, is_wrong in zip(examples, wrong, strict=True) if is_wrong]
    found = [boundaries(one, chosen_candidate(predictions[one.id], texts[one.id])) for one in asked]
    near = [one for one in found if one is not None]
    starts, ends = np.array([one.start for one in near]), np.array([one.end for one in near])
    fewest, most = np.minimum(starts, ends), np.maximum(starts, ends)
    extra, lacking = np.maximum(starts, 0) + np.maximum(ends, 0), np.maximum(-starts, 0) + np.maximum(-ends, 0)
    return {
        "answered_wrongly": len(asked),
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
        "mean_missing_words": _mean(lacking),
    }


def boundaries(example: Example, span: Candidate | None) -> Boundaries | None:
    """How a span compares with the true answer that it overlaps most; None where it overlaps none.

    Counted in words of the context: "in the red" for "the red house" starts one word early and ends one early, (1, -1).
    """
    if span is None or not span.text:
        return None
    text = example.context.text
    places = [(one.start(), one.end()) for one in _WORD.finditer(text)]
    mine = _word_range(places, span.begin_char, span.end_char)
    best: tuple[int, int, Boundaries] | None = None
    for begin, end in answer_places(example):
        if min(end, span.end_char) <= max(begin, span.begin_char):
            continue
        gold = _word_range(places, begin, end)
        off = Boundaries(gold[0] - mine[0], mine[1] - gold[1])
        shared = min(gold[1], mine[1]) - max(gold[0], mine[0])
        rank = (shared, -abs(off.start) - abs(off.end), off)
        if best is None or rank[:2] > best[:2]:
            best = rank
    return best and best[2]


def answer_places(example: Example) -> list[tuple[int, int]]:
    """Where the true answers lie; one that is not where the file says is looked for."""
    text, places = example.context.text, []
    for answer in example.answers:
        begin = answer.begin_char
        if text[begin : answer.end_char] != answer.text:
            begin = text.find(answer.text)
        if begin >= 0 and answer.text:
            places.append((begin, begin + len(answer.text)))
    return list(dict.fromkeys(places))


def chosen_candidate(prediction: Prediction, text: str) -> Candidate | None:
    """The candidate that became the answer."""
    return next((one for one in prediction.candidates if one.text == text), None)


def words(text: str) -> int:
    """How many words a text has: pieces between blanks."""
    return len(text.split())


def _runner_up(prediction: Prediction, text: str) -> str | None:
    others = sorted((one for one in prediction.candidates if one.text != text), key=lambda one: -one.score)
    return others[0].text if others else None


def _word_range(places: Sequence[tuple[int, int]], begin: int, end: int) -> tuple[int, int]:
    """The words, from the first to one past the last, that a piece of the text touches."""
    touched = [number for number, (first, last) in enumerate(places) if first < end and begin < last]
    return (touched[0], touched[-1] + 1) if touched else (0, 0)


def _share(where: NDArray[np.bool_]) -> float | None:
    return float(where.mean()) if len(where) else None


def _mean(values: Sequence[int] | NDArray[Any]) -> float | None:
    return float(np.mean(values)) if len(values) else None
