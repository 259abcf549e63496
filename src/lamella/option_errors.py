"""Explain what is wrong with the options of a run file, in words that name the key, the fault and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from lamella.errors import ConfigError, did_you_mean, printable, shorten, truncate
from lamella.files import read_toml

Options = TypeVar("Options", bound=BaseModel)

# Options of transformers' Trainer and of run_qa.py, and what they are called here.
TRAINER_OPTIONS = {
    "bf16": 'training.precision = "bf16"',
    "data_seed": "training.order_seed",
    "early_stopping_patience": "training.patience",
    "eval_steps": 'training.evaluate_every = "500 steps"',
    "eval_strategy": "training.evaluate_every",
    "evaluation_strategy": "training.evaluate_every",
    "fp16": 'training.precision = "fp16"',
    "gradient_accumulation_steps": "training.accumulate",
    "label_smoothing_factor": 'learner.loss = { name = "cross_entropy", label_smoothing = 0.1 }',
    "load_best_model_at_end": "training.metric (the best model by it is always kept)",
    "lr_scheduler_type": "learner.schedule",
    "metric_for_best_model": "training.metric",
    "model_name_or_path": "encoder.name",
    "num_train_epochs": "training.epochs",
    "output_dir": "the option --out of lamella train",
    "overwrite_output_dir": "the option --overwrite of lamella train",
    "per_device_eval_batch_size": "training.eval_batch_size",
    "per_device_train_batch_size": "training.batch_size",
    "report_to": "training.trackers",
    "resume_from_checkpoint": "the option --resume of lamella train",
    "save_steps": 'training.checkpoint_every = "500 steps"',
    "save_strategy": "training.checkpoint_every",
    "train_file": "data.train",
    "validation_file": "data.dev",
    "warmup_ratio": 'learner.schedule = { name = "linear", warmup = 0.1 }',
    "warmup_steps": 'learner.schedule = { name = "linear", warmup = 0.1 } (a share of all steps)',
}

_EXPECTATIONS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "list_type": "a list",
    "sequence_str": "a list",
    "dict_type": "a table",
    "model_type": "a table of options",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_pattern_mismatch": "a text of the documented form",  # a regular expression would explain little
    "string_too_short": "a text of at least {min_length} character(s)",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "value_error": "{error}",
}


def read_options(path: Path, options: type[Options]) -> Options:
    """Read a TOML file of options and check it; an error explains every mistake."""
    table = read_toml(path)
    try:
        return options.model_validate(table)
    except ValidationError as error:
        raise ConfigError(str(path), explain(error, table, options)) from None


def explain(error: ValidationError, given: Mapping[str, Any], schema: type[BaseModel], where: str = "") -> list[str]:
    """Return one line per fault that pydantic found in `given`: key path, what was expected, what was found."""
    return explain_faults(error.errors(), given, schema, where)


def explain_faults(
    faults: Sequence[Mapping[str, Any]], given: Mapping[str, Any], schema: type[BaseModel], where: str = ""
) -> list[str]:
    """Return one line per fault, as `explain` does."""
    lines: list[str] = []
    wrong_values: dict[str, tuple[list[str], Any]] = {}  # by path: an expectation per member of a union, the value
    for fault in faults:
        keys = _keys_of_user(fault["loc"], given, missing=fault["type"] == "missing")
        path = _spell_path(where, keys)
        if fault["type"] == "extra_forbidden":
            lines.append(f"{path}: {_explain_unknown_key(keys, schema)}")
        elif fault["type"] == "missing":
            lines.append(f"{path}: is required and was not given.")
        else:
            wrong_values.setdefault(path, ([], fault["input"]))[0].append(_expectation(fault))
    lines += [
        f"{path}: expected {' or '.join(dict.fromkeys(expected))}, got {shorten(value)}."
        for path, (expected, value) in wrong_values.items()
    ]
    return lines


def _expectation(fault: Mapping[str, Any]) -> str:
    words = _EXPECTATIONS.get(fault["type"])
    if words is None:  # a fault that no option of ours can have yet: pydantic's own sentence, without its opening
        return str(fault["msg"]).removeprefix("Input should be ")
    return words.format(**fault.get("ctx", {}))


def _keys_of_user(path: Sequence[str | int], given: Any, *, missing: bool) -> list[str | int]:
    """Return the keys of a path that the user wrote.

    pydantic adds the member of a union that it tried, and the index in a list that it made itself:
    `("k", "list[int]", 0)` is `k[0]` if the user gave a list, and `k` if the user gave a single value.
    """
    keys: list[str | int] = []
    for index, key in enumerate(path):
        is_index = isinstance(given, list) and isinstance(key, int)
        if is_index or (isinstance(given, Mapping) and key in given):
            given = given[key]
        elif not (missing and index == len(path) - 1):
            continue
        keys.append(key)
    return keys


def _spell_path(where: str, keys: Sequence[str | int]) -> str:
    path = where
    for key in keys:
        name = key if isinstance(key, int) else printable(truncate(key)) or "''"
        path += f"[{name}]" if isinstance(key, int) else f".{name}" if path else str(name)
    return path


def _explain_unknown_key(keys: Sequence[str | int], schema: type[BaseModel]) -> str:
    """Return a hint about a key that does not exist: the section that has it, its name here, or the nearest key."""
    key, sections = str(keys[-1]), _sections(schema)
    homes = [f"{name}.{key}" for name, section in sections.items() if key in _option_names(section)]
    if homes:
        return f"no such option here. Did you mean {' or '.join(homes)}?"
    if sections and key in TRAINER_OPTIONS:
        return f"is an option of transformers; use {TRAINER_OPTIONS[key]} instead."
    inside = schema
    for option in keys[:-1]:  # a section, and a table inside it, such as an entry of data.train
        field = inside.model_fields.get(str(option))
        inside = next(_tables_in(field.annotation), inside) if field is not None else inside
    if not inside.model_fields:
        return "no such option; it takes none."
    kind = "section" if inside is schema and sections else "option"
    return f"no such {kind}.{did_you_mean(key, _option_names(inside))}"


def _tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the tables that an annotation such as `list[str | TrainFile]` allows."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _tables_in(argument)


def _option_names(schema: type[BaseModel]) -> list[str]:
    """Return the options of a schema as a run file spells them: `from`, not `from_run`."""
    return [field.alias or name for name, field in schema.model_fields.items()]


def _sections(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the fields of a schema that are tables with options of their own."""
    return {
        name: field.annotation
        for name, field in schema.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
