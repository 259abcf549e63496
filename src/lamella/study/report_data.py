"""What a report shows, read from run folders: scores, costs, curves, layer weights, answers. No model is run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella import runs
from lamella.data.examples import Example
from lamella.errors import LamellaError, UnreadableError, UsageError
from lamella.inference.evaluate import Language, language_of, read_questions
from lamella.inference.metrics import QuestionScores, score_questions, summarise
from lamella.inference.threshold import expected_calibration_error
from lamella.study.answered import confusion
from lamella.study.groups import Grouping, grouped_scores, groupings
from lamella.study.layers import learned_weights
from lamella.study.runs import RunRecord, read_object, read_runs

# What the page shows of a run's cost, and the keys of cost.json it is read from.
COST_KEYS = {
    "parameters": "trainable_parameters",
    "train_seconds": "train_seconds",
    "inference_seconds": "inference_seconds_per_1000",
}
CURVE_POINTS = 200  # a longer curve is drawn by the means of as many stretches
PR_POINTS = 60
RELIABILITY_GROUPS = 10
SAMPLES = 24  # questions of a data set
CONTEXT_CHARACTERS = 1500  # of a sample; a longer context is cut around the answers
OUTCOMES = {  # as the page calls what `confusion` counts
    "right_has_answer": "answered, exactly right",
    "answered_wrongly": "answered, not exactly right",
    "abstained_wrongly": "abstained though there is an answer",
    "right_no_answer": "abstained rightly",
    "answered_the_unanswerable": "answered the unanswerable",
}
# Runs that differ in these alone are the same kind of run.
NOT_A_KIND = ("learner.fraction", "learner.seed", "training.order_seed")
SHOWN_SCORES = (
    "exact", "f1", "best_exact", "best_f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1", "pr_f1_ap",
    "answerability_accuracy", "answerability_f1", "ece", "threshold", "epoch",
)  # fmt: skip

Record = dict[str, Any]
Bools = NDArray[np.bool_]


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
    varied = _name_what_differs(records, [run.config for run in found])
    notes: list[str] = []
    samples = _add_answers(records, found, data, notes)
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
    cost, clock = _cost(run)
    return {
        "name": run.name,
        "state": run.state,
        "metric": run.config.get("training", {}).get("metric", "f1"),
        "scores": {key: _rounded(run.results[key]) for key in SHOWN_SCORES if _is_number(run.results.get(key))},
        "cost": cost,
        "train_seconds_from": clock,
        "curve": _curve(run.folder / runs.HISTORY),
        "layers": _layer_weights(run.folder),
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _rounded(value: float, digits: int = 4) -> float:
    """Few enough digits that a hundred runs stay a small file."""
    return float(f"{float(value):.{digits + 2}g}")


# Cost


def _cost(run: RunRecord) -> tuple[dict[str, float], str]:
    """What is known of a run's cost; what cost.json does not say, from the files themselves."""
    cost = {ours: float(run.cost[key]) for ours, key in COST_KEYS.items() if _is_number(run.cost.get(key))}
    if "parameters" not in cost and (saved := _saved_parameters(run.folder / runs.MODEL)):
        cost["parameters"] = float(saved)
    if "train_seconds" in cost:
        return cost, "record"
    record = read_object(run.folder / runs.RUN)
    if record.get("command") != "train" or "resumed" in record:  # which counts the time between, too
        return cost, ""
    try:
        began, ended = (datetime.fromisoformat(record[key]) for key in ("started", "ended"))
        cost["train_seconds"] = (ended - began).total_seconds()
    except (KeyError, TypeError, ValueError):  # not ended yet, or not a time
        return cost, ""
    return cost, "clock"


def _saved_parameters(model: Path) -> int:
    """A saved model holds what was trained and nothing else."""
    shapes = _tensor_shapes(model)
    return sum(int(np.prod(shape)) for shape in shapes.values())


def _tensor_shapes(model: Path) -> dict[str, list[int]]:
    """The header of a safetensors file: 8 bytes of its length, then JSON."""
    path = model / "model.safetensors"
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: one["shape"] for name, one in header.items() if name != "__metadata__"}
    except (OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError):
        raise UnreadableError(f"{path}: expected a safetensors file; it is damaged.") from None


