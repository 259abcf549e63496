"""Every mixer and adapter against its formula, computed in numpy."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from doubles import DEPTH, FAMILIES, HIDDEN, corpus, examples_about, tiny_batch, tiny_encoder, tiny_run_config
from lamella import registry
from lamella.data.windows.batches import Batch, collate
from lamella.data.windows.features import featurise
from lamella.encoder import tuning
from lamella.encoder.adapters import Adapter
from lamella.encoder.encoder import Encoder, HiddenStates
from lamella.encoder.sources import packaged_encoder
from lamella.heads.head import Head, LayerWeights
from lamella.models.base_encoder import load_encoder

pytestmark = pytest.mark.usefixtures("one_thread")

Array = NDArray[np.float64]
L, B, T, H, O = 4, 3, 5, 8, 2  # noqa: E741
TASKS = ("span", "answerability")
REAL = "all-MiniLM-L6-v2"


def make_head(*mixer: Any, task: str = "span", layers: Any = "encoder", **options: Any) -> Head:
    """Return a head with random parameters."""
    torch.manual_seed(0)
    stages = [{"name": stage} if isinstance(stage, str) else stage for stage in mixer]
    head = Head(L, H, mixer=stages, task={"name": task}, layers=layers, **options).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.5)
    return head


def make_hidden(head: Head, *, seed: int = 1) -> HiddenStates:
    """Return random layers, all different, and the same for every head."""
    generator = torch.Generator().manual_seed(seed)
    everything = [torch.randn(B, T, H, generator=generator) for _ in range(L + 1)]
    pooled = torch.randn(B, H, generator=generator)
    mask = torch.ones(B, T, dtype=torch.bool)
    layers = tuple(everything[layer] for layer in head.layers if layer >= 0)
    return HiddenStates(layers, mask, mask, pooled if -1 in head.layers else None)


def array(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def selected(head: Head, hidden: HiddenStates) -> Array:
    """Return the layers that the main stages read, in order: [C, B, T, H]; T = 1 for a task that reads [CLS]."""
    by_number = {layer: array(h) for layer, h in zip([n for n in head.layers if n >= 0], hidden.layers, strict=True)}
    if hidden.pooled is not None:
        by_number[-1] = np.repeat(array(hidden.pooled)[:, None], T, axis=1)
    stacked = np.stack([by_number[layer] for layer in head.main_layers])
    return stacked[:, :, :1] if head.at_cls else stacked


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def softmax(z: Array, axis: int = 0) -> Array:
    powers = np.exp(z - z.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def layer_norm(x: Array, norm: nn.LayerNorm) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.eps)
    return scaled * array(norm.weight) + array(norm.bias)


def linear(x: Array, layer: nn.Linear) -> Array:
    return x @ array(layer.weight).T + array(layer.bias)


def output(head: Head, x: Array) -> Array:
    """The task's q_o · x_o + b_o for the mixed input of every output: [O, B, T, W] -> [O, B, T]."""
    q, b = array(head.task.q), array(head.task.b)
    return np.stack([x[o] @ q[o] + b[o] for o in range(O)])


def assert_equal(actual: Tensor, expected: Array) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(array(actual), expected, atol=1e-5, rtol=1e-5)


LINEAR = [  # every mixer that weighs layers, and its forms
    "last",
    "average",
    "first_last",
    {"name": "scalar_mix"},
    {"name": "scalar_mix", "shared": True},
    {"name": "scalar_mix", "normalise": "softmax"},
    {"name": "scalar_mix", "shared": True, "normalise": "softmax"},
    "dot",
    "multiplicative",
    {"name": "multiplicative", "shared": False},
]


def numpy_weights(name: str, stage: Any, h: Array, q: Array) -> Array:
    """w[O, C, B, T] of a mixer that sums layers, token by token."""
    C, rows, tokens = h.shape[:3]
    w = np.zeros((O, C, rows, tokens))
    for o, b, t in itertools.product(range(O), range(rows), range(tokens)):
        token = h[:, b, t]  # [C, H]
        if name == "last":
            w[o, -1, b, t] = 1
        elif name == "average":
            w[o, :, b, t] = 1 / C
        elif name == "first_last":
            w[o, 0, b, t] += 0.5
            w[o, -1, b, t] += 0.5
        elif name == "scalar_mix":
            own = min(o, len(stage.w) - 1)
            raw = array(stage.w)[own]
            w[o, :, b, t] = array(stage.gamma)[own] * (softmax(raw) if stage.normalise == "softmax" else raw)
        elif name == "dot":
            w[o, :, b, t] = softmax(token @ q[o])
        elif name == "multiplicative":
            matrix = array(stage.W)[min(o, len(stage.W) - 1)]
            w[o, :, b, t] = softmax(np.array([q[o] @ matrix @ layer for layer in token]))
        else:
            raise AssertionError(f"no formula for {name}")
    return w


