"""Scoring: of a predictions file, or of a model's own predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamella import runs
from lamella.data.dataset import Dataset, load_examples
from lamella.data.examples import Example
from lamella.encoder.sources import MODEL_CONFIG, Source, hash_weights, is_saved_model
from lamella.errors import DataError, UnreadableError
from lamella.files import read_json, write_json
from lamella.inference.several_contexts import asked_once
from lamella.scoring.metrics import score

if TYPE_CHECKING:
    from lamella.inference.logits import LogitsKeeper
    from lamella.inference.predict import Answering
    from lamella.scoring.calibrate import Tuned

Language = Literal["en", "ko"]
LEARNT_FROM = ("train", "fraction", "start", "teachers")  # of the facts of a model


def evaluate_file(
    data: str,
    predictions: Path,
    *,
    null_odds: Path | None = None,
    na_prob: Path | None = None,
    threshold: float | None = None,
    missing: Literal["error", "empty"] = "error",
    language: Language | None = None,
) -> dict[str, Any]:
    """Score a file in the official format."""
    examples, answers = read_questions(data, labelled=True), _read_scores(predictions)
    if answers.keys().isdisjoint(one.id for one in examples):  # they may name questions, and not their contexts
        examples = asked_once(examples)
    return score(
        examples,
        answers,
        null_odds=_read_scores(null_odds) if null_odds else None,
        na_prob=_read_scores(na_prob) if na_prob else None,
        threshold=threshold,
        missing=missing,
        language=language or language_of(examples),
    )


def evaluate_model(
    model: Answering,
    examples: Sequence[Example],
    folder: Path,
    *,
    batch_size: int = 32,
    language: Language | None = None,
    keeper: LogitsKeeper | None = None,
) -> dict[str, Any]:
    """Predict, score, and write both into an open run folder."""
    from lamella.inference.predict import predict, score_predictions, write_predictions
    from lamella.scoring.cost import Stopwatch, cost_of_answers, write_cost

    clock = Stopwatch()
    predictions = predict(model, examples, batch_size=batch_size, keeper=keeper, clock=clock)
    results = score_predictions(model, examples, predictions, language=language or language_of(examples))
    write_predictions(folder, model, predictions, examples)
    if keeper is not None:
        keeper.write(folder)
    write_json(folder / runs.RESULTS, results)
    write_cost(folder, cost_of_answers(model, examples, clock.seconds, batch_size), f1=results.get("f1"))
    return results


def model_record(name: str, model: Answering) -> dict[str, Any]:
    """Which model answers: its name as given, a hash of its weights; of ours also the base and what it learnt from."""
    folder = next(iter(model.folders), None)
    weights = [] if folder is None else Source(name, folder, "folder").weights or sorted(folder.glob("*.onnx"))
    record: dict[str, Any] = {"name": name, **({"sha256": hash_weights(weights)} if weights else {})}
    if folder is None or not is_saved_model(folder):
        return record
    config = read_json(folder / MODEL_CONFIG)
    facts = {key: value for key, value in config.get("facts", {}).items() if key in LEARNT_FROM}
    return {**record, "base": config["base"], "tuning": config["tuning"], "facts": facts}


def calibrate_model(
    model: Answering,
    examples: Sequence[Example],
    data: str,
    *,
    method: Literal["temperature", "isotonic"] = "temperature",
    batch_size: int = 32,
) -> Tuned:
    """Tune a model's threshold and calibration on the questions of a file; nothing is written."""
    from lamella.inference.predict import predict
    from lamella.scoring.calibrate import check_tunable, tune_decoding

    check_tunable(examples, [data])
    return tune_decoding(
        model.decoding,
        examples,
        predict(model, examples, batch_size=batch_size),
        data=[data],
        method=method,
        gives_text=model.gives_text,
        language=language_of(examples),
    )


def read_questions(data: str, *, labelled: bool = False) -> Sequence[Example]:
    """The questions of a file, to be answered or, if `labelled`, scored.

    The metric compares texts, so it is all the same where an answer is said to lie.
    """
    return _load(data, labelled).examples


def read_any_questions(data: str) -> tuple[Sequence[Example], bool]:
    """The questions of a file, and whether they can be scored."""
    loaded = _load(data, labelled=False)
    return loaded.examples, all(problem.kind != "unlabelled" for file in loaded.files for problem in file.problems)


def language_of(examples: Sequence[Example]) -> Language:
    """Korean contexts are scored by KorQuAD's metric, all others by SQuAD's; a sample of them decides."""
    text = "".join(example.context.text for example in examples[:: max(1, len(examples) // 50)])
    letters = sum(character.isalpha() for character in text)
    hangul = sum("\uac00" <= character <= "\ud7a3" for character in text)
    return "ko" if hangul > 0.5 * max(1, letters) else "en"


def _load(data: str, labelled: bool) -> Dataset:
    from lamella.inference.predict import refuse_repeated_ids

    loaded = load_examples([data], on_bad_answer="ignore", labelled=labelled)
    if loaded.skipped:
        raise DataError(f"{data}: {loaded.skipped} questions cannot be read; see them with: lamella check {data}")
    if not loaded.examples:
        raise DataError(f"{data}: expected questions. Found none.")
    refuse_repeated_ids(loaded.examples)
    return loaded


def _read_scores(path: Path) -> dict[str, Any]:
    scores = read_json(path)
    if not isinstance(scores, dict):
        raise UnreadableError(
            f"{path}: expected one JSON object {{question id: value}}. Found {type(scores).__name__}."
        )
    return scores
