"""Answer examples with a model: windows, logits, spans, and an n-best list per question.

Nothing here needs torch: the model may run on onnxruntime.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.data.windows.features import SLICE, Features, featurise_in_slices
from lamella.data.windows.padding import Padded, longest_first, pad
from lamella.decoding_options import DecodingOptions
from lamella.documents.passages import PassageCache
from lamella.errors import RunError, counted
from lamella.inference.decode import WindowSpans, decode, decode_answerability
from lamella.inference.doubts import Doubts
from lamella.inference.prediction import Prediction
from lamella.inference.protocols import AnswerSource, BeginsLogits, LogitsSink, QAModel
from lamella.inference.question_ids import check_unique_ids
from lamella.inference.window_merger import WindowMerger
from lamella.overlap import read_ahead, run_behind
from lamella.progress import progress
from lamella.stopwatch import Stopwatch


def predict(
    model: QAModel,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    sink: LogitsSink | None = None,
    clock: Stopwatch | None = None,
    decoding: DecodingOptions | None = None,
    doubts: Doubts | None = None,
    most_tokens: int | None = None,
    passages: PassageCache | None = None,
) -> dict[str, Prediction]:
    """Answer every example; return the predictions by question id.

    Memory holds a few windows and the n-best spans of each question. Among many questions, the windows of the next ones
    are cut, and the logits of the last ones decoded, while the model computes.

    Pass a `sink` to receive all logits, and a `clock` to measure the seconds from windows to logits. `decoding`
    replaces the model's decoding options. `doubts` collects reasons to doubt the answers. Contexts with more than
    `most_tokens` raise TooManyTokensError. `passages` keeps the indexes of long texts from call to call.
    """
    check_unique_ids(examples)
    decoding = decoding or model.decoding
    merger = WindowMerger(decoding, gives_text=model.gives_text, passages=passages)

    def collect(features: Features, padded: Padded, logits: NDArray[np.float32]) -> None:
        merger.add(features, decode_batch(model, padded, logits, decoding))
        if sink is not None:
            sink.add(features, padded, logits)

    slices = featurise_in_slices(
        examples, model.tokenizer, model.windows, most_tokens=most_tokens, whole_offsets=sink is not None
    )
    overlaps = len(examples) > SLICE  # threads take longer to start than a few questions to answer
    with progress("answering", len(examples), lines=True) as advance, run_behind(overlaps) as behind:
        for features in read_ahead(slices) if overlaps else slices:
            if doubts is not None:
                behind(doubts.add, features)
            shares = _shares(features)
            for padded, logits in iterate_batches(model, features, batch_size, clock):
                behind(collect, features, padded, logits)
                advance(float(shares[padded.windows].sum()))
    return merger.predictions(examples)


def iterate_batches(
    model: QAModel, features: Features, batch_size: int, clock: Stopwatch | None = None
) -> Iterator[tuple[Padded, NDArray[np.float32]]]:
    """Yield batches of windows of similar length, with their logits.

    A model on a GPU computes a batch while the next one is padded, and the logits of the one before are used.
    """
    clock = clock or Stopwatch()
    most_waiting = 1 if isinstance(model, BeginsLogits) else 0
    waiting: deque[tuple[Padded, Callable[[], NDArray[np.float32]]]] = deque()

    def finish() -> tuple[Padded, NDArray[np.float32]]:
        padded, wait = waiting.popleft()
        with explain_out_of_memory(padded), clock:
            return padded, wait()

    for indices in longest_first(features.lengths, batch_size):
        padded = pad(features, indices)
        with explain_out_of_memory(padded), clock:
            waiting.append((padded, _begin_logits(model, padded)))
        if len(waiting) > most_waiting:
            yield finish()
    while waiting:
        yield finish()


def _begin_logits(model: QAModel, padded: Padded) -> Callable[[], NDArray[np.float32]]:
    """Begin to compute logits, where the model does so beside this thread; return a function that waits for them."""
    if isinstance(model, BeginsLogits):
        return model.begin_logits(padded)
    logits = model.logits(padded)
    return lambda: logits


def decode_batch(
    model: AnswerSource, padded: Padded, logits: NDArray[Any], decoding: DecodingOptions | None = None
) -> WindowSpans:
    """Decode the logits of some windows as the task of `model` requires."""
    if model.gives_text:
        return decode(logits, padded, decoding or model.decoding)
    return decode_answerability(logits, padded)


def _shares(features: Features) -> NDArray[np.float64]:
    """Return the share of its example that each window adds: of the tokens, those that have most context in it."""
    added = np.add.reduceat(features.max_context, features.rows[:-1], dtype=np.int64)
    tokens = np.array([max(1, len(offsets)) for offsets in features.offsets]) / features.part
    return np.asarray(added / tokens[features.example], np.float64)


@contextmanager
def explain_out_of_memory(padded: Padded) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError):  # raised by numpy and for onnxruntime
            from lamella.encoder.device import is_out_of_memory

            if not is_out_of_memory(error):
                raise
        windows, tokens = padded.mask.shape
        raise RunError(
            f"out of memory while answering {counted(windows, 'window')} of {counted(tokens, 'token')} at once; "
            "lower the batch size (--batch-size; in training, training.eval_batch_size)."
        ) from None
