"""Warm start: begin with what another model on the same encoder has learnt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import normalize

from lamella import registry
from lamella.config import RunConfig
from lamella.encoder.adapters import Adapter
from lamella.encoder.lora import Lora, changed_layers, changed_part, changes_of
from lamella.encoder.low_rank import nearest_of_rank
from lamella.encoder.sources import find_encoder, is_model
from lamella.encoder.tensors import trained_tensors
from lamella.encoder.tuning import Projection, Small, group_parameters, merge
from lamella.errors import ConfigError, EncoderError, ModelError, UsageError
from lamella.models.facts import StartFacts
from lamella.models.model import ReaderModel
from lamella.models.names import short_model_name
from lamella.models.saved import read_saved, weights_sha256

WHERE = "learner.start"


@dataclass(frozen=True)
class WarmStart:
    """What a learner started with."""

    folders: tuple[Path, ...]  # where it lies
    name: str
    sha256: str
    remark: str
    warning: str | None = None  # what of it was dropped

    @property
    def facts(self) -> StartFacts:
        """What the model card states about it."""
        return StartFacts(model=short_model_name(self.name), sha256=self.sha256)


def inherit_options(config: RunConfig) -> RunConfig:
    """Fill in the options of encoder, head and windows that a run leaves to the model it starts with."""
    try:
        folder = find_encoder(config.learner.start).folder if config.learner.start else None
    except EncoderError:  # `apply_warm_start` gives the better message
        folder = None
    if folder is None or not is_model(folder):
        return config
    start = read_saved(folder).config
    inherited: dict[str, dict[str, Any]] = {}
    for key in config.inherited_options:
        section, _, option = key.partition(".")
        inherited.setdefault(section, {})[option] = getattr(getattr(start, section), option)
    sections = {section: getattr(config, section).model_copy(update=options) for section, options in inherited.items()}
    plugins = list(dict.fromkeys([*config.plugins, *start.plugins]))
    return config.model_copy(update={**sections, "plugins": plugins})


def apply_warm_start(model: ReaderModel, name: str) -> WarmStart:
    """Copy what a saved model learnt into a new one, before it is trained.

    From a model of the same tuning the tensors are copied: its training continues. A model with LoRA can start from any
    model whose encoder has the same shape: each projection gets the matrix of its rank that is nearest to what the
    saved model added to the weights, by their singular values (Eckart and Young). So a fully trained model becomes a
    thin one, and training recovers what was lost. The head is copied if it is built the same way.
    """
    try:
        saved = ReaderModel.from_pretrained(name)
    except (ModelError, UsageError) as error:
        raise ConfigError(WHERE, [str(error)]) from None
    if not _same_base(model, saved):
        raise ConfigError(
            WHERE, [f"{name}: expected a model on the base encoder {model.base_name!r}, got {saved.base_name!r}."]
        )
    same_tuning = (saved.tuned_before, saved.tuning) == (model.tuned_before, model.tuning)
    if not same_tuning and not registry.trait("tuning", model.tuning, "low_rank"):
        raise ConfigError(
            WHERE,
            [
                f"{name}: expected a model with this run's encoder.tuning, {_describe_tuning(model)}, got "
                f"{_describe_tuning(saved)}; only lora starts from other tunings."
            ],
        )
    if same_tuning:
        copied, warning = "all encoder weights", None
        _copy(trained_tensors(saved.encoder), trained_tensors(model.encoder))
    else:
        copied, warning = _approximate(model, saved, name)
    same_head = saved.head_spec == model.head_spec
    if same_head:
        _copy(trained_tensors(saved.head), trained_tensors(model.head))
    head = "its head" if same_head else "a new head, as its own is built differently"
    remark = f"warm start from {name}: {copied}, and {head}"
    return WarmStart(saved.folders, name, weights_sha256(saved.folders[0]), remark, warning)


def _approximate(model: ReaderModel, saved: ReaderModel, name: str) -> tuple[str, str | None]:
    """Set each LoRA of a model to the nearest approximation of what the saved model added to the base weights.

    Return what was copied, and a warning if the saved model had changed more than this LoRA can hold.
    """
    if model.tuning.get("init") == "pissa":
        raise ConfigError(
            WHERE,
            [
                f"{name}: expected a model with this run's encoder.tuning, {_describe_tuning(model)}, got "
                f"{_describe_tuning(saved)}; lora with init = pissa starts from the encoder's own weights: remove one "
                "of the two."
            ],
        )
    if any(isinstance(module, Adapter) for module in saved.encoder.modules()):
        raise ConfigError(WHERE, [f"{name}: expected a model without adapters, as LoRA cannot approximate these."])
    merge(saved.encoder)
    parameters = dict(saved.encoder.model.named_parameters())
    kept = added = 0.0
    groups = group_parameters(saved.encoder)
    held: set[tuple[str, str]] = set()  # parameters and groups that LoRA approximates
    targets: dict[str, None] = {}  # in their order
    for path, layer in changed_layers(model.encoder.model).items():
        for lora in cast(list[Lora], changes_of(layer)):
            _, begin, end = lora.part or ("", 0, layer.out_features)
            goal = parameters[f"{path}.weight"].detach()[begin:end]  # [O, I]
            weight = changed_part(layer, lora).weight.detach().cpu()
            energy = float((goal - weight).square().sum())
            kept, added = kept + _set_nearest(lora, goal, weight) * energy, added + energy
            names = groups[f"{path}.weight"] if lora.part is None else lora.part[:1]
            held |= {(f"{path}.weight", group) for group in names}
            targets |= dict.fromkeys(names)
    also_trained = {name: value for name, value in trained_tensors(model.encoder.model).items() if name in parameters}
    _copy(parameters, also_trained)
    held |= {(path, group) for path in also_trained for group in groups[path]}
    copied = f"{100 * kept / added if added else 100:.0f} % of what it added to {', '.join(targets)}"
    return copied, _describe_dropped(model, saved, groups, held, name)


def _set_nearest(lora: Lora, goal: Tensor, weight: Tensor) -> float:
    """Set LoRA so that it changes a weight into the nearest approximation of another; return the share that it keeps.

    DoRA also fits the length of each output: that of the goal in the direction that B A gives.
    """
    a, b, share = nearest_of_rank(goal - weight, len(lora.A))
    scale, rank = lora.scale**-0.5, len(a)  # beyond that rank A keeps its random values, and B is 0
    _copy({"a": a * scale, "b": b * scale}, {"a": lora.A[:rank], "b": lora.B[:, :rank]})
    if lora.m is None:
        return share
    direction = normalize(weight + b @ a, dim=1)
    length = (goal * direction).sum(1)
    _copy({"m": length - vector_norm(weight, dim=1)}, {"m": lora.m})
    missed = float((goal - length[:, None] * direction).square().sum())
    return 1 - missed / max(float((goal - weight).square().sum()), missed, 1e-30)


def _describe_dropped(
    model: ReaderModel,
    saved: ReaderModel,
    groups: Mapping[str, tuple[str, ...]],
    held: Set[tuple[str, str]],
    name: str,
) -> str | None:
    """Return a warning about the changed parameters that are not `held`, and the options that would keep them."""
    base = dict(model.encoder.model.named_parameters())
    changed = {
        group: None  # a dictionary, to keep the order
        for path, value in saved.encoder.model.named_parameters()
        if path in base and not torch.equal(value, base[path].cpu())
        for group in groups[path]
        if (path, group) not in held
    }
    if not changed:
        return None
    options = []
    for option, known in (("targets", get_args(Projection)), ("also", get_args(Small))):
        if missing := [group for group in known if group in changed]:
            listed = json.dumps([*model.tuning.get(option, []), *missing])
            options.append(f"encoder.tuning.{option} = {listed}")
    lost = [group for group in changed if group not in (*get_args(Projection), *get_args(Small))]
    advice = [f"to keep them, set {' and '.join(options)}"] if options else []
    advice += [f"lora cannot keep {', '.join(lost)}"] if lost else []
    return f"warning: {name} also changed {', '.join(changed)}; these changes are dropped; {'; '.join(advice)}"


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, value in target.items():
        value.copy_(source[name])


def _same_base(model: ReaderModel, saved: ReaderModel) -> bool:
    """Whether both are on equal encoders; the saved model may be on the original of its rounded copy."""
    if model.base_tensors_sha256 is None or saved.base_tensors_sha256 is None:  # for example, the base is a model
        return model.loaded_sha256 == saved.loaded_sha256
    own, other = (each.original_sha256 or each.base_tensors_sha256 for each in (model, saved))
    return own == other


def _describe_tuning(model: ReaderModel) -> str:
    options = ", ".join(f"{name} = {value}" for name, value in model.tuning.items() if name != "name")
    return f"{model.tuning['name']} ({options})" if options else str(model.tuning["name"])
