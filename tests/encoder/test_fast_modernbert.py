"""ModernBERT without masks: the same logits and gradients as transformers, for batches of every shape."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import ModernBertForQuestionAnswering

from doubles import DEPTH, tiny_batch, tiny_config, tiny_encoder
from lamella.data.windows.batches import Batch
from lamella.encoder.acceleration import model_inputs, use_fast_attention
from lamella.encoder.encoder import Encoder
from lamella.encoder.fast_attention import find_bounds
from lamella.encoder.fast_modernbert import FastModernBertAttention, WindowBounds
from lamella.encoder.packing import pack
from lamella.encoder.tuning import full

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = {  # local layers see 8 tokens on either side, in blocks of 8
    "no padding": (40, 40, 40),
    "one window": (37,),
    "a little padding": (40, 38, 33),
    "mostly padding": (130, 5, 3, 60),
    "a context of one token": (5, 4),
    "one token": (1, 1),
    "as long as the reach": (8, 9, 10),
    "blocks that end with a window": (16, 17, 24, 25),
}
KINDS = ("full_attention", "sliding_attention")
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "with biases": {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
    "local layers only": {"layer_types": ["sliding_attention"] * DEPTH},
    "no local layers": {"layer_types": ["full_attention"] * DEPTH},
    "frequencies for longer texts": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        }
    },
}


def make_batch(lengths: Sequence[int]) -> Batch:
    ids = torch.randint(5, 900, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    labels = torch.zeros(len(lengths), dtype=torch.long)
    return Batch(ids * mask, mask, ids * 0, mask, labels, labels, np.arange(len(lengths)))


def pair(**options: Any) -> tuple[ModernBertForQuestionAnswering, ModernBertForQuestionAnswering]:
    """Return a model of transformers and a copy with our attention."""
    torch.manual_seed(0)
    stock = ModernBertForQuestionAnswering(tiny_config("modernbert", **options)).eval()
    ours = copy.deepcopy(stock)
    use_fast_attention(ours)
    return stock, ours


def logits_of(model: Any, batch: Batch) -> Tensor:
    """Return the logits of all real tokens, [2, tokens]."""
    inputs, packing = model_inputs(model, batch, token_types=False)
    assert (packing is None) == (model.config._attn_implementation == "sdpa")
    output = model(**inputs)
    both = [output.start_logits, output.end_logits]
    return torch.stack([x if packing is None else packing.unpack(x) for x in both])[:, batch.mask]


def assert_same_logits_and_gradients(stock: Any, ours: Any, batch: Batch) -> None:
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, batch), logits_of(stock, batch), atol=1e-5, rtol=1e-5)
    for model in (stock, ours):
        logits = logits_of(model, batch)
        (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    for (name, actual), (_, expected) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, msg=name, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_logits_and_gradients_equal_transformers(lengths: tuple[int, ...]) -> None:
    assert_same_logits_and_gradients(*pair(), make_batch(lengths))


@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_variants_equal_transformers(variant: str) -> None:
    assert_same_logits_and_gradients(*pair(**VARIANTS[variant]), make_batch(LENGTHS["a little padding"]))


def test_the_reach_of_the_real_model_equals_transformers() -> None:
    stock, ours = pair(local_attention=128, max_position_embeddings=512)
    assert_same_logits_and_gradients(stock, ours, make_batch((384, 300, 65, 129)))


def test_no_layer_computes_padding() -> None:
    encoder, batch = tiny_encoder("modernbert").encoder, tiny_batch("modernbert")
    full(encoder)
    shapes: list[tuple[int, ...]] = []
    for layer in encoder.layer_modules:
        layer.register_forward_hook(lambda module, arguments, output: shapes.append(tuple(output.shape[:2])))
    layers = encoder(batch, range(DEPTH + 1)).layers
    assert shapes == [(1, int(batch.mask.sum()))] * DEPTH
    assert not batch.mask.all()
    for layer in layers:
        assert layer.shape[:2] == batch.mask.shape
        assert not layer[~batch.mask].any()


def test_attention_dropout_in_training_uses_the_masks_of_transformers() -> None:
    batch = tiny_batch("modernbert")
    encoder = tiny_encoder("modernbert", attention_dropout=0.3).encoder
    full(encoder)
    encoder.train()
    assert model_inputs(encoder.model, batch, token_types=False)[1] is None
    torch.manual_seed(0)
    first = encoder(batch, (DEPTH,)).layers[0]
    assert not torch.allclose(first[batch.mask], encoder(batch, (DEPTH,)).layers[0][batch.mask])
    encoder.eval()
    assert model_inputs(encoder.model, batch, token_types=False)[1] is not None


def test_another_attention_gets_padded_inputs() -> None:
    """An export to ONNX replaces the attention, and traces a padded batch."""
    encoder, batch = tiny_encoder("modernbert").encoder, tiny_batch("modernbert")
    expected = encoder(batch, (DEPTH,)).layers[0]
    encoder.model.set_attn_implementation("eager")
    inputs, packing = model_inputs(encoder.model, batch, token_types=False)
    assert packing is None
    assert torch.equal(inputs["input_ids"], batch.input_ids)
    actual = encoder(batch, (DEPTH,)).layers[0]
    torch.testing.assert_close(actual[batch.mask], expected[batch.mask], atol=2e-5, rtol=1e-5)


def test_a_batch_is_packed_and_unpacked() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    packing = pack(mask)
    x = torch.arange(12.0).view(2, 3, 2)
    assert packing.lengths == [3, 1]
    assert packing.positions.tolist() == [[0, 1, 2, 0]]
    assert packing.pack(x).tolist() == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert torch.equal(packing.unpack(packing.pack(x)), x * mask[..., None])
    without_padding = pack(torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(without_padding.unpack(without_padding.pack(x)), x)


def test_bounds_separate_tokens_from_padding() -> None:
    mask = torch.arange(5) < torch.tensor([[5], [2], [1]])
    assert find_bounds(mask).tolist() == [0, 5, 5, 7, 10, 11, 15]


def test_bounds_give_the_logits_and_gradients_of_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel of a GPU replaced by its definition: all else is as on a GPU."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_as_defined)
    batch = make_batch((40, 23, 1))
    windows = WindowBounds(find_bounds(batch.mask), 40)
    inputs = {"input_ids": batch.input_ids, "attention_mask": dict.fromkeys(KINDS, windows)}
    stock, ours = pair()
    gradients = []
    for model, given in ((stock, {**inputs, "attention_mask": batch.mask.long()}), (ours, inputs)):
        output = model(**given)
        logits = torch.stack([output.start_logits, output.end_logits])[:, batch.mask]
        (logits * torch.linspace(-1, 1, logits.numel()).view(logits.shape)).sum().backward()
        gradients.append([logits, *(parameter.grad for parameter in model.parameters())])
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def attend_as_defined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    key_begins: Tensor,
    longest: int,
    longest_key: int,
    *,
    window_size: tuple[int, int],
) -> Tensor:
    """Do what PyTorch's attention for windows of different lengths does, which exists on a GPU only."""
    assert begins.dtype == torch.int32
    assert begins is key_begins
    assert int(begins.diff().max()) <= longest == longest_key
    places = torch.arange(len(query))
    window = torch.bucketize(places, begins[1:], right=True)
    left, right = (len(query) if side < 0 else side for side in window_size)
    distance = places[:, None] - places
    seen = (window[:, None] == window) & (distance <= left) & (-distance <= right)
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # [N, T, D]
    return scaled_dot_product_attention(q, k, v, seen).transpose(0, 1)


