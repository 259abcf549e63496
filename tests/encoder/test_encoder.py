"""The encoder, for every family: the layers it returns, the inputs it sends, when it keeps a graph."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from doubles import DEPTH, FAMILIES, HIDDEN, tiny_batch, tiny_encoder, tiny_model
from lamella import registry
from lamella.data.windows.batches import Batch
from lamella.encoder.encoder import Encoder
from lamella.encoder.families import FAMILIES as FAMILY_TABLE
from lamella.encoder.tuning import frozen, full
from lamella.errors import EncoderError
from lamella.heads.head import Head

FINAL_NORM = ("eurobert", "modernbert")
PACKED = ("modernbert",)  # its padding is not computed

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs_of(encoder: Encoder, batch: Batch) -> dict[str, Any]:
    types = {"token_type_ids": batch.token_types} if encoder.token_types else {}
    return {"input_ids": batch.input_ids, "attention_mask": batch.mask.long(), **types}


def direct(encoder: Encoder, batch: Batch) -> tuple[Tensor, ...]:
    """Return all hidden states of transformers; without gradients, attention rounds differently."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and encoder.trainable):
        output = encoder.model(**inputs_of(encoder, batch), output_hidden_states=True)
    states: tuple[Tensor, ...] = output.hidden_states
    return states


def assert_same(family: str, actual: Tensor, expected: Tensor, batch: Batch, name: str = "") -> None:
    """Check for equality, or for equality but for rounding where transformers computes the padding too."""
    if family in PACKED:
        torch.testing.assert_close(actual[batch.mask], expected[batch.mask], atol=1e-5, rtol=1e-5, msg=name or None)
    else:
        assert torch.equal(actual, expected), name


