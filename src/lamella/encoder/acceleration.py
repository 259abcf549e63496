"""How each family runs fast: its attention, and the inputs that this attention takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamella.encoder.fast_attention import ATTENTION, register_attention
from lamella.encoder.packing import Packing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamella.data.windows.batches import Batch


def use_fast_attention(model: PreTrainedModel) -> None:
    """Replace the attention of a model that allows it; MPNet, DeBERTa and ModernBERT have their own."""
    kind = model.config.model_type
    if kind == "deberta-v2":
        from lamella.encoder.fast_deberta import use_distances

        use_distances(model)
    elif kind == "mpnet":
        from lamella.encoder.fast_mpnet import use_kernels

        use_kernels(model)
    elif model.config._attn_implementation == "sdpa":
        register_attention()
        model.set_attn_implementation(ATTENTION)
        if kind == "modernbert":
            from lamella.encoder.fast_modernbert import use_blocks

            use_blocks(model)


def model_inputs(model: PreTrainedModel, batch: Batch, *, token_types: bool) -> tuple[dict[str, Any], Packing | None]:
    """Return the inputs of a model, and how to unpack its outputs if they are packed."""
    if model.config.model_type == "modernbert":
        from lamella.encoder.fast_modernbert import inputs_without_masks

        inputs, packing = inputs_without_masks(model, batch)
        if inputs:
            return inputs, packing
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
    if token_types:
        inputs["token_type_ids"] = batch.token_types
    return inputs, None
