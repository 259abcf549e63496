"""The model card: what a saved reader is, what it learnt from, what it scored, what it costs, and its limits."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, ValidationError

from lamella import registry
from lamella.config import Section
from lamella.data.examples import Example
from lamella.encoder.sources import hub_id
from lamella.encoder.tuning import count_parameters
from lamella.errors import ModelError
from lamella.heads.head import Stage
from lamella.option_errors import explain
from lamella.runs import MODEL, MODELS

if TYPE_CHECKING:
    from lamella.models.model import ReaderModel

CARD = "README.md"


class DataFacts(Section):
    """What is worth knowing of a data set."""

    files: list[str]  # without their folders
    questions: int
    unanswerable: int


class TeacherFacts(Section):
    """Who taught: a model, or a run with kept logits and, where it tells, the model that gave them."""

    run: str | None = None  # the last name of its folder
    model: str | None = None
    sha256: str | None = None  # of the model's weights


class StartFacts(Section):
    """The model with whose tensors a training began."""

    model: str
    sha256: str | None = None  # of its weights


class Facts(Section):
    """What is known of a training; it is kept in the model's config.json, so that every later copy has it too."""

    train: DataFacts | None = None
    dev: DataFacts | None = None
    fraction: float = 1.0  # the share of the train questions that was learnt from
    start: StartFacts | None = None
    teachers: list[TeacherFacts] = Field(default=[])
    results: dict[str, Any] = Field(default={})  # of the best evaluation on the dev data
    calibrated: dict[str, Any] = Field(default={})  # what `lamella calibrate` reported of the threshold that it stored


def data_facts(files: Iterable[str], examples: Sequence[Example]) -> DataFacts:
    """Of the examples that were read from some files."""
    unanswerable = sum(not example.answerable for example in examples)
    return DataFacts(files=[PurePath(file).name for file in files], questions=len(examples), unanswerable=unanswerable)


def facts_from(table: Mapping[str, Any], where: str) -> Facts:
    """Those that a config.json holds."""
    try:
        return Facts.model_validate(dict(table))
    except ValidationError as error:
        problems = "; ".join(explain(error, table, Facts, "facts"))
        raise ModelError(f"{where}: is damaged, or of another lamella: {problems}") from None


def model_card(model: ReaderModel, facts: Facts, size: int, *, name: str, half: bool = False) -> str:
    """The text of the card, in Markdown with the hub's YAML in front; `size` is that of the weights in bytes.

    `name` is what the reader is loaded by, or its folder.
    """
    base = _base(model)
    sections = {
        "Use": _use(model, facts, _loaded_by(name)),
        "Data": _data(facts),
        "Results": _results(model, facts),
        "Threshold": _threshold(model, facts),
        "Cost": _cost(model, size, half),
        "Layer weights": _layer_weights(model),
        "Limits": _limits(model),
    }
    text = "\n\n".join(f"## {title}\n\n{section}" for title, section in sections.items() if section)
    what = "Extractive question answering" if model.gives_text else "Whether a text answers a question"
    return f"{_front_matter(model)}\n# A reader on {base}\n\n{what}, trained as a thin change of `{base}`.\n\n{text}\n"


def _base(model: ReaderModel) -> str:
    """Its name; of a folder the last part, as `first` for a run's `…/first/model` and `first@0.3` for a `save_at`."""
    if not os.path.isabs(model.base_name):
        return model.base_name
    *_, run, above, last = ("", "", *PurePath(model.base_name).parts)
    return f"{run}@{last}" if above == MODELS else above if last == MODEL else last


def _loaded_by(name: str) -> str:
    """A name, or the last part of a folder's; not that of a run, whose files are the same wherever it is written."""
    path = PurePath(name)
    of_run = path.name == MODEL or (path.parent.name == MODELS and path.name.replace(".", "", 1).isdigit())
    return name if not path.is_absolute() else "FOLDER" if of_run else path.name


def _front_matter(model: ReaderModel) -> str:
    """Values are written as JSON, which is YAML too: no name can break it."""
    tunings = [one["name"] for one in (*model.tuned_before, model.tuning)]
    table: dict[str, Any] = {
        "library_name": "lamella",
        "pipeline_tag": "question-answering",
        **({} if os.path.isabs(model.base_name) else {"base_model": hub_id(model.base_name)}),
        "tags": list(dict.fromkeys(["lamella", "extractive-question-answering", *tunings])),
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in table.items()), "---"])


def _use(model: ReaderModel, facts: Facts, name: str) -> str:
    load = f"reader = Reader.load({json.dumps(name, ensure_ascii=False)})"
    lines = ["from lamella import Reader", "", load, "reader.ask(question, context)"]
    if not model.gives_text:
        lines = [f"lamella predict DATA --model {shlex.quote(name)} --out RUN"]
    table = [
        ("base", f"`{_base(model)}`"),
        ("sha256 of the base", f"`{model.base_sha256}`"),
        ("sha256 of its tensors", f"`{model.base_tensors_sha256}`" if model.base_tensors_sha256 else ""),
        ("tuning", ", then ".join(_part("tuning", one) for one in (*model.tuned_before, model.tuning))),
        ("task", _part("task", model.head_spec["task"])),
        ("mixer", ", ".join(_part("mixer", stage) for stage in model.head_spec["mixer"])),
        ("beside it", ", ".join(_part("mixer", stage) for stage in model.head_spec["beside"])),
        ("skip", "the last layer beside the mixer's output" if model.head_spec["skip"] else ""),
        ("layers", f"{model.head_spec['layers']}"),
        ("started with", _told(facts.start.model, facts.start.sha256) if facts.start else ""),
        ("taught by", ", ".join(dict.fromkeys(_told(one.model or f"{one.run}", one.sha256) for one in facts.teachers))),
    ]
    language = "python" if model.gives_text else "sh"
    code = "\n".join([f"```{language}", *lines, "```"])
    return "\n".join(
        [code, "", "| part | |", "|---|---|", *(f"| {name} | {value} |" for name, value in table if value)]
    )