def test_the_doubles_cover_the_family_table() -> None:
    assert sorted(FAMILIES) == sorted(FAMILY_TABLE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_can_be_requested_in_any_order(family: str) -> None:
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    expected = direct(encoder, batch)
    assert (encoder.depth, encoder.hidden_size, len(expected)) == (DEPTH, HIDDEN, DEPTH + 1)
    for layers in [tuple(range(DEPTH + 1)), (DEPTH,), (2, 0), (1, 1, DEPTH), (0,)]:
        hidden = encoder(batch, layers)
        assert len(hidden.layers) == len(layers)
        for layer, state in zip(layers, hidden.layers, strict=True):
            assert_same(family, state, expected[layer], batch, f"layer {layer} of {layers}")
        assert hidden.mask is batch.mask
        assert hidden.is_context is batch.is_context


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_is_not_requested_is_freed_during_the_run(family: str) -> None:
    """When a layer starts, only its input and the requested outputs of the layers below are still in memory.

    The output of the embeddings is excepted: transformers itself keeps it until the end.
    """
    encoder, batch = tiny_encoder(family, num_hidden_layers=5).encoder, tiny_batch(family)
    frozen(encoder)
    seen: list[weakref.ref[Tensor]] = []
    alive: list[list[int]] = []

    def begin(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        alive.append([number for number, output in enumerate(seen, start=1) if output() is not None])

    def end(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        seen.append(weakref.ref(output[0] if isinstance(output, tuple) else output))

    for layer in encoder.layer_modules:
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)
    for requested, expected in [
        ((5,), [[], [1], [2], [3], [4]]),
        ((2, 0), [[], [1], [2], [2, 3], [2, 4]]),
        ((1, 3), [[], [1], [1, 2], [1, 3], [1, 3, 4]]),
    ]:
        seen.clear()
        alive.clear()
        hidden = encoder(batch, requested)
        assert alive == expected
        remaining = set() if family in PACKED else {*requested} - {0}  # with padding, they are other tensors
        if family in FINAL_NORM:
            remaining -= {5}  # the output itself is not kept
        assert [number for number, output in enumerate(seen, start=1) if output() is not None] == sorted(remaining)
        del hidden
        assert all(output() is None for output in seen)


def test_a_failed_run_keeps_nothing() -> None:
    encoder, batch = tiny_encoder().encoder, tiny_batch()
    frozen(encoder)
    seen: list[weakref.ref[Tensor]] = []
    encoder.layer_modules[0].register_forward_hook(lambda m, a, output: seen.append(weakref.ref(output)))

    def fail(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        raise RuntimeError("here")

    handle = encoder.layer_modules[1].register_forward_pre_hook(fail)
    with contextlib.suppress(RuntimeError):
        encoder(batch, (1, 2))
    gc.collect()
    assert seen
    assert seen[0]() is None
    handle.remove()
    assert torch.equal(encoder(batch, (2,)).layers[0], direct(encoder, batch)[2])


@pytest.mark.parametrize("tuning", ["full", "adapter", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_gradients_in_training_equal_transformers(family: str, tuning: str) -> None:
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    registry.build("tuning", tuning, encoder)
    encoder.train()
    outputs, gradients = [], []
    for run in (lambda: encoder(batch, range(DEPTH + 1)).layers, lambda: direct(encoder, batch)):
        encoder.zero_grad()
        torch.manual_seed(3)  # for the dropout
        layers = run()
        chance = torch.Generator().manual_seed(4)
        real = batch.mask[..., None]
        terms = [(layer * real * torch.randn(layer.shape, generator=chance)).sum() for layer in layers]
        torch.stack(terms).sum().backward()
        outputs.append([layer.detach() for layer in layers])
        gradients.append({name: value.grad for name, value in encoder.named_parameters() if value.grad is not None})
    for actual, expected in zip(*outputs, strict=True):
        assert_same(family, actual, expected, batch)
    assert gradients[0].keys() == gradients[1].keys()
    assert gradients[0]
    for name, value in gradients[0].items():
        if family in PACKED:
            torch.testing.assert_close(value, gradients[1][name], atol=1e-4, rtol=1e-4, msg=name)
        else:
            assert torch.equal(value, gradients[1][name]), name


def test_shared_layers_in_several_groups() -> None:
    encoder = tiny_encoder("albert", num_hidden_layers=4, num_hidden_groups=2, inner_group_num=3).encoder
    batch = tiny_batch("albert")
    expected = direct(encoder, batch)
    assert len(expected) - 1 == encoder.depth == 12
    for number, layer in enumerate(encoder(batch, range(13)).layers):
        assert torch.equal(layer, expected[number]), number


def test_layers_under_autocast_inference_mode_and_other_weights() -> None:
    encoder, batch = tiny_encoder().encoder, tiny_batch()
    requested = (0, 1, DEPTH)
    for context in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()):
        with context:
            expected, actual = direct(encoder, batch), encoder(batch, requested).layers
        assert all(torch.equal(layer, expected[number]) for number, layer in zip(requested, actual, strict=True))
    other = tiny_encoder(seed=1).encoder
    weights = dict(other.named_parameters())
    swapped = torch.func.functional_call(encoder, weights, (batch, requested)).layers
    assert all(torch.equal(a, b) for a, b in zip(swapped, other(batch, requested).layers, strict=True))


@pytest.mark.parametrize("family", ["albert", "bert", "mpnet"])
@pytest.mark.parametrize("tuning", ["frozen", "adapter"])
def test_copies_keep_their_own_layers(family: str, tuning: str) -> None:
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    registry.build("tuning", tuning, encoder)
    before = encoder(batch, range(DEPTH + 1)).layers
    for copied in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert all(torch.equal(a, b) for a, b in zip(copied(batch, range(DEPTH + 1)).layers, before, strict=True))
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(1.5)
        changed = copied(batch, range(DEPTH + 1)).layers
        assert all(not torch.allclose(a, b) for a, b in zip(changed, before, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(changed, direct(copied, batch), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(encoder(batch, range(DEPTH + 1)).layers, before, strict=True))


def test_two_encoders_of_one_model_count_its_layers_correctly() -> None:
    first, batch = tiny_encoder().encoder, tiny_batch()
    expected, second = direct(first, batch), Encoder(first.model)
    for encoder in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(encoder(batch, range(DEPTH + 1)).layers, expected, strict=True))


def test_threads_that_share_an_encoder_each_get_their_layers() -> None:
    encoder = tiny_encoder().encoder
    frozen(encoder)
    requested = [(1,), (0, 2), (DEPTH,), (2, 1)]
    batches = [tiny_batch(count=count) for count in (1, 2, 3, 4)]
    expected = [
        [direct(encoder, batch)[layer] for layer in layers] for batch, layers in zip(batches, requested, strict=True)
    ]
    barrier = threading.Barrier(len(requested), timeout=60)

    def wait(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        barrier.wait()

    for layer in encoder.layer_modules:  # keeps all threads in the same layer
        layer.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(len(requested)) as pool:
        actual = list(pool.map(lambda batch, layers: encoder(batch, layers).layers, batches, requested))
    for layers, expected_layers in zip(actual, expected, strict=True):
        assert len(layers) == len(expected_layers)
        assert all(torch.equal(a, b) for a, b in zip(layers, expected_layers, strict=True))


def test_an_encoder_can_run_inside_the_run_of_another() -> None:
    outer, inner, batch = tiny_encoder().encoder, tiny_encoder(seed=1).encoder, tiny_batch()
    expected, other = direct(outer, batch), direct(inner, batch)
    inner_layers: list[Tensor] = []

    def run_inner(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        inner_layers.extend(inner(batch, (0, 2)).layers)

    outer.layer_modules[1].register_forward_pre_hook(run_inner)
    layers = outer(batch, range(DEPTH + 1)).layers
    assert torch.equal(inner_layers[0], other[0])
    assert torch.equal(inner_layers[1], other[2])
    assert all(torch.equal(a, b) for a, b in zip(layers, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_token_types_are_sent_if_the_family_has_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    before = encoder(batch, (DEPTH,)).layers[0]
    other = encoder(replace(batch, token_types=1 - batch.token_types), (DEPTH,)).layers[0]
    assert torch.equal(before, other) is not encoder.token_types
    sent: set[str] = set()
    original = encoder.model.forward

    def spy(**inputs: Any) -> Any:
        sent.update(inputs)
        return original(**inputs)

    monkeypatch.setattr(encoder.model, "forward", spy)
    encoder(batch, (DEPTH,))
    assert ("token_type_ids" in sent) is encoder.token_types


def test_the_configuration_of_a_deberta_decides_about_token_types() -> None:
    batch = tiny_batch("deberta-v2")
    for types in (0, 1, 2):
        encoder = tiny_encoder("deberta-v2", type_vocab_size=types).encoder
        assert encoder.token_types is (types == 2)
        layers = [
            encoder(replace(batch, token_types=kinds), (DEPTH,)).layers[0]
            for kinds in (batch.token_types, 0 * batch.token_types)
        ]
        assert torch.equal(*layers) is not encoder.token_types


def test_a_convolution_above_a_layer_belongs_to_it() -> None:
    """DeBERTa-v2-xlarge has one above its first layer."""
    encoder, batch = tiny_encoder("deberta-v2", conv_kernel_size=3).encoder, tiny_batch("deberta-v2")
    layers = encoder(batch, range(DEPTH + 1)).layers
    assert all(torch.equal(a, b) for a, b in zip(layers, direct(encoder, batch), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_window_is_the_longest_that_runs(family: str) -> None:
    encoder = tiny_encoder(family).encoder

    def run(length: int) -> None:
        ids = torch.full((1, length), 7)
        ones = torch.ones_like(ids, dtype=torch.bool)
        zero = torch.zeros(1, dtype=torch.long)
        encoder(Batch(ids, ones, torch.zeros_like(ids), ones, zero, zero, windows=zero.numpy()), (DEPTH,))

    run(encoder.longest_window)
    if family in FINAL_NORM:  # their positions are computed, for any length
        return
    with pytest.raises((IndexError, RuntimeError)):
        run(encoder.longest_window + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_content_of_the_padding_does_not_matter(family: str) -> None:
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
        alone = replace(
            batch,
            **{name: getattr(batch, name)[row : row + 1, :length] for name in ("input_ids", "mask", "token_types")},
        )
        torch.testing.assert_close(encoder(alone, (DEPTH,)).layers[0][0], together[row, :length], atol=1e-5, rtol=0)


def test_a_frozen_encoder_keeps_no_graph_and_no_dropout() -> None:
    model, batch = tiny_model(encoder={"tuning": "frozen"}), tiny_batch()
    model.train()
    assert model.head.training
    assert not any(module.training for module in model.encoder.modules())
    first, second = (model.encoder(batch, (0, DEPTH)).layers[-1] for _ in range(2))
    assert first.grad_fn is None
    assert not first.requires_grad
    assert not first.is_inference()  # a head must be able to train on it
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


def test_changes_of_requires_grad_are_respected() -> None:
    encoder = tiny_encoder().encoder
    frozen(encoder)
    assert not encoder.trainable
    assert not encoder.train().training
    full(encoder)
    assert encoder.trainable
    assert encoder.train().training


def test_the_error_for_an_unsupported_model_lists_the_supported_ones() -> None:
    class Model(nn.Module):
        config = type("Config", (), {"model_type": "gpt2"})
        name_or_path = "some/gpt"

    with pytest.raises(
        EncoderError, match=r"^some/gpt: expected an encoder of model_type albert, bert, .*; got 'gpt2'\.$"
    ):
        Encoder(Model())  # type: ignore[arg-type]


def test_an_exported_reader_keeps_the_layers_that_its_head_reads() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = tiny_encoder("albert").encoder
            registry.build("tuning", "adapter", self.encoder)
            self.head = Head(DEPTH, HIDDEN, mixer=[{"name": "average"}], task={"name": "span"}, layers=[0, 2])

        def forward(self, ids: Tensor, real: Tensor, types: Tensor, is_context: Tensor) -> Tensor:
            none = torch.zeros(1, dtype=torch.long)
            batch = Batch(ids, real, types, is_context, none, none, windows=np.zeros(1))
            logits: Tensor = self.head(self.encoder(batch, self.head.layers))
            return logits

    def plain(batch: Batch) -> tuple[Tensor, ...]:
        return batch.input_ids, batch.mask, batch.token_types, batch.is_context

    network = Network().eval()
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=network.encoder.longest_window)}
    program = torch.export.export(network, plain(tiny_batch("albert")), dynamic_shapes=[free] * 4)
    other = plain(tiny_batch("albert", count=2))
    torch.testing.assert_close(program.module()(*other), network(*other), atol=1e-6, rtol=0)
