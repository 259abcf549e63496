"""LoRA, its relatives and IA³ compared with peft: equal outputs, gradients and merged weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from doubles import save_tiny_encoder, tiny_batch, tiny_encoder, tiny_model, tiny_run_config
from lamella.encoder.lora import Ia3, Lora, change_of, changed_layers, insert_change, merge_changes
from lamella.encoder.tuning import merge
from lamella.errors import ConfigError, UsageError
from lamella.export.half import halve
from lamella.inference.one_pass import share_encoders
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.testing.tuning_checks import train_steps

# our options of LoRA, and those of peft
RELATIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "rslora": ({"rslora": True}, {"use_rslora": True}),
    "dora": ({"dora": True}, {"use_dora": True}),
    "pissa": ({"pissa": True}, {"init_lora_weights": "pissa"}),
    "dora, pissa, rslora": (
        {"dora": True, "pissa": True, "rslora": True},
        {"use_dora": True, "init_lora_weights": "pissa", "use_rslora": True},
    ),
}
KINDS = (*RELATIVES, "ia3", "ia3 of inputs")
TUNINGS: list[dict[str, Any]] = [
    {"name": "ia3"},
    {"name": "lora"},
    {"name": "lora", "rslora": True},
    {"name": "lora", "dora": True},
    {"name": "lora", "init": "pissa"},
    {"name": "lora", "dora": True, "init": "pissa", "targets": ["value", "ffn_output"]},
]
each_tuning = pytest.mark.parametrize("tuning", TUNINGS, ids=lambda spec: "-".join(map(str, spec.values())))


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
    if kind in RELATIVES:
        own_options, peft_options = RELATIVES[kind]
        change = Lora(ours, rank=2, alpha=5, **own_options)
        config: Any = peft.LoraConfig(r=2, lora_alpha=5, lora_dropout=0.0, target_modules=["layer"], **peft_options)
    else:
        inputs = kind != "ia3"
        change = Ia3(ours, inputs=inputs)
        config = peft.IA3Config(target_modules=["layer"], feedforward_modules=["layer"] if inputs else [])
    insert_change(ours, change)
    peft.inject_adapter_in_model(config, peft_model)
    wrapped: Any = peft_model.layer
    if isinstance(change, Lora):
        pairs = [(change.A, wrapped.lora_A["default"].weight), (change.B, wrapped.lora_B["default"].weight)]
        starts = [change.A0, change.B0] if change.pissa else [torch.zeros(()), torch.zeros(())]
        if change.m is not None:
            pairs.append((change.m, wrapped.lora_magnitude_vector["default"].weight))
            starts.append(layer.weight.norm(dim=1))
    else:
        pairs, starts = [(change.factor, wrapped.ia3_l["default"])], [torch.zeros(())]
    for (own, reference), start in zip(pairs, starts, strict=True):
        value = torch.randn(own.shape)
        own.data.copy_(value)
        reference.data.copy_((start + value).view(reference.shape))
    return ours, peft_model, pairs


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_peft(kind: str, half: bool) -> None:
    ours, peft_model, pairs = both(kind)
    x = torch.randn(3, 5, 6)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        actual, expected = ours(x), peft_model(x)
    assert actual.dtype == (torch.bfloat16 if half else torch.float32)  # of peft with DoRA: always float32
    tolerance = {"rtol": 0.05, "atol": 0.1} if half else {}  # we round once where peft rounds twice
    torch.testing.assert_close(actual, expected.to(actual.dtype), **tolerance)
    for output in (actual, expected):
        output.square().sum().backward()
    for own, reference in pairs:
        assert own.grad is not None
        assert reference.grad is not None
        allowed = {"rtol": 0.1, "atol": 2} if tolerance else {"rtol": 1e-5, "atol": 1e-4}
        torch.testing.assert_close(own.grad, reference.grad.view(own.shape), **allowed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_layer_is_plain_and_has_the_weights_of_peft(kind: str) -> None:
    ours, peft_model, _ = both(kind)
    x = torch.randn(3, 6)
    before = ours(x)
    merge_changes(ours)
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
    merge_changes(other)
    assert torch.equal(layer(x), before)
    merge_changes(layer)
    torch.testing.assert_close(layer(x), before)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", RELATIVES)
def test_lora_starts_unchanged_and_applies_dropout_to_its_own_branch_only(kind: str, bias: bool) -> None:
    layer = nn.Linear(6, 4, bias=bias)
    x = torch.randn(3, 6)
    plain = layer(x)
    insert_change(layer, Lora(layer, rank=2, alpha=4, dropout=0.5, **RELATIVES[kind][0]))
    assert torch.equal(layer(x), plain)
    with torch.no_grad():
        change_of(layer).B.normal_()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_pissa_starts_from_the_largest_singular_values() -> None:
    """By hand: of diag(3, 2, 1), the first two."""
    layer = nn.Linear(3, 3)
    layer.weight.data = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    lora = Lora(layer, rank=2, alpha=8, pissa=True)
    torch.testing.assert_close(lora.scale * lora.B0 @ lora.A0, torch.diag(torch.tensor([3.0, 2.0, 0.0])))
    torch.testing.assert_close(lora.A0.square().sum(1), lora.B0.square().sum(0))


def test_pissa_expects_a_rank_that_the_weights_have() -> None:
    with pytest.raises(ConfigError, match="expected at most 32, the rank of these weights, for pissa; got 33"):
        tiny_model(encoder={"tuning": {"name": "lora", "rank": 33, "init": "pissa"}})


def test_a_saved_pissa_depends_on_no_decomposition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading neither repeats the slow decomposition nor depends on its result, which another machine may not have."""
    from lamella.encoder import lora

    base = save_tiny_encoder(tmp_path / "base")
    tuning = {"name": "lora", "init": "pissa"}
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": tuning}))
    train_steps(model, "bert", steps=2)
    model.save(tmp_path / "model")
    monkeypatch.setattr(lora, "nearest_of_rank", None)
    with torch.no_grad():
        assert torch.equal(ReaderModel.load(tmp_path / "model")(tiny_batch()), model(tiny_batch()))


