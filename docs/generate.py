"""Writes the reference pages that are made from the code; `--check` only says whether they are current."""

from __future__ import annotations

import sys
import typing
from pathlib import Path

from lamella import registry
from lamella.config import RunConfig

REFERENCE = Path(__file__).parent / "reference"


def pages() -> dict[Path, str]:
    """Every generated page with its content."""
    return {REFERENCE / "parts.md": parts_page(), REFERENCE / "configuration.md": configuration_page()}


def parts_page() -> str:
    """All parts a run file can name."""
    lines = [
        "# Parts",
        "",
        'Made from the code by `make docs`; `lamella parts` prints it too. A run file names a part (`mixer = "last"`)',
        'or a table with its options (`schedule = { name = "linear", warmup = 0.06 }`).',
    ]
    for family in registry.describe():
        article = "An" if family["family"][0] in "aeiou" else "A"
        lines += ["", f"## {family['family']}", "", f"{article} {family['family']} {_verb(family['summary'])}.", ""]
        lines += ["| name | what it is | options |", "|---|---|---|"]
        for part in family["parts"]:
            options = "<br>".join(
                f"`{option['name']}`: {_cell(option['type'])}"
                + (" (required)" if option["required"] else f" = `{option['default']}`")
                for option in part["options"]
            )
            lines.append(f"| `{part['name']}` | {_cell(part['summary'])} | {options} |")
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """All sections and keys of a run file."""
    lines = [
        "# The run file",
        "",
        "Made from the code by `make docs`. A run file is TOML; every key has a default, and",
        "`lamella train FILE --set section.key=value` changes one. Paths are relative to where the command runs. All",
        "problems of a file are reported at once. A run folder keeps the resolved options as `config.json`, which",
        "`lamella train` takes as a run file too.",
    ]
    for name, field in RunConfig.model_fields.items():
        section = typing.cast(typing.Any, field.annotation)
        lines += ["", f"## `[{name}]`", "", section.__doc__.strip(), "", "| key | default | meaning |", "|---|---|---|"]
        for key, option in section.model_fields.items():
            lines.append(f"| `{key}` | `{_toml(option.default)}` | {_cell(option.description or '')} |")
    return "\n".join(lines) + "\n"


def _verb(summary: str) -> str:
    return summary if summary.split()[0].endswith("s") else f"is {summary}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _toml(value: object) -> str:
    """A default as one would write it in a run file."""
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return f'"{value["name"]}"'
    if isinstance(value, list):
        return _toml(value[0]) if len(value) == 1 else f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        sys.exit(f"out of date, run `make docs`: {', '.join(map(str, stale))}" if stale else 0)
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
