"""Write result files from run folders."""

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
from lamella.encoder.sources import MODEL_CONFIG, is_saved_model
from lamella.errors import OutputError, RunError, UnreadableError, UsageError, counted
from lamella.files import check_output_file, file_sha256, locked, read_json, read_text, write_text
from lamella.inference.several_contexts import paragraphs_of
from lamella.models.facts import AveragedFacts
from lamella.models.names import saved_model, short_model_name
from lamella.scoring.metrics import QuestionScores, best_thresholds, summarise
from lamella.scoring.threshold import assign_folds, cross_fit
from lamella.study.learning_curve import compact_curve, read_layers
from lamella.study.records import (
    ANSWERABILITY,
    SPAN,
    TASK_SCORES,
    RunRecord,
    RunSelection,
    read_json_object,
)
from lamella.study.result_files import (
    FORMAT,
    SUFFIX,
    SUMMARY_SCORES,
    VERSION,
    Result,
    is_result,
    parse_result,
    per_question,
    result_text,
)
from lamella.study.scored_runs import ExampleCache, ScoredRun, score_run

DIGITS = 4  # decimal places of scores in percent
COST_KEYS = (
    "trainable_parameters", "total_parameters", "encoder_parameters", "trainable_percent_of_encoder", "model_bytes",
    "device", "precision", "train_seconds", "encoder_seconds", "head_seconds", "pass_seconds", "learners_in_pass",
    "processes", "windows_per_second", "hidden_states", "peak_memory_bytes", "inference_seconds_per_1000",
    "inference_batch_size", "flops_tokens", "inference_flops_per_window", "training_flops_per_window", "efficiency",
)  # fmt: skip
ENVIRONMENT_KEYS = ("lamella", "python", "processor", "cores", "libraries")
_MAX_CHAIN = 20  # base models that are followed


def add_results(selection: RunSelection, data: str | None = None, *, on_answerability: bool = False) -> RunSelection:
    """Return the same runs, each with the content of its result file; runs read from such a file have it already.

    The `exact` and `f1` of a classifier of answerability are its accuracy. With `on_answerability`, readers that give
    texts are scored in the same way, by their null odds alone.
    """
    cache: ExampleCache = {}
    records = []
    for run in selection.records:
        task = ANSWERABILITY if on_answerability else run.task
        if run.result is None or run.result.task != task:
            run = _add_result(run, task, data, cache)
        records.append(run)
    return replace(selection, records=tuple(records))


def write_results(selection: RunSelection, target: Path, *, overwrite: bool = False) -> list[Path]:
    """Write the result file of every run that came from a folder; `target` is a folder, or a file for a single run.

    All files are checked before the first is written. The file of another run is replaced only with `overwrite`.
    """
    fresh = [run for run in selection.records if run.result is not None and run.folder.is_dir()]
    if not fresh:
        raise UsageError(f"--keep {target}: expected a run folder among the runs, got only result files already kept.")
    single = target.suffix == SUFFIX
    if target.suffix and not single and not target.is_dir():
        raise UsageError(
            f"--keep {target}: expected FILE{SUFFIX} or a folder, got another suffix; create a folder first."
        )
    if single and len(fresh) > 1:
        raise UsageError(f"--keep {target}: expected a folder for {len(fresh)} runs, got the name of one file.")
    files: dict[Path, str] = {}
    for run in fresh:
        assert run.result is not None
        path = target if single else target / f"{_file_name(run.name)}{SUFFIX}"
        if path in files:
            raise UsageError(f"{path}: two runs would have this file; keep them one at a time, as FILE{SUFFIX}.")
        files[path] = result_text({**run.result.content, "name": path.stem})
    inputs = [run.folder for run in selection.records]
    _check_replaced(files, inputs, overwrite)
    with locked(target.parent if single else target, advice="wait for it, or choose another --keep"):
        _check_replaced(files, inputs, overwrite)  # again: another process may have kept its runs meanwhile
        for path, text in files.items():
            write_text(path, text)
    return list(files)


def _check_replaced(files: Mapping[Path, str], inputs: Sequence[Path], overwrite: bool) -> None:
    """Refuse to replace anything but the same result, unless with `overwrite`; never an input."""
    for path, text in files.items():
        if path.is_file() and read_text(path) == text:
            continue
        if path.is_file() and not overwrite:
            content = "another run" if is_result(read_json(path)) else "something else"
            raise OutputError(f"{path}: holds {content}; choose another FILE{SUFFIX}, or pass --overwrite.")
        check_output_file(path, inputs=inputs, overwrite=overwrite)
        if path.parent.exists() and not path.parent.is_dir():
            raise UsageError(f"{path}: expected the path of a file to write, inside a folder.")


