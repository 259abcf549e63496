"""The supported kinds of encoder, as a table: where each has its layers, projections and embeddings.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lamella.errors import EncoderError


@dataclass(frozen=True)
class Fused:
    """A projection that shares a linear layer with others: one of its equal parts."""

    path: str
    part: int
    parts: int = 3


@dataclass(frozen=True)
class Family:
    """The differences between kinds of encoder. Paths name modules, within the model or within a layer."""

    layers: str  # the list of layers (ALBERT: the list of groups, each with a list of layers)
    attention_site: str  # outputs the attention before the residual sum: an adapter goes behind it
    ffn_site: str  # outputs the feed-forward part before the residual sum
    projections: Mapping[str, str | Fused | tuple[str, ...]]  # name in a run file -> path or paths within a layer
    token_types: bool = True  # question and context have different token types, if the configuration has several
    optional_pooler: bool = True  # the constructor takes `add_pooling_layer`
    shared_layers: bool = False  # all depths use the weights of one layer
    linear_qa: bool = True  # transformers has a question answering model of it with a linear layer as its head
    unused_positions: int = 0  # rows of the position table that no token uses (positions start after the padding)


_BERT_PROJECTIONS: dict[str, str] = {
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
        "ffn_output",  # its dropout module is never called
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
    "deberta-v2": Family(  # DeBERTa-v3 too
        "encoder.layer",
        "attention.output.dropout",
        "output.dropout",
        {
            **_BERT_PROJECTIONS,
            "query": "attention.self.query_proj",
            "key": "attention.self.key_proj",
            "value": "attention.self.value_proj",
        },
        optional_pooler=False,
    ),
    "distilbert": Family(
        "transformer.layer",
        "attention.out_lin",  # no dropout module follows it
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
    "eurobert": Family(
        "layers",
        "self_attn.o_proj",  # the attention module outputs a tuple
        "mlp",
        {
            "query": "self_attn.q_proj",
            "key": "self_attn.k_proj",
            "value": "self_attn.v_proj",
            "attention_output": "self_attn.o_proj",
            "ffn_input": ("mlp.gate_proj", "mlp.up_proj"),
            "ffn_output": "mlp.down_proj",
        },
        token_types=False,
        optional_pooler=False,
        linear_qa=False,
    ),
    "modernbert": Family(  # mmBERT too
        "layers",
        "attn.out_drop",
        "mlp",
        {
            "query": Fused("attn.Wqkv", 0),
            "key": Fused("attn.Wqkv", 1),
            "value": Fused("attn.Wqkv", 2),
            "attention_output": "attn.Wo",
            "ffn_input": "mlp.Wi",  # computes the input and its gate
            "ffn_output": "mlp.Wo",
        },
        token_types=False,
        optional_pooler=False,
        linear_qa=False,
    ),
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
    """Return the row of the table for a model type; the error lists the supported types."""
    if model_type not in FAMILIES:
        raise EncoderError(
            f"{where}: expected an encoder of model_type {', '.join(sorted(FAMILIES))}; got {model_type!r}."
        )
    return FAMILIES[model_type]


def positions_of(config: Any) -> int | None:
    """Return the number of tokens that the position embeddings allow; None for an unknown kind of encoder."""
    family = FAMILIES.get(config.model_type)
    return None if family is None else int(config.max_position_embeddings) - family.unused_positions


def reads_token_types(config: Any) -> bool:
    """Return whether an encoder distinguishes question and context by token types; most DeBERTas have none."""
    family = FAMILIES[config.model_type]
    return family.token_types and int(getattr(config, "type_vocab_size", 2)) > 1
