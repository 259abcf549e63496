"""The prediction files of a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamella import runs
from lamella.config import DecodingOptions
from lamella.data.examples import Example
from lamella.errors import UnreadableError
from lamella.files import read_json, write_entries
from lamella.inference.no_answer import na_probability
from lamella.inference.prediction import Candidate, Prediction
from lamella.inference.protocols import AnswerSource
from lamella.inference.several_contexts import answers_by_question, has_several_contexts


@dataclass(frozen=True)
class AnswerSet:
    """What a member answered: its n-best lists, and the texts that it settled on at its own threshold."""

    predictions: Mapping[str, Prediction]
    texts: Mapping[str, str]

    @classmethod
    def by(cls, decoding: DecodingOptions, predictions: Mapping[str, Prediction]) -> AnswerSet:
        """Predictions, and what a model says to them."""
        threshold = decoding.null_score_diff_threshold
        return cls(predictions, {id: one.text(threshold) for id, one in predictions.items()})


def write_predictions(
    folder: Path, model: AnswerSource, predictions: Mapping[str, Prediction], examples: Sequence[Example] = ()
) -> None:
    """The files that every other stage reads, under their official names; without texts, where the model gives none.

    Where `examples` ask a question of several contexts, these have an id each; the answers by question lie beside.
    """
    threshold = model.decoding.null_score_diff_threshold
    odds = {id: one.null_odds for id, one in predictions.items()}
    na_prob = na_probability(np.array(list(odds.values()), np.float64), model.decoding.calibration).tolist()
    write_entries(folder / runs.NULL_ODDS, odds)
    write_entries(folder / runs.NA_PROB, dict(zip(odds, na_prob, strict=True)))
    if model.gives_text:
        write_entries(folder / runs.PREDICTIONS, {id: one.text(threshold) for id, one in predictions.items()})
        write_entries(
            folder / runs.NBEST,
            {id: [candidate.to_json() for candidate in one.candidates] for id, one in predictions.items()},
        )
    if has_several_contexts(examples):
        answers = answers_by_question(model, examples, predictions)
        write_entries(folder / runs.QUESTION_NULL_ODDS, {id: one.null_odds for id, one in answers.items()})
        if model.gives_text:
            texts = {id: one.text(threshold) for id, one in answers.items()}
            write_entries(folder / runs.QUESTION_PREDICTIONS, texts)


def read_answers(folder: Path) -> AnswerSet:
    """The predictions of a run folder."""
    best, texts = read_json(folder / runs.NBEST), read_json(folder / runs.PREDICTIONS)
    try:
        predictions = {id: _prediction(candidates) for id, candidates in best.items()}
        return AnswerSet(predictions, {id: str(texts[id]) for id in predictions})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UnreadableError(
            f"{folder}: expected {runs.NBEST} with text, probability, score, start and end of every candidate, and a "
            f"text for each question in {runs.PREDICTIONS}."
        ) from None


def _prediction(found: Sequence[Mapping[str, Any]]) -> Prediction:
    candidates = tuple(
        Candidate(str(one["text"]), int(one["start"]), int(one["end"]), float(one["score"]), float(one["probability"]))
        for one in found
    )
    bare = Prediction(candidates, null_odds=0.0)
    return Prediction(candidates, null_odds=bare.null.score - bare.best_span.score)
