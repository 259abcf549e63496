"""The model card: what a saved reader is, how it was trained, its scores, its size and its limits, in Markdown."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lamella import registry
from lamella.encoder.sources import hub_id
from lamella.errors import counted
from lamella.models.card_data import data_section
from lamella.models.facts import AveragedFacts, DomainScores, Facts, RoundedBaseFacts
from lamella.models.names import short_model_name
from lamella.models.saved import SavedModel
from lamella.runs import MODEL, MODELS


@dataclass(frozen=True)
class LayerWeightTable:
    """The learned weights of the layers: one row for all outputs, or one row per output."""

    layers: tuple[int, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]  # the name of the row, and a weight per layer


@dataclass(frozen=True)
class Contents:
    """What a card shows beside the saved configuration."""

    name: str  # what the reader is loaded by, or its folder
    gives_text: bool
    trained_parameters: int
    encoder_parameters: int
    bytes: int  # of the weights
    half: bool = False  # whether they were rounded to fp16
    layer_weights: LayerWeightTable | None = None


def model_card(saved: SavedModel, contents: Contents) -> str:
    """Return the card in Markdown, with the YAML header of the hub."""
    base = _base(saved)
    sections = {
        "Use": _use(saved, contents.gives_text, _loaded_by(contents.name)),
        "Data": data_section(saved.facts),
        "Results": _results(saved),
        "Threshold": _threshold(saved),
        "Other texts": _domains(saved),
        "The original encoder": _rounded_base(saved.facts.rounded_base),
        "Cost": _cost(contents, saved.facts),
        "Layer weights": _layer_weights(contents.layer_weights),
        "Limits": _limits(saved, contents.gives_text),
    }
    text = "\n\n".join(f"## {title}\n\n{section}" for title, section in sections.items() if section)
    purpose = "Extractive question answering" if contents.gives_text else "Detects whether a text answers a question"
    opening = f"{purpose}, trained as a thin delta on `{base}`.{_mean_of(saved.facts.mean_of)}"
    return f"{_header(saved)}\n# A reader on {base}\n\n{opening}\n\n{text}\n"


def with_threshold(card: str, saved: SavedModel, name: str) -> str:
    """Return a card that describes another threshold and is loaded by another name; the rest stays as it is.

    `model_card` would need the tensors and the options of all parts, and so torch.
    """
    head, *parts = re.split(r"^## (.*)\n\n", f"{card.rstrip()}\n\n", flags=re.MULTILINE)
    sections = dict(zip(parts[::2], (text.rstrip() for text in parts[1::2]), strict=True))
    if fenced := re.match(r"```(python|sh)\n.*?\n```", sections.get("Use", ""), re.DOTALL):
        sections["Use"] = _code(fenced[1] == "python", _loaded_by(name)) + sections["Use"][fenced.end() :]
    sections["Results"] = _results(saved)
    others = list(sections)
    sections["Threshold"] = _threshold(saved)
    if "Other texts" in sections:
        sections["Other texts"] = _domains(saved)
    order = dict.fromkeys([*others[: others.index("Results") + 1], "Threshold", *others])
    text = "\n\n".join(f"## {title}\n\n{sections[title]}" for title in order if sections[title])
    return f"{head.rstrip()}\n\n{text}\n"


def _base(saved: SavedModel) -> str:
    return short_model_name(saved.base_name) if os.path.isabs(saved.base_name) else saved.base_name


def _loaded_by(name: str) -> str:
    """Return what to pass to `Reader.load`: a name, or the last part of a path, with the folder if that is `models`.

    A model inside a run folder is shown as FOLDER, so that the card is the same wherever the run is written.
    """
    path = PurePath(name)
    in_models = path.parent.name == MODELS
    in_run = path.name == MODEL or (in_models and path.name.replace(".", "", 1).isdigit())
    if not path.is_absolute():
        return name
    return "FOLDER" if in_run else f"{MODELS}/{path.name}" if in_models else path.name


def _header(saved: SavedModel) -> str:
    """Return the YAML header; the values are written as JSON, which is valid YAML whatever a name contains."""
    tunings = [tuning["name"] for tuning in saved.tunings]
    table: dict[str, Any] = {
        "library_name": "lamella",
        "pipeline_tag": "question-answering",
        **({} if os.path.isabs(saved.base_name) else {"base_model": hub_id(saved.base_name)}),
        "tags": list(dict.fromkeys(["lamella", "extractive-question-answering", *tunings])),
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in table.items()), "---"])


def _code(gives_text: bool, name: str) -> str:
    load = f"reader = Reader.load({json.dumps(name, ensure_ascii=False)})"
    lines = ["from lamella import Reader", "", load, "reader.ask(question, context)"]
    if not gives_text:
        lines = [f"lamella predict DATA --model {shlex.quote(name)} --out RUN"]
    return "\n".join([f"```{'python' if gives_text else 'sh'}", *lines, "```"])


def _use(saved: SavedModel, gives_text: bool, name: str) -> str:
    head, start, teachers = saved.head, saved.facts.start, saved.facts.teachers
    tokenizer = saved.base_tokenizer_sha256
    table = [
        ("base encoder", f"`{_base(saved)}`"),
        ("sha256 of its file", f"`{saved.base_sha256}`"),
        ("sha256 of its tensors", f"`{saved.base_tensors_sha256}`" if saved.base_tensors_sha256 else ""),
        ("rounding", _rounding(saved)),
        ("tokenizer", f"of the base encoder (sha256 `{tokenizer}`)" if tokenizer else ""),
        ("tuning", ", then ".join(_part("tuning", tuning) for tuning in saved.tunings)),
        ("task", _part("task", head["task"])),
        ("mixer", _parts("mixer", head["mixer"])),
        ("parallel mixer", _parts("mixer", head["beside"])),
        ("skip", "the task also reads the last layer" if head["skip"] else ""),
        ("layers", f"{head['layers']}"),
        ("warm start", _model(start.model, start.sha256) if start else ""),
        ("teachers", ", ".join(dict.fromkeys(_model(fact.model or f"{fact.run}", fact.sha256) for fact in teachers))),
    ]
    return "\n".join(
        [
            _code(gives_text, name),
            "",
            "| part | |",
            "|---|---|",
            *(f"| {label} | {value} |" for label, value in table if value),
        ]
    )


def _rounding(saved: SavedModel) -> str:
    if saved.rounding is None:
        return ""
    return (
        "it was trained on a copy of the encoder whose weights are rounded to 8 bits; it also runs, with a warning, on "
        f"the original, whose weights differ by about {100 * saved.rounding.relative:.1f} %"
    )


def _parts(family: str, specs: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(_part(family, spec) for spec in specs)


def _part(family: str, spec: Mapping[str, Any]) -> str:
    name, options = registry.split(registry.complete(family, spec))
    listed = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
    return f"`{name}`" + (f" ({listed})" if listed else "")


def _model(name: str, sha256: str | None) -> str:
    """Return a model with its hash, if known: `mpnet` (sha256 `0123…`)."""
    return f"`{name}`" + (f" (sha256 `{sha256}`)" if sha256 else "")


def _mean_of(models: Sequence[AveragedFacts]) -> str:
    listed = ", ".join(_model(fact.model, fact.sha256) for fact in models)
    return f"\n\nThe mean of {counted(len(models), 'model')}: {listed}." if models else ""


def _results(saved: SavedModel) -> str:
    numbers = {
        key: value
        for key, value in saved.facts.results.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if not numbers:
        return "Not evaluated."
    rows = [
        f"| {key} | {value:.2f} |" if isinstance(value, float) else f"| {key} | {value:,} |"
        for key, value in numbers.items()
    ]
    checkpoint = {
        "best": "On the dev data, which also selected the best checkpoint",
        "last": "On the dev data, at the end of training; no checkpoint was selected",
    }
    measured = "On the dev data" if saved.facts.mean_of else checkpoint[saved.facts.keep]
    text = f"{measured}; `best_*` are upper bounds, not results."
    before, decoding = numbers.get("threshold", 0.0), saved.config.decoding
    if decoding.tuned_on is not None and before != decoding.null_score_diff_threshold:
        text += (
            f" Scores that depend on the threshold were measured at {before:.2f}, before it was tuned and calibrated"
        )
        text += "; expect the `crossfit_*` scores now." if any("crossfit_" in key for key in numbers) else "."
    return "\n".join([text, "", "| metric | |", "|---|---:|", *rows])


def _threshold(saved: SavedModel) -> str:
    """Describe the tuned threshold: its value, the data it was tuned on, and the scores with it."""
    decoding, report = saved.config.decoding, saved.facts.calibrated
    if decoding.tuned_on is None and not report:
        return ""
    threshold, calibration = decoding.null_score_diff_threshold, decoding.calibration
    text = f"The reader gives no answer if the null odds exceed {threshold:.2f}."
    if calibration is not None and calibration.method == "features":
        names = ", ".join(f"`{feature.name}`" for feature in calibration.features)
        text = f"The reader gives no answer if its log-odds, by the features {names}, exceed {threshold:.2f}."
    if decoding.window_penalty:
        text += f" For each doubling of the windows of a text, {decoding.window_penalty:.2f} is added to them."
    if decoding.merge == "leads":
        text += ' In a long text, windows compete by their leads over "no answer" and by the words of the question.'
    if decoding.tuned_on is not None:
        tuned_on = f"{counted(decoding.tuned_on.questions, 'question')} of `{decoding.tuned_on.data}`"
        precision = f", answered in {decoding.tuned_on.precision}" if decoding.tuned_on.precision else ""
        text += f" This threshold was tuned on {tuned_on}{precision}."
    if not report:
        return text
    if report.get("threshold_choice", "tuned") != "tuned":
        other = f"{counted(report['questions'], 'question')} of `{report['data']}`"
        forced = report["threshold_choice"] == "forced"
        text += f" {'It was stored, although' if forced else f'A threshold tuned on {other} was not stored:'}"
        text += f" {report['threshold_reason']}."
    kinds = {
        "{}_at_0": "at threshold 0",
        "{}_before": f"at {report.get('threshold_before', 0.0):.2f}, its threshold before",
        "{}_in_sample": "at the tuned threshold, on the same questions: optimistic",
        "crossfit_{}": "cross-fitted: tuned on the other articles; expect this",
    }
    keys = [key for key in ("exact", "f1", "answerability_accuracy") if f"{key}_at_0" in report]
    lines = [f"| scores | {' | '.join(keys)} |", f"|---|{'---:|' * len(keys)}"]
    lines += [
        f"| {kind} | {' | '.join(f'{report[form.format(key)]:.2f}' for key in keys)} |"
        for form, kind in kinds.items()
        if form.format(keys[0]) in report
    ]
    error = f"The calibration error of the no-answer probability was {report['ece_uncalibrated']:.2f} %"
    if report.get("calibration_choice") == "kept":
        used = report["ece_uncalibrated"] if calibration is None else report.get("ece_before")
        if used is None:  # it was fitted on these questions, which cannot show its error
            return "\n".join([text, "", *lines])
        error = f"The calibration error of the no-answer probability is {used:.2f} %"
    elif "crossfit_ece" in report:
        error += f" before calibration, and is {report['crossfit_ece']:.2f} % after it (cross-fitted)"
    return "\n".join([text, "", *lines, "", f"{error}."])


def _domains(saved: SavedModel) -> str:
    """Show the scores on other kinds of texts, and the risk by coverage."""
    domains = saved.facts.domains
    if not domains:
        return ""
    rows = [
        f"| `{one.data}` | {one.questions:,} ({one.unanswerable:,}) | "
        f"{one.f1:.1f} [{one.f1_low:.1f}, {one.f1_high:.1f}] | {one.f1_at_0:.1f} | "
        f"{one.best_f1:.1f} | {_number(one.has_answer_f1)} | {_number(one.no_answer_f1)} | "
        f"{_number(one.refused)} | {_number(one.refused_eager)} | {one.coverage_at_80:.1f} | "
        f"{one.area_under_risk:.1f} | {_number(one.calibration_error)} |"
        for one in domains
    ]
    head = (
        "| data | questions (unanswerable) | F1 [95 %] | F1 at threshold 0 | F1 at the best threshold | answerable | "
        "unanswerable | refused | refused, eager | coverage at F1 80 | area under risk | calibration error |"
    )
    text = (
        "Scores at the reader's threshold, in percent. *Refused* is the share of answerable questions without an "
        "answer, and *refused, eager* the same with `--answer eager`. *Coverage* is the share of questions that it can "
        "answer with a mean F1 of 80 if it chooses the surest. *Area under risk* is the mean risk over all coverages."
    )
    ways = list(dict.fromkeys(one.computed for one in domains if one.computed))
    if len(ways) == 1:
        text += f" The answers were computed {ways[0]}."
    elif ways:
        text += " The answers were computed "
        text += "; ".join(
            f"{way} ({', '.join(f'`{one.data}`' for one in domains if one.computed == way)})" for way in ways
        )
        text += "."
    if any(one.merge != saved.config.decoding.merge for one in domains):
        text += " They were measured before the windows of a long text competed as they do now."
    table = [head, f"|---|{11 * '---:|'}", *rows]
    return "\n".join([text, "", *table, "", *_risk(domains)])


def _risk(domains: Sequence[DomainScores]) -> list[str]:
    """Show the risk of the answers at each coverage."""
    shares = [f"{100 * number / len(domains[0].risk):.0f} %" for number in range(1, len(domains[0].risk) + 1)]
    return [
        "If the reader answers only the questions that it is surest of, the risk is 100 less the mean F1 of these:",
        "",
        f"| data | {' | '.join(shares)} |",
        f"|---|{len(shares) * '---:|'}",
        *(f"| `{one.data}` | {' | '.join(f'{risk:.1f}' for risk in one.risk)} |" for one in domains),
    ]


def _rounded_base(measured: Sequence[RoundedBaseFacts]) -> str:
    """Show what the reader loses on the original of the rounded copy that it was trained on."""
    if not measured:
        return ""
    text = (
        "The reader was trained on a rounded copy of its encoder. This simulates the original: each draw moves every "
        "weight of the copy at random, by up to half a rounding step. F1 is measured at the reader's threshold."
    )
    head = "| data | questions | draws | F1 on the copy | change on the draws (lowest, highest) | other answers |"
    rows = [
        f"| `{row.data}` | {row.questions:,} | {row.draws} | {row.f1:.2f} | {row.change:+.2f} "
        f"({row.change_low:+.2f}, {row.change_high:+.2f}) | {row.changed:.1f} % |"
        for row in measured
    ]
    return "\n".join([text, "", head, "|---|---:|---:|---:|---:|---:|", *rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _cost(contents: Contents, facts: Facts) -> str:
    trained, encoder = contents.trained_parameters, contents.encoder_parameters
    number_format = "fp16, rounded once from fp32" if contents.half else "fp32"
    text = (
        f"{trained:,} trained parameters, {100 * trained / encoder:.4g} % of the encoder's {encoder:,}. "
        f"The delta takes {contents.bytes / 1e6:,.3f} MB, stored in {number_format}."
    )
    int8 = facts.int8
    if int8 is None:
        return text
    return (
        f'{text}\n\nIn int8 (`precision="int8"`), F1 on the {int8.questions:,} questions of `{int8.data}` is '
        f"{int8.int8_f1:.2f} instead of {int8.f1:.2f}, and {int8.equal:.1f} % of the answers are the same."
    )


def _layer_weights(weights: LayerWeightTable | None) -> str:
    if weights is None:
        return ""
    layers = " | ".join(map(str, weights.layers))
    rows = [f"| {name} | {' | '.join(f'{value:.3f}' for value in row)} |" for name, row in weights.rows]
    return "\n".join([f"| layer | {layers} |", f"|---|{'---:|' * len(weights.layers)}", *rows])


def _limits(saved: SavedModel, gives_text: bool) -> str:
    windows, decoding = saved.config.windows, saved.config.decoding
    points = [
        "The reader knows the language and the kind of text of its data; on other texts it may fail without a warning.",
        f"A text is read in windows of {windows.max_seq_length} tokens; all evidence for an answer must be in one.",
        f"A question is cut to {windows.max_query_length} tokens.",
        "Whether it gives no answer depends on the threshold in `config.json` "
        "(`decoding.null_score_diff_threshold`); tune it on data like yours.",
    ]
    if gives_text:
        limit = decoding.max_answer_length
        points.insert(1, f"An answer is copied from the text, at most {limit} tokens long; it is never rephrased.")
    return "\n".join(f"- {point}" for point in points)
