"""MPNet with PyTorch's kernels: the same hidden states and gradients as transformers, on the CPU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
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


@pytest.fixture
def attentions(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The bias of each attention that a kernel computes."""
    biases = []

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, **more: float) -> Tensor:
        biases.append(bias)
        return scaled_dot_product_attention(query, key, value, bias, **more)

    monkeypatch.setattr(fast_mpnet, "scaled_dot_product_attention", attention)
    return biases


def test_kernels_give_the_same_result_as_transformers(
    both: tuple[MPNetModel, MPNetModel], attentions: list[Tensor]
) -> None:
    stock, ours = both
    torch.testing.assert_close(states(ours), states(stock))
    assert len(attentions) == stock.config.num_hidden_layers
    for model in both:
        states(model).square().sum().backward()
    for (name, actual), (_, expected) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, msg=name, rtol=1e-4, atol=1e-4)


def test_a_cpu_attends_window_by_window_with_dropout(
    both: tuple[MPNetModel, MPNetModel], attentions: list[Tensor]
) -> None:
    stock, ours = both
    ours.train()
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1e-9  # drops nothing, but counts as dropout
    torch.testing.assert_close(states(ours), states(stock))
    assert not attentions
    for model in both:
        states(model).square().sum().backward()
    for (name, actual), (_, expected) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, msg=name, rtol=1e-4, atol=1e-4)


def test_a_mask_that_is_part_of_the_bias_belongs_to_its_window(both: tuple[MPNetModel, MPNetModel]) -> None:
    """Dropout in the attention alone: its encoder has added the mask to the bias, for kernels."""
    stock, ours = both
    for module in ours.encoder.layer.modules():
        module.train()
        if isinstance(module, nn.Dropout):
            module.p = 1e-9
    torch.testing.assert_close(states(ours), states(stock))


def test_half_precision_is_near_full_precision(both: tuple[MPNetModel, MPNetModel], attentions: list[Tensor]) -> None:
    stock, ours = both
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        cast = states(ours)
    torch.testing.assert_close(cast.float(), states(stock), rtol=0, atol=0.1)
    assert {bias.dtype for bias in attentions} == {torch.bfloat16}


def test_a_graph_for_export_keeps_the_steps_of_transformers(both: tuple[MPNetModel, MPNetModel]) -> None:
    ids = torch.arange(5, 22)[None]
    exported = torch.export.export(both[1], (ids,), strict=False)
    names = {str(node.target) for node in exported.graph.nodes}
    assert any("softmax" in name for name in names)
    assert not any("scaled_dot_product" in name for name in names)


def test_a_mask_can_be_passed_as_an_additive_bias(both: tuple[MPNetModel, MPNetModel]) -> None:
    """The model passes it to its encoder in this form."""
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
    both: tuple[MPNetModel, MPNetModel], attentions: list[Tensor]
) -> None:
    """A bias whose rows are not contiguous has no kernel on a GPU: PyTorch then computes step by step, silently."""
    states(both[1])
    assert attentions
    assert all(bias.is_contiguous() for bias in attentions)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_a_kernel_for_it(both: tuple[MPNetModel, MPNetModel]) -> None:
    ours = both[1].cuda().train()
    ids = torch.randint(5, 30, (3, 16), device="cuda")
    mask = (torch.arange(16) < torch.tensor([16, 9, 1])[:, None]).long().cuda()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), torch.autocast("cuda", torch.bfloat16):
        ours(ids, attention_mask=mask).last_hidden_state.sum().backward()
