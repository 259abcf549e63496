"""Adapt a reader to the corrections: train in a second process, score before and after, then keep it or discard it.

Everything lies in a folder of its own: a closed page or a restarted server loses no finished adaptation, and several
processes of one server see the same. The process holds a lock on the folder while it lives, and ends with the server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lamella.child_process import module_command, module_environment
from lamella.data.examples import Example
from lamella.data.file_formats.writers import write_squad
from lamella.data.hold_out import hold_out
from lamella.errors import MissingLibraryError, RunError, shorten
from lamella.files import locked, read_json, write_json, write_text
from lamella.runs import HISTORY, MODEL
from lamella.serve.catalogue import NAME, Catalogue
from lamella.serve.corrections import Corrections
from lamella.serve.refusals import RefusedError, names_folder

logger = logging.getLogger("lamella.serve")

FOLDER = ".adaptations"  # a name that no reader can have
REQUEST, STATE, PROCESS = "adaptation.json", "state.json", "process.json"
RUN, RUN_FILE, LOG = "run", "adapt.toml", "log.txt"
TRAIN, LEFT_OUT = "train.json", "left_out.json"

LEAST = 20  # corrections that an adaptation needs
LEFT_OUT_SHARE = 1 / 3
EPOCHS, LEARNING_RATE = 3, 3e-4  # as in docs/how-to/adapt.md; docs/decisions/0043-page.md compares others


class AdaptationError(RefusedError):
    """An adaptation that cannot be started, kept or found."""

    status = 409
    kind = "adaptation"


class Adaptations:
    """The adaptations of a server, at most one at a time. Threads may share it."""

    def __init__(self, folder: Path, corrections: Corrections, catalogue: Catalogue) -> None:
        self.folder, self.corrections, self.catalogue = folder / FOLDER, corrections, catalogue
        self._process: subprocess.Popen[bytes] | None = None  # if this server has started it
        self._lock = threading.RLock()
        if self.folder.is_dir():
            for old in filter(Path.is_dir, self.folder.iterdir()):  # unfinished ones ended with their server
                if not (_is_finished(old) or _is_alive(old)):
                    shutil.rmtree(old, ignore_errors=True)

    def start(self, model: str | None) -> dict[str, Any]:
        """Start to adapt a reader to the corrections, and return the state."""
        if importlib.util.find_spec("torch") is None:
            raise AdaptationError(
                str(MissingLibraryError("Adapting a reader", ["torch"])), status=501, kind="missing_library"
            )
        with self._lock:
            if (current := self.current()) is not None:
                what = "wait for it or cancel it" if _running(current) else "keep it or discard it first"
                raise AdaptationError(f"adaptation: one at a time, and {current['id']} is here; {what}.")
            listed = self.catalogue.get(model)
            examples = self.corrections.examples()
            if len(examples) < LEAST:
                raise AdaptationError(f"adaptation: expected at least {LEAST} corrections, got {len(examples)}.")
            train, left_out, split = split_corrections(examples)
            id_ = uuid.uuid4().hex[:12]
            folder = self.folder / id_
            source = os.path.abspath(listed.source) if os.path.isdir(listed.source) else listed.source
            request = {"model": listed.name, "source": source, "trained_on": len(train), "left_out": len(left_out)}
            write_json(folder / REQUEST, {**request, "split": split})  # first: with it, the folder is an adaptation
            write_squad(train, folder / TRAIN)
            write_squad(left_out, folder / LEFT_OUT)
            write_text(folder / RUN_FILE, _run_file(source))
            write_json(folder / STATE, {"state": "training"})
            self._stop()  # one that another process of this server has discarded
            self._process = _start_process(folder)
            write_json(folder / PROCESS, {"pid": self._process.pid})
            return self.status(id_)

    def current(self) -> dict[str, Any] | None:
        """Return the adaptation that runs or waits for a decision, if any."""
        with self._lock:
            folders = sorted(self._folders())
            return self.status(folders[0].name) if folders else None

    def _folders(self) -> list[Path]:
        """Return the folders of all adaptations; whatever else is there is ignored."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return [folder for folder in found if (folder / REQUEST).is_file()]

    def status(self, id_: str) -> dict[str, Any]:
        """Return the state of an adaptation: training, scoring, finished or failed, its progress and its verdict."""
        with self._lock:
            folder = self._folder(id_)
            state = _state(folder)
            if _running(state) and not _is_alive(folder):
                state = _state(folder)  # it may have finished in between
                if _running(state):
                    state = {"state": "failed", "message": "The training process ended unexpectedly."}
                    write_json(folder / STATE, state)
            request = read_json(folder / REQUEST)
            progress = 1.0 if state["state"] in ("scoring", "finished") else _progress(folder)
            public = {key: request[key] for key in ("model", "trained_on", "left_out", "split")}
            if names_folder(state.get("message", "")):
                logger.error("adaptation %s: %s", id_, state["message"])
                state = {**state, "message": "The training failed; the log of the server has the reason."}
            return {"id": id_, **public, "progress": progress, **state}

    def keep(self, id_: str, name: str) -> str:
        """Move a finished reader into the folder of readers, under a new name, and return the name."""
        with self._lock:
            folder = self._folder(id_)
            if self.status(id_)["state"] != "finished":
                raise AdaptationError("adaptation: expected a finished one to keep; wait for it, or discard it.")
            if not NAME.fullmatch(name):
                raise AdaptationError(
                    f"name: expected letters, digits and . _ - + @ (at most 100), got {shorten(name)}.", status=422
                )
            target = self.folder.parent / name
            if self.catalogue.is_taken(name) or target.exists() or target == self.corrections.path:
                raise AdaptationError(f"name: expected one that is free, got {shorten(name)}; choose another.")
            os.replace(folder / RUN / MODEL, target)
            self._stop()
            shutil.rmtree(folder, ignore_errors=True)
            return name

    def discard(self, id_: str) -> None:
        """Stop an adaptation if it runs, and remove everything it made."""
        with self._lock:
            folder = self._folder(id_)
            if _is_alive(folder):
                pid = read_json(folder / PROCESS)["pid"]
                if self._process is None or self._process.pid != pid:  # another process of this server has started it
                    _signal_group(pid, signal.SIGKILL)
            self._stop()
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Stop the adaptation that runs, as the server ends."""
        with self._lock:
            self._stop()

    def _folder(self, id_: str) -> Path:
        """Return the folder of an adaptation, found by comparing names: an id never becomes part of a path."""
        for folder in self._folders():
            if folder.name == id_:
                return folder
        raise AdaptationError(f"adaptation: expected the id of one that is here, got {shorten(id_)}.", status=404)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGKILL)  # also what it has started; all it writes is removed, or atomic
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def split_corrections(examples: Sequence[Example], *, seed: int = 0) -> tuple[list[Example], list[Example], str]:
    """Return corrections to train on, others to score on, and whether they were split by "context" or "question".

    Whole texts are left out if there are enough of them: questions about a text that was trained on look too easy.
    """
    train, left_out = hold_out(examples, LEFT_OUT_SHARE, seed=seed)
    if len(examples) <= 5 * len(left_out) and 2 * len(left_out) <= len(examples):
        return train, left_out, "context"
    order = np.random.default_rng(seed).permutation(len(examples)).tolist()
    held = set(order[: round(LEFT_OUT_SHARE * len(examples))])
    train = [example for number, example in enumerate(examples) if number not in held]
    return train, [examples[number] for number in sorted(held)], "question"


def _run_file(source: str) -> str:
    """Return the run file of docs/how-to/adapt.md; nothing is chosen by looking at the corrections left out."""
    return (
        f'[data]\ntrain = "{TRAIN}"\n\n'
        f"[learner]\nstart = {json.dumps(source)}\nlearning_rate = {LEARNING_RATE}\n\n"
        f'[training]\nepochs = {EPOCHS}\nkeep = "last"\n'
    )


def _start_process(folder: Path) -> subprocess.Popen[bytes]:
    # Half of the cores, so that the server goes on answering. The pipe to its stdin closes when the server ends, in
    # whatever way; the process then ends itself.
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    with (folder / LOG).open("wb") as log, locked(folder) as lock:
        return subprocess.Popen(
            module_command("lamella.serve.adapt_process"),
            cwd=folder,
            env=module_environment(OMP_NUM_THREADS=threads),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[] if lock is None else [lock],  # it is released when the last process that has it ends
        )


def _is_alive(folder: Path) -> bool:
    """Whether a process holds the lock on the folder of an adaptation."""
    try:
        with locked(folder):
            return False
    except RunError:
        return True


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = read_json(folder / STATE)
    except Exception:  # a folder that was not written to the end
        return {"state": "failed", "message": "The adaptation was not started."}
    return state


def _is_finished(folder: Path) -> bool:
    """Whether an adaptation waits for a decision; its reader is gone if the server was killed while it was kept."""
    return _state(folder)["state"] == "finished" and (folder / RUN / MODEL).is_dir()


def _running(state: dict[str, Any]) -> bool:
    return state["state"] in ("training", "scoring")


def _progress(folder: Path) -> float:
    """Return the share of training that is done, from the history of the run."""
    try:
        lines = (folder / RUN / HISTORY).read_text("utf-8").splitlines()
        return min(1.0, float(json.loads(lines[-1])["epoch"]) / EPOCHS)
    except (OSError, IndexError, KeyError, ValueError):
        return 0.0
