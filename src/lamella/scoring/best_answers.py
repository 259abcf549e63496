"""Scores of the best answer of every question, before any threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.inference.prediction import Prediction
from lamella.scoring.metrics import QuestionScores, score_questions


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
    answers = {id: prediction.best_span.text for id, prediction in predictions.items()}
    scores = score_questions(examples, answers, language=language)
    if gives_text:
        return scores
    right = scores.answerable.astype(np.float64)
    return replace(scores, answered=np.ones_like(scores.answered), exact=right, f1=right)


def null_odds_of(examples: Sequence[Example], predictions: Mapping[str, Prediction]) -> NDArray[np.float64]:
    """Return the null odds in the order of the examples."""
    return np.array([predictions[example.id].null_odds for example in examples], np.float64)
