"""The convolutional mixers: the papers' parameter counts, their formulas in numpy, pads, statistics, export."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

from lamella import registry
from lamella.encoder.encoder import HiddenStates
from lamella.errors import ConfigError
from lamella.heads.head import Head, Stage, StageShape

pytestmark = pytest.mark.usefixtures("one_thread")

C, W = 3, 20
LENGTHS = (7, 4, 1)
SMALL: dict[str, dict[str, Any]] = {
    "conv_1xn": {"filters": 4, "kernel": 4, "stride": 3, "dilation": 2, "maps": 5, "dropout": 0.0},
    "conv_nxn": {"filters": 4, "kernel": 4, "stride": 3, "maps": 5, "dropout": 0.0},
    "inception": {"filters": 4, "reduce": 3, "modules": 2},
    "xception": {"widths": [4, 5, 6, 7]},
    "xception full": {"variant": "full", "middle": 2, "widths": [3, 4, 5, 6, 7, 8, 9, 10]},
}
every_mixer = pytest.mark.parametrize("kind", SMALL)


def make(kind: str, *, channels: int = C, width: int = W, **options: Any) -> Stage:
    """A small stage whose weights, biases and statistics are all random, in evaluation mode."""
    torch.manual_seed(0)
    shape = StageShape(streams=1, channels=channels, width=width, outputs=2, longest=16)
    stage: Stage = registry.build("mixer", {"name": kind.split()[0], **SMALL[kind], **options}, shape).eval()
    with torch.no_grad():
        for name, value in (*stage.named_parameters(), *stage.named_buffers()):
            value.uniform_(0.5, 1.5) if name.endswith("running_var") else value.normal_(std=0.5)
    return stage


def make_input(
    lengths: tuple[int, ...] = LENGTHS, *, streams: int = 1, pads: int = 2, garbage: float = 40.0
) -> tuple[Tensor, HiddenStates]:
    """Windows of the given lengths, with garbage at the pads."""
    B, T = len(lengths), max(lengths) + pads
    real = torch.randn(streams, C, B, T - pads, W, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    x = torch.where(mask[..., None], nn.functional.pad(real, (0, 0, 0, pads)), garbage)
    return x, HiddenStates((), mask, mask & (torch.arange(T) >= 2))


def run(stage: Stage, x: Tensor, hidden: HiddenStates) -> Tensor:
    output: Tensor = stage(x, hidden, torch.zeros(2, 1))
    return output


class TestParameterCounts:
    """At the size of BERT-large, over the embeddings and 24 layers, with the task's output."""

    POOLING = {"name": "scalar_mix", "shared": True, "normalise": "softmax"}  # noqa: RUF012
    COMPRESS = {"name": "compress", "size": 386}  # noqa: RUF012

    @staticmethod
    def count(*mixer: dict[str, Any], task: str = "span", layers: str = "all", skip: bool = False) -> tuple[int, int]:
        with torch.device("meta"):
            head = Head(24, 1024, mixer=mixer, task={"name": task}, layers=layers, skip=skip)  # type: ignore[arg-type]
        return sum(map(Tensor.numel, head.parameters())), sum(map(Tensor.numel, head.buffers()))

    @pytest.mark.parametrize(
        ("variant", "skip", "everything", "statistics"),
        [
            ("abbreviated", False, 267_010, 2_944),
            ("abbreviated", True, 269_058, 2_944),
            ("full", False, 20_716_634, 54_528),
        ],
    )
    def test_the_classification_networks_are_the_papers(
        self, variant: str, skip: bool, everything: int, statistics: int
    ) -> None:
        mixer = {"name": "xception", "variant": variant}
        trained, buffers = self.count(mixer, task="answerability", layers="pooled+all", skip=skip)
        assert (trained + buffers, buffers) == (everything, statistics)

    @pytest.mark.parametrize("dropout", [0.1, 0.0])
    def test_the_1xn_network_of_all_layers_is_within_the_papers_rounding(self, dropout: float) -> None:
        trained, _ = self.count({"name": "conv_1xn", "dropout": dropout})
        assert 330_116 <= trained <= 333_468

    def test_the_dilated_network_is_within_the_papers_rounding(self) -> None:
        trained, _ = self.count({"name": "conv_1xn", "dilation": 2, "maps": 47})
        assert 403_848 <= trained <= 407_199

    @pytest.mark.parametrize("pooling", [POOLING, {"name": "average"}], ids=["learned", "average"])
    def test_the_1xn_network_after_pooling_is_within_the_papers_rounding(self, pooling: dict[str, Any]) -> None:
        trained, _ = self.count(pooling, {"name": "conv_1xn"})
        assert 310_008 <= trained <= 313_359

    @pytest.mark.parametrize(
        ("mixer", "least", "most"),
        [
            ({"name": "conv_1xn", "maps": 94}, 692_072, 695_423),
            ({"name": "conv_nxn", "maps": 227}, 1_111_002, 1_114_353),
            ({"name": "inception", "modules": 2, "filters": 532, "reduce": 266}, 6_681_094, 6_684_445),
            (
                {
                    "name": "xception",
                    "variant": "full",
                    "middle": 4,
                    "widths": [32, 64, 128, 256, 512, 728, 728, 1024],
                },
                6_600_659,
                6_604_011,
            ),
        ],
        ids=lambda value: value["name"] if isinstance(value, dict) else "",
    )
    def test_the_networks_after_pooling_and_compress_are_within_the_papers_rounding(
        self, mixer: dict[str, Any], least: int, most: int
    ) -> None:
        assert least <= sum(self.count(self.POOLING, self.COMPRESS, mixer, skip=True)) <= most


