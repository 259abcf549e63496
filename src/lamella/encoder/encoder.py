"""A pretrained encoder as a function from a batch to its hidden layers."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lamella.config import POOLED
from lamella.encoder.dropout import use_fast_dropout
from lamella.encoder.fast_attention import suitable_kernels, use_fast_attention
from lamella.errors import EncoderError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamella.data.batches import Batch


@dataclass(frozen=True)
class HiddenStates:
    """What a head reads: the layers it asked for, in the order it asked. Layer 0 is the output of the embeddings."""

    layers: tuple[Tensor, ...]  # each [B, T, H]
    mask: Tensor  # [B, T] true on real tokens
    is_context: Tensor  # [B, T] true where an answer may lie
    pooled: Tensor | None = None  # [B, H]
    numbers: tuple[int, ...] = ()  # which layers these are

    def only(self, layers: Sequence[int]) -> HiddenStates:
        """Some of the layers, in the order asked: several heads share what one pass made, and each reads its own."""
        wanted = tuple(layer for layer in layers if layer != POOLED)
        chosen = tuple(self.layers[self.numbers.index(layer)] for layer in wanted)
        pooled = self.pooled if POOLED in layers else None
        return HiddenStates(chosen, self.mask, self.is_context, pooled, wanted)

    def at_cls(self) -> HiddenStates:
        """The first token alone, T = 1; the pooled output, where there is one, as the first of the layers."""
        layers = tuple(layer[:, :1] for layer in self.layers)
        first = () if self.pooled is None else (self.pooled[:, None],)
        return HiddenStates((*first, *layers), self.mask[:, :1], self.is_context[:, :1])


@dataclass(frozen=True)
class Family:
    """What differs between kinds of encoder. Paths are those of the modules: within the model, or within a layer."""

    layers: str  # the list of layers (ALBERT: the groups, each with its list)
    attention_site: str  # what gives the attention's output before it is added: an adapter goes behind it
    ffn_site: str  # the same of the feed-forward half
    projections: Mapping[str, str]  # our name of a linear layer -> its path within a layer
    token_types: bool = True  # question and context are distinguished by token type
    optional_pooler: bool = True  # the constructor takes `add_pooling_layer`
    shared_layers: bool = False  # one layer's weights serve at every depth
    unused_positions: int = 0  # rows of the position table that no token uses (counting starts behind the padding's)


_BERT_PROJECTIONS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "ffn_input": "intermediate.dense",
    "ffn_output": "output.dense",
}
_BERT = Family("encoder.layer", "attention.output.dropout", "output.dropout", _BERT_PROJECTIONS)

FAMILIES = {
    "albert": Family(
        "encoder.albert_layer_groups",
        "attention.output_dropout",
        "ffn_output",  # its dropout is never called
        {
            "query": "attention.query",
            "key": "attention.key",
            "value": "attention.value",
            "attention_output": "attention.dense",
            "ffn_input": "ffn",
            "ffn_output": "ffn_output",
        },
        shared_layers=True,
    ),
    "bert": _BERT,
    "distilbert": Family(
        "transformer.layer",
        "attention.out_lin",  # no dropout there
        "ffn.dropout",
        {
            "query": "attention.q_lin",
            "key": "attention.k_lin",
            "value": "attention.v_lin",
            "attention_output": "attention.out_lin",
            "ffn_input": "ffn.lin1",
            "ffn_output": "ffn.lin2",
        },
        token_types=False,
        optional_pooler=False,
    ),
    "electra": replace(_BERT, optional_pooler=False),
    "mpnet": Family(
        "encoder.layer",
        "attention.dropout",
        "output.dropout",
        {
            "query": "attention.attn.q",
            "key": "attention.attn.k",
            "value": "attention.attn.v",
            "attention_output": "attention.attn.o",
            "ffn_input": "intermediate.dense",
            "ffn_output": "output.dense",
        },
        token_types=False,
        unused_positions=2,
    ),
    "roberta": replace(_BERT, token_types=False, unused_positions=2),
    "xlm-roberta": replace(_BERT, token_types=False, unused_positions=2),
}


def family_of(model_type: str, where: str) -> Family:
    """The row of the table for a model type, or an error that lists the ones there are."""
    if model_type not in FAMILIES:
        raise EncoderError(
            f"{where}: its config says model_type {model_type!r}; supported are {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def positions_of(config: Any) -> int | None:
    """How many tokens the position embeddings allow, where the family of the encoder is known."""
    family = FAMILIES.get(config.model_type)
    return None if family is None else int(config.max_position_embeddings) - family.unused_positions


class Encoder(nn.Module):
    """A transformers encoder that keeps no more layers than are asked for.

    A hook on every layer sets aside what the run in progress wants of it; the rest is let go as the run goes on.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.family = family_of(model.config.model_type, str(model.name_or_path))
        self.model = model
        use_fast_dropout(model)
        use_fast_attention(model)
        for layer in self.layer_modules:
            if _set_aside not in layer._forward_hooks.values():  # another Encoder may have put it there
                layer.register_forward_hook(_set_aside)

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def depth(self) -> int:
        """The number of layers above the embeddings; a group of ALBERT's may run several layers at every depth."""
        return int(self.model.config.num_hidden_layers) * int(getattr(self.model.config, "inner_group_num", 1))

    @property
    def longest_window(self) -> int:
        """How many tokens the position embeddings allow."""
        return cast(int, positions_of(self.model.config))

    @property
    def layer_modules(self) -> list[nn.Module]:
        """The layers from the bottom up, each with weights of its own: as many as the depth, or fewer if shared."""
        found = list(cast(nn.ModuleList, self.model.get_submodule(self.family.layers)))
        if self.family.shared_layers:
            return [layer for group in found for layer in cast(nn.ModuleList, group.get_submodule("albert_layers"))]
        return found

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, batch: Batch, layers: Sequence[int]) -> HiddenStates:
        """Run the encoder. Where nothing of it is trained, no graph is kept and dropout is off."""
        numbers = [layer for layer in layers if layer != POOLED]
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
        if self.family.token_types:
            inputs["token_type_ids"] = batch.token_types
        run, outer = _Run(frozenset(numbers)), _IN_PROGRESS.run
        _IN_PROGRESS.run = run
        try:
            wanted = torch.is_grad_enabled() and self.trainable
            with torch.set_grad_enabled(wanted), suitable_kernels(batch.input_ids.device):
                output = self.model(**inputs, output_hidden_states=False, return_dict=True)
        finally:
            _IN_PROGRESS.run = outer
        states = tuple(run.kept[layer] for layer in numbers)
        pooled = output.pooler_output if POOLED in layers else None
        return HiddenStates(states, batch.mask, batch.is_context, pooled, tuple(numbers))

    def train(self, mode: bool = True) -> Encoder:
        """A frozen encoder stays in evaluation mode: its dropout would only add noise to what the head reads."""
        return super().train(mode and self.trainable)


@dataclass
class _Run:
    """One run of an encoder: the layers that are wanted, how many it has passed, and those it kept."""

    wanted: frozenset[int]
    passed: int = 0
    kept: dict[int, Tensor] = field(default_factory=dict)


class _InProgress(threading.local):
    """The run that a thread is in: several may share an encoder, so a run cannot be an attribute of it."""

    run: _Run | None = None


_IN_PROGRESS = _InProgress()


def _set_aside(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    """The hook of every layer. Layers are told apart by counting, since a shared one (ALBERT) runs at every depth.

    It knows neither encoder nor layer: copied or pickled with its layer, it works for the copy.
    """
    run = _IN_PROGRESS.run
    if run is None:  # the transformers model was called by itself
        return
    if run.passed == 0 and 0 in run.wanted:
        run.kept[0] = arguments[0]
    run.passed += 1
    if run.passed in run.wanted:
        run.kept[run.passed] = output[0] if isinstance(output, tuple) else output  # MPNet gives a tuple
