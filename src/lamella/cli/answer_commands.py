"""Commands that answer, or make a model ready to: predict, evaluate, calibrate, ensemble, ask, export."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lamella.cli.app import Address, AsJson, BatchSize, Encoding, Language, ModelName, Overwrite, Precision, app

KeepLogits = Annotated[
    bool, typer.Option("--keep-logits", help="Keep the logits too, so that `ensemble` needs no model.")
]

LONGEST_ECHO = 60  # characters of a wrong value that an error repeats


@app.command()
def predict(
    data: Annotated[str, typer.Argument(help="The data file with the questions.")],
    model: ModelName,
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to write.")],
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    keep_logits: KeepLogits = False,
    overwrite: Overwrite = False,
    submission: Annotated[
        Path | None,
        typer.Option(
            "--submission", help="Write the answers to this csv file too, as CS224n's leaderboard takes them."
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="Answer in this process, or on a Ray cluster.")
    ] = "local",
    address: Address = None,
) -> None:
    """Answer the questions of a data file; writes predictions.json and what belongs to it."""
    from lamella.data.writers import check_submission, write_submission
    from lamella.errors import UsageError
    from lamella.inference.model_record import model_record
    from lamella.inference.predict import predict as answer
    from lamella.inference.prediction_files import write_predictions
    from lamella.inference.questions import read_questions
    from lamella.inference.several_contexts import answers_by_question
    from lamella.inference.stored_logits import LogitsWriter
    from lamella.models.loading import load_model
    from lamella.runs import data_record, new_run

    if engine == "local" and address is not None:
        raise UsageError("predict --address: is for --engine ray.")
    if engine == "ray" and keep_logits:
        raise UsageError("predict --keep-logits: is for --engine local; the workers of Ray send answers only.")
    examples, reader = read_questions(data), load_model(model, precision=precision)
    if submission is not None and not reader.gives_text:
        raise UsageError("predict --submission: this model tells whether there is an answer, and gives none to submit.")
    if submission is not None:
        check_submission(submission, data, out)
    answered, answers = data_record([data], (one.id for one in examples)), model_record(model, reader)
    logits_writer = LogitsWriter(reader, answers) if keep_logits else None
    with ExitStack() as stack:
        if engine == "ray":
            from lamella.sweep.ray_cluster import cluster
            from lamella.sweep.ray_predict import predict_on_ray

            stack.enter_context(cluster(address))  # before the folder is touched
        folder = stack.enter_context(
            new_run(out, "predict", overwrite=overwrite, needs=reader.folders, data=answered, model=answers)
        )
        if engine == "ray":
            predictions = predict_on_ray(model, examples, batch_size=batch_size, precision=precision)
        else:
            predictions = answer(reader, examples, batch_size=batch_size, sink=logits_writer)
        write_predictions(folder, reader, predictions, examples)
        if logits_writer is not None:
            logits_writer.write(folder)
        if submission is not None:
            threshold = reader.decoding.null_score_diff_threshold
            by_question = answers_by_question(reader, examples, predictions)
            write_submission({id: one.text(threshold) for id, one in by_question.items()}, submission)
    questions = len({one.question_id for one in examples})
    contexts = f" from {len(examples)} contexts" if len(examples) > questions else ""
    typer.echo(f"{out}: {questions} questions answered{contexts}")


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
    language: Language = None,
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    keep_logits: KeepLogits = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Score predictions as the official SQuAD 2.0 script does, or those of a model."""
    from lamella.errors import UsageError
    from lamella.scoring.evaluate import evaluate as evaluate_model
    from lamella.scoring.evaluate import evaluate_file

    if (predictions is None) == (model is None):
        raise UsageError("evaluate: expected either a predictions file or --model, one of the two.")
    if predictions is not None:
        if out is not None or keep_logits:
            option = "--out" if out is not None else "--keep-logits"
            raise UsageError(f"evaluate: {option} is for --model; the scores of a predictions file are printed.")
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
        results = evaluate_model(
            model,
            data,
            out=out,
            batch_size=batch_size,
            precision=precision,
            language=language,
            keep_logits=keep_logits,
            overwrite=overwrite,
        )
        if results.get("threshold_tuned_on_these"):
            typer.echo(
                "the model's threshold was tuned on these very questions, so that exact and f1 are too good: "
                "see crossfit_exact and crossfit_f1",
                err=True,
            )
    _print_results(results, as_json)


