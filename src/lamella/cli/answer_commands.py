"""Commands that answer the questions of a data file: predict, evaluate, ensemble."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lamella.cli.app import (
    BATCH_SIZE,
    Address,
    AsJson,
    BatchSize,
    Engine,
    HowEager,
    Language,
    ModelName,
    Out,
    Overwrite,
    Precision,
    app,
)

KeepLogits = Annotated[
    bool, typer.Option("--keep-logits", help="Also store the logits, so that `ensemble` needs no model.")
]


@app.command()
def predict(
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data file with the questions.")],
    model: ModelName,
    out: Out,
    how_eager: HowEager = None,
    batch_size: BatchSize = BATCH_SIZE,
    precision: Precision = "auto",
    keep_logits: KeepLogits = False,
    overwrite: Overwrite = False,
    submission: Annotated[
        Path | None,
        typer.Option(
            "--submission", metavar="FILE", help="Also write the answers as a CSV file for CS224n's leaderboard."
        ),
    ] = None,
    engine: Engine = "local",
    address: Address = None,
) -> None:
    """Answer the questions of a data file."""
    from lamella.data.file_formats.writers import write_submission
    from lamella.errors import UsageError, counted
    from lamella.inference.abstention import PRIORS, expecting
    from lamella.inference.doubts import Doubts
    from lamella.inference.model_record import model_record
    from lamella.inference.predict import predict as predict_examples
    from lamella.inference.prediction_files import write_predictions
    from lamella.inference.questions import read_questions
    from lamella.inference.several_contexts import answers_by_question
    from lamella.inference.stored_logits import LogitsWriter
    from lamella.models.loading import load_model
    from lamella.runs import check_run_folder, data_record, new_run

    if engine == "local" and address is not None:
        raise UsageError("predict --address: needs --engine ray.")
    if engine == "ray" and keep_logits:
        raise UsageError("predict --keep-logits: needs --engine local; Ray workers return answers only.")
    check_run_folder(out, overwrite=overwrite)
    if submission is not None:
        _check_submission(submission, out, [data], overwrite)
    answerable = None if how_eager is None else PRIORS[how_eager]
    examples = read_questions(data, log=_warn)
    reader = expecting(load_model(model, precision=precision, inference_only=True), answerable)
    if submission is not None:
        if not reader.gives_text:
            raise UsageError("predict --submission: this model predicts whether there is an answer, not its text.")
        _check_submission(submission, out, reader.folders, overwrite)
    data_facts = data_record([data], (example.id for example in examples))
    model_facts = model_record(model, reader, answerable)
    logits_writer = LogitsWriter(reader, model_facts) if keep_logits else None
    with ExitStack() as stack:
        if engine == "ray":
            from lamella.sweep.ray_cluster import cluster
            from lamella.sweep.ray_predict import predict_on_ray

            stack.enter_context(cluster(address))  # before anything is written
        folder = stack.enter_context(
            new_run(out, "predict", overwrite=overwrite, needs=reader.folders, data=data_facts, model=model_facts)
        )
        if engine == "ray":
            predictions = predict_on_ray(
                model, examples, batch_size=batch_size, precision=precision, answerable=answerable
            )
        else:
            doubts = Doubts(reader.tokenizer, reader.windows)
            predictions = predict_examples(reader, examples, batch_size=batch_size, sink=logits_writer, doubts=doubts)
            doubts.warn()
        write_predictions(folder, reader, predictions, examples)
        if logits_writer is not None:
            logits_writer.write(folder)
        if submission is not None:
            threshold = reader.decoding.null_score_diff_threshold
            by_question = answers_by_question(reader, examples, predictions)
            write_submission({id: answer.text(threshold) for id, answer in by_question.items()}, submission)
    questions = len({example.question_id for example in examples})
    contexts = f" from {counted(len(examples), 'context')}" if len(examples) > questions else ""
    typer.echo(f"{out}: {counted(questions, 'question')} answered{contexts}")


@app.command()
def evaluate(
    data: Annotated[str, typer.Argument(metavar="DATA", help="The data file with the correct answers.")],
    predictions: Annotated[
        Path | None,
        typer.Argument(metavar="PREDICTIONS", help="Predictions in the official format: {id: text}."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Answer with this model first; needs --out."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="RUN", help="The run folder to write."),
    ] = None,
    null_odds: Annotated[
        Path | None,
        typer.Option("--null-odds", metavar="FILE", help="{id: score of no answer minus score of the answer}."),
    ] = None,
    na_prob: Annotated[
        Path | None,
        typer.Option("--na-prob", metavar="FILE", help="{id: probability of no answer}."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option("--na-prob-thresh", help="Treat scores above this as no answer; the official script uses 1.0."),
    ] = None,
    missing: Annotated[
        Literal["error", "empty"],
        typer.Option("--missing", help="Treat a question without a prediction as an error, or as no answer."),
    ] = "error",
    language: Language = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", metavar="NAME", help="Also compute this metric (see `lamella parts metric`). Repeatable."
        ),
    ] = None,
    how_eager: HowEager = None,
    batch_size: BatchSize = BATCH_SIZE,
    precision: Precision = "auto",
    keep_logits: KeepLogits = False,
    overwrite: Overwrite = False,
    is_open: Annotated[
        bool,
        typer.Option("--open", help="Search all contexts of the file for each answer; report recall and time, too."),
    ] = False,
    pool: Annotated[
        list[str] | None,
        typer.Option("--pool", metavar="FILE", help="With --open, also search the contexts of this file. Repeatable."),
    ] = None,
    passages: Annotated[
        int | None, typer.Option("--passages", min=1, help="With --open, read this many passages; default: 20.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option("--sample", min=0, help="With --open, answer only this many questions, drawn at random."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a predictions file, or a model, as SQuAD 2.0 does."""
    from lamella.errors import UsageError
    from lamella.inference.abstention import PRIORS
    from lamella.scoring.evaluate import evaluate as evaluate_model
    from lamella.scoring.evaluate import evaluate_file

    if overwrite and out is None:
        raise UsageError("evaluate --overwrite: needs --out.")
    if is_open:
        refused = {
            "PREDICTIONS": predictions,
            "--out": out,
            "--missing": missing != "error",
            "--keep-logits": keep_logits,
            "--metric": metrics,
            "--null-odds": null_odds,
            "--na-prob": na_prob,
            "--na-prob-thresh": threshold is not None,
        }
        if given := [name for name, value in refused.items() if value]:
            raise UsageError(f"evaluate --open: cannot be combined with {given[0]}; its scores are only printed.")
        _print_results(
            _evaluate_open(
                data,
                pool or [],
                model,
                passages,
                sample,
                how_eager=how_eager,
                language=language,
                batch_size=batch_size,
                precision=precision,
            ),
            as_json,
        )
        return
    if pool or passages is not None or sample is not None:
        option = "--pool" if pool else "--passages" if passages is not None else "--sample"
        raise UsageError(f"evaluate {option}: needs --open.")
    if (predictions is None) == (model is None):
        raise UsageError(
            f"evaluate: expected a predictions file or --model, got {'neither' if model is None else 'both'}."
        )
    if predictions is not None:
        of_models = {
            "--out": out is not None,
            "--keep-logits": keep_logits,
            "--answer": how_eager is not None,
            "--batch-size": batch_size != BATCH_SIZE,
            "--precision": precision != "auto",
        }
        if given := [option for option, value in of_models.items() if value]:
            raise UsageError(f"evaluate {given[0]}: needs --model; the scores of a predictions file are only printed.")
        results = evaluate_file(
            data,
            predictions,
            null_odds=null_odds,
            na_prob=na_prob,
            threshold=threshold,
            missing=missing,
            language=language,
            metrics=metrics or (),
            log=_warn,
        )
    elif model is not None:
        if out is None:
            raise UsageError("evaluate --model: needs --out, the run folder to write.")
        if null_odds or na_prob or threshold is not None or missing != "error":
            raise UsageError(
                "evaluate --model: --null-odds, --na-prob, --na-prob-thresh and --missing are for a predictions file; "
                "a model has its own scores."
            )
        results = evaluate_model(
            model,
            data,
            out=out,
            batch_size=batch_size,
            precision=precision,
            answerable=None if how_eager is None else PRIORS[how_eager],
            language=language,
            metrics=metrics or (),
            keep_logits=keep_logits,
            overwrite=overwrite,
            log=_warn,
        )
        if results.get("threshold_tuned_on_these"):
            typer.echo(
                "warning: the model's threshold or calibration was tuned on these questions, so exact, f1 and ece are "
                "too optimistic; see crossfit_exact and crossfit_f1",
                err=True,
            )
    _print_results(results, as_json)


