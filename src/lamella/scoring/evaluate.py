"""Evaluation: score the answers of a model, or a predictions file, against true answers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import UsageError, shorten
from lamella.files import write_json
from lamella.inference.abstention import expecting
from lamella.inference.arguments import check_positive
from lamella.inference.model_record import model_record
from lamella.inference.predict import predict
from lamella.inference.prediction import Prediction
from lamella.inference.prediction_files import write_predictions
from lamella.inference.protocols import AnswerSource, QAModel
from lamella.inference.question_ids import check_unique_ids
from lamella.inference.questions import read_questions
from lamella.inference.reader import Reader
from lamella.inference.several_contexts import answers_by_question, has_several_contexts, one_example_per_question
from lamella.inference.stored_logits import LogitsWriter
from lamella.models.loading import Precision, load_model
from lamella.models.saved import import_plugins_of
from lamella.progress import Log
from lamella.scoring.answer_metrics import (
    AnswerMetric,
    MetricSpec,
    add_scores,
    build_metrics,
    metrics_for,
    score_metrics,
)
from lamella.scoring.best_answers import null_odds_of, score_best_answers
from lamella.scoring.calibrate import threshold_report
from lamella.scoring.cost import cost_of_answers, write_cost
from lamella.scoring.metrics import language_of, score, summarise
from lamella.scoring.score_files import read_na_prob, read_null_odds, read_predictions
from lamella.stopwatch import Stopwatch

Questions = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Sequence[Example]


def evaluate(
    model: str | os.PathLike[str] | Reader | QAModel,
    data: Questions,
    *,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = 32,
    precision: Precision = "auto",
    answerable: float | None = None,
    language: str | None = None,
    metrics: Sequence[MetricSpec] = (),
    keep_logits: bool = False,
    overwrite: bool = False,
    log: Log | None = None,
) -> dict[str, Any]:
    """Answer the questions of `data` with `model` and return its scores, in percent.

    `model` is a name or a folder, as for `Reader.load`, or a loaded reader, which has its `precision` already. `data`
    is a file, files or examples.
    With `out`, predictions, scores and cost are also written to a run folder; `keep_logits` adds the logits to it.
    `answerable` is the share of the questions that is expected to have an answer, as for `Reader.ask`.
    The language of the metric is detected from the contexts unless you name it. `metrics` are computed
    besides exact match and F1. `log` receives warnings.
    """
    check_positive("batch_size", batch_size)
    files, examples = _read_questions(data, log)
    if isinstance(model, str | os.PathLike):
        name = os.fspath(model)
        answering: QAModel = load_model(model, precision=precision, inference_only=True)
    else:
        answering = model.model if isinstance(model, Reader) else model
        if not hasattr(answering, "folders"):
            raise UsageError(
                f"evaluate: expected a reader, the name or the folder of a model, or predictions, got {shorten(model)}."
            )
        if precision != "auto":
            raise UsageError("evaluate: expected no precision for a loaded reader; pass it to Reader.load.")
        name = str(next(iter(answering.folders), ""))
    answering = expecting(answering, answerable)
    if metrics:
        import_plugins_of(answering.folders)  # the model may bring the metric
    extra = build_metrics(metrics)
    if extra and not answering.gives_text:
        raise UsageError(
            f"metric {next(iter(extra))!r}: expected a model that gives answer texts, {name} gives none; leave it out."
        )
    if out is None:
        predictions = predict(answering, examples, batch_size=batch_size)
        language = language or language_of(examples)
        return score_predictions(answering, examples, predictions, language=language, metrics=extra)
    asked = runs.data_record(files, (example.id for example in examples))
    record = model_record(name, answering, answerable)
    writer = LogitsWriter(answering, record) if keep_logits else None
    with runs.new_run(
        Path(out), "evaluate", overwrite=overwrite, needs=answering.folders, data=asked, model=record
    ) as folder:
        return evaluate_model(
            answering,
            examples,
            folder,
            batch_size=batch_size,
            language=language,
            metrics=extra,
            logits_writer=writer,
        )


def evaluate_model(
    model: QAModel,
    examples: Sequence[Example],
    folder: Path,
    *,
    batch_size: int = 32,
    language: str | None = None,
    metrics: Mapping[str, AnswerMetric] | None = None,
    logits_writer: LogitsWriter | None = None,
) -> dict[str, Any]:
    """Predict and score, and write predictions, scores and cost into an open run folder."""
    clock = Stopwatch()
    predictions = predict(model, examples, batch_size=batch_size, sink=logits_writer, clock=clock)
    language = language or language_of(examples)
    results = score_predictions(model, examples, predictions, language=language, metrics=metrics)
    write_predictions(folder, model, predictions, examples)
    if logits_writer is not None:
        logits_writer.write(folder)
    write_json(folder / runs.RESULTS, results)
    write_cost(folder, cost_of_answers(model, examples, clock.seconds, batch_size), f1=results.get("f1"))
    return results


def evaluate_file(
    data: Questions,
    predictions: Path | Mapping[str, str],
    *,
    null_odds: Path | Mapping[str, float] | None = None,
    na_prob: Path | Mapping[str, float] | None = None,
    threshold: float | None = None,
    missing: Literal["error", "empty"] = "error",
    language: str | None = None,
    metrics: Sequence[MetricSpec] = (),
    log: Log | None = None,
) -> dict[str, Any]:
    """Score predictions: a file with {id: text}, as the official script reads it, a submission, or their content."""
    extra = build_metrics(metrics)
    (_, examples), answers = _read_questions(data, log), read_predictions(predictions)
    # Where questions have several contexts, the file may hold one answer per question instead of one per context.
    if answers.keys().isdisjoint(example.id for example in examples):
        examples = one_example_per_question(examples)
    odds = None if null_odds is None else read_null_odds(null_odds)
    probability = None if na_prob is None else read_na_prob(na_prob)
    language = language or language_of(examples)
    results = score(
        examples,
        answers,
        null_odds=odds,
        na_prob=probability,
        threshold=threshold,
        missing=missing,
        language=language,
    )
    na = odds if odds is not None else probability
    if threshold is not None and na is not None:
        answers = {id: "" if na.get(id, threshold) > threshold else text for id, text in answers.items()}
    metrics_of_texts = metrics_for(language, extra)
    return add_scores(results, score_metrics(metrics_of_texts, examples, answers, language=language, missing=missing))


def score_predictions(
    model: AnswerSource,
    examples: Sequence[Example],
    predictions: Mapping[str, Prediction],
    *,
    language: str = "en",
    metrics: Mapping[str, AnswerMetric] | None = None,
) -> dict[str, Any]:
    """Score predictions at the threshold of their model; for a model without texts, only how well it abstains.

    `best_f1` and similar keys search all thresholds, so they start from the best *answer* of every question, even
    where the prediction was "no answer". The text in `predictions.json` alone could not bring that answer back.
    `metrics` are computed in addition, on the texts at the threshold.
    """
    decoding, gives_text = model.decoding, model.gives_text
    metrics = metrics_for(language, metrics)
    scores = score_best_answers(examples, predictions, gives_text=gives_text, language=language)
    odds = {id: prediction.null_odds for id, prediction in predictions.items()}
    results: dict[str, Any] = summarise(scores, null_odds=odds, threshold=decoding.null_score_diff_threshold)
    if not gives_text:
        results = {key: value for key, value in results.items() if key == "total" or key.startswith("answerability")}
    results |= threshold_report(decoding, examples, scores, null_odds_of(examples, predictions), gives_text=gives_text)
    results = add_scores(results, _score_metrics(metrics, model, examples, predictions, language))
    if has_several_contexts(examples):
        results |= _score_by_question(model, examples, predictions, language, metrics)
    return results


def _score_metrics(
    metrics: Mapping[str, AnswerMetric] | None,
    model: AnswerSource,
    examples: Sequence[Example],
    predictions: Mapping[str, Prediction],
    language: str,
) -> dict[str, float]:
    if not metrics or not model.gives_text:
        return {}
    threshold = model.decoding.null_score_diff_threshold
    texts = {id: prediction.text(threshold) for id, prediction in predictions.items()}
    return score_metrics(metrics, examples, texts, language=language)


def _score_by_question(
    model: AnswerSource,
    examples: Sequence[Example],
    predictions: Mapping[str, Prediction],
    language: str,
    metrics: Mapping[str, AnswerMetric] | None,
) -> dict[str, Any]:
    """Score the single answer that a question gets from all its contexts."""
    questions, answers = one_example_per_question(examples), answers_by_question(model, examples, predictions)
    best = score_best_answers(questions, answers, gives_text=model.gives_text, language=language)
    withheld = null_odds_of(questions, answers) > model.decoding.null_score_diff_threshold
    results: dict[str, Any] = summarise(best.withheld(withheld))
    if not model.gives_text:
        results = {"answerability_accuracy": results["exact"], "total": results["total"]}
    results |= _score_metrics(metrics, model, questions, answers, language)
    return {f"question_{key}": value for key, value in results.items()}


def _read_questions(data: Questions, log: Log | None) -> tuple[list[str], Sequence[Example]]:
    """Return the names of the files, none for examples, and all their questions."""
    given = [data] if isinstance(data, str | os.PathLike) else list(data)
    files = [os.fspath(item) for item in given if isinstance(item, str | os.PathLike)]
    examples = [example for file in files for example in read_questions(file, labelled=True, log=log)]
    examples += [item for item in given if isinstance(item, Example)]
    check_unique_ids(examples)
    return files, examples
