"""The dropout for CPUs: what it drops, its gradients, and the unchanged rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from doubles import FAMILIES, tiny_batch, tiny_encoder, tiny_model
from lamella.encoder.dropout import FastDropout, draw_kept
from lamella.encoder.fast_attention import ATTENTION, attend, attend_with_dropout

pytestmark = pytest.mark.usefixtures("one_thread")


def gradients(work: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the output of `work` and its gradients in a fixed direction."""
    torch.manual_seed(3)
    actual = work(*inputs)
    direction = torch.linspace(-1, 1, actual.numel()).view(actual.shape)
    return [actual.detach(), *torch.autograd.grad(actual, inputs, direction)]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_expected_share_of_elements_is_kept(p: float) -> None:
    torch.manual_seed(0)
    kept = draw_kept((401, 1003), p)
    assert kept.shape == (401, 1003)
    assert abs(kept.mean() - (1 - p)) < 0.004
    for axis in (0, 1):  # neighbours come from the same draw and must be independent
        first, second = kept.narrow(axis, 0, 400), kept.narrow(axis, 1, 400)
        assert abs((first * second).mean() - (1 - p) ** 2) < 0.006


def test_dropout_scales_the_kept_elements_and_their_gradients() -> None:
    x = torch.randn(7, 33, requires_grad=True)
    actual, gradient = gradients(FastDropout(0.2).train(), [x])
    torch.manual_seed(3)
    kept = draw_kept((7, 33), 0.2)
    direction = torch.linspace(-1, 1, x.numel()).view(x.shape)
    torch.testing.assert_close(actual, kept * x.detach() / 0.8)
    torch.testing.assert_close(gradient, kept * direction / 0.8)


@pytest.mark.parametrize("as_bool", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_and_its_gradients_match_the_plain_formula(masked: bool, as_bool: bool) -> None:
    torch.manual_seed(1)
    B, N, T, D, p = 3, 2, 9, 4, 0.3
    inputs = [torch.randn(B, N, T, D, requires_grad=True) for _ in range(3)]
    lengths = [T, 6, T] if masked else [T] * B
    real = torch.stack([torch.arange(T) < length for length in lengths])
    added = torch.zeros(B, 1, T, T).masked_fill(~real[:, None, None], torch.finfo(torch.float32).min)
    mask = (real[:, None, None] if as_bool else added) if masked else None
    module = nn.Module().train()

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(module, query, key, value, mask, dropout=p)[0]

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept = torch.zeros(B, N, T, T)
        for window, length in enumerate(lengths):
            kept[window, :, :length, :length] = draw_kept((N, length, length), p)
        weights = (query @ key.mT / D**0.5 + added).softmax(-1)
        return (weights * kept / (1 - p) @ value).transpose(1, 2)

    for actual, expected in zip(gradients(ours, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_attention_with_a_bias_has_the_gradient_of_the_bias(kind: torch.dtype) -> None:
    torch.manual_seed(1)
    B, N, T, D, p, lengths = 3, 2, 9, 4, 0.3, [9, 6, 9]
    inputs = [torch.randn(shape).to(kind).requires_grad_() for shape in [(B, N, T, D)] * 3 + [(1, N, T, T)]]
    real = torch.stack([torch.arange(T) < length for length in lengths])
    added = torch.zeros(B, 1, T, T).masked_fill(~real[:, None, None], torch.finfo(torch.float32).min)

    def ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend_with_dropout(query, key, value, bias, lengths, 0.5, p)

    def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        kept = torch.zeros(B, N, T, T)
        for window, length in enumerate(lengths):
            kept[window, :, :length, :length] = draw_kept((N, length, length), p)
        weights = (query.float() @ key.float().mT / 2 + bias.float() + added).softmax(-1)
        return (weights * kept / (1 - p) @ value.float()).transpose(1, 2)

    near = {"atol": 1e-5, "rtol": 1e-5} if kind == torch.float32 else {"atol": 0.1, "rtol": 0.05}
    for actual, expected in zip(gradients(ours, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(actual.float(), expected.float(), **near)


@pytest.mark.parametrize("masked", [True, False])
def test_attention_without_dropout_equals_pytorch(masked: bool) -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(3, 2, 9, 4) for _ in range(3))
    real = torch.arange(9) < torch.tensor([[9], [6], [9]] if masked else [[9]] * 3)  # [B, T]
    mask = real[:, None, None].expand(3, 1, 9, 9) if masked else None
    with torch.no_grad():
        actual = attend(nn.Module().eval(), query, key, value, mask, dropout=0.3)[0]
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)
    torch.testing.assert_close(actual[real], expected[real])
    assert not actual[~real].any()


@pytest.mark.parametrize(("queries", "keys"), [(slice(9), slice(3)), (slice(4), slice(8, 9))])
def test_a_mask_that_hides_more_than_padding_is_left_to_transformers(queries: slice, keys: slice) -> None:
    query = torch.randn(1, 2, 9, 4)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    mask[0, 0, queries, keys] = False
    torch.manual_seed(0)
    actual = attend(nn.Module().train(), query, query, query, mask, dropout=0.3)[0]
    torch.manual_seed(0)
    expected = nn.functional.scaled_dot_product_attention(query, query, query, mask, dropout_p=0.3)
    torch.testing.assert_close(actual, expected.transpose(1, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_encoder_trains_with_it_in_half_precision(family: str) -> None:
    """Some compute query and key in another type than value, which the backward pass could not multiply."""
    model = tiny_model(family, encoder={"tuning": "full"}).train()
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):  # in EuroBERT and ModernBERT
            module.attention_dropout = 0.1
    model.precision = "bf16"
    model(tiny_batch(family)).sum().backward()
    gradients = [parameter.grad for parameter in model.encoder.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_encoder_uses_it_and_computes_the_same_without_dropout(family: str) -> None:
    encoder = tiny_encoder(family, seed=1).encoder
    dropouts = [module for module in encoder.modules() if isinstance(module, nn.Dropout)]
    assert dropouts or family == "eurobert"
    assert {type(module) for module in dropouts} <= {FastDropout}
    batch, last = tiny_batch(family), [encoder.depth]
    actual = encoder(batch, last).layers[0]
    if family in ("deberta-v2", "modernbert", "mpnet"):  # their attention is replaced as a whole
        return
    assert encoder.model.config._attn_implementation == ATTENTION
    encoder.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(actual, encoder(batch, last).layers[0], atol=0, rtol=0)


def test_a_seed_fixes_what_is_dropped() -> None:
    encoder, batch = tiny_encoder(seed=1).encoder.train(), tiny_batch()

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return encoder(batch, [encoder.depth]).layers[0]

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
