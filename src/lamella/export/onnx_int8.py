"""Round the weights of an exported ONNX graph to int8, and measure what that costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lamella.data.examples import Example
from lamella.errors import counted
from lamella.export.silence import silence
from lamella.inference.predict import predict
from lamella.models.onnx_model import ONNX_GRAPH, Measured, OnnxModel
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of


def quantise(
    folder: Path, exported: OnnxModel, nodes: Sequence[str], data: str | None, examples: Sequence[Example]
) -> Measured | None:
    """Round the encoder weights of an exported folder to int8; with `data`, measure the effect on the answers.

    `nodes` are the names of the graph nodes to round.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    rounded = folder / f"int8-{ONNX_GRAPH}"
    with silence():
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


def describe(measured: Measured | None) -> str:
    """Return one line about the cost of int8."""
    if measured is None:
        return "int8: the loss was not measured; pass a file with true answers as --data"
    return (
        f"int8: {measured.equal:.1%} of {counted(measured.questions, 'answer')} unchanged; {measured.metric} "
        f"{measured.before:.2f} -> {measured.after:.2f} ({measured.change:+.2f})"
    )


def _measure(before: OnnxModel, after: OnnxModel, data: str, examples: Sequence[Example]) -> Measured:
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
