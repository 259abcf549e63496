"""What every way of tuning owes: exactly the declared parameters move, and exactly those are saved."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from doubles import DEPTH, FAMILIES, HIDDEN, save_tiny_encoder, tiny_batch, tiny_encoder, tiny_run_config
from lamella import registry
from lamella.encoder.encoder import Encoder
from lamella.encoder.loading import load_encoder
from lamella.encoder.tuning import trainable_line
from lamella.heads.losses import CrossEntropy
from lamella.inference.model import ReaderModel

pytestmark = pytest.mark.usefixtures("one_thread")

# (tuning, family) -> why the two do not go together
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("top_k", "albert"): "one layer's weights serve at every depth, so none is on top",
}

# What of an encoder a way of tuning trains; a way that is not here is held to the rest of the contract.
TRAINS_ALL, TRAINS_NONE = {"full"}, {"frozen"}

# The softmax over the tokens ignores what it adds to all of them alike: these have no gradient but rounding noise, and
# may or may not move.
NO_GRADIENT = re.compile(r"\.(key|k|k_lin)\.bias$|^head\.task\.b$")

CASES = [
    pytest.param(tuning, family, id=f"{tuning}-{family}")
    for tuning, family in itertools.product(registry.names("tuning"), FAMILIES)
    if (tuning, family) not in EXCEPTIONS
]
every_tuning = pytest.mark.parametrize(("tuning", "family"), CASES)


def train(model: ReaderModel, family: str, steps: int = 3) -> None:
    """A few optimiser steps on a batch whose answers lie in the context."""
    batch = tiny_batch(family)
    batch.start.copy_(batch.is_context.long().argmax(1))
    batch.end.copy_(batch.start + 2)
    optimiser = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
    loss = CrossEntropy()
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model.head.task.choices(model(batch), batch), batch)["loss"].backward()
        optimiser.step()
    model.eval()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@every_tuning
def test_exactly_the_declared_parameters_move(tuning: str, family: str) -> None:
    model = ReaderModel(tiny_encoder(family), tiny_run_config(encoder={"tuning": tuning}))
    declared = {name for name, value in model.named_parameters() if value.requires_grad}
    before = snapshot(model)
    train(model, family)
    after = snapshot(model)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved <= declared
    assert all(NO_GRADIENT.search(name) for name in declared - moved), declared - moved
    assert "head.task.q" in moved


@every_tuning
def test_what_is_declared(tuning: str, family: str) -> None:
    encoder = tiny_encoder(family).encoder
    names = {name for name, _ in encoder.named_parameters()}
    registry.build("tuning", tuning, encoder)
    declared = {name for name, value in encoder.named_parameters() if value.requires_grad}
    if tuning in TRAINS_ALL:
        assert declared == names
    elif tuning in TRAINS_NONE:
        assert declared == set()
    else:
        assert declared
    assert encoder.trainable is bool(declared)


@every_tuning
def test_the_saved_file_holds_exactly_the_trained_tensors(tuning: str, family: str, tmp_path: Path) -> None:
    save_tiny_encoder(tmp_path / "base", family)
    model = ReaderModel(load_encoder(str(tmp_path / "base")), tiny_run_config(encoder={"tuning": tuning}))
    train(model, family, steps=1)
    model.save(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert set(saved) == set(trained)
    assert all(torch.equal(saved[name], value) for name, value in trained.items())
    assert all(name.startswith(("encoder.", "head.")) for name in saved)
    loaded = ReaderModel.load(tmp_path / "model")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@every_tuning
def test_a_second_time_changes_nothing(tuning: str, family: str) -> None:
    encoder = tiny_encoder(family).encoder
    registry.build("tuning", tuning, encoder)
    once = trainable(encoder)
    registry.build("tuning", tuning, encoder)
    assert trainable(encoder) == once


def trainable(encoder: Encoder) -> set[str]:
    return {name for name, value in encoder.named_parameters() if value.requires_grad}


def test_the_line_for_the_user_counts_right() -> None:
    model = ReaderModel(tiny_encoder("bert"), tiny_run_config(encoder={"tuning": "frozen"}))
    layer = 4 * (HIDDEN * HIDDEN + HIDDEN) + (HIDDEN * 48 + 48) + (48 * HIDDEN + HIDDEN) + 2 * 2 * HIDDEN
    embeddings = (1000 + 130 + 2) * HIDDEN + 2 * HIDDEN
    head = 2 * HIDDEN + 2
    total = embeddings + DEPTH * layer + head
    assert trainable_line(model) == (
        f"trainable params: 66 || all params: {total:,} || trainable%: {100 * head / total:.4f}"
    )
    full = ReaderModel(tiny_encoder("bert"), tiny_run_config())
    assert trainable_line(full) == f"trainable params: {total:,} || all params: {total:,} || trainable%: 100.0000"