# The same formulas in numpy, position by position and without pads.


def numbers(stage: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy() for name, value in stage.state_dict().items()}


def np_relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def np_conv(x: np.ndarray, kernel: np.ndarray, *, stride: int = 1, dilation: int = 1, same: bool = True) -> np.ndarray:
    """`x[C, n]` with `kernel[F, C, k]`; zeros beyond the ends, the odd zero after the end."""
    size, reach = x.shape[1], (kernel.shape[2] - 1) * dilation
    before = reach // 2 if same else 0
    positions = range(0, size if same else size - reach, stride)
    out = np.zeros((len(kernel), len(positions)))
    for index, position in enumerate(positions):
        for k in range(kernel.shape[2]):
            at = position - before + k * dilation
            if 0 <= at < size:
                out[:, index] += kernel[:, :, k] @ x[:, at]
    return out


def np_grid(stage: Stage, x: np.ndarray, stride: int, dilation: int) -> np.ndarray:
    """`x[C, T, W]` to [T, maps]: the rows of the kernel convolve their tokens, and are summed."""
    weights = numbers(stage)
    kernel = weights["conv.weight"]  # [F, C, N, N]
    T, rows = x.shape[1], kernel.shape[2]
    out = []
    for t in range(T):
        total = 0
        for row in range(rows):
            at = t - (rows - 1) // 2 + row
            if 0 <= at < T:
                total = total + np_conv(x[:, at], kernel[:, :, row], stride=stride, dilation=dilation)
        hidden = np_relu(total + weights["conv.bias"][:, None]).ravel()
        out.append(np_relu(weights["read.weight"] @ hidden + weights["read.bias"]))
    return np.stack(out)


def np_inception(stage: Stage, x: np.ndarray) -> np.ndarray:
    weights = numbers(stage)
    text = x.transpose(0, 2, 1).reshape(-1, x.shape[1])  # [C·W, T]
    for place in range(2):

        def conv(name: str, text: np.ndarray, place: int = place) -> np.ndarray:
            key = f"blocks.{place}.{name}"
            return np_relu(np_conv(text, weights[f"{key}.weight"]) + weights[f"{key}.bias"][:, None])

        edged = np.pad(text, ((0, 0), (1, 1)))
        largest = np.stack([edged[:, t : t + 3].max(1) for t in range(text.shape[1])], 1)
        three, five = conv("three", conv("to_three", text)), conv("five", conv("to_five", text))
        text = np.concatenate([conv("one", text), three, five, conv("pooled", largest)])
    return text.T


