"""A run folder: the names of its files, atomic writes, its state, the record of the environment.

The folder is the interface between the stages: one command writes it, another reads it, perhaps elsewhere. `run.json`
says `unfinished` from the first moment and `finished` only at the last, so a run killed at any time is marked by what
it did not get to write. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lamella.errors import RunError, UnreadableError
from lamella.version import __version__

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where a folder is not held
    fcntl = None  # type: ignore[assignment]

RUN = "run.json"
CONFIG = "config.json"
ENVIRONMENT = "environment.json"
HISTORY = "history.jsonl"
MODEL = "model"
MODELS = "models"  # those of `save_at`, by epoch
PREDICTIONS = "predictions.json"
NBEST = "nbest_predictions.json"
NULL_ODDS = "null_odds.json"
NA_PROB = "na_prob.json"
QUESTION_PREDICTIONS = "question_predictions.json"  # where questions have several contexts
QUESTION_NULL_ODDS = "question_null_odds.json"
LOGITS = "logits.safetensors"  # of `--keep-logits`
LOGITS_INDEX = "logits.json"
RESULTS = "eval_results.json"
COST = "cost.json"
CHECKPOINT = "checkpoint.pt"  # while it trains
SUMMARY = "runs.json"  # of several runs made by one command, each in a folder of its own
ANALYSIS = "analysis.json"  # of `analyse`
MISTAKES = "mistakes.md"
FILES = (
    RUN,
    CONFIG,
    ENVIRONMENT,
    HISTORY,
    PREDICTIONS,
    NBEST,
    NULL_ODDS,
    NA_PROB,
    QUESTION_PREDICTIONS,
    QUESTION_NULL_ODDS,
    LOGITS,
    LOGITS_INDEX,
    RESULTS,
    COST,
    CHECKPOINT,
    SUMMARY,
    ANALYSIS,
    MISTAKES,
)

TEMPORARY = ".lamella-part"  # ends the name of what is being written; a kill may leave it behind

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "onnxruntime",
)


@contextlib.contextmanager
def new_run(
    folder: Path,
    command: str,
    *,
    overwrite: bool = False,
    resume: bool = False,
    needs: Iterable[Path] = (),
    within: Iterable[str] = (),
    data: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    files: Sequence[Mapping[str, Any]] | None = None,
) -> Iterator[Path]:
    """Open a run folder for writing; marks it finished, failed or interrupted when the block ends.

    A folder that holds anything is refused, unless it holds an earlier run and `overwrite` is given; then only the
    files of a run and its model folders are removed from it. With `resume` they stay. `needs` are folders that the run
    reads: it is refused if they lie where it writes, or it in one of them that is no run. `within` names the folders of
    further runs inside this one, `data` is the record of the questions that it answers, `model` of what answers them,
    `files` of the data files that a training reads.
    """
    whole = folder.resolve()
    for path in needs:
        needed = path.resolve()
        if needed == whole or whole in needed.parents:
            raise RunError(f"{folder}: holds {path}, which this run needs; choose another --out.")
        if needed in whole.parents and not (needed / RUN).is_file():  # a run may hold others, a model may not
            raise RunError(f"{folder}: lies in {path}, which this run needs; choose another --out.")
    _check_room(folder, overwrite or resume)
    earlier = _record(folder) if folder.exists() else None
    record: dict[str, Any] = {"state": "unfinished", "command": command, "lamella": __version__, "started": _now()}
    if resume and earlier:
        record = {**record, "started": earlier.get("started"), "resumed": _now()}
    if names := list(within):
        record["runs"] = names
    if data is not None:
        record["data"] = dict(data)
    if model is not None:
        record["model"] = dict(model)
    if files is not None:
        record["files"] = list(files)
    with held(folder):
        write_json(folder / RUN, record)  # first: a kill while the earlier run is removed must not leave `finished`
        if resume:
            _remove_parts(folder)
        else:
            _remove_earlier(folder, (earlier or {}).get("runs", []))
        write_json(folder / ENVIRONMENT, environment())
        try:
            yield folder
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            outcome = {"state": "interrupted"} if stopped else {"state": "failed", "error": str(error)}
            with contextlib.suppress(RunError):  # a full disk: the state stays `unfinished`, the first error is told
                write_json(folder / RUN, {**record, **outcome, "ended": _now()})
            raise
        write_json(folder / RUN, {**record, "state": "finished", "ended": _now()})


def data_record(files: Iterable[str], ids: Iterable[str]) -> dict[str, Any]:
    """Which questions a run answers: the files as they were named, and a hash of the sorted ids."""
    ids = sorted(ids)
    digest = hashlib.sha256("\n".join(ids).encode("utf-8", errors="backslashreplace")).hexdigest()
    return {"files": list(files), "questions": len(ids), "ids_sha256": digest}


def mark_diverged(folder: Path, error: str) -> None:
    """Say of a run, one of several made together, that its training diverged: it is over, and no good."""
    write_json(folder / RUN, {**(_record(folder) or {}), "state": "failed", "error": error, "diverged": True})


def is_over(folder: Path) -> bool:
    """Whether nothing is left to do for a run: it is finished, or it diverged, and would again."""
    record = _record(folder) or {}
    return record.get("state") == "finished" or bool(record.get("diverged"))


def kind_of_run(folder: Path) -> tuple[str, list[str]] | None:
    """The command that made the run of a folder, and the names of the runs inside it."""
    record = _record(folder)
    return None if record is None else (str(record.get("command")), list(record.get("runs", [])))


def run_state(folder: Path) -> str | None:
    """`finished`, `unfinished`, `failed` or `interrupted`; None where the folder is no run."""
    record = _record(folder)
    return None if record is None else str(record["state"])


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


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder while it is written, so that no other process writes into it; the system lets go at a kill."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}).") from None
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RunError(f"{folder}: another process is writing there; wait, or choose another --out.") from None
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.parent / f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}"
        try:
            with name.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Write a JSON file atomically, readable by people."""
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    # Half a surrogate pair has no UTF-8 form; the backslash that replaces it is JSON's own way to write it.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_entries(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a large JSON object atomically, an entry a line: to indent them takes Python several times as long."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    lines = ",\n".join(f"{encode(key)}: {encode(value)}" for key, value in entries.items())
    text = f"{{\n{lines}\n}}\n" if lines else "{}\n"
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file; what is wrong with it is said with line and column."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UnreadableError(f"{path}:{error.lineno}:{error.colno}: broken JSON: {error.msg}.") from None
    except (RecursionError, ValueError):  # nested a thousand deep, a number of thousands of digits
        raise UnreadableError(f"{path}: holds JSON beyond all measure, too deep or with a number too long.") from None


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, with a byte order mark or without."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UnreadableError(f"{path}: no such file.") from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{path}: expected UTF-8 text; byte {error.start} is not.") from None


