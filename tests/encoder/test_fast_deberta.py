"""DeBERTa with distances computed once: the same hidden states and gradients as transformers, for every variant."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import DebertaV2ForQuestionAnswering, DebertaV2Model

from doubles import corpus, examples_about, save_tiny_encoder, tiny_config, tiny_run_config
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import pad
from lamella.encoder import fast_deberta
from lamella.export.onnx_export import export_onnx
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS: dict[str, dict[str, Any]] = {
    "v3": {},
    "buckets for long texts": {"position_buckets": 256, "max_position_embeddings": 512},
    "own projections of positions": {"share_att_key": False},
    "query sees position": {"pos_att_type": ["c2p"]},
    "key sees position": {"pos_att_type": "p2c", "share_att_key": False},
    "every distance for itself": {"position_buckets": -1},
    "distances with a limit": {"position_buckets": -1, "max_relative_positions": 5},
    "v2 with a convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "absolute positions and token types": {"position_biased_input": True, "type_vocab_size": 2},
    "absolute positions only": {"relative_attention": False, "position_biased_input": True, "pos_att_type": None},
    "distances that nothing reads": {"pos_att_type": None},
    "narrow embeddings": {"embedding_size": 16, "norm_rel_ebd": "none"},
}


def pair(**options: Any) -> tuple[DebertaV2Model, DebertaV2Model]:
    """Return a model of transformers and a copy with our attention."""
    torch.manual_seed(0)
    stock = DebertaV2Model(tiny_config("deberta-v2", initializer_range=0.3, **options)).eval()
    ours = copy.deepcopy(stock)
    fast_deberta.use_distances(ours)
    return stock, ours


def run(model: DebertaV2Model, tokens: int = 40) -> tuple[Tensor, ...]:
    """Return all hidden layers, without the padding."""
    ids = torch.randint(5, 900, (3, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(tokens) < torch.tensor([tokens, tokens // 2, 1])[:, None]
    output = model(ids, attention_mask=mask.long(), token_type_ids=ids % 2, output_hidden_states=True)
    assert torch.equal(output.last_hidden_state, output.hidden_states[-1])
    return tuple(layer[mask] for layer in output.hidden_states)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_and_gradients_equal_transformers(variant: str) -> None:
    stock, ours = pair(**VARIANTS[variant])
    for actual, expected in zip(run(ours), run(stock), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for model in (stock, ours):
        weights = torch.randn(run(model)[-1].shape, generator=torch.Generator().manual_seed(2))
        (run(model)[-1] * weights).sum().backward()
    for (name, actual), (_, expected) in zip(ours.named_parameters(), stock.named_parameters(), strict=True):
        assert (actual.grad is None) is (expected.grad is None), name
        if actual.grad is not None:
            torch.testing.assert_close(actual.grad, expected.grad, msg=name, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 2, 17, 130])
def test_windows_of_every_length_equal_transformers(tokens: int) -> None:
    stock, ours = pair()
    torch.testing.assert_close(run(ours, tokens)[-1], run(stock, tokens)[-1], rtol=1e-4, atol=1e-4)


def test_distances_of_the_real_model_equal_transformers() -> None:
    """The buckets of DeBERTa-v3 beyond a distance of 128 are logarithmic, and rounded."""
    options = {"position_buckets": 256, "max_position_embeddings": 512, "num_hidden_layers": 1}
    stock, ours = pair(**options)
    with torch.no_grad():
        torch.testing.assert_close(run(ours, 512)[-1], run(stock, 512)[-1], rtol=1e-4, atol=1e-4)


def test_dropout_drops_what_transformers_drops() -> None:
    """Both draw the same random numbers in the same order, except for attention: its heads come first in ours."""
    stock, ours = pair(num_hidden_layers=1, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.4)
    layers = []
    for model in (stock, ours):
        torch.manual_seed(5)
        layers.append(run(model.train())[-1])
    torch.testing.assert_close(*layers, rtol=1e-4, atol=1e-4)


def test_attention_dropout_keeps_the_expected_output() -> None:
    _, ours = pair(num_hidden_layers=1, attention_probs_dropout_prob=0.3, hidden_dropout_prob=0.0)
    attention = ours.encoder.layer[0].attention.self
    query, bias = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 4)
    expected = attention._attend(query, query, query, bias)
    attention.train()
    drawn = torch.stack([attention._attend(query, query, query, bias) for _ in range(4000)])
    assert not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(drawn.mean(0), expected, atol=0.06, rtol=0)


def test_a_question_answering_model_of_transformers_gives_the_same_logits() -> None:
    torch.manual_seed(0)
    stock = DebertaV2ForQuestionAnswering(tiny_config("deberta-v2")).eval()
    ours = copy.deepcopy(stock)
    fast_deberta.use_distances(ours)
    ids = torch.randint(5, 900, (2, 20))
    for name in ("start_logits", "end_logits"):
        torch.testing.assert_close(ours(ids)[name], stock(ids)[name])


@pytest.mark.parametrize("variant", VARIANTS)
def test_kept_positions_change_nothing_and_are_not_saved(variant: str) -> None:
    ours = pair(**VARIANTS[variant])[1]
    before, names = run(ours), ours.state_dict().keys()
    fast_deberta.keep_positions(ours)
    for linear in ("query_proj", "key_proj"):
        ours.encoder.layer[0].attention.self.get_submodule(linear).register_forward_hook(count := Calls())
        run(ours)
        assert count.calls == 1, "only the tokens are projected"
    assert all(torch.equal(a, b) for a, b in zip(run(ours), before, strict=True))
    assert ours.state_dict().keys() == names


def test_weights_that_tokens_and_positions_share_are_rounded_once(tmp_path: Path) -> None:
    """The quantiser of onnxruntime would transpose them for one of the two, and give other logits altogether."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "position_buckets": 256}  # too large to be folded
    base = save_tiny_encoder(tmp_path / "base", "deberta-v2", initializer_range=0.1, **sizes)
    ReaderModel(load_encoder(str(base)), tiny_run_config()).save(tmp_path / "model")
    export_onnx(tmp_path / "model", tmp_path / "int8", int8=True)
    model, rounded = (
        load_model(tmp_path / "model", backend="torch", device="cpu", precision="fp32"),
        load_model(tmp_path / "int8"),
    )
    padded = pad(features := featurise(examples_about(corpus()[:3]), model.tokenizer, model.windows), np.arange(3))
    assert len(features) >= 3
    expected, actual = (each.logits(padded)[:, padded.mask] for each in (model, rounded))
    assert np.corrcoef(expected.ravel(), actual.ravel())[0, 1] > 0.99