def test_the_replaced_model_can_be_pickled_and_has_the_same_tensors() -> None:
    stock, ours = pair()
    batch = make_batch((9, 4))
    sent = pickle.loads(pickle.dumps(ours))
    assert type(sent.model.layers[0].attn) is FastModernBertAttention
    assert torch.equal(logits_of(sent, batch), logits_of(ours, batch))
    assert ours.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [200, 384])
def test_a_gpu_gives_the_layers_of_a_cpu_and_reads_nothing_back(tokens: int) -> None:
    """Above 256 tokens, it uses the bounds of the windows instead of a mask."""
    encoder = tiny_encoder("modernbert", local_attention=128, max_position_embeddings=512).encoder
    full(encoder)
    batch = make_batch((tokens, tokens // 2, 1))
    expected = encoder(batch, (DEPTH,)).layers[0][batch.mask]
    on_gpu, sent = Encoder(copy.deepcopy(encoder.model)).cuda(), batch.to(torch.device("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        windows = model_inputs(on_gpu.model, sent, token_types=False)[0]["attention_mask"]
        assert isinstance(windows, Tensor if tokens < 256 else dict)
        on_gpu(sent, (DEPTH,))  # loads the libraries
        try:
            with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")
            last = on_gpu(sent, (DEPTH,)).layers[0]
            last.float().square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    actual = last.detach().cpu()[batch.mask].float()
    assert (actual - expected).abs().mean() < 0.05
