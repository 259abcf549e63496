"""The parts a configuration can name, and the options each of them takes.

A part is one class or function. Its positional parameters are facts known at run time (a width, a number of steps); its
keyword-only parameters are its options. The signature is the only description there is: the configuration is checked
against it, `lamella parts` prints it, the reference page is made from it.

    @register("schedule", "linear")
    def linear(total_steps: int, *, warmup: Share = 0.1) -> Schedule: ...

    build("schedule", {"name": "linear", "warmup": 0.06}, 1000)
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from lamella.errors import ConfigError, UnknownNameError, did_you_mean

T = TypeVar("T", bound=Callable[..., Any])


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
        return create_model(f"{self.family}.{self.name}", __config__=ConfigDict(extra="forbid"), **fields)

    def problems(self, options: Mapping[str, Any], where: str) -> list[str]:
        """Every fault of `options`, one line each; an empty list when they fit."""
        try:
            self._schema.model_validate(dict(options))
        except ValidationError as error:
            return explain(error, where, self._schema)
        return []

    def resolved(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """`options` checked, converted and completed with the defaults."""
        try:
            checked = self._schema.model_validate(dict(options))
        except ValidationError as error:
            raise ConfigError(f"{self.family} {self.name!r}", explain(error, "", self._schema)) from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("reader", "reads a data file", ("lamella.data.readers",)),
        Family("writer", "writes a data file", ("lamella.data.writers",)),
        Family("tuning", "says what of the encoder is trained", ("lamella.encoder.tuning",)),
        Family("mixer", "turns the hidden layers into what the task reads", ("lamella.heads.pooling",)),
        Family("task", "what is asked of the reader", ("lamella.heads.tasks",)),
        Family("loss", "what training makes small", ("lamella.heads.losses",)),
        Family("schedule", "the learning rate over the steps", ("lamella.training.schedule",)),
    )
}


def register(family: str, name: str) -> Callable[[T], T]:
    """Put a class or function into a family under a name."""

    def add(make: T) -> T:
        parts = FAMILIES[family].parts
        if name in parts and parts[name].make.__qualname__ != make.__qualname__:
            raise ValueError(f"{family} {name!r} is registered twice: {parts[name].make} and {make}")
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


def split(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A part as a configuration writes it, as its name and its options."""
    if isinstance(spec, str):
        return spec, {}
    options = dict(spec)
    return options.pop("name"), options


def explain(error: ValidationError, where: str, schema: type[BaseModel]) -> list[str]:
    """pydantic's findings in our words: key path, what was expected, what was found, the nearest known key."""
    lines = []
    for finding in error.errors():
        keys = [str(key) for key in finding["loc"] if not _is_union_member(key)]
        path = ".".join(key for key in [where, *keys] if key)
        if finding["type"] == "extra_forbidden":
            known = _fields_at(schema, finding["loc"][:-1])
            lines.append(f"{path}: no such option.{did_you_mean(keys[-1], known)}")
        elif finding["type"] == "missing":
            lines.append(f"{path}: is required and was not given.")
        else:
            message = finding["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message[:1].lower()}{message[1:]}. Got {finding['input']!r}.")
    return list(dict.fromkeys(lines))


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


def _spell(annotation: Any) -> str:
    """A type as a reader of the docs wants it: `Literal['a', 'b']` becomes `a | b`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        bounds = [str(bound) for extra in arguments[1:] for bound in getattr(extra, "metadata", [])]
        return _spell(arguments[0]) + (f" ({', '.join(bounds)})" if bounds else "")
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is typing.Union or str(origin) == "<class 'types.UnionType'>":
        return " | ".join(_spell(one) for one in arguments)
    return "none" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))


def _is_union_member(key: str | int) -> bool:
    """pydantic adds the tried branch of a union to the path (`function-before[...]`, `list[str]`): no key of ours."""
    return isinstance(key, str) and not key.replace("_", "").isalnum()


def _fields_at(schema: type[BaseModel], path: tuple[str | int, ...]) -> list[str]:
    """The keys that exist where an unknown one was found."""
    for key in path:
        if not isinstance(key, str) or key not in schema.model_fields:
            continue
        annotation = schema.model_fields[key].annotation
        candidates = [annotation, *typing.get_args(annotation)]
        schema = next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), schema)
    return list(schema.model_fields)
