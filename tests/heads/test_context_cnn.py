"""Context-aware convolution: the authors' parameter count, its forms in numpy, fixed segments, export."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lamella import registry
from lamella.encoder.encoder import HiddenStates
from lamella.errors import ConfigError
from lamella.heads.context_cnn import ContextCNN
from lamella.heads.head import Head, StageShape

pytestmark = pytest.mark.usefixtures("one_thread")

W, LONGEST = 6, 30
LENGTHS = (30, 17, 11, 1)
SEGMENTS = {"segment": 10, "step": 5, "size": 0}  # 5 of them: [0, 10), [5, 15), … [20, 30)
FORMS: dict[str, dict[str, Any]] = {
    "segments": SEGMENTS,
    "narrowed": {**SEGMENTS, "size": 4, "kernel": 4, "filters": 3},
    "question": {**SEGMENTS, "filters_from": "question"},
    "vector": {"context": "vector", "maps": 7, "size": 0},
    "vector of the question": {"context": "vector", "maps": 7, "size": 0, "filters_from": "question", "kernel": 2},
    "none": {**SEGMENTS, "context": "none"},
}
every_form = pytest.mark.parametrize("form", FORMS)


def make(form: str, *, longest: int = LONGEST, **options: Any) -> ContextCNN:
    torch.manual_seed(0)
    shape = StageShape(streams=1, channels=1, width=W, outputs=2, longest=longest)
    stage: ContextCNN = registry.build("mixer", {"name": "context_cnn", **FORMS[form], **options}, shape)
    return stage.eval()


def make_input(
    lengths: tuple[int, ...] = LENGTHS, *, streams: int = 1, pads: int = 3, garbage: float = 40.0
) -> tuple[Tensor, HiddenStates]:
    """Windows of the given lengths whose first 4 tokens and last token are not context, with garbage at the pads."""
    B, T = len(lengths), max(lengths) + pads
    real = torch.randn(streams, 1, B, T - pads, W, generator=torch.Generator().manual_seed(1))
    places, ends = torch.arange(T), torch.tensor(lengths)[:, None]
    mask = places < ends
    x = torch.where(mask[..., None], nn.functional.pad(real, (0, 0, 0, pads)), garbage)
    return x, HiddenStates((), mask, (places >= 4) & (places < ends - 1))


def run(stage: ContextCNN, x: Tensor, hidden: HiddenStates) -> Tensor:
    output: Tensor = stage(x, hidden, torch.zeros(2, 2))
    return output


def test_the_parameter_count_is_the_authors() -> None:
    with torch.device("meta"):
        head = Head(12, 768, mixer=[{"name": "context_cnn", "size": 0}], task={"name": "span"}, longest=384)
    assert sum(value.numel() for value in head.parameters()) == 11_802_630
    assert head.stages[0].length == 6
    assert head.layers == (12,)


# The same in numpy, window by window and token by token, without pads.


def np_feature_maps(weights: dict[str, np.ndarray], text: np.ndarray, source: np.ndarray) -> np.ndarray:
    """relu(conv(text)) at the tokens that the filters are computed from, [T, maps]; 0 elsewhere."""
    kernel, bias = weights["conv.weight"], weights["conv.bias"]
    T, size = len(text), kernel.shape[2]
    maps = np.zeros((T, len(bias)))
    for t in np.flatnonzero(source):
        total = bias.copy()
        for k in range(size):
            at = t + k - (size - 1) // 2
            if 0 <= at < T and source[at]:
                total += kernel[:, :, k] @ text[at]
        maps[t] = np.maximum(total, 0)
    return maps


def np_filters(
    stage: ContextCNN, weights: dict[str, np.ndarray], text: np.ndarray, source: np.ndarray, count: int
) -> np.ndarray:
    """[length, width, n]"""
    width = text.shape[1]
    if stage.context == "none":
        return weights["bank"]
    maps = np_feature_maps(weights, text, source)
    if stage.context == "vector":
        z = maps.max(0)
        return (weights["spell_out.weight"] @ z + weights["spell_out.bias"]).reshape(-1, width, count)
    T = len(text)
    smoothed = np.stack([maps[max(0, t - 3) : t + 5].max(0) for t in range(T)])
    filters = np.zeros((5, width, count))
    for number, start in enumerate((0, 5, 10, 15, 20)):
        inside = [t for t in range(start, min(start + 10, T)) if source[t]]
        if inside:
            filters[number] = (smoothed[inside].max(0) + weights["bias"]).reshape(count, width).T
    return filters


def np_context_cnn(stage: ContextCNN, text: np.ndarray, is_context: np.ndarray) -> np.ndarray:
    """[T, n]"""
    weights = {name: value.detach().double().numpy() for name, value in stage.state_dict().items()}
    if "narrow.weight" in weights:
        text = text @ weights["narrow.weight"].T + weights["narrow.bias"]
    T = len(text)
    source = ~is_context if stage.filters_from == "question" else np.ones(T, dtype=bool)
    count = 2 * stage.out_shape.width
    filters = np_filters(stage, weights, text, source, count)
    out = np.zeros((T, count))
    for t in range(T):
        for k in range(len(filters)):
            at = t + k - (len(filters) - 1) // 2
            if 0 <= at < T:
                out[t] += text[at] @ filters[k]
    return out


@every_form
def test_it_equals_its_formula_for_every_window_without_its_pads(form: str) -> None:
    stage = make(form)
    x, hidden = make_input()
    output = run(stage, x, hidden)  # [2, 1, B, T, filters]
    assert output.shape == (2, 1, len(LENGTHS), LENGTHS[0] + 3, stage.out_shape.width)
    for row, length in enumerate(LENGTHS):
        text = x[0, 0, row, :length].double().numpy()
        expected = np_context_cnn(stage, text, hidden.is_context[row, :length].numpy())
        both = output[:, 0, row, :length].detach().permute(1, 0, 2).flatten(1).numpy()  # [T, n]
        np.testing.assert_allclose(both, expected, rtol=1e-4, atol=1e-4)


@every_form
def test_each_output_reads_its_own_stream(form: str) -> None:
    stage = make(form)
    x, hidden = make_input(streams=2)
    together = run(stage, x, hidden)
    for output in range(2):
        torch.testing.assert_close(together[output], run(stage, x[output : output + 1], hidden)[output])


def test_channels_are_concatenated() -> None:
    torch.manual_seed(0)
    apart = ContextCNN(StageShape(1, 3, 2, 2, LONGEST), **SEGMENTS)
    joined = ContextCNN(StageShape(1, 1, 6, 2, LONGEST), **SEGMENTS)
    joined.load_state_dict(apart.state_dict())
    x, hidden = make_input()
    split = x[0, 0].unflatten(-1, (3, 2)).movedim(-2, 0)[None]  # [1, 3, B, T, 2]
    torch.testing.assert_close(run(apart, split, hidden), run(joined, x, hidden))


@every_form
def test_pads_change_nothing_in_training(form: str) -> None:
    results = []
    for pads, garbage in ((0, 0.0), (9, -70.0)):
        stage = make(form).train()
        x, hidden = make_input((17, 11), pads=pads, garbage=garbage)
        output = run(stage, x, hidden)[:, :, hidden.mask]
        output.square().sum().backward()
        results.append([output, *(value.grad for value in stage.parameters())])
    for unpadded, padded in zip(*results, strict=True):
        torch.testing.assert_close(unpadded, padded, rtol=1e-4, atol=1e-4)


class TestFilters:
    def filters(self, form: str, x: Tensor, hidden: HiddenStates, source: Tensor | None = None) -> Tensor:
        return make(form)._compute_filters(x[0, 0], hidden.mask if source is None else source)

    def test_every_window_has_its_own_filters(self) -> None:
        x, hidden = make_input((12, 12), pads=0)
        for form in ("segments", "vector"):
            output = self.filters(form, x, hidden)
            assert not torch.allclose(output[0], output[1], atol=1e-3)

    def test_a_segment_without_tokens_gives_zero(self) -> None:
        x, hidden = make_input((30, 17, 10, 1), pads=0)
        used = self.filters("segments", x.masked_fill(~hidden.mask[..., None], 0), hidden).ne(0).any(-1).any(-1)
        expected = torch.tensor(
            [
                [True, True, True, True, True],  # up to [20, 30)
                [True, True, True, True, False],  # 17 tokens reach into [15, 25)
                [True, True, False, False, False],  # 10 tokens end before [10, 20)
                [True, False, False, False, False],
            ]
        )
        assert torch.equal(used, expected)

    @pytest.mark.parametrize(("longest", "length"), [(1, 1), (99, 1), (100, 1), (149, 1), (150, 2), (384, 6), (512, 9)])
    def test_the_length_is_the_number_of_segments_in_the_longest_window(self, longest: int, length: int) -> None:
        assert make("segments", longest=longest, segment=100, step=50).length == length

    @pytest.mark.parametrize("form", ["question", "vector of the question"])
    def test_filters_from_the_question_do_not_depend_on_the_context(self, form: str) -> None:
        x, hidden = make_input((20,))
        changed = torch.where(hidden.is_context[..., None], x + 5, x)
        outside = hidden.mask & ~hidden.is_context
        assert torch.equal(self.filters(form, x, hidden, outside), self.filters(form, changed, hidden, outside))
        third = x.clone()
        third[:, :, :, 1] += 5
        assert not torch.equal(self.filters(form, x, hidden, outside), self.filters(form, third, hidden, outside))

    def test_without_context_the_filters_do_not_depend_on_the_text(self) -> None:
        """The output is then linear in the text."""
        x, hidden = make_input()
        stage = make("none")
        torch.testing.assert_close(run(stage, 2 * x, hidden), 2 * run(stage, x, hidden))

    def test_filters_from_the_question_need_a_context(self) -> None:
        with pytest.raises(ConfigError, match=r"context_cnn\.filters_from: 'question' needs a context other than"):
            make("none", filters_from="question")


class _Plain(nn.Module):
    """A head as a function of tensors."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, layer: Tensor, mask: Tensor, is_context: Tensor) -> Tensor:
        logits: Tensor = self.head(HiddenStates((layer,), mask, is_context))
        return logits


