"""The cache of graphs: written once, then opened from disk; see `graph_model`."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lamella.errors import LamellaError, ModelError, UnreadableError
from lamella.files import TEMPORARY, read_json, write_bytes, write_json
from lamella.graph.support import LARGEST_FILE, NoGraphError
from lamella.models.onnx_model import ONNX_GRAPH
from lamella.user_cache import cache_folder, limit_size

if TYPE_CHECKING:
    from lamella.graph.reader_graph import ReaderGraph

DATA = f"{ONNX_GRAPH}.data"
STATE = "state.json"
MAX_BYTES = 8 * 2**30  # of all graphs together

T = TypeVar("T")


def open_cached(key: str, build: Callable[[], ReaderGraph], open_graph: Callable[[Path | bytes], T]) -> T:
    """Open a graph of the cache; if it is missing or damaged, build it, and write it for the next time."""
    root = cache_folder("graphs")
    if root is not None and _is_intact(root / key):
        with contextlib.suppress(ModelError):  # damaged all the same
            return open_graph(root / key / ONNX_GRAPH)
    graph = build()
    if root is not None and _write(root / key, graph):
        with contextlib.suppress(ModelError):  # removed by another process
            return open_graph(root / key / ONNX_GRAPH)
    if graph.size > LARGEST_FILE:
        raise NoGraphError(f"it is too large to be kept in memory, and {root or 'the cache'} cannot be written")
    return open_graph(graph.encode())


def _is_intact(folder: Path) -> bool:
    """Return whether both files are as they were written; mark the graph as used."""
    try:
        if read_json(folder / STATE) != _state(folder):
            return False
    except (OSError, UnreadableError):
        return False
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(folder)  # the least recently used graphs are removed first
    return True


def _state(folder: Path) -> dict[str, list[int]]:
    stats = {name: (folder / name).stat() for name in (ONNX_GRAPH, DATA)}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in stats.items()}


def _write(folder: Path, graph: ReaderGraph) -> bool:
    """Write a graph; return whether it is in the cache now, from this process or from another one."""
    fresh = folder.parent / f".{folder.name}.{uuid.uuid4().hex}{TEMPORARY}"
    try:
        fresh.mkdir(parents=True)
        write_bytes(fresh / ONNX_GRAPH, graph.encode(data_file=fresh / DATA))
        write_json(fresh / STATE, _state(fresh))
        if folder.exists() and not _is_intact(folder):
            shutil.rmtree(folder, ignore_errors=True)
        os.rename(fresh, folder)
    except (OSError, LamellaError):  # no space, no permission, or another process was faster
        return _is_intact(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    limit_size(folder.parent, MAX_BYTES, keep=folder)
    return True
