"""The parameter counts that the papers print, for the same models built here without their weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

from lamella.encoder import tuning
from lamella.encoder.adapters import Adapter
from lamella.encoder.encoder import Encoder
from lamella.heads.head import Head

BERT = {  # the rest are the defaults of a BertConfig
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "base cased": {"vocab_size": 28996},
}
ALBERT_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
WHOLE = 335_143_938  # BERT-large with a span head: BERTVision's percentages refer to it

LP = {"name": "scalar_mix", "shared": True, "normalise": "softmax"}
AP = {"name": "average"}
A386 = {"name": "compress", "size": 386}
A64 = {"name": "compress", "size": 64}


def count(module: nn.Module, *, trained: bool = False) -> int:
    return sum(value.numel() for value in module.parameters() if value.requires_grad or not trained)


def make_head(mixer: Sequence[Any], *, depth: int = 24, width: int = 1024, task: str = "span", **options: Any) -> Head:
    with torch.device("meta"):
        return Head(depth, width, mixer=list(mixer), task={"name": task}, **options)


@functools.cache
def bert(size: str, *, pooler: bool) -> Encoder:
    with torch.device("meta"):
        return Encoder(BertModel(BertConfig(**BERT[size]), add_pooling_layer=pooler))


def unshared(stage: dict[str, Any]) -> dict[str, Any]:
    return {**stage, "shared": False}


# BERTVision's heads on the 25 layers of BERT-large: stages, skip, parameters, percentage as the paper prints it
SPAN_HEADS = [
    pytest.param([A386], False, 414_952, "0.1238", id="A386 shared"),
    pytest.param([A386], True, 417_000, "0.1244", id="A386 shared, skip"),
    pytest.param([unshared(A386)], False, 9_910_552, "2.9571", id="A386 unshared"),
    pytest.param([unshared(A386)], True, 9_912_600, "2.9577", id="A386 unshared, skip"),
    pytest.param([A64], False, 68_802, "0.0205", id="A64 shared"),
    pytest.param([A64], True, 70_850, "0.0211", id="A64 shared, skip"),
    pytest.param([unshared(A64)], False, 1_643_202, "0.4903", id="A64 unshared"),
    pytest.param([unshared(A64)], True, 1_645_250, "0.4909", id="A64 unshared, skip"),
    pytest.param([LP], False, 2_076, "0.0006", id="LP"),
    pytest.param([AP], False, 2_050, "0.0006", id="AP"),
    pytest.param([LP, A386], False, 396_450, "0.1183", id="LP + A386"),
    pytest.param([LP, A386], True, 398_498, "0.1189", id="LP + A386, skip"),
]


@pytest.mark.parametrize(("mixer", "skip", "parameters", "percentage"), SPAN_HEADS)
def test_span_heads_of_bertvision(mixer: list[Any], skip: bool, parameters: int, percentage: str) -> None:
    head = make_head(mixer, layers="all", skip=skip)
    assert head.layers == tuple(range(25))
    assert count(head) == parameters
    assert f"{100 * count(head) / WHOLE:.4f}" == percentage


def test_flat_compression_beside_the_compressed_pool_fits_the_printed_percentage() -> None:
    """The paper gives only "A386 shared skip Tenney pooling" and 0.242 %. This interpretation is ours, and fits."""
    head = make_head([A386], beside=[LP, A386], layers="all")
    assert count(head) == 2 * (1024 * 386 + 386) + 26 + 2 * (25 * 386 + 386) + 2 == 811_400
    assert 809_372 <= count(head) <= 812_724
    assert f"{100 * count(head) / WHOLE:.3f}" == "0.242"


@pytest.mark.parametrize(
    ("mixer", "skip", "parameters"),
    [
        pytest.param([LP], False, 2_077, id="tenney small"),
        pytest.param([LP, A386], True, 398_499, id="AdapterPooler-Tenney"),
        pytest.param([AP, A386], True, 398_472, id="AdapterPooler-Mean"),
    ],
)
def test_classification_heads_of_bertvision(mixer: list[Any], skip: bool, parameters: int) -> None:
    head = make_head(mixer, task="answerability", layers="pooled+all", skip=skip)
    assert len(head.layers) == 26
    assert count(head) == parameters


def test_bert_large_with_a_span_head() -> None:
    """The authors' encoder carried the pooler, which a span head does not read."""
    pooler = 1024 * 1024 + 1024
    plain = make_head([{"name": "last"}])
    assert count(bert("large", pooler=True)) + count(plain) == 335_141_888 + 2_050 == WHOLE
    assert count(bert("large", pooler=False)) + count(plain) == WHOLE - pooler


