"""The tunings: exactly which parameters each trains in every family, and what each refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles import DEPTH, FAMILIES, HIDDEN, save_tiny_encoder, tiny_batch, tiny_encoder, tiny_run_config
from lamella import registry
from lamella.encoder.encoder import Encoder
from lamella.encoder.lora import Lora
from lamella.errors import ConfigError
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")

LAYERED = [family for family in FAMILIES if family != "albert"]

# The LayerNorms of a layer by name, not by class: an independent list to check against.
NORMS = {
    "albert": ("attention.LayerNorm", "full_layer_layer_norm"),
    "distilbert": ("sa_layer_norm", "output_layer_norm"),
    "eurobert": ("input_layernorm", "post_attention_layernorm"),
    "modernbert": ("attn_norm", "mlp_norm"),
    "mpnet": ("attention.LayerNorm", "output.LayerNorm"),
}
OUTER_NORMS = {
    "deberta-v2": ("embeddings.LayerNorm", "encoder.LayerNorm"),  # the latter for positions
    "eurobert": ("norm",),
    "modernbert": ("embeddings.norm", "final_norm"),
}
NO_BIASES = ("eurobert", "modernbert")
BERT_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")
PREFIX = {
    "albert": "model.encoder.albert_layer_groups.0.albert_layers.",
    "distilbert": "model.transformer.layer.",
    "eurobert": "model.layers.",
    "modernbert": "model.layers.",
}
SITES = {
    "albert": ("attention.output_dropout", "ffn_output"),
    "distilbert": ("attention.out_lin", "ffn.dropout"),
    "eurobert": ("self_attn.o_proj", "mlp"),
    "modernbert": ("attn.out_drop", "mlp"),
    "mpnet": ("attention.dropout", "output.dropout"),
}
BERT_SITES = ("attention.output.dropout", "output.dropout")
PROJECTIONS: dict[str, tuple[Any, ...]] = {
    "albert": ("attention.query", "attention.key", "attention.value", "attention.dense", "ffn", "ffn_output"),
    "deberta-v2": ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj",
                   "attention.output.dense", "intermediate.dense", "output.dense"),
    "distilbert": ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "ffn.lin1",
                   "ffn.lin2"),
    "eurobert": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                 ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    "modernbert": ("attn.Wqkv", "attn.Wqkv", "attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"),
    "mpnet": ("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o", "intermediate.dense",
              "output.dense"),
}  # fmt: skip
BERT_PROJECTIONS = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                    "intermediate.dense", "output.dense")  # fmt: skip
ALL_TARGETS = ("query", "key", "value", "attention_output", "ffn_input", "ffn_output")


def layers_of(family: str) -> int:
    """Return the number of layers with their own weights."""
    return 1 if family == "albert" else DEPTH


def layer_name(family: str, number: int) -> str:
    return f"{PREFIX.get(family, 'model.encoder.layer.')}{number}."


def names(encoder: Encoder) -> set[str]:
    return {name for name, _ in encoder.named_parameters()}


def trained(encoder: Encoder) -> set[str]:
    return {name for name, value in encoder.named_parameters() if value.requires_grad}


def norms(family: str) -> set[str]:
    """Return the parameters of all LayerNorms, including those outside of the layers."""
    modules = [f"model.{norm}" for norm in OUTER_NORMS.get(family, ("embeddings.LayerNorm",))]
    for number in range(layers_of(family)):
        modules += [layer_name(family, number) + norm for norm in NORMS.get(family, BERT_NORMS)]
    if family == "modernbert":
        modules.remove("model.layers.0.attn_norm")  # the embeddings have one
    parts = ("weight",) if family in NO_BIASES else ("weight", "bias")
    return {f"{module}.{part}" for module in modules for part in parts}


def changes(family: str, targets: Iterable[str], kind: str) -> dict[str, str]:
    """Return the LoRA or IA³ of the targets in all layers, with the target of each."""
    paths = dict(zip(ALL_TARGETS, PROJECTIONS.get(family, BERT_PROJECTIONS), strict=True))
    found = {}
    for number, target in itertools.product(range(layers_of(family)), targets):
        fused = list(paths.values()).count(paths[target]) > 1
        for path in [paths[target]] if isinstance(paths[target], str) else paths[target]:
            found[f"{layer_name(family, number)}{path}.{kind}_{target}" if fused else
                  f"{layer_name(family, number)}{path}.{kind}"] = target  # fmt: skip
    return found


def adapters(family: str, layers: Iterable[int], name: str = "adapter") -> set[str]:
    return {
        f"{layer_name(family, number)}{site}.{name}.{part}"
        for number in layers
        for site in SITES.get(family, BERT_SITES)
        for part in ("down.weight", "down.bias", "up.weight", "up.bias")
    }


def tune(family: str, tuning: str, **options: Any) -> tuple[Encoder, set[str]]:
    """Return a tuned tiny encoder, and the names of its parameters before the tuning."""
    encoder = tiny_encoder(family).encoder
    before = names(encoder)
    registry.build("tuning", {"name": tuning, **options}, encoder)
    return encoder, before


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_norm_trains_every_layer_norm_and_nothing_else(family: str) -> None:
    encoder, before = tune(family, "layer_norm")
    assert trained(encoder) == norms(family)
    assert norms(family) <= before


@pytest.mark.parametrize("family", NO_BIASES)
def test_biases_cannot_be_trained_where_there_are_none(family: str) -> None:
    assert "bitfit: this encoder has no biases; choose another." in refusal(family, "bitfit")
    for tuning in ("adapter", "lora"):
        assert "bias: this encoder has no biases; remove it" in refusal(family, tuning, also=["bias"])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NO_BIASES])
def test_bitfit_trains_every_bias_and_nothing_else(family: str) -> None:
    encoder, before = tune(family, "bitfit")
    assert trained(encoder) == {name for name in before if name.endswith(".bias")}
    values = dict(encoder.named_parameters())
    with_bias = {
        f"{name}.bias"
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None
    }
    assert trained(encoder) == with_bias
    assert all(values[name].ndim == 1 for name in with_bias)


@pytest.mark.parametrize("k", range(DEPTH + 1))
@pytest.mark.parametrize("family", LAYERED)
def test_top_k_trains_the_top_layers_and_every_layer_norm(family: str, k: int) -> None:
    encoder, before = tune(family, "top_k", k=k)
    top = tuple(layer_name(family, number) for number in range(DEPTH - k, DEPTH))
    expected = {name for name in before if name.startswith(top)} | norms(family) if k < DEPTH else before
    assert trained(encoder) == expected
    embeddings = {name for name in before if name.startswith(("model.embeddings.", "model.embed_tokens."))}
    embeddings -= norms(family)
    assert embeddings
    assert (embeddings <= trained(encoder)) is (k == DEPTH)
    assert k == DEPTH or not embeddings & trained(encoder)


@pytest.mark.parametrize("tuning", ["adapter", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_small_parts_are_trained_as_well(family: str, tuning: str) -> None:
    alone = trained(tune(family, tuning)[0])
    types = {"model.embeddings.token_type_embeddings.weight"}
    assert trained(tune(family, tuning, also=["layer_norm"])[0]) == alone | norms(family)
    encoder = tune(family, tuning)[0]
    if family not in NO_BIASES:
        biased = trained(tune(family, tuning, also=["bias"])[0])
        assert biased == alone | {name for name in names(encoder) if name.endswith(".bias")}
    if encoder.token_types:
        assert trained(tune(family, tuning, also=["token_types"])[0]) == alone | types
    else:
        assert "this encoder has no token type embeddings" in refusal(family, tuning, also=["token_types"])


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_trains_its_adapters_and_every_layer_norm(family: str) -> None:
    encoder, before = tune(family, "adapter", size=5)
    assert trained(encoder) == adapters(family, range(layers_of(family))) | norms(family)
    assert trained(encoder) - before == adapters(family, range(layers_of(family)))
    shapes = {name.partition(".adapter.")[2]: tuple(value.shape) for name, value in encoder.named_parameters()}
    assert shapes["down.weight"] == (5, HIDDEN)
    assert shapes["up.weight"] == (HIDDEN, 5)


@pytest.mark.parametrize(
    ("leave_out", "remaining"), [([1], [1, 2]), ([DEPTH], [0, 1]), ([1, 2], [2]), ([], [0, 1, 2]), ([2, 2], [0, 2])]
)
@pytest.mark.parametrize("family", LAYERED)
def test_adapters_can_be_left_out_of_layers(family: str, leave_out: list[int], remaining: list[int]) -> None:
    encoder, before = tune(family, "adapter", leave_out=leave_out)
    assert names(encoder) - before == adapters(family, remaining)
    assert trained(encoder) == adapters(family, remaining) | norms(family)


@pytest.mark.parametrize("k", [1, DEPTH])
@pytest.mark.parametrize("family", LAYERED)
def test_adapters_go_with_trained_top_layers(family: str, k: int) -> None:
    encoder, _ = tune(family, "adapter", k=k)
    plain, _ = tune(family, "top_k", k=k)
    assert trained(encoder) == trained(plain) | adapters(family, range(DEPTH))


@pytest.mark.parametrize("second", ["top_k", "adapter"])
@pytest.mark.parametrize("family", LAYERED)
def test_an_adapter_of_an_earlier_run_is_trained_with_its_layer(family: str, second: str) -> None:
    encoder, _ = tune(family, "adapter", size=5)
    registry.build("tuning", {"name": second, "k": 1}, encoder)
    top = layer_name(family, DEPTH - 1)
    new = adapters(family, range(DEPTH), "adapter_2") if second == "adapter" else set()
    assert trained(encoder) == {name for name in names(encoder) if name.startswith(top)} | norms(family) | new
    assert adapters(family, [DEPTH - 1]) <= trained(encoder)
    assert not adapters(family, range(DEPTH - 1)) & trained(encoder)


@pytest.mark.parametrize("targets", [None, ["key"], list(ALL_TARGETS)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_trains_two_matrices_for_every_target(family: str, targets: list[str] | None) -> None:
    encoder, before = tune(family, "lora", rank=3, **({"targets": targets} if targets else {}))
    expected = {
        f"{name}.{matrix}" for name in changes(family, targets or ("query", "value"), "lora") for matrix in "AB"
    }
    assert trained(encoder) == expected
    assert names(encoder) - expected == before
    for name, value in encoder.named_parameters():
        if name in expected and name.endswith("A"):
            assert value.shape[0] == 3


@pytest.mark.parametrize("targets", [None, ["query"], list(ALL_TARGETS)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_ia3_trains_one_vector_for_every_target(family: str, targets: list[str] | None) -> None:
    encoder, before = tune(family, "ia3", **({"targets": targets} if targets else {}))
    inner = 48
    found = changes(family, targets or ("key", "value", "ffn_output"), "ia3")
    expected = {f"{name}.factor": target for name, target in found.items()}
    assert trained(encoder) == expected.keys()
    assert names(encoder) - expected.keys() == before
    values = dict(encoder.named_parameters())
    widths = {"ffn_input": inner, "ffn_output": inner}  # the latter scales the input
    if family == "modernbert":
        widths["ffn_input"] = 2 * inner  # with the gate
    if family == "eurobert":
        widths |= {"key": HIDDEN // 2, "value": HIDDEN // 2}  # two heads of queries share one of keys
    assert all(values[name].shape == (widths.get(target, HIDDEN),) for name, target in expected.items())
    assert all((values[name] == 1).all() for name in expected)


def test_lora_is_exact_with_many_layers() -> None:
    encoder = tiny_encoder("bert", num_hidden_layers=24).encoder
    registry.build("tuning", {"name": "lora", "targets": ["ffn_output"]}, encoder)
    expected = {f"model.encoder.layer.{number}.output.dense.lora.{matrix}" for number in range(24) for matrix in "AB"}
    assert trained(encoder) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_full_and_frozen(family: str) -> None:
    encoder, before = tune(family, "full")
    assert trained(encoder) == before
    encoder, before = tune(family, "frozen")
    assert trained(encoder) == set()
    assert names(encoder) == before


@pytest.mark.parametrize("tuning", registry.names("tuning"))
def test_traits_match_the_effect_of_a_tuning(tuning: str) -> None:
    encoder, _ = tune("bert", tuning)
    assert registry.trait("tuning", tuning, "trains_encoder") is encoder.trainable
    has_lora = any(isinstance(module, Lora) for module in encoder.modules())
    assert registry.trait("tuning", {"name": tuning}, "low_rank") is has_lora


def test_a_pooler_is_trained_only_when_everything_is() -> None:
    import transformers

    from doubles import tiny_config

    for k, expected in ((0, False), (DEPTH - 1, False), (DEPTH, True)):
        encoder = Encoder(transformers.BertModel(tiny_config("bert")))
        registry.build("tuning", {"name": "top_k", "k": k}, encoder)
        assert ("model.pooler.dense.weight" in trained(encoder)) is expected


def refusal(family: str, tuning: str, **options: Any) -> str:
    """Return the error, which must have one line per problem."""
    encoder = tiny_encoder(family).encoder
    before = names(encoder)
    with pytest.raises(ConfigError) as caught:
        registry.build("tuning", {"name": tuning, **options}, encoder)
    assert names(encoder) == before  # nothing was inserted
    (line,) = caught.value.problems
    assert "\n" not in line
    return str(caught.value)


def test_more_layers_than_the_encoder_has() -> None:
    for tuning in ("top_k", "adapter"):
        message = refusal("bert", tuning, k=DEPTH + 1)
        assert message.endswith(
            f"encoder.tuning.k: 1 problem\n  expected at most {DEPTH}, the number of layers; got 4."
        )


@pytest.mark.parametrize("leave_out", [[0], [4], [1, 9]])
def test_layers_to_leave_out_that_do_not_exist(leave_out: list[int]) -> None:
    unknown = [layer for layer in leave_out if not 1 <= layer <= DEPTH]
    assert refusal("bert", "adapter", leave_out=leave_out).endswith(
        f"expected layers from 1 to {DEPTH}, got {unknown}."
    )


def test_tunings_that_albert_cannot_have() -> None:
    for tuning, options in [("top_k", {}), ("top_k", {"k": 0}), ("adapter", {"k": 1}), ("adapter", {"leave_out": [1]})]:
        assert "this encoder shares one layer's weights at every depth" in refusal("albert", tuning, **options)


@pytest.mark.parametrize(
    ("tuning", "options"),
    [
        ("top_k", {"k": -1}),
        ("top_k", {"k": 1.5}),
        ("adapter", {"size": 0}),
        ("adapter", {"leave_out": [-1]}),
        ("lora", {"targets": []}),
        ("lora", {"targets": ["pooler"]}),
        ("lora", {"rank": 0}),
        ("lora", {"dropout": 1.0}),
        ("ia3", {"targets": []}),
    ],
)
def test_options_out_of_bounds(tuning: str, options: dict[str, Any]) -> None:
    refusal("bert", tuning, **options)


def shake(model: ReaderModel, seed: int = 0) -> None:
    """Move every trained parameter, as training would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def cases() -> Iterable[Any]:
    """Yield every tuning with its defaults, and some with options, on every family; two in three are slow.

    The contract of tunings compares all tensors after saving, for every tuning on every family. The logits here add
    what is not a tensor, so that each tuning is checked on three or four families, and each family with five tunings.
    """
    specs: list[dict[str, Any]] = [{"name": name} for name in registry.names("tuning")]
    specs += [{"name": "top_k", "k": 0}, {"name": "top_k", "k": DEPTH}]
    specs += [{"name": "adapter", "leave_out": [2]}, {"name": "adapter", "k": 1, "size": 3, "zero": True}]
    specs += [{"name": "lora", "targets": list(ALL_TARGETS), "dropout": 0.2}, {"name": "ia3", "targets": ["query"]}]
    heads = [
        {"mixer": "last"},
        {"mixer": ["scalar_mix", {"name": "compress", "size": 4}], "skip": True, "layers": "all"},
        {"mixer": "multiplicative"},
        {"mixer": {"name": "compress", "size": 4, "shared": False}, "beside": ["average"], "task": "answerability"},
    ]
    for place, family in enumerate(FAMILIES):
        for number, spec in enumerate(specs):
            needs_layers = spec["name"] == "top_k" or spec.get("k") or spec.get("leave_out")
            refused = (family == "albert" and needs_layers) or (family in NO_BIASES and spec["name"] == "bitfit")
            if not refused:
                label = "-".join(str(value) for value in spec.values())
                marks = () if (place + number) % 3 == 0 else pytest.mark.slow
                yield pytest.param(family, spec, heads[number % len(heads)], id=f"{family}-{label}", marks=marks)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {family: save_tiny_encoder(folder / family, family) for family in FAMILIES}


