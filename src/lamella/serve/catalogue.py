"""The readers that a server may load, by name: a table, made from what the server was started with.

A name from a request is matched against a pattern and looked up in this table; it never becomes part of a path.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from lamella.encoder.sources import (
    DEFAULT_READER,
    MODEL_CONFIG,
    READERS,
    is_peft,
    model_folder,
    named_folder,
    weights_file,
)
from lamella.errors import LamellaError, RunError, UsageError
from lamella.files import read_json
from lamella.graph.support import NoGraphError
from lamella.models.names import short_model_name
from lamella.models.sharing import check_sharing
from lamella.runs import run_state
from lamella.serve.refusals import UnknownModelError
from lamella.user_cache import file_state

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,99}", re.ASCII)
WEIGHING_MIXERS = ("scalar_mix", "dot", "multiplicative")  # whose layer weights can be shown


@dataclass(frozen=True)
class Listed:
    """A reader that can be loaded: its name, and the folder (or hub id) to load it from."""

    name: str
    source: str

    def describe(self) -> dict[str, Any]:
        """Return what its files state about it, without loading it; little if it is on the hub or damaged."""
        return dict(_describe(*self._folder_and_state()))

    def foresee_sharing(self, *, as_graph: bool) -> tuple[bool | None, str | None]:
        """Return whether it can share its encoder, and why not, without loading it; None if that is not known."""
        try:
            _check_sharing(*self._folder_and_state(), as_graph)
        except NoGraphError as reason:
            return False, str(reason)
        except (OSError, LamellaError, LookupError, TypeError, AttributeError):  # on the hub, damaged, no encoder
            return None, None
        return True, None

    def _folder_and_state(self) -> tuple[Path, tuple[int, ...]]:
        folder = model_folder(named_folder(self.source))
        try:
            return folder, tuple(file_state(folder / MODEL_CONFIG))
        except OSError:
            return folder, ()


class Catalogue:
    """The readers that may be asked. Threads may share it."""

    def __init__(self, models: Iterable[str], folder: Path | None = None) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._given = {listed.name: listed for listed in _given(models or [DEFAULT_READER])}
        self.default = next(iter(self._given))
        self._found: dict[str, Listed] = {}
        self._removed: set[str] = set()
        self.scan()
        if shared := sorted(self._given.keys() & self._found.keys()):
            if list(self._given.values()) == [_packaged()]:  # not asked for: the folder's own takes precedence
                self._given = {shared[0]: self._found[shared[0]]}
            else:
                raise UsageError(
                    f"serve: expected readers with different names, got {shared[0]!r} twice: "
                    f"{self._given[shared[0]].source} and {self._found[shared[0]].source}; rename one of the folders."
                )

    def scan(self) -> None:
        """Look again for models in the folder."""
        if self.folder is not None:
            found = {listed.name: listed for listed in _models_in(self.folder)}
            with self._lock:
                self._found = found

    def names(self) -> list[str]:
        """Return the names of all readers, the default first."""
        with self._lock:
            return [name for name in {**self._given, **self._found} if name not in self._removed]

    def get(self, name: str | None) -> Listed:
        """Return the reader with a name, the default for None; raise an error that names those there are."""
        if name is None:
            name = self.default
        with self._lock:
            listed = None
            if NAME.fullmatch(name) and name not in self._removed:
                listed = self._given.get(name) or self._found.get(name)
        if listed is None:
            raise UnknownModelError(name, self.names())
        return listed

    def find(self, name: str) -> Listed:
        """Return a reader that may be new in the folder, or have been removed."""
        with self._lock:
            listed = self._given.get(name)
        if listed is None and self.folder is not None:
            try:
                listed = next(_models_in(self.folder, only=name), None)
                if listed is None:
                    self.scan()  # the error names those there are
            except UsageError as error:  # not the fault of this client
                raise RunError(str(error)) from None
        if listed is None:
            return self.get(name)
        with self._lock:
            if name not in self._given | self._found:
                self._found = dict(sorted({**self._found, name: listed}.items()))
        return listed

    def restore(self, name: str) -> None:
        """Serve a reader again that was removed."""
        with self._lock:
            self._removed.discard(name)

    def serves(self, name: str) -> bool:
        """Whether a reader may be asked."""
        with self._lock:
            return name not in self._removed and (name in self._given or name in self._found)

    def is_taken(self, name: str) -> bool:
        """Whether a reader has a name, be it one that is served no longer."""
        with self._lock:
            return name in self._given or name in self._found

    def remove(self, name: str) -> None:
        """Serve a reader no longer; its files stay."""
        self.get(name)
        with self._lock:
            self._removed.add(name)


def _given(models: Iterable[str]) -> Iterator[Listed]:
    """Yield the readers that were named when the server was started."""
    seen: dict[str, str] = {}
    for model in models:
        name = _own_name(model)
        if not NAME.fullmatch(name):
            raise UsageError(
                f"serve: expected a folder whose name has only letters, digits and . _ - + @, got {name!r} "
                f"({model}); rename it."
            )
        if name in seen:
            raise UsageError(
                f"serve: expected readers with different names, got {name!r} twice: {seen[name]} and {model}; rename "
                "one of the folders."
            )
        seen[name] = model
        yield _packaged() if model == DEFAULT_READER else Listed(name, model)


def _packaged() -> Listed:
    folder = named_folder(DEFAULT_READER)
    return Listed(DEFAULT_READER, str(READERS / DEFAULT_READER if folder.parent == READERS else folder))


def _own_name(model: str) -> str:
    """Return the name of a folder, or the last part of a hub id."""
    if model == DEFAULT_READER:
        return model
    path = os.path.abspath(os.path.expanduser(model)) if os.path.isdir(os.path.expanduser(model)) else model
    return PurePath(short_model_name(path)).name


def _models_in(folder: Path, *, only: str | None = None) -> Iterator[Listed]:
    """Yield the models in a folder: one per sub-folder that is a model, or a run with a model.

    With `only`, look at the sub-folder with this name alone: to look at all takes 0.1 ms each.
    """
    try:
        entries = sorted(entry.name for entry in os.scandir(folder) if only in (None, entry.name) and entry.is_dir())
    except OSError as error:
        raise UsageError(
            f"serve --models {folder}: cannot be read ({error.strerror}); give a folder of models."
        ) from None
    for name in entries:
        if NAME.fullmatch(name) and _holds_model(folder / name):
            yield Listed(name, str(folder / name))


def _holds_model(path: Path) -> bool:
    folder = model_folder(path)
    if is_peft(folder):
        return weights_file(folder).is_file()
    if not (folder / MODEL_CONFIG).is_file() or run_state(folder) is not None:
        return False
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.onnx"))


@lru_cache(maxsize=4096)  # errors are not kept
def _check_sharing(folder: Path, state: tuple[int, ...], as_graph: bool) -> None:
    check_sharing(folder, as_graph=as_graph)


@lru_cache(maxsize=4096)
def _describe(folder: Path, state: tuple[int, ...]) -> Mapping[str, Any]:
    """Describe a model folder. It is read again when the state of its config.json changes, as with every new model."""
    facts: dict[str, Any] = {"base": None, "bytes": 0, "weighs_layers": False}
    try:
        config = read_json(folder / MODEL_CONFIG)
        facts["bytes"] = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    except (OSError, LamellaError):
        return facts
    if not isinstance(config, dict):
        return facts
    base, head, source = (config.get(key) for key in ("base", "head", "source"))
    if isinstance(base, dict):
        facts["base"] = base.get("name")
    elif isinstance(source, dict):  # an exported graph
        facts["base"] = source.get("name")
    else:
        facts["base"] = config.get("model_type")
    mixers = head.get("mixer") if isinstance(head, dict) else None
    first = mixers[0] if isinstance(mixers, list) and mixers else None
    facts["weighs_layers"] = isinstance(first, dict) and first.get("name") in WEIGHING_MIXERS
    facts["base"] = facts["base"] and short_model_name(str(facts["base"]))
    return facts
