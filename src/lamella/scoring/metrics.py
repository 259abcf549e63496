"""The official SQuAD 2.0 metric, and KorQuAD 1.0's for Korean.

The definitions follow SQuAD's `evaluate-v2.0.py`, and the numbers agree with it, oddities included (see
`best_thresholds`). An *na score* is a number per question that is higher the likelier "no answer" is: null odds
(neutral at 0) or a probability (neutral at 0.5).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.errors import DataError, UnknownNameError, UsageError, shorten, truncate
from lamella.languages import detect_language, get_language

Missing = Literal["error", "empty"]


def score(
    examples: Sequence[Example],
    predictions: Mapping[str, str],
    *,
    null_odds: Mapping[str, float] | None = None,
    na_prob: Mapping[str, float] | None = None,
    language: str = "en",
    missing: Missing = "error",
    threshold: float | None = None,
) -> dict[str, float | int]:
    """Return the scores of `predictions` (question id to text, "" for no answer), in percent, under the official keys.

    The keys are `exact f1 total`, then `HasAns_*` and `NoAns_*` for questions with and without answers; a group without
    questions has no keys. With na scores also:

    - `best_exact best_exact_thresh best_f1 best_f1_thresh`: see `best_thresholds`.
    - `pr_exact_ap pr_f1_ap pr_oracle_ap`: average precision when questions are answered in order of rising na score,
      where an answer counts by its exact match, by its F1, or as right. Absent if no question has an answer.
    - `answerability_accuracy answerability_f1 answerability_ap`: how well the na score separates the questions without
      an answer. The positive class is "no answer", as in BERTVision; the last two are absent without such questions.

    `null_odds` determines `best_*`, `pr_*` and the use of `threshold`; `na_prob` determines `answerability_*`. If only
    one of them is given, it determines all.

    A question whose na score exceeds `threshold` counts as not answered, whatever was predicted; `best_*` and `pr_*`
    ignore the threshold. The default withholds nothing. The official script always applies a threshold to its
    `--na-prob-file` (1.0 by default): pass `threshold=1.0` for the same. Answerability is decided at `threshold` if
    that applies to the same na scores, otherwise at their neutral point.

    `missing="empty"` counts a missing prediction as "". Predictions for other questions are ignored.
    """
    questions = score_questions(examples, predictions, language=language, missing=missing)
    return summarise(questions, null_odds=null_odds, na_prob=na_prob, threshold=threshold)


def summarise(
    questions: QuestionScores,
    *,
    null_odds: Mapping[str, float] | None = None,
    na_prob: Mapping[str, float] | None = None,
    threshold: float | None = None,
) -> dict[str, float | int]:
    """Return the results of `score` from the scores of single questions."""
    driving, deciding = (null_odds, na_prob) if null_odds is not None else (na_prob, None)
    if driving is None:
        if threshold is not None:
            raise UsageError(f"threshold {threshold}: expected null_odds or na_prob to apply it to, got neither.")
        return _summary(questions)
    if threshold is not None and math.isnan(threshold):
        raise UsageError("threshold: expected a number, got nan.")

    na = _aligned(questions.ids, driving, "null odds" if null_odds is not None else "no-answer probability")
    result = _summary(questions if threshold is None else questions.withheld(na > threshold))
    result |= best_thresholds(questions, driving)
    result |= _precision_recall(questions, na)
    if deciding is not None:
        return result | _answerability(questions, _aligned(questions.ids, deciding, "no-answer probability"), 0.5)
    neutral = 0.0 if null_odds is not None else 0.5
    return result | _answerability(questions, na, neutral if threshold is None else threshold)


@dataclass(frozen=True, eq=False)
class QuestionScores:
    """The scores of single questions, in the order of the examples, as paired significance tests need them."""

    ids: tuple[str, ...]
    answerable: NDArray[np.bool_]  # the data has an answer
    answered: NDArray[np.bool_]  # the prediction is not ""
    exact: NDArray[np.float64]  # 0 or 1
    f1: NDArray[np.float64]  # 0 to 1

    def only(self, where: NDArray[np.bool_]) -> QuestionScores:
        """Return the scores of the questions at `where`."""
        ids = tuple(id_ for id_, chosen in zip(self.ids, where, strict=True) if chosen)
        return QuestionScores(ids, self.answerable[where], self.answered[where], self.exact[where], self.f1[where])

    def withheld(self, where: NDArray[np.bool_]) -> QuestionScores:
        """Return the scores with the questions at `where` not answered: 1 if unanswerable, otherwise 0."""
        abstained = (~self.answerable).astype(np.float64)
        return replace(
            self,
            answered=self.answered & ~where,
            exact=np.where(where, abstained, self.exact),
            f1=np.where(where, abstained, self.f1),
        )

    def on_answerability(self) -> QuestionScores:
        """Return the scores of the decision to answer: 1 where it is right, whatever the text of the answer."""
        right = (self.answered == self.answerable).astype(np.float64)
        return replace(self, exact=right, f1=right)


def score_questions(
    examples: Sequence[Example],
    predictions: Mapping[str, str],
    *,
    language: str = "en",
    missing: Missing = "error",
) -> QuestionScores:
    """Return exact match and F1 of every question: the best over its true answers.

    True answers that normalise to nothing ("the", "!") do not count; a question without others expects "".
    """
    (scores,) = score_readers(examples, [predictions], language=language, missing=missing)
    return scores


def score_readers(
    examples: Sequence[Example],
    answers: Iterable[Mapping[str, str]],
    *,
    language: str = "en",
    missing: Missing = "error",
) -> list[QuestionScores]:
    """Return the scores of every question for several readers.

    Readers often give the same answer, so every text is normalised once, and scored once per question.
    """
    rule, ids = get_language(language), tuple(_distinct_ids(examples))
    number_of: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    none = number_of[""]
    given = [  # texts as numbers: the texts of a thousand readers would fill the memory
        np.fromiter(map(number_of.__getitem__, predicted_texts(ids, predictions, missing)), np.int32, len(ids))
        for predictions in answers
    ]
    normalised = functools.cache(rule.normalise)
    texts = [normalised(text) for text in number_of]
    units = [rule.units(text) for text in texts]
    scores, of_text = np.empty((len(ids), len(given))), np.empty(len(texts))
    for row, (example, column) in enumerate(zip(examples, np.stack(given, axis=1), strict=True)):
        golds = {normalised(answer.text) for answer in example.answers} - {""} or {""}
        gold_units = [rule.units(gold) for gold in golds]
        all_units = {unit for gold in gold_units for unit in gold}
        numbers = list(set(column.tolist()))
        of_text[numbers] = [
            _EXACT
            if texts[number] in golds
            else 0.0
            if all_units.isdisjoint(units[number])
            else max(overlap_f1(gold, units[number]) for gold in gold_units)
            for number in numbers
        ]
        scores[row] = of_text[column]
    answerable = np.array([bool(example.answers) for example in examples])
    return [
        QuestionScores(
            ids,
            answerable,
            answered=text_numbers != none,
            exact=(reader_scores == _EXACT).astype(np.float64),
            f1=np.minimum(reader_scores, 1.0),
        )
        for text_numbers, reader_scores in zip(given, np.ascontiguousarray(scores.T), strict=True)
    ]


_EXACT = 2.0  # more than the F1 of the same words in another order


def score_all_answered(examples: Sequence[Example]) -> QuestionScores:
    """Return the scores of a model without texts that answers every question: 1 wherever there is an answer."""
    answerable = np.array([bool(example.answers) for example in examples])
    answered = np.ones_like(answerable)
    return QuestionScores(
        tuple(_distinct_ids(examples)), answerable, answered, exact=answerable * 1.0, f1=answerable * 1.0
    )


def no_answer_f1(abstained: NDArray[np.bool_], unanswerable: NDArray[np.bool_]) -> float | None:
    """Return the F1 of the class "no answer", in percent; None if every question has an answer."""
    total = int(unanswerable.sum())
    found = int((abstained & unanswerable).sum())
    return 100.0 * 2 * found / (int(abstained.sum()) + total) if total else None


def best_thresholds(questions: QuestionScores, na_scores: Mapping[str, float]) -> dict[str, float]:
    """Return the highest exact match and F1 that a threshold on the na scores can give, each with its threshold.

    Questions are answered one by one in order of rising na score, from none (every unanswerable question is right) to
    all; the threshold is the na score of the last question answered. Three oddities of the official script are kept, so
    that the numbers agree. Questions with equal na scores are taken in the order of `na_scores` and may be separated,
    which no threshold can do. If answering nothing is best, the threshold is 0.0, even if na scores lie below it.
    Answering an unanswerable question costs 1 even with a text that normalises to nothing.
    """
    na = _aligned(questions.ids, na_scores, "no-answer score")
    row_of = {id_: row for row, id_ in enumerate(questions.ids)}
    rows = np.array([row_of[id_] for id_ in na_scores if id_ in row_of])
    rows = rows[np.argsort(na[rows], kind="stable")]
    result: dict[str, float] = {}
    for name, raw in (("exact", questions.exact), ("f1", questions.f1)):
        gain = np.where(questions.answerable, raw, -questions.answered.astype(np.float64))[rows]
        # cumsum adds left to right like the official loop, so that its ">" compares exactly the same numbers.
        totals = np.cumsum(np.concatenate([[float((~questions.answerable).sum())], gain]))
        best = int(np.argmax(totals))  # the first on a tie
        result[f"best_{name}"] = 100.0 * float(totals[best]) / len(rows)
        result[f"best_{name}_thresh"] = float(na[rows[best - 1]]) if best else 0.0
    return result


def language_of(examples: Sequence[Example]) -> str:
    """Return the name of the language of the contexts, detected in a sample of about 50 of them."""
    return detect_language("".join(example.context.text for example in examples[:: max(1, len(examples) // 50)]))


def overlap_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the F1 of two answers, given as their units."""
    if not gold or not predicted:
        return float(not gold and not predicted)
    shared = set(gold).intersection(predicted)
    same = sum(min(gold.count(unit), predicted.count(unit)) for unit in shared)
    if same == 0:
        return 0.0
    # Not 2 * same / (len + len): its last digit can differ from the official result, and so change a best threshold.
    precision, recall = same / len(predicted), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def answer_groups(answerable: NDArray[np.bool_]) -> dict[str, NDArray[np.bool_]]:
    """Return the groups of questions that are scored, by the prefix of their keys, without empty groups."""
    groups = {"": np.ones_like(answerable), "HasAns_": answerable, "NoAns_": ~answerable}
    return {prefix: chosen for prefix, chosen in groups.items() if chosen.any()}


