"""The contract of saving, for every tuning with every mixer: loading gives exactly the same logits."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from doubles import save_tiny_encoder, tiny_batch, tiny_run_config
from lamella import registry
from lamella.encoder.tensors import trained_tensors
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")

# Every mixer on a frozen encoder and every tuning below the simplest mixer; the other pairs repeat what these check.
CASES = [
    pytest.param(
        tuning,
        mixer,
        id=f"{tuning}-{mixer}",
        marks=() if tuning == "frozen" or mixer == "last" else pytest.mark.slow,
    )
    for tuning, mixer in itertools.product(registry.names("tuning"), registry.names("mixer"))
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("base") / "tiny")


@pytest.mark.parametrize(("tuning", "mixer"), CASES)
def test_logits_are_the_same_after_a_round_trip(tuning: str, mixer: str, base: Path, tmp_path: Path) -> None:
    model, batch = trained(base, tuning, mixer), tiny_batch()
    model.save(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(ReaderModel.load(tmp_path / "model")(batch), model(batch))


@pytest.mark.parametrize(("tuning", "mixer"), [case for case in CASES if not case.marks])
def test_half_precision_gives_the_logits_of_the_rounded_tensors(
    tuning: str, mixer: str, base: Path, tmp_path: Path
) -> None:
    model, batch = trained(base, tuning, mixer), tiny_batch()
    model.save(tmp_path / "half", half=True)
    with torch.no_grad():
        exact = model(batch)
        for value in trained_tensors(model).values():
            value.copy_(value.half() if value.is_floating_point() else value)
        rounded = model(batch)
        assert torch.equal(ReaderModel.load(tmp_path / "half")(batch), rounded)
    assert not torch.equal(rounded, exact)
    kinds = {value.dtype for value in load_file(tmp_path / "half" / "model.safetensors").values()}
    assert torch.float16 in kinds
    assert torch.float32 not in kinds


def trained(base: Path, tuning: str, mixer: str) -> ReaderModel:
    """Return a model in which everything has changed that training changes."""
    config = tiny_run_config(encoder={"tuning": tuning}, learner={"mixer": mixer})
    model = ReaderModel(load_encoder(str(base)), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.train()(tiny_batch())  # the statistics of normalisations
    return model.eval()