def comparable_results(records: Sequence[RunRecord]) -> list[Result]:
    """Return the results of some runs; raise an error unless all are for the same questions and thresholds."""
    results = [run.result for run in records if run.result is not None]
    first = results[0]
    for run, result in zip(records, results, strict=True):
        if result.ids_sha256 != first.ids_sha256:
            raise RunError(
                f"{run.folder}: expected the questions of {records[0].folder} ({_describe_questions(first)}), got "
                f"{_describe_questions(result)} with other ids; "
                "score both on the same data with: lamella evaluate DATA --model RUN --out OUT"
            )
        if result.scored_at != first.scored_at:
            raise RunError(
                f"{run.folder}: expected scores at {first.scored_at} thresholds, as in {records[0].folder}, got "
                f"{result.scored_at}; keep both again, from the same data."
            )
    return results


def _add_result(run: RunRecord, task: str, data: str | None, cache: ExampleCache) -> RunRecord:
    if not run.folder.is_dir():
        raise UsageError(
            f"{run.folder}: expected a classifier of answerability, as others of these runs are, got the result file "
            "of a reader, which does not record where it abstained; give its run folder, or compare it with readers."
        )
    try:
        scored = score_run(run, task, data, cache)
        result = _make_result(run, data, scored)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UnreadableError(f"{run.folder}: expected the files of a run; one of them is damaged.") from None
    return replace(run, result=result, scores=result.scores())


def _make_result(run: RunRecord, data: str | None, scored: ScoredRun) -> Result:
    """Return the result of a run folder from its scores."""
    files, ids = (data,) if data else run.data_files, scored.best.ids
    hashes = {} if data else _recorded_hashes(run)
    paragraph_of = paragraphs_of(scored.examples)
    of_contexts = _scores_and_lists(scored, paragraph_of)
    of_contexts["scores"]["own"] = {**_own_threshold(run), **of_contexts["scores"]["own"]}
    _check_recorded_score(run, scored, of_contexts["scores"])
    content = {
        "format": FORMAT,
        "version": VERSION,
        "name": _file_name(run.name),
        **({"task": scored.task} if scored.task != SPAN else {}),  # the first files have none
        **_identity(run),
        **_made_of(run),
        "dev": {
            "files": [_describe_file(name, hashes) for name in files],
            **_counts(scored),
            "ids_sha256": runs.data_record(files, ids)["ids_sha256"],
        },
        "scores": of_contexts["scores"],
        "cost": {key: run.cost[key] for key in COST_KEYS if run.cost.get(key) is not None},
        "environment": {
            key: value
            for key, value in read_json_object(run.folder / runs.ENVIRONMENT).items()
            if key in ENVIRONMENT_KEYS
        },
        "options": _options(run.config),
        **_course(run),
        "per_question": of_contexts["per_question"],
    }
    if scored.by_question is not None:
        content["by_question"] = {
            "dev": _counts(scored.by_question),
            **_scores_and_lists(scored.by_question, paragraph_of),
        }
    return parse_result(content)


def _counts(scored: ScoredRun) -> dict[str, int]:
    return {
        "questions": len(scored.examples),
        "unanswerable": sum(not example.answerable for example in scored.examples),
        "paragraphs": len({example.context.text for example in scored.examples}),
    }


def _scores_and_lists(scored: ScoredRun, paragraph_of: Mapping[str, str]) -> dict[str, Any]:
    """Return the scores at all thresholds, and the lists of single questions."""
    best, own, null_odds = scored.best, scored.own, scored.null_odds
    odds = np.array([null_odds[id] for id in best.ids], np.float64)
    folds = assign_folds(scored.examples) if len(set(best.answerable.tolist())) == 2 else None
    crossfit = None if folds is None else cross_fit(best, odds, folds)
    at_0 = best.withheld(odds > 0)
    scores: dict[str, Any] = {
        "at_0": _summary(at_0),
        "own": _summary(own),
        "best": {key.removeprefix("best_"): _round(value) for key, value in best_thresholds(best, null_odds).items()},
    }
    if crossfit is not None and folds is not None:
        scores["crossfit"] = {**_summary(crossfit), "folds": int(folds.max()) + 1}
    scored_at = "own" if crossfit is None else "crossfit"
    lists = per_question(own if crossfit is None else crossfit, at_0, paragraph_of, scored_at)
    return {"scores": scores, "per_question": lists}


def _identity(run: RunRecord) -> dict[str, Any]:
    record = read_json_object(run.folder / runs.RUN)
    learner, order = run.seeds
    return {
        "command": record.get("command"),
        "finished": record.get("ended"),
        "seed": {"learner": learner, "order": order},
    }


def _course(run: RunRecord) -> dict[str, Any]:
    """Return the learning curve and the mean layer weights, where the run recorded them."""
    course = {"curve": compact_curve(run.folder / runs.HISTORY), "layers": read_layers(run.folder)}
    return {key: value for key, value in course.items() if value}


@dataclass(frozen=True)
class _Model:
    """The configuration of a run's model, its pretrained encoder, and the models between the two."""

    config: Mapping[str, Any]
    base: Mapping[str, Any]
    by_way_of: tuple[str, ...]


