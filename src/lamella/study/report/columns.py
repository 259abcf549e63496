"""The columns of a Markdown report: the title of each, and the text in its cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamella.errors import counted
from lamella.scoring.significance import bootstrap_differences
from lamella.study.compared_readers import ComparedReader, f1_of_no_answer
from lamella.study.reader_options import without_seed
from lamella.study.records import ANSWERABILITY, SPAN
from lamella.study.report.option_names import readable_option
from lamella.study.result_files import Result

NOTHING = "–"

# The title of each column and its number format; a column without a format has a function in `_CELLS`.
COLUMNS: dict[str, tuple[str, str]] = {
    "encoder": ("encoder", ""),
    "train": ("train data", ""),
    "seeds": ("seeds", ""),
    "tuning": ("tuning", ""),
    "delta": ("delta parameters (% of the encoder)", ""),
    "exact_at_0": ("EM at 0", "{:.2f}"),
    "f1_at_0": ("F1 at 0", "{:.2f}"),
    "exact": ("EM", ""),
    "f1": ("F1", ""),
    "HasAns_f1": ("F1, answerable", ""),
    "NoAns_f1": ("F1, unanswerable", ""),
    "best_f1": ("F1, best", "{:.2f}"),
    "question_f1_at_0": ("F1 per question at 0", "{:.2f}"),
    "question_exact": ("EM per question", ""),
    "question_f1": ("F1 per question", ""),
    "threshold": ("own threshold", "{:.2f}"),
    "epoch": ("epoch", "{:g}"),
    "inference_flops_per_window": ("inference FLOPs per window", ""),
    "training_flops_per_window": ("training FLOPs per window", ""),
    "training_flops": ("training FLOPs", ""),
    "train_seconds": ("train s", "{:,.0f}"),
    "windows_per_second": ("windows/s", "{:,.0f}"),
    "inference_seconds_per_1000": ("ms/question", "{:.2f}"),
    "efficiency": ("(F1 − 50) / log10 parameters", "{:.2f}"),
    "model_bytes": ("file", ""),
    "peak_memory_bytes": ("peak memory", ""),
    "device": ("device", ""),
}
DEFAULT_COLUMNS = (
    "tuning", "delta", "exact_at_0", "f1_at_0", "exact", "f1", "best_f1", "question_f1_at_0", "question_exact",
    "question_f1", "train_seconds", "windows_per_second", "inference_seconds_per_1000", "model_bytes",
)  # fmt: skip
# The scores of classifiers of answerability take the places of EM and F1.
CLASSIFIER_TITLES = {
    "exact_at_0": "accuracy at 0",
    "f1_at_0": "no-answer F1 at 0",
    "exact": "accuracy",
    "f1": "no-answer F1",
    "HasAns_f1": "accuracy, answerable",
    "NoAns_f1": "accuracy, unanswerable",
    "best_f1": "accuracy, best",
    "question_f1_at_0": "accuracy per question at 0",
    "question_exact": "accuracy per question",
    "question_f1": "no-answer F1 per question",
}
MEASURED = {"train_seconds", "windows_per_second", "inference_seconds_per_1000", "peak_memory_bytes"}  # on a device
_SUFFIXES = re.compile(r"(\.jsonl?|\.csv)?(\.gz)?$")


@dataclass(frozen=True)
class Labels:
    """The wording of a report: `names` maps encoders, files, columns and values to the words shown for them."""

    names: Mapping[str, str]

    def title(self, key: str, task: str = SPAN) -> str:
        """Return the title of a column; the scores of classifiers have titles of their own."""
        default = COLUMNS[key][0] if key in COLUMNS else key.rpartition(".")[2].replace("_", " ")
        if task == ANSWERABILITY and key in CLASSIFIER_TITLES:
            return CLASSIFIER_TITLES[key]
        return self.names.get(key, default)

    def files(self, files: Sequence[Mapping[str, Any]]) -> str:
        """Return the names of data files; by default without suffixes, `squad2-train.json.gz` as `squad2-train`."""
        names = [str(file["name"]) for file in files]
        return " + ".join(self.names.get(name, _SUFFIXES.sub("", name)) for name in names) or NOTHING

    def cell(self, key: str, reader: ComparedReader) -> str:
        """Return the text of a column for a reader."""
        if reader.task == ANSWERABILITY and key in _CLASSIFIER_CELLS:
            return _CLASSIFIER_CELLS[key](self, reader)
        if key in _CELLS:
            return _CELLS[key](self, reader)
        if key not in COLUMNS:
            return readable_value(_option(reader, key))
        score = reader.mean_score(key)
        value = score if score is not None else reader.mean_cost(key)
        return NOTHING if value is None else COLUMNS[key][1].format(value)


def readable_value(value: Any) -> str:
    """Return a value of a file or an option as text: 6,078, 0.0001, adapter(size=64)."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list) and value and all(isinstance(item, float) for item in value):
        return ", ".join(map(readable_value, value))  # such as the two ends of an interval
    return " ".join(str(readable_option(value)).split())


