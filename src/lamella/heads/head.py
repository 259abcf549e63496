"""A head: mixer stages, then the output of the task.

A stage maps `x[S, C, B, T, W]` to a tensor of the same kind, given the hidden layers and the task's output vectors
`q[O, W]`. C is the number of channels, at first the selected layers. S is the number of streams: 1 until a stage makes
a stream for each output of the task. The output of the last stage is flattened to `[S, B, T, C·W]`; a skip (the
encoder's last layer) and the output of a second list of stages are concatenated to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lamella import registry
from lamella.config import POOLED
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.layer_choice import LayerChoice, choose_layers
from lamella.errors import ConfigError


@dataclass(frozen=True)
class StageShape:
    """The input shape of a stage: S streams, C channels, width W; O outputs of the task, at most `longest` tokens."""

    streams: int
    channels: int
    width: int
    outputs: int
    longest: int


class Stage(nn.Module):
    """A mixer stage. `out_shape` is the shape that `forward` returns for the input shape it was built for."""

    out_shape: StageShape
    reads_q = False  # whether `forward` reads the task's vectors, which must then be as wide as the encoder
    weighs_per_token = False  # whether `layer_weights` differs from token to token
    undecayed: tuple[str, ...] = ()  # names of parameters that are not decayed, besides biases and single vectors

    @staticmethod
    def reads(layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return which of the selected layers the stage reads as the first stage; the others need not be kept."""
        return layers

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        raise NotImplementedError

    def layer_weights(self, hidden: HiddenStates, q: Tensor) -> Tensor | None:
        """Return the weight of every layer for every output and token, [O, C, B, T]; None if the stage has none."""
        return None

    @staticmethod
    def learned_layer_weights(tensors: Mapping[str, Tensor], **options: Any) -> Tensor | None:
        """Return the learned weight of every layer, [S, C], if it is the same for all tokens; None otherwise.

        `tensors` are the saved tensors of the stage and `options` its options in the run file. The analyses read them
        from a model's file without building the model.
        """
        return None


