"""From run folders to result files: what of a run outlives its folder, its data and its model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from lamella import runs
from lamella.data.demo import data_path
from lamella.data.examples import Example
from lamella.encoder.sources import MODEL_CONFIG, is_saved_model
from lamella.errors import RunError, UnreadableError, UsageError
from lamella.files import file_sha256, read_json, read_text, write_text
from lamella.inference.prediction_files import read_answers
from lamella.models.names import saved_model, short_model_name
from lamella.scoring.best_answers import score_best_answers
from lamella.scoring.metrics import QuestionScores, best_thresholds, language_of, score_questions, summarise
from lamella.scoring.threshold import assign_folds, cross_fit
from lamella.study.records import Found, RunRecord, questions_of, read_object
from lamella.study.result_files import (
    FORMAT,
    SUFFIX,
    SUMMED,
    VERSION,
    Result,
    is_result,
    per_question,
    result_of,
    result_text,
)

DIGITS = 4  # behind the point of what is in percent
COSTS = (
    "trainable_parameters", "total_parameters", "encoder_parameters", "trainable_percent_of_encoder", "model_bytes",
    "device", "precision", "train_seconds", "encoder_seconds", "head_seconds", "pass_seconds", "learners_in_pass",
    "processes", "windows_per_second", "hidden_states", "peak_memory_bytes", "inference_seconds_per_1000",
    "inference_batch_size", "flops_tokens", "inference_flops_per_window", "training_flops_per_window", "efficiency",
)  # fmt: skip
ENVIRONMENT = ("lamella", "python", "processor", "cores", "libraries")
Known = dict[tuple[str, ...], list[Example]]  # questions that were read already, by files and ids
_LINKS = 20  # models that stand on one another, at most


def with_results(found: Found, data: str | None = None) -> Found:
    """The same runs with what a result file would hold of each; those that come from one have it already."""
    known: Known = {}
    return replace(found, runs=tuple(run if run.kept else _with_result(run, data, known) for run in found.runs))


def write_results(found: Found, target: Path, *, overwrite: bool = False) -> list[Path]:
    """Write the result file of every run that came from a folder; `target` is a folder, or a file for a single run.

    All of them are checked before the first is written: another run's file is replaced only if `overwrite` says so.
    """
    fresh = [run for run in found.runs if run.kept is not None and run.folder.is_dir()]
    if not fresh:
        raise UsageError(
            f"--keep {target}: expected a run folder among the runs. All of them are result files already."
        )
    single = target.suffix == SUFFIX
    if target.suffix and not single and not target.is_dir():
        raise UsageError(
            f"--keep {target}: expected FILE{SUFFIX} or a folder. Got another suffix; if it is a folder, make it first."
        )
    if single and len(fresh) > 1:
        raise UsageError(f"--keep {target}: expected a folder, for {len(fresh)} runs. Got the name of one file.")
    files: dict[Path, str] = {}
    for run in fresh:
        assert run.kept is not None
        path = target if single else target / f"{_file_name(run.name)}{SUFFIX}"
        if path in files:
            raise UsageError(f"{path}: two runs would be kept under this name; keep them one by one, in FILE{SUFFIX}.")
        files[path] = result_text({**run.kept.content, "name": path.stem})
    for path, text in files.items():
        if path.is_file() and not overwrite and read_text(path) != text:
            other = "another run" if is_result(read_json(path)) else "something else"
            raise RunError(f"{path}: holds {other}; keep this one in another FILE{SUFFIX}, or pass --overwrite.")
        if path.is_dir() or (path.parent.exists() and not path.parent.is_dir()):
            raise UsageError(f"{path}: expected the name of a file to write, in a folder.")
    for path, text in files.items():
        write_text(path, text)
    return list(files)


def same_questions(records: Sequence[RunRecord]) -> list[Result]:
    """The results of runs that answered the same questions; others are refused."""
    results = [run.kept for run in records if run.kept is not None]
    first = results[0]
    for run, result in zip(records, results, strict=True):
        if result.ids_sha256 != first.ids_sha256:
            told = [f"{one.content['dev']['questions']} questions of {_files_told(one)}" for one in (first, result)]
            raise RunError(
                f"{run.folder}: expected the questions of {records[0].folder}, {told[0]}. Found {told[1]}, with other "
                "ids; score both on the same data with: lamella evaluate DATA --model RUN --out OUT"
            )
        if result.scored_at != first.scored_at:
            raise RunError(
                f"{run.folder}: expected scores at {first.scored_at} thresholds, as in {records[0].folder}. Found "
                f"{result.scored_at}; keep both anew, from the same data."
            )
    return results


def _with_result(run: RunRecord, data: str | None, known: Known) -> RunRecord:
    try:
        kept = _result(run, data, known)
    except (AttributeError, KeyError, TypeError):
        raise UnreadableError(f"{run.folder}: expected the files of a run; one of them is damaged.") from None
    return replace(run, kept=kept, results=kept.results())


def _result(run: RunRecord, data: str | None, known: Known) -> Result:
    """What is to be kept of a run folder, scored anew from its answers."""
    if not (run.folder / runs.NBEST).is_file():
        raise RunError(f"{run.folder}: expected {runs.NBEST}, to score it at other thresholds. It is not there.")
    answered = read_answers(run.folder)
    files = (data,) if data else run.data
    key = (*files, runs.data_record(files, answered.texts)["ids_sha256"])
    if key not in known:
        known[key] = questions_of(run, answered.texts, data)
    examples, ids = known[key], [example.id for example in known[key]]
    language = language_of(examples)
    best = score_best_answers(examples, answered.predictions, language=language)
    null_odds = read_object(run.folder / runs.NULL_ODDS) or {
        id: one.null_odds for id, one in answered.predictions.items()
    }
    if missing := [id for id in ids if not isinstance(null_odds.get(id), int | float)]:
        raise RunError(f"{run.folder / runs.NULL_ODDS}: expected a number for every question. {missing[0]} has none.")
    odds = np.array([null_odds[id] for id in ids], np.float64)
    own = score_questions(examples, answered.texts, language=language)
    folds = assign_folds(examples) if len(set(best.answerable.tolist())) == 2 else None
    crossfit = None if folds is None else cross_fit(best, odds, folds)
    scores: dict[str, Any] = {
        "at_0": _summed(best.withheld(odds > 0)),
        "own": {**_own_threshold(run), **_summed(own)},
        "best": {key.removeprefix("best_"): _short(one) for key, one in best_thresholds(best, null_odds).items()},
    }
    if crossfit is not None and folds is not None:
        scores["crossfit"] = {**_summed(crossfit), "folds": int(folds.max()) + 1}
    _refuse_other_scores(run, scores)
    hashes = {} if data else _recorded_hashes(run)
    paragraph_of = {example.id: example.context.text for example in examples}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "name": _file_name(run.name),
        **_identity(run),
        **_made_of(run),
        "dev": {
            "files": [_file(name, hashes) for name in files],
            "questions": len(ids),
            "unanswerable": int((~best.answerable).sum()),
            "paragraphs": len(set(paragraph_of.values())),
            "ids_sha256": runs.data_record(files, ids)["ids_sha256"],
        },
        "scores": scores,
        "cost": {key: run.cost[key] for key in COSTS if run.cost.get(key) is not None},
        "environment": {
            key: value for key, value in read_object(run.folder / runs.ENVIRONMENT).items() if key in ENVIRONMENT
        },
        "options": _options(run.config),
        "per_question": per_question(
            own if crossfit is None else crossfit, paragraph_of, "own" if crossfit is None else "crossfit"
        ),
    }
    return result_of(content)


def _identity(run: RunRecord) -> dict[str, Any]:
    record = read_object(run.folder / runs.RUN)
    named = {"command": record.get("command"), "finished": record.get("ended")}
    learner, order = run.seeds
    return {**named, "seed": {"learner": learner, "order": order}}


@dataclass(frozen=True)
class _Model:
    """What a run's model says of itself, and the pretrained encoder at the end of its chain."""

    config: Mapping[str, Any]
    base: Mapping[str, Any]
    by_way_of: tuple[str, ...]


