"""A Ray cluster to work on: one that is there, or one on this machine for as long as it is needed."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lamella.errors import MissingExtraError, RunError, UsageError, one_line

PATIENCE = 5.0  # seconds; Ray itself would try for more than a minute, and then end the process


@contextmanager
def cluster(address: str | None = None, **options: Any) -> Iterator[None]:
    """Work within a cluster: that of `address`, the one already joined, or a new one that ends with the block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise MissingExtraError("--engine ray", "ray") from None

    if ray.is_initialized():
        yield
        return
    if address not in (None, "auto", "local"):
        _knock(str(address))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, about what it will do one day
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=None if address else False,
                **options,
            )
    except (ConnectionError, RuntimeError, ValueError, OSError, ImportError) as error:
        where = f"--address {address}" if address else "--engine ray"
        raise RunError(f"{where}: no cluster can be joined or started ({one_line(error)}).") from None
    try:
        yield
    finally:
        ray.shutdown()  # also at an interrupt: no process of ours stays behind


def refuse_too_much(cpus: float, gpus: float) -> None:
    """No machine with so much means a wait without end."""
    import ray

    most = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if not any(one.get("CPU", 0) >= cpus and one.get("GPU", 0) >= gpus for one in most):
        has = "; ".join(f"{one.get('CPU', 0):g} CPUs and {one.get('GPU', 0):g} GPUs" for one in most)
        raise UsageError(
            f"--cpus-per-run, --gpus-per-run: expected what one machine has ({has}). Got {cpus:g} and {gpus:g}."
        )


def _knock(address: str) -> None:
    """Say at once that nobody listens there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--address: expected host:port of a Ray cluster, or auto. Got {address!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise RunError(f"--address {address}: no Ray cluster answers there ({one_line(error)}).") from None