def _summary(questions: QuestionScores) -> dict[str, float | int]:
    result: dict[str, float | int] = {}
    for prefix, chosen in answer_groups(questions.answerable).items():
        total = int(chosen.sum())
        result[f"{prefix}exact"] = 100.0 * float(questions.exact[chosen].sum()) / total
        result[f"{prefix}f1"] = 100.0 * float(questions.f1[chosen].sum()) / total
        result[f"{prefix}total"] = total
    return result


def _precision_recall(questions: QuestionScores, na: NDArray[np.float64]) -> dict[str, float]:
    if not questions.answerable.any():
        return {}
    right = {"exact": questions.exact, "f1": questions.f1, "oracle": np.ones_like(questions.exact)}
    total = int(questions.answerable.sum())
    return {f"pr_{name}_ap": _average_precision(gain * questions.answerable, na, total) for name, gain in right.items()}


def _answerability(questions: QuestionScores, na: NDArray[np.float64], cut: float) -> dict[str, float]:
    unanswerable, abstained = ~questions.answerable, na > cut
    result = {"answerability_accuracy": 100.0 * float((abstained == unanswerable).mean())}
    f1 = no_answer_f1(abstained, unanswerable)
    if f1 is not None:
        result["answerability_f1"] = f1
        result["answerability_ap"] = _average_precision(unanswerable.astype(np.float64), -na, int(unanswerable.sum()))
    return result


