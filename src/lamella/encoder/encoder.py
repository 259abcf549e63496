"""A pretrained encoder as a function from a batch to its hidden layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Family:
    """What differs between kinds of encoder."""

    token_types: bool  # the model distinguishes question and context by token type
    optional_pooler: bool  # its constructor takes `add_pooling_layer`


FAMILIES = {
    "albert": Family(token_types=True, optional_pooler=True),
    "bert": Family(token_types=True, optional_pooler=True),
    "distilbert": Family(token_types=False, optional_pooler=False),
    "electra": Family(token_types=True, optional_pooler=False),
    "mpnet": Family(token_types=False, optional_pooler=True),
    "roberta": Family(token_types=False, optional_pooler=True),
    "xlm-roberta": Family(token_types=False, optional_pooler=True),
}


def family_of(model_type: str, where: str) -> Family:
    """The row of the table for a model type, or an error that lists the ones there are."""
    if model_type not in FAMILIES:
        raise EncoderError(
            f"{where}: its config says model_type {model_type!r}; supported are {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


class Encoder(nn.Module):
    """A transformers encoder that keeps no more layers than are asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.family = family_of(model.config.model_type, str(model.name_or_path))
        self.model = model

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.hidden_size)

    @property
    def depth(self) -> int:
        """The number of layers above the embeddings."""
        return int(self.model.config.num_hidden_layers)

    @property
    def longest_window(self) -> int:
        """How many tokens the position embeddings allow."""
        positions = int(self.model.config.max_position_embeddings)
        # RoBERTa and MPNet count positions from the padding index + 1, so the table has two rows that no token uses.
        return positions - 2 if self.model.config.model_type in ("roberta", "xlm-roberta", "mpnet") else positions

    @property
    def trainable(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def forward(self, batch: Batch, layers: Sequence[int]) -> HiddenStates:
        """Run the encoder. Where nothing of it is trained, no graph is kept and dropout is off."""
        only_last = tuple(layers) == (self.depth,)
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
        if self.family.token_types:
            inputs["token_type_ids"] = batch.token_types
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trainable):
            output = self.model(**inputs, output_hidden_states=not only_last, return_dict=True)
        states = (output.last_hidden_state,) if only_last else tuple(output.hidden_states[layer] for layer in layers)
        return HiddenStates(layers=states, mask=batch.mask, is_context=batch.is_context)

    def train(self, mode: bool = True) -> Encoder:
        """A frozen encoder stays in evaluation mode: its dropout would only add noise to what the head reads."""
        return super().train(mode and self.trainable)
