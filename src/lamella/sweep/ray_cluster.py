"""A Ray cluster to work on: an existing one, or one on this machine that ends with the work."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lamella.errors import MissingLibraryError, RunError, UsageError, one_line

CONNECT_TIMEOUT = 5.0  # seconds; Ray itself would try for more than a minute, and then end the process


@contextmanager
def cluster(address: str | None = None, **options: Any) -> Iterator[None]:
    """Work on a cluster: at `address`, the one already joined, or a new one that is shut down with the block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise MissingLibraryError("--engine ray", ["ray"]) from None

    if ray.is_initialized():
        yield
        return
    if address not in (None, "auto", "local"):
        _check_address(str(address))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own deprecation warnings
            ray.init(
                address=address or "local",
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=None if address else False,
                **options,
            )
    except (ConnectionError, RuntimeError, ValueError, OSError, ImportError) as error:
        where = f"--address {address}" if address else "--engine ray"
        raise RunError(f"{where}: cannot join or start a Ray cluster ({one_line(error)}).") from None
    try:
        yield
    finally:
        ray.shutdown()  # also on an interrupt: no process of ours stays behind


def check_resources(cpus: float, gpus: float) -> None:
    """Check that some machine has the requested resources: otherwise a run would wait forever."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if not any(machine.get("CPU", 0) >= cpus and machine.get("GPU", 0) >= gpus for machine in machines):
        available = "; ".join(
            f"{machine.get('CPU', 0):g} CPUs and {machine.get('GPU', 0):g} GPUs" for machine in machines
        )
        raise UsageError(
            f"--cpus-per-run, --gpus-per-run: expected at most what one machine has ({available}), "
            f"got {cpus:g} and {gpus:g}."
        )


def _check_address(address: str) -> None:
    """Fail at once if nothing listens at the address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--address: expected host:port of a Ray cluster, or auto, got {address!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise RunError(f"--address {address}: no Ray cluster answers there ({one_line(error)}).") from None
