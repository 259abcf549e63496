"""MPNet with PyTorch's kernels: the same hidden states and gradients as transformers, computed on the CPU here."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import MPNetModel

from doubles import tiny_config
from lamella.encoder import fast_mpnet


@pytest.fixture
def both() -> tuple[MPNetModel, MPNetModel]:
    torch.manual_seed(0)
    stock = MPNetModel(tiny_config("mpnet"), add_pooling_layer=False).eval()
    ours = copy.deepcopy(stock)
    fast_mpnet.use_kernels(ours)
    return stock, ours


def states(model: MPNetModel) -> Tensor:
    torch.manual_seed(1)
    ids = torch.randint(5, 30, (3, 17))
    mask = torch.arange(17) < torch.tensor([17, 9, 1])[:, None]
    last: Tensor = model(ids, attention_mask=mask.long()).last_hidden_state[mask]
    return last


def test_kernels_give_the_same_result_as_transformers(
    both: tuple[MPNetModel, MPNetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = both
    assert torch.equal(states(ours), states(stock)), "on a CPU nothing changes"
    monkeypatch.setattr(fast_mpnet, "on_gpu", lambda x: True)
    torch.testing.assert_close(states(ours), states(stock))
    for model in both:
        states(model).square().sum().backward()
    for (name, actual), (_, expected) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, msg=name, rtol=1e-4, atol=1e-4)


def test_a_mask_can_be_passed_as_an_additive_bias(
    both: tuple[MPNetModel, MPNetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the model passes it to its encoder in this form."""
    monkeypatch.setattr(fast_mpnet, "on_gpu", lambda x: True)
    ids, real = torch.arange(5, 22)[None].repeat(2, 1), torch.arange(17) < torch.tensor([17, 9])[:, None]
    bias = torch.zeros(real.shape).masked_fill(~real, torch.finfo(torch.float32).min)[:, None, None]
    actual, expected = (
        model(ids, attention_mask=mask).last_hidden_state[real]
        for model, mask in zip(reversed(both), (bias, real.long()), strict=True)
    )
    torch.testing.assert_close(actual, expected)


def test_a_model_with_kernels_can_be_pickled(both: tuple[MPNetModel, MPNetModel]) -> None:
    sent = pickle.loads(pickle.dumps(both[1]))
    assert torch.equal(states(sent), states(both[1]))
    assert type(sent.encoder) is fast_mpnet.FastMPNetEncoder


def test_the_bias_is_contiguous_as_the_kernels_require(
    both: tuple[MPNetModel, MPNetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias whose rows are not contiguous has no kernel on a GPU: PyTorch then computes step by step, silently."""
    biases = []

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, **more: float) -> Tensor:
        biases.append(bias)
        return scaled_dot_product_attention(query, key, value, bias, **more)

    monkeypatch.setattr(fast_mpnet, "on_gpu", lambda x: True)
    monkeypatch.setattr(fast_mpnet, "scaled_dot_product_attention", attention)
    states(both[1])
    assert biases
    assert all(bias.is_contiguous() for bias in biases)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_a_kernel_for_it(both: tuple[MPNetModel, MPNetModel]) -> None:
    ours = both[1].cuda().train()
    ids = torch.randint(5, 30, (3, 16), device="cuda")
    mask = (torch.arange(16) < torch.tensor([16, 9, 1])[:, None]).long().cuda()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), torch.autocast("cuda", torch.bfloat16):
        ours(ids, attention_mask=mask).last_hidden_state.sum().backward()