def _part(family: str, spec: Mapping[str, Any]) -> str:
    name, options = registry.split(registry.complete(family, spec))
    told = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
    return f"`{name}`" + (f" ({told})" if told else "")


def _told(name: str, sha256: str | None) -> str:
    """As `mpnet` (sha256 `0123…`)."""
    return f"`{name}`" + (f" (sha256 `{sha256}`)" if sha256 else "")


def _data(facts: Facts) -> str:
    rows = [
        f"| {split} | {', '.join(f'`{file}`' for file in data.files)} | {data.questions:,} | {data.unanswerable:,} |"
        for split, data in (("train", facts.train), ("dev", facts.dev))
        if data is not None
    ]
    if not rows:
        return "Not recorded."
    share = ["", f"It learnt from {100 * facts.fraction:g} % of the train questions."] if facts.fraction < 1 else []
    return "\n".join(["| split | files | questions | unanswerable |", "|---|---|---:|---:|", *rows, *share])


def _results(model: ReaderModel, facts: Facts) -> str:
    numbers = {
        key: value
        for key, value in facts.results.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if not numbers:
        return "It was scored on no data."
    rows = [
        f"| {key} | {value:.2f} |" if isinstance(value, float) else f"| {key} | {value:,} |"
        for key, value in numbers.items()
    ]
    told = "On the dev data, which also chose this model in its training; `best_*` are upper bounds, not results."
    before = numbers.get("threshold", 0.0)
    if model.decoding.tuned_on is not None and before != model.decoding.null_score_diff_threshold:
        told += f" What depends on the threshold was scored at {before:.2f}, before it was tuned and calibrated"
        told += "; `crossfit_*` tell what to expect since." if any("crossfit_" in key for key in numbers) else "."
    return "\n".join([told, "", "| metric | |", "|---|---:|", *rows])


def _threshold(model: ReaderModel, facts: Facts) -> str:
    """The threshold that it has, what that was tuned on, and what is known of the scores there."""
    decoding, found = model.decoding, facts.calibrated
    if decoding.tuned_on is None:
        return ""
    told = (
        f"It gives no answer where the odds of that exceed {decoding.null_score_diff_threshold:.2f}, which was tuned "
        f"on {decoding.tuned_on.questions:,} questions of `{decoding.tuned_on.data}`."
    )
    if not found:
        return told
    kinds = {
        "{}_at_0": "at 0",
        "{}_in_sample": "at the threshold, on these very questions: too good",
        "crossfit_{}": "on other articles, each tuned on the rest: what to expect",
    }
    keys = [key for key in ("exact", "f1", "answerability_accuracy") if f"{key}_at_0" in found]
    lines = [f"| scored | {' | '.join(keys)} |", f"|---|{'---:|' * len(keys)}"]
    lines += [
        f"| {kind} | {' | '.join(f'{found[form.format(key)]:.2f}' for key in keys)} |"
        for form, kind in kinds.items()
        if form.format(keys[0]) in found
    ]
    error = f"The calibration error of the probability of no answer was {found['ece_uncalibrated']:.2f} %"
    calibrated = f", and is {found['crossfit_ece']:.2f} % on other articles" if "crossfit_ece" in found else ""
    return "\n".join([told, "", *lines, "", f"{error}{calibrated}."])


def _cost(model: ReaderModel, size: int, half: bool) -> str:
    trained, of_encoder = count_parameters(model)[0], model.base_parameters
    return (
        f"{trained:,} parameters were trained, {100 * trained / of_encoder:.4g} % of the encoder's {of_encoder:,}. "
        f"What differs from it takes {size / 1e6:,.3f} MB, in {'fp16, rounded once from fp32' if half else 'fp32'}."
    )


def _layer_weights(model: ReaderModel) -> str:
    """Return a table of the layer weights, if the mixer learns weights that are the same for all tokens."""
    stage = cast(Stage, model.head.stages[0])
    _, options = registry.split(model.head_spec["mixer"][0])
    learned = stage.learned_layer_weights(stage.state_dict(), **options)  # [S, C]
    if learned is None:
        return ""
    weights = learned.tolist()
    outputs = model.head.task.choice_names if len(weights) > 1 and model.gives_text else ("",) * len(weights)
    head = " | ".join(map(str, model.head.main_layers))
    rows = [
        f"| {name or 'weight'} | {' | '.join(f'{value:.3f}' for value in row)} |"
        for name, row in zip(outputs, weights, strict=True)
    ]
    return "\n".join([f"| layer | {head} |", f"|---|{'---:|' * len(model.head.main_layers)}", *rows])


def _limits(model: ReaderModel) -> str:
    windows, decoding = model.windows, model.decoding
    points = [
        "It knows the language and the kind of text of its data; elsewhere it may fail without saying so.",
        f"A text is read in windows of {windows.max_seq_length} tokens: what an answer depends on must stand in one.",
        f"A question is cut to {windows.max_query_length} tokens.",
        "When it says that there is no answer is a matter of the threshold in `config.json` "
        "(`decoding.null_score_diff_threshold`); tune it on data like yours.",
    ]
    if model.gives_text:
        copied = "An answer is a piece of the text, copied"
        points.insert(1, f"{copied}, of at most {decoding.max_answer_length} tokens; nothing is put in other words.")
    return "\n".join(f"- {point}" for point in points)
