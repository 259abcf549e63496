"""The content of an HTML report, read from run folders: scores, costs, curves, layer weights, answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from lamella.errors import UsageError
from lamella.study.analysis.layer_weights import learned_weights
from lamella.study.learning_curve import read_layers
from lamella.study.reader_options import name_of_base, without_seed
from lamella.study.records import (
    ANSWERABILITY,
    DEFAULT_METRICS,
    TASK_SCORES,
    RunRecord,
    is_number,
    read_records,
)
from lamella.study.report.answers import add_answers
from lamella.study.report.curves import read_curve
from lamella.study.report.option_names import add_varied_options
from lamella.study.report.run_cost import run_cost
from lamella.study.report.values import SHOWN_SCORES, ReportValues, rounded

WITHOUT_LAYERS = "Learned layer weights are left out: they need torch; install it with: pip install 'lamella[train]'."


def collect(
    folders: Sequence[str | os.PathLike[str]], data: str | None = None, *, layers: bool = False
) -> ReportValues:
    """Return everything that the report shows as plain JSON values. No model is run, unless `layers` asks for it.

    `folders` are run folders, result files, or folders of either. `data` is the file with the questions that all of
    them were scored on; by default the files that each run records. If these cannot be read, everything that needs the
    true answers is left out, and a note explains it. `layers` adds the layer weights of the sample answers.
    """
    if not folders:
        raise UsageError("report: expected at least one run folder, got none.")
    records = read_records(folders, unfinished=True).records
    notes: list[str] = []
    shown = [_shown_values(run, notes) for run in records]
    varied = add_varied_options(shown, [run.config for run in records])
    names = {run["short_name"] for run in shown}
    for values in shown:  # only a base that is shown, too; another one may be a folder of this machine
        values["base"] = values["base"] if values["base"] in names else None
    samples = add_answers(shown, records, data, notes, layers=layers)
    if layers and not any(answer and "layers" in answer for run in shown for answer in run.get("answers") or ()):
        notes.append("--layers: no sample answer has layers to show: no run here has a model that weighs layers.")
    if unfinished := [run["name"] for run in shown if run["state"] != "finished"]:
        notes.append(f"Not finished, shown up to where they stopped: {', '.join(unfinished)}.")
    if any(run["train_seconds_from"] == "clock" for run in shown):
        notes.append(
            "For runs without a recorded training time, the report shows the wall-clock time of the whole run, "
            "including the encoder, evaluations and other learners of the same pass."
        )
    devices = list(dict.fromkeys(run["device"] for run in shown if run["device"]))
    if len(devices) > 1:
        notes.append(f"Times were measured on several devices ({'; '.join(devices)}); compare them within one only.")
    return {"metric": _metric(shown), "varied": varied, "runs": shown, "samples": samples, "notes": notes}


def _shown_values(run: RunRecord, notes: list[str]) -> ReportValues:
    """Return the values from a run's own files; the analysis of its answers is added later."""
    cost, source = run_cost(run)
    return {
        "name": run.name,
        "state": run.state,
        "task": run.task,
        "metric": run.config.get("training", {}).get("metric") or DEFAULT_METRICS[run.task],
        "scores": {key: rounded(run.scores[key]) for key in SHOWN_SCORES if is_number(run.scores.get(key))},
        "cost": cost,
        "efficiency": rounded(run.cost["efficiency"]) if is_number(run.cost.get("efficiency")) else None,
        "device": run.device,
        "train_seconds_from": source,
        "curve": read_curve(run),
        "layers": _recorded_layers(run) or _learned_layers(run.folder, notes),
        "short_name": without_seed(PurePath(run.name).name),
        "base": name_of_base(run.config.get("encoder", {}).get("name")),
    }


def _recorded_layers(run: RunRecord) -> ReportValues | None:
    """Return the mean weight of each layer by output, as training recorded it; None for earlier runs."""
    recorded = read_layers(run.folder) if run.folder.is_dir() else {}
    if run.result is not None and not recorded:
        recorded = run.result.content.get("layers", {})
    if not recorded:
        return None
    weights = {output: list(map(rounded, kinds["all"])) for output, kinds in recorded["weights"].items()}
    alike = len({tuple(values) for values in weights.values()}) == 1
    return {"numbers": recorded["layers"], "weights": {"both": next(iter(weights.values()))} if alike else weights}


def _learned_layers(folder: Path, notes: list[str]) -> ReportValues | None:
    """Return the learned weight of each layer by stream, and the numbers of the layers, as the encoder counts them."""
    try:
        learned = learned_weights(folder)
    except ModuleNotFoundError as error:  # the mixers are defined with torch
        if error.name != "torch":
            raise
        if WITHOUT_LAYERS not in notes:
            notes.append(WITHOUT_LAYERS)
        return None
    return learned and {
        "numbers": learned["layers"],
        "weights": {stream: list(map(rounded, weights)) for stream, weights in learned["weights"].items()},
    }


def _metric(shown: Sequence[ReportValues]) -> str:
    """Return the score to rank the runs by.

    It is the metric that selected the checkpoints if all runs share it, otherwise F1. With classifiers of
    answerability among them, it is the score that all have: the accuracy of the decision to answer.
    """
    if any(run["task"] == ANSWERABILITY for run in shown):
        return TASK_SCORES[ANSWERABILITY].key
    metrics = {run["metric"] for run in shown}
    metric = metrics.pop() if len(metrics) == 1 else "f1"
    return metric if any(metric in run["scores"] for run in shown) else "f1"