class NumpyXception:
    """One token `x[C, W]` at a time, with the running statistics."""

    def __init__(self, stage: Stage) -> None:
        self.weights = numbers(stage)

    def normed(self, name: str, x: np.ndarray, *, stride: int = 1, same: bool = True) -> np.ndarray:
        w = self.weights
        if f"{name}.conv.1.weight" in w:  # separable
            within = w[f"{name}.conv.0.weight"]
            x = np.concatenate([np_conv(x[c : c + 1], within[c : c + 1]) for c in range(len(x))])
            x = np_conv(x, w[f"{name}.conv.1.weight"])
        else:
            x = np_conv(x, w[f"{name}.conv.0.weight"], stride=stride, same=same)
        x = (x - w[f"{name}.running_mean"][:, None]) / np.sqrt(w[f"{name}.running_var"] + 1e-3)[:, None]
        return w[f"{name}.weight"][:, None] * x + w[f"{name}.bias"][:, None]

    def block(self, name: str, x: np.ndarray, layers: int, *, opening: bool = True, halve: bool = True) -> np.ndarray:
        out = x
        for index in range(layers):
            out = self.normed(f"{name}.layers.{index}", np_relu(out) if index or opening else out)
        if not halve:
            return x + out
        middles = range(0, x.shape[1], 2)
        mean = np.stack([out[:, max(0, m - 1) : m + 2].mean(1) for m in middles], 1)
        return self.normed(f"{name}.shortcut", x, stride=2) + mean

    def __call__(self, x: np.ndarray, full: bool) -> np.ndarray:
        x = np_relu(self.normed("first", x, stride=3, same=False))
        x = np_relu(self.normed("second", x, same=False))
        x = self.block("blocks.0", x, 2, opening=False)
        if full:
            for entry in (1, 2):
                x = self.block(f"blocks.{entry}", x, 2)
            for middle in (3, 4):
                x = self.block(f"blocks.{middle}", x, 3, halve=False)
            x = self.block("blocks.5", x, 2)
            x = np_relu(self.normed("last.1", np_relu(self.normed("last.0", x))))
        return x.mean(1)


@every_mixer
def test_it_equals_its_formula_for_every_window_without_its_pads(kind: str) -> None:
    stage = make(kind)
    x, hidden = make_input()
    output = run(stage, x, hidden)  # [1, C', B, T, 1]
    assert output.shape[1] == stage.out_shape.channels
    assert output.shape[4] == stage.out_shape.width == 1
    for row, length in enumerate(LENGTHS):
        image = x[0, :, row, :length].double().numpy()  # [C, T, W]
        if kind == "inception":
            expected = np_inception(stage, image)
        elif kind.startswith("conv"):
            expected = np_grid(stage, image, 3, SMALL[kind].get("dilation", 1))
        else:
            net = NumpyXception(stage)
            expected = np.stack([net(image[:, t], "full" in kind) for t in range(length)])
        np.testing.assert_allclose(output[0, :, row, :length, 0].detach().T.numpy(), expected, rtol=2e-4, atol=2e-4)


@every_mixer
def test_streams_do_not_mix(kind: str) -> None:
    stage = make(kind)
    x, hidden = make_input(streams=2)
    together = run(stage, x, hidden)
    apart = torch.cat([run(stage, x[:1], hidden), run(stage, x[1:], hidden)])
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize(
    ("kind", "reach"), [("conv_1xn", (0, 0)), ("conv_nxn", (2, 1)), ("inception", (4, 4)), ("xception", (0, 0))]
)
def test_a_token_depends_on_no_more_tokens_than_the_kernels_cover(kind: str, reach: tuple[int, int]) -> None:
    """Kernels of 4 tokens reach 1 back and 2 forward; two Inception modules 2 · 2 both ways."""
    stage = make(kind)
    x, hidden = make_input((12,), pads=0)
    changed = x.clone()
    changed[:, :, :, 6] += 3 * torch.randn(x[:, :, :, 6].shape, generator=torch.Generator().manual_seed(2))
    moved = (run(stage, x, hidden) != run(stage, changed, hidden)).any((0, 1, 2, 4)).nonzero().flatten()
    assert moved.tolist() == list(range(6 - reach[0], 6 + reach[1] + 1))


@every_mixer
def test_pads_change_nothing_in_training(kind: str) -> None:
    results = []
    for pads, garbage in ((0, 0.0), (5, -70.0)):
        stage = make(kind).train()
        x, hidden = make_input(pads=pads, garbage=garbage)
        output = run(stage, x, hidden)[:, :, hidden.mask]
        output.square().sum().backward()
        gradients = [value.grad for value in stage.parameters()]
        results.append([output, *gradients, *stage.buffers()])
    for unpadded, padded in zip(*results, strict=True):
        torch.testing.assert_close(unpadded, padded, rtol=1e-4, atol=1e-4)


