"""Write and read the prediction files of a run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import PydanticSerializationError, to_json

from lamella import runs
from lamella.data.examples import Example
from lamella.decoding_options import DecodingOptions
from lamella.errors import RunError, UnreadableError
from lamella.files import read_json, write_entries
from lamella.inference.no_answer import na_probability
from lamella.inference.prediction import Candidate, Prediction, decision
from lamella.inference.protocols import AnswerSource
from lamella.inference.several_contexts import answers_by_question, has_several_contexts

HAS_ANSWER = "has an answer"  # stands for the text of a model that only decides whether there is one


@dataclass(frozen=True)
class AnswerSet:
    """The answers of one model by question id: n-best lists, and the texts chosen at its own threshold."""

    predictions: Mapping[str, Prediction]
    texts: Mapping[str, str]

    @classmethod
    def from_predictions(cls, predictions: Mapping[str, Prediction], decoding: DecodingOptions) -> AnswerSet:
        """Choose the texts at the threshold of `decoding`."""
        return cls(predictions, _texts(predictions, decoding.null_score_diff_threshold))

    @classmethod
    def from_decisions(cls, null_odds: Mapping[str, float], threshold: float) -> AnswerSet:
        """Return the decisions of a model without texts: `HAS_ANSWER`, or "" where the odds exceed the threshold."""
        predictions = {id: decision(odds) for id, odds in null_odds.items()}
        return cls(predictions, {id: "" if odds > threshold else HAS_ANSWER for id, odds in null_odds.items()})


def write_predictions(
    folder: Path, model: AnswerSource, predictions: Mapping[str, Prediction], examples: Sequence[Example] = ()
) -> None:
    """Write the prediction files under their official names; the ones with texts only if the model gives texts.

    Where questions have several contexts, every context has its own id in these files. Two more files then hold the
    answers by question.
    """
    threshold = model.decoding.null_score_diff_threshold
    odds = _null_odds(predictions)
    na_prob = na_probability(np.array(list(odds.values()), np.float64), model.decoding.calibration).tolist()
    write_entries(folder / runs.NULL_ODDS, odds)
    write_entries(folder / runs.NA_PROB, dict(zip(odds, na_prob, strict=True)))
    if model.gives_text:
        write_entries(folder / runs.PREDICTIONS, _texts(predictions, threshold))
        write_entries(folder / runs.NBEST, predictions, encode=_n_best_json)
    if has_several_contexts(examples):
        answers = answers_by_question(model, examples, predictions)
        write_entries(folder / runs.QUESTION_NULL_ODDS, _null_odds(answers))
        if model.gives_text:
            write_entries(folder / runs.QUESTION_PREDICTIONS, _texts(answers, threshold))


def read_answers(folder: Path) -> AnswerSet:
    """Read the n-best lists, the chosen texts and the null odds of a run folder.

    Null odds include a penalty or a calibration by features, so they do not follow from the n-best lists.
    """
    best, texts = read_json(folder / runs.NBEST), read_json(folder / runs.PREDICTIONS)
    odds = read_json(folder / runs.NULL_ODDS) if (folder / runs.NULL_ODDS).is_file() else {}
    try:
        predictions = {id: _prediction(candidates, odds.get(id)) for id, candidates in best.items()}
        return AnswerSet(predictions, {id: str(texts[id]) for id in predictions})
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UnreadableError(
            f"{folder}: expected text, probability, score, start and end of every candidate in {runs.NBEST}, a text "
            f"for every question in {runs.PREDICTIONS}, and a number in {runs.NULL_ODDS}; predict again."
        ) from None


def read_decisions(folder: Path) -> AnswerSet:
    """Read the null odds of a run whose model only decides whether there is an answer, with its threshold."""
    odds, path = read_json(folder / runs.NULL_ODDS), folder / runs.RESULTS
    threshold = (read_json(path) if path.is_file() else {}).get("threshold")
    if not isinstance(threshold, int | float):
        raise RunError(
            f"{folder}: expected {runs.RESULTS} with the threshold of the model, got none; score it with: "
            "lamella evaluate DATA --model RUN --out OUT"
        )
    try:
        return AnswerSet.from_decisions({str(id): float(value) for id, value in odds.items()}, float(threshold))
    except (AttributeError, TypeError, ValueError):
        raise UnreadableError(
            f"{folder / runs.NULL_ODDS}: expected a number for every question; predict again."
        ) from None


def _n_best_json(prediction: Prediction) -> str:
    """Return an n-best list as JSON.

    The json module spends a microsecond on each of the 42 floats of a list; pydantic writes the same numbers in a third
    of its time.
    """
    if not math.isfinite(sum(row[3] + row[4] for row in prediction.rows)):
        raise ValueError("n-best list: expected finite scores and probabilities, others are not JSON compliant.")
    try:
        return to_json(prediction.n_best()).decode()
    except PydanticSerializationError:  # a text with half of a surrogate pair, which has no UTF-8 form
        return json.dumps(prediction.n_best(), ensure_ascii=False)


def _prediction(n_best: Sequence[Mapping[str, Any]], null_odds: float | None) -> Prediction:
    candidates = tuple(
        Candidate(str(row["text"]), int(row["start"]), int(row["end"]), float(row["score"]), float(row["probability"]))
        for row in n_best
    )
    if null_odds is not None:
        return Prediction(candidates, null_odds=float(null_odds))
    without_odds = Prediction(candidates, null_odds=0.0)
    return Prediction(candidates, null_odds=without_odds.null.score - without_odds.best_span.score)


def _texts(predictions: Mapping[str, Prediction], threshold: float) -> dict[str, str]:
    return {id: prediction.text(threshold) for id, prediction in predictions.items()}


def _null_odds(predictions: Mapping[str, Prediction]) -> dict[str, float]:
    return {id: prediction.null_odds for id, prediction in predictions.items()}
