"""The cache of graphs: written once, then opened from disk; see `graph_model`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from lamella.errors import LamellaError, ModelError
from lamella.files import write_bytes
from lamella.graph.support import LARGEST_FILE, NoGraphError
from lamella.models.onnx_model import ONNX_GRAPH
from lamella.user_cache import cache_folder, is_intact, limit_size, write_folder

DATA = f"{ONNX_GRAPH}.data"
MAX_BYTES = 8 * 2**30  # of all graphs together

T = TypeVar("T")


class WritableGraph(Protocol):
    """A graph that was built, of a reader or of a shared encoder."""

    @property
    def size(self) -> int:
        """The bytes of all tensors."""

    def encode(self, *, data_file: Path | None = None) -> bytes:
        """Return the bytes of an ONNX file; with `data_file`, large tensors are written there."""


def open_cached(key: str, build: Callable[[], WritableGraph], open_graph: Callable[[Path | bytes], T]) -> T:
    """Open a graph of the cache; if it is missing or damaged, build it, and write it for the next time."""
    root = cache_folder("graphs")
    if root is not None and is_intact(root / key):
        with contextlib.suppress(ModelError):  # damaged all the same
            return open_graph(root / key / ONNX_GRAPH)
    graph = build()
    if root is not None and _write(root / key, graph):
        with contextlib.suppress(ModelError):  # removed by another process
            return open_graph(root / key / ONNX_GRAPH)
    if graph.size > LARGEST_FILE:
        raise NoGraphError(f"it is too large to be kept in memory, and {root or 'the cache'} cannot be written")
    return open_graph(graph.encode())


def _write(folder: Path, graph: WritableGraph) -> bool:
    """Write a graph; return whether it is in the cache now, from this process or from another one."""

    def write_files(fresh: Path) -> None:
        write_bytes(fresh / ONNX_GRAPH, graph.encode(data_file=fresh / DATA))

    try:
        write_folder(folder, write_files)
    except (OSError, LamellaError):  # no space or no permission
        return False
    limit_size(folder.parent, MAX_BYTES, keep=folder)
    return True