class TestStatistics:
    def test_running_statistics_come_from_real_tokens(self) -> None:
        stage = make("xception").train()
        normed: Any = stage.first
        before = numbers(stage)
        x, hidden = make_input()
        run(stage, x, hidden)
        tokens = x[0].permute(1, 2, 0, 3)[hidden.mask].double().numpy()  # [12, C, W]
        convolved = np.stack([np_conv(token, before["first.conv.0.weight"], stride=3, same=False) for token in tokens])
        mean, var = convolved.mean((0, 2)), convolved.var((0, 2), ddof=1)
        expected_mean = 0.9 * before["first.running_mean"] + 0.1 * mean
        expected_var = 0.9 * before["first.running_var"] + 0.1 * var
        np.testing.assert_allclose(normed.running_mean.numpy(), expected_mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(normed.running_var.numpy(), expected_var, rtol=1e-4, atol=1e-5)

    def test_real_tokens_are_normalised_in_training(self) -> None:
        normed: Any = make("xception").train().first
        nn.init.ones_(normed.weight)
        nn.init.zeros_(normed.bias)
        x, hidden = make_input()
        out = normed(x[0].permute(1, 2, 0, 3).flatten(0, 1), hidden.mask.flatten())[hidden.mask.flatten()]
        torch.testing.assert_close(out.mean((0, 2)), torch.zeros(4), rtol=0, atol=1e-5)
        torch.testing.assert_close(out.var((0, 2), correction=0), torch.ones(4), rtol=0, atol=5e-3)

    def test_evaluation_does_not_change_them(self) -> None:
        stage = make("xception")
        before = [value.clone() for value in stage.buffers()]
        run(stage, *make_input())
        assert all(torch.equal(old, new) for old, new in zip(before, stage.buffers(), strict=True))

    def test_a_single_token_can_be_trained_on(self) -> None:
        stage = make("xception full").train()
        output = run(stage, *make_input((1,), pads=0))
        output.sum().backward()
        assert output.isfinite().all()
        assert all(value.isfinite().all() for value in stage.buffers())
        assert all(value.grad is not None and value.grad.isfinite().all() for value in stage.parameters())


def test_dropout_applies_in_training_only() -> None:
    stage, (x, hidden) = make("conv_1xn", dropout=0.5), make_input()
    assert torch.equal(run(stage, x, hidden), run(stage, x, hidden))
    stage.train()
    assert not torch.equal(run(stage, x, hidden), run(stage, x, hidden))


@pytest.mark.parametrize(
    ("options", "width", "message"),
    [
        ({"widths": [1, 2, 3]}, W, r"xception\.widths: expected 4 numbers for 'abbreviated', got 3\."),
        ({"variant": "full", "widths": [1]}, W, r"xception\.widths: expected 8 numbers for 'full', got 1\."),
        ({}, 8, r"xception: expected an input at least 9 wide, got 8\."),
        ({"widths": []}, W, "widths"),
    ],
)
def test_impossible_sizes_are_refused(options: dict[str, Any], width: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("xception", width=width, **options)


class _Plain(nn.Module):
    """A head as a function of tensors."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, layers: Tensor, mask: Tensor, is_context: Tensor) -> Tensor:
        logits: Tensor = self.head(HiddenStates(tuple(layers.unbind(0)), mask, is_context))
        return logits


def plain_head(kind: str) -> _Plain:
    torch.manual_seed(0)
    mixer = [{"name": kind.split()[0], **SMALL[kind]}]
    return _Plain(Head(3, W, mixer=mixer, task={"name": "span"}, longest=16)).eval()


def plain_input(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    x, hidden = make_input(lengths)
    return x[0], hidden.mask, hidden.is_context


def dynamic() -> tuple[dict[int, Any], ...]:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    return {1: batch, 2: length}, {0: batch, 1: length}, {0: batch, 1: length}


@every_mixer
def test_it_exports_with_dynamic_batch_and_length(kind: str) -> None:
    if kind == "inception" and Version(torch.__version__) < Version("2.12"):
        pytest.skip("torch 2.11 exports a max pool with a fixed length")
    head = plain_head(kind)
    exported = torch.export.export(head, plain_input(LENGTHS), dynamic_shapes=dynamic()).module()
    for lengths in ((14, 3), (1,)):
        torch.testing.assert_close(exported(*plain_input(lengths)), head(*plain_input(lengths)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    [  # tests/export/test_onnx.py exports readers with each of the others
        pytest.param(kind, marks=() if kind == "xception full" else pytest.mark.slow) for kind in SMALL
    ],
)
def test_onnx_gives_the_same_logits(kind: str) -> None:
    for library in ("onnx", "onnxscript"):
        pytest.importorskip(library)
    runtime = pytest.importorskip("onnxruntime")
    head, file = plain_head(kind), io.BytesIO()
    program = torch.onnx.export(head, plain_input(LENGTHS), dynamo=True, dynamic_shapes=dynamic(), verbose=False)
    assert program is not None
    program.save(file)
    session = runtime.InferenceSession(file.getvalue())
    for lengths in ((14, 3), (1,)):
        given = plain_input(lengths)
        names = [entry.name for entry in session.get_inputs()]
        (output,) = session.run(None, {name: value.numpy() for name, value in zip(names, given, strict=True)})
        np.testing.assert_allclose(output, head(*given).detach().numpy(), rtol=0, atol=1e-5)
