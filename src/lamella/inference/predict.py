"""Predictions for examples: windows through the model, batch by batch, down to an n-best list a question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lamella import runs
from lamella.data.batches import Indices, collate, longest_first
from lamella.data.examples import Example
from lamella.data.features import Features, featurise
from lamella.errors import DataError
from lamella.inference.decode import Prediction, WindowSpans, best_spans, merge_answerability, merge_windows
from lamella.inference.metrics import score
from lamella.inference.model import ReaderModel
from lamella.progress import progress


def predict(model: ReaderModel, examples: Sequence[Example], *, batch_size: int = 32) -> dict[str, Prediction]:
    """Answer every example. Memory holds the n-best spans of a window, never its logits."""
    twice = [id for id, times in Counter(one.id for one in examples).items() if times > 1]
    if twice:
        raise DataError(f"question {twice[0]}: its id is given to several questions, so that answers would be lost.")
    return predict_features(model, featurise(examples, model.tokenizer, model.windows), batch_size=batch_size)


def predict_features(model: ReaderModel, features: Features, *, batch_size: int = 32) -> dict[str, Prediction]:
    """The same for windows that are cut already (training scores the same ones again and again)."""
    was_training = model.training
    model.eval()
    spans: list[WindowSpans] = []
    odds: list[tuple[Indices, Tensor]] = []
    try:
        with progress("answering", len(features)) as advance, torch.inference_mode():
            for indices in longest_first(features.lengths, batch_size):
                batch = collate(features, indices).to(model.device)
                if model.gives_text:
                    spans.append(best_spans(model(batch), batch, features.template.cls, model.decoding))
                else:
                    odds.append((indices, model(batch)[:, :, 0]))
                advance(len(indices))
    finally:
        model.train(was_training)
    if not model.gives_text:
        return merge_answerability(features, odds)
    return merge_windows(features, spans, model.decoding)


def score_predictions(
    model: ReaderModel, examples: Sequence[Example], predictions: Mapping[str, Prediction], **options: Any
) -> dict[str, Any]:
    """The metric of a model's predictions at its threshold; of one that gives no text, only how well it abstains.

    `best_f1` and its like search all thresholds, so they are given the best *answer* of every question, also where the
    prediction was "no answer"; from the text of `predictions.json` alone, an answer given up could not come back.
    """
    answers = {id: one.best_span.text for id, one in predictions.items()}
    odds = {id: one.null_odds for id, one in predictions.items()}
    threshold = model.decoding.null_score_diff_threshold
    results = score(examples, answers, null_odds=odds, threshold=threshold, **options)
    if model.gives_text:
        return results
    return {key: value for key, value in results.items() if key == "total" or key.startswith("answerability")}


def write_predictions(folder: Path, model: ReaderModel, predictions: Mapping[str, Prediction]) -> None:
    """The files that every other stage reads, under their official names; without texts, where the model gives none."""
    runs.write_json(folder / runs.NULL_ODDS, {id: one.null_odds for id, one in predictions.items()})
    runs.write_json(folder / runs.NA_PROB, {id: one.na_prob for id, one in predictions.items()})
    if model.gives_text:
        threshold = model.decoding.null_score_diff_threshold
        runs.write_json(folder / runs.PREDICTIONS, {id: one.text(threshold) for id, one in predictions.items()})
        runs.write_json(
            folder / runs.NBEST,
            {id: [candidate.to_json() for candidate in one.candidates] for id, one in predictions.items()},
        )