@app.command()
def calibrate(
    data: Annotated[str, typer.Argument(help="The data file to tune on: neither trained on nor to be scored.")],
    model: ModelName,
    method: Annotated[
        Literal["temperature", "isotonic"],
        typer.Option("--method", help="From null odds to a probability: a logistic curve, or steps that rise."),
    ] = "temperature",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be stored.")] = False,
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    as_json: AsJson = False,
) -> None:
    """Tune when a model says "no answer", and how sure it is, on a data file; stores both with the model."""
    from lamella.inference.questions import read_questions
    from lamella.models.loading import load_model
    from lamella.models.model import ReaderModel
    from lamella.scoring.calibrate import calibrate_model, folder_to_tune

    folder = None if dry_run else folder_to_tune(model, data)
    examples, reader = read_questions(data, labelled=True), load_model(model, precision=precision)
    tuned = calibrate_model(reader, examples, data, method=method, batch_size=batch_size)
    if folder is not None:
        assert isinstance(reader, ReaderModel)  # or there would be no folder to tune
        reader.save_decoding(folder, tuned.decoding, tuned.report)
    if as_json:
        decoding = tuned.decoding.model_dump(include={"calibration", "tuned_on"})
        typer.echo(json.dumps({**tuned.report, **decoding, "stored": folder is not None}, indent=2))
        return
    for line in tuned.lines():
        typer.echo(line)
    typer.echo(f"{folder}: threshold and calibration stored" if folder else "nothing is stored (--dry-run)")


