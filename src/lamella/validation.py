"""Check the options of a run as a whole: keys and types, the options of named parts, the rules across options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lamella import registry
from lamella.config import METRICS, QUESTION_METRICS, RunConfig
from lamella.errors import ConfigError, PluginError, UnknownNameError
from lamella.files import same_file
from lamella.option_errors import explain
from lamella.plugins import import_plugins

# Why the threshold is tuned on questions that are in neither of these.
THRESHOLD_OVERLAP = {
    "train": "a reader is more confident on questions it was trained on, so the threshold would not suit new ones.",
    "dev": "a threshold tuned on the questions that are scored makes the score too optimistic.",
}
SPECIAL_TOKENS = 4  # at most: RoBERTa's <s> question </s></s> context </s>


def check_config(
    table: Mapping[str, Any], *, where: str, problems: Sequence[str] = (), check_parts: bool = True
) -> RunConfig:
    """Return the checked options of a run, or raise one error that lists every problem.

    `where` names the source of the table in the error, `problems` are those that were found before. Without
    `check_parts`, the options of named parts are not checked: most parts are defined in modules that import torch.
    """
    problems = list(problems)
    faulty: set[str] = set()
    try:
        config = RunConfig.model_validate(dict(table))
    except ValidationError as error:
        problems += explain(error, table, RunConfig)
        faulty = {str(finding["loc"][0]) for finding in error.errors()}
        config = _valid_options(table, error)
    if check_parts:
        problems += _plugin_problems(config)  # first: plugins register parts that the run may name
        problems += _part_problems(config)
        problems += _metric_problems(config)
    problems += [problem for problem in _rule_problems(config) if problem.partition(".")[0] not in faulty]
    if problems:
        raise ConfigError(where, problems)
    return config


def _valid_options(table: Mapping[str, Any], error: ValidationError) -> RunConfig:
    """Return the configuration without its faulty options, so that other problems are reported together with them."""
    valid = {name: dict(section) if isinstance(section, Mapping) else section for name, section in table.items()}
    for finding in error.errors():
        section, *keys = finding["loc"]
        if keys and isinstance(valid.get(str(section)), dict):
            valid[str(section)].pop(keys[0], None)
        else:
            valid.pop(str(section), None)
    return RunConfig.model_validate(valid)


def _plugin_problems(config: RunConfig) -> list[str]:
    """Import the plugins that the configuration names."""
    problems = []
    for index, module in enumerate(config.plugins):
        try:
            import_plugins([module])
        except PluginError as error:
            problems.append(f"plugins[{index}]: {error}")
    return problems


def _part_problems(config: RunConfig) -> list[str]:
    """Check every part that the configuration names: that it exists, and its options."""
    parts = [
        ("tuning", "encoder.tuning", config.encoder.tuning),
        ("task", "learner.task", config.learner.task),
        *(("mixer", f"learner.mixer[{place}]", stage) for place, stage in enumerate(config.learner.mixer)),
        *(("mixer", f"learner.beside[{place}]", stage) for place, stage in enumerate(config.learner.beside)),
        ("loss", "learner.loss", config.learner.loss),
        ("schedule", "learner.schedule", config.learner.schedule),
        *([("distiller", "learner.distil", config.learner.distil)] if config.learner.distil else []),
        *(("metric", f"training.metrics[{place}]", spec) for place, spec in enumerate(config.training.metrics)),
        *([("augmentation", "data.augment", config.data.augment)] if config.data.augment else []),
    ]
    problems = []
    for family, where, spec in parts:
        name, options = registry.split(spec)
        try:
            problems += registry.part(family, name).problems(options, where)
        except UnknownNameError as error:
            problems.append(f"{where}: {error}")
    return problems


def _metric_problems(config: RunConfig) -> list[str]:
    """Check that the metrics have different names and that the one of the best checkpoint is computed."""
    metric, names = config.training.metric, [registry.split(spec)[0] for spec in config.training.metrics]
    problems = [
        f"training.metrics: expected different metrics, got {name!r} more than once."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    computed = [
        *METRICS,
        *QUESTION_METRICS,
        *(f"{prefix}{name}" for name in names for prefix in ("", "HasAns_", "NoAns_")),
    ]
    if metric is not None and metric not in computed:
        name = metric.removeprefix("HasAns_").removeprefix("NoAns_")
        if name in registry.names("metric"):
            problems.append(f"training.metric: {metric} is not computed; add {name!r} to training.metrics.")
        else:
            problems.append(f"training.metric: {UnknownNameError('metric', metric, computed)}")
    return problems


def _rule_problems(config: RunConfig) -> list[str]:
    """Check the rules across options, which no single option can express."""
    problems = []
    windows = config.windows
    room = windows.max_seq_length - windows.max_query_length - SPECIAL_TOKENS
    if room < 1:
        problems.append(
            f"windows.max_seq_length: expected room for a question of max_query_length {windows.max_query_length} "
            f"tokens, {SPECIAL_TOKENS} special tokens and some context, got {windows.max_seq_length}."
        )
    elif windows.stride_is == "overlap" and windows.doc_stride >= room:
        problems.append(
            f"windows.doc_stride: expected an overlap below {room}, the context tokens that fit beside the longest "
            f"question, got {windows.doc_stride}."
        )
    elif windows.stride_is == "step" and windows.doc_stride < 1:
        problems.append(f"windows.doc_stride: expected a step of at least 1, got {windows.doc_stride}.")
    problems += [
        f"training.{option}: needs data.dev, on which the metric is computed; data.dev is empty."
        for option in ("patience", "target")
        if getattr(config.training, option) is not None and not config.data.dev
    ]
    problems += [
        f"data.threshold: {name} is also in data.{split}; {reason}"
        for split, reason in THRESHOLD_OVERLAP.items()
        for name in config.data.threshold
        if any(same_file(name, other) for other in config.data.files(split))
    ]
    if config.data.context_order is not None and config.data.contexts_per_question is None:
        problems.append("data.context_order: needs data.contexts_per_question, the number of contexts to choose.")
    names = [entry.file for entry in config.data.train_files]
    problems += [
        f"data.train: {name} is given more than once, with different options; give it once."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if config.decoding.merge == "leads" and config.decoding.method == "independent":
        problems.append(
            'decoding.merge: expected "scores" with decoding.method = "independent", where the surest window decides; '
            'got "leads".'
        )
    if config.training.max_steps is None and config.training.epochs == 0:
        problems.append("training.epochs: is 0; to save an untrained model, set training.max_steps = 0 too.")
    return problems
