"""Scores of the best answer of every question, before any threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.inference.prediction import Prediction
from lamella.scoring.metrics import QuestionScores, score_all_answered, score_questions


def score_best_answers(
    examples: Sequence[Example],
    predictions: Mapping[str, Prediction],
    *,
    gives_text: bool = True,
    language: str = "en",
) -> QuestionScores:
    """Score the best answer of every question, as if no answer were withheld.

    A model without texts counts as right wherever there is an answer.
    """
    if not gives_text:
        return score_all_answered(examples)
    answers = {id: prediction.best_span.text for id, prediction in predictions.items()}
    return score_questions(examples, answers, language=language)


def null_odds_of(examples: Sequence[Example], predictions: Mapping[str, Prediction]) -> NDArray[np.float64]:
    """Return the null odds in the order of the examples."""
    return np.array([predictions[example.id].null_odds for example in examples], np.float64)
