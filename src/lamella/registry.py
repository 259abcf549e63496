"""The parts a configuration can name, and the options each of them takes.

A part is one class or function. Its positional parameters are facts known at run time (a width, a number of steps); its
keyword-only parameters are its options. The signature is the only description there is: the configuration is checked
against it, `lamella parts` prints it, the reference page is made from it.

    @register("schedule", "linear")
    def linear(total_steps: int, *, warmup: Share = 0.1) -> Schedule: ...

    build("schedule", {"name": "linear", "warmup": 0.06}, 1000)

Options have the types that TOML has, and none is turned into another: `true` is no number, `"3"` neither. An option
that lists things is annotated as a `list` or a `Sequence`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from lamella.errors import ConfigError, UnknownNameError, did_you_mean

T = TypeVar("T", bound=Callable[..., Any])

# Nothing unknown, nothing converted in silence, no number that a JSON file could not hold.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Family:
    """A kind of part, and the modules that hold its parts; they are imported on first use, so `--help` stays fast."""

    name: str
    summary: str
    modules: tuple[str, ...]
    parts: dict[str, Part] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Option:
    """One keyword-only parameter of a part."""

    name: str
    type: str
    default: Any
    required: bool


@dataclass(frozen=True)
class Part:
    """A registered class or function."""

    family: str
    name: str
    make: Callable[..., Any]

    @property
    def summary(self) -> str:
        """The first line of the part's docstring."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]

    @property
    def options(self) -> list[Option]:
        """What a configuration may set, in the order of the signature."""
        return [
            Option(name, _spell(annotation), None if default is ... else default, default is ...)
            for name, (annotation, default) in _keyword_only(self.make).items()
        ]

    @functools.cached_property
    def _schema(self) -> type[BaseModel]:
        fields: dict[str, Any] = _keyword_only(self.make)
        return create_model(f"{self.family}.{self.name}", __config__=STRICT, **fields)

    def problems(self, options: Mapping[str, Any], where: str) -> list[str]:
        """Every fault of `options`, one line each; an empty list when they fit."""
        try:
            self._schema.model_validate(dict(options))
        except ValidationError as error:
            return explain(error, options, self._schema, where)
        return []

    def resolved(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` checked, converted and completed with the defaults."""
        try:
            checked = self._schema.model_validate(dict(options))
        except ValidationError as error:
            raise ConfigError(f"{self.family} {self.name!r}", explain(error, options, self._schema)) from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("format", "reads a data file", ("lamella.data.formats",)),
        Family("language", "normalises answers and splits them for the metric", ("lamella.languages.registered",)),
        Family("writer", "writes a data file", ("lamella.data.writers",)),
        Family("augmentation", "changes examples at random, anew every epoch", ("lamella.data.augment",)),
        Family("tuning", "says what of the encoder is trained", ("lamella.encoder.tuning",)),
        Family(
            "mixer",
            "turns the hidden layers into what the task reads",
            (
                "lamella.heads.pooling",
                "lamella.heads.layer_attention",
                "lamella.heads.compress",
                "lamella.heads.conv",
                "lamella.heads.context_cnn",
            ),
        ),
        Family("task", "what is asked of the reader", ("lamella.heads.tasks",)),
        Family("loss", "what training makes small", ("lamella.heads.losses",)),
        Family("schedule", "the learning rate over the steps", ("lamella.training.schedule",)),
        Family(
            "distiller",
            "adds what a teacher says to the loss",
            ("lamella.training.teachers", "lamella.training.stored_teacher"),
        ),
    )
}


def register(family: str, name: str) -> Callable[[T], T]:
    """Put a class or function into a family under a name."""

    def add(make: T) -> T:
        parts = FAMILIES[family].parts
        if name in parts and _place(parts[name].make) != _place(make):  # the same place again is a module reloaded
            raise ValueError(
                f"{family} {name!r} is registered twice: by {_place(parts[name].make)} and by {_place(make)}"
            )
        parts[name] = Part(family, name, make)
        return make

    return add


def names(family: str) -> list[str]:
    """All names in a family, sorted."""
    return sorted(_loaded(family).parts)


def part(family: str, name: str) -> Part:
    """The part of that name, or an error that offers the nearest ones."""
    parts = _loaded(family).parts
    if name not in parts:
        raise UnknownNameError(family, name, parts)
    return parts[name]


def describe(family: str | None = None) -> list[dict[str, Any]]:
    """All families (or one) with their parts and options, as plain data."""
    return [
        {
            "family": one.name,
            "summary": one.summary,
            "parts": [
                {"name": name, "summary": found.summary, "options": [asdict(option) for option in found.options]}
                for name, found in sorted(one.parts.items())
            ],
        }
        for one in map(_loaded, FAMILIES if family is None else [family])
    ]


def build(family: str, spec: str | Mapping[str, Any], *facts: Any) -> Any:
    """Make a part: `spec` is a name, or a table with `name` and options; `facts` are the positional arguments."""
    name, options = split(spec)
    chosen = part(family, name)
    return chosen.make(*facts, **chosen.resolved(options))


def complete(family: str, spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """A part with all its options, those left to their defaults too: what it means stays when a default changes.

    As a file gives it back: the same part is the same table, whether it was read or made.
    """
    name, options = split(spec)
    resolved = part(family, name).resolved(options)
    return {"name": name, **{key: list(one) if isinstance(one, tuple) else one for key, one in resolved.items()}}


def split(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A part as a configuration writes it, as its name and its options."""
    if isinstance(spec, str):
        return spec, {}
    options = dict(spec)
    return options.pop("name"), options


def explain(error: ValidationError, given: Mapping[str, Any], schema: type[BaseModel], where: str = "") -> list[str]:
    """pydantic's findings about `given` in our words: key path, what was expected, what was found, the nearest key."""
    lines: list[str] = []
    wrong: dict[
        str, tuple[list[str], Any]
    ] = {}  # path -> what it may be (a line for each member of a union), its value
    for finding in error.errors():
        keys = _real_keys(finding["loc"], given, missing=finding["type"] == "missing")
        path = _spell_path(where, keys)
        if finding["type"] == "extra_forbidden":
            lines.append(f"{path}: {_unknown_key(keys, schema)}")
        elif finding["type"] == "missing":
            lines.append(f"{path}: is required and was not given.")
        else:
            wrong.setdefault(path, ([], finding["input"]))[0].append(_expectation(finding))
    lines += [
        f"{path}: expected {' or '.join(dict.fromkeys(expected))}. Got {shorten(value)}."
        for path, (expected, value) in wrong.items()
    ]
    return lines


def shorten(value: Any, limit: int = 80) -> str:
    """A value as a message shows it."""
    shown = repr(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}…"


def _loaded(family: str) -> Family:
    if family not in FAMILIES:
        raise UnknownNameError("family", family, FAMILIES)
    for module in FAMILIES[family].modules:
        importlib.import_module(module)
    return FAMILIES[family]


def _keyword_only(make: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    function = getattr(make, "__init__") if isinstance(make, type) else make  # noqa: B009 - mypy distrusts `.__init__`
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        name: (hints.get(name, Any), ... if parameter.default is parameter.empty else parameter.default)
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def _place(make: Callable[..., Any]) -> str:
    return f"{make.__module__}.{make.__qualname__}"


_BOUNDS = {
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
    "multiple_of": "a multiple of",
    "min_length": "length >=",
    "max_length": "length <=",
}


def _spell(annotation: Any) -> str:
    """A type as a reader of the docs wants it: `Literal['a', 'b']` becomes `a | b`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        limits = [limit for extra in arguments[1:] for limit in getattr(extra, "metadata", [extra])]
        bounds = [f"{sign} {getattr(one, key)}" for one in limits for key, sign in _BOUNDS.items() if hasattr(one, key)]
        return _spell(arguments[0]) + (f" ({', '.join(bounds)})" if bounds else "")
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_spell(one) for one in arguments)
    if origin in (list, Sequence):
        return f"list of {_spell(arguments[0])}"
    return "none" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


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
    "string_pattern_mismatch": "a text like {pattern}",
    "string_too_short": "a text of at least {min_length} character(s)",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "value_error": "{error}",
}


def _expectation(finding: Mapping[str, Any]) -> str:
    words = _EXPECTATIONS.get(finding["type"])
    if words is None:  # a kind that no option of ours can have yet: pydantic's own sentence, without its opening
        return str(finding["msg"]).removeprefix("Input should be ")
    return words.format(**finding.get("ctx", {}))


def _real_keys(path: Sequence[str | int], given: Any, *, missing: bool) -> list[str | int]:
    """pydantic puts the tried member of a union, and the place in a list it made itself, into a path: not keys of ours.

    `("k", "list[int]", 0)` is `k[0]` where the user gave a list, and `k` where one value was given in place of a list.
    """
    keys: list[str | int] = []
    for place, key in enumerate(path):
        is_place = isinstance(given, list) and isinstance(key, int)
        if is_place or (isinstance(given, Mapping) and key in given):
            given = given[key]
        elif not (missing and place == len(path) - 1):
            continue
        keys.append(key)
    return keys


def _spell_path(where: str, keys: Sequence[str | int]) -> str:
    path = where
    for key in keys:
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else key
    return path


def _unknown_key(keys: Sequence[str | int], schema: type[BaseModel]) -> str:
    """What to say of a key that does not exist; best of all, in which section it does."""
    key, sections = str(keys[-1]), _sections(schema)
    homes = [f"{name}.{key}" for name, section in sections.items() if key in _option_names(section)]
    if homes:
        return f"no such option here. Did you mean {' or '.join(homes)}?"
    inside = sections.get(str(keys[0]), schema)
    if not inside.model_fields:
        return "no such option; it takes none."
    return (
        f"no such {'section' if inside is schema and sections else 'option'}.{did_you_mean(key, _option_names(inside))}"
    )


def _option_names(schema: type[BaseModel]) -> list[str]:
    """Return the options of a schema as a run file spells them: `from`, not `from_run`."""
    return [field.alias or name for name, field in schema.model_fields.items()]


def _sections(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields of a schema that are tables with options of their own."""
    return {
        name: field.annotation
        for name, field in schema.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
