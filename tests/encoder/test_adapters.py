"""Adapters in an encoder: their places in every family, the weights they leave unchanged, how they stack."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from doubles import DEPTH, FAMILIES, HIDDEN, tiny_batch, tiny_encoder
from lamella.encoder import tuning
from lamella.encoder.adapters import Adapter, insert_adapter
from lamella.encoder.encoder import Encoder

pytestmark = pytest.mark.usefixtures("one_thread")

# The module whose output is adapted and the LayerNorm that follows it, for both halves of a layer.
SITES: dict[str, list[tuple[str, str | None]]] = {
    "albert": [("attention.output_dropout", "attention.LayerNorm"), ("ffn_output", "full_layer_layer_norm")],
    "distilbert": [("attention.out_lin", "sa_layer_norm"), ("ffn.dropout", "output_layer_norm")],
    "eurobert": [("self_attn.o_proj", "post_attention_layernorm"), ("mlp", None)],  # None: the layer above
    "modernbert": [("attn.out_drop", "mlp_norm"), ("mlp", None)],
    "mpnet": [("attention.dropout", "attention.LayerNorm"), ("output.dropout", "output.LayerNorm")],
}
BERT_SITES: list[tuple[str, str | None]] = [
    ("attention.output.dropout", "attention.output.LayerNorm"),
    ("output.dropout", "output.LayerNorm"),
]


def shake(encoder: Encoder, part: str) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if part in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_changes_what_is_added_to_the_residual(family: str) -> None:
    """What follows gets residual + adapter(output), with the output of the pretrained encoder."""
    encoder = tiny_encoder(family).encoder
    sites = SITES.get(family, BERT_SITES)
    for site, norm in sites:
        adapted = copy.deepcopy(encoder)
        tuning.adapter(adapted, size=5)
        shake(adapted, ".adapter.")
        first = adapted.layer_modules[0]
        for other, _ in sites:  # disable the other adapter, so that the input of this one is unchanged
            if other != site:
                silence(first.get_submodule(other))
        added, total = seen_at(encoder, family, site, norm)
        with torch.no_grad():
            expected = total - added + first.get_submodule(f"{site}.adapter")(added)
        assert (expected - total).abs().max() > 0.1
        torch.testing.assert_close(seen_at(adapted, family, site, norm)[1], expected, atol=1e-5, rtol=0)


def seen_at(encoder: Encoder, family: str, site: str, norm: str | None) -> list[Tensor]:
    """Return the output of a module of the first layer and the input of what follows (ALBERT: in its first run)."""
    watched = copy.deepcopy(encoder)
    layer, seen = watched.layer_modules[0], []
    layer.get_submodule(site).register_forward_hook(lambda module, arguments, output: seen.append(output))
    following = watched.layer_modules[1] if norm is None else layer.get_submodule(norm)
    following.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        watched(tiny_batch(family), (DEPTH,))
    return seen[:2]


def silence(site: nn.Module) -> None:
    with torch.no_grad():
        for parameter in site.get_submodule("adapter").parameters():
            parameter.zero_()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_weight_of_the_pretrained_encoder_is_renamed(family: str) -> None:
    encoder = tiny_encoder(family).encoder
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    tuning.adapter(encoder)
    after = encoder.state_dict()
    assert before.keys() <= after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    pairs = 1 if family == "albert" else DEPTH
    added = after.keys() - before.keys()
    assert len(added) == pairs * 2 * 4
    sites = [site for site, _ in SITES.get(family, BERT_SITES)]
    ends = [f"{site}.adapter.{part}" for site in sites for part in ("down.weight", "down.bias", "up.weight", "up.bias")]
    assert all(name.endswith(tuple(ends)) for name in added)


def test_adapters_of_one_site_are_applied_in_sequence() -> None:
    torch.manual_seed(0)
    site, x = nn.Linear(8, 8), torch.randn(2, 8)
    adapters = [Adapter(8, 3) for _ in range(4)]
    for adapter in adapters:
        nn.init.normal_(adapter.up.weight)
        nn.init.normal_(adapter.down.weight)
        insert_adapter(site, adapter)
    assert [name for name, _ in site.named_children()] == ["adapter", "adapter_2", "adapter_3", "adapter_4"]
    expected = nn.functional.linear(x, site.weight, site.bias)
    for adapter in adapters:
        expected = adapter(expected)
    torch.testing.assert_close(site(x), expected)


def test_a_copy_of_an_adapted_encoder_has_its_own_adapters() -> None:
    encoder, batch = tiny_encoder().encoder, tiny_batch()
    tuning.adapter(encoder)
    twin = copy.deepcopy(encoder)
    before = encoder(batch, (DEPTH,)).layers[0]
    shake(twin, ".adapter.")
    assert torch.equal(encoder(batch, (DEPTH,)).layers[0], before)
    assert not torch.allclose(twin(batch, (DEPTH,)).layers[0], before)


def test_the_adapters_of_a_shared_layer_apply_at_every_depth() -> None:
    encoder, batch = tiny_encoder("albert").encoder, tiny_batch("albert")
    plain = encoder(batch, range(DEPTH + 1)).layers
    tuning.adapter(encoder, size=5)
    calls: list[int] = []
    for module in encoder.modules():
        if isinstance(module, Adapter):
            module.register_forward_hook(lambda m, a, o: calls.append(1))
    shake(encoder, ".adapter.")
    adapted = encoder(batch, range(DEPTH + 1)).layers
    assert len(calls) == 2 * DEPTH
    assert torch.equal(adapted[0], plain[0])
    assert all(not torch.allclose(a, p) for a, p in zip(adapted[1:], plain[1:], strict=True))


def test_a_group_of_albert_may_run_several_layers() -> None:
    encoder, batch = tiny_encoder("albert", inner_group_num=2).encoder, tiny_batch("albert")
    assert (encoder.depth, len(encoder.layer_modules)) == (2 * DEPTH, 2)
    last = encoder(batch, (2 * DEPTH,)).layers[0]
    assert torch.equal(encoder(batch, range(2 * DEPTH + 1)).layers[-1], last)
    tuning.adapter(encoder, zero=True)
    assert sum(isinstance(module, Adapter) for module in encoder.modules()) == 4
    assert torch.equal(encoder(batch, (2 * DEPTH,)).layers[0], last)


def test_an_adapter_has_the_width_of_the_encoder() -> None:
    encoder = tiny_encoder("electra").encoder  # its embeddings are narrower
    tuning.adapter(encoder, size=7)
    adapters = [module for module in encoder.modules() if isinstance(module, Adapter)]
    assert len(adapters) == 2 * DEPTH
    assert {tuple(adapter.down.weight.shape) for adapter in adapters} == {(7, HIDDEN)}
