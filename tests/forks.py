"""The command line in processes of its own, which need not import the libraries again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Each process loads models as the tests do (`same_backend` in conftest.py): with AMX, `auto` would choose bf16.
SAME_BACKEND = """
import os
from pathlib import Path
from lamella import environment
environment.CPU_INFO = Path(os.devnull)
"""

# One process imports the libraries and forks a process for every line it reads: a command starts in milliseconds.
SERVER = (
    SAME_BACKEND
    + """
import atexit, importlib.util, json, signal, sys, threading
if importlib.util.find_spec("torch"):  # otherwise every child imports them
    import accelerate, torch._dynamo, transformers.models.bert.modeling_bert
    import lamella.training.run
from lamella.__main__ import main

for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, file in enumerate(request["files"]):
        os.dup2(os.open(file, os.O_WRONLY if number else os.O_RDONLY), number)
    sys.stdin, sys.stdout, sys.stderr = (open(number, "w" if number else "r", closefd=False) for number in range(3))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in the background
    sys.argv = ["lamella", *request["arguments"]]
    exec(request["prelude"])
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    # End as Python does, but without taking all libraries apart, which takes seconds.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""
)


@dataclass(frozen=True)
class Command:
    """A command that runs in a process of its own."""

    server: ForkServer
    pid: int
    files: Sequence[Path]

    def wait(self) -> int:
        """Return its exit code."""
        return int(self.server.receive())

    def ended(self) -> bool:
        return not os.path.exists(f"/proc/{self.pid}")

    def stopped(self) -> bool:
        """Whether SIGSTOP has stopped it."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def kill(self) -> bool:
        """Kill it with SIGKILL, wait for it, and return whether it was still running."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    @property
    def out(self) -> str:
        return self.files[1].read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self.files[2].read_text(encoding="utf-8")


class ForkServer:
    """Starts commands, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.commands = 0

    def start(self, *arguments: object, stdin: str = "", terminal: Path | None = None, prelude: str = "") -> Command:
        """Start a command in the folder and the environment of the caller; a terminal serves as all three files.

        The process runs the Python code `prelude` before the command.
        """
        self.commands += 1
        names = [self.folder / f"{self.commands}-{name}.txt" for name in ("stdin", "stdout", "stderr")]
        files = [terminal] * 3 if terminal else names
        for file in names:
            file.write_text(stdin if file == names[0] else "", encoding="utf-8")
        request = {
            "arguments": list(map(str, arguments)),
            "prelude": prelude,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": list(map(str, files)),
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Command(self, int(self.receive()), files)

    def run(self, *arguments: object, stdin: str = "", prelude: str = "") -> tuple[int, str, str]:
        """Return the exit code of a command and what it wrote to its two outputs."""
        command = self.start(*arguments, stdin=stdin, prelude=prelude)
        return command.wait(), command.out, command.err

    def receive(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.communicate(timeout=60)
