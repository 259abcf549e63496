"""Kinds of files that Lamella writes for later commands: stored logits, hidden states, and the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

from broken.damage import Damage
from broken.data_kinds import squad
from broken.kind import Files, Folders, Kind, damage_all, damage_file
from broken.model_kinds import QUESTION
from broken.oracle import Outcome, run_command, run_function
from lamella.config import WindowOptions
from lamella.data.file_formats.formats import read
from lamella.data.windows import feature_cache
from lamella.data.windows.features import Features, featurise
from lamella.inference.stored_logits import same_windows
from run_files import write_run_file
from samples import HAS_TORCH, plain_tokenizer
from tiny_reader import WINDOWS, save_tiny_bert, save_tiny_reader

LOGITS, LOGITS_INDEX = "logits.safetensors", "logits.json"


def _stored_logits() -> Kind:
    """Return run folders with logits, beside a sound one; damaged logits are tried again with a hash that fits."""

    def sound(folder: Path, beside: Path) -> None:
        save_tiny_bert(beside / "encoder")
        (beside / "data.json").write_text(json.dumps(squad()))
        for seed, run in enumerate((folder / "run", beside / "other")):
            model = save_tiny_reader(beside / f"reader-{seed}", beside / "encoder", seed=seed)
            _run("predict", beside / "data.json", "--model", model, "--keep-logits", "--out", run)

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file(f"run/{LOGITS_INDEX}", files[f"run/{LOGITS_INDEX}"], structure="json")
        yield from damage_file(f"run/{LOGITS}", files[f"run/{LOGITS}"], structure="safetensors")

    def commands(folders: Folders) -> Iterator[Sequence[object] | Callable[[], Outcome]]:
        for run in (folders.inputs / "run", *_rehashed(folders)):
            yield ["ensemble", run, folders.beside / "other", "--level", "token", "--out", folders.output]
            if HAS_TORCH and (run / LOGITS_INDEX).is_file():
                yield partial(run_function, partial(_teach, run, folders.beside / "data.json"))

    return Kind("stored logits", sound, damages, commands)


def _rehashed(folders: Folders) -> Iterator[Path]:
    """Yield a copy of the run whose index has the hash of its damaged logits: as somebody would make who means harm."""
    run = folders.inputs / "run"
    sound = json.loads((folders.beside / "other" / LOGITS_INDEX).read_bytes()).keys()
    try:
        index = json.loads((run / LOGITS_INDEX).read_bytes())
        sha256 = hashlib.sha256((run / LOGITS).read_bytes()).hexdigest()
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(index, dict) or index.keys() != sound or index["sha256"] == sha256:
        return
    copy = folders.output.with_name("rehashed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    (copy / LOGITS_INDEX).write_text(json.dumps({**index, "sha256": sha256}))
    yield copy


def _teach(run: Path, data: Path) -> None:
    """Match the stored logits with windows of another length, as distillation does."""
    from lamella.training.distillation.logit_alignment import align

    windows = _windows(data)
    aligned = align([run], windows, temperature=1.0)
    assert aligned.padded(windows.example[:0], 4).shape == (2, 0, 4)


def _windows(data: Path) -> Features:
    return featurise(read(data).examples, plain_tokenizer(), WindowOptions(**WINDOWS))


def _hidden_states() -> Kind:
    """Return caches of `lamella extract`; training from a damaged one and repairing it are tried."""

    def sound(folder: Path, beside: Path) -> None:
        run = _write_run_file(beside)
        folder.rmdir()
        _run("extract", run, "--out", folder)

    def commands(folders: Folders) -> Iterator[list[object]]:
        run = folders.beside / "run.toml"
        yield ["train", run, "--cache", folders.inputs, "--out", folders.output]
        copy = folders.output.with_name("repaired")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folders.inputs, copy, symlinks=True)
        yield ["extract", run, "--out", copy]

    return Kind("hidden states", sound, damage_all, commands, needs=["torch"])


def _write_run_file(beside: Path) -> Path:
    save_tiny_bert(beside / "encoder")
    encoder = f'name = "{beside / "encoder"}"\ntuning = "frozen"'
    return write_run_file(beside / "run.toml", encoder, steps=1)


def _cached_windows() -> Kind:
    """Return windows in the user's cache: whatever is there, the same windows are found."""

    def sound(folder: Path, beside: Path) -> None:
        (beside / "data.json").write_text(json.dumps(squad()))
        _read_windows(folder, beside / "data.json")

    def commands(folders: Folders) -> Iterator[Callable[[], Outcome]]:
        copy = _copy_cache(folders)
        yield partial(run_function, partial(_read_windows, copy, folders.beside / "data.json"))

    return Kind("cached windows", sound, damage_all, commands, refuses=False)


def _read_windows(cache: Path, data: Path) -> None:
    options, tokenizer, examples = WindowOptions(**WINDOWS), plain_tokenizer(), read(data).examples
    with mock.patch.dict(os.environ, LAMELLA_CACHE=str(cache)), mock.patch.object(feature_cache, "MIN_QUESTIONS", 1):
        windows = feature_cache.cached_features(examples, tokenizer, options)
    assert same_windows(windows, featurise(examples, tokenizer, options))


def _cached_graphs() -> Kind:
    """Return the user's cache after a question: graphs, and hashes of files."""

    def sound(folder: Path, beside: Path) -> None:
        save_tiny_bert(beside / "encoder")
        save_tiny_reader(beside / "reader", beside / "encoder")
        with mock.patch.dict(os.environ, LAMELLA_CACHE=str(folder)):
            _run("ask", *QUESTION, "--model", beside / "reader")

    def commands(folders: Folders) -> Iterator[Callable[[], Outcome]]:
        copy = _copy_cache(folders)

        def ask() -> Outcome:
            with mock.patch.dict(os.environ, LAMELLA_CACHE=str(copy)):
                return run_command(["ask", *QUESTION, "--model", folders.beside / "reader"])

        yield ask

    return Kind("cached graphs", sound, damage_all, commands, refuses=False)


def _copy_cache(folders: Folders) -> Path:
    """Copy the damaged cache: commands repair it."""
    copy = folders.output.with_name("cache")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folders.inputs, copy, symlinks=True)
    return copy


def _run(*arguments: object) -> None:
    outcome = run_command(arguments)
    assert outcome.code == 0, outcome


def cache_kinds() -> Iterator[Kind]:
    """Yield the kinds of files for later commands."""
    yield _stored_logits()
    yield _hidden_states()
    yield _cached_windows()
    yield _cached_graphs()
