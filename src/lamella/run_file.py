"""Read a run file: TOML (or the `config.json` of a run), the files that it extends, `--set` overrides on top."""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella.config import RunConfig
from lamella.errors import UnreadableError, UsageError, shorten
from lamella.files import read_json, read_toml
from lamella.validation import check_config

EXTENDS = "extends"  # the key that names the base of a run file


def load_config(path: Path | None, overrides: Sequence[str] = (), *, check_parts: bool = True) -> RunConfig:
    """Read and check a file that describes a single run; `overrides` are `section.key=value` texts."""
    table = {} if path is None else read_table(path)
    problems = apply_overrides(table, overrides)
    return check_config(table, where=str(path or "configuration"), problems=problems, check_parts=check_parts)


def read_table(path: Path) -> dict[str, Any]:
    """Read a run file on top of the files that it extends, without checking its options."""
    return _read_with_bases(path, ())


def merge_tables(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the options of `table` on top: tables merge, any other value replaces the earlier one.

    A part with its name, `tuning = { name = "top_k", k = 3 }`, replaces the earlier part as a whole: options of one
    part mean nothing to another.
    """
    merged = copy.deepcopy(dict(base))
    for section, options in table.items():
        earlier = merged.get(section)
        if isinstance(earlier, dict) and isinstance(options, Mapping):
            merged[section] = _merge_options(earlier, options)
        else:
            merged[section] = copy.deepcopy(options)
    return merged


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Write `section.key=value` overrides into a table; return the problems, one line each."""
    return [problem for override in overrides if (problem := _apply(table, override))]


def _read_with_bases(path: Path, extended_by: tuple[Path, ...]) -> dict[str, Any]:
    table = _read_file(path)
    if EXTENDS not in table:
        return table
    named = table.pop(EXTENDS)
    bases = named if isinstance(named, list) else [named]
    if not bases or not all(isinstance(base, str) and base for base in bases):
        expected = "the path of another run file, or a list of paths"
        raise UsageError(f"{path}: {EXTENDS}: expected {expected}, got {shorten(named)}.")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = merge_tables(merged, _read_base(path, base, (*extended_by, path)))
    return merge_tables(merged, table)


def _read_base(path: Path, base: str, chain: tuple[Path, ...]) -> dict[str, Any]:
    base_path = path.parent / os.path.expanduser(base)
    if not os.path.isfile(base_path):  # False for any text; before `resolve`, which raises for circular links
        raise UnreadableError(
            f"{path}: {EXTENDS}: expected a run file, as a path relative to this file; {base_path} does not exist."
        )
    if base_path.resolve() in [file.resolve() for file in chain]:
        circle = " -> ".join(map(str, (*chain, base_path)))
        raise UsageError(f"{chain[0]}: {EXTENDS}: run files extend each other in a circle: {circle}.")
    return _read_with_bases(base_path, chain)


def _read_file(path: Path) -> dict[str, Any]:
    table = read_json(path) if path.suffix == ".json" else read_toml(path)
    if not isinstance(table, dict):
        raise UnreadableError(f"{path}: expected tables of options, got {shorten(table)}.")
    return table


def _merge_options(base: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in options.items():
        earlier = merged.get(key)
        if isinstance(value, Mapping) and not isinstance(value.get("name"), str):
            if isinstance(earlier, str):  # `[encoder.tuning] k = 3` on `tuning = "top_k"`
                earlier = {"name": earlier}
            value = _merge_options(earlier, value) if isinstance(earlier, Mapping) else value
        merged[key] = copy.deepcopy(value)
    return merged


def _apply(table: dict[str, Any], override: str) -> str | None:
    """Write one `section.key=value` into the table; the value is TOML, or a text without its quotes."""
    key, equals, text = override.partition("=")
    keys = [name.strip() for name in key.split(".")]
    text = text.strip()
    if not equals or not all(keys):
        return f"--set {override}: expected section.key=value."
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text[:1] in ("[", "{", '"', "'"):
            return f'--set {override}: expected a TOML value, such as ["a", "b"] or {{name = "a", k = 3}}.'
        value = text
    except (RecursionError, ValueError):
        return f"--set {key}: expected a value of reasonable size."
    return _put(table, keys, value, override)


def _put(table: dict[str, Any], keys: Sequence[str], value: Any, override: str) -> str | None:
    name, *rest = keys
    if not rest:
        table[name] = value
        return None
    inner = table.setdefault(name, {})
    if isinstance(inner, str):  # `--set encoder.tuning.k=3` on `tuning = "top_k"`
        inner = table[name] = {"name": inner}
    # Each of several tables, `[[learner]]`, gets the value; a list of anything else is no table.
    tables = inner if isinstance(inner, list) and inner and all(isinstance(item, dict) for item in inner) else [inner]
    for item in tables:
        if not isinstance(item, dict):
            return f"--set {override}: {name} is not a table."
        if problem := _put(item, rest, value, override):
            return problem
    return None