def describe_dev(result: Result) -> str:
    """Count what a result was scored on: `1,500 questions with 15,000 contexts about 14,203 paragraphs`."""
    dev, of_questions = result.content["dev"], result.by_question
    questions = counted((of_questions.content["dev"] if of_questions else dev)["questions"], "question")
    contexts = f" with {counted(dev['questions'], 'context')}" if of_questions else ""
    return f"{questions}{contexts} about {counted(dev['paragraphs'], 'paragraph')}"


def describe_encoder(labels: Labels, encoder: Mapping[str, Any], *, seeds: bool = False) -> str | None:
    """Return the name of an encoder, and the run that tuned it first, if one did, with or without its seed."""
    name, ways = encoder.get("name"), encoder.get("by_way_of", [])[:1]
    shown = [way if seeds else without_seed(way) for way in ways]
    by_way_of = "".join(f", by way of {labels.names.get(way, way)}" for way in shown)
    return None if name is None else f"{labels.names.get(name, name)}{by_way_of}"


def percent(value: float) -> str:
    """Return a percentage with two significant decimals."""
    return f"{value:.2f} %" if value >= 0.1 else f"{value:.2g} %"


def _content(reader: ComparedReader) -> Mapping[str, Any]:
    result = reader.runs[0].result
    assert result is not None
    return result.content


def _encoder(labels: Labels, reader: ComparedReader) -> str:
    return describe_encoder(labels, _content(reader)["encoder"], seeds=len(reader.runs) == 1) or NOTHING


def _train(labels: Labels, reader: ComparedReader) -> str:
    train, options = _content(reader)["train"], _content(reader)["options"]
    text = labels.files(train["files"])
    if first := options.get("data.max_train_samples"):
        text += f", the first {first:,}"
    fraction = train.get("fraction", 1.0)
    return text if fraction == 1 else f"{text}, {percent(100 * fraction)} of it"


def _tuning(labels: Labels, reader: ComparedReader) -> str:
    tuning = _content(reader)["tuning"]
    chosen = {key: value for key, value in tuning.items() if value}  # options that are off or empty add nothing
    text = readable_value(chosen) if chosen else NOTHING
    return labels.names.get(text, text)


def _delta(labels: Labels, reader: ComparedReader) -> str:
    count, share = reader.mean_cost("trainable_parameters"), reader.mean_cost("trainable_percent_of_encoder")
    if count is None:
        return NOTHING
    return f"{count:,.0f}" + ("" if share is None else f" ({percent(share)})")


def _f1(labels: Labels, reader: ComparedReader) -> str:
    """Return F1, or accuracy, with its deviation between seeds and its interval: `80.50 ±0.18 [79.2, 81.8]`."""
    (interval,) = bootstrap_differences(reader.f1[:, None], reader.paragraphs)
    seeds = "" if reader.deviation is None else f" ±{reader.deviation:.2f}"
    return f"{reader.mean_f1:.2f}{seeds} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _per_question(cell: Callable[[Labels, ComparedReader], str]) -> Callable[[Labels, ComparedReader], str]:
    """Return the same cell for the scores per question, where questions have several contexts."""
    return lambda labels, reader: NOTHING if reader.by_question is None else cell(labels, reader.by_question)


