"""Graphs made without torch: the same logits as torch for every kind of encoder, tuning and mixer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles import save_tiny_encoder
from lamella import registry
from lamella.encoder.tuning import count_parameters
from lamella.graph.encoder_config import PREFIXES
from lamella.graph.head_graph import MIXERS, TASKS
from lamella.graph.tuned_tensors import TUNINGS
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.onnx_model import OnnxModel
from trained_readers import save_trained, windows_of

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = sorted(PREFIXES)
POOLER = {"bert": {"pooler": True}}


def assert_same_as_torch(folder: Path, within: float = 1e-5) -> OnnxModel:
    in_torch, graph = (load_model(folder, device="cpu", precision="fp32", backend=kind) for kind in ("torch", "onnx"))  # type: ignore[arg-type]
    assert isinstance(graph, OnnxModel)
    padded = windows_of(in_torch)
    expected = in_torch.logits(padded)
    real = padded.mask[:, : expected.shape[2]]
    within *= max(1.0, float(np.abs(expected[:, real]).max()))
    for found in (graph.logits(padded), graph.logits_in_one_run(padded)):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found[:, real], expected[:, real], atol=within, rtol=0)
    for name in ("windows", "decoding", "gives_text", "folders"):
        assert getattr(graph, name) == getattr(in_torch, name)
    if isinstance(in_torch, ReaderModel):
        counts = (*count_parameters(in_torch), in_torch.base_parameters)
        assert graph.count_parameters() == counts
    for name in ("cls_token_id", "pad_token_id"):
        assert getattr(graph.tokenizer, name) == getattr(in_torch.tokenizer, name)
    return graph


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {family: save_tiny_encoder(folder / family, family, **POOLER.get(family, {})) for family in FAMILIES}


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_encoder_and_tuning(family: str, tuning: str, bases: dict[str, Path], tmp_path: Path) -> None:
    if (family, tuning) == ("albert", "top_k"):
        pytest.skip("its layers are shared")
    assert_same_as_torch(save_trained(tmp_path / "model", bases[family], encoder={"tuning": tuning}))


STREAMS = {"name": "scalar_mix"}  # makes a stream for each output
NARROW = {"name": "compress", "size": 12}
SMALL = {"name": "xception", "widths": [4, 4, 6, 8]}
FULL = {"name": "xception", "variant": "full", "middle": 1, "widths": [4, 4, 6, 6, 8, 8, 8, 10]}
HEADS: dict[str, dict[str, Any]] = {
    **{name: {"mixer": name} for name in sorted(MIXERS)},
    **{f"{name}-answerability": {"mixer": name, "task": "answerability"} for name in sorted(MIXERS)},
    **{f"{name}-pooled": {"mixer": name, "task": "answerability", "layers": "pooled+all"} for name in ("dot", "last")},
    "pooled": {"mixer": "first_last", "task": "answerability", "layers": "pooled"},
    "some layers": {"mixer": "scalar_mix", "layers": [2, 0]},
    "low layers": {"mixer": "dot", "layers": [0, 1]},
    "softmax": {"mixer": {"name": "scalar_mix", "normalise": "softmax", "shared": True}},
    "a matrix for each output": {"mixer": {"name": "multiplicative", "shared": False}},
    "attention heads": {"mixer": {"name": "encoder_block", "heads": 4}},
    "a projection for each layer": {"mixer": [{**NARROW, "shared": False}], "skip": True},
    "skip": {"mixer": "last", "skip": True},
    "beside": {"mixer": ["last", NARROW], "beside": [STREAMS, NARROW]},
    "beside and skip": {"mixer": "average", "beside": "context_cnn", "skip": True, "layers": "all"},
    "streams, then compress": {"mixer": [STREAMS, NARROW]},
    "streams, then conv_1xn": {"mixer": [STREAMS, {"name": "conv_1xn", "dilation": 2}]},
    "streams, then conv_nxn": {"mixer": [NARROW, STREAMS, {"name": "conv_nxn", "kernel": 4}]},
    "streams, then inception": {"mixer": [STREAMS, {"name": "inception", "modules": 2}]},
    "streams, then xception": {"mixer": [STREAMS, SMALL]},
    "streams, then context_cnn": {"mixer": [STREAMS, "context_cnn"]},
    "xception in full": {"mixer": FULL, "skip": True},
    "segments": {"mixer": {"name": "context_cnn", "segment": 30, "step": 20, "filters": 3}},
    "filters from the question": {"mixer": {"name": "context_cnn", "filters_from": "question"}, "skip": True},
    "a context vector": {"mixer": {"name": "context_cnn", "context": "vector", "size": 0, "kernel": 4}},
    "no context": {"mixer": {"name": "context_cnn", "context": "none", "segment": 30}},
}


@pytest.mark.parametrize("head", HEADS)
def test_every_head(head: str, bases: dict[str, Path], tmp_path: Path) -> None:
    folder = save_trained(tmp_path / "model", bases["bert"], encoder={"tuning": "frozen"}, learner=HEADS[head])
    graph = assert_same_as_torch(folder)
    assert ("is_context" in graph.inputs) == (head == "filters from the question")


def test_the_heads_cover_every_part() -> None:
    assert set(MIXERS) == set(registry.names("mixer"))
    assert set(TUNINGS) == set(registry.names("tuning"))
    assert set(TASKS) == set(registry.names("task"))
