"""The folders of question answering checkpoints that transformers saved: their kind and their windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamella.config import WindowOptions
from lamella.encoder.sources import MODEL_CONFIG
from lamella.errors import ModelError
from lamella.files import read_json

SHORTEST = 16  # tokens of a window; a smaller limit of a tokenizer is a mistake in its file


def check_architecture(folder: Path) -> None:
    """Check that a checkpoint is a question answering model, as opposed to an encoder."""
    config = read_json(folder / MODEL_CONFIG)
    kinds = config.get("architectures") or [] if isinstance(config, dict) else []
    kinds = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
    if not any(kind.endswith("ForQuestionAnswering") for kind in kinds):
        found = " and ".join(kinds) or "an encoder"
        raise ModelError(
            f"{folder}: expected a question answering model, found {found} without a head for it; train one "
            "with: lamella train"
        )


def window_options(model_max_length: Any) -> WindowOptions:
    """Return the default windows, or shorter ones if the tokenizer has a limit."""
    default = WindowOptions()
    longest = default.max_seq_length
    if isinstance(model_max_length, int | float) and model_max_length >= SHORTEST:  # False for NaN
        longest = int(min(longest, model_max_length))
    return WindowOptions(max_seq_length=longest, doc_stride=min(default.doc_stride, longest // 2))
