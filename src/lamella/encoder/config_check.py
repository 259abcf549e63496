"""Check the config.json of an encoder before anything is built from it: sizes that its weights cannot have.

A library that builds the encoder first, and compares its weights later, would take all memory for a wrong number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lamella.encoder.families import FAMILIES
from lamella.encoder.sources import MODEL_CONFIG, Source
from lamella.errors import EncoderError, ModelError, one_line, shorten
from lamella.files import read_json

# Each size under the names that families have for it; a file may lack any of them.
HIDDEN = ("hidden_size", "dim")
LAYERS = ("num_hidden_layers", "n_layers", "num_hidden_groups", "inner_group_num")
HEADS = ("num_attention_heads", "n_heads", "num_key_value_heads")
ROWS = ("vocab_size", "max_position_embeddings", "type_vocab_size")  # of tables as wide as the embeddings
INNER = ("intermediate_size", "hidden_dim", "embedding_size")
MOST_LAYERS = 1000


def read_configuration(source: Source) -> dict[str, Any]:
    """Read the config.json of an encoder, and check its sizes against those of its files."""
    path = source.folder / MODEL_CONFIG
    config = read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise EncoderError(f"{path}: expected the configuration of an encoder, with a model_type.")
    numbers = sum(file.stat().st_size for file in source.weights)  # at most: one byte each
    sizes = {name: _size(config, name, str(path)) for name in (*HIDDEN, *LAYERS, *HEADS, *ROWS, *INNER)}
    if not numbers:  # reported where the weights are read
        return config
    hidden = max(sizes[name] for name in HIDDEN)
    width = min(hidden, sizes["embedding_size"]) if "embedding_size" in config else hidden
    shared = config["model_type"] in FAMILIES and FAMILIES[config["model_type"]].shared_layers
    layers = MOST_LAYERS if shared else min(MOST_LAYERS, numbers // hidden**2)
    limits = {
        **dict.fromkeys(HIDDEN, int(numbers**0.5)),
        **dict.fromkeys(LAYERS, layers),
        **dict.fromkeys(HEADS, hidden),
        **dict.fromkeys(ROWS, numbers // width),
        **dict.fromkeys(INNER, numbers // hidden),
    }
    for name, most in limits.items():
        if sizes[name] > most:
            _check_weights(source.weights)  # files that were cut off are too small for any size
            found = shorten(sizes[name])
            raise EncoderError(f"{path}: {name}: expected at most {most:,}, by the size of the weights, got {found}.")
    return config


def _check_weights(files: Sequence[Path]) -> None:
    """Raise an error if a file of weights is damaged."""
    for path in files:
        try:
            with safe_open(path, "numpy"):
                pass
        except SafetensorError as error:
            raise ModelError(f"{path}: expected a safetensors file, found a damaged one ({one_line(error)}).") from None


def _size(config: dict[str, Any], name: str, where: str) -> int:
    """Return a size, 1 if the file lacks it; raise an error if it is no whole number of at least 1."""
    value = config.get(name)
    if value is None or (name == "type_vocab_size" and value == 0):  # DeBERTa has no token types
        return 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EncoderError(f"{where}: {name}: expected a whole number of at least 1, got {shorten(value)}.")
    return value
