"""ModernBERT and EuroBERT: local attention, fused projections, heads that share keys, tokenizers without [CLS]."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from doubles import DEPTH, HIDDEN, save_tiny_encoder, tiny_batch, tiny_config, tiny_encoder, tiny_tokenizer
from lamella.data.windows.features import pair_template
from lamella.encoder.lora import Ia3, Lora, Part, changed_layers, changes_of, insert_change, merge_changes
from lamella.encoder.pretrained import load_pretrained, load_tokenizer
from lamella.encoder.sources import find_encoder
from lamella.encoder.tuning import frozen, full, lora, merge
from lamella.export.onnx_export import export_onnx
from lamella.models.loading import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

MODERN = ("eurobert", "modernbert")
PROJECTIONS: tuple[Any, ...] = ("query", "key", "value", "attention_output", "ffn_input", "ffn_output")


def stock(family: str) -> Any:
    """Return the model of transformers with the weights of the tiny encoder, and transformers' plain attention."""
    torch.manual_seed(0)
    auto: Any = transformers.AutoModel
    return auto.from_config(tiny_config(family), attn_implementation="eager").eval()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", MODERN)
def test_layers_equal_the_plain_attention_of_transformers(family: str, dropout: float, grad: bool) -> None:
    encoder, batch = tiny_encoder(family, attention_dropout=dropout).encoder, tiny_batch(family)
    (full if grad else frozen)(encoder)
    expected = stock(family)(batch.input_ids, attention_mask=batch.mask.long(), output_hidden_states=True).hidden_states
    for actual, layer in zip(encoder(batch, range(DEPTH + 1)).layers, expected, strict=True):
        torch.testing.assert_close(actual[batch.mask], layer[batch.mask], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", MODERN)
def test_layers_in_half_precision_are_near_those_in_full(family: str, precision: torch.dtype) -> None:
    """In half precision the masks have another form, which must hide the same tokens."""
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    with torch.no_grad():
        expected = encoder(batch, (DEPTH,)).layers[0][batch.mask]
        actual = encoder.to(precision)(batch, (DEPTH,)).layers[0][batch.mask].float()
    assert (actual - expected).abs().mean() < 0.03
    assert expected.abs().mean() > 0.5


def test_local_attention_sees_no_further_than_its_reach() -> None:
    """Only the middle layer is local: changing a token 9 away changes nothing in it, 8 away it does."""
    encoder, batch = tiny_encoder("modernbert").encoder, tiny_batch("modernbert", count=1, characters=240)
    attention = encoder.model.layers[1].attn
    seen: list[Tensor] = []
    attention.register_forward_hook(lambda module, arguments, output: seen.append(output[0]))

    def run(shift: int) -> Tensor:
        def change(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            output[:, 20] += shift
            return output

        handle = attention.Wqkv.register_forward_hook(change)
        with torch.no_grad():
            encoder(batch, (DEPTH,))
        handle.remove()
        return seen[-1]

    changed = ((run(0) - run(1)).abs() > 1e-6).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == list(range(12, 29))


def test_the_last_layer_is_normalised_and_the_others_are_not() -> None:
    for family in MODERN:
        encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
        layers = encoder(batch, range(DEPTH + 1)).layers
        output = encoder.model(batch.input_ids, attention_mask=batch.mask.long())
        torch.testing.assert_close(layers[-1][batch.mask], output.last_hidden_state[batch.mask], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(layers[-2].square().mean(-1), torch.ones(()), atol=0.1)
        lengths = layers[-1][batch.mask].square().mean(-1)
        torch.testing.assert_close(lengths, torch.ones(len(lengths)), atol=1e-3, rtol=0)


# --- parts of a fused layer


RELATIVES: list[dict[str, Any]] = [{}, {"rslora": True}, {"dora": True}, {"pissa": True}]


def fused_and_split(bias: bool = True) -> tuple[nn.Linear, list[nn.Linear]]:
    """Return a layer, and three layers with its rows."""
    torch.manual_seed(0)
    fused = nn.Linear(6, 12, bias=bias)
    split = []
    for part in range(3):
        layer = nn.Linear(6, 4, bias=bias)
        with torch.no_grad():
            layer.weight.copy_(fused.weight[4 * part : 4 * part + 4])
            if bias:
                layer.bias.copy_(fused.bias[4 * part : 4 * part + 4])
        split.append(layer)
    return fused, split


def move(change: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in change.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [*RELATIVES, {"ia3": True}], ids=str)
def test_a_change_of_a_part_equals_that_of_a_layer_of_its_own(kind: dict[str, Any], bias: bool) -> None:
    fused, split = fused_and_split(bias)
    for part in (0, 2):
        for layer in (Part(fused, "abc"[part], 4 * part, 4 * part + 4), split[part]):
            torch.manual_seed(part)
            options = {"rank": 2, "alpha": 3, **kind}
            change: Lora | Ia3 = Ia3(layer, inputs=False) if kind.get("ia3") else Lora(layer, **options)
            move(change, part)
            insert_change(layer, change)
    x = torch.randn(2, 5, 6)
    expected = torch.cat([layer(x) for layer in split], dim=-1)
    torch.testing.assert_close(fused(x), expected)
    assert len(changes_of(fused)) == 2
    copied = copy.deepcopy(fused)
    for layer in (fused, *split):
        layer(x).square().sum().backward()
    for ours, theirs in zip(changes_of(fused), (changes_of(split[0])[0], changes_of(split[2])[0]), strict=True):
        for (name, actual), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            torch.testing.assert_close(actual.grad, other.grad, msg=name)
    merge_changes(copied)
    assert set(copied.state_dict()) == ({"weight", "bias"} if bias else {"weight"})
    assert not copied._forward_hooks
    torch.testing.assert_close(copied(x), expected)


def test_lora_on_the_query_changes_the_rows_of_the_query() -> None:
    encoder = tiny_encoder("modernbert").encoder
    before = encoder.model.layers[0].attn.Wqkv.weight.clone()
    lora(encoder, rank=2, targets=["query"])
    layer = encoder.model.layers[0].attn.Wqkv
    move(changes_of(layer)[0], 0)
    merge_changes(layer)
    rows = (layer.weight != before).any(1)
    assert rows.tolist() == [True] * HIDDEN + [False] * 2 * HIDDEN


@pytest.mark.parametrize(
    "options",
    [
        {"rslora": True},
        {"dora": True},
        {"init": "pissa"},
        {"b_learning_rate_ratio": 16.0},
        {"rslora": True, "dora": True, "init": "pissa"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", MODERN)
def test_a_merged_encoder_equals_one_with_lora_at_every_projection(family: str, options: dict[str, Any]) -> None:
    encoder, batch = tiny_encoder(family).encoder, tiny_batch(family)
    plain = set(encoder.state_dict())
    lora(encoder, rank=2, targets=PROJECTIONS, **options)
    with torch.no_grad():
        start = encoder(batch, (DEPTH,)).layers[0][batch.mask]
        for seed, layer in enumerate(changed_layers(encoder.model).values()):
            for change in changes_of(layer):
                move(change, seed, scale=0.1)
        before = encoder(batch, (DEPTH,)).layers[0][batch.mask]
        assert merge(encoder)
        after = encoder(batch, (DEPTH,)).layers[0][batch.mask]
    assert (before - start).abs().mean() > 0.01
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert set(encoder.state_dict()) == plain
    assert not changed_layers(encoder.model)


# --- files


def test_a_tokenizer_without_cls_begins_with_another_token(tmp_path: Path) -> None:
    folder = save_tiny_encoder(tmp_path, "eurobert")
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    plain.cls_token = None
    plain.save_pretrained(folder)
    tokenizer = load_tokenizer(find_encoder(str(folder)))
    assert tokenizer.cls_token == "<|begin_of_text|>"
    assert pair_template(tokenizer) == pair_template(tiny_tokenizer("eurobert"))


def test_the_option_dropout_sets_every_rate(tmp_path: Path) -> None:
    encoder = load_pretrained(find_encoder(str(save_tiny_encoder(tmp_path, "modernbert"))), dropout=0.3)
    rates = {name: module.p for name, module in encoder.named_modules() if isinstance(module, nn.Dropout)}
    assert len(rates) == 1 + 2 * DEPTH
    assert set(rates.values()) == {0.3}
    assert all(layer.attn.attention_dropout == 0.3 for layer in encoder.model.layers)


def test_a_question_answering_model_of_transformers_is_exported_to_onnx(tmp_path: Path) -> None:
    """Its head has a layer of its own."""
    torch.manual_seed(0)
    transformers.ModernBertForQuestionAnswering(tiny_config("modernbert")).save_pretrained(tmp_path / "stock")
    tiny_tokenizer("modernbert").save_pretrained(tmp_path / "stock")
    shorter = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "stock", model_max_length=128)
    shorter.save_pretrained(tmp_path / "stock")
    written = export_onnx(tmp_path / "stock", tmp_path / "onnx", int8=True)
    assert "written, int8" in written[0]
    assert load_model(tmp_path / "onnx").windows.max_seq_length == 128
