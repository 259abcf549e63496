"""The layers of the encoder that an answer was read from: the weight of each layer for each token of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lamella.data.examples import Context, Example
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.padding import pad
from lamella.errors import UsageError
from lamella.inference.answer_list import Answer
from lamella.inference.protocols import QAModel

if TYPE_CHECKING:
    from lamella.models.model import ReaderModel

DIGITS = 6


def layers_of_answer(model: QAModel, question: str, answer: Answer, *, shift: int = 0) -> dict[str, Any]:
    """Return the weight of every layer for the tokens of an answer, in the window that has most text around it.

    `layers` are the numbers of the layers (0: the embeddings). `tokens` are the answer's, each with its characters and
    its `weights`: those for the start of an answer, and those for its end. `shift` is where the text of the answer
    begins in its context, and is added to the characters.
    """
    import torch

    from lamella.data.windows.batches import Batch

    reader = _check_model(model)
    features = featurise([Example("0", question, Context(answer.text))], reader.tokenizer, reader.windows)
    window, places = _place(features, answer["start"], answer["end"])
    with torch.inference_mode():
        batch = Batch.of(pad(features, np.array([window]))).to(reader.device)
        weights = reader.head.layer_weights(reader.encode(batch, reader.head.layers))
    if weights is None:
        raise UsageError(
            f"layers: expected a head that weighs the layers, such as scalar_mix or dot, got {_mixer_name(reader)}."
        )
    of_tokens = weights[:, :, 0].float().cpu().numpy()  # [O, L, T]
    tokens = []
    for place in places:
        begin, end = features.characters(window, place, place)
        by_output = {
            output: [round(float(weight), DIGITS) for weight in of_tokens[number, :, place]]
            for number, output in enumerate(reader.head.task.names_of_outputs())
        }
        tokens.append(
            {"token": answer.text[begin:end], "start": begin + shift, "end": end + shift, "weights": by_output}
        )
    return {"layers": list(reader.head.main_layers), "tokens": tokens}


def _place(features: Features, start: int, end: int) -> tuple[int, range]:
    """Return the window with most text around some characters of the context, and the positions of their tokens."""
    offsets = features.offsets[0]
    (inside,) = np.nonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
    begins = features.first_token
    ends = begins + features.context_end - features.context_begin
    window = int(np.minimum(inside[0] - begins, ends - 1 - inside[-1]).argmax())
    shift = int(features.context_begin[window]) - int(begins[window])
    # An answer that is longer than a window is cut.
    first, last = max(int(inside[0]), int(begins[window])), min(int(inside[-1]), int(ends[window]) - 1)
    return window, range(first + shift, last + shift + 1)


def _check_model(model: QAModel) -> ReaderModel:
    """Return a model whose head can be asked; a graph outputs nothing but logits."""
    from lamella.models.model import ReaderModel

    if not isinstance(model, ReaderModel):
        raise UsageError("layers: expected a model trained with Lamella, on torch; load it with backend='torch'.")
    return model


def _mixer_name(model: ReaderModel) -> str:
    return type(model.head.stages[0]).__name__
