"""Sessions of onnxruntime, and how windows are divided among the cores: a few share all of them, many have one each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lamella.cores import usable_cores
from lamella.errors import MissingLibraryError, ModelError, one_line

# Since version 1.29, onnxruntime reports its use to Microsoft, and stores an identifier of the device, unless this is
# set before it is first imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Up to this number, windows run one after the other, each on several cores; more run one per core. A window takes half
# the time on two cores, but many windows take 15 % longer than with a core each (docs/decisions/0038-one-window.md).
FEW_WINDOWS = 4
MOST_THREADS = 8  # that share a window: each must be woken for every product

# On a CPU, these fused kernels of onnxruntime are slower than the separate ones: the first takes three times as long.
SLOW_FUSIONS = ("SkipLayerNormFusion", "BiasGeluFusion")

W = TypeVar("W")
R = TypeVar("R")


class Cores:
    """Runs windows on the cores of the machine; `threads` defaults to the number that this process may use."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or usable_cores()
        self.sharing = min(self.threads, MOST_THREADS)  # the number of threads that share a window if there are few
        self._pool = ThreadPoolExecutor(self.threads, "lamella-onnx")

    def map(self, run: Callable[[int, W], R], windows: Sequence[W]) -> Iterator[R]:
        """Yield `run(threads, window)` for each window, in order; `threads` are those that share this window."""
        if len(windows) <= FEW_WINDOWS:
            return map(partial(run, self.sharing), windows)
        return self._pool.map(partial(run, 1), windows)

    def overlap(self, windows: int) -> int:
        """Return how many of the windows may be left when the next ones come.

        The last windows with a core each leave cores idle one after the other; a few windows use all to the end.
        """
        return self.threads if windows > FEW_WINDOWS else 0


class Sessions:
    """The sessions of one graph, by the number of threads that share a window; opened when they are first needed."""

    def __init__(self, graph: Path | bytes, threads: int, *, keep_bytes: bool = False) -> None:
        """Open a graph, a file or its bytes, with the first of its sessions.

        Bytes are not kept for a second session, unless `keep_bytes` is set: they hold all tensors of a model.
        """
        self._opened = {threads: open_session(graph, threads)}
        self._graph = graph if keep_bytes or isinstance(graph, Path) else None
        self._opening = threading.Lock()
        self.inputs = [tensor.name for tensor in self._opened[threads].get_inputs()]

    def get(self, threads: int) -> Any:
        """Return the session in which this number of threads share a window."""
        with self._opening:
            if threads not in self._opened:
                (opened,) = self._opened.values()
                self._opened[threads] = opened
                with suppress(ModelError):  # another process has removed the graph from the cache
                    if self._graph is not None:
                        self._opened[threads] = open_session(self._graph, threads)
            return self._opened[threads]


def open_session(graph: Path | bytes, threads: int) -> Any:
    """Open a session in which this number of threads share a window."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise MissingLibraryError("a model exported to ONNX", ["onnxruntime"]) from None
    if isinstance(graph, Path) and not graph.is_file():
        raise ModelError(f"{graph}: no such file; the exported folder is incomplete.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Threads that wait for the next node must not spin: on a busy machine, that would take the cores from others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # warnings were reported at export, and errors are raised
    try:
        return onnxruntime.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(SLOW_FUSIONS),
        )
    except Exception as error:  # onnxruntime raises a class for each kind of failure
        where = "a graph in memory" if isinstance(graph, bytes) else str(graph)
        raise ModelError(f"{where}: expected an ONNX graph, found a damaged file ({one_line(error)}).") from None


@contextmanager
def explain_failure(tokens: int) -> Iterator[None]:
    """Turn the failure of a run on a window of this length into a ModelError or a MemoryError."""
    try:
        yield
    except Exception as error:  # onnxruntime raises a class for each kind of failure, none of them a MemoryError
        if "allocate memory" in str(error):
            raise MemoryError(one_line(error)) from None
        raise ModelError(f"the exported graph cannot be run on {tokens} tokens: {one_line(error)}.") from None
