"""Write the reference pages and the outline of parts, which are generated from the code.

`--check` only reports which are out of date.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path

from lamella import registry
from lamella.config import RunConfig

REFERENCE = Path(__file__).parent / "reference"
RUN_FILE_INTRODUCTION = """\
Generated from the code by `make docs`. A run file is TOML. Every option has a default;
`lamella train FILE --set section.key=value` overrides one. Paths of data and models are relative to the folder in which
the command runs. All problems of a file are reported at once. A run folder keeps the resolved options in `config.json`,
which is a run file too. A file can [extend another](#build-on-another-file) and describe
[several runs](#several-runs-in-one-file)."""
RUN_FILE_GUIDE = """\
## Three ways to start from something trained

| option | value | what the run takes from it |
|---|---|---|
| `encoder.name` | an encoder, or a saved model | the encoder's weights; the head is new |
| `encoder.from` | another run in the same folder, `"first"` or `"first@0.3"` | the same, from a run of the same sweep |
| `learner.start` | a saved model or run | encoder and head: a warm start, which continues its training |

## Build on another file

```toml
extends = "base.toml"

[training]
epochs = 5
```

The path is relative to the file that names it. Tables merge option by option; any other value, lists included, replaces
the value of the base file. A part that is written with its name replaces the base's part as a whole; a table without a
name changes single options of it (`[learner.schedule]`, `warmup = 0.2`). A base file may extend another file.

A list of files, `extends = ["reader.toml", "data.toml"]`, merges them in this order: a later file wins.

## Several runs in one file

`[[learner]]` tables describe several learners, `[grid.SECTION]` tables list values to combine
([learners and grids](../concepts/learners.md)). Runs that differ in other ways are `[[run]]` tables:

```toml
[encoder]
name = "google-bert/bert-base-cased"

[[run]]
name = "top3"
encoder.tuning = { name = "top_k", k = 3 }

[[run]]
name = "adapters"
encoder.tuning = "adapter"
```

The options of each `[[run]]` go on top of the file's, by the rules of `extends`. `lamella sweep FILE --out DIR` trains
every run into `DIR/NAME`; `lamella train FILE --run NAME --out RUN` trains one of them. Rows that are not
trained, but made from runs, are listed in `[derived]` ([sweeps](../how-to/sweep.md#rows-that-are-not-trained))."""


def pages() -> dict[Path, str]:
    """Return the content of every generated page, by its path."""
    outline = json.dumps(registry.outline(), indent=1, ensure_ascii=False)
    return {
        REFERENCE / "parts.md": parts_page(),
        REFERENCE / "configuration.md": configuration_page(),
        registry.OUTLINE: f"{outline}\n",
    }


def parts_page() -> str:
    """Return the page of all parts that a run file can name."""
    lines = [
        "# Parts",
        "",
        "Generated from the code by `make docs`; `lamella parts` prints the same list. A run file gives a part by its",
        'name (`mixer = "last"`), or as a table of name and options (`schedule = { name = "linear", warmup = 0.06 }`).',
    ]
    for family in registry.describe():
        article = "An" if family["family"][0] in "aeiou" else "A"
        lines += ["", f"## {family['family']}", "", f"{article} {family['family']} {_verb(family['summary'])}.", ""]
        lines += ["| name | description | options |", "|---|---|---|"]
        for part in family["parts"]:
            options = "<br>".join(
                f"`{option['name']}`: {_cell(option['type'])}"
                + (" (required)" if option["required"] else f" = `{_toml(option['default'])}`")
                for option in part["options"]
            )
            lines.append(f"| `{part['name']}` | {_cell(part['summary'])} | {options} |")
    return "\n".join(lines) + "\n"


def configuration_page() -> str:
    """Return the page of all sections and options of a run file."""
    lines = [
        "# The run file",
        "",
        RUN_FILE_INTRODUCTION,
    ]
    top = {name: field for name, field in RunConfig.model_fields.items() if field.default_factory is None}
    lines += ["", "| key | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{key}` | `{_toml(option.default)}` | {_cell(option.description or '')} |" for key, option in top.items()
    ]
    for name, field in RunConfig.model_fields.items():
        if name in top:
            continue
        section = typing.cast(typing.Any, field.annotation)
        lines += ["", f"## `[{name}]`", "", section.__doc__.strip(), "", "| key | default | meaning |", "|---|---|---|"]
        for key, option in section.model_fields.items():
            name_in_file = option.alias or key
            lines.append(f"| `{name_in_file}` | `{_toml(option.default)}` | {_cell(option.description or '')} |")
    lines += ["", RUN_FILE_GUIDE]
    return "\n".join(lines) + "\n"


def _verb(summary: str) -> str:
    return summary if summary.split()[0].endswith("s") else f"is {summary}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _toml(value: object) -> str:
    """Spell a default as a run file does."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f'"{value["name"]}"' if value else "{}"
    if isinstance(value, list | tuple):
        alone = len(value) == 1 and isinstance(value[0], dict)  # a list of one part may be written without brackets
        return _toml(value[0]) if alone else f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        sys.exit(f"out of date, run `make docs`: {', '.join(map(str, stale))}" if stale else 0)
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
