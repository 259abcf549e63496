"""What several heads on one encoder answer, from one pass of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamella.data.batches import Batch
from lamella.data.features import Features
from lamella.data.padding import Padded, longest_first, pad
from lamella.encoder.encoder import Encoder, HiddenStates
from lamella.inference.decode import WindowSpans
from lamella.inference.predict import decode_batch, explain_out_of_memory
from lamella.inference.prediction import Prediction
from lamella.inference.window_merger import WindowMerger
from lamella.models.model import ReaderModel
from lamella.progress import progress
from lamella.stopwatch import Stopwatch

Encode = Callable[[Batch, Sequence[int]], HiddenStates]  # the encoder, or a cache of what it gave


def predict_many(
    models: Sequence[ReaderModel],
    features: Features,
    *,
    encode: Encode | None = None,
    batch_size: int = 32,
    rank: int = 0,
    processes: int = 1,
    gather: Callable[[list[Any]], list[Any]] = list,
    clocks: Sequence[Stopwatch] = (),
) -> list[dict[str, Prediction]]:
    """What several heads on one encoder answer, from one pass of it (or from what `encode` gives in its place).

    Several processes share the windows; `gather` joins what each of them found, so that all know everything.
    `clocks`, one for each model, are given the seconds from windows to logits, as if it had the encoder to itself.
    """
    if not models:
        return []
    was_training = [model.training for model in models]
    for model in models:
        model.eval()
    found: list[list[WindowSpans]] = [[] for _ in models]
    mine = list(longest_first(features.lengths, batch_size))[rank::processes]
    try:
        with progress("answering", sum(map(len, mine))) as advance, torch.inference_mode():
            for indices in mine:
                padded = pad(features, indices)
                with explain_out_of_memory(padded):
                    for of_model, model, logits in zip(
                        found, models, logits_of_heads(models, padded, encode, clocks), strict=True
                    ):
                        of_model.append(decode_batch(model, padded, logits))
                advance(len(indices))
    finally:
        for model, mode in zip(models, was_training, strict=True):
            model.train(mode)
    predictions = []
    for model, of_model in zip(models, found, strict=True):
        merger = WindowMerger(model.decoding, gives_text=model.gives_text)
        for spans in gather(of_model):
            merger.add(features, spans)
        predictions.append(merger.predictions(features.examples))
    return predictions


@torch.inference_mode()
def logits_of_heads(
    models: Sequence[ReaderModel],
    padded: Padded,
    encode: Encode | None = None,
    clocks: Sequence[Stopwatch] = (),
) -> list[NDArray[np.float32]]:
    """What each of several heads on one encoder gives for some windows; the encoder runs once."""
    layers = sorted({layer for model in models for layer in model.head.layers})
    batch = Batch.of(padded).to(models[0].device)
    clocks = clocks or [Stopwatch() for _ in models]
    with Stopwatch() as encoding:
        hidden = (encode or models[0].encode)(batch, layers)
        if models[0].device.type == "cuda":
            torch.cuda.synchronize(models[0].device)  # else the first head would be charged with the encoder
    found = []
    for model, clock in zip(models, clocks, strict=True):
        clock.seconds += encoding.seconds
        with clock:
            found.append(model(batch, hidden).float().cpu().numpy())
    return found


def share_encoders(models: Sequence[ReaderModel]) -> None:
    """Give models whose encoders hold the same weights one of them in common, and free the others."""
    kept: dict[tuple[Any, ...], Encoder] = {}
    for model in models:
        if not model.keeps_encoder:
            continue  # tuned: it is this model's own
        has_pooler = getattr(model.encoder.model, "pooler", None) is not None
        model.encoder = kept.setdefault((model.base_sha256, model.precision, model.device, has_pooler), model.encoder)
