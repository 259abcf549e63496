"""The end of a page of results: which encoders, data and versions its numbers stand on, and what they cost in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lamella.study.records import RunRecord
from lamella.study.report.columns import NOTHING, Labels

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "numpy")
SHOWN = 16  # letters of a sha256


def ground_lines(records: Sequence[RunRecord], labels: Labels) -> list[str]:
    contents = [run.kept.content for run in records if run.kept is not None]
    return [
        "## What the numbers stand on",
        _encoders(contents, labels),
        _files(contents, labels),
        "\n".join(f"- {line}" for line in [*_costs(contents), *_versions(contents)]),
    ]


def _encoders(contents: Sequence[Mapping[str, Any]], labels: Labels) -> str:
    named = [one["encoder"] for one in contents if one["encoder"].get("name")]
    times = Counter((str(one["name"]), str(one.get("sha256") or "")) for one in named)
    lines = [
        f"| {labels.names.get(name, name)} | {_short(sha256)} | {count} |"
        for (name, sha256), count in sorted(times.items())
    ]
    return "\n".join(["| encoder | sha256 of its weights | runs |", "|---|---|---:|", *lines]) if lines else ""


def _files(contents: Sequence[Mapping[str, Any]], labels: Labels) -> str:
    rows: dict[tuple[str, str], set[str]] = {}
    for content in contents:
        for use in ("train", "dev"):
            for file in content[use]["files"]:
                rows.setdefault((str(file["name"]), str(file.get("sha256") or "")), set()).add(use)
    lines = [
        f"| {labels.names[name] + ': ' if name in labels.names else ''}`{name}` | "
        f"{' and '.join(use for use in ('train', 'dev') if use in uses)} | {_short(sha256)} |"
        for (name, sha256), uses in sorted(rows.items())
    ]
    return "\n".join(["| data file | used as | sha256 |", "|---|---|---|", *lines]) if lines else ""


def _costs(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Hours of training, by device. Where runs shared it, or learners a pass, these are not hours of the device."""
    seconds: dict[str, list[float]] = {}
    for content in contents:
        cost = content["cost"]
        if isinstance(cost.get("train_seconds"), int | float):
            seconds.setdefault(str(cost.get("device", "an unknown device")), []).append(float(cost["train_seconds"]))
    return [
        f"Training on {device}: {_count(len(each), 'run')}, {sum(each) / 3600:.2f} hours in sum; runs at the same time "
        "are each counted in full, with what they lost to one another."
        for device, each in sorted(seconds.items())
    ]


def _versions(contents: Iterable[Mapping[str, Any]]) -> list[str]:
    times: Counter[str] = Counter()
    for content in contents:
        environment = content["environment"]
        versions = {name: environment[name] for name in ("lamella", "python") if name in environment}
        versions |= {name: one for name, one in environment.get("libraries", {}).items() if name in LIBRARIES}
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        if told:
            times[told] += 1
    return [f"{told} ({_count(count, 'run')})" for told, count in sorted(times.items())]


def _short(sha256: str) -> str:
    return f"`{sha256[:SHOWN]}…`" if sha256 else NOTHING


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"