# Curves


def _curve(path: Path) -> Record:
    """The training loss and the dev scores of a history, by step and by epoch."""
    steps: list[tuple[float, float, float]] = []
    evaluations: list[Record] = []
    for number, line in enumerate(runs.read_text(path).splitlines() if path.is_file() else (), start=1):
        try:
            record = json.loads(line)
            if record.get("event") == "step" and _is_number(record.get("loss")):
                steps.append((record["step"], record["epoch"], record["loss"]))
            elif record.get("event") == "evaluation":
                evaluations.append(record)
        except (ValueError, AttributeError, KeyError):
            raise UnreadableError(f"{path}:{number}: expected a JSON object a line; it is damaged.") from None
    columns = np.array(steps, dtype=np.float64).reshape(-1, 3)
    parts = np.array_split(columns, min(CURVE_POINTS, len(columns))) if len(columns) else []
    means = [part.mean(0) for part in parts]
    scores = [key for key in SHOWN_SCORES if any(_is_number(record.get(key)) for record in evaluations)]
    return {
        "step": [_rounded(one[0]) for one in means],
        "epoch": [_rounded(one[1]) for one in means],
        "loss": [_rounded(one[2]) for one in means],
        "evaluations": {
            key: [_rounded(record[key]) if _is_number(record.get(key)) else None for record in _thin(evaluations)]
            for key in ("step", *scores)
        },
    }


def _thin(records: Sequence[Record], limit: int = CURVE_POINTS) -> list[Record]:
    """At most `limit` of the records, evenly, the first and the last among them."""
    if len(records) <= limit:
        return list(records)
    return [records[round(place)] for place in np.linspace(0, len(records) - 1, limit)]


def _layer_weights(folder: Path) -> Record | None:
    """What a scalar mix gives each layer, for every stream: `{"start": [...], "end": [...]}`."""
    found = learned_weights(folder)
    return found and {stream: [_rounded(one) for one in row] for stream, row in found["weights"].items()}


# What the runs differ in