def _average_precision(gain: NDArray[np.float64], key: NDArray[np.float64], total: int) -> float:
    """Return precision summed over the steps of recall, in percent, with questions in order of rising `key`.

    `gain` is the contribution of each question to the `total`. Equal keys are one step: no threshold separates them.
    """
    order = np.argsort(key, kind="stable")
    key, found = key[order], np.cumsum(gain[order])
    ends = np.append(np.flatnonzero(key[1:] != key[:-1]), len(key) - 1)
    precision, recall = found[ends] / (ends + 1), found[ends] / total
    return 100.0 * float((precision * np.diff(recall, prepend=0.0)).sum())


def _distinct_ids(examples: Sequence[Example]) -> list[str]:
    if not examples:
        raise DataError("data: expected questions to score, found none.")
    ids = [example.id for example in examples]
    repeated = [id_ for id_, times in Counter(ids).items() if times > 1]
    if repeated:
        raise DataError(
            f"data: expected unique question ids, got {len(repeated)} used more than once: {_listed(repeated)}; give "
            "every question its own."
        )
    return ids


def predicted_texts(ids: Sequence[str], predictions: Mapping[str, str], missing: str) -> list[str]:
    """Return the predictions in the order of `ids`; check that they are texts."""
    if missing not in ("error", "empty"):
        raise UnknownNameError("missing", missing, ("error", "empty"))
    try:
        texts = list(map(predictions.__getitem__, ids))
    except KeyError:
        absent = [id_ for id_ in ids if id_ not in predictions]
        if missing == "error":
            raise DataError(
                f"predictions: expected one for every question, {len(absent)} of {len(ids)} missing: {_listed(absent)}"
                "; predict them too, or count them as not answered (missing='empty'; --missing empty)."
            ) from None
        texts = [predictions.get(id_, "") for id_ in ids]
    if set(map(type, texts)) != {str}:
        for id_, text in zip(ids, texts, strict=True):
            if not isinstance(text, str):
                raise DataError(
                    f'prediction of question {id_}: expected a text ("" for no answer), got {shorten(text)}.'
                )
    return texts


def _aligned(ids: Sequence[str], na_scores: Mapping[str, float], what: str) -> NDArray[np.float64]:
    """Return the na scores in the order of `ids`; check that all exist and are finite."""
    absent = [id_ for id_ in ids if id_ not in na_scores]
    if absent:
        raise DataError(
            f"{what}: expected a number for every question, {len(absent)} of {len(ids)} missing: {_listed(absent)}; "
            "give one for every question, or none to score only the answers."
        )
    values = [na_scores[id_] for id_ in ids]
    for id_, value in zip(ids, values, strict=True):
        if not is_finite(value):
            raise DataError(f"{what} of question {id_}: expected a finite number, got {shorten(value)}.")
    return np.array(values, dtype=np.float64)


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _listed(ids: Sequence[str], limit: int = 10) -> str:
    more = f" and {len(ids) - limit} more" if len(ids) > limit else ""
    return ", ".join(map(truncate, ids[:limit])) + more
