"""Graphs made without torch: the same logits as torch for every kind of encoder, tuning and mixer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doubles import corpus, examples_about, save_tiny_encoder, tiny_run_config
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import Padded, pad
from lamella.graph.encoder_config import PREFIXES
from lamella.graph.head_graph import MIXERS
from lamella.graph.tuned_tensors import TUNINGS
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.onnx_model import OnnxModel

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = sorted(PREFIXES)


def windows_of(model: Any) -> Padded:
    """Windows of different lengths, from a few tokens to the maximum."""
    texts = [context[: 30 + 150 * number] for number, context in enumerate(corpus()[:5])]
    features = featurise(examples_about([*texts, ""]), model.tokenizer, model.windows)
    assert features.lengths.max() == model.windows.max_seq_length
    return pad(features, np.arange(len(features)))


def train(model: ReaderModel) -> None:
    """Change the trained weights so much that they matter."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def trained(folder: Path, base: Path, **sections: Any) -> Path:
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(**sections))
    train(model)
    model.save(folder)
    return folder


def assert_same_as_torch(folder: Path, within: float = 1e-5) -> OnnxModel:
    in_torch, graph = (load_model(folder, device="cpu", precision="fp32", backend=kind) for kind in ("torch", "onnx"))  # type: ignore[arg-type]
    assert isinstance(graph, OnnxModel)
    padded = windows_of(in_torch)
    expected = in_torch.logits(padded)
    real = padded.mask[:, : expected.shape[2]]
    for found in (graph.logits(padded), graph.logits_in_one_run(padded)):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found[:, real], expected[:, real], atol=within, rtol=0)
    assert (graph.windows, graph.decoding, graph.gives_text) == (
        in_torch.windows,
        in_torch.decoding,
        in_torch.gives_text,
    )
    assert (graph.tokenizer.cls_token_id, graph.tokenizer.pad_token_id) == (
        in_torch.tokenizer.cls_token_id,
        in_torch.tokenizer.pad_token_id,
    )
    return graph


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {family: save_tiny_encoder(folder / family, family) for family in FAMILIES}


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_encoder_and_tuning(family: str, tuning: str, bases: dict[str, Path], tmp_path: Path) -> None:
    if (family, tuning) == ("albert", "top_k"):
        pytest.skip("its layers are shared")
    assert_same_as_torch(trained(tmp_path / "model", bases[family], encoder={"tuning": tuning}))


@pytest.mark.parametrize("layers", ["all", "encoder", [0, 2]])
@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_every_mixer(mixer: str, layers: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    learner = {"mixer": mixer, "layers": layers}
    assert_same_as_torch(trained(tmp_path / "model", bases["bert"], encoder={"tuning": "frozen"}, learner=learner))
