"""Predictions for examples: windows through the model, batch by batch, down to an n-best list a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lamella import runs
from lamella.data.batches import collate, longest_first
from lamella.data.examples import Example
from lamella.data.features import Features, featurise
from lamella.inference.decode import Prediction, best_spans, merge_windows
from lamella.inference.metrics import score
from lamella.inference.model import ReaderModel
from lamella.progress import progress


def predict(model: ReaderModel, examples: Sequence[Example], *, batch_size: int = 32) -> dict[str, Prediction]:
    """Answer every example. Memory holds the n-best spans of a window, never its logits."""
    return predict_features(model, featurise(examples, model.tokenizer, model.windows), batch_size=batch_size)


def predict_features(model: ReaderModel, features: Features, *, batch_size: int = 32) -> dict[str, Prediction]:
    """The same for windows that are cut already (training scores the same ones again and again)."""
    was_training = model.training
    model.eval()
    found = []
    try:
        with progress("answering", len(features)) as advance, torch.inference_mode():
            for indices in longest_first(features.lengths, batch_size):
                batch = collate(features, indices).to(model.device)
                found.append(best_spans(model(batch), batch, features.template.cls, model.decoding))
                advance(len(indices))
    finally:
        model.train(was_training)
    return merge_windows(features, found, model.decoding)


def score_predictions(
    examples: Sequence[Example], predictions: Mapping[str, Prediction], threshold: float, **options: Any
) -> dict[str, Any]:
    """The metric of predictions at a threshold.

    `best_f1` and its like search all thresholds, so they are given the best *answer* of every question, also where the
    prediction was "no answer"; from the text of `predictions.json` alone, an answer given up could not come back.
    """
    answers = {id: one.best_span.text for id, one in predictions.items()}
    odds = {id: one.null_odds for id, one in predictions.items()}
    na_prob = {id: one.na_prob for id, one in predictions.items()}
    return score(examples, answers, null_odds=odds, na_prob=na_prob, threshold=threshold, **options)


def write_predictions(folder: Path, predictions: Mapping[str, Prediction], threshold: float) -> None:
    """The four files that every other stage reads, under their official names."""
    runs.write_json(folder / runs.PREDICTIONS, {id: one.text(threshold) for id, one in predictions.items()})
    runs.write_json(folder / runs.NULL_ODDS, {id: one.null_odds for id, one in predictions.items()})
    runs.write_json(folder / runs.NA_PROB, {id: one.na_prob for id, one in predictions.items()})
    runs.write_json(
        folder / runs.NBEST,
        {id: [candidate.to_json() for candidate in one.candidates] for id, one in predictions.items()},
    )