def test_every_mixer_that_weighs_layers_is_tested() -> None:
    here = {spec if isinstance(spec, str) else spec["name"] for spec in LINEAR}
    kinds = {name: registry.part("mixer", name).make for name in registry.names("mixer")}
    assert here == {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, LayerWeights)}


@pytest.mark.parametrize("layers", ["encoder", "all", [3, 1]], ids=str)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("spec", LINEAR, ids=str)
def test_mixers_that_weigh_layers(spec: Any, task: str, layers: Any) -> None:
    head = make_head(spec, task=task, layers=layers)
    hidden = make_hidden(head)
    h, stage = selected(head, hidden), head.stages[0]
    w = numpy_weights(spec if isinstance(spec, str) else spec["name"], stage, h, array(head.task.q))
    expected = output(head, np.einsum("ocbt,cbtw->obtw", w, h))
    logits = head(hidden)
    assert_equal(logits, expected)

    # The same when the sum is computed, as for a stage that follows.
    x = torch.from_numpy(h).float()[None]
    mixed = stage(x, hidden, head.task.q)
    assert mixed.shape[1:] == (1, *h.shape[1:])
    assert len(mixed) == stage.out_shape.streams
    built = head.task(mixed[:, 0])
    torch.testing.assert_close(logits, built, atol=1e-5, rtol=1e-5)

    # The weights that the analyses show are those behind the logits.
    shown = head.layer_weights(hidden)
    assert shown is not None
    assert_equal(shown, w)
    assert_equal(logits, output(head, np.einsum("ocbt,cbtw->obtw", array(shown), h)))


@pytest.mark.parametrize("spec", ["dot", "multiplicative", "encoder_block", "average", "first_last", "last"])
def test_weights_of_layers_add_up_to_one(spec: str) -> None:
    head = make_head(spec)
    shown = head.layer_weights(make_hidden(head))
    assert shown is not None
    torch.testing.assert_close(shown.sum(1), torch.ones(O, B, T))
    assert (shown >= 0).all()


@pytest.mark.parametrize("shared", [True, False])
def test_the_softmax_form_of_scalar_mix_adds_up_to_gamma(shared: bool) -> None:
    head = make_head({"name": "scalar_mix", "normalise": "softmax", "shared": shared})
    shown = head.layer_weights(make_hidden(head))
    assert shown is not None
    torch.testing.assert_close(shown.sum(1), head.stages[0].gamma[:, None, None].expand(O, B, T))


@pytest.mark.parametrize("normalise", ["none", "softmax"])
@pytest.mark.parametrize("shared", [True, False])
def test_scalar_mix_starts_as_the_average(normalise: str, shared: bool) -> None:
    spec = {"name": "scalar_mix", "normalise": normalise, "shared": shared}
    head = Head(L, H, mixer=[spec], task={"name": "span"})
    average = Head(L, H, mixer=[{"name": "average"}], task={"name": "span"})
    average.task.load_state_dict(head.task.state_dict())
    hidden = make_hidden(head)
    torch.testing.assert_close(head(hidden), average(hidden))


def test_the_weights_of_a_head_that_reads_the_pooled_output() -> None:
    head = make_head("scalar_mix", task="answerability", layers="pooled+all")
    hidden = make_hidden(head)
    shown = head.layer_weights(hidden)
    assert shown is not None
    assert shown.shape == (O, L + 2, B, 1)
    assert_equal(head(hidden), output(head, np.einsum("ocbt,cbtw->obtw", array(shown), selected(head, hidden))))


def test_a_head_without_layer_weights_returns_none() -> None:
    head = make_head("compress")
    assert head.layer_weights(make_hidden(head)) is None


@pytest.mark.parametrize("task", TASKS)
def test_a_logit_of_dot_is_the_sum_of_softmax_z_times_z(task: str) -> None:
    head = make_head("dot", task=task)
    hidden = make_hidden(head)
    z = np.einsum("cbth,oh->ocbt", selected(head, hidden), array(head.task.q))
    assert_equal(head(hidden) - head.task.b[:, None, None], (softmax(z, axis=1) * z).sum(1))


@pytest.mark.parametrize("heads", [None, 1, 2, 4])
@pytest.mark.parametrize("task", TASKS)
def test_encoder_block(task: str, heads: int | None) -> None:
    spec = {"name": "encoder_block", **({"heads": heads} if heads else {})}
    head = make_head(spec, task=task)
    hidden = make_hidden(head)
    h, block, q = selected(head, hidden), head.stages[0], array(head.task.q)
    N = heads or 1
    D = H // N
    mixed = np.zeros((O, *h.shape[1:]))
    for o, b, t in itertools.product(range(O), *map(range, h.shape[1:3])):
        query, key, value = linear(q[o], block.query), linear(h[:, b, t], block.key), linear(h[:, b, t], block.value)
        attended = np.zeros(H)
        for n in range(N):
            part = slice(n * D, (n + 1) * D)
            weights = softmax(key[:, part] @ query[part] / math.sqrt(D))  # over the layers of this token
            attended[part] = weights @ value[:, part]
        a = layer_norm(q[o] + linear(attended, block.output), block.attention_norm)
        mixed[o, b, t] = layer_norm(a + linear(gelu(linear(a, block.inner)), block.outer), block.norm)
    assert_equal(head(hidden), output(head, mixed))


