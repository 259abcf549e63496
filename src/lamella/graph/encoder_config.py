"""The facts about an encoder that a graph depends on, from the config.json that transformers wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamella.encoder.families import FAMILIES, Family
from lamella.graph.support import NoGraphError

# The kinds of encoder with a graph, and the word that their question answering models put before the encoder's names.
PREFIXES = {
    "albert": "albert.",
    "bert": "bert.",
    "distilbert": "distilbert.",
    "electra": "electra.",
    "mpnet": "mpnet.",
    "roberta": "roberta.",
    "xlm-roberta": "roberta.",
}
# The defaults of transformers for keys that a file may lack; sizes have none here.
DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "is_decoder": False,
    "position_embedding_type": "absolute",
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "pad_token_id": 0,
}
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "albert": {"hidden_act": "gelu_new"},
    "mpnet": {"pad_token_id": 1},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
}
# DistilBERT's own names, and the names that it accepts besides.
DISTILBERT = {
    "hidden_size": "dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "hidden_act": "activation",
}


@dataclass(frozen=True)
class EncoderConfig:
    """The part of a configuration that a graph depends on, under the names of transformers."""

    model_type: str
    hidden_size: int
    num_attention_heads: int
    num_hidden_layers: int
    hidden_act: str
    layer_norm_eps: float
    max_position_embeddings: int
    type_vocab_size: int
    pad_token_id: int
    num_hidden_groups: int
    inner_group_num: int

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def depth(self) -> int:
        """The number of layers above the embeddings."""
        return self.num_hidden_layers * self.inner_group_num

    @property
    def layer_paths(self) -> list[str]:
        """The paths of the distinct layers from the bottom up: as many as the depth, or fewer if weights are shared."""
        return list(dict.fromkeys(map(self.layer_path, range(1, self.depth + 1))))

    def layer_path(self, number: int) -> str:
        """Return the path of the layer whose output has this number; ALBERT repeats groups of layers."""
        path = self.family.layers
        if not self.family.shared_layers:
            return f"{path}.{number - 1}"
        round, inner = divmod(number - 1, self.inner_group_num)
        group = int(round / (self.num_hidden_layers / self.num_hidden_groups))
        return f"{path}.{group}.albert_layers.{inner}"


def read_encoder_config(config: Mapping[str, Any]) -> EncoderConfig:
    """Return the configuration of an encoder; raise NoGraphError if its kind, or an option of it, has no graph."""
    model_type = config.get("model_type")
    if model_type not in PREFIXES:
        raise NoGraphError(f"encoders of type {model_type} have no graph builder")
    values = {**DEFAULTS, **OWN_DEFAULTS.get(str(model_type), {})}
    values |= {key: value for key, value in config.items() if value is not None}
    if model_type == "distilbert":  # its LayerNorms ignore the configuration
        values |= {name: config[own] for name, own in DISTILBERT.items() if own in config} | {"layer_norm_eps": 1e-12}
    if values["is_decoder"] or values["position_embedding_type"] != "absolute":
        raise NoGraphError(f"this {model_type} encoder computes a variant that has no graph builder")
    try:
        return EncoderConfig(
            model_type=str(model_type),
            hidden_act=str(values["hidden_act"]),
            layer_norm_eps=float(values["layer_norm_eps"]),
            **{name: int(values[name]) for name, kind in EncoderConfig.__annotations__.items() if kind == "int"},
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise NoGraphError(f"the configuration of the encoder is incomplete ({error})") from None
