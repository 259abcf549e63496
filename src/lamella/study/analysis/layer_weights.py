"""Which layers a head reads: weights that it learned, and those that it gives to each kind of token.

Learned weights are read from the model's file. Attention over the layers differs from token to token: there the model
is run on some questions, and only there is torch needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.data.features import Features
from lamella.data.padding import Padded
from lamella.encoder.sources import MODEL_CONFIG, MODEL_WEIGHTS, is_saved_model, model_folder
from lamella.errors import ModelError, one_line
from lamella.files import read_json

ATTENTIVE = ("dot", "multiplicative", "encoder_block")
KINDS = ("special", "question", "context", "answer")  # context: the rest of it, where there is an answer
PAD = -1


def learned_weights(run: Path) -> dict[str, Any] | None:
    """The weights of a scalar mix, as they apply: γ times w, or times softmax(w); None where there are none.

    `share` is their size relative to all, |w_i| / Σ|w|, which can be compared between heads.
    """
    mixer = _first_stage(run)
    if mixer is None or mixer["name"] != "scalar_mix":
        return None
    path = model_folder(run) / MODEL_WEIGHTS
    try:
        w, gamma = _read_tensors(path, "head.stages.0.w", "head.stages.0.gamma")
        applied = scalar_mix_weights(w, gamma, softmax=mixer.get("normalise") == "softmax")
    except TypeError:  # bf16, which numpy does not have
        return None
    except (IndexError, ValueError):
        raise ModelError(f"{path}: expected w and gamma of a scalar mix; the model is damaged.") from None
    names = ("start", "end") if len(applied) == 2 else ("both",)
    return {
        "mixer": mixer["name"],
        "layers": _layer_names(run, applied.shape[1]),
        "weights": dict(zip(names, applied.tolist(), strict=True)),
        "share": dict(zip(names, shares(applied).tolist(), strict=True)),
    }


def scalar_mix_weights(w: NDArray[np.float64], gamma: NDArray[np.float64], *, softmax: bool) -> NDArray[np.float64]:
    """The weights [S, L] that a scalar mix gives the layers."""
    if softmax:
        w = np.exp(w - w.max(axis=1, keepdims=True))
        w = w / w.sum(axis=1, keepdims=True)
    applied: NDArray[np.float64] = gamma[:, None] * w
    return applied


def shares(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The part that each weight has in the sum of all, by size; those of nothing but zeros are zeros."""
    sizes = np.abs(weights)
    total = sizes.sum(axis=1, keepdims=True)
    found: NDArray[np.float64] = np.divide(sizes, total, out=np.zeros_like(sizes), where=total > 0)
    return found


def mean_attention(run: Path, examples: Sequence[Example], *, batch_size: int = 16) -> dict[str, Any] | None:
    """The mean weight of every layer by output and kind of token, of a head with attention over the layers.

    Runs the model of the run on the questions given; None where it has no such head.
    """
    mixer = _first_stage(run)
    if mixer is None or mixer["name"] not in ATTENTIVE or not examples:
        return None
    import torch

    from lamella.data.batches import Batch
    from lamella.data.features import featurise
    from lamella.data.padding import longest_first, pad
    from lamella.inference.predict import explaining_memory
    from lamella.models.loading import load_model
    from lamella.models.model import ReaderModel
    from lamella.progress import progress

    model = load_model(run)
    if not isinstance(model, ReaderModel):
        raise ModelError(f"{run}: expected a reader of Lamella's.")
    features = featurise(examples, model.tokenizer, model.windows)
    sums: NDArray[np.float64] | float = 0.0
    counts = np.zeros(len(KINDS), np.int64)
    with progress("weighing layers", len(features)) as advance, torch.inference_mode():
        for windows in longest_first(features.lengths, batch_size):
            padded = pad(features, windows)
            with explaining_memory(padded):
                hidden = model.encode(Batch.of(padded).to(model.device), model.head.layers)
                weights = model.head.layer_weights(hidden)
            if weights is None:
                return None
            kinds = token_kinds(features, padded)
            sums = sums + sums_by_kind(weights.float().cpu().numpy(), kinds)
            counts += np.bincount(kinds[kinds != PAD], minlength=len(KINDS))
            advance(len(windows))
    found = np.asarray(sums) / np.maximum(counts, 1)[:, None]  # [O, K, L]
    return {
        "mixer": mixer["name"],
        "layers": list(model.head.main_layers),
        "questions": len(examples),
        "tokens": dict(zip(KINDS, counts.tolist(), strict=True)),
        "weights": {
            output: {kind: found[number, place].tolist() for place, kind in enumerate(KINDS) if counts[place]}
            for number, output in enumerate(model.head.task.choice_names)
        },
    }


def token_kinds(features: Features, padded: Padded) -> NDArray[np.int64]:
    """What every token is, [B, T]: its number in KINDS, or PAD."""
    places = np.arange(padded.mask.shape[1])
    begin = features.context_begin[padded.windows, None]
    template = features.template
    kinds = np.where(padded.mask, KINDS.index("special"), PAD)
    kinds[(places >= len(template.prefix)) & (places < begin - len(template.middle))] = KINDS.index("question")
    kinds[padded.is_context] = KINDS.index("context")
    answer = (places >= padded.start[:, None]) & (places <= padded.end[:, None])
    kinds[padded.is_context & answer] = KINDS.index("answer")
    return kinds


def sums_by_kind(weights: NDArray[Any], kinds: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights [O, L, B, T] added up over the tokens of each kind: [O, K, L]."""
    is_kind = np.stack([kinds == kind for kind in range(len(KINDS))]).astype(np.float64)  # [K, B, T]
    sums: NDArray[np.float64] = np.einsum("olbt,kbt->okl", weights.astype(np.float64), is_kind)
    return sums


def spread(examples: Sequence[Example], count: int) -> list[Example]:
    """So many of the examples, evenly from first to last; all, where there are fewer."""
    if count >= len(examples):
        return list(examples)
    return [examples[place * len(examples) // count] for place in range(count)]


def _first_stage(run: Path) -> dict[str, Any] | None:
    """The first mixer stage of the run's model; None where the run has no model of ours."""
    folder = model_folder(run)
    if not is_saved_model(folder):
        return None
    try:
        mixer: dict[str, Any] = read_json(folder / MODEL_CONFIG)["head"]["mixer"][0]
        if not isinstance(mixer["name"], str):
            raise TypeError
    except (KeyError, IndexError, TypeError):
        raise ModelError(f"{folder / MODEL_CONFIG}: expected a head with its mixer; the model is damaged.") from None
    return mixer


def _layer_names(run: Path, count: int) -> list[int | str]:
    """The numbers of the layers that a head sees; 0 is the output of the embeddings."""
    choice = read_json(model_folder(run) / MODEL_CONFIG)["head"].get("layers", "encoder")
    if isinstance(choice, list):
        return choice
    if choice.startswith("pooled"):
        return ["pooled", *range(count - 1)]
    return list(range(count)) if choice == "all" else list(range(1, count + 1))


def _read_tensors(path: Path, *names: str) -> list[NDArray[np.float64]]:
    """These tensors alone: the file of a tuned encoder holds much more."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return [np.asarray(file.get_tensor(name), dtype=np.float64) for name in names]
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path}: expected {' and '.join(names)} in a safetensors file; it is damaged ({one_line(error)})."
        ) from None
