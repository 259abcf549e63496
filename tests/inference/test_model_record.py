"""The record of the model that answered identifies its weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lamella.files import file_sha256
from lamella.inference.model_record import model_record


def test_the_hash_of_an_export_covers_the_tensors_beside_its_graph(tmp_path: Path) -> None:
    """Exports of more than 2 GB have their tensors in a file of their own: two of them may have equal graphs."""
    model: Any = SimpleNamespace(folders=(tmp_path,))
    (tmp_path / "model.onnx").write_bytes(b"graph")
    alone = model_record("export", model)["sha256"]
    assert alone == file_sha256(tmp_path / "model.onnx")
    hashes = []
    for tensors in (b"one", b"two"):
        (tmp_path / "model.onnx.data").write_bytes(tensors)
        hashes.append(model_record("export", model)["sha256"])
    assert len({alone, *hashes}) == 3
