"""A parsed document, positions in it, and the collector for the examples and problems found in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from lamella.data.doctor.problems import Problem, quote
from lamella.data.examples import Context, Example
from lamella.errors import shorten, truncate

T = TypeVar("T", str, list[Any], dict[str, Any])


class Place(NamedTuple):
    """A position in a document: the keys from the top, and the names that users know it by."""

    keys: tuple[str | int, ...] = ()
    article: str | None = None
    id: str | None = None
    line: int | None = None

    @classmethod
    def at_line(cls, number: int) -> Place:
        """Return the position of a line of a JSONL or CSV file."""
        return cls((f"line {number}",), line=number)

    @property
    def path(self) -> str:
        """The keys as one string: `data[3].paragraphs[0].qas[2]`."""
        parts = (
            f"[{key}]" if isinstance(key, int) else f".{key}" if key.isprintable() else f"[{key!r}]"
            for key in self.keys
        )
        return "".join(parts).removeprefix(".")

    def at(self, *keys: str | int) -> Place:
        """Return the position of a value inside the value at this position."""
        return Place((*self.keys, *keys), self.article, self.id, self.line)


@dataclass(frozen=True)
class Document:
    """Parsed data, before its format is recognised."""

    content: Any
    container: Literal["json", "jsonl", "csv"] = "json"
    lines: Sequence[int] = ()  # line number of each entry, in JSONL and CSV

    @property
    def version(self) -> str | None:
        version = self.content.get("version") if isinstance(self.content, dict) else None
        return None if version is None or isinstance(version, list | dict) else str(version)

    @property
    def entries(self) -> list[Any]:
        """The articles or rows: the list under `data`, the top-level list, or the single top-level object."""
        if isinstance(self.content, dict):
            data = self.content.get("data", [self.content])
            return data if isinstance(data, list) else []
        return self.content if isinstance(self.content, list) else []

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The entries that are JSON objects."""
        return [entry for entry in self.entries if isinstance(entry, dict)]

    def place(self, index: int) -> Place:
        """Return the position of an entry."""
        if self.lines:
            return Place.at_line(self.lines[index])
        if isinstance(self.content, list):
            return Place((index,))
        return Place(("data", index)) if "data" in self.content else Place()


@dataclass
class Source:
    """The data being read; collects its examples and problems."""

    path: str
    examples: list[Example] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unread: int = 0
    size: int = 0  # of the file in bytes, compressed if it is
    sha256: str = ""
    contexts: dict[tuple[str, str], Context] = field(default_factory=dict)

    def report(
        self, kind: str, reason: str, place: Place, *, column: int | None = None, example: int | None = None
    ) -> None:
        """Add a problem."""
        self.problems.append(
            Problem(kind, self.path, reason, place.article, place.id, place.line, column, example=example)
        )

    def add(self, example: Example | None, faults: Sequence[tuple[str, str]], place: Place) -> None:
        """Add an example with the faults of its question; None counts a question that could not be read."""
        for kind, reason in faults:
            self.report(kind, reason, place, example=None if example is None else len(self.examples))
        if example is None:
            self.unread += 1
        else:
            self.examples.append(example)

    def require(self, owner: dict[str, Any], key: str, type_: type[T], kind: str, place: Place) -> T | None:
        """Return a required field; if it is missing or has the wrong type, report that and return None."""
        value = owner.get(key)
        if isinstance(value, type_):
            return value
        where = place.at(key).path
        if value is None:
            self.report("missing_field", f"{where} {describe_absence(owner, key)}", place)
        else:
            self.report(kind, f"{where}: expected {_TYPE_NAMES[type_]}, got {describe(value)}", place)
        return None

    def title(self, owner: dict[str, Any], place: Place) -> str:
        """Return the title of an article, `""` if it has none."""
        title = owner.get("title")
        if title is None or isinstance(title, str):
            return title or ""
        self.report("wrong_type_title", f"{place.at('title').path}: expected text, got {describe(title)}", place)
        return str(title) if isinstance(title, int | float) else ""

    def context(self, text: str, title: str) -> Context:
        """Return one shared Context for equal texts under equal titles, so that each text is tokenised once."""
        return self.contexts.setdefault((title, text), Context(text, title))

    def collapse_file_wide_problems(self, kind: str, reason: str) -> None:
        """If every question has a problem of this kind, replace these problems by a single one for the whole file."""
        ungrouped = sum(example.group is None for example in self.examples)
        questions = ungrouped + len({example.group for example in self.examples} - {None})
        if sum(problem.kind == kind for problem in self.problems) == questions > 1:
            self.problems = [problem for problem in self.problems if problem.kind != kind]
            self.problems.append(Problem(kind, self.path, reason))


_TYPE_NAMES: dict[type, str] = {str: "text", list: "a list", dict: "an object"}


def describe(value: Any) -> str:
    """Describe a value of the wrong type in a few words."""
    if isinstance(value, list | dict):
        return _TYPE_NAMES[type(value)] if value else f"an empty {'list' if isinstance(value, list) else 'object'}"
    if isinstance(value, str):
        return f"the text {quote(value)}"
    try:
        return truncate(json.dumps(value))
    except TypeError:  # data in memory may hold any object
        return f"a value of type {type(value).__name__}"
    except ValueError:
        return shorten(value)


def describe_absence(owner: dict[str, Any], key: str) -> str:
    """Describe how a field without a value is absent."""
    return "is null" if key in owner else "is missing"
