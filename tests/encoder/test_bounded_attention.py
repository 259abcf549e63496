"""Attention within bounds, without a mask, equals attention with one; the kernel needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles import tiny_batch, tiny_encoder
from lamella.encoder import fast_attention
from lamella.encoder.encoder import Encoder
from lamella.encoder.fast_attention import attend, find_bounds

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAMILIES = ("albert", "bert", "distilbert", "electra", "eurobert", "roberta", "xlm-roberta")


def test_padding_is_a_window_of_its_own() -> None:
    mask = torch.arange(5) < torch.tensor([5, 2, 1])[:, None]
    assert find_bounds(mask).tolist() == [0, 5, 5, 7, 10, 11, 15]


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"local_size": 64}, False),
        ({"use_vmap": True}, False),
    ],
)
def test_bounds_replace_masks_of_padding_in_half_precision(
    changed: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []
    monkeypatch.setattr(fast_attention, "has_bounded_kernel", lambda width: widths.append(width) or True)
    config = tiny_encoder("distilbert").encoder.model.config
    options = {"config": config, "dtype": torch.bfloat16, "use_vmap": False, **changed}
    assert fast_attention._takes_bounds(options) == taken
    assert widths in ([], [config.dim // config.n_heads])


def hidden(encoder: Encoder) -> tuple[Tensor, Tensor]:
    """Return the last layer in half precision, 0 at the padding, and a gradient."""
    encoder.zero_grad()
    batch = tiny_batch(encoder.model.config.model_type).to(torch.device("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        states = encoder(batch, [encoder.depth])
    masked = states.layers[0].float() * states.mask[..., None]
    masked.square().sum().backward()
    gradients = [value.grad for value in encoder.parameters() if value.grad is not None]
    return masked.detach(), torch.cat([gradient.flatten() for gradient in gradients])


@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_and_gradients_are_those_of_a_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tiny_encoder(family).encoder.cuda()  # in evaluation mode: no dropout
    used = []
    between = fast_attention._attend_between
    monkeypatch.setattr(fast_attention, "_attend_between", lambda *given: used.append(given) or between(*given))
    bounded = hidden(encoder)
    assert used
    monkeypatch.setattr(fast_attention, "has_bounded_kernel", lambda width: False)
    masked = hidden(encoder)
    for ours, right in zip(bounded, masked, strict=True):
        assert (ours - right).norm() < 0.02 * right.norm()


@needs_gpu
def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 48, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bounds = find_bounds(torch.arange(48, device="cuda") < torch.tensor([[48], [30]], device="cuda"))
    module = nn.Module().train()
    dropped = [attend(module, query, key, value, bounds, dropout=0.3)[0].float() for _ in range(400)]
    right = attend(module.eval(), query, key, value, bounds, dropout=0.3)[0].float()
    assert (dropped[0] - right).norm() > 0.1 * right.norm()
    mean = torch.stack(dropped).mean(0)
    assert (mean - right).norm() < 0.05 * right.norm()
