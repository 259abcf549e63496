"""The ONNX files that are written without the onnx package: read back and checked with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from lamella.graph.builder import BATCH, TOKENS, Graph
from lamella.graph.onnx_file import ALIGNMENT, OPSETS


def small_graph() -> tuple[Graph, str, np.ndarray]:
    graph = Graph()
    table = np.arange(3 * ALIGNMENT, dtype=np.float32).reshape(-1, 3)
    words = graph.op("Gather", graph.constant(table, "words"), graph.input("input_ids"))
    return graph, graph.transpose(graph.product(words, np.eye(3, 2, dtype=np.float32)), 2, 0, 1), table


@pytest.mark.parametrize("outside", [False, True])
def test_a_file_is_read_by_the_onnx_package(outside: bool, tmp_path: Path) -> None:
    graph, output, table = small_graph()
    data = tmp_path / "weights" if outside else None
    (tmp_path / "model.onnx").write_bytes(graph.encode({"logits": (output, [2, BATCH, TOKENS])}, data_file=data))
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    model = onnx.load(tmp_path / "model.onnx")
    assert {opset.domain: opset.version for opset in model.opset_import} == OPSETS
    assert [node.op_type for node in model.graph.node] == ["Gather", "MatMul", "Transpose", "Identity"]
    assert onnx.helper.get_node_attr_value(model.graph.node[2], "perm") == [2, 0, 1]
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    np.testing.assert_array_equal(tensors["words"], table)
    (ids,), (logits,) = model.graph.input, model.graph.output
    assert [size.dim_param for size in ids.type.tensor_type.shape.dim] == [BATCH, TOKENS]
    assert [size.dim_value or size.dim_param for size in logits.type.tensor_type.shape.dim] == [2, BATCH, TOKENS]


def test_large_tensors_lie_at_aligned_places_outside_and_small_ones_inside(tmp_path: Path) -> None:
    graph, output, table = small_graph()
    more = graph.constant(np.ones(2 * ALIGNMENT + 1, np.float32), "more")
    (tmp_path / "model.onnx").write_bytes(
        graph.encode({"logits": (output, [2, BATCH, TOKENS])}, data_file=tmp_path / "weights")
    )
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    places = {
        name: {entry.key: entry.value for entry in tensor.external_data}
        for name, tensor in stored.items()
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    assert set(places) == {"words", more}
    for name, size in (("words", table.nbytes), (more, 4 * (2 * ALIGNMENT + 1))):
        assert places[name]["location"] == "weights"
        assert (int(places[name]["offset"]) % ALIGNMENT, int(places[name]["length"])) == (0, size)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**31, 2**62, -1])
def test_integers_of_any_length(value: int) -> None:
    graph = Graph()
    graph.op("Cast", graph.input("input_ids"), to=value, f=0.5, s="text", many=[value, -3])
    model = onnx.load_from_string(graph.encode({"logits": ("Cast_0", [1])}))
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in model.graph.node[0].attribute}
    assert attributes == {"to": value, "f": 0.5, "s": b"text", "many": [value, -3]}
