"""Parse JSON strictly: report repeated keys, NaN and lone surrogates, which Python's parser accepts silently."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, NamedTuple

from lamella.data.doctor.problems import quote
from lamella.data.file_formats.source import Place, Source


def parse_json(text: str, source: Source, place: Place) -> Any:
    """Parse JSON; report unusable values to the source and replace them."""
    unusable = _SURROGATE_ESCAPE.search(text) is not None

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal unusable
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        unusable = True
        return _RepeatedKeys(pairs)

    def make_constant(spelling: str) -> _NotANumber:
        nonlocal unusable
        unusable = True
        return _NotANumber(spelling)

    value = json.loads(text, object_pairs_hook=make_object, parse_constant=make_constant)
    return replace_unusable(value, source, place) if unusable else value


def replace_unusable(value: Any, source: Source, place: Place) -> Any:
    """Return a copy of a JSON value in which values that no later step can handle are replaced, and report each."""
    if isinstance(value, str):
        if not _SURROGATE.search(value):
            return value
        halves = ", ".join(sorted({f"\\u{ord(half):04x}" for half in _SURROGATE.findall(value)}))
        source.report("lone_surrogate", f"{place.path}: {halves} without its other half", place)
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, _NotANumber):
        source.report("not_a_number", f"{place.path}: {value.spelling} is not JSON", place)
        return None
    if isinstance(value, list):
        return [replace_unusable(item, source, place.at(index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        title, id = value.get("title"), value.get("id")
        if isinstance(title, str) and not _SURROGATE.search(title):
            place = place._replace(article=title)
        if isinstance(id, str) and not _SURROGATE.search(id):
            place = place._replace(id=id)
        if isinstance(value, _RepeatedKeys):
            repeated = ", ".join(quote(key) for key in value.repeated)
            source.report("duplicate_key", f"{place.path or 'the file'}: the key {repeated} appears twice", place)
        return {
            _SURROGATE.sub("\ufffd", key): replace_unusable(item, source, place.at(key)) for key, item in value.items()
        }
    return value


_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _RepeatedKeys(dict[str, Any]):
    """A JSON object with repeated keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)


class _NotANumber(NamedTuple):
    """NaN or an infinity, until it is reported."""

    spelling: str