def plain_head(form: str) -> _Plain:
    torch.manual_seed(0)
    mixer = [{"name": "context_cnn", **FORMS[form]}]
    return _Plain(Head(3, W, mixer=mixer, task={"name": "span"}, longest=LONGEST)).eval()


def plain_input(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    x, hidden = make_input(lengths)
    return x[0, 0], hidden.mask, hidden.is_context


def dynamic() -> tuple[dict[int, Any], ...]:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    return ({0: batch, 1: length},) * 3


@pytest.mark.parametrize("form", ["question", "vector", "none"])
def test_it_exports_with_dynamic_batch_and_length(form: str) -> None:
    head = plain_head(form)
    exported = torch.export.export(head, plain_input((9, 4, 12)), dynamic_shapes=dynamic()).module()
    for lengths in ((30, 3), (1,)):
        torch.testing.assert_close(exported(*plain_input(lengths)), head(*plain_input(lengths)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "form",
    [  # tests/export/test_onnx.py exports readers with segments, and with filters from the question
        pytest.param("question", marks=pytest.mark.slow),
        "vector",
        "none",
    ],
)
def test_onnx_gives_the_same_logits(form: str) -> None:
    for library in ("onnx", "onnxscript"):
        pytest.importorskip(library)
    runtime = pytest.importorskip("onnxruntime")
    head, file = plain_head(form), io.BytesIO()
    program = torch.onnx.export(head, plain_input((9, 4, 12)), dynamo=True, dynamic_shapes=dynamic(), verbose=False)
    assert program is not None
    program.save(file)
    session = runtime.InferenceSession(file.getvalue())
    for lengths in ((30, 3), (1,)):
        given = plain_input(lengths)
        names = [entry.name for entry in session.get_inputs()]
        (output,) = session.run(None, {name: value.numpy() for name, value in zip(names, given, strict=True)})
        np.testing.assert_allclose(output, head(*given).detach().numpy(), rtol=0, atol=1e-5)