def _made_of(run: RunRecord) -> dict[str, Any]:
    """Encoder, tuning, and what it learnt from: of a model in the run, else as `evaluate` recorded those of its own."""
    model = _model(run)
    facts = model.config.get("facts") or {}
    train = facts.get("train") or {}
    files = (run.config.get("data") or {}).get("train") or train.get("files") or []
    encoder = run.config.get("encoder") or {}
    name = model.base.get("name") or encoder.get("name")
    return {
        "encoder": {
            "name": None if name is None else short_model_name(str(name)),
            "sha256": model.base.get("sha256"),
            "parameters": run.cost.get("encoder_parameters"),
            **({"by_way_of": list(model.by_way_of)} if model.by_way_of else {}),
        },
        "tuning": dict(model.config.get("tuning") or encoder.get("tuning") or {}),
        "train": {
            "files": [_file(one, _recorded_hashes(run)) for one in files],
            **{key: train[key] for key in ("questions", "unanswerable") if key in train},
            "fraction": facts.get("fraction", (run.config.get("learner") or {}).get("fraction", 1.0)),
        },
        **{key: facts[key] for key in ("start", "teachers") if facts.get(key)},
    }


def _model(run: RunRecord) -> _Model:
    folder = run.folder / runs.MODEL
    config = read_object(folder / MODEL_CONFIG) if is_saved_model(folder) else {}
    config = config or read_object(run.folder / runs.RUN).get("model") or {}
    base: Mapping[str, Any] = config.get("base") or {}
    passed: list[str] = []
    while len(passed) < _LINKS and (on := saved_model(str(base.get("name") or os.devnull))):
        passed.append(short_model_name(str(base["name"])))
        base = read_object(on / MODEL_CONFIG).get("base") or {}
    return _Model(config, base, tuple(passed))


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """All options under their full names, files and models without their folders."""
    flat = {
        f"{section}.{key}": value
        for section, options in config.items()
        if isinstance(options, Mapping)
        for key, value in options.items()
    }
    for key in ("data.train", "data.dev", "data.threshold"):
        if flat.get(key):
            flat[key] = [PurePath(one).name for one in flat[key]]
    for key in ("encoder.name", "learner.start"):
        if isinstance(flat.get(key), str):
            flat[key] = short_model_name(flat[key])
    distil = flat.get("learner.distil")
    if isinstance(distil, Mapping):
        named = [key for key in ("models", "runs") if key in distil]
        flat["learner.distil"] = {
            **distil,
            **{key: [short_model_name(str(one)) for one in distil[key]] for key in named},
        }
    return flat