def _name_what_differs(records: Sequence[Record], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Give every record the options that are not the same in all; gives their names."""
    flat = [_flat(config) for config in configs]
    keys = list(dict.fromkeys(key for options in flat for key in options))
    varied = [
        key for key in keys if key != "training.strata" and len({json.dumps(options.get(key)) for options in flat}) > 1
    ]
    for record, options in zip(records, flat, strict=True):
        record["options"] = {key: _told(options[key]) for key in varied if key in options}
        record["fraction"] = options.get("learner.fraction")
        others = {key: options.get(key) for key in varied if key not in NOT_A_KIND}
        record["alike"] = (
            ", ".join(_kind(key, value) for key, value in others.items() if value is not None) or "all runs"
        )
    return varied


def _flat(config: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """`{"learner": {"seed": 0}}` is `{"learner.seed": 0}`; a named choice, as of a mixer, stays whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and ("name" not in value or not front):
            flat |= _flat(value, f"{front}{key}.")
        else:
            flat[f"{front}{key}"] = value
    return flat


def _kind(key: str, value: Any) -> str:
    """`last` speaks for itself, `60` needs its name: `max train samples 60`."""
    told = _told(value)
    return told if isinstance(told, str) else f"{key.rpartition('.')[2].replace('_', ' ')} {told}"


def _told(value: Any) -> str | float | int | None:
    """An option as a person would write it: `[{"name": "scalar_mix"}]` is `scalar_mix`."""
    if isinstance(value, list):
        return " + ".join(str(_told(one)) for one in value) or "none"
    if isinstance(value, dict):
        rest = ", ".join(f"{key}={_told(one)}" for key, one in value.items() if key != "name")
        name = str(value.get("name", ""))
        return f"{name}({rest})" if rest else name
    if isinstance(value, str) and PurePath(value).is_absolute():
        return _without_folders(value)
    return value if isinstance(value, int | float | str) or value is None else str(value)


def _metric(records: Sequence[Record]) -> str:
    """The score that the runs were chosen by, if it is the same in all, and F1 otherwise."""
    wanted = {record["metric"] for record in records}
    metric = wanted.pop() if len(wanted) == 1 else "f1"
    return metric if any(metric in record["scores"] for record in records) else "f1"


# Answers against the truth


@dataclass(frozen=True)
class _Questions:
    """A data set, and what is the same for all the runs on it."""

    examples: Sequence[Example]
    language: Language
    row_of: Mapping[str, int]
    groupings: Mapping[str, Grouping]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> _Questions:
        answerable = Grouping(["has an answer", "has none"], np.array([int(not one.answerable) for one in examples]))
        return cls(
            examples,
            language_of(examples),
            {example.id: row for row, example in enumerate(examples)},
            {"answerable": answerable, **groupings(examples)},
        )


@dataclass(frozen=True)
class _Scored:
    """What a run said, and how good that is."""

    examples: Sequence[Example]
    scores: QuestionScores
    predictions: Mapping[str, str]


def _add_answers(
    records: Sequence[Record], found: Sequence[RunRecord], data: str | None, notes: list[str]
) -> list[list[Record]]:
    """Compare the runs' predictions with the truth; gives the sample questions of each data set."""
    sets: dict[str, _Questions | None] = {}
    scored: dict[str, list[tuple[Record, _Scored]]] = {}
    for record, run in zip(records, found, strict=True):
        names = (data,) if data else run.data
        key = " + ".join(names)
        record["data"], record["data_set"] = " + ".join(map(_without_folders, names)), key
        predictions = read_object(run.folder / runs.PREDICTIONS)
        if not predictions:
            continue
        if key not in sets:
            sets[key] = _questions(names, data is not None, notes)
        known = sets[key]
        if known is None:
            continue
        # All of them, or the first few of `data.max_eval_samples`.
        examples = [example for example in known.examples if example.id in predictions]
        if not examples and data:
            raise UsageError(f"{run.folder}: answers no question of --data {data}; name the file it was scored on.")
        if not examples:
            notes.append(f"{record['name']} answers no question of {record['data']}: the file is not what it was.")
            continue
        answers = _Scored(examples, score_questions(examples, predictions, language=known.language), predictions)
        _add_analysis(record, run.folder, answers, known)
        scored.setdefault(key, []).append((record, answers))
    numbers = {key: number for number, key in enumerate(scored)}
    for record in records:
        record["data_set"] = numbers.get(record["data_set"])
    return [_samples(of_set) for of_set in scored.values()]


def _questions(names: Sequence[str], asked_for: bool, notes: list[str]) -> _Questions | None:
    if not names:
        notes.append("Runs that do not say what data they were scored on are not analysed: give it as --data.")
        return None
    try:
        return _Questions.of([example for name in names for example in read_questions(name, labelled=True)])
    except LamellaError:
        if asked_for:
            raise
        told = " + ".join(map(_without_folders, names))
        notes.append(f"The questions of {told} cannot be read here, so no answers are analysed: give them as --data.")
        return None


def _without_folders(name: str) -> str:
    """A report is shown to others, whom the folders of a machine do not concern; `demo:dev` stays what it is."""
    return PurePath(name).name or name


def _add_analysis(record: Record, folder: Path, found: _Scored, known: _Questions) -> None:
    odds, probability = read_object(folder / runs.NULL_ODDS), read_object(folder / runs.NA_PROB)
    ids = found.scores.ids
    odds, probability = ({id: one[id] for id in ids if _is_number(one.get(id))} for one in (odds, probability))
    na_scores = odds or probability
    if not record["scores"]:
        record["scores"] = {
            key: _rounded(value) for key, value in summarise(found.scores).items() if key in SHOWN_SCORES
        }
    record["questions"] = len(ids)
    record["confusion"] = {OUTCOMES[name]: count for name, count in confusion(found.scores).items()}
    record["groups"] = _groups(known, found.scores)
    if len(na_scores) == len(ids):
        record["precision_recall"] = precision_recall(found.scores, np.array([na_scores[id] for id in ids]))
    if len(probability) == len(ids):
        record["reliability"] = reliability(np.array([probability[id] for id in ids]), ~found.scores.answerable)


def precision_recall(scores: QuestionScores, na: NDArray[np.float64]) -> dict[str, list[float]] | None:
    """Precision and recall when questions are answered from the lowest na score up, an answer counting by its F1."""
    total = int(scores.answerable.sum())
    if not total:
        return None
    order = np.argsort(na, kind="stable")
    key, found = na[order], np.cumsum((scores.f1 * scores.answerable)[order])
    ends = np.append(np.flatnonzero(key[1:] != key[:-1]), len(key) - 1)  # no threshold lies between equal scores
    shown = ends[np.unique(np.linspace(0, len(ends) - 1, PR_POINTS).round().astype(int))]
    return {
        "recall": [_rounded(100 * found[end] / total) for end in shown],
        "precision": [_rounded(100 * found[end] / (end + 1)) for end in shown],
    }


def reliability(probability: NDArray[np.float64], outcome: Bools) -> Record:
    """What was said against what was so, in groups of equal size by rising probability of no answer."""
    order = np.argsort(probability, kind="stable")
    parts = np.array_split(order, min(RELIABILITY_GROUPS, len(order)))
    return {
        "said": [_rounded(100 * float(probability[part].mean())) for part in parts],
        "so": [_rounded(100 * float(outcome[part].mean())) for part in parts],
        "questions": [len(part) for part in parts],
        "ece": _rounded(100 * expected_calibration_error(probability, outcome)),
    }


def _groups(known: _Questions, scores: QuestionScores) -> dict[str, list[Record]]:
    """The scores of the questions of a kind, in every grouping; the kinds are those of the whole data set."""
    rows = np.array([known.row_of[id] for id in scores.ids])
    return {
        name.replace("_", " "): [
            {
                "group": row["group"],
                "questions": row["count"],
                "exact": _rounded(row["exact"]),
                "f1": _rounded(row["f1"]),
                "answered": _rounded(100 * row["answered_share"]),
            }
            for row in grouped_scores(scores, Grouping(grouping.names, grouping.group[rows]))
        ]
        for name, grouping in known.groupings.items()
    }


# Samples


def _samples(of_set: Sequence[tuple[Record, _Scored]]) -> list[Record]:
    """Questions evenly from those that every run gets right to those that none does, with every run's answer."""
    marks: dict[str, list[float]] = {}
    examples: dict[str, Example] = {}
    for _, found in of_set:
        for example, f1 in zip(found.examples, found.scores.f1, strict=True):
            marks.setdefault(example.id, []).append(float(f1))
            examples[example.id] = example
    ranked = sorted(marks, key=lambda id: -float(np.mean(marks[id])))
    chosen = [ranked[round(place)] for place in np.linspace(0, len(ranked) - 1, min(SAMPLES, len(ranked)))]
    cut = {id: _cut_context(examples[id], [found.predictions.get(id, "") for _, found in of_set]) for id in chosen}
    for record, found in of_set:
        row_of = {id: row for row, id in enumerate(found.scores.ids)}
        record["answers"] = [
            {"text": found.predictions[id], "f1": _rounded(100 * float(found.scores.f1[row_of[id]]))}
            if id in row_of
            else None
            for id in chosen
        ]
    return [{"question": examples[id].question, "title": examples[id].context.title, **cut[id]} for id in chosen]


def _cut_context(example: Example, answers: Sequence[str]) -> Record:
    """A context, or the part of it around the first true answer (else a predicted one), and its true answers there."""
    text = example.context.text
    begin = example.answers[0].begin_char if example.answers else max(0, *(text.find(one) for one in answers), 0)
    low = max(0, min(begin - CONTEXT_CHARACTERS // 2, len(text) - CONTEXT_CHARACTERS))
    high = min(len(text), low + CONTEXT_CHARACTERS)
    golds = {answer.text for answer in example.answers}
    spans = {
        (answer.begin_char - low, answer.end_char - low)
        for answer in example.answers
        if low <= answer.begin_char and answer.end_char <= high and text[answer.begin_char : answer.end_char] in golds
    }
    return {
        "context": text[low:high],
        "cut": [low > 0, high < len(text)],
        "golds": sorted(golds),
        "spans": sorted(spans),
    }
