"""Readers that share an encoder: the same logits as with a graph of their own, for every family, tuning and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from doubles import save_tiny_encoder
from lamella.encoder.sources import MODEL_WEIGHTS, Source
from lamella.graph.encoder_config import PREFIXES
from lamella.graph.support import NoGraphError
from lamella.models.loading import load_model
from lamella.models.names import find_model
from lamella.models.shared_encoder import SharedEncoders, SharedReader
from lamella.models.sharing import check_sharing
from lamella.models.window_engine import join_logits
from shared_readers import HEADS, POOLED, why_not_shared
from trained_readers import save_trained, windows_of

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = sorted(PREFIXES)
TUNINGS: dict[str, Any] = {
    "frozen": "frozen",
    "bitfit": "bitfit",
    "layer_norm": "layer_norm",
    "lora": {"name": "lora", "rank": 3, "alpha": 5, "targets": ["query", "ffn_output"]},
    "lora with the rest": {"name": "lora", "rank": 5, "also": ["layer_norm", "bias"]},
    "token types": {"name": "lora", "rank": 5, "also": ["token_types"]},
    "rslora": {"name": "lora", "rank": 4, "rslora": True},
    "pissa": {"name": "lora", "rank": 2, "init": "pissa", "alpha": 3},
    "ia3": "ia3",
    "adapter": {"name": "adapter", "size": 6},
    "fewer adapters": {"name": "adapter", "size": 4, "leave_out": [1]},
}
WITHOUT = {"token types": ("distilbert", "mpnet", "roberta", "xlm-roberta"), "fewer adapters": ("albert",)}
OWN_PASS = {
    "full": "changes whole weight matrices",
    "top_k": "changes whole weight matrices",
    "dora": "DoRA rescales whole weight matrices",
    "adapter and a layer": "changes whole weight matrices",
}
OWN_TUNINGS: dict[str, Any] = {
    "full": "full",
    "top_k": "top_k",
    "dora": {"name": "lora", "dora": True},
    "adapter and a layer": {"name": "adapter", "k": 1},
}
ALL_HEADS = {**HEADS, "pooled": POOLED}


def source_of(folder: Path) -> Source:
    return find_model(str(folder))


def assert_shared(readers: list[SharedReader], folders: list[Path], within: float = 1e-5) -> None:
    """Compare readers with graphs of their own, in batches of one reader and in a batch of all readers."""
    for reader, folder in zip(readers, folders, strict=True):
        own: Any = load_model(folder, backend="onnx")
        padded = windows_of(own)
        expected = own.logits(padded)
        within = 1e-5 * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(reader.logits(padded), expected, atol=within, rtol=0, err_msg=str(folder))
        assert reader.count_parameters() == own.count_parameters()
        for name in ("windows", "decoding", "gives_text", "folders"):
            assert getattr(reader, name) == getattr(own, name)
    padded = windows_of(readers[0])
    rows = [row for group in zip(*(reader.rows(padded) for reader in readers), strict=True) for row in group]
    outputs = list(readers[0].run(rows))
    for place, reader in enumerate(readers):
        mixed = join_logits(outputs[place :: len(readers)], padded.mask.shape[1] if reader.gives_text else 1)
        np.testing.assert_array_equal(mixed, reader.logits(padded))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder") / "bert", "bert", pooler=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_readers_of_every_tuning_share_an_encoder(family: str, tmp_path: Path) -> None:
    base = save_tiny_encoder(tmp_path / "base", family)
    folders = [
        save_trained(tmp_path / name, base, seed=seed, encoder={"tuning": tuning})
        for seed, (name, tuning) in enumerate(TUNINGS.items())
        if family not in WITHOUT.get(name, ())
    ]
    encoders = SharedEncoders(threads=1)
    readers = [encoders.reader(source_of(folder)) for folder in folders]
    for folder in folders:
        check_sharing(folder, as_graph=True)
    assert len({id(reader.encoder) for reader in readers}) == 1
    sessions = [id(reader.sessions) for reader in readers]
    names = [folder.name for folder in folders]
    assert len(set(sessions[: names.index("ia3")])) == 1, "all readers without IA³ and adapters share a session"
    assert len(set(sessions)) == 3
    assert len({id(reader.head_sessions) for reader in readers}) == 1
    assert_shared(readers, folders)


def test_readers_with_different_heads_share_an_encoder(bert: Path, tmp_path: Path) -> None:
    folders = [
        save_trained(tmp_path / name, bert, encoder={"tuning": "lora"}, learner=learner)
        for name, learner in ALL_HEADS.items()
    ]
    encoders = SharedEncoders(threads=1)
    readers = [encoders.reader(source_of(folder)) for folder in folders]
    low, pooled = list(ALL_HEADS).index("low layers"), len(ALL_HEADS) - 1
    rest = [id(reader.sessions) for number, reader in enumerate(readers) if number not in (low, pooled)]
    assert len(set(rest)) == 1
    assert "layer_2" not in [output.name for output in readers[low].sessions.get(1).get_outputs()]
    assert len({id(reader.head_sessions) for reader in readers}) == len(readers)
    assert_shared(readers[:-1], folders[:-1])
    assert_shared(readers[-1:], folders[-1:])


@pytest.mark.parametrize("name", OWN_PASS)
def test_some_tunings_need_an_encoder_of_their_own(name: str, bert: Path, tmp_path: Path) -> None:
    folder = save_trained(tmp_path / "reader", bert, encoder={"tuning": OWN_TUNINGS[name]})
    assert OWN_PASS[name] in str(why_not_shared(source_of(folder)))
    with pytest.raises(NoGraphError, match=OWN_PASS[name]):
        check_sharing(folder, as_graph=True)
    with pytest.raises(NoGraphError, match=OWN_PASS[name]):
        SharedEncoders(threads=1).reader(source_of(folder))


def test_a_reader_on_a_reader_needs_its_own_encoder(bert: Path, tmp_path: Path) -> None:
    below = save_trained(tmp_path / "below", bert, encoder={"tuning": "lora"})
    above = save_trained(tmp_path / "above", below, encoder={"tuning": "lora"})
    assert why_not_shared(source_of(below)) is None
    assert why_not_shared(source_of(above)) == "its base is a reader"
    check_sharing(below, as_graph=True)
    with pytest.raises(NoGraphError, match="its base is a reader"):
        check_sharing(above, as_graph=True)


def test_tensors_that_do_not_fit_are_refused(bert: Path, tmp_path: Path) -> None:
    folder = save_trained(tmp_path / "reader", bert, encoder={"tuning": {"name": "lora", "also": ["bias"]}})
    path = folder / MODEL_WEIGHTS
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("lora.A"))
    config = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config.replace("weights_sha256", "no_sha256"), encoding="utf-8")
    save_file({**tensors, name: tensors[name][:, 1:].copy()}, path)
    assert "has the shapes" in str(why_not_shared(source_of(folder)))
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    assert "lack" in str(why_not_shared(source_of(folder)))