class Calls:
    """A hook that counts the calls of a module."""

    calls = 0

    def __call__(self, *arguments: Any) -> None:
        self.calls += 1


def test_the_replaced_model_can_be_pickled_and_has_the_same_tensors() -> None:
    stock, ours = pair()
    sent = pickle.loads(pickle.dumps(ours))
    assert torch.equal(run(sent)[-1], run(ours)[-1])
    assert type(sent.encoder) is fast_deberta.FastDebertaEncoder
    assert ours.state_dict().keys() == stock.state_dict().keys()


def test_the_bias_is_contiguous_as_the_kernels_require(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias whose rows are not contiguous has no kernel on a GPU: PyTorch then computes step by step, silently."""
    biases = []

    def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, **more: float) -> Tensor:
        biases.append(bias)
        return scaled_dot_product_attention(query, key, value, bias, **more)

    monkeypatch.setattr(fast_deberta, "scaled_dot_product_attention", attention)
    run(pair()[1])
    assert biases
    assert all(bias.is_contiguous() for bias in biases)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_has_a_kernel_for_it_and_reads_nothing_back() -> None:
    ours = pair()[1].cuda().train()
    ids = torch.randint(5, 900, (3, 32), device="cuda")
    mask = (torch.arange(32) < torch.tensor([32, 9, 1])[:, None]).long().cuda()
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]), torch.autocast("cuda", torch.bfloat16):
        ours(ids, attention_mask=mask)  # loads the libraries
        try:
            with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype
                torch.cuda.set_sync_debug_mode("error")
            ours(ids, attention_mask=mask).last_hidden_state.float().square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
