"""Apply what a saved model changed to the tensors of its encoder, in numpy.

Trained tensors of the encoder replace its own. LoRA and IA³ are merged into the weights. Adapters stay tensors of their
own: the graph has a node for them. The names of the tensors say which is which; see `lamella.encoder.lora`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamella.graph.encoder_config import PREFIXES, EncoderConfig
from lamella.graph.support import NoGraphError
from lamella.graph.tensor_files import Tensors
from lamella.graph.trained_names import missing_tensor

TUNINGS = ("adapter", "bitfit", "frozen", "full", "ia3", "layer_norm", "lora", "top_k")  # those with a graph
CHANGE = re.compile(r"(.+)\.(lora|ia3)\.(A|B|A0|B0|m|factor)")
ADAPTER = re.compile(r".+\.adapter(_\d+)?\.(down|up)\.(weight|bias)")
MODULES = ("embeddings.", "embeddings_project.", "encoder.", "transformer.")  # of an encoder
BUFFERS = (".A0", ".B0", ".running_mean", ".running_var")  # stored with a model, but not trained
LEGACY = {".gamma": ".weight", ".beta": ".bias"}  # names of LayerNorms in the oldest files


def encoder_parameters(file: Tensors, config: EncoderConfig) -> Tensors:
    """Return the parameters of an encoder, as `lamella.encoder.tensors.parameters_of`."""
    tensors = pretrained_tensors(file, config)
    return Tensors(
        {name: value for name, value in tensors.items() if name.startswith(MODULES) and value.dtype == np.float32}
    )


class ParameterCounts(NamedTuple):
    """The numbers of parameters of a model: trained, all, and those of its base encoder."""

    trained: int
    total: int
    encoder: int


@dataclass(frozen=True)
class Change:
    """LoRA, a relative of it, or IA³, of one linear layer."""

    tensors: Tensors
    tuning: Mapping[str, Any]
    scales_inputs: bool  # whether IA³ multiplies the inputs of this layer instead of its outputs

    @property
    def factor(self) -> NDArray[Any] | None:
        """The factors of IA³; None for LoRA."""
        return self.tensors.get("factor")

    @property
    def lengths(self) -> NDArray[Any] | None:
        """The changes of the lengths of the rows in DoRA; None for all others."""
        return self.tensors.get("m")

    def low_rank(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return A [R, I] and B [O, R] of LoRA; B includes the scale."""
        rank = self.tuning["rank"]
        scale = np.float32(self.tuning["alpha"] / (math.sqrt(rank) if self.tuning.get("rslora") else rank))
        a, b = self.tensors["A"], self.tensors["B"]
        if "A0" in self.tensors:  # (B₀ + B)(A₀ + A) - B₀A₀ without the difference of two large products
            a, b = np.concatenate([a, self.tensors["A0"] + a]), np.concatenate([self.tensors["B0"], b], axis=1)
        return a, scale * b


def pretrained_tensors(file: Tensors, config: EncoderConfig) -> Tensors:
    """Return the tensors of an encoder under its own names, from a file of it or of a model with a head."""
    prefix = PREFIXES[config.model_type]
    chosen = file.under(prefix) if any(name.startswith(prefix) for name in file) else file
    return Tensors({_current_name(name): value for name, value in chosen.items()})


def count_parameters(
    file: Mapping[str, int], deltas: Sequence[Mapping[str, int]], config: EncoderConfig, *, pooler: bool
) -> ParameterCounts:
    """Count parameters from the sizes of all tensors: of the encoder, and of each delta on it, the model's own last."""
    prefix = PREFIXES[config.model_type]
    names = {_current_name(name.removeprefix(prefix)): size for name, size in file.items()}
    modules = (*MODULES, "pooler.") if pooler else MODULES
    known = {f"encoder.model.{name}": size for name, size in names.items() if name.startswith(modules)}
    for delta in deltas[:-1]:  # LoRA and IA³ of the models below are merged, and their heads are left out
        known |= {name: size for name, size in delta.items() if ADAPTER.fullmatch(name)}
    trained = {name: size for name, size in deltas[-1].items() if not name.endswith(BUFFERS)}
    return ParameterCounts(sum(trained.values()), sum({**known, **trained}.values()), sum(known.values()))


def apply_delta(
    tensors: Tensors, delta: Mapping[str, NDArray[Any]], tunings: Sequence[Mapping[str, Any]], config: EncoderConfig
) -> Tensors:
    """Return the tensors of an encoder as a saved model tuned it.

    `delta` are the saved tensors of the encoder, and `tunings` the options of the tunings in order: the last one made
    the LoRA or IA³ that is not merged yet.
    """
    tuned, changes = separate_changes(tensors, delta, tunings, config)
    for path, change in changes.items():
        if change.factor is None:
            _merge(tuned, path, change)
        else:
            _scale(tuned, path, change.factor, inputs=change.scales_inputs)
    return tuned


def separate_changes(
    tensors: Tensors, delta: Mapping[str, NDArray[Any]], tunings: Sequence[Mapping[str, Any]], config: EncoderConfig
) -> tuple[Tensors, dict[str, Change]]:
    """Return the same before LoRA and IA³ are merged, and these by the paths of their linear layers."""
    for tuning in tunings:
        if tuning["name"] not in TUNINGS:
            raise NoGraphError(f"the tuning {tuning['name']} has no graph builder")
    tuned = Tensors(tensors)
    parts: dict[str, Tensors] = {}
    for name, value in delta.items():
        if change := CHANGE.fullmatch(name):
            parts.setdefault(change[1], Tensors())[change[3]] = value
        elif name in tensors and tensors[name].shape != value.shape:
            raise NoGraphError(f"{name} has the shape {value.shape} instead of {tensors[name].shape}")
        elif name in tensors or ADAPTER.fullmatch(name):
            tuned[name] = value
        else:
            raise NoGraphError(f"the encoder has no tensor {name}")
    parameters = [name for name in tensors if name.startswith(MODULES) and tensors[name].dtype == np.float32]
    if lost := missing_tensor(delta, parameters, tunings, config):
        raise NoGraphError(f"the trained tensors lack {lost}")
    scaled_inputs = {f"{layer}.{config.family.projections['ffn_output']}" for layer in config.layer_paths}
    return tuned, {path: Change(tensors, tunings[-1], path in scaled_inputs) for path, tensors in parts.items()}


def _scale(tensors: Tensors, path: str, factor: NDArray[Any], *, inputs: bool) -> None:
    """Merge IA³: a factor of each output of a linear layer, or of each input."""
    weight = tensors[f"{path}.weight"]  # [O, I]
    tensors[f"{path}.weight"] = weight * (factor if inputs else factor[:, None])
    if not inputs:
        tensors[f"{path}.bias"] = tensors[f"{path}.bias"] * factor


def _merge(tensors: Tensors, path: str, change: Change) -> None:
    """Merge LoRA and its relatives."""
    weight = tensors[f"{path}.weight"]  # [O, I]
    a, b = change.low_rank()
    changed = weight + b @ a
    if change.lengths is not None:
        lengths = np.linalg.norm(weight, axis=1) + change.lengths
        changed = (lengths / np.linalg.norm(changed, axis=1))[:, None] * changed
    tensors[f"{path}.weight"] = changed


def _current_name(name: str) -> str:
    return next((name.removesuffix(old) + new for old, new in LEGACY.items() if name.endswith(old)), name)