def _exact(labels: Labels, reader: ComparedReader) -> str:
    return f"{reader.mean_exact:.2f}"


def _subset_score(key: str) -> Callable[[Labels, ComparedReader], str]:
    """Return the cell of a score over part of the questions, at the thresholds of the report."""

    def cell(labels: Labels, reader: ComparedReader) -> str:
        results = [run.result for run in reader.runs if run.result is not None]
        values = [result.content["scores"][result.scored_at].get(key) for result in results]
        return NOTHING if None in values else f"{sum(values) / len(values):.2f}"

    return cell


def _no_answer_f1(labels: Labels, reader: ComparedReader) -> str:
    return NOTHING if reader.no_answer_f1 is None else f"{reader.no_answer_f1:.2f}"


def _no_answer_f1_at_0(labels: Labels, reader: ComparedReader) -> str:
    at_0 = [replace(run.result, exact=run.result.at_0[0]) for run in reader.runs if run.result and run.result.at_0]
    values = [value for decisions in at_0 if (value := f1_of_no_answer(decisions)) is not None]
    return f"{sum(values) / len(values):.2f}" if len(values) == len(reader.runs) else NOTHING


def _bytes(key: str) -> Callable[[Labels, ComparedReader], str]:
    """Return the cell of a size: `3.3 kB`, `4.84 MB`, `1.11 GB`."""

    def cell(labels: Labels, reader: ComparedReader) -> str:
        value = reader.mean_cost(key)
        if value is None:
            return NOTHING
        if value < 1e6:
            return f"{value / 1e3:.1f} kB"
        return f"{value / 1e6:.2f} MB" if value < 1e9 else f"{value / 1e9:.2f} GB"

    return cell


def _flops(key: str) -> Callable[[Labels, ComparedReader], str]:
    """Return the cell of a number of operations: `9.14 GFLOP`, `28.32 PFLOP`."""

    def cell(labels: Labels, reader: ComparedReader) -> str:
        value = reader.mean_cost(key)
        if value is None:
            return NOTHING
        units = ((1e15, "P"), (1e12, "T"), (1e9, "G"))
        size, prefix = next((unit for unit in units if value >= unit[0]), (1e6, "M"))
        return f"{value / size:.2f} {prefix}FLOP"

    return cell


def _option(reader: ComparedReader, key: str) -> Any:
    """Return an option of a reader; if its seeds have different values, all of them."""
    values = [run.result.content["options"].get(key) for run in reader.runs if run.result is not None]
    return values[0] if all(value == values[0] for value in values) else ", ".join(map(readable_value, values))


_CELLS: dict[str, Callable[[Labels, ComparedReader], str]] = {
    "encoder": _encoder,
    "train": _train,
    "tuning": _tuning,
    "delta": _delta,
    "seeds": lambda labels, reader: str(len(reader.runs)),
    "exact": _exact,
    "f1": _f1,
    "question_exact": _per_question(_exact),
    "question_f1": _per_question(_f1),
    "HasAns_f1": _subset_score("HasAns_f1"),
    "NoAns_f1": _subset_score("NoAns_f1"),
    **{key: _flops(key) for key in ("inference_flops_per_window", "training_flops_per_window", "training_flops")},
    "model_bytes": _bytes("model_bytes"),
    "peak_memory_bytes": _bytes("peak_memory_bytes"),
    "device": lambda labels, reader: reader.device or NOTHING,
}
_CLASSIFIER_CELLS: dict[str, Callable[[Labels, ComparedReader], str]] = {
    "exact": _f1,  # of decisions, both scores are the accuracy
    "f1": _no_answer_f1,
    "question_exact": _per_question(_f1),
    "question_f1": _per_question(_no_answer_f1),
    "f1_at_0": _no_answer_f1_at_0,
}