class LayerWeights(Stage):
    """A stage that sums the layers with weights: x = Σ_i w_i h_i, one channel.

    If no stage follows, the sum is not computed: the task's q · Σ_i w_i h_i is Σ_i w_i (q · h_i), and q · h_i is one
    small product. This makes a head ten times cheaper, with the same result up to rounding.
    """

    def weigh(self, project: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
        """Return weights that broadcast to [S, C, B, T]; `project(v[S, W])` returns v · h_i, [S, C, B, T]."""
        raise NotImplementedError

    def forward(self, x: Tensor, hidden: HiddenStates, q: Tensor) -> Tensor:
        weights = self.weigh(lambda v: torch.einsum("scbtw,sw->scbt", x.expand(len(v), *x.shape[1:]), v), q)
        return (weights[..., None] * x).sum(1, keepdim=True)  # [S, 1, B, T, W]

    def layer_weights(self, hidden: HiddenStates, q: Tensor) -> Tensor:
        """Return the weight of every layer for every output and token, [O, C, B, T], for the analyses."""
        layers = [layer.float() for layer in hidden.layers]
        weights = self.weigh(lambda v: project_layers(layers, v), q)
        return weights.expand(len(q), len(layers), *hidden.mask.shape)


class Head(nn.Module):
    """Mixer stages and a task, built from their options in a run file."""

    def __init__(
        self,
        depth: int,
        hidden_size: int,
        *,
        mixer: Sequence[Mapping[str, Any]],
        task: Mapping[str, Any],
        layers: LayerChoice = "encoder",
        skip: bool = False,
        beside: Sequence[Mapping[str, Any]] = (),
        longest: int = 384,
    ) -> None:
        super().__init__()
        self.at_cls: bool = registry.part("task", registry.split(task)[0]).make.at_cls  # type: ignore[attr-defined]
        outputs: int = registry.part("task", registry.split(task)[0]).make.outputs  # type: ignore[attr-defined]
        chosen = choose_layers(layers, depth)
        if POOLED in chosen and not self.at_cls:
            raise ConfigError(
                "learner.layers",
                ["the pooled output needs a task that reads [CLS] alone: answerability."],
            )
        names = [registry.split(spec)[0] for spec in (*mixer, *beside)]
        reads_q = next((name for name in names if cast(Any, registry.part("mixer", name).make).reads_q), None)
        if reads_q is not None and (len(names) > 1 or skip):
            alone = "expected no other stage, no skip and no stages beside it"
            raise ConfigError("learner.mixer", [f"{reads_q} compares the layers with the task's vectors: {alone}."])
        longest = 1 if self.at_cls else longest
        self.stages, main_layers, width = _stack(mixer, chosen, hidden_size, outputs, longest)
        self.beside, beside_layers, beside_width = _stack(beside, chosen, hidden_size, outputs, longest)
        self.skip = skip
        self.layers = tuple(sorted({*main_layers, *beside_layers, *([depth] if skip else [])}))
        self.depth = depth
        self.main_layers, self.beside_layers = main_layers, beside_layers
        self.task = registry.build("task", task, width + beside_width + (hidden_size if skip else 0))

    def forward(self, hidden: HiddenStates) -> Tensor:
        """Return the logits of the task, [O, B, T]."""
        if self.at_cls:
            hidden = hidden.at_cls()
        by_number = dict(zip(self.layers, hidden.layers, strict=True))
        q: Tensor = self.task.q
        if self._is_linear():
            stage = cast(LayerWeights, self.stages[0])
            layers = [by_number[layer].float() for layer in self.main_layers]
            z = project_layers(layers, q)  # [O, C, B, T]
            weights = stage.weigh(lambda v: z if v is q else project_layers(layers, v), q)
            bias: Tensor = self.task.b[:, None, None]
            return (weights * z).sum(1) + bias  # [O, B, T]
        branches = [_run(self.stages, self.main_layers, by_number, hidden, q)]  # each [S, B, T, C·W]
        if len(self.beside):
            branches.append(_run(self.beside, self.beside_layers, by_number, hidden, q))
        if self.skip:
            branches.append(by_number[self.depth].float()[None])
        streams = max(len(branch) for branch in branches)
        joined = torch.cat([branch.expand(streams, -1, -1, -1) for branch in branches], dim=-1)
        logits: Tensor = self.task(joined)
        return logits  # [O, B, T]

    def layer_weights(self, hidden: HiddenStates) -> Tensor | None:
        """Return the layer weights of the first stage, [O, L, B, T]; None if it has none."""
        stage = cast(Stage, self.stages[0])
        if self.at_cls:
            hidden = hidden.at_cls()
        by_number = dict(zip(self.layers, hidden.layers, strict=True))
        chosen = HiddenStates(tuple(by_number[layer] for layer in self.main_layers), hidden.mask, hidden.is_context)
        return stage.layer_weights(chosen, self.task.q)

    def _is_linear(self) -> bool:
        alone = len(self.stages) == 1 and not len(self.beside) and not self.skip
        return alone and isinstance(self.stages[0], LayerWeights)


def project_layers(layers: Sequence[Tensor], v: Tensor) -> Tensor:
    """Return v_s · h_i for every stream and layer: [S, C, B, T]."""
    # In this order the few vectors are the rows: half the time of `layer @ v.T`, whose result would be two wide.
    products = torch.stack([v @ layer.flatten(0, 1).T for layer in layers], dim=1)  # [S, C, B·T]
    return products.view(*products.shape[:2], *layers[0].shape[:2])  # [S, C, B, T]


def _stack(
    specs: Sequence[Mapping[str, Any]], chosen: tuple[int, ...], hidden_size: int, outputs: int, longest: int
) -> tuple[nn.ModuleList, tuple[int, ...], int]:
    """Build a list of stages; return it, the layers that its first stage reads, and the width of its output."""
    stages = nn.ModuleList()
    if not specs:
        return stages, (), 0
    layers = cast(Any, registry.part("mixer", registry.split(specs[0])[0]).make).reads(chosen)
    shape = StageShape(1, len(layers), hidden_size, outputs, longest)
    for spec in specs:
        stage: Stage = registry.build("mixer", spec, shape)
        shape = stage.out_shape
        stages.append(stage)
    return stages, layers, shape.channels * shape.width


def _run(
    stages: nn.ModuleList, layers: tuple[int, ...], by_number: Mapping[int, Tensor], hidden: HiddenStates, q: Tensor
) -> Tensor:
    x = torch.stack([by_number[layer].float() for layer in layers])[None]  # [1, C, B, T, W]
    for stage in stages:
        x = stage(x, hidden, q)  # [S, C, B, T, W]
    return x.permute(0, 2, 3, 1, 4).flatten(3)  # [S, B, T, C·W]
