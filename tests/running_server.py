"""A real server in a process of its own, for tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forks import SAME_BACKEND

START = SAME_BACKEND + "from lamella.__main__ import main; main()"


@dataclass
class RunningServer:
    """A `lamella serve` that answers at `address`."""

    process: subprocess.Popen[str]
    address: str
    log: Path

    def stop(self) -> int:
        """Ask it to stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(100)


@contextlib.contextmanager
def running_server(folder: Path, *arguments: object, **environment: str) -> Iterator[RunningServer]:
    """Start a server on a free port; stop it at the end if the test has not."""
    log = folder / "server.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", START, "serve", *map(str, arguments), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"{line}{log.read_text()}"
        yield RunningServer(process, found[0], log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
