"""A pretrained encoder as a function from a batch to its hidden layers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lamella.config import POOLED
from lamella.encoder.acceleration import model_inputs, use_fast_attention
from lamella.encoder.dropout import use_fast_dropout
from lamella.encoder.families import family_of, positions_of, reads_token_types
from lamella.encoder.fast_attention import suitable_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamella.data.windows.batches import Batch


@dataclass(frozen=True)
class HiddenStates:
    """The input of a head: the layers that it requested, in its order. Layer 0 is the output of the embeddings."""

    layers: tuple[Tensor, ...]  # each [B, T, H]
    mask: Tensor  # [B, T] true for real tokens
    is_context: Tensor  # [B, T] true for tokens that can be part of an answer
    pooled: Tensor | None = None  # [B, H]
    numbers: tuple[int, ...] = ()  # the numbers of these layers

    def only(self, layers: Sequence[int]) -> HiddenStates:
        """Return some of the layers, in the given order; heads that share a pass each read their own layers."""
        numbers = tuple(layer for layer in layers if layer != POOLED)
        chosen = tuple(self.layers[self.numbers.index(layer)] for layer in numbers)
        pooled = self.pooled if POOLED in layers else None
        return HiddenStates(chosen, self.mask, self.is_context, pooled, numbers)

    def __getitem__(self, windows: slice | Tensor) -> HiddenStates:
        """Return some of the windows."""
        layers = tuple(layer[windows] for layer in self.layers)
        pooled = None if self.pooled is None else self.pooled[windows]
        return HiddenStates(layers, self.mask[windows], self.is_context[windows], pooled, self.numbers)

    def at_cls(self) -> HiddenStates:
        """Return the first token only, T = 1; the pooled output, if present, becomes the first layer."""
        layers = tuple(layer[:, :1] for layer in self.layers)
        first = () if self.pooled is None else (self.pooled[:, None],)
        return HiddenStates((*first, *layers), self.mask[:, :1], self.is_context[:, :1])


class Encoder(nn.Module):
    """A transformers encoder that keeps only the layers that are requested.

    Layer n is the input of the layer above it, and the last one the output of the model: as transformers counts them,
    also where something follows a layer (a convolution in DeBERTa-v2, the final LayerNorm of ModernBERT). A hook on
    every layer stores its input if the current run needs it; all others are freed during the run.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.family = family_of(model.config.model_type, str(model.name_or_path))
        self.model = model
        use_fast_dropout(model)
        use_fast_attention(model)
        for layer in self.layer_modules:
            if _store_input not in layer._forward_pre_hooks.values():  # another Encoder may share the model
                layer.register_forward_pre_hook(_store_input)

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def depth(self) -> int:
        """The number of layers above the embeddings; a layer group of ALBERT may run several layers per depth."""
        return int(self.model.config.num_hidden_layers) * int(getattr(self.model.config, "inner_group_num", 1))

    @property
    def longest_window(self) -> int:
        """The number of tokens that the position embeddings allow."""
        return cast(int, positions_of(self.model.config))

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens that have an embedding."""
        return int(cast(nn.Embedding, self.model.get_input_embeddings()).weight.shape[0])

    @property
    def layer_modules(self) -> list[nn.Module]:
        """The distinct layers from the bottom up: as many as the depth, or fewer if weights are shared."""
        modules = list(cast(nn.ModuleList, self.model.get_submodule(self.family.layers)))
        if self.family.shared_layers:
            return [layer for group in modules for layer in cast(nn.ModuleList, group.get_submodule("albert_layers"))]
        return modules

    @property
    def token_types(self) -> bool:
        """Whether question and context have different token types."""
        return reads_token_types(self.model.config)

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, batch: Batch, layers: Sequence[int]) -> HiddenStates:
        """Run the encoder. If none of it is trained, no graph is kept and dropout is off."""
        numbers = [layer for layer in layers if layer != POOLED]
        inputs, packing = model_inputs(self.model, batch, token_types=self.token_types)
        run, outer = _Run(frozenset(numbers)), _IN_PROGRESS.run
        _IN_PROGRESS.run = run
        try:
            with_grad = torch.is_grad_enabled() and self.trainable
            with torch.set_grad_enabled(with_grad), suitable_kernels(batch.input_ids.device):
                output = self.model(**inputs, output_hidden_states=False, return_dict=True)
        finally:
            _IN_PROGRESS.run = outer
        run.stored[self.depth] = output.last_hidden_state
        states = tuple(run.stored[layer] if packing is None else packing.unpack(run.stored[layer]) for layer in numbers)
        pooled = output.pooler_output if POOLED in layers else None
        return HiddenStates(states, batch.mask, batch.is_context, pooled, tuple(numbers))

    def train(self, mode: bool = True) -> Encoder:
        """Set the mode; a frozen encoder stays in evaluation mode, as dropout would only add noise to its output."""
        return super().train(mode and self.trainable)


@dataclass
class _Run:
    """The state of a forward pass: the requested layers, the number of the next layer, and the stored layers."""

    requested: frozenset[int]
    next: int = 0
    stored: dict[int, Tensor] = field(default_factory=dict)


class _InProgress(threading.local):
    """The current run of this thread; not an attribute of the encoder, because threads may share one."""

    run: _Run | None = None


_IN_PROGRESS = _InProgress()


def _store_input(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Store the input of a layer (a forward hook). Layers are counted, as a shared one (ALBERT) runs at every depth.

    The hook refers to no encoder or layer, so it also works for a copied or unpickled layer.
    """
    run = _IN_PROGRESS.run
    if run is None:  # the transformers model was called directly
        return
    if run.next in run.requested:
        run.stored[run.next] = arguments[0]
    run.next += 1