def _evaluate_open(
    data: str,
    pool: list[str],
    model: str | None,
    passages: int | None,
    sample: int | None,
    *,
    how_eager: str | None,
    language: str | None,
    batch_size: int,
    precision: Any,
) -> dict[str, Any]:
    from lamella.inference.abstention import PRIORS
    from lamella.inference.questions import read_any_questions, read_questions
    from lamella.inference.reader import Reader
    from lamella.scoring.open_pool import evaluate_open

    examples = read_questions(data, labelled=True, log=_warn)
    texts = [example.context.text for file in pool for example in read_any_questions(file)[0]]
    return evaluate_open(
        Reader.load(model, precision=precision, batch_size=batch_size),
        examples,
        pool=texts,
        passages=passages,
        sample=sample,
        answerable=None if how_eager is None else PRIORS[how_eager],
        language=language,
    )


@app.command()
def ensemble(
    members: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Two or more models, or runs with a model or predictions."),
    ],
    out: Out,
    how: Annotated[
        Literal["max", "mean", "product", "vote"],
        typer.Option("--how", help="How to combine the members' probabilities; vote: the most frequent text."),
    ] = "mean",
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="The data file; needed to run models and to score the answers."),
    ] = None,
    level: Annotated[
        Literal["auto", "token", "span"],
        typer.Option("--level", help="Combine token logits (needs identical windows), or the spans of n-best lists."),
    ] = "auto",
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold", help='Answer "no answer" above these null odds; the members\' thresholds do not apply.'
        ),
    ] = 0.0,
    language: Language = None,
    batch_size: BatchSize = BATCH_SIZE,
    precision: Precision = "auto",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Combine several readers; report the gain over each of them."""
    from lamella.errors import counted
    from lamella.inference.ensemble import Ensemble
    from lamella.inference.members import open_members
    from lamella.inference.questions import read_any_questions
    from lamella.runs import check_run_folder, data_record, new_run
    from lamella.scoring.ensemble_gain import write_ensemble

    check_run_folder(out, overwrite=overwrite)
    examples, labelled = read_any_questions(data) if data else (None, False)
    readers = open_members(members, run=data is not None, precision=precision)
    combined = Ensemble(readers, examples, how=how, level=level, threshold=threshold)
    needs = [folder for reader in readers for folder in reader.folders]
    data_facts = data_record([data], (example.id for example in examples)) if data and examples is not None else None
    with new_run(out, "ensemble", overwrite=overwrite, needs=needs, data=data_facts) as folder:
        answers = combined.answer(batch_size=batch_size)
        results = write_ensemble(folder, answers, examples if labelled else None, language)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    reason = combined.why_not_by_token if level == "auto" and how != "vote" else None
    typer.echo(f"{out}: {counted(results['total'], 'question')} answered by {counted(len(readers), 'reader')} together")
    typer.echo(f"{how}, at the {combined.level} level" + (f" ({reason})" if reason else ""))
    _print_gains(results)
    if not labelled:
        reason = "pass --data FILE to see the gain over each reader" if data is None else f"{data} has no true answers"
        typer.echo(f"not scored: {reason}")


def _check_submission(path: Path, out: Path, inputs: Iterable[str | Path], overwrite: bool) -> None:
    from lamella.errors import OutputError
    from lamella.files import check_output_file
    from lamella.runs import FILES

    if path.resolve().parent == out.resolve() and path.name in FILES:
        raise OutputError(f"predict --submission {path}: is a file of the run itself; choose another file.")
    check_output_file(path, inputs=inputs, overwrite=overwrite)


def _print_gains(results: dict[str, Any]) -> None:
    """Print the scores of an ensemble and its gain over each member."""
    if "gains" not in results:
        return
    keys = [
        key
        for key in ("exact", "f1", "answerability_accuracy")
        if f"{key}_interval" in next(iter(results["gains"].values()))
    ]
    scores = "  ".join(f"{key} {results[key]:.2f}" for key in keys)
    if best := "best_f1" in results:
        scores += f"  best_f1 {results['best_f1']:.2f} at threshold {results['best_f1_thresh']:.2f}"
    typer.echo(scores)
    width = max(map(len, results["gains"]))
    for name, gain in results["gains"].items():
        gains = "  ".join(
            f"{key} {gain[key]:+.2f} [{gain[f'{key}_interval'][0]:+.2f}, {gain[f'{key}_interval'][1]:+.2f}]"
            for key in keys
        )
        typer.echo(f"over {name:<{width}}  {gains}" + (f"  best_f1 {gain['best_f1']:+.2f}" if best else ""))


def _warn(line: str) -> None:
    typer.echo(f"warning: {line}", err=True)


def _print_results(results: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    width = max(len(key) for key in results)
    for key, value in results.items():
        typer.echo(f"{key:<{width}}  {value:.4f}" if isinstance(value, float) else f"{key:<{width}}  {value}")
