"""From torch to ONNX: encoder and head in one graph, compared with the model it was made from, rounded if asked."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from lamella.data.batches import Batch
from lamella.data.demo import data_path
from lamella.data.examples import Example
from lamella.data.features import Features, featurise
from lamella.data.padding import pad
from lamella.encoder.encoder import FAMILIES
from lamella.encoder.fast_attention import ATTENTION
from lamella.encoder.sources import MODEL_CONFIG, Source, verified_hash
from lamella.encoder.tuning import merge
from lamella.errors import MissingExtraError, ModelError, UsageError, one_line
from lamella.files import check_output_folder, new_folder, write_json, write_text
from lamella.inference.predict import predict
from lamella.inference.protocols import QAModel
from lamella.inference.questions import read_questions
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.onnx_model import (
    INPUTS,
    ONNX_GRAPH,
    TOKENIZER,
    ExportConfig,
    Identity,
    Measured,
    OnnxModel,
)
from lamella.models.transformers_model import StockModel
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of

TOLERANCE = 1e-4  # how far a graph's logits may be from torch's, for logits of up to 1; of larger ones, the same share
LARGEST_FILE = 2**31 - 2**20  # bytes that fit into one protobuf file; the weights of a larger model lie beside it
FUSED = "lamella_onnx"  # the name under which transformers finds the attention of a graph


def export_onnx(
    name: str | os.PathLike[str], folder: Path, *, int8: bool = False, data: str | None = None
) -> list[str]:
    """Write a model as a folder for onnxruntime, and say in a few lines what was found out about it.

    `data` is a file with true answers, on which the cost of `int8` is measured.
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
        exported = OnnxModel(fresh, config)
        config = config.model_copy(update={"parity": _compare(model, exported)})
        lines = [f"logits differ from torch's by {config.parity:.1e} at most"]
        if int8:
            measured = _round(fresh, exported, encoder_nodes, data, examples)
            config = config.model_copy(update={"precision": "int8", "int8": measured})
            lines.append(_say(measured))
        write_json(fresh / MODEL_CONFIG, config.model_dump())
    return [f"{folder}: written, {config.precision}", *lines]


class _Graph(nn.Module):
    """A model with tensors for arguments, as the exporter wants it."""

    def __init__(self, model: ReaderModel | StockModel) -> None:
        super().__init__()
        self.net: nn.Module = copy.deepcopy(model if isinstance(model, ReaderModel) else model.model).eval()
        self.token_types = isinstance(model, StockModel) and model.reads_token_types
        inner = self.net.encoder.model if isinstance(self.net, ReaderModel) else self.net
        if isinstance(self.net, ReaderModel):
            merge(self.net.encoder)
        self.encoder = "net.encoder" if isinstance(self.net, ReaderModel) else f"net.{inner.base_model_prefix}"
        if inner.config.model_type in FAMILIES and inner.config._attn_implementation in (ATTENTION, "sdpa"):
            _register()
            inner.set_attn_implementation(FUSED)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, is_context: Tensor) -> Tensor:
        if isinstance(self.net, ReaderModel):
            nowhere = input_ids[:, 0]  # labels, which nothing reads
            batch = Batch(
                input_ids, attention_mask.bool(), token_type_ids, is_context, nowhere, nowhere, np.empty(0, np.int64)
            )
            logits: Tensor = self.net(batch)
            return logits
        types = {"token_type_ids": token_type_ids} if self.token_types else {}
        output = self.net(input_ids=input_ids, attention_mask=attention_mask, **types)
        return torch.stack([output.start_logits, output.end_logits])


def _write_graph(model: ReaderModel | StockModel, path: Path) -> list[str]:
    """Write the graph, and give the names of the nodes that multiply matrices in the encoder."""
    graph, features = _Graph(model), _features(model)
    padded = pad(features, np.arange(len(features)))
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    arguments = tuple(torch.from_numpy(array(padded)) for array in INPUTS.values())
    with torch.no_grad(), _silence():
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
        except Exception as error:  # an exporter's own, of some hundred lines
            raise ModelError(f"this model cannot be exported to ONNX: {one_line(error)}.") from None
    encoder_nodes = _tidy(program.model.graph, graph.encoder)
    size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    program.save(path, external_data=size > LARGEST_FILE)
    return encoder_nodes


def _tidy(graph: Any, encoder: str) -> list[str]:
    """Leave out the inputs that nothing reads, and the exporter's notes, which name files of this machine."""
    first = graph.inputs[0]
    for one in graph.inputs[1:]:
        for node, index in list(one.uses()):
            if node.op_type == "Shape":  # all inputs have the same
                node.replace_input_with(index, first)
    graph.inputs[:] = [one for one in graph.inputs if one.uses()]
    found = []
    for node in graph:
        inside = f"'{encoder}'" in node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
        if node.op_type == "MatMul" and inside:
            found.append(node.name)
        for one in (node, *node.outputs):
            one.metadata_props.clear()
    return found


