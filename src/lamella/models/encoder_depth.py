"""The number of layers and positions of an encoder, by its name: nothing is loaded, and the hub is not asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lamella.encoder.families import positions_of
from lamella.encoder.sources import MODEL_CONFIG, find_local_encoder, is_model
from lamella.errors import LamellaError
from lamella.files import read_json
from lamella.models.saved import read_saved

KEYS = ("num_hidden_layers", "n_layers")  # DistilBERT has its own name for it


def encoder_depth(name: str) -> int | None:
    """Return the number of layers above the embeddings; None if this machine does not have the encoder."""
    config = _encoder_config(name)
    return next((config[key] for key in KEYS if isinstance(config.get(key), int)), None)


def encoder_positions(name: str) -> int | None:
    """Return the longest window in tokens; None if this machine does not have the encoder, or cannot tell."""
    config = _encoder_config(name)
    known = isinstance(config.get("max_position_embeddings"), int) and isinstance(config.get("model_type"), str)
    return positions_of(SimpleNamespace(**config)) if known else None


def _encoder_config(name: str) -> dict[str, Any]:
    """Return the config.json of an encoder; {} if this machine does not have the encoder.

    The encoder of a saved model is that of its base. What is wrong with an encoder is reported where it is loaded.
    """
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        try:
            source = find_local_encoder(name)
            if source is None:
                return {}
            if not is_model(source.folder):
                config = read_json(source.folder / MODEL_CONFIG)
                return config if isinstance(config, dict) else {}
            name = read_saved(source.folder, check_parts=False).base_name
        except LamellaError:
            return {}
    return {}
