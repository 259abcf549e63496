"""Trace a model with torch's exporter to ONNX: for readers that have no graph of their own."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lamella.data.windows.batches import Batch
from lamella.data.windows.padding import Padded
from lamella.encoder.families import FAMILIES
from lamella.encoder.fast_attention import ATTENTION
from lamella.encoder.tuning import merge
from lamella.errors import MissingLibraryError, ModelError, one_line
from lamella.export.onnx_attention import FUSED, register_onnx_attention
from lamella.export.silence import silence
from lamella.graph.support import LARGEST_FILE
from lamella.models.model import ReaderModel
from lamella.models.onnx_model import INPUTS
from lamella.models.transformers_model import StockModel

LIBRARIES = ("onnx", "onnxscript")


def trace_model(model: ReaderModel | StockModel, sample: Padded, path: Path) -> list[str]:
    """Write the graph of a model, traced on some windows; return the names of the encoder's matrix product nodes."""
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise MissingLibraryError("export --onnx of this model", missing)
    graph = _Graph(model)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    arguments = tuple(torch.from_numpy(array(sample)) for array in INPUTS.values())
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
