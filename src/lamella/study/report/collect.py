"""What a report shows, read from run folders: scores, costs, curves, layer weights, answers. No model is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lamella import runs
from lamella.errors import UsageError
from lamella.study.analysis.layer_weights import learned_weights
from lamella.study.records import RunRecord, is_number, read_runs
from lamella.study.report.answers import add_answers
from lamella.study.report.costs import cost_of
from lamella.study.report.curves import read_curve
from lamella.study.report.option_names import name_what_differs
from lamella.study.report.values import SHOWN_SCORES, Record, rounded


def collect(folders: Sequence[Path], data: str | None = None) -> Record:
    """Everything that the page shows, as plain JSON values.

    `folders` are run folders, or folders of several runs. `data` are the questions all of them were scored on; without
    it, those that each run says it was scored on. Where they are not to be found, what needs the true answers is left
    out, and a note says so.
    """
    if not folders:
        raise UsageError("report: expected at least one run folder.")
    found = read_runs(folders, unfinished=True).runs
    records = [_shown(run) for run in found]
    varied = name_what_differs(records, [run.config for run in found])
    notes: list[str] = []
    samples = add_answers(records, found, data, notes)
    if unfinished := [record["name"] for record in records if record["state"] != "finished"]:
        notes.append(f"Not finished, and shown as far as they went: {', '.join(unfinished)}.")
    if any(record["train_seconds_from"] == "clock" for record in records):
        notes.append(
            "Training seconds without a record of cost are the wall clock of the whole run, encoder, evaluations and "
            "learners of the same pass included."
        )
    return {"metric": _metric(records), "varied": varied, "runs": records, "samples": samples, "notes": notes}


def _shown(run: RunRecord) -> Record:
    """What a run's own files tell; its answers come later."""
    cost, clock = cost_of(run)
    return {
        "name": run.name,
        "state": run.state,
        "metric": run.config.get("training", {}).get("metric", "f1"),
        "scores": {key: rounded(run.results[key]) for key in SHOWN_SCORES if is_number(run.results.get(key))},
        "cost": cost,
        "train_seconds_from": clock,
        "curve": read_curve(run.folder / runs.HISTORY),
        "layers": _layer_weights(run.folder),
    }


def _layer_weights(folder: Path) -> Record | None:
    """What a scalar mix gives each layer, for every stream: `{"start": [...], "end": [...]}`."""
    found = learned_weights(folder)
    return found and {stream: [rounded(one) for one in row] for stream, row in found["weights"].items()}


def _metric(records: Sequence[Record]) -> str:
    """The score that the runs were chosen by, if it is the same in all, and F1 otherwise."""
    wanted = {record["metric"] for record in records}
    metric = wanted.pop() if len(wanted) == 1 else "f1"
    return metric if any(metric in record["scores"] for record in records) else "f1"
