"""What every mixer owes with every task on every family of encoder. A part registered later is tested here unasked."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from doubles import DEPTH, FAMILIES, HIDDEN, save_tiny_encoder, tiny_batch, tiny_encoder, tiny_run_config
from lamella import registry
from lamella.encoder.encoder import HiddenStates
from lamella.heads.head import Head
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel

pytestmark = pytest.mark.usefixtures("one_thread")

# (part, check) -> why the part may fail the check
EXCEPTIONS: dict[tuple[str, str], str] = {}

CASES = [
    pytest.param(mixer, task, family, id=f"{mixer}-{task}-{family}")
    for mixer, task, family in itertools.product(registry.names("mixer"), registry.names("task"), FAMILIES)
]
every_head = pytest.mark.parametrize(("mixer", "task", "family"), CASES)


@pytest.fixture(autouse=True)
def excepted(request: pytest.FixtureRequest) -> None:
    """Skip what the table excepts, saying why."""
    check = request.function.__name__
    parts = (
        [request.node.callspec.params[name] for name in ("mixer", "task")] if hasattr(request.node, "callspec") else []
    )
    for part in parts:
        if (part, check) in EXCEPTIONS:
            pytest.skip(f"{part}: {EXCEPTIONS[part, check]}")


@functools.cache
def all_layers(family: str) -> HiddenStates:
    """Every layer of a tiny encoder over a padded batch; what stands at the pads is replaced by large garbage."""
    batch = tiny_batch(family)
    with torch.no_grad():
        hidden = tiny_encoder(family).encoder(batch, range(DEPTH + 1))
    pads = ~batch.mask[..., None]
    garbage = 50 * torch.randn(hidden.layers[0].shape, generator=torch.Generator().manual_seed(0))
    return replace(hidden, layers=tuple(torch.where(pads, garbage, layer) for layer in hidden.layers))


def make(mixer: str, task: str, family: str) -> tuple[Head, HiddenStates]:
    """A head with its defaults in evaluation mode, and the hidden states that it asks for."""
    torch.manual_seed(0)
    head = Head(DEPTH, HIDDEN, mixer=[{"name": mixer}], task={"name": task}).eval()
    hidden = all_layers(family)
    return head, replace(hidden, layers=tuple(hidden.layers[layer].clone() for layer in head.layers))


def read_by(head: Head, hidden: HiddenStates) -> Tensor:
    """The real tokens among those that a head gives logits for."""
    return hidden.mask[:, :1] if head.at_cls else hidden.mask


def slices(hidden: HiddenStates, rows: slice, tokens: slice) -> HiddenStates:
    return HiddenStates(
        layers=tuple(layer[rows, tokens] for layer in hidden.layers),
        mask=hidden.mask[rows, tokens],
        is_context=hidden.is_context[rows, tokens],
    )


def with_pads(hidden: HiddenStates, count: int = 8) -> HiddenStates:
    rows = len(hidden.mask)
    nothing = torch.zeros(rows, count, dtype=torch.bool)
    return HiddenStates(
        layers=tuple(torch.cat([layer, torch.full((rows, count, HIDDEN), 30.0)], 1) for layer in hidden.layers),
        mask=torch.cat([hidden.mask, nothing], 1),
        is_context=torch.cat([hidden.is_context, nothing], 1),
    )


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@every_head
def test_it_gives_a_finite_logit_for_every_output_and_token(mixer: str, task: str, family: str) -> None:
    head, hidden = make(mixer, task, family)
    outputs = registry.part("task", task).make.outputs  # type: ignore[attr-defined]
    B, T = read_by(head, hidden).shape
    for dtype in (torch.float32, torch.bfloat16):
        logits = head(replace(hidden, layers=tuple(layer.to(dtype) for layer in hidden.layers)))
        assert logits.shape == (outputs, B, T)
        assert logits.dtype == torch.float32
        assert logits[:, read_by(head, hidden)].isfinite().all()
    assert all(0 <= layer <= DEPTH for layer in head.layers)
    assert len(set(head.layers)) == len(head.layers)


@every_head
def test_it_is_the_same_twice(mixer: str, task: str, family: str) -> None:
    head, hidden = make(mixer, task, family)
    assert torch.equal(head(hidden), head(hidden))


@every_head
def test_it_depends_on_what_it_reads(mixer: str, task: str, family: str) -> None:
    head, hidden = make(mixer, task, family)
    other = replace(hidden, layers=tuple(layer.roll(1, 0) for layer in hidden.layers))
    assert not torch.allclose(head(hidden), head(other), atol=1e-6)


@every_head
def test_more_pads_change_nothing(mixer: str, task: str, family: str) -> None:
    head, hidden = make(mixer, task, family)
    real = read_by(head, hidden)
    assert_close(head(with_pads(hidden))[..., : real.shape[1]][:, real], head(hidden)[:, real])


@every_head
def test_a_batch_of_one_equals_its_row(mixer: str, task: str, family: str) -> None:
    head, hidden = make(mixer, task, family)
    together = head(hidden)
    for row in range(len(hidden.mask)):
        length = int(read_by(head, hidden)[row].sum())
        padded = head(slices(hidden, slice(row, row + 1), slice(None)))
        assert_close(padded[:, 0, :length], together[:, row, :length])
        trimmed = head(slices(hidden, slice(row, row + 1), slice(0, int(hidden.mask[row].sum()))))
        assert_close(trimmed[:, 0], together[:, row, :length])


@every_head
def test_every_parameter_gets_a_gradient(mixer: str, task: str, family: str) -> None:
    head, hidden = make(mixer, task, family)
    head.train()
    logits = head(hidden)
    # Not the loss: a bias that all tokens share has no gradient there, the softmax over the tokens ignores it.
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights)[:, read_by(head, hidden)].sum().backward()
    lacking = [name for name, value in head.named_parameters() if value.grad is None or not value.grad.any()]
    assert not lacking
    assert all(value.grad is not None and value.grad.isfinite().all() for value in head.parameters())


@every_head
def test_it_leaves_its_input_alone(mixer: str, task: str, family: str) -> None:
    head, hidden = make(mixer, task, family)
    before = [tensor.clone() for tensor in tensors(hidden)]
    head.train()
    head(hidden).sum().backward()
    assert all(torch.equal(old, new) for old, new in zip(before, tensors(hidden), strict=True))


def tensors(hidden: HiddenStates) -> Iterator[Tensor]:
    yield from (*hidden.layers, hidden.mask, hidden.is_context)


@pytest.fixture(scope="module")
def saved_encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {family: save_tiny_encoder(folder / family, family) for family in FAMILIES}


@every_head
def test_it_is_the_same_after_saving_and_loading(
    mixer: str, task: str, family: str, saved_encoders: dict[str, Path], tmp_path: Path
) -> None:
    config = tiny_run_config(encoder={"tuning": "frozen"}, learner={"mixer": mixer, "task": task})
    model, batch = ReaderModel(load_encoder(str(saved_encoders[family])), config), tiny_batch(family)
    optimiser = torch.optim.AdamW(model.head.parameters(), lr=0.05)
    model.train()  # a step in training mode, so that statistics a head may keep have moved as well
    model(batch).square().mean().backward()
    optimiser.step()
    before = model.eval()(batch)
    model.save(tmp_path / "model")
    assert torch.equal(ReaderModel.load(tmp_path / "model")(batch), before)


def test_the_exceptions_name_parts_and_checks_that_exist() -> None:
    parts = {*registry.names("mixer"), *registry.names("task")}
    assert all(part in parts and check in globals() for part, check in EXCEPTIONS)
