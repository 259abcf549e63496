"""A run folder: the names of its files, and its state.

The folder is the interface between commands: one writes it, another reads it, perhaps on another machine. `run.json`
holds the state `unfinished` from the start and `finished` only at the very end, so a killed run stays marked as
unfinished. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lamella.atomic import TEMPORARY, remove
from lamella.environment import environment
from lamella.errors import RunError, UnreadableError, nearest_beside, shorten
from lamella.files import locked, read_json, write_json
from lamella.version import __version__

RUN = "run.json"
CONFIG = "config.json"
ENVIRONMENT = "environment.json"
HISTORY = "history.jsonl"
MODEL = "model"
MODELS = "models"  # the extra copies of `save_at`, by epoch
PREDICTIONS = "predictions.json"
NBEST = "nbest_predictions.json"
NULL_ODDS = "null_odds.json"
NA_PROB = "na_prob.json"
QUESTION_PREDICTIONS = "question_predictions.json"  # where questions have several contexts
QUESTION_NULL_ODDS = "question_null_odds.json"
LOGITS = "logits.safetensors"  # written with `--keep-logits`
LOGITS_INDEX = "logits.json"
RESULTS = "eval_results.json"
LAYERS = "layers.json"  # mean layer weights, for heads that weigh layers
COST = "cost.json"
CHECKPOINT = "checkpoint.pt"  # only during training
SUMMARY = "runs.json"  # of several runs made by one command, each in its own folder
ANALYSIS = "analysis.json"  # written by `analyse`
MISTAKES = "mistakes.md"
DATA = "data"  # the folder of data that was passed in memory
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
    LAYERS,
    COST,
    CHECKPOINT,
    SUMMARY,
    ANALYSIS,
    MISTAKES,
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
    """Open a run folder for writing; mark it finished, failed or interrupted when the block ends.

    A folder that is not empty is refused, unless it holds an earlier run and `overwrite` is given; then only the files
    and model folders of that run are removed. With `resume` they stay.

    `needs` are folders that the run reads: the run must not write over them, nor inside one that is not a run itself.
    `within` names the folders of further runs inside this one. `data` records the questions that are answered, `model`
    what answers them, `files` the data files that training reads.
    """
    check_run_folder(folder, overwrite=overwrite or resume, needs=needs)
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
    with locked(folder):
        write_json(folder / RUN, record)  # first, so that a kill during the removal leaves no `finished`
        if resume:
            _remove_parts(folder)
        else:
            _remove_earlier(folder, (earlier or {}).get("runs", []))
        write_json(folder / ENVIRONMENT, environment())
        try:
            yield folder
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            outcome = {"state": "interrupted"} if interrupted else {"state": "failed", "error": str(error)}
            with contextlib.suppress(RunError):  # on a full disk the state stays `unfinished`; raise the first error
                write_json(folder / RUN, {**record, **outcome, "ended": _now()})
            raise
        write_json(folder / RUN, {**record, "state": "finished", "ended": _now()})


def check_run_folder(folder: Path, *, overwrite: bool = False, needs: Iterable[Path] = ()) -> None:
    """Refuse a folder that holds anything that must not be overwritten, or that a run `needs`; change nothing."""
    run_folder = folder.resolve()
    for path in needs:
        needed = path.resolve()
        if needed == run_folder or run_folder in needed.parents:
            raise RunError(f"{folder}: contains {path}, which this run reads; choose another --out.")
        if needed in run_folder.parents and not (needed / RUN).is_file():  # a run may contain others, a model may not
            raise RunError(f"{folder}: lies inside {path}, which this run reads; choose another --out.")
    try:
        occupied = any(not (path.name.endswith(TEMPORARY) or _is_stored_data(path)) for path in folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{folder}: expected a folder to write the run into ({error.strerror}).") from None
    if not occupied:
        return
    state = run_state(folder)
    if state is None:
        raise RunError(f"{folder}: is not empty and not a run folder; choose another --out.")
    if not overwrite:
        command, _ = kind_of_run(folder) or ("", [])
        resumes = command == "train" and state != "finished"
        raise RunError(
            f"{folder}: already holds a run ({state}); choose another --out, or pass --overwrite"
            f"{', or --resume to continue the training.' if resumes else '.'}"
        )


def check_resumable(folder: Path) -> None:
    """Refuse to resume where there is no run, such as a folder whose name was mistyped; name the nearest one."""
    if folder.is_dir() and run_state(folder) is not None:
        return
    found = "a folder without a run" if folder.is_dir() else "no such folder"
    siblings = [path.name for path in folder.parent.glob("*") if (path / RUN).is_file()]
    hint = nearest_beside(folder, siblings)
    raise RunError(f"{folder}: expected a run to resume, found {found}; leave out --resume to train a new run.{hint}")


def stored_data(folder: Path, split: str) -> Path:
    """Return the file of a run folder for data that was passed in memory: `train` or `dev`."""
    return folder / DATA / f"{split}.jsonl"


def data_record(files: Iterable[str], ids: Iterable[str]) -> dict[str, Any]:
    """Return a record of the questions that a run answers: file names as given, and a hash of the sorted ids."""
    ids = sorted(ids)
    digest = hashlib.sha256("\n".join(ids).encode("utf-8", errors="backslashreplace")).hexdigest()
    return {"files": list(files), "questions": len(ids), "ids_sha256": digest}


def mark_diverged(folder: Path, error: str) -> None:
    """Mark a run, one of several trained together, as failed because its loss diverged."""
    write_json(folder / RUN, {**(_record(folder) or {}), "state": "failed", "error": error, "diverged": True})


def is_over(folder: Path) -> bool:
    """Whether nothing is left to do for a run: it is finished, or it diverged and would diverge again."""
    record = _record(folder) or {}
    return record.get("state") == "finished" or bool(record.get("diverged"))


def kind_of_run(folder: Path) -> tuple[str, list[str]] | None:
    """Return the command that made a run folder and the names of the runs inside it; None if it is no run folder."""
    record = _record(folder)
    return None if record is None else (str(record.get("command")), list(record.get("runs", [])))


def describe_run_without_model(folder: Path) -> str | None:
    """Return what a run folder is, and which model to give instead of it; None if it is no run folder."""
    record = _record(folder)
    if record is None:
        return None
    if within := record.get("runs"):
        return f"several runs; choose one of {', '.join(within)}"
    if record.get("command") == "train" and record["state"] == "finished":
        return "a training run whose model is gone; restore it, or train again"
    if record.get("command") == "train":
        return f"a training run that is {record['state']}, without a model so far; continue it with --resume"
    model = record.get("model")
    name = f", {model['name']}" if isinstance(model, dict) and "name" in model else ""
    return f"the answers of `lamella {record.get('command', 'predict')}`; give the model that made them{name}"


def run_state(folder: Path) -> str | None:
    """Return `finished`, `unfinished`, `failed` or `interrupted`; None if the folder is no run folder."""
    record = _record(folder)
    return None if record is None else str(record["state"])


def _record(folder: Path) -> dict[str, Any] | None:
    path = folder / RUN
    if not path.is_file():
        return None
    record = read_json(path)
    if not isinstance(record, dict) or not isinstance(record.get("state"), str):
        raise UnreadableError(f"{path}: expected the record of a run with its state; the file is damaged.")
    within = record.get("runs", [])
    if not isinstance(within, list) or not all(map(_is_folder_name, within)):
        raise UnreadableError(f"{path}: runs: expected names of folders inside this one, got {shorten(within)}.")
    return record


def _is_folder_name(name: object) -> bool:
    """Check that a name stays inside a folder: `../other` and absolute paths do not."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)


def _is_stored_data(path: Path) -> bool:
    """Check for the files of `stored_data`: they are written before the run, and left if it is refused."""
    names = {stored_data(path.parent, split).name for split in ("train", "dev")}
    return path.name == DATA and path.is_dir() and {file.name for file in path.iterdir()} <= names


def _remove_earlier(folder: Path, within: Iterable[str]) -> None:
    """Remove the files of an earlier run, except the record of the new run; other files stay."""
    for name in within:
        inner = folder / name
        if inner.is_dir() and inner.resolve().parent == folder.resolve() and (inner / RUN).is_file():
            _remove_earlier(inner, [])
            (inner / RUN).unlink()
            with contextlib.suppress(OSError):  # it holds other files
                inner.rmdir()
    for name in (*FILES, MODEL, MODELS):
        if name != RUN:
            remove(folder / name)
    _remove_parts(folder)


def _remove_parts(folder: Path) -> None:
    """Remove files that a killed process left half-written."""
    for path in [*folder.glob(f".*{TEMPORARY}"), *folder.glob(f"{MODELS}/.*{TEMPORARY}")]:
        remove(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