@app.command()
def ensemble(
    members: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Runs, with a model or with predictions, or models: two or more."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder to write.")],
    how: Annotated[
        Literal["max", "mean", "product", "vote"],
        typer.Option("--how", help="What is taken of the members' probabilities, or the text that most of them give."),
    ] = "mean",
    data: Annotated[
        str | None,
        typer.Option("--data", help="The data file: needed to run models, and to score against its answers."),
    ] = None,
    level: Annotated[
        Literal["auto", "token", "span"],
        typer.Option("--level", help="Combine tokens, for members that cut texts alike, or the spans of n-best lists."),
    ] = "auto",
    threshold: Annotated[
        float, typer.Option("--threshold", help="No answer wins when its odds exceed this; no member's carries over.")
    ] = 0.0,
    language: Language = None,
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Let several readers answer together; says what that adds to each of them."""
    from lamella.inference.ensemble import Ensemble
    from lamella.inference.members import open_members
    from lamella.inference.questions import read_any_questions
    from lamella.runs import data_record, new_run
    from lamella.scoring.ensemble_gain import write_ensemble

    examples, labelled = read_any_questions(data) if data else (None, False)
    opened = open_members(members, run=data is not None, precision=precision)
    readers = Ensemble(opened, examples, how=how, level=level, threshold=threshold)
    needs = [folder for member in opened for folder in member.folders]
    answered = data_record([data], (one.id for one in examples)) if data and examples is not None else None
    with new_run(out, "ensemble", overwrite=overwrite, needs=needs, data=answered) as folder:
        together = readers.answer(batch_size=batch_size)
        results = write_ensemble(folder, together, examples if labelled else None, language)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    reason = readers.why_not_by_token if level == "auto" and how != "vote" else None
    typer.echo(f"{out}: {results['total']} questions answered by {len(opened)} readers together")
    typer.echo(f"{how}, at the {readers.level} level" + (f" ({reason})" if reason else ""))
    _print_gains(results)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question.")],
    context: Annotated[
        list[str],
        typer.Option("--context", "-c", help="The text to read: a file, or - for standard input. May be given again."),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="As for predict; default: the reader that comes with the package."),
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many answers to give.")] = 1,
    encoding: Encoding = None,
    as_json: AsJson = False,
) -> None:
    """Ask a question of a text, or of several together."""
    from lamella.errors import UsageError

    if not question.strip():
        raise UsageError("ask: expected a question. Got an empty one.")
    if context.count("-") > 1:
        raise UsageError("ask --context: standard input (-) can be read only once.")
    texts = [_read_text(source, encoding) for source in context]
    if not any(map(str.strip, texts)):
        raise UsageError(f"ask --context: expected a text. Found none in {', '.join(context)}.")

    from lamella.inference.reader import Reader

    several = len(texts) > 1
    answers = Reader.load(model).ask(question, texts if several else texts[0], top_k=top_k)
    if several:
        for answer in answers:
            answer["file"] = context[answer["context"]] if answer["answer"] else None
    if as_json:
        typer.echo(json.dumps(answers.to_json(), ensure_ascii=False))
        return
    for answer in answers:
        place = f"characters {answer['start']}-{answer['end']}"
        if several:
            place = f"{answer['file']}, {place}"
        if not answer["answer"]:
            place = f"the text{'s do' if several else ' does'} not say"
        typer.echo(f"{answer['answer'] or '(no answer)'}  [{answer['probability']:.2f}, {place}]")


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A model folder, a run folder that holds one, or a model of the hub.")],
    flatten: Annotated[
        Path | None,
        typer.Option("--flatten", help="Write it on the pretrained encoder, without the models that it stands on."),
    ] = None,
    half: Annotated[Path | None, typer.Option("--half", help="Write it with its tensors rounded to fp16.")] = None,
    as_transformers: Annotated[
        Path | None,
        typer.Option("--as-transformers", help="Write a checkpoint for AutoModelForQuestionAnswering."),
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option("--onnx", help="Write a folder for onnxruntime, which runs without torch.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="With --onnx: round the encoder's weights to 8 bits.")] = False,
    data: Annotated[
        str | None, typer.Option("--data", help="With --int8: measure on this data file what the rounding costs.")
    ] = None,
) -> None:
    """Write a model in another form, into a new folder: give exactly one that says which."""
    from lamella.errors import UsageError

    modes = {"--flatten": flatten, "--half": half, "--as-transformers": as_transformers, "--onnx": onnx}
    chosen = {mode: folder for mode, folder in modes.items() if folder is not None}
    if len(chosen) != 1:
        raise UsageError(f"export: expected exactly one of {', '.join(modes)}. Got {', '.join(chosen) or 'none'}.")

    if onnx is None and (int8 or data):
        raise UsageError("export: --int8 and --data go with --onnx.")
    if onnx is not None:
        from lamella.export.onnx_export import export_onnx

        typer.echo("\n".join(export_onnx(model, onnx, int8=int8, data=data)))
        return

    from lamella.export.flatten import flatten as write_flat
    from lamella.export.half import halve
    from lamella.export.transformers_checkpoint import save_as_transformers

    write: dict[str, Callable[[str, Path], object]] = {
        "--flatten": write_flat,
        "--half": halve,
        "--as-transformers": save_as_transformers,
    }
    for mode, folder in chosen.items():
        write[mode](model, folder)
        typer.echo(f"{folder}: written")


def _print_gains(results: dict[str, Any]) -> None:
    """The scores of an ensemble, and what it adds to each member."""
    if "gains" not in results:
        return
    best, threshold = results["best_f1"], results["best_f1_thresh"]
    typer.echo(f"exact {results['exact']:.2f}  f1 {results['f1']:.2f}  best_f1 {best:.2f} at threshold {threshold:.2f}")
    width = max(map(len, results["gains"]))
    for name, gain in results["gains"].items():
        told = "  ".join(
            f"{key} {gain[key]:+.2f} [{gain[f'{key}_interval'][0]:+.2f}, {gain[f'{key}_interval'][1]:+.2f}]"
            for key in ("exact", "f1")
        )
        typer.echo(f"over {name:<{width}}  {told}  best_f1 {gain['best_f1']:+.2f}")


def _read_text(source: str, encoding: str | None) -> str:
    from lamella.errors import UnreadableError
    from lamella.text_encoding import decode_text

    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(os.path.expanduser(source)).read_bytes()
        return decode_text(data, source, encoding, advice="save it as UTF-8, or pass --encoding {encoding}")
    except OSError as error:
        told = " ".join(source.split())  # it may be the text itself
        told = told if len(told) <= LONGEST_ECHO else f"{told[:LONGEST_ECHO]}…"
        raise UnreadableError(
            f"ask --context {told!r}: cannot be read ({error.strerror}); give a file, or - for standard input."
        ) from None


def _print_results(results: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    width = max(len(key) for key in results)
    for key, value in results.items():
        typer.echo(f"{key:<{width}}  {value:.4f}" if isinstance(value, float) else f"{key:<{width}}  {value}")
