"""Graphs in int8: close to fp32, the same in every batch, in the cache under their own key."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from doubles import corpus, examples_about, record_weights, save_tiny_encoder, tiny_run_config
from lamella import Reader, environment
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import Padded, pad
from lamella.errors import ModelError, UsageError
from lamella.graph.builder import Graph
from lamella.graph.encoder_config import PREFIXES
from lamella.graph.int8 import BLOCK, SMALLEST_BLOCK, _round_weights, round_to_int8
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.onnx_model import OnnxModel
from lamella.models.onnx_sessions import open_session

pytestmark = pytest.mark.usefixtures("one_thread")

HAS_INT8_PRODUCTS = environment.has_int8_products()  # here: the tests themselves hide the processor


def save_reader(folder: Path, family: str = "bert", **sections: Any) -> Path:
    """A reader whose trained weights are large enough to matter."""
    base = save_tiny_encoder(folder / "base", family)
    torch.manual_seed(0)
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(**sections))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save(folder / "reader")
    return folder / "reader"


def skip_if_sums_overflow() -> None:
    if platform.machine().lower() in ("x86_64", "amd64") and not HAS_INT8_PRODUCTS:
        pytest.skip("sums of products of bytes overflow on this processor")


@pytest.fixture(params=["by block", "by token"])
def scales(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """How products are rounded on this processor, as if it had the instructions for it, or not."""
    by_token = request.param == "by token"
    if by_token:
        skip_if_sums_overflow()
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: avx512f avx512_vnni\n" if by_token else "flags\t\t: avx2\n", encoding="utf-8")
    monkeypatch.setattr(environment, "CPU_INFO", info)
    return str(request.param)


def load(folder: Path, precision: Any) -> OnnxModel:
    model = load_model(folder, precision=precision, device="cpu")
    assert isinstance(model, OnnxModel)
    assert model.config.precision == precision
    return model


def windows_of(model: Any, chosen: slice = slice(None)) -> Padded:
    texts = [context[: 30 + 150 * number] for number, context in enumerate(corpus()[:4])]
    features = featurise(examples_about(texts), model.tokenizer, model.windows)
    return pad(features, np.arange(len(features))[chosen])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reader(tmp_path_factory.mktemp("int8"), encoder={"tuning": "lora"})


@pytest.mark.usefixtures("scales")
@pytest.mark.parametrize("family", sorted(PREFIXES))
def test_the_logits_are_close_to_fp32(family: str, tmp_path: Path) -> None:
    folder = save_reader(tmp_path, family, encoder={"tuning": "adapter"})
    exact, rounded = load(folder, "fp32"), load(folder, "int8")
    padded = windows_of(exact)
    expected = exact.logits(padded)
    spread = float(expected[:, padded.mask].std())
    for found in (rounded.logits(padded), rounded.logits_in_one_run(padded)):
        difference = np.abs(found - expected)[:, padded.mask]
        assert 0 < difference.mean() < 0.02 * spread
        assert difference.max() < 0.1 * spread


@pytest.mark.usefixtures("scales")
def test_a_window_does_not_depend_on_its_batch(saved: Path) -> None:
    model = load(saved, "int8")
    padded = windows_of(model)
    together = model.logits(padded)
    np.testing.assert_array_equal(model.logits(padded), together)
    in_one_run = model.logits_in_one_run(padded)
    for row, real in enumerate(padded.mask):
        alone = model.logits(windows_of(model, slice(row, row + 1)))[:, 0, : real.sum()]
        np.testing.assert_array_equal(alone, together[:, row, real])
        np.testing.assert_allclose(alone, in_one_run[:, row, real], atol=1e-3)  # attention over padding rounds too


def test_each_precision_has_its_own_graph_in_the_cache(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path))
    graphs, sizes = tmp_path / "graphs", []
    for precision in ("fp32", "int8", "int8", "fp32"):
        load(saved, precision)
        sizes.append({sum(file.stat().st_size for file in graph.iterdir()) for graph in graphs.iterdir()})
    assert list(map(len, sizes)) == [1, 2, 2, 2]
    assert min(sizes[1]) < max(sizes[0])


@pytest.mark.parametrize("size", [3, 16, 20, 128, 300])
def test_weights_are_rounded_to_the_nearest_level_of_their_block(size: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((size, 5)).astype(np.float32)
    matrix[:, 0] = 0  # a column without a scale
    levels, scales = _round_weights(matrix)
    assert (levels.dtype, scales.dtype) == (np.uint8, np.float32)
    assert SMALLEST_BLOCK <= levels.shape[2] <= BLOCK
    restored = ((levels.astype(np.float32) - 128) * scales[..., None]).reshape(5, -1).T
    step = np.repeat(scales, levels.shape[2], axis=1).T[:size]
    assert (np.abs(restored[:size] - matrix) <= 0.501 * step).all()
    assert not restored[size:].any()


def test_only_the_named_products_are_rounded_and_shared_weights_once() -> None:
    graph = Graph()
    matrix = np.ones((32, 32), np.float32)
    x = graph.op("Cast", graph.input("input_ids"), to=1)
    shared = graph.product(graph.product(x, matrix, "shared"), matrix, "shared")
    last = graph.product(shared, matrix, "head")
    rounded = round_to_int8(graph, {node.name for node in graph.nodes if node.name not in (x, last)})
    assert [node.kind for node in rounded.nodes] == ["Cast", "MatMulNBits", "MatMulNBits", "MatMul"]
    assert set(rounded.tensors) == {"shared.levels", "shared.scales", "head"}
    assert [node.kind for node in graph.nodes] == ["Cast", "MatMul", "MatMul", "MatMul"]


def test_products_by_token_share_what_they_round_and_keep_zeros() -> None:
    skip_if_sums_overflow()
    graph = Graph()
    x = graph.op("Cast", graph.input("input_ids"), to=1)
    first, second = (graph.product(x, np.eye(4, dtype=np.float32), name) for name in ("a", "b"))
    chained = graph.product(first, np.ones((4, 2), np.float32), "c")
    total = graph.op("Add", graph.product(second, np.ones((4, 2), np.float32), "d"), chained)
    rounded = round_to_int8(graph, {node.name for node in graph.nodes if node.kind == "MatMul"}, by_token=True)
    kinds = [node.kind for node in rounded.nodes]
    assert (kinds.count("QuantizeLinear"), kinds.count("MatMulIntegerToFloat")) == (3, 4)
    session = open_session(rounded.encode({"y": (total, ["batch", 2])}), 1)
    ids = np.array([[0, 0, 0, 0], [1, 2, 3, -4], [-7, 0, 0, 0]])
    (found,) = session.run(None, {"input_ids": ids})
    np.testing.assert_allclose(found, np.repeat(2 * ids.sum(1, keepdims=True), 2, 1), atol=0.1)


@pytest.mark.usefixtures("scales")
def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """One NaN in a bias reaches every token, and a rounded product of it can be finite."""
    folder = save_reader(tmp_path, encoder={"tuning": "bitfit"})
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "intermediate.dense.bias" in name)
    tensors[name].view(-1)[5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    record_weights(folder)
    with pytest.raises(ModelError, match=r"expected finite weights, got infinite ones or NaN; the model is damaged"):
        load(folder, "int8")


def test_each_form_of_int8_has_its_own_graph_in_the_cache(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "CPU_INFO", tmp_path / "cpuinfo")
    for number, flags in enumerate(("avx2", "avx_vnni", "amx_int8", "avx2"), 1):
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n", encoding="utf-8")
        load(saved, "int8")
        load(saved, "fp32")
        assert len(list((tmp_path / "cache" / "graphs").iterdir())) == min(number + 1, 3)


def test_a_graph_in_int8_is_made_without_torch_and_onnx(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path))
    script = (
        "import sys; from lamella import Reader; "
        f"Reader.load({str(saved)!r}, precision='int8').ask('Who?', 'Bob was here.'); "
        "print({'torch', 'transformers', 'onnx', 'google.protobuf'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_what_int8_cannot_do_is_refused(saved: Path, tmp_path: Path) -> None:
    for options, problem in (
        ({"backend": "torch"}, "precision 'int8' needs backend 'onnx' or 'auto', got 'torch'."),
        ({"device": "cuda"}, "an ONNX graph runs on the CPU only, got device 'cuda'."),
    ):
        with pytest.raises(UsageError) as caught:
            Reader.load(saved, precision="int8", **options)  # type: ignore[arg-type]
        assert str(caught.value) == f"{saved}: {problem}"
    without = save_reader(tmp_path, "deberta-v2")
    with pytest.raises(UsageError, match=r"have no graph builder; export it with --onnx and --int8, or choose another"):
        Reader.load(without, precision="int8")