def compressed(h: Array, stage: Any) -> Array:
    """[C, B, T, W] -> [B, T, C · size], layer after layer."""
    A, b = array(stage.A), array(stage.b)
    narrow = [gelu_tanh(layer @ A[min(i, len(A) - 1)] + b[min(i, len(b) - 1)]) for i, layer in enumerate(h)]
    return np.concatenate(narrow, -1)


def twice(x: Array) -> Array:
    return np.stack([x] * O)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_compress(task: str, shared: bool, skip: bool) -> None:
    head = make_head({"name": "compress", "size": 3, "shared": shared}, task=task, skip=skip, layers="all")
    hidden = make_hidden(head)
    h = selected(head, hidden)
    x = compressed(h, head.stages[0])
    if skip:
        x = np.concatenate([x, h[-1]], -1)
    assert_equal(head(hidden), output(head, twice(x)))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_compress_after_scalar_mix_skips_the_last_layer_of_the_encoder(task: str, shared: bool) -> None:
    """Not the last layer that the stages read, nor the output of scalar_mix: both have the same width."""
    mix = {"name": "scalar_mix", "shared": shared}
    head = make_head(mix, {"name": "compress", "size": 3}, task=task, skip=True, layers=[0, 2])
    assert head.layers == (0, 2, L)
    hidden = make_hidden(head)
    h = selected(head, hidden)
    w = numpy_weights("scalar_mix", head.stages[0], h, array(head.task.q))
    last = array(hidden.layers[-1])[:, : h.shape[2]]
    mixed = np.einsum("ocbt,cbtw->obtw", w, h)
    x = np.stack([np.concatenate([compressed(mixed[None, o], head.stages[1]), last], -1) for o in range(O)])
    assert_equal(head(hidden), output(head, x))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_beside_is_concatenated_after_the_main_stages_and_before_the_skip(task: str, skip: bool) -> None:
    """The main stages have one stream; the stages beside have two, for start and end."""
    head = make_head(
        {"name": "compress", "size": 3},
        beside=[{"name": "scalar_mix"}, {"name": "compress", "size": 2}],
        task=task,
        skip=skip,
    )
    hidden = make_hidden(head)
    h = selected(head, hidden)
    main = compressed(h, head.stages[0])
    w = numpy_weights("scalar_mix", head.beside[0], h, array(head.task.q))
    mixed = np.einsum("ocbt,cbtw->obtw", w, h)
    parts = [[main, compressed(mixed[None, o], head.beside[1])] + ([h[-1]] if skip else []) for o in range(O)]
    assert_equal(head(hidden), output(head, np.stack([np.concatenate(part, -1) for part in parts])))


def test_a_single_stream_beside_joins_several_main_streams() -> None:
    head = make_head("scalar_mix", beside=[{"name": "last"}])
    hidden = make_hidden(head)
    h = selected(head, hidden)
    mixed = np.einsum("ocbt,cbtw->obtw", numpy_weights("scalar_mix", head.stages[0], h, array(head.task.q)), h)
    assert_equal(head(hidden), output(head, np.concatenate([mixed, twice(h[-1])], -1)))


def test_pooling_can_follow_compress() -> None:
    for name in ("last", "average", "first_last"):
        head = make_head({"name": "compress", "size": 3}, name)
        hidden = make_hidden(head)
        narrow = np.split(compressed(selected(head, hidden), head.stages[0]), L, axis=-1)
        weights = numpy_weights(name, None, np.stack(narrow), array(head.task.q))
        assert_equal(head(hidden), output(head, np.einsum("ocbt,cbtw->obtw", weights, np.stack(narrow))))


def adapted(x: Array, adapter: Adapter) -> Array:
    return x + linear(gelu_tanh(linear(x, adapter.down)), adapter.up)


