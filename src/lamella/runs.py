"""A run folder: the names of its files, atomic writes, its state, the record of the environment.

The folder is the interface between the stages: one command writes it, another reads it, perhaps elsewhere. `run.json`
says `unfinished` from the first moment and `finished` only at the last, so a run killed at any time is marked by what
it did not get to write. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lamella.errors import RunError, UnreadableError
from lamella.version import __version__

RUN = "run.json"
CONFIG = "config.json"
ENVIRONMENT = "environment.json"
HISTORY = "history.jsonl"
MODEL = "model"
PREDICTIONS = "predictions.json"
NBEST = "nbest_predictions.json"
NULL_ODDS = "null_odds.json"
NA_PROB = "na_prob.json"
RESULTS = "eval_results.json"
FILES = (RUN, CONFIG, ENVIRONMENT, HISTORY, PREDICTIONS, NBEST, NULL_ODDS, NA_PROB, RESULTS)

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "peft",
    "onnxruntime",
)


@contextlib.contextmanager
def new_run(folder: Path, command: str, *, overwrite: bool = False) -> Iterator[Path]:
    """Open a run folder for writing; marks it finished, failed or interrupted when the block ends.

    A folder that holds anything is refused, unless it holds an earlier run and `overwrite` is given; then only the files
    of a run are removed from it.
    """
    _make_room(folder, overwrite)
    record: dict[str, Any] = {"state": "unfinished", "command": command, "lamella": __version__, "started": _now()}
    write_json(folder / RUN, record)
    write_json(folder / ENVIRONMENT, environment())
    try:
        yield folder
    except KeyboardInterrupt:
        write_json(folder / RUN, {**record, "state": "interrupted", "ended": _now()})
        raise
    except BaseException as error:
        write_json(folder / RUN, {**record, "state": "failed", "error": str(error), "ended": _now()})
        raise
    write_json(folder / RUN, {**record, "state": "finished", "ended": _now()})


def run_state(folder: Path) -> str | None:
    """`finished`, `unfinished`, `failed` or `interrupted`; None where the folder is no run."""
    path = folder / RUN
    return str(read_json(path).get("state")) if path.is_file() else None


def environment() -> dict[str, Any]:
    """What a result depends on besides the configuration."""
    return {
        "lamella": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "libraries": library_versions(),
        "arguments": sys.argv[1:],
    }


def library_versions() -> dict[str, str]:
    """The installed versions of the libraries that matter, without importing them."""
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes a private file; results are there to be shared
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Write a JSON file atomically, readable by people."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; what is wrong with it is said with line and column."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UnreadableError(f"{path}: no such file.") from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path}: expected UTF-8 text; byte {error.start} is not.") from None
    except json.JSONDecodeError as error:
        raise UnreadableError(f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}.") from None


def append_json_line(path: Path, value: Mapping[str, Any]) -> None:
    """Add one record to a file of JSON lines, in one write."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def _make_room(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: expected a folder to write the run into; it is a file.")
    if folder.is_dir() and any(folder.iterdir()):
        state = run_state(folder)
        if state is None:
            raise RunError(f"{folder}: is not empty and holds no run of Lamella; choose another --out.")
        if not overwrite:
            raise RunError(f"{folder}: holds a run already ({state}); choose another --out, or pass --overwrite.")
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        for file in sorted((folder / MODEL).glob("*")):
            file.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
