"""The layers that a head reads: learned weights, and the mean attention over the layers for each kind of token.

Learned weights are read from the model file. Attention over the layers differs between tokens, so the model is run on
some questions. The mixer declares which of the two it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from lamella import registry
from lamella.data.examples import Example
from lamella.encoder.sources import MODEL_CONFIG, MODEL_WEIGHTS, is_saved_model, model_folder
from lamella.errors import ModelError, UnknownNameError, one_line
from lamella.files import read_json
from lamella.inference.layer_means import KINDS, LayerMeans

if TYPE_CHECKING:
    from torch import Tensor

    from lamella.heads.head import Stage


def learned_weights(run: Path) -> dict[str, Any] | None:
    """Return the layer weights that the run's mixer learned; None if it has none that are the same for all tokens.

    `share` is their size relative to all, |w_i| / Σ|w|, which can be compared between heads.
    """
    mixer, kind = _first_stage(run)
    if mixer is None or kind is None:
        return None
    from lamella.heads.head import Stage

    if kind.learned_layer_weights is Stage.learned_layer_weights:  # it learns none: do not open the file
        return None
    path = model_folder(run) / MODEL_WEIGHTS
    name, options = registry.split(mixer)
    try:
        weights = kind.learned_layer_weights(_stage_tensors(path), **options)
        if weights is None:
            return None
        applied: NDArray[np.float64] = weights.numpy()
        if applied.ndim != 2 or not np.isfinite(applied).all():
            raise IndexError
    except (IndexError, KeyError, RuntimeError):
        raise ModelError(f"{path}: expected the tensors of the mixer {name!r}; the model is damaged.") from None
    names = _output_names(run) if len(applied) > 1 else ("both",)
    return {
        "mixer": name,
        "layers": _layer_names(run, applied.shape[1]),
        "weights": dict(zip(names, applied.tolist(), strict=True)),
        "share": dict(zip(names, shares(applied).tolist(), strict=True)),
    }


def weighs_layers(run: Path) -> bool:
    """Whether the head of a run's model weighs layers, with learned weights or with attention."""
    _, kind = _first_stage(run)
    if kind is None:
        return False
    from lamella.heads.head import Stage

    return kind.weighs_per_token or kind.learned_layer_weights is not Stage.learned_layer_weights


def shares(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each weight's share in the sum of absolute weights; 0 for all if the sum is 0."""
    sizes = np.abs(weights)
    total = sizes.sum(axis=1, keepdims=True)
    share: NDArray[np.float64] = np.divide(sizes, total, out=np.zeros_like(sizes), where=total > 0)
    return share


def mean_attention(run: Path, examples: Sequence[Example], *, batch_size: int = 16) -> dict[str, Any] | None:
    """Return the mean weight of every layer by output and kind of token, for a head with attention over the layers.

    Runs the model on the given questions. Returns None if the head has no such attention.
    """
    mixer, kind = _first_stage(run)
    if mixer is None or kind is None or not kind.weighs_per_token or not examples:
        return None
    import torch

    from lamella.data.windows.batches import Batch
    from lamella.data.windows.features import featurise
    from lamella.data.windows.padding import longest_first, pad
    from lamella.inference.predict import explain_out_of_memory
    from lamella.models.loading import load_model
    from lamella.models.model import ReaderModel
    from lamella.progress import progress

    model = load_model(run, backend="torch")
    if not isinstance(model, ReaderModel):
        raise ModelError(f"{run}: expected a model trained with Lamella.")
    features = featurise(examples, model.tokenizer, model.windows)
    means = LayerMeans(model.head)
    with progress("weighing layers", len(features)) as advance, torch.inference_mode():
        for windows in longest_first(features.lengths, batch_size):
            padded = pad(features, windows)
            with explain_out_of_memory(padded):
                means.add(features, padded, model.encode(Batch.of(padded).to(model.device), model.head.layers))
            advance(len(windows))
    if means.sums is None:
        return None
    return {
        "mixer": mixer["name"],
        "layers": list(model.head.main_layers),
        "questions": len(examples),
        "tokens": dict(zip(KINDS, means.counts.tolist(), strict=True)),
        "weights": means.by_kind(),
    }


def _first_stage(run: Path) -> tuple[dict[str, Any] | None, type[Stage] | None]:
    """Return the first mixer stage of the run's model and its class.

    Both are None if the run holds no model trained with Lamella. The class is None, too, if the package that holds
    the mixer is not installed.
    """
    folder = model_folder(run)
    if not is_saved_model(folder):
        return None, None
    import lamella.heads.head  # noqa: F401 - without torch, fail here: the registry has no classes then

    try:
        mixer: dict[str, Any] = read_json(folder / MODEL_CONFIG)["head"]["mixer"][0]
        if not isinstance(mixer["name"], str):
            raise TypeError
    except (KeyError, IndexError, TypeError):
        raise ModelError(f"{folder / MODEL_CONFIG}: expected a head with its mixer; the model is damaged.") from None
    try:
        return mixer, cast("type[Stage]", registry.part("mixer", mixer["name"]).make)
    except UnknownNameError:
        return mixer, None


def _output_names(run: Path) -> tuple[str, ...]:
    """Return the names of the outputs of the head, each with its own weights."""
    task = read_json(model_folder(run) / MODEL_CONFIG)["head"].get("task", "span")
    names: tuple[str, ...] = cast(Any, registry.part("task", registry.split(task)[0]).make).names_of_outputs()
    return names


def _layer_names(run: Path, count: int) -> list[int | str]:
    """Return the numbers of the layers that a head reads; 0 is the output of the embeddings."""
    choice = read_json(model_folder(run) / MODEL_CONFIG)["head"].get("layers", "encoder")
    if isinstance(choice, list):
        return choice
    if choice.startswith("pooled"):
        return ["pooled", *range(count - 1)]
    return list(range(count)) if choice == "all" else list(range(1, count + 1))


def _stage_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of the first stage; the file of a tuned encoder holds much more."""
    from safetensors import SafetensorError, safe_open

    prefix = "head.stages.0."
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - it is no mapping
            return {name.removeprefix(prefix): file.get_tensor(name).double() for name in names}
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path}: expected a safetensors file with the tensors of the mixer; it is damaged ({one_line(error)})."
        ) from None