def shake(encoder: Encoder, part: str, std: float = 0.3) -> None:
    """Set the parameters whose names contain `part` to large random values."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if part in name:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))


def test_an_adapter() -> None:
    torch.manual_seed(0)
    adapter, x = Adapter(8, 3), torch.randn(2, 5, 8)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_()
    assert_equal(adapter(x), adapted(array(x), adapter))


def test_how_an_adapter_starts() -> None:
    torch.manual_seed(0)
    adapter = Adapter(400, 64)
    for layer in (adapter.down, adapter.up):
        assert not layer.bias.any()
        assert layer.weight.abs().max() <= 2e-3
        assert layer.weight.std().item() == pytest.approx(0.88e-3, rel=0.02)  # truncated at two deviations
    assert not Adapter(8, 3, zero=True).up.weight.any()
    assert Adapter(8, 3, zero=True).down.weight.any()


def numpy_layer(x: Array, layer: Any, heads: int) -> Array:
    """Return the output of a BERT layer with adapters for a window without pads, [T, H]."""
    own, size = layer.attention.self, x.shape[1] // heads
    query, key, value = (linear(x, projection) for projection in (own.query, own.key, own.value))
    attended = np.zeros_like(x)
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        attended[:, part] = softmax(query[:, part] @ key[:, part].T / math.sqrt(size), axis=1) @ value[:, part]
    first, second = layer.attention.output, layer.output
    a = layer_norm(adapted(linear(attended, first.dense), first.dropout.adapter) + x, first.LayerNorm)
    inner = gelu(linear(a, layer.intermediate.dense))
    return layer_norm(adapted(linear(inner, second.dense), second.dropout.adapter) + a, second.LayerNorm)


def test_a_layer_of_bert_with_adapters() -> None:
    encoder = tiny_encoder("bert").encoder
    tuning.adapter(encoder, size=5)
    shake(encoder, ".adapter.")
    batch = tiny_batch("bert", 1)
    length = int(batch.mask.sum())
    with torch.no_grad():
        states = [array(state)[0, :length] for state in encoder(batch, range(DEPTH + 1)).layers]
    for below, above, layer in zip(states, states[1:], encoder.layer_modules, strict=False):
        np.testing.assert_allclose(numpy_layer(below, layer, 4), above, atol=1e-5)


@pytest.mark.parametrize("half", ["attention.output", "output"])
def test_the_dropout_comes_before_the_adapter(half: str) -> None:
    """With the whole output of the dense layer dropped, adapter(0) is added to the residual, not 0."""
    encoder = tiny_encoder("bert", hidden_dropout_prob=0.0).encoder
    tuning.adapter(encoder, size=5)
    shake(encoder, ".adapter.")
    site: Any = encoder.layer_modules[0].get_submodule(half).train()
    site.dropout.p = 1.0
    x, residual = torch.randn(2, 5, HIDDEN), torch.randn(2, 5, HIDDEN)
    inner = torch.randn(2, 5, site.dense.in_features) if half == "output" else x
    expected = layer_norm(adapted(np.zeros((2, 5, HIDDEN)), site.dropout.adapter) + array(residual), site.LayerNorm)
    assert_equal(site(inner, residual), expected)


def change(encoder: Encoder, batch: Batch, tune: Any) -> Array:
    """Return how much an untrained tuning changes the output of each layer."""
    layers = range(encoder.depth + 1)
    encoder.eval()
    with torch.no_grad():
        before = encoder(batch, layers).layers
        tune(encoder)
        encoder.eval()
        after = encoder(batch, layers).layers
    real = batch.mask
    return np.array([(new - old)[real].abs().max().item() for old, new in zip(before, after, strict=True)])


@pytest.mark.parametrize("family", FAMILIES)
def test_where_tuning_starts(family: str) -> None:
    def starts(tune: Any) -> Array:
        return change(tiny_encoder(family).encoder, tiny_batch(family), tune)

    torch.manual_seed(0)
    everywhere = ["query", "key", "value", "attention_output", "ffn_input", "ffn_output"]
    assert not starts(lambda encoder: tuning.adapter(encoder, zero=True)).any()
    assert not starts(tuning.lora).any()
    assert not starts(lambda encoder: tuning.lora(encoder, targets=everywhere)).any()
    assert not starts(tuning.ia3).any()
    near = starts(tuning.adapter)
    assert 0 < near.max() < (1e-2 if family == "albert" else 1e-3)
    assert near[0] == 0  # the embeddings have no adapter


@pytest.mark.skipif(packaged_encoder(REAL) is None, reason="the bundled encoder is absent")
def test_where_tuning_starts_on_real_weights() -> None:
    loaded = load_encoder(REAL)
    features = featurise(examples_about(corpus()[:2]), loaded.tokenizer, tiny_run_config().windows)
    batch = collate(features, np.arange(2))

    def starts(tune: Any) -> Array:
        return change(copy.deepcopy(loaded.encoder), batch, tune)

    torch.manual_seed(0)
    assert 0 < starts(tuning.adapter).max() < 1e-3
    assert not starts(lambda encoder: tuning.adapter(encoder, zero=True)).any()
    assert not starts(tuning.lora).any()
    assert not starts(tuning.ia3).any()
