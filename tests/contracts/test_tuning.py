"""What every way of tuning owes: exactly the declared parameters move, and exactly those are saved."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from doubles import DEPTH, FAMILIES, HIDDEN, save_tiny_encoder, tiny_batch, tiny_encoder, tiny_run_config
from lamella import registry
from lamella.encoder.encoder import Encoder
from lamella.encoder.tuning import trainable_line
from lamella.errors import ConfigError
from lamella.heads.losses import CrossEntropy
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel

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

# Ways with options: what they add to an encoder is other than by default, or less of it is trained.
WITH_OPTIONS: list[dict[str, Any]] = [
    {"name": "top_k", "k": 0},
    {"name": "top_k", "k": 2},
    {"name": "top_k", "k": DEPTH},
    {"name": "adapter", "leave_out": [1, 3], "size": 5},
    {"name": "adapter", "k": 1, "zero": True},
    {"name": "lora", "targets": ["key", "attention_output", "ffn_input", "ffn_output"], "rank": 2, "dropout": 0.3},
    {"name": "ia3", "targets": ["query", "ffn_input"]},
]

# The ways that put new parts into an encoder, here so that they start from exactly the encoder they are given.
ADDING: list[dict[str, Any]] = [{"name": "adapter", "zero": True}, {"name": "lora"}, {"name": "ia3"}]
ADDED = {
    "adapter": re.compile(r"\.adapter(_\d+)?\."),
    "lora": re.compile(r"\.lora\.[AB]$"),
    "ia3": re.compile(r"\.ia3\.factor$"),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {family: save_tiny_encoder(folder / family, family) for family in FAMILIES}


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


@pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet"])
@pytest.mark.parametrize("tuning", WITH_OPTIONS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_exactly_the_declared_parameters_move_with_options(tuning: dict[str, Any], family: str) -> None:
    assert_that_exactly_the_declared_parameters_move(tuning, family)


@every_tuning
def test_exactly_the_declared_parameters_move(tuning: str, family: str) -> None:
    assert_that_exactly_the_declared_parameters_move(tuning, family)


def assert_that_exactly_the_declared_parameters_move(tuning: str | dict[str, Any], family: str) -> None:
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
def test_the_saved_file_holds_exactly_the_trained_tensors(
    tuning: str, family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    model = ReaderModel(load_encoder(str(bases[family])), tiny_run_config(encoder={"tuning": tuning}))
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
def test_a_second_time_changes_nothing_or_adds_a_second_part(tuning: str, family: str) -> None:
    encoder = tiny_encoder(family).encoder
    plain = set(encoder.state_dict())
    registry.build("tuning", tuning, encoder)
    once, added = trainable(encoder), set(encoder.state_dict()) - plain
    registry.build("tuning", tuning, encoder)
    assert bool(added) is any(spec["name"] == tuning for spec in ADDING)
    if not added:
        assert trainable(encoder) == once
        assert set(encoder.state_dict()) == plain
    elif tuning == "adapter":
        assert not trainable(encoder) & added
        assert trainable(encoder) - once == {name.replace(".adapter.", ".adapter_2.") for name in added}
    else:  # merged into the weights, and begun anew
        assert trainable(encoder) == once


def tuned_model(base: Path, tuning: str) -> ReaderModel:
    """A model whose tuned parameters have all moved."""
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": tuning})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def last_layer(encoder: Encoder, family: str) -> Tensor:
    batch = tiny_batch(family)
    with torch.no_grad():
        return encoder.eval()(batch, (DEPTH,)).layers[0][batch.mask]


@pytest.mark.parametrize("second", ADDING, ids=lambda spec: spec["name"])
@pytest.mark.parametrize("first", [spec["name"] for spec in ADDING])
@pytest.mark.parametrize("family", ["albert", "bert", "distilbert"])  # the others add them as BERT does
def test_a_part_added_to_a_tuned_encoder_starts_from_it_and_leaves_what_it_learnt(
    family: str, first: str, second: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    """A saved model as the base of the next one."""
    if (family, first, second["name"]) == ("albert", "adapter", "ia3"):
        second = {**second, "targets": ["key", "value"]}  # the adapter stands on the third
    tuned_model(bases[family], first).save(tmp_path / "first")
    loaded = load_encoder(str(tmp_path / "first"))
    before, parts = last_layer(loaded.encoder, family), snapshot(loaded.encoder)
    assert not torch.allclose(before, last_layer(load_encoder(str(bases[family])).encoder, family), atol=1e-3)

    model = ReaderModel(loaded, tiny_run_config(encoder={"tuning": second}))
    merged = first in ("lora", "ia3") and second["name"] in ("lora", "ia3")
    start = last_layer(model.encoder, family)
    if merged:
        torch.testing.assert_close(start, before, atol=1e-5, rtol=0)
    else:
        assert torch.equal(start, before)

    train(model, family)
    after = snapshot(model.encoder)
    for name, value in parts.items():
        if ADDED[first].search(name) and not merged:
            assert torch.equal(after[name], value), name
    trained = trainable(model.encoder)
    new = {name for name in trained if ADDED[second["name"]].search(name)}
    assert new
    assert not merged or new == trained
    assert first != "adapter" or not any(".adapter." in name for name in trained)

    model.save(tmp_path / "second")
    assert set(load_file(tmp_path / "second" / "model.safetensors")) == {f"encoder.{name}" for name in trained} | {
        "head.task.q",
        "head.task.b",
    }
    batch = tiny_batch(family)
    assert torch.equal(ReaderModel.load(tmp_path / "second")(batch), model(batch))


@pytest.mark.parametrize(
    ("family", "steps"),
    [
        pytest.param("albert", ["adapter", "ia3"], id="on a linear layer with an adapter"),
        pytest.param("distilbert", ["adapter", {"name": "lora", "targets": ["attention_output"]}], id="the same"),
    ],
)
def test_what_cannot_be_stacked_is_refused(family: str, steps: list[Any]) -> None:
    encoder = tiny_encoder(family).encoder
    for step in steps[:-1]:
        registry.build("tuning", step, encoder)
    with pytest.raises(ConfigError, match="has an earlier run's adapter") as caught:
        registry.build("tuning", steps[-1], encoder)
    assert len(caught.value.problems) == 1


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
