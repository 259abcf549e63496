"""Commands that answer, or make a model ready to: predict, evaluate, ask, export."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lamella.cli.app import AsJson, BatchSize, ModelName, Overwrite, Precision, app


@app.command()
def predict(
    data: Annotated[str, typer.Argument(help="The data file with the questions.")],
    model: ModelName,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to write.")],
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    overwrite: Overwrite = False,
) -> None:
    """Answer the questions of a data file; writes predictions.json and what belongs to it."""
    from lamella.inference.evaluate import read_questions
    from lamella.inference.loading import load_model
    from lamella.inference.predict import predict as answer
    from lamella.inference.predict import write_predictions
    from lamella.runs import new_run

    examples, reader = read_questions(data), load_model(model, precision=precision)
    with new_run(out, "predict", overwrite=overwrite, needs=reader.folders) as folder:
        write_predictions(folder, reader, answer(reader, examples, batch_size=batch_size))
    typer.echo(f"{out}: {len(examples)} questions answered")


@app.command()
def evaluate(
    data: Annotated[str, typer.Argument(help="The data file with the true answers.")],
    predictions: Annotated[
        Path | None,
        typer.Argument(help="Predictions in the official format: {id: text}."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Predict with this model first (needs --out)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The run folder to write."),
    ] = None,
    null_odds: Annotated[
        Path | None,
        typer.Option("--null-odds", help="{id: score of no answer minus score of the answer}."),
    ] = None,
    na_prob: Annotated[
        Path | None,
        typer.Option("--na-prob", help="{id: probability of no answer}."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option("--na-prob-thresh", help="Take the scores above this for no answer (the official script: 1.0)."),
    ] = None,
    missing: Annotated[
        Literal["error", "empty"],
        typer.Option("--missing", help="A question without a prediction: an error, or empty."),
    ] = "error",
    language: Annotated[
        Literal["en", "ko"] | None,
        typer.Option("--language", help="Whose normalisation and F1; default: as the data says."),
    ] = None,
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Score predictions as the official SQuAD 2.0 script does, or those of a model."""
    from lamella.errors import UsageError
    from lamella.inference.evaluate import evaluate_file, evaluate_model, read_questions
    from lamella.inference.loading import load_model
    from lamella.runs import new_run

    if (predictions is None) == (model is None):
        raise UsageError("evaluate: expected either a predictions file or --model, one of the two.")
    if predictions is not None:
        if out is not None:
            raise UsageError("evaluate: --out is for --model; the scores of a predictions file are printed.")
        results = evaluate_file(
            data,
            predictions,
            null_odds=null_odds,
            na_prob=na_prob,
            threshold=threshold,
            missing=missing,
            language=language,
        )
    elif model is not None:
        if out is None:
            raise UsageError("evaluate --model: expected --out, the run folder to write.")
        if null_odds or na_prob or threshold is not None or missing != "error":
            raise UsageError("evaluate --model: options about scores are for a predictions file; a model has its own.")
        examples, reader = read_questions(data, labelled=True), load_model(model, precision=precision)
        with new_run(out, "evaluate", overwrite=overwrite, needs=reader.folders) as folder:
            results = evaluate_model(reader, examples, folder, batch_size=batch_size, language=language)
    _print_results(results, as_json)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    model: ModelName,
    context: Annotated[str, typer.Option("--context", "-c", help="The text to read: a file, or - for standard input.")],
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers to give.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Ask a question of a text."""
    text = _read_text(context)

    from lamella.inference.reader import Reader

    answers = Reader.load(model).ask(question, text, top_k=top_k)
    if as_json:
        typer.echo(json.dumps(answers.to_json(), ensure_ascii=False))
        return
    for answer in answers:
        place = f"characters {answer['start']}-{answer['end']}" if answer["answer"] else "the text does not say"
        typer.echo(f"{answer['answer'] or '(no answer)'}  [{answer['score']:.2f}, {place}]")


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A model folder, a run folder that holds one, or a model of the hub.")],
    onnx: Annotated[Path, typer.Option("--onnx", help="Write a folder for onnxruntime, which runs without torch.")],
    int8: Annotated[bool, typer.Option("--int8", help="With --onnx: round the encoder's weights to 8 bits.")] = False,
    data: Annotated[
        str | None, typer.Option("--data", help="With --int8: measure on this data file what the rounding costs.")
    ] = None,
) -> None:
    """Write a model in another form, into a new folder."""
    from lamella.inference.onnx_export import export_onnx

    typer.echo("\n".join(export_onnx(model, onnx, int8=int8, data=data)))


def _read_text(source: str) -> str:
    from lamella.errors import UnreadableError

    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(os.path.expanduser(source)).read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{source}: expected UTF-8 text; byte {error.start} is not.") from None
    except OSError as error:
        raise UnreadableError(f"{source}: cannot be read ({error.strerror}).") from None


def _print_results(results: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    width = max(len(key) for key in results)
    for key, value in results.items():
        typer.echo(f"{key:<{width}}  {value:.4f}" if isinstance(value, float) else f"{key:<{width}}  {value}")