def _made_of(run: RunRecord) -> dict[str, Any]:
    """Return encoder, tuning and training data: from the model in the run, otherwise as `evaluate` recorded them."""
    model = _model(run)
    facts = model.config.get("facts") or {}
    train = facts.get("train") or {}
    averaged = [member for part in facts.get("mean_of", []) for member in AveragedFacts.model_validate(part).trained()]
    of_averaged = [file for member in averaged if member.train for file in member.train.files]
    given = (run.config.get("data") or {}).get("train") or train.get("files") or list(dict.fromkeys(of_averaged))
    files = [entry["file"] if isinstance(entry, Mapping) else entry for entry in given]
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
            "files": [_describe_file(file, _recorded_hashes(run)) for file in files],
            **{key: train[key] for key in ("questions", "unanswerable") if key in train},
            "fraction": facts.get("fraction", (run.config.get("learner") or {}).get("fraction", 1.0)),
        },
        **{key: facts[key] for key in ("start", "teachers", "mean_of") if facts.get(key)},
    }


def _model(run: RunRecord) -> _Model:
    folder = run.folder / runs.MODEL
    config = read_json_object(folder / MODEL_CONFIG) if is_saved_model(folder) else {}
    config = config or read_json_object(run.folder / runs.RUN).get("model") or {}
    base: Mapping[str, Any] = config.get("base") or {}
    passed: list[str] = []
    while len(passed) < _MAX_CHAIN and (below := saved_model(str(base.get("name") or os.devnull))):
        passed.append(short_model_name(str(base["name"])))
        base = read_json_object(below / MODEL_CONFIG).get("base") or {}
    return _Model(config, base, tuple(passed))


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options under their full names; files and models are named without their folders."""
    flat = {
        f"{section}.{key}": value
        for section, options in config.items()
        if isinstance(options, Mapping)
        for key, value in options.items()
    }
    for key in ("data.train", "data.dev", "data.threshold"):
        if flat.get(key):
            flat[key] = [
                {**entry, "file": PurePath(entry["file"]).name} if isinstance(entry, Mapping) else PurePath(entry).name
                for entry in flat[key]
            ]
    if flat.get("data.licences"):
        flat["data.licences"] = {PurePath(file).name: licence for file, licence in flat["data.licences"].items()}
    for key in ("encoder.name", "learner.start"):
        if isinstance(flat.get(key), str):
            flat[key] = short_model_name(flat[key])
    distil = flat.get("learner.distil")
    if isinstance(distil, Mapping):
        # Whatever folders a distiller reads, under whatever option: a text that is no path stays as it is.
        flat["learner.distil"] = {
            key: value if key == "name" else _without_folders(value) for key, value in distil.items()
        }
    return flat


def _without_folders(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return short_model_name(value) if isinstance(value, str) else value


def _recorded_hashes(run: RunRecord) -> dict[str, str]:
    """Return the hashes of the data files as training read them; early versions did not record any."""
    files = read_json_object(run.folder / runs.RUN).get("files", [])
    return {file["name"]: file["sha256"] for file in files}


def _describe_file(name: str, recorded: Mapping[str, str]) -> dict[str, str]:
    """Return the name of a data file without its folder, and its hash: recorded by the run, otherwise computed now."""
    described, path = {"name": PurePath(name).name}, data_path(name)
    if name in recorded:
        return {**described, "sha256": recorded[name]}
    if not path.is_file():
        return described
    return {**described, "sha256": file_sha256(path)}


def _summary(scores: QuestionScores) -> dict[str, float]:
    return {key: _round(value) for key, value in summarise(scores).items() if key in SUMMARY_SCORES}


def _own_threshold(run: RunRecord) -> dict[str, Any]:
    return {key: run.scores[key] for key in ("threshold", "threshold_tuned_on_these", "epoch") if key in run.scores}


def _check_recorded_score(run: RunRecord, scored: ScoredRun, scores: Mapping[str, Any]) -> None:
    """Check that the answers still score what the run recorded: if not, its data has changed since."""
    score = TASK_SCORES[scored.task]
    recorded, today = run.scores.get(score.key), scores["own"]["f1"]  # of decisions, both scores are the accuracy
    if isinstance(recorded, int | float) and abs(recorded - today) > 0.01:
        raise RunError(
            f"{run.folder}: expected the recorded {score.title} of {recorded:.2f}, got {today:.2f} on today's data; "
            "pass the file that the run was scored on with --data."
        )


def _round(value: float) -> float:
    return round(float(value), DIGITS)


def _file_name(name: str) -> str:
    """Return a name without slashes: `mixers/dot-seed0` becomes `mixers-dot-seed0`."""
    return re.sub(r"[^\w.+=,@-]+", "-", name).strip("-") or "run"


def _describe_questions(result: Result) -> str:
    dev = result.content["dev"]
    files = ", ".join(str(file["name"]) for file in dev["files"]) or "an unnamed file"
    return f"{counted(dev['questions'], 'question')} of {files}"
