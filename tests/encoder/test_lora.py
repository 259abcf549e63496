"""LoRA and IA³ compared with peft: equal outputs, gradients and merged weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from doubles import save_tiny_encoder, tiny_batch, tiny_encoder, tiny_model, tiny_run_config
from lamella.encoder.lora import Ia3, Lora, change_of, changed_layers, insert_change, merge_change
from lamella.encoder.tuning import merge
from lamella.errors import UsageError
from lamella.inference.one_pass import share_encoders
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel

KINDS = ("lora", "ia3", "ia3 of inputs")


class Layer(nn.Module):
    """A model with one layer, the form that peft needs."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


def both(kind: str) -> tuple[nn.Linear, Any, list[tuple[Tensor, Tensor]]]:
    """Return a layer with our change, one with peft's, and the pairs of their trained tensors, with equal values."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    ours, peft_model = copy.deepcopy(layer), Layer(copy.deepcopy(layer))
    change: Lora | Ia3
    if kind == "lora":
        change = Lora(ours, rank=2, alpha=5)
        config: Any = peft.LoraConfig(r=2, lora_alpha=5, lora_dropout=0.0, target_modules=["layer"])
    else:
        inputs = kind != "ia3"
        change = Ia3(ours, inputs=inputs)
        config = peft.IA3Config(target_modules=["layer"], feedforward_modules=["layer"] if inputs else [])
    insert_change(ours, change)
    peft.inject_adapter_in_model(config, peft_model)
    wrapped: Any = peft_model.layer
    if isinstance(change, Lora):
        pairs = [(change.A, wrapped.lora_A["default"].weight), (change.B, wrapped.lora_B["default"].weight)]
    else:
        pairs = [(change.factor, wrapped.ia3_l["default"])]
    for own, reference in pairs:
        value = torch.randn(own.shape)
        own.data.copy_(value)
        reference.data.copy_(value.view(reference.shape))
    return ours, peft_model, pairs


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_peft(kind: str, half: bool) -> None:
    ours, peft_model, pairs = both(kind)
    x = torch.randn(3, 5, 6)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        actual, expected = ours(x), peft_model(x)
    assert actual.dtype == expected.dtype == (torch.bfloat16 if half else torch.float32)
    torch.testing.assert_close(actual, expected)
    for output in (actual, expected):
        output.square().sum().backward()
    for own, reference in pairs:
        assert own.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(own.grad, reference.grad.view(own.shape))


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_layer_is_plain_and_has_the_weights_of_peft(kind: str) -> None:
    ours, peft_model, _ = both(kind)
    x = torch.randn(3, 6)
    before = ours(x)
    merge_change(ours)
    peft_model.layer.merge()
    assert set(ours.state_dict()) == {"weight", "bias"}
    assert not ours._forward_hooks
    assert not ours._forward_pre_hooks
    torch.testing.assert_close(ours(x), before)
    torch.testing.assert_close(ours.weight, peft_model.layer.get_base_layer().weight)
    torch.testing.assert_close(ours.bias, peft_model.layer.get_base_layer().bias)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_layer_has_its_own_change(kind: str) -> None:
    layer, _, _ = both(kind)
    x = torch.randn(3, 6)
    other = copy.deepcopy(layer)
    before = layer(x)
    with torch.no_grad():
        for parameter in change_of(other).parameters():
            parameter.zero_()
    assert torch.equal(layer(x), before)
    assert not torch.equal(other(x), before)
    merge_change(other)
    assert torch.equal(layer(x), before)
    merge_change(layer)
    torch.testing.assert_close(layer(x), before)


def test_lora_starts_unchanged_and_applies_dropout_to_its_own_branch_only() -> None:
    layer = nn.Linear(6, 4)
    x = torch.randn(3, 6)
    plain = layer(x)
    insert_change(layer, Lora(layer, rank=2, alpha=4, dropout=0.5))
    assert torch.equal(layer(x), plain)
    with torch.no_grad():
        change_of(layer).B.normal_()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("tuning", ["lora", "ia3"])
def test_a_model_for_inference_is_merged_and_one_for_training_is_not(tuning: str, tmp_path: Path) -> None:
    base = save_tiny_encoder(tmp_path / "base")
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": tuning})).eval()
    with torch.no_grad():
        for layer in changed_layers(model.encoder.model).values():
            for parameter in change_of(layer).parameters():
                parameter.add_(torch.randn(parameter.shape) / 3)
    model.save(tmp_path / "model")
    merged, whole = (
        load_model(tmp_path / "model", device="cpu", precision="fp32", inference_only=inference_only)
        for inference_only in (True, False)
    )
    assert isinstance(merged, ReaderModel)
    assert isinstance(whole, ReaderModel)
    assert (len(changed_layers(merged.encoder.model)), len(changed_layers(whole.encoder.model)) > 0) == (
        0,
        True,
    )
    with torch.no_grad():
        expected = model(tiny_batch())
        assert torch.equal(whole(tiny_batch()), expected)
        torch.testing.assert_close(merged(tiny_batch()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", ["query", "key", "value", "ffn_output"])
@pytest.mark.parametrize("tuning", ["lora", "ia3"])
def test_training_in_half_precision(tuning: str, target: str) -> None:
    model = tiny_model(encoder={"tuning": {"name": tuning, "targets": [target]}}).train()
    model.precision = "bf16"
    model(tiny_batch()).sum().backward()
    changes = [change_of(layer) for layer in changed_layers(model.encoder.model).values()]
    gradients = [parameter.grad for change in changes for parameter in change.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tuning", ["lora", "adapter"])
def test_a_merged_or_rounded_model_cannot_be_saved(tuning: str, precision: Any, tmp_path: Path) -> None:
    base = save_tiny_encoder(tmp_path / "base")
    ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": tuning})).save(tmp_path / "model")
    model = load_model(tmp_path / "model", device="cpu", precision=precision, inference_only=True)
    assert isinstance(model, ReaderModel)
    if (tuning, precision) == ("adapter", "fp32"):
        model.save(tmp_path / "again")
        return
    with pytest.raises(UsageError, match="loaded for inference only"):
        model.save(tmp_path / "model")
    ReaderModel.load(tmp_path / "model")


def test_merged_encoders_are_not_shared(tmp_path: Path) -> None:
    base = save_tiny_encoder(tmp_path / "base")
    ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": "lora"})).save(tmp_path / "model")
    models = [load_model(tmp_path / "model", device="cpu", precision="fp32", inference_only=True) for _ in range(2)]
    share_encoders(models)
    assert models[0].encoder is not models[1].encoder


def test_an_adapter_stays_where_lora_is_merged() -> None:
    """In DistilBERT, both belong to the same linear layer."""
    from lamella import registry

    encoder = tiny_encoder("distilbert").encoder
    registry.build("tuning", {"name": "lora", "targets": ["attention_output"]}, encoder)
    registry.build("tuning", "adapter", encoder)
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
        before = encoder(tiny_batch("distilbert"), [encoder.depth]).layers[-1]
        assert merge(encoder)
        after = encoder(tiny_batch("distilbert"), [encoder.depth]).layers[-1]
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