def _recorded_hashes(run: RunRecord) -> dict[str, str]:
    """Of the files that a training read, as they were then; runs made before do not tell."""
    return {one["name"]: one["sha256"] for one in read_object(run.folder / runs.RUN).get("files", [])}


def _file(name: str, recorded: Mapping[str, str]) -> dict[str, str]:
    """A data file without its folder, and its hash: as the run recorded it, else of now, where it lies there."""
    found, path = {"name": PurePath(name).name}, data_path(name)
    if name in recorded:
        return {**found, "sha256": recorded[name]}
    if not path.is_file():
        return found
    return {**found, "sha256": file_sha256(path)}


def _summed(scores: QuestionScores) -> dict[str, float]:
    return {key: _short(value) for key, value in summarise(scores).items() if key in SUMMED}


def _own_threshold(run: RunRecord) -> dict[str, Any]:
    return {key: run.results[key] for key in ("threshold", "threshold_tuned_on_these", "epoch") if key in run.results}


def _refuse_other_scores(run: RunRecord, scores: Mapping[str, Any]) -> None:
    """Data that changed since would make a result that no run ever had."""
    recorded = run.results.get("f1")
    if isinstance(recorded, int | float) and abs(recorded - scores["own"]["f1"]) > 0.01:
        raise RunError(
            f"{run.folder}: recorded F1 {recorded:.2f}. Its answers score {scores['own']['f1']:.2f} on the data as it "
            "is now; give the file that it was scored on with --data."
        )


def _short(value: float) -> float:
    return round(float(value), DIGITS)


def _file_name(name: str) -> str:
    """`mixers/dot-seed0` is kept as `mixers-dot-seed0`."""
    return re.sub(r"[^\w.+=,-]+", "-", name).strip("-") or "run"


def _files_told(result: Result) -> str:
    return ", ".join(str(one["name"]) for one in result.content["dev"]["files"]) or "an unnamed file"