HULBURD_POOLER = 768 * 768 + 768


@pytest.mark.parametrize("pooler", [True, False])
@pytest.mark.parametrize(
    ("how", "options", "parameters"),
    [
        pytest.param(tuning.top_k, {"k": 0}, 39_938, id="L0"),
        pytest.param(tuning.top_k, {"k": 1}, 7_124_738, id="L1"),
        pytest.param(tuning.top_k, {"k": 3}, 21_294_338, id="L3"),
        pytest.param(tuning.top_k, {"k": 6}, 42_548_738, id="L6"),
        pytest.param(tuning.top_k, {"k": 12}, 108_311_810, id="L12"),
        pytest.param(tuning.adapter, {"size": 64}, 2_419_202, id="L0-A64"),  # 2,417,664 in print, without the head
        pytest.param(tuning.adapter, {"size": 768}, 28_388_354, id="L0-A768"),
        pytest.param(tuning.adapter, {"size": 64, "k": 12}, 110_691_074, id="L12-A64"),
    ],
)
def test_freezing_and_adapters_of_hulburd(how: Any, options: dict[str, int], parameters: int, pooler: bool) -> None:
    """BERT-base cased. L12 trains everything, in the authors' code the pooler too, though no span head reads it."""
    encoder = copy.deepcopy(bert("base cased", pooler=pooler))
    with torch.device("meta"):
        how(encoder, **options)
    head = make_head([{"name": "last"}], depth=12, width=768)
    unused = 0 if pooler or options.get("k") != 12 else HULBURD_POOLER
    assert HULBURD_POOLER == 590_592
    assert count(encoder, trained=True) + count(head, trained=True) == parameters - unused


def test_the_components_of_hulburds_counts() -> None:
    encoder = bert("base cased", pooler=False)
    layer = encoder.layer_modules[0]
    norms = [module for module in encoder.modules() if isinstance(module, nn.LayerNorm)]
    assert count(layer) == 7_087_872
    assert sum(count(norm) for norm in norms) == 38_400
    assert count(make_head([{"name": "last"}], depth=12, width=768)) == 1_538


@pytest.mark.parametrize(("width", "size", "parameters"), [(768, 64, 99_136), (768, 768, 1_181_184), (32, 5, 357)])
def test_an_adapter_has_2hm_m_h_parameters(width: int, size: int, parameters: int) -> None:
    assert count(Adapter(width, size)) == 2 * width * size + size + width == parameters


@pytest.mark.parametrize(
    ("stage", "parameters"),
    [
        pytest.param({"name": "scalar_mix"}, 26, id="weighted"),
        pytest.param({"name": "scalar_mix", "normalise": "softmax"}, 26, id="weighted, softmax"),
        pytest.param({"name": "dot"}, 0, id="dot"),
        pytest.param({"name": "multiplicative"}, 589_824, id="multiplicative"),
        pytest.param({"name": "multiplicative", "shared": False}, 2 * 589_824, id="multiplicative, two matrices"),
        pytest.param({"name": "encoder_block"}, 7_087_872, id="encoder"),
    ],
)
def test_mixers_of_the_pce_paper(stage: dict[str, Any], parameters: int) -> None:
    """12 layers of width 768, with separate start and end; the block is as large as one of BERT-base."""
    head = make_head([stage], depth=12, width=768)
    assert head.layers == tuple(range(1, 13))
    assert count(head.stages) == parameters
    assert count(head.task) == 1_538


def test_the_encoder_of_the_pce_paper() -> None:
    config = AlbertConfig(vocab_size=30_000, embedding_size=128, **ALBERT_BASE)
    with torch.device("meta"):
        assert count(AlbertModel(config)) == 11_683_584
        assert count(AlbertModel(config, add_pooling_layer=False)) == 11_092_992
