"""Round the weights of a traced ONNX graph to int8, and measure what int8 costs; see `graph.int8` for built graphs."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.examples import Example
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import Padded, pad
from lamella.errors import ModelError, counted
from lamella.export.silence import silence
from lamella.inference.predict import predict
from lamella.inference.protocols import QAModel
from lamella.models.onnx_model import ONNX_GRAPH, Int8Parity, Measured, OnnxModel
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of

MIN_EXTERNAL_BYTES = 1024  # smaller tensors stay in a large graph, as with onnx


def quantise(folder: Path, nodes: Sequence[str]) -> None:
    """Round the encoder weights and the word embeddings of an exported folder to int8.

    `nodes` are the names of the matrix products to round.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    data = folder / f"{ONNX_GRAPH}.data"
    external = data.exists()  # a large graph stores its weights beside it, by file name
    with tempfile.TemporaryDirectory(dir=folder) as work, silence():
        # A random name: `quantize_dynamic` fails if the *working* folder has a file with the name of the weights.
        rounded = Path(work, f"{Path(work).name}.onnx")
        quantize_dynamic(
            folder / ONNX_GRAPH,
            rounded,
            op_types_to_quantize=["MatMul"],
            nodes_to_quantize=list(nodes),
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=external,
            extra_options={
                "DefaultTensorType": 1
            },  # fp32: the types of values after onnxruntime's own nodes are not known
        )
        data.unlink(missing_ok=True)  # saving would append to it
        _round_embeddings(rounded, folder / ONNX_GRAPH, data.name if external else None)


def measure_parity(model: QAModel, rounded: OnnxModel, examples: Sequence[Example]) -> Int8Parity:
    """Measure how far the int8 graph, run as a reader runs it, is from the original model."""
    features = featurise(examples, model.tokenizer, model.windows)
    padded = pad(features, np.arange(len(features)))
    difference = largest_difference(model.logits(padded), rounded.logits(padded), padded)
    if not np.isfinite(difference):
        raise ModelError("expected finite logits, in int8 and before; the weights are damaged. Nothing was written.")
    expected, predictions = predict(model, examples), predict(rounded, examples)
    return Int8Parity(
        questions=len(examples),
        logits=difference,
        null_odds=max(abs(predictions[id].null_odds - expected[id].null_odds) for id in expected),
    )


def measure(before: OnnxModel, after: OnnxModel, data: str, examples: Sequence[Example]) -> Measured:
    """Measure the effect of int8 on the answers to labelled questions."""
    both = [predict(model, examples) for model in (before, after)]
    threshold, language = before.decoding.null_score_diff_threshold, language_of(examples)
    # For a model without texts, the answer is whether there is one.
    answers = [
        {id: (prediction.null_odds > threshold, prediction.text(threshold)) for id, prediction in predictions.items()}
        for predictions in both
    ]
    scores = [score_predictions(before, examples, predictions, language=language) for predictions in both]
    metrics = ("f1", "answerability_f1", "answerability_accuracy")  # the last if every question has an answer
    metric = next(name for name in metrics if name in scores[0])
    return Measured(
        data=Path(data).name,
        questions=len(examples),
        equal=sum(answers[0][id] == answers[1][id] for id in answers[0]) / len(examples),
        metric=metric,
        before=scores[0][metric],
        after=scores[1][metric],
    )


def largest_difference(expected: NDArray[Any], logits: NDArray[Any], padded: Padded) -> float:
    """Return the largest difference between the logits of two models, padding excluded; nan for infinite logits."""
    real = padded.mask[:, : expected.shape[2]]
    with np.errstate(invalid="ignore", over="ignore"):  # callers refuse what is not finite
        return float(np.abs(logits - expected)[:, real].max())


def describe_parity(parity: Int8Parity, reference: str = "torch's") -> str:
    """Return one line about the distance of an int8 graph from the original model."""
    return (
        f"int8: logits differ from {reference} by at most {parity.logits:.2g}, null odds by at most "
        f"{parity.null_odds:.2g}, on {counted(parity.questions, 'sample question')}"
    )


def describe(measured: Measured | None) -> str:
    """Return one line about the cost of int8."""
    if measured is None:
        return "int8: the loss was not measured; pass a file with true answers as --data"
    return (
        f"int8: {measured.equal:.1%} of {counted(measured.questions, 'answer')} unchanged; {measured.metric} "
        f"{measured.before:.2f} -> {measured.after:.2f} ({measured.change:+.2f})"
    )


def _round_embeddings(path: Path, out: Path, data: str | None) -> None:
    """Round the word embeddings of a graph to int8, with one scale per word, and write the graph to `out`.

    `data` is the name of the file for large tensors beside it.

    `quantize_dynamic` leaves them in fp32, although they can be most of a small encoder. Only operators of the
    ONNX standard are used, none specific to a processor.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from onnx.external_data_helper import set_external_data

    model = onnx.load(path)
    graph = model.graph
    tables = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    uses = Counter(name for node in graph.node for name in node.input)
    nodes = []
    for node in graph.node:
        lookup = node.op_type == "Gather" and node.input[0] in tables and node.input[1] == "input_ids"
        if not lookup or uses[node.input[0]] > 1:
            nodes.append(node)
            continue
        (table, ids), (output,) = node.input, node.output
        weights = numpy_helper.to_array(tables[table])
        scales = np.abs(weights).max(1, keepdims=True) / 127
        levels = np.rint(weights / np.where(scales > 0, scales, 1)).astype(np.int8)
        graph.initializer.remove(tables[table])
        graph.initializer.append(numpy_helper.from_array(levels, f"{table}_quantized"))
        graph.initializer.append(numpy_helper.from_array(scales, f"{table}_scale"))
        nodes += [
            helper.make_node("Gather", [f"{table}_quantized", ids], [f"{output}_quantized"]),
            helper.make_node("Cast", [f"{output}_quantized"], [f"{output}_cast"], to=TensorProto.FLOAT),
            helper.make_node("Gather", [f"{table}_scale", ids], [f"{output}_scale"]),
            helper.make_node("Mul", [f"{output}_cast", f"{output}_scale"], [output]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    if data is not None:  # not by an option of `onnx.save`, which refuses a name that the working folder has
        for tensor in graph.initializer:
            if len(tensor.raw_data) >= MIN_EXTERNAL_BYTES:
                set_external_data(tensor, data)
    onnx.save(model, out)
