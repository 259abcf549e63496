"""Export a model to ONNX: encoder and head in one graph, checked against the original model."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from lamella.data.demo import data_path
from lamella.data.examples import Example
from lamella.data.windows.batches import Batch
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.padding import pad
from lamella.encoder.families import FAMILIES
from lamella.encoder.fast_attention import ATTENTION
from lamella.encoder.sources import MODEL_CONFIG, Source, verified_hash
from lamella.encoder.tuning import merge
from lamella.errors import MissingLibraryError, ModelError, UsageError, one_line
from lamella.export.onnx_attention import FUSED, register_onnx_attention
from lamella.export.onnx_int8 import (
    describe,
    describe_parity,
    largest_difference,
    measure,
    measure_parity,
    quantise,
)
from lamella.export.silence import silence
from lamella.files import check_output_folder, new_folder, write_json, write_text
from lamella.inference.protocols import QAModel
from lamella.inference.questions import read_questions
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.onnx_model import (
    INPUTS,
    ONNX_GRAPH,
    ExportConfig,
    Identity,
    OnnxModel,
)
from lamella.models.tokenizer_file import TOKENIZER
from lamella.models.transformers_model import StockModel

LIBRARIES = ("onnx", "onnxruntime", "onnxscript")
TOLERANCE = 1e-4  # largest difference from torch's logits: absolute for logits up to 1, relative for larger ones
LARGEST_FILE = 2**31 - 2**20  # bytes that fit into one protobuf file; a larger model stores its weights beside it


def export_onnx(
    name: str | os.PathLike[str], folder: Path, *, int8: bool = False, data: str | None = None
) -> list[str]:
    """Write a model as a folder for onnxruntime; return lines that describe it.

    `data` is a file with true answers, to measure the cost of `int8` on.
    """
    _check_call(folder, int8, data)
    examples = read_questions(data, labelled=True) if data else []
    model = cast(ReaderModel | StockModel, load_model(name, device="cpu", precision="fp32", backend="torch"))
    with new_folder(folder) as fresh:
        encoder_nodes = _write_graph(model, fresh / ONNX_GRAPH)
        write_text(fresh / TOKENIZER, model.tokenizer.backend_tokenizer.to_str())
        config = ExportConfig(
            source=_identity(name, model),
            gives_text=model.gives_text,
            windows=model.windows,
            decoding=model.decoding,
            cls_token_id=model.tokenizer.cls_token_id,
            pad_token_id=model.tokenizer.pad_token_id or 0,
            positions=model.positions,
            parity=0.0,
        )
        exported = OnnxModel.open(fresh, config)
        config = config.model_copy(update={"parity": _compare(model, exported)})
        lines = [f"logits differ from torch's by at most {config.parity:.1e}"]
        if int8:
            quantise(fresh, encoder_nodes)
            rounded = OnnxModel.open(fresh, config)
            parity = measure_parity(model, rounded, _sample())
            measured = measure(exported, rounded, data, examples) if data else None
            config = config.model_copy(update={"precision": "int8", "int8_parity": parity, "int8": measured})
            lines = [describe_parity(parity), describe(measured)]
        write_json(fresh / MODEL_CONFIG, config.model_dump())
    return [f"{folder}: written, {config.precision}", *lines]


class _Graph(nn.Module):
    """A model that takes plain tensors, as the exporter requires."""

    def __init__(self, model: ReaderModel | StockModel) -> None:
        super().__init__()
        self.net: nn.Module = copy.deepcopy(model if isinstance(model, ReaderModel) else model.model).eval()
        self.token_types = isinstance(model, StockModel) and model.reads_token_types
        inner = self.net.encoder.model if isinstance(self.net, ReaderModel) else self.net
        if isinstance(self.net, ReaderModel):
            merge(self.net.encoder)
        self.encoder = "net.encoder" if isinstance(self.net, ReaderModel) else f"net.{inner.base_model_prefix}"
        if inner.config.model_type in FAMILIES and inner.config._attn_implementation in (ATTENTION, "sdpa"):
            register_onnx_attention()
            inner.set_attn_implementation(FUSED)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, is_context: Tensor) -> Tensor:
        if isinstance(self.net, ReaderModel):
            labels = input_ids[:, 0]  # required by Batch, never read
            batch = Batch(
                input_ids, attention_mask.bool(), token_type_ids, is_context, labels, labels, np.empty(0, np.int64)
            )
            logits: Tensor = self.net(batch)
            return logits
        types = {"token_type_ids": token_type_ids} if self.token_types else {}
        output = self.net(input_ids=input_ids, attention_mask=attention_mask, **types)
        return torch.stack([output.start_logits, output.end_logits])


def _write_graph(model: ReaderModel | StockModel, path: Path) -> list[str]:
    """Write the graph; return the names of the encoder's matrix product nodes."""
    graph, features = _Graph(model), _features(model)
    padded = pad(features, np.arange(len(features)))
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    arguments = tuple(torch.from_numpy(array(padded)) for array in INPUTS.values())
    with torch.no_grad(), silence():
        try:
            program: Any = torch.onnx.export(
                graph,
                arguments,
                dynamo=True,
                dynamic_shapes=[{0: batch, 1: length}] * len(arguments),
                input_names=list(INPUTS),
                output_names=["logits"],
                verbose=False,
            )
        except ModuleNotFoundError as error:  # a library that the exporter needs: not the model's fault
            raise MissingLibraryError("export --onnx", [error.name or str(error)]) from None
        except Exception as error:  # the exporter has its own errors, hundreds of lines long
            raise ModelError(f"this model cannot be exported to ONNX: {one_line(error)}.") from None
    encoder_nodes = _tidy(program.model.graph, graph.encoder)
    size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    program.save(path, external_data=size > LARGEST_FILE)
    return encoder_nodes