def _features(model: QAModel) -> Features:
    """Windows of unlike length, to export and to compare with."""
    return featurise(read_questions(str(data_path("demo:dev")))[:6], model.tokenizer, model.windows)


def _compare(model: ReaderModel | StockModel, exported: OnnxModel) -> float:
    """How far a real token's logit is from torch's, in batches and for windows by themselves; refused if too far."""
    features = _features(exported)
    largest = 0.0
    every, longest = np.arange(len(features)), np.argmax(features.lengths, keepdims=True)
    for run, windows in (
        (exported.logits, every),
        (exported.logits_in_one_run, every),
        (exported.logits_in_one_run, longest),
    ):
        padded = pad(features, windows)
        expected, found = model.logits(padded), run(padded)
        real = padded.mask[:, : expected.shape[2]]
        difference = float(np.abs(found - expected)[:, real].max())
        allowed = TOLERANCE * max(1.0, float(np.abs(expected[:, real]).max()))
        if not difference <= allowed:  # also where it is no number
            raise ModelError(
                f"the ONNX graph does not do what the model does: expected logits within {allowed:.1e}. "
                f"Got a difference of {difference:.1e}; nothing was written."
            )
        largest = max(largest, difference)
    return largest


def _round(
    folder: Path, exported: OnnxModel, nodes: Sequence[str], data: str | None, examples: Sequence[Example]
) -> Measured | None:
    """Put int8 weights into the graph of a folder; what that does to the answers is measured where there is data."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    rounded = folder / f"int8-{ONNX_GRAPH}"
    with _silence():
        quantize_dynamic(
            folder / ONNX_GRAPH,
            rounded,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=list(nodes),
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=(folder / f"{ONNX_GRAPH}.data").exists(),
        )
    measured = None
    if data:
        measured = _measure(exported, OnnxModel(folder, exported.config, graph=rounded.name), data, examples)
    os.replace(rounded, folder / ONNX_GRAPH)
    return measured


def _measure(before: OnnxModel, after: OnnxModel, data: str, examples: Sequence[Example]) -> Measured:
    found = [predict(model, examples) for model in (before, after)]
    threshold, language = before.decoding.null_score_diff_threshold, language_of(examples)
    # Without texts, an answer is whether there is one.
    answers = [
        {id: (one.null_odds > threshold, one.text(threshold)) for id, one in predictions.items()}
        for predictions in found
    ]
    scores = [score_predictions(before, examples, predictions, language=language) for predictions in found]
    metrics = ("f1", "answerability_f1", "answerability_accuracy")  # the last, where no question is without an answer
    metric = next(one for one in metrics if one in scores[0])
    return Measured(
        data=Path(data).name,
        questions=len(examples),
        equal=sum(answers[0][id] == answers[1][id] for id in answers[0]) / len(examples),
        metric=metric,
        before=scores[0][metric],
        after=scores[1][metric],
    )


def _say(measured: Measured | None) -> str:
    if measured is None:
        return "int8: what it costs was not measured; give a file with answers as --data"
    return (
        f"int8: {measured.equal:.1%} of {measured.questions} answers are the same; {measured.metric} "
        f"{measured.before:.2f} -> {measured.after:.2f}, {measured.lost:.2f} lost"
    )


def _identity(name: str | os.PathLike[str], model: ReaderModel | StockModel) -> Identity:
    return Identity(name=os.fspath(name), sha256=verified_hash(Source(os.fspath(name), model.folders[0], "folder")))


def _check_call(folder: Path, int8: bool, data: str | None) -> None:
    """Refuse what cannot work before anything slow begins."""
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")):
        raise MissingExtraError("export --onnx", "onnx")
    if data and not int8:
        raise UsageError("export: --data is there to measure what --int8 costs; expected both.")
    check_output_folder(folder)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """Attention as one node of onnxruntime's own; it exists in a graph alone, and cannot be computed here."""
    B, N, T, D = query.shape
    inputs = [tensor.transpose(1, 2).reshape(B, T, N * D) for tensor in (query, key, value)]
    attended = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        [*inputs, None, mask.int()],
        {"num_heads": N, "scale": scaling},
        dtype=query.dtype,
        shape=(B, T, N * D),
        version=1,
    )
    return attended.reshape(B, T, N, D), None


def _mask(*arguments: Any, attention_mask: Tensor, **more: Any) -> Tensor:
    """The mask as the attention above wants it: of tokens, [B, T], and not of pairs of them."""
    return attention_mask


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(FUSED, _attend)
    AttentionMaskInterface.register(FUSED, _mask)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Exporter and quantiser warn of things that nobody can change."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
