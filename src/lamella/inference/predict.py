"""Predictions for examples: windows through the model, batch by batch, down to an n-best list a question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lamella import runs
from lamella.data.batches import Batch, collate, longest_first
from lamella.data.examples import Example
from lamella.data.features import Features, featurise
from lamella.encoder.encoder import HiddenStates
from lamella.errors import DataError, RunError
from lamella.inference.decode import Prediction, best_spans, merge_answerability, merge_windows
from lamella.inference.metrics import score
from lamella.inference.model import ReaderModel
from lamella.progress import progress

Encode = Callable[[Batch, Sequence[int]], HiddenStates]  # the encoder, or a cache of what it gave


def predict(model: ReaderModel, examples: Sequence[Example], *, batch_size: int = 32) -> dict[str, Prediction]:
    """Answer every example. Memory holds the n-best spans of a window, never its logits."""
    twice = [id for id, times in Counter(one.id for one in examples).items() if times > 1]
    if twice:
        raise DataError(f"question {twice[0]}: its id is given to several questions, so that answers would be lost.")
    return predict_features(model, featurise(examples, model.tokenizer, model.windows), batch_size=batch_size)


def predict_features(model: ReaderModel, features: Features, *, batch_size: int = 32) -> dict[str, Prediction]:
    """The same for windows that are cut already (training scores the same ones again and again)."""
    return predict_many([model], features, batch_size=batch_size)[0]


def predict_many(
    models: Sequence[ReaderModel],
    features: Features,
    *,
    encode: Encode | None = None,
    batch_size: int = 32,
    rank: int = 0,
    processes: int = 1,
    gather: Callable[[list[Any]], list[Any]] = list,
) -> list[dict[str, Prediction]]:
    """What several heads on one encoder answer, from one pass of it (or from what `encode` gives in its place).

    Several processes share the windows; `gather` joins what each of them found, so that all know everything.
    """
    if not models:
        return []
    layers = sorted({layer for model in models for layer in model.head.layers})
    encode = encode or models[0].encode
    was_training = [model.training for model in models]
    for model in models:
        model.eval()
    found: list[list[Any]] = [[] for _ in models]
    mine = list(longest_first(features.lengths, batch_size))[rank::processes]
    try:
        with progress("answering", sum(map(len, mine))) as advance, torch.inference_mode():
            for indices in mine:
                batch = collate(features, indices).to(models[0].device)
                with _explaining_memory(batch):
                    hidden = encode(batch, layers)
                    for of_model, model in zip(found, models, strict=True):
                        logits = model(batch, hidden)
                        if model.gives_text:
                            of_model.append(best_spans(logits, batch, features.template.cls, model.decoding))
                        else:
                            of_model.append((indices, logits[:, :, 0].cpu()))
                advance(len(indices))
    finally:
        for model, mode in zip(models, was_training, strict=True):
            model.train(mode)
    return [
        merge_windows(features, gather(of_model), model.decoding)
        if model.gives_text
        else merge_answerability(features, gather(of_model))
        for model, of_model in zip(models, found, strict=True)
    ]


@contextmanager
def _explaining_memory(batch: Batch) -> Iterator[None]:
    """Out of memory is answered with what would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        from accelerate.utils.memory import should_reduce_batch_size

        if not should_reduce_batch_size(error):
            raise
        windows, tokens = batch.mask.shape
        raise RunError(
            f"out of memory while answering {windows} windows of {tokens} tokens at once: lower the batch size "
            "(--batch-size; in training, training.eval_batch_size)."
        ) from None


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
