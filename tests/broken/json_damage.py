"""Damage to the structure of JSON and TOML: values of wrong types, missing and repeated keys, huge numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Keys = tuple[str | int, ...]

MARK = "\ue000"  # a text that no sound file holds; it is replaced by the damaged value
MOST_CHILDREN = 12  # of a list or an object; of larger ones, only the first ones and the last one are damaged

# As JSON text, because some of these are no JSON.
JSON_VALUES = {
    "null": "null",
    "true": "true",
    "0": "0",
    "-1": "-1",
    "1.5": "1.5",
    "2 ** 63": str(2**63),
    "1e308": "1e308",
    "1e-308": "1e-308",
    "1e999": "1e999",
    "NaN": "NaN",
    "a number of 5,000 digits": "9" * 5000,
    "an empty text": '""',
    "a space": '" "',
    "a word": '"titan"',
    "a long text": '"' + "x" * 5000 + '"',
    "control characters": '"\\u0000\\n\\u001b[31m"',
    "half a surrogate pair": '"\\ud83d"',
    "a path out of the folder": '"../../../etc/passwd"',
    "an absolute path": '"/etc/passwd"',
    "an empty list": "[]",
    "a list of lists": "[[[]]]",
    "a list of numbers": "[1, 2.5, -3]",
    "a list of null": "[null]",
    "a list of texts": '["a", "a"]',
    "an empty object": "{}",
    "an object": '{"a": {"b": null}}',
    "a named object": '{"name": "titan", "k": 3}',
    "nested 3,000 times": "[" * 3000 + "]" * 3000,
    "nothing": "",
}
TOML_VALUES = {
    "true": "true",
    "0": "0",
    "-1": "-1",
    "1.5": "1.5",
    "2 ** 62": str(2**62),
    "1e308": "1e308",
    "inf": "inf",
    "nan": "nan",
    "a number of 5,000 digits": "9" * 5000,
    "an empty text": '""',
    "a space": '" "',
    "a word": '"titan"',
    "a long text": '"' + "x" * 5000 + '"',
    "control characters": '"\\u0000\\n\\u001b[31m"',
    "a path out of the folder": '"../../../etc/passwd"',
    "an empty list": "[]",
    "a list of lists": "[[[]]]",
    "a list of numbers": "[1, 2.5, -3]",
    "a list of texts": '["a", "a"]',
    "an empty table": "{}",
    "a table": "{a = {b = 1}}",
    "a named table": '{name = "titan", k = 3}',
    "a date": "1979-05-27",
    "a time": "07:32:00",
    "nested 300 times": "[" * 300 + "]" * 300,
    "nothing": "",
}


def broken_json(value: Any) -> Iterator[tuple[str, bytes]]:
    """Yield copies of a JSON value in which one value has another type, or one key is missing, repeated or unknown."""
    for keys in places(value):
        for name, text in JSON_VALUES.items():
            yield f"{show(keys)} is {name}", dump_json(with_value(value, keys, MARK), text)
    yield from _broken_keys(value)


def broken_toml(value: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield copies of a TOML table in which one value has another type, or one key is missing or unknown."""
    for keys in places(value):
        if not keys:
            continue
        for name, text in TOML_VALUES.items():
            changed = dump_toml(with_value(value, keys, MARK)).replace(f'"{MARK}"', text)
            yield f"{show(keys)} is {name}", changed.encode()
    for keys in places(value):
        if keys and isinstance(keys[-1], str):
            yield f"without {show(keys)}", dump_toml(without(value, keys)).encode()
    yield "an unknown section", (dump_toml(value) + "\n[titan]\na = 1\n").encode()
    yield "a section twice", (dump_toml(value) + "\n" + dump_toml(value)).encode()


def places(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Yield the keys of every value inside a value, and of itself; of many children, only some."""
    yield keys
    children: Sequence[str | int] = ()
    if isinstance(value, Mapping):
        children = list(value)
    elif isinstance(value, list):
        children = range(len(value))
    if len(children) > MOST_CHILDREN:
        children = [*children[:2], children[-1]]
    for key in children:
        yield from places(value[key], (*keys, key))


def with_value(value: Any, keys: Keys, new: Any) -> Any:
    """Return a copy of a value with another value at some keys."""
    if not keys:
        return new
    copy = dict(value) if isinstance(value, Mapping) else list(value)
    copy[keys[0]] = with_value(value[keys[0]], keys[1:], new) if keys[1:] else new
    return copy


def without(value: Any, keys: Keys) -> Any:
    """Return a copy of a value without the entry at some keys."""
    *owner, last = keys
    inner = value
    for key in owner:
        inner = inner[key]
    kept = {key: entry for key, entry in inner.items() if key != last}
    return with_value(value, tuple(owner), kept)


def show(keys: Keys) -> str:
    """Return keys as messages show them."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".") or "everything"


def dump_json(value: Any, text: str = "") -> bytes:
    """Return JSON with a text where the mark is."""
    return json.dumps(value, ensure_ascii=False).replace(f'"{MARK}"', text).encode("utf-8", "surrogatepass")


def dump_toml(table: Mapping[str, Any]) -> str:
    """Return TOML; tables inside sections are written inline. A value of None, which TOML lacks, is left out."""
    lines = [f"{key} = {_toml(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    for section, options in table.items():
        if isinstance(options, Mapping):
            lines.append(f"[{section}]")
            lines += [f"{key} = {_toml(value)}" for key, value in options.items() if value is not None]
    return "\n".join(lines) + "\n"


def _broken_keys(value: Any) -> Iterator[tuple[str, bytes]]:
    for keys in places(value):
        if not keys or not isinstance(keys[-1], str):
            continue
        yield f"without {show(keys)}", dump_json(without(value, keys))
        yield f"{show(keys)} beside an unknown key", dump_json(with_value(value, (*keys[:-1], f"{keys[-1]}_x"), 1))
        twice = json.dumps(value, ensure_ascii=False).replace(
            f"{json.dumps(keys[-1])}: ", f"{json.dumps(keys[-1])}: null, {json.dumps(keys[-1])}: ", 1
        )
        yield f"{show(keys)} twice", twice.encode("utf-8", "surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(entry)}" for key, entry in value.items() if entry is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
