"""A checkpoint of transformers with sizes that its weights cannot have is refused before anything is built from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lamella.errors import EncoderError
from lamella.models.loading import load_model
from tiny_reader import save_tiny_checkpoint


@pytest.mark.parametrize(
    ("size", "value", "expected"),
    [
        ("num_hidden_layers", 2**63, r"expected at most \d+, by the size of the weights, got 9223372036854775808\."),
        ("num_attention_heads", -1, r"expected a whole number of at least 1, got -1\."),
    ],
)
def test_wrong_sizes_are_refused_on_torch(size: str, value: Any, expected: str, tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "checkpoint")
    load_model(folder, backend="torch")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, size: value}))
    with pytest.raises(EncoderError, match=rf"config\.json: {size}: {expected}$"):
        load_model(folder, backend="torch")