def append_json_line(path: Path, value: Mapping[str, Any]) -> None:
    """Add one record to a file of JSON lines, in one write."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}).") from None


def _record(folder: Path) -> dict[str, Any] | None:
    path = folder / RUN
    if not path.is_file():
        return None
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("state"), str):
        raise UnreadableError(f"{path}: expected the record of a run, with its state; it is damaged.")
    return record


def _check_room(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that is not ours to write into; touches nothing."""
    try:
        holds = {path.name for path in folder.iterdir() if not path.name.endswith(TEMPORARY)}
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{folder}: expected a folder to write the run into ({error.strerror}).") from None
    if not holds:
        return
    state = run_state(folder)
    if state is None:
        raise RunError(f"{folder}: is not empty and holds no run of Lamella; choose another --out.")
    if not overwrite:
        raise RunError(
            f"{folder}: holds a run already ({state}); choose another --out, or pass --overwrite"
            f"{'.' if state == 'finished' else ', or --resume where it was training.'}"
        )


def _remove_earlier(folder: Path, within: Iterable[str]) -> None:
    """Remove what an earlier run left, except the record of the new one; any other file stays."""
    for name in within:
        inner = folder / name
        if inner.is_dir() and inner.resolve().parent == folder.resolve() and (inner / RUN).is_file():
            _remove_earlier(inner, [])
            (inner / RUN).unlink()
            with contextlib.suppress(OSError):  # something else lies there
                inner.rmdir()
    for name in (*FILES, MODEL, MODELS):
        if name != RUN:
            _remove(folder / name)
    _remove_parts(folder)


def _remove_parts(folder: Path) -> None:
    """Remove what a kill left half-written."""
    for path in [*folder.glob(f".*{TEMPORARY}"), *folder.glob(f"{MODELS}/.*{TEMPORARY}")]:
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
