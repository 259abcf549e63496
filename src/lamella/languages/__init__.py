"""Languages: how answers are normalised and compared, one module per language.

To add a language, add a module to this package with a class registered as `@register("language", name)`. The class
has the methods of `Language`. Scoring, the command line and the documentation find it by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol, cast

from lamella.errors import UsageError


class Language(Protocol):
    """The interface of a registered language.

    A language may also have `metrics`: the names of metrics that are always computed beside exact match and F1.
    """

    def normalise(self, text: str) -> str:
        """Return the form of an answer in which equal answers are equal strings."""
        ...

    def units(self, normalised: str) -> Sequence[str]:
        """Split a normalised answer into the units that F1 counts: words or characters."""
        ...

    def confidence(self, text: str) -> float:
        """Rate from 0 to 1 how likely a text is in this language; the language with the highest value is detected."""
        ...


@functools.cache
def get_language(name: str) -> Language:
    """Return the language of that name."""
    from lamella.registry import build, names  # here, so that the metric is imported without pydantic

    known = names("language")
    if name not in known:
        raise UsageError(f"language: expected one of {', '.join(known)}, got {name!r}.")
    return cast(Language, build("language", name))


def detect_language(text: str) -> str:
    """Return the name of the language that a text is most likely written in."""
    from lamella.registry import names

    return max(names("language"), key=lambda name: get_language(name).confidence(text))