def _tidy(graph: Any, encoder: str) -> list[str]:
    """Remove unused inputs, and the exporter's metadata, which names files of this machine.

    Return the names of the encoder's matrix product nodes.
    """
    first = graph.inputs[0]
    for value in graph.inputs[1:]:
        for node, index in list(value.uses()):
            if node.op_type == "Shape":  # all inputs have the same shape
                node.replace_input_with(index, first)
    graph.inputs[:] = [value for value in graph.inputs if value.uses()]
    products = []
    for node in graph:
        inside = f"'{encoder}'" in node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
        if node.op_type == "MatMul" and inside:
            products.append(node.name)
        for item in (node, *node.outputs):
            item.metadata_props.clear()
    return products


def _features(model: QAModel) -> Features:
    """Return windows of different lengths, to export and to compare with."""
    return featurise(_sample(), model.tokenizer, model.windows)


def _sample() -> Sequence[Example]:
    return read_questions(str(data_path("demo:dev")))[:6]


def _compare(model: ReaderModel | StockModel, exported: OnnxModel) -> float:
    """Return the largest difference from torch's logits, for batches and single windows; raise if too large."""
    features = _features(exported)
    largest = 0.0
    every, longest = np.arange(len(features)), np.argmax(features.lengths, keepdims=True)
    for run, windows in (
        (exported.logits, every),
        (exported.logits_in_one_run, every),
        (exported.logits_in_one_run, longest),
    ):
        padded = pad(features, windows)
        expected, logits = model.logits(padded), run(padded)
        difference = largest_difference(expected, logits, padded)
        allowed = TOLERANCE * max(1.0, largest_difference(np.zeros_like(expected), expected, padded))
        if not difference <= allowed:  # also true for nan
            raise ModelError(
                f"the ONNX graph does not match the model: expected logits within {allowed:.1e}, got a difference of "
                f"{difference:.1e}; nothing was written."
            )
        largest = max(largest, difference)
    return largest


def _identity(name: str | os.PathLike[str], model: ReaderModel | StockModel) -> Identity:
    return Identity(name=os.fspath(name), sha256=verified_hash(Source(os.fspath(name), model.folders[0], "folder")))


def _check_call(folder: Path, int8: bool, data: str | None) -> None:
    """Check the arguments before any slow work."""
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise MissingLibraryError("export --onnx", missing)
    if data and not int8:
        raise UsageError("export: expected --int8 with --data, which measures its loss.")
    check_output_folder(folder)