@each_tuning
def test_half_precision_rounds_the_change_only(tuning: dict[str, Any], tmp_path: Path) -> None:
    """A halved model is nearer to the original than its change is large, also where the weights are much larger."""
    base = save_tiny_encoder(tmp_path / "base")
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": tuning})).eval()
    plain = load_encoder(str(base)).encoder
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn(parameter.shape))
    model.save(tmp_path / "model")
    halve(tmp_path / "model", tmp_path / "half")
    rounded = ReaderModel.load(tmp_path / "half").encoder
    with torch.no_grad():
        start, tuned, half = (
            encoder.eval()(tiny_batch(), [encoder.depth]).layers[-1] for encoder in (plain, model.encoder, rounded)
        )
    if tuning["name"] == "lora":
        assert (half - tuned).norm() < 2e-3 * (tuned - start).norm()
    else:  # a factor near 1 is rounded as a whole
        assert (half - tuned).norm() < 0.2 * (tuned - start).norm()


@each_tuning
def test_a_model_for_inference_is_merged_and_one_for_training_is_not(tuning: dict[str, Any], tmp_path: Path) -> None:
    base = save_tiny_encoder(tmp_path / "base")
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": tuning})).eval()
    with torch.no_grad():
        for layer in changed_layers(model.encoder.model).values():
            for parameter in change_of(layer).parameters():
                parameter.add_(torch.randn(parameter.shape) / 3)
    model.save(tmp_path / "model")
    merged, whole = (
        load_model(tmp_path / "model", device="cpu", precision="fp32", backend="torch", inference_only=inference_only)
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
@each_tuning
def test_training_in_half_precision(tuning: dict[str, Any], target: str) -> None:
    model = tiny_model(layers=1, encoder={"tuning": {**tuning, "targets": [target]}}).train()
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
    model = load_model(tmp_path / "model", device="cpu", precision=precision, backend="torch", inference_only=True)
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
    models = [
        load_model(tmp_path / "model", device="cpu", precision="fp32", backend="torch", inference_only=True)
        for _ in range(2)
    ]
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
