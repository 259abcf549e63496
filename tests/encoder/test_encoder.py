"""The encoder, for every family: which layers it gives, what it is sent, when it keeps a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles import DEPTH, FAMILIES, HIDDEN, tiny_batch, tiny_encoder, tiny_model
from lamella.data.batches import Batch
from lamella.encoder.encoder import FAMILIES as FAMILY_TABLE
from lamella.encoder.encoder import Encoder
from lamella.encoder.tuning import frozen, full
from lamella.errors import EncoderError

pytestmark = pytest.mark.usefixtures("one_thread")


def direct(encoder: Encoder, batch: Batch) -> tuple[Tensor, ...]:
    """All hidden states as transformers itself gives them."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
    if encoder.family.token_types:
        inputs["token_type_ids"] = batch.token_types
    with torch.no_grad():
        states: tuple[Tensor, ...] = encoder.model(**inputs, output_hidden_states=True).hidden_states
    return states


def test_the_doubles_cover_the_family_table() -> None:
    assert sorted(FAMILIES) == sorted(FAMILY_TABLE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_can_be_asked_for_in_any_order(family: str) -> None:
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    expected = direct(encoder, batch)
    assert (encoder.depth, encoder.hidden_size, len(expected)) == (DEPTH, HIDDEN, DEPTH + 1)
    for layers in [tuple(range(DEPTH + 1)), (DEPTH,), (2, 0), (1, 1, DEPTH), (0,)]:
        hidden = encoder(batch, layers)
        assert len(hidden.layers) == len(layers)
        for layer, state in zip(layers, hidden.layers, strict=True):
            assert torch.equal(state, expected[layer]), f"layer {layer} of {layers}"
        assert hidden.mask is batch.mask
        assert hidden.is_context is batch.is_context


def test_the_last_layer_alone_does_not_make_the_model_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, batch = tiny_encoder().encoder, tiny_batch()
    asked: list[bool] = []
    original = encoder.model.forward

    def spy(**inputs: Any) -> Any:
        asked.append(inputs["output_hidden_states"])
        return original(**inputs)

    monkeypatch.setattr(encoder.model, "forward", spy)
    encoder(batch, (DEPTH,))
    encoder(batch, (0, DEPTH))
    assert asked == [False, True]


@pytest.mark.parametrize("family", FAMILIES)
def test_token_types_are_sent_where_the_family_has_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    before = encoder(batch, (DEPTH,)).layers[0]
    other = encoder(replace(batch, token_types=1 - batch.token_types), (DEPTH,)).layers[0]
    assert torch.equal(before, other) is not FAMILY_TABLE[family].token_types
    sent: set[str] = set()
    original = encoder.model.forward

    def spy(**inputs: Any) -> Any:
        sent.update(inputs)
        return original(**inputs)

    monkeypatch.setattr(encoder.model, "forward", spy)
    encoder(batch, (DEPTH,))
    assert ("token_type_ids" in sent) is FAMILY_TABLE[family].token_types


@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_window_is_the_longest_that_runs(family: str) -> None:
    encoder = tiny_encoder(family).encoder

    def run(length: int) -> None:
        ids = torch.full((1, length), 7)
        ones = torch.ones_like(ids, dtype=torch.bool)
        zero = torch.zeros(1, dtype=torch.long)
        encoder(Batch(ids, ones, torch.zeros_like(ids), ones, ones, zero, zero, windows=zero.numpy()), (DEPTH,))

    run(encoder.longest_window)
    with pytest.raises((IndexError, RuntimeError)):
        run(encoder.longest_window + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_at_the_pads_does_not_matter(family: str) -> None:
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    garbage = torch.randint(5, 900, batch.input_ids.shape, generator=torch.Generator().manual_seed(0))
    filled = replace(
        batch,
        input_ids=torch.where(batch.mask, batch.input_ids, garbage),
        token_types=torch.where(batch.mask, batch.token_types, 1),
    )
    assert (~batch.mask).any()
    layers = range(DEPTH + 1)
    for clean, dirty in zip(encoder(batch, layers).layers, encoder(filled, layers).layers, strict=True):
        torch.testing.assert_close(clean[batch.mask], dirty[batch.mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_does_not_depend_on_the_batch_it_is_in(family: str) -> None:
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    together = encoder(batch, (DEPTH,)).layers[0]
    for row in range(len(batch.mask)):
        length = int(batch.mask[row].sum())
        one = replace(
            batch,
            **{name: getattr(batch, name)[row : row + 1, :length] for name in ("input_ids", "mask", "token_types")},
        )
        torch.testing.assert_close(encoder(one, (DEPTH,)).layers[0][0], together[row, :length], atol=1e-5, rtol=0)


def test_a_frozen_encoder_keeps_no_graph_and_no_dropout() -> None:
    model, batch = tiny_model(encoder={"tuning": "frozen"}), tiny_batch()
    model.train()
    assert model.head.training
    assert not any(module.training for module in model.encoder.modules())
    first, second = (model.encoder(batch, (0, DEPTH)).layers[-1] for _ in range(2))
    assert first.grad_fn is None
    assert not first.requires_grad
    assert not first.is_inference()  # a trained head must be able to read it
    assert torch.equal(first, second)
    model(batch).sum().backward()
    assert all(parameter.grad is None for parameter in model.encoder.parameters())
    assert model.head.task.q.grad is not None


def test_a_trainable_encoder_has_a_graph_in_training_and_none_without_gradients() -> None:
    model, batch = tiny_model(encoder={"tuning": "full"}), tiny_batch()
    model.train()
    assert all(module.training for module in model.encoder.modules())
    first, second = (model.encoder(batch, (DEPTH,)).layers[0] for _ in range(2))
    assert first.requires_grad
    assert not torch.equal(first, second)  # dropout
    with torch.no_grad():
        assert not model.encoder(batch, (DEPTH,)).layers[0].requires_grad
    model.eval()
    assert not any(module.training for module in model.encoder.modules())


def test_freezing_and_thawing_are_followed() -> None:
    encoder = tiny_encoder().encoder
    frozen(encoder)
    assert not encoder.trainable
    assert not encoder.train().training
    full(encoder)
    assert encoder.trainable
    assert encoder.train().training


def test_an_unsupported_model_is_refused_with_the_supported_ones() -> None:
    class Model(nn.Module):
        config = type("Config", (), {"model_type": "gpt2"})
        name_or_path = "some/gpt"

    with pytest.raises(
        EncoderError, match=r"^some/gpt: its config says model_type 'gpt2'; supported are albert, bert,"
    ):
        Encoder(Model())  # type: ignore[arg-type]
