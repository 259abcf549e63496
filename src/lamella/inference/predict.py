"""Predictions for examples: windows through a model, batch by batch, down to an n-best list a question.

The model may be torch's or onnxruntime's: nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.data.features import Features, featurise_in_slices
from lamella.data.padding import Padded, longest_first, pad
from lamella.errors import RunError
from lamella.inference.decode import WindowSpans, decode, decode_answerability
from lamella.inference.prediction import Prediction
from lamella.inference.protocols import AnswerSource, LogitsSink, QAModel
from lamella.inference.questions import check_unique_ids
from lamella.inference.window_merger import WindowMerger
from lamella.progress import progress
from lamella.stopwatch import Stopwatch

if TYPE_CHECKING:
    pass


def predict(
    model: QAModel,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    keeper: LogitsSink | None = None,
    clock: Stopwatch | None = None,
) -> dict[str, Prediction]:
    """Answer every example. Memory holds some windows and the n-best spans of a question; all logits, in half
    precision, only where a `keeper` is to have them. A `clock` is given the seconds from windows to logits.
    """
    check_unique_ids(examples)
    merger = WindowMerger(model.decoding, gives_text=model.gives_text)
    with progress("answering", len(examples)) as advance:
        for features in featurise_in_slices(examples, model.tokenizer, model.windows):
            for padded, logits in iterate_batches(model, features, batch_size, clock):
                merger.add(features, decode_batch(model, padded, logits))
                if keeper is not None:
                    keeper.add(features, padded, logits)
            advance(len(features.examples))
    return merger.predictions(examples)


def iterate_batches(
    model: QAModel, features: Features, batch_size: int, clock: Stopwatch | None = None
) -> Iterator[tuple[Padded, NDArray[np.float32]]]:
    """Every window with its logits, in batches of like length."""
    for indices in longest_first(features.lengths, batch_size):
        padded = pad(features, indices)
        with explain_out_of_memory(padded), clock or Stopwatch():
            logits = model.logits(padded)
        yield padded, logits


def decode_batch(model: AnswerSource, padded: Padded, logits: NDArray[Any], **options: Any) -> WindowSpans:
    """What a model's logits say of some windows."""
    if model.gives_text:
        return decode(logits, padded, model.decoding, **options)
    return decode_answerability(logits, padded)


@contextmanager
def explain_out_of_memory(padded: Padded) -> Iterator[None]:
    """Out of memory is answered with what would help."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError):  # which is numpy's and onnxruntime's
            from lamella.encoder.device import is_out_of_memory

            if not is_out_of_memory(error):
                raise
        windows, tokens = padded.mask.shape
        raise RunError(
            f"out of memory while answering {windows} windows of {tokens} tokens at once: lower the batch size "
            "(--batch-size; in training, training.eval_batch_size)."
        ) from None
