"""The last section of a Markdown report: encoders, data files, hours of training and versions behind its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lamella.errors import counted
from lamella.study.records import RunRecord
from lamella.study.report.columns import NOTHING, Labels
from lamella.study.report.page_blocks import Block, Bullets, Heading, Table

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "numpy")
HASH_LETTERS = 16  # shown of a sha256


def provenance_section(records: Sequence[RunRecord], labels: Labels) -> list[Block]:
    """Return the heading, the tables and the list of the section."""
    contents = [run.result.content for run in records if run.result is not None]
    tables = [table for table in (_encoders(contents, labels), _files(contents, labels)) if table.rows]
    return [Heading("Provenance"), *tables, Bullets((*_training_hours(contents), *_versions(contents)))]


def _encoders(contents: Sequence[Mapping[str, Any]], labels: Labels) -> Table:
    encoders = [content["encoder"] for content in contents if content["encoder"].get("name")]
    counts = Counter((str(encoder["name"]), str(encoder.get("sha256") or "")) for encoder in encoders)
    rows = [
        (labels.names.get(name, name), _described_hash(sha256, labels), str(count))
        for (name, sha256), count in sorted(counts.items())
    ]
    return Table(("encoder", "sha256 of its weights", "runs"), tuple(rows), frozenset({0, 1}))


def _files(contents: Sequence[Mapping[str, Any]], labels: Labels) -> Table:
    uses_of: dict[tuple[str, str], set[str]] = {}
    for content in contents:
        for use in ("train", "dev"):
            for file in content[use]["files"]:
                uses_of.setdefault((str(file["name"]), str(file.get("sha256") or "")), set()).add(use)
    rows = [
        (
            f"{labels.names[name] + ': ' if name in labels.names else ''}`{name}`",
            " and ".join(use for use in ("train", "dev") if use in uses),
            _short_hash(sha256),
        )
        for (name, sha256), uses in sorted(uses_of.items())
    ]
    return Table(("data file", "used as", "sha256"), tuple(rows), frozenset({0, 1, 2}))


def _training_hours(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the hours of training by device; runs that shared a device or a pass count more than its time."""
    seconds: dict[str, list[float]] = {}
    for content in contents:
        cost = content["cost"]
        if isinstance(cost.get("train_seconds"), int | float):
            seconds.setdefault(str(cost.get("device", "an unknown device")), []).append(float(cost["train_seconds"]))
    return [
        f"Training on {device}: {counted(len(of_runs), 'run')}, {sum(of_runs) / 3600:.2f} hours in total; runs that "
        "shared the device are each counted in full, including the time lost to one another."
        for device, of_runs in sorted(seconds.items())
    ]


def _versions(contents: Iterable[Mapping[str, Any]]) -> list[str]:
    counts: Counter[str] = Counter()
    for content in contents:
        environment = content["environment"]
        versions = {name: environment[name] for name in ("lamella", "python") if name in environment}
        versions |= {name: version for name, version in environment.get("libraries", {}).items() if name in LIBRARIES}
        if versions:
            counts[", ".join(f"{name} {version}" for name, version in versions.items())] += 1
    return [f"{versions} ({counted(count, 'run')})" for versions, count in sorted(counts.items())]


def _described_hash(sha256: str, labels: Labels) -> str:
    """Return the start of a hash, with the words for these weights, if the report names them."""
    words = labels.names.get(sha256[:HASH_LETTERS])
    return f"{_short_hash(sha256)}: {words}" if words else _short_hash(sha256)


def _short_hash(sha256: str) -> str:
    return f"`{sha256[:HASH_LETTERS]}…`" if sha256 else NOTHING