@pytest.mark.parametrize(("family", "tuning", "learner"), list(cases()))
def test_logits_are_the_same_after_saving_and_loading(
    family: str, tuning: dict[str, Any], learner: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    batch = tiny_batch(family)
    config = tiny_run_config(encoder={"tuning": tuning}, learner=learner)
    model = ReaderModel(load_encoder(str(bases[family])), config).eval()
    start = logits(model, batch)
    shake(model)
    before = logits(model, batch)
    assert not torch.allclose(before, start)
    model.save(tmp_path / "model")
    loaded = ReaderModel.load(tmp_path / "model")
    assert torch.equal(logits(loaded, batch), before)
    assert trained(loaded.encoder) == trained(model.encoder)


@pytest.mark.parametrize(
    "second", [{"name": "adapter", "k": 1}, {"name": "top_k", "k": 2}], ids=lambda spec: spec["name"]
)
def test_a_model_that_trains_the_adapters_of_an_earlier_run_again(
    second: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    first = ReaderModel(load_encoder(str(bases["bert"])), tiny_run_config(encoder={"tuning": "adapter"}))
    shake(first)
    first.save(tmp_path / "first")
    batch, config = tiny_batch(), tiny_run_config(encoder={"tuning": second})
    model = ReaderModel(load_encoder(str(tmp_path / "first")), config).eval()
    shake(model, seed=1)
    model.save(tmp_path / "second")
    loaded = ReaderModel.load(tmp_path / "second")
    assert torch.equal(logits(loaded, batch), logits(model, batch))
    assert trained(loaded.encoder) == trained(model.encoder)
    unchanged, moved = (f"{layer_name('bert', number)}output.dropout.adapter.up.weight" for number in (0, DEPTH - 1))
    before, after = first.encoder.state_dict(), loaded.encoder.state_dict()
    assert torch.equal(after[unchanged], before[unchanged])
    assert not torch.equal(after[moved], before[moved])


def logits(model: ReaderModel, batch: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(batch)
    return output
