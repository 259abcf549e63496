"""Answer with several heads on one encoder, in a single pass of the encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lamella.data.windows.batches import Batch
from lamella.data.windows.features import SLICE, Features
from lamella.data.windows.padding import Padded, longest_first, pad
from lamella.encoder.encoder import Encoder, HiddenStates
from lamella.inference.decode import WindowSpans
from lamella.inference.predict import decode_batch, explain_out_of_memory
from lamella.inference.prediction import Prediction
from lamella.inference.window_merger import WindowMerger
from lamella.models.model import ReaderModel
from lamella.overlap import run_behind
from lamella.progress import progress
from lamella.stopwatch import Stopwatch

Encode = Callable[[Batch, Sequence[int]], HiddenStates]  # an encoder, or a cache of its hidden states


class Measures(Protocol):
    """Measures a model while it answers: sees each batch, and then the sums of the other processes."""

    def add(self, features: Features, padded: Padded, hidden: HiddenStates, logits: NDArray[np.float32]) -> None: ...

    def join(self, gather: Callable[[list[Any]], list[Any]]) -> None: ...


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
    measures: Sequence[Measures] = (),
) -> list[dict[str, Prediction]]:
    """Return the predictions of several heads on one encoder, from one pass of it (or of `encode` instead).

    Several processes divide the windows among them; `gather` joins their spans, so that each has all of them. `clocks`
    (one per model) measure the seconds from windows to logits, as if each model had the encoder to itself. `measures`
    (one per model, or none) see the hidden layers and the logits of every batch.
    """
    if not models:
        return []
    was_training = [model.training for model in models]
    for model in models:
        model.eval()
    spans: list[list[WindowSpans]] = [[] for _ in models]

    def decode_all(padded: Padded, all_logits: Sequence[NDArray[np.float32]]) -> None:
        for model_spans, model, logits in zip(spans, models, all_logits, strict=True):
            model_spans.append(decode_batch(model, padded, logits))

    batches = list(longest_first(features.lengths, batch_size))[rank::processes]
    try:
        windows = sum(map(len, batches))
        with (
            progress("answering", windows) as advance,
            torch.inference_mode(),
            run_behind(windows > SLICE) as behind,  # a thread takes longer to start than a few windows to decode
        ):
            for indices in batches:
                padded = pad(features, indices)
                with explain_out_of_memory(padded):
                    hidden, all_logits = _run_heads(models, padded, encode, clocks)
                    behind(decode_all, padded, all_logits)
                    for measured, logits in zip(measures, all_logits, strict=bool(measures)):
                        measured.add(features, padded, hidden, logits)
                advance(len(indices))
    finally:
        for model, mode in zip(models, was_training, strict=True):
            model.train(mode)
    for measured in measures:
        measured.join(gather)
    predictions = []
    for model, model_spans in zip(models, spans, strict=True):
        merger = WindowMerger(model.decoding, gives_text=model.gives_text)
        for window_spans in gather(model_spans):
            merger.add(features, window_spans)
        predictions.append(merger.predictions(features.examples))
    return predictions


@torch.inference_mode()
def logits_of_heads(models: Sequence[ReaderModel], padded: Padded) -> list[NDArray[np.float32]]:
    """Return the logits of several heads on one encoder for some windows; the encoder runs once."""
    return _run_heads(models, padded)[1]


def _run_heads(
    models: Sequence[ReaderModel],
    padded: Padded,
    encode: Encode | None = None,
    clocks: Sequence[Stopwatch] = (),
) -> tuple[HiddenStates, list[NDArray[np.float32]]]:
    """Return the hidden layers of some windows, computed once, and the logits of every head."""
    layers = sorted({layer for model in models for layer in model.head.layers})
    batch = Batch.of(padded).to(models[0].device)
    clocks = clocks or [Stopwatch() for _ in models]
    with Stopwatch() as encoding:
        hidden = (encode or models[0].encode)(batch, layers)
        if models[0].device.type == "cuda":
            torch.cuda.synchronize(models[0].device)  # otherwise the first head's clock would count the encoder
    logits = []
    for model, clock in zip(models, clocks, strict=True):
        clock.seconds += encoding.seconds
        with clock:
            logits.append(model(batch, hidden).float().cpu().numpy())
    return hidden, logits


def share_encoders(models: Sequence[ReaderModel]) -> None:
    """Let models with the same encoder weights share one encoder, and free the others."""
    shared: dict[tuple[Any, ...], Encoder] = {}
    for model in models:
        if not model.keeps_encoder:
            continue  # a tuned encoder belongs to its model alone
        has_pooler = getattr(model.encoder.model, "pooler", None) is not None
        key = (model.loaded_sha256, model.precision, model.rounded, model.device, has_pooler)
        model.encoder = shared.setdefault(key, model.encoder)
