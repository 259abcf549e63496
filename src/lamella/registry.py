"""The parts that a run file can name, and the options of each part.

A part is a class or function. Its positional parameters are facts known at run time (a width, a number of steps); its
keyword-only parameters are its options. The signature is their only description: run files are checked against it,
`lamella parts` prints it, the reference page is generated from it.

    @register("schedule", "linear")
    def linear(total_steps: int, *, warmup: Share = 0.1) -> Schedule: ...

    build("schedule", {"name": "linear", "warmup": 0.06}, 1000)

Options have the types of TOML, and no value is converted: neither `true` nor `"3"` is a number. Annotate an option that
takes a list as `list` or `Sequence`. Other packages register parts in the same way; see `lamella.plugins`.

Most modules of parts import torch. Where it is not installed, `parts.json` stands for them: it is generated from the
signatures by `make docs`, and holds all but the values that an option may have.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from lamella.errors import EXTRAS, ConfigError, UnknownNameError, UsageError
from lamella.option_errors import explain
from lamella.plugins import import_installed_plugins, reading_options

T = TypeVar("T", bound=Callable[..., Any])

OUTLINE = Path(__file__).with_name("parts.json")
OWN_PACKAGE = __name__.partition(".")[0]

# No unknown key, no silent conversion, no number that JSON cannot hold.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _AddedLater:
    """See ADDED_LATER."""


# Marks an option that did not exist when the first files were stored. Files leave it out while it has its default, so
# that they, and the hashes of models, stay as they were. That default can never change.
ADDED_LATER = _AddedLater()


@dataclass(frozen=True)
class Family:
    """A kind of part, and the modules that register its parts: imported on first use, so that `--help` stays fast."""

    name: str
    summary: str
    modules: tuple[str, ...]
    traits: Mapping[str, Any] = field(default_factory=dict, compare=False)  # what parts can declare, with the defaults
    parts: dict[str, Part] = field(default_factory=dict, compare=False, repr=False)
    missing: list[str] = field(default_factory=list, compare=False, repr=False)  # the library its modules lack


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
    traits: Mapping[str, Any] = field(default_factory=dict, compare=False)  # those that differ from the defaults

    @property
    def summary(self) -> str:
        """Return the first line of the part's docstring."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]

    @property
    def options(self) -> list[Option]:
        """Return the options in the order of the signature."""
        return [
            Option(
                name,
                _spell(annotation),
                None if default is ... else list(default) if isinstance(default, tuple) else default,
                default is ...,
            )
            for name, (annotation, default) in _keyword_only(self.make).items()
        ]

    @property
    def later_defaults(self) -> dict[str, Any]:
        """Return the defaults of the options that are marked with `ADDED_LATER`."""
        return {
            name: default
            for name, (annotation, default) in _keyword_only(self.make).items()
            if ADDED_LATER in typing.get_args(annotation)
        }

    @property
    def module(self) -> str:
        """Return the module that defines the part."""
        return self.make.__module__

    @functools.cached_property
    def _schema(self) -> type[BaseModel]:
        fields: dict[str, Any] = _keyword_only(self.make)
        with reading_options(_qualified_name(self.make)):  # pydantic may have no rule for a type
            return create_model(f"{self.family}.{self.name}", __config__=STRICT, **fields)

    def problems(self, options: Mapping[str, Any], where: str) -> list[str]:
        """Return one line per fault of `options`; an empty list if there is none."""
        try:
            self._schema.model_validate(dict(options))
        except ValidationError as error:
            return explain(error, options, self._schema, where)
        return []

    def resolved(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return `options`, checked and completed with the defaults."""
        try:
            checked = self._schema.model_validate(dict(options))
        except ValidationError as error:
            raise ConfigError(f"{self.family} {self.name!r}", explain(error, options, self._schema)) from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("format", "reads a data file", ("lamella.data.file_formats.formats",)),
        Family("language", "normalises answers and splits them for the metric", ("lamella.languages.registered",)),
        Family("metric", "compares a predicted answer with a correct one", ("lamella.scoring.answer_metrics",)),
        Family("writer", "writes a data file", ("lamella.data.file_formats.writers",)),
        Family("augmentation", "changes training examples at random, afresh in every epoch", ("lamella.data.augment",)),
        Family(
            "tuning",
            "selects or adds the weights of the encoder that are trained",
            ("lamella.encoder.tuning",),
            # low_rank: a warm start can approximate by it what another model added to the encoder's weights
            # top_layers: the option that gives the number of layers to train, from the top
            traits={"trains_encoder": True, "low_rank": False, "top_layers": None},
        ),
        Family(
            "mixer",
            "turns the hidden layers of the encoder into the input of the task",
            (
                "lamella.heads.pooling",
                "lamella.heads.layer_attention",
                "lamella.heads.compress",
                "lamella.heads.conv",
                "lamella.heads.context_cnn",
            ),
            # needs: the options that have an effect only with some values of another option, given with these
            traits={"needs": {}},
        ),
        Family("task", "defines what the reader predicts", ("lamella.heads.tasks",)),
        Family("loss", "is the training loss of a task", ("lamella.heads.losses",)),
        Family("schedule", "sets the learning rate at every step", ("lamella.training.fitting.schedule",)),
        Family(
            "distiller",
            "adds the predictions of a teacher to the loss",
            ("lamella.training.distillation.teachers", "lamella.training.distillation.stored_teacher"),
            # reads: the options that name folders, and what these hold: a "model", or a run with kept "logits"
            traits={"reads": {}},
        ),
    )
}


def register(family: str, name: str, **traits: Any) -> Callable[[T], T]:
    """Register a class or function as a part of `family` under `name`.

    `traits` are facts about the part that other modules ask for with `trait`.
    """

    def add(make: T) -> T:
        if family not in FAMILIES:
            raise UnknownNameError("family", family, FAMILIES)
        if unknown := traits.keys() - FAMILIES[family].traits.keys():
            raise UsageError(f"{family} {name!r} declares unknown traits: {', '.join(sorted(unknown))}.")
        parts = FAMILIES[family].parts
        # The same qualified name again means that its module was reloaded.
        if name in parts and _qualified_name(parts[name].make) != _qualified_name(make):
            raise UsageError(
                f"{family} {name!r} is registered twice: by {_qualified_name(parts[name].make)} and by "
                f"{_qualified_name(make)}; rename one of them."
            )
        parts[name] = Part(family, name, make, traits)
        return make

    return add


def names(family: str) -> list[str]:
    """Return the names of all parts of a family, sorted."""
    return sorted(_loaded(family).parts)


def part(family: str, name: str) -> Part:
    """Return the part of that name; the error for an unknown name lists the nearest ones."""
    parts = _loaded(family).parts
    if name not in parts:
        raise UnknownNameError(family, name, parts)
    return parts[name]


def trait(family: str, spec: str | Mapping[str, Any], key: str) -> Any:
    """Return what a part declares under this key, or the default of its family."""
    name, _ = split(spec)
    return {**FAMILIES[family].traits, **part(family, name).traits}[key]


def describe(family: str | None = None) -> list[dict[str, Any]]:
    """Return all families, or a single one, with their parts and options as plain data."""
    return [
        {
            "family": loaded.name,
            "summary": loaded.summary,
            "parts": [
                {"name": name, "summary": part.summary, "options": [asdict(option) for option in part.options]}
                for name, part in sorted(loaded.parts.items())
            ],
        }
        for loaded in map(_loaded, FAMILIES if family is None else [family])
    ]


def outline() -> dict[str, Any]:
    """Return what `parts.json` holds: the parts of this package as they are known without importing their modules."""
    return {
        family: {
            name: {
                "summary": part.summary,
                "module": part.module,
                "traits": dict(part.traits),
                "options": [{**asdict(option), "added_later": option.name in later} for option in part.options],
            }
            for name, part in sorted(_loaded(family).parts.items())
            for later in [part.later_defaults]
            if _is_own(part.module)
        }
        for family in FAMILIES
    }


def uses_outline() -> bool:
    """Return whether some parts could not be imported here, so that the values of their options are not checked."""
    return any(family.missing for family in FAMILIES.values())


def build(family: str, spec: str | Mapping[str, Any], *facts: Any) -> Any:
    """Build a part: `spec` is a name, or a table with `name` and options; `facts` are the positional arguments."""
    name, options = split(spec)
    chosen = part(family, name)
    return chosen.make(*facts, **chosen.resolved(options))


def complete(family: str, spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a part with all its options, also those left to their defaults, as a file stores it.

    Its meaning then stays the same when a default changes. Only an option marked with `ADDED_LATER` is left out.
    """
    name, options = split(spec)
    chosen = part(family, name)
    later = chosen.later_defaults
    resolved = {
        key: value for key, value in chosen.resolved(options).items() if key not in later or value != later[key]
    }
    stored = {key: list(value) if isinstance(value, tuple) else value for key, value in resolved.items()}
    return {"name": name, **stored}


def outside_modules(parts: Iterable[tuple[str, str | Mapping[str, Any]]]) -> list[str]:
    """Return the modules of other packages that define some of the parts, given as (family, spec)."""
    modules = (part(family, split(spec)[0]).module for family, spec in parts)
    return list(dict.fromkeys(module for module in modules if module != "__main__" and not _is_own(module)))


def split(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a part as a run file writes it."""
    if isinstance(spec, str):
        return spec, {}
    options = dict(spec)
    return options.pop("name"), options


def _loaded(family: str) -> Family:
    if family not in FAMILIES:
        raise UnknownNameError("family", family, FAMILIES)
    loaded = FAMILIES[family]
    if not loaded.missing:
        try:
            for module in loaded.modules:
                importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS["train"]:
                raise
            _read_outline(loaded, error.name)
    import_installed_plugins()
    return loaded


def _read_outline(family: Family, missing: str) -> None:
    family.missing.append(missing)
    for name, entry in json.loads(OUTLINE.read_text(encoding="utf-8"))[family.name].items():
        family.parts.setdefault(name, Part(family.name, name, _stand_in(entry, missing), entry["traits"]))


def _stand_in(entry: Mapping[str, Any], missing: str) -> Callable[..., Any]:
    """Return a function with the options and the description of a part that cannot be imported."""

    def make(*facts: Any, **options: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    make.__doc__, make.__module__ = entry["summary"], entry["module"]
    make.__annotations__ = {
        option["name"]: typing.Annotated[(Any, option["type"], *([ADDED_LATER] if option["added_later"] else []))]
        for option in entry["options"]
    }
    required = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            option["name"],
            inspect.Parameter.KEYWORD_ONLY,
            default=required if option["required"] else option["default"],
        )
        for option in entry["options"]
    ]
    make.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return make


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == OWN_PACKAGE


def _keyword_only(make: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    function = getattr(make, "__init__") if isinstance(make, type) else make  # noqa: B009 - mypy distrusts `.__init__`
    with reading_options(_qualified_name(make)):  # types may have no meaning, and defaults be what no file holds
        hints = typing.get_type_hints(function, include_extras=True)
        options = {
            name: (hints.get(name, Any), ... if parameter.default is parameter.empty else parameter.default)
            for name, parameter in inspect.signature(make).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        json.dumps([default for _, default in options.values() if default is not ...])
    return options


def _qualified_name(make: Callable[..., Any]) -> str:
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
    """Return a type as the docs show it: `Literal['a', 'b']` becomes `a | b`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated and isinstance(arguments[1], str):  # spelled already, in the outline
        return str(arguments[1])
    if origin is typing.Annotated:
        limits = [limit for extra in arguments[1:] for limit in getattr(extra, "metadata", [extra])]
        bounds = [
            f"{sign} {getattr(limit, key)}" for limit in limits for key, sign in _BOUNDS.items() if hasattr(limit, key)
        ]
        return _spell(arguments[0]) + (f" ({', '.join(bounds)})" if bounds else "")
    if origin is typing.Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_spell(argument) for argument in arguments)
    if origin in (list, Sequence):
        return f"list of {_spell(arguments[0])}"
    return "none" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))
