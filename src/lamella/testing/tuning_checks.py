"""The contract of tunings, as checks that run on any registered tuning."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lamella import registry
from lamella.encoder.encoder import Encoder
from lamella.encoder.sources import MODEL_WEIGHTS
from lamella.encoder.tensors import trained_tensors
from lamella.errors import ConfigError
from lamella.heads.losses import CrossEntropy
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.testing.tiny import FAMILIES, saved_encoder, tiny_batch, tiny_encoder, tiny_run_config

# The softmax over the tokens ignores what is added to all of them alike: the gradient of these parameters is rounding
# noise, so they may or may not move.
NO_GRADIENT = re.compile(r"\.(key|k|k_lin)\.bias$|^head\.task\.b$")


def check_tuning(name: str, /, **options: Any) -> None:
    """Check that a tuning keeps the contract of tunings, on every tiny encoder.

    A tuning may refuse a family of encoders with a ConfigError, but not all of them. `TUNING_CHECKS` lists the checks;
    each function there states what it expects.
    """
    refusals = {}
    for family in FAMILIES:
        case = TuningCase(name, family, options)
        try:
            case.apply(tiny_encoder(family).encoder)
        except ConfigError as error:
            refusals[family] = "; ".join(error.problems)
            continue
        for check in TUNING_CHECKS.values():
            check(case)
    assert len(refusals) < len(FAMILIES), f"tuning {name!r}: refused every encoder: {refusals['bert']}"


@dataclass(frozen=True)
class TuningCase:
    """A tuning with its options on a family of encoders."""

    tuning: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"tuning {self.tuning!r} on {self.family}"

    @property
    def spec(self) -> dict[str, Any]:
        return {"name": self.tuning, **self.options}

    def apply(self, encoder: Encoder) -> None:
        registry.build("tuning", self.spec, encoder)


def check_moves_exactly_its_parameters(case: TuningCase) -> None:
    """Check that three steps change exactly the parameters that require a gradient, and no buffer."""
    model = ReaderModel(tiny_encoder(case.family), tiny_run_config(encoder={"tuning": case.spec}))
    trainable = trainable_names(model)
    before = snapshot(model)
    train_steps(model, case.family)
    after = snapshot(model)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved <= trainable, f"{case}: tensors moved that are not trained: {_listing(moved - trainable)}"
    still = {name for name in trainable - moved if not NO_GRADIENT.search(name)}
    assert not still, f"{case}: parameters did not move in training: {_listing(still)}"
    assert "head.task.q" in moved, f"{case}: the head was not trained"


def check_declares_whether_it_trains(case: TuningCase) -> None:
    """Check that the trait `trains_encoder` and `encoder.trainable` state whether the encoder is trained."""
    encoder = tiny_encoder(case.family).encoder
    case.apply(encoder)
    trains = bool(trainable_names(encoder))
    assert encoder.trainable is trains, f"{case}: encoder.trainable is {encoder.trainable}, expected {trains}"
    declared = registry.trait("tuning", case.spec, "trains_encoder")
    advice = f"expected {trains}; declare it where the tuning is registered"
    assert declared is trains, f"{case}: its trait trains_encoder is {declared}, {advice}"


def check_saves_exactly_its_parameters(case: TuningCase) -> None:
    """Check that the saved file holds exactly the trained tensors, and that the loaded reader equals the saved one.

    Buffers are saved too: a tuning may add some, such as what its parameters are relative to.
    """
    with tempfile.TemporaryDirectory() as temporary:
        model = ReaderModel(
            load_encoder(str(saved_encoder(case.family))), tiny_run_config(encoder={"tuning": case.spec})
        )
        train_steps(model, case.family, steps=1)
        folder = Path(temporary) / "model"
        model.save(folder)
        saved = load_file(folder / MODEL_WEIGHTS)
        loaded = ReaderModel.load(folder).state_dict()
    trained = trained_tensors(model)
    wrong = set(saved) ^ set(trained)
    assert not wrong, f"{case}: the saved file lacks trained tensors or holds others: {_listing(wrong)}"
    changed = {name for name, value in trained.items() if not torch.equal(saved[name], value)}
    assert not changed, f"{case}: saved tensors differ from the trained ones: {_listing(changed)}"
    foreign = {name for name in saved if not name.startswith(("encoder.", "head."))}
    assert not foreign, f"{case}: saved tensors outside encoder and head: {_listing(foreign)}"
    different = {name for name, value in model.state_dict().items() if not torch.equal(loaded[name], value)}
    assert not different, f"{case}: tensors of the loaded reader differ from the saved one: {_listing(different)}"


def check_applies_twice(case: TuningCase) -> None:
    """Check that a second application, as in a run on a tuned encoder, trains the same or adds a part to train."""
    encoder = tiny_encoder(case.family).encoder
    plain = set(encoder.state_dict())
    case.apply(encoder)
    once, added = trainable_names(encoder), set(encoder.state_dict()) - plain
    case.apply(encoder)
    if not added:
        assert trainable_names(encoder) == once, f"{case}: applied twice, it trains other parameters"
        assert set(encoder.state_dict()) == plain, f"{case}: applied twice, it adds tensors"
    else:
        new = trainable_names(encoder)
        assert new, f"{case}: applied twice, it trains nothing"
        assert new == once or not new & added, f"{case}: applied twice, it trains its first part beside the new one"


TUNING_CHECKS: dict[str, Callable[[TuningCase], None]] = {
    "moves_exactly_its_parameters": check_moves_exactly_its_parameters,
    "declares_whether_it_trains": check_declares_whether_it_trains,
    "saves_exactly_its_parameters": check_saves_exactly_its_parameters,
    "applies_twice": check_applies_twice,
}


def train_steps(model: ReaderModel, family: str, steps: int = 3) -> None:
    """Train a few optimiser steps on a batch whose answers lie in the context."""
    batch = tiny_batch(family, characters=30)
    batch.start.copy_(batch.is_context.long().argmax(1))
    batch.end.copy_(batch.start + 2)
    optimiser = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
    loss = CrossEntropy()
    model.train()
    for _ in range(steps):
        optimiser.zero_grad()
        total: Any = loss(model.head.task.choices(model(batch), batch), batch)["loss"]
        total.backward()
        optimiser.step()
    model.eval()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all tensors of a module."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def trainable_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters that are trained."""
    return {name for name, value in module.named_parameters() if value.requires_grad}


def _listing(names: set[str], limit: int = 5) -> str:
    return ", ".join(sorted(names)[:limit]) + (", …" if len(names) > limit else "")
