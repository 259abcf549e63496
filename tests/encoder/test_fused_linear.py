"""Fused linear layers: equal hidden states up to bf16, weights under the same names, nothing else changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from doubles import tiny_batch, tiny_model
from lamella.encoder import fused_linear
from lamella.encoder.fused_linear import FusedLinear, LinearGelu, fuse_products
from lamella.models.model import ReaderModel


def fused_layers(model: ReaderModel) -> list[LinearGelu]:
    return [module for module in model.modules() if isinstance(module, LinearGelu)]


@pytest.mark.parametrize("family", ["bert", "electra", "mpnet", "roberta"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_fused_layers_compute_the_same(family: str, kind: torch.dtype) -> None:
    plain = tiny_model(family).eval()
    plain.encoder.to(kind)
    ours = copy.deepcopy(plain)
    fuse_products(ours.encoder)
    assert len(fused_layers(ours)) == plain.encoder.depth
    assert any(type(module) is FusedLinear for module in ours.modules())
    assert ours.state_dict().keys() == plain.state_dict().keys()
    with torch.inference_mode():
        actual, expected = ours(tiny_batch(family)), plain(tiny_batch(family))
    torch.testing.assert_close(actual, expected, atol=0.02 if kind == torch.bfloat16 else 0, rtol=0)


def test_a_build_that_cannot_fuse_computes_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(8, 16).bfloat16(), torch.ones(2, 8).bfloat16()
    linear = layer(x)
    monkeypatch.setattr(fused_linear, "_can_fuse", lambda x: False)
    with torch.inference_mode():
        for kind, expected in ((FusedLinear, linear), (LinearGelu, nn.functional.gelu(linear))):
            layer.__class__ = kind
            assert torch.equal(layer(x), expected)


def test_layers_that_are_not_plain_or_without_gelu_keep_their_activation() -> None:
    lora = tiny_model(encoder={"tuning": {"name": "lora", "targets": ["ffn_input"]}})
    other = tiny_model()
    for module in other.modules():
        if hasattr(module, "intermediate_act_fn"):
            module.intermediate_act_fn = nn.ReLU()
    for model in (lora, other):
        fuse_products(model.encoder)
        assert not fused_layers(model)
