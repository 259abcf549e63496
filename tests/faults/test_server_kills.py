"""A server that is killed while it loads a reader, or adapts or keeps one, starts again as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from fault_trials import Tally
from forks import Command, ForkServer
from kills import changes, prelude
from lamella.atomic import TEMPORARY
from lamella.files import write_json
from lamella.serve import adaptation
from lamella.serve.adaptation import Adaptations
from lamella.serve.catalogue import Catalogue
from lamella.serve.corrections import Corrections

SENTENCES = [f"The number of box {number} is {number + 40}." for number in range(24)]
POINTS = int(os.environ.get("LAMELLA_KILL_POINTS", "12"))
OPEN = """
from pathlib import Path
from lamella.serve.adaptation import Adaptations
from lamella.serve.catalogue import Catalogue
from lamella.serve.corrections import Corrections
folder = Path({folder!r})
jobs = Adaptations(folder, Corrections(folder), Catalogue([], folder))
"""


def spread(most: int) -> list[int]:
    """Return points from the first change to the last."""
    return sorted({1 + round(number * (most - 1) / (POINTS - 1)) for number in range(POINTS)})


def started(process: Command) -> str | None:
    """Wait for a server; return its address, or None if it was killed."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if found := re.search(r"http://\S+", process.out):
            return found[0]
        if process.ended():
            return None
        time.sleep(0.02)
    raise AssertionError(process.err)


def ask(address: str) -> Any:
    body = json.dumps({"question": "Which moon?", "context": "Titan is a moon of Saturn."}).encode()
    request = urllib.request.Request(f"{address}/v1/ask", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())["results"]


@pytest.mark.slow
def test_killed_while_it_loads_a_reader(
    material: Path, tmp_path: Path, forks: ForkServer, tallies: dict[str, Tally]
) -> None:
    cache, counter = tmp_path / "cache", tmp_path / "count"
    tally = tallies.setdefault("serve, loading", Tally())

    def start(last: int | None = None) -> Command:
        environment = f"import os; os.environ['LAMELLA_CACHE'] = {str(cache)!r}"
        watch = prelude(cache, counter, last=last)
        return forks.start("serve", material / "lora", "--port", 0, prelude=f"{environment}; {watch}")

    def answers() -> Any:
        process = start()
        address = started(process)
        assert address is not None
        results = ask(address)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 0
        return results

    expected, most = answers(), changes(counter)
    for change in spread(most):
        shutil.rmtree(cache)
        process = start(change)
        if (address := started(process)) is not None:  # the first question loads the rest
            with pytest.raises(OSError):  # noqa: PT011 - whichever way the connection breaks
                ask(address)
        assert process.wait() == -signal.SIGKILL
        tally.kills += 1
        if answers() == expected and not list(cache.rglob(f"*{TEMPORARY}")):
            tally.equal += 1
        else:
            tally.losses.append(f"change {change} of {most}")
    assert tally.losses == []


def finished_adaptation(material: Path, folder: Path) -> None:
    """Write the folder of an adaptation that waits for a decision."""
    shutil.copytree(material / "lora" / "model", folder / adaptation.FOLDER / "a1" / adaptation.RUN / "model")
    request = {"model": "tiny", "trained_on": 16, "left_out": 8, "split": "context"}
    write_json(folder / adaptation.FOLDER / "a1" / adaptation.REQUEST, request)
    write_json(folder / adaptation.FOLDER / "a1" / adaptation.STATE, {"state": "finished"})


def test_killed_while_an_adapted_reader_is_kept(
    material: Path, tmp_path: Path, forks: ForkServer, tallies: dict[str, Tally]
) -> None:
    """The reader is kept, and its adaptation is over; or it still waits for a decision."""
    folder, counter = tmp_path / "models", tmp_path / "count"
    tally = tallies.setdefault("serve, keeping an adapted reader", Tally())
    code = f"{OPEN.format(folder=str(folder))}jobs.keep('a1', 'mine')\nimport os; os._exit(0)"

    def run(last: int | None = None) -> int:
        shutil.rmtree(folder, ignore_errors=True)
        finished_adaptation(material, folder)
        return forks.run(prelude=f"{prelude(folder, counter, last=last)}\n{code}")[0]

    assert run() == 0
    points, kept = range(1, changes(counter) + 1), []
    for change in points:
        assert run(change) == -signal.SIGKILL
        tally.kills += 1
        jobs = Adaptations(folder, Corrections(folder), Catalogue([], folder))  # the server starts again
        kept.append((folder / "mine").is_dir())
        if jobs.current() is not None:
            assert not kept[-1]
            assert jobs.keep("a1", "mine") == "mine"
        assert jobs.current() is None
        assert (folder / "mine" / "model.safetensors").read_bytes() == (
            material / "lora" / "model" / "model.safetensors"
        ).read_bytes()
        tally.equal += 1
    assert True in kept
    assert False in kept


@pytest.mark.slow
def test_killed_while_an_adaptation_is_started(
    material: Path, tmp_path: Path, forks: ForkServer, tallies: dict[str, Tally]
) -> None:
    """What was not started is removed when the server starts again, and its process has ended with the server."""
    folder, counter = tmp_path / "models", tmp_path / "count"
    tally = tallies.setdefault("serve, starting an adaptation", Tally())
    shutil.copytree(material / "lora" / "model", folder / "tiny")
    corrections = Corrections(folder)
    for number, sentence in enumerate(SENTENCES):
        corrections.add(f"What is the number of box {number}?", sentence, (len(sentence) - 3, len(sentence) - 1))
    code = f"{OPEN.format(folder=str(folder))}jobs.start('tiny')\nimport os; os.kill(os.getpid(), 9)"
    inside = folder / adaptation.FOLDER

    def run(last: int | None = None) -> None:
        shutil.rmtree(inside, ignore_errors=True)
        assert forks.run(prelude=f"{prelude(inside, counter, last=last)}\n{code}")[0] == -signal.SIGKILL

    run()
    for change in [*spread(changes(counter)), None]:
        run(change)
        tally.kills += 1
        until = time.monotonic() + 60
        while inside.is_dir() and any(map(adaptation._is_alive, filter(Path.is_dir, inside.iterdir()))):
            assert time.monotonic() < until, "the process did not end with its server"
            time.sleep(0.1)
        jobs = Adaptations(folder, corrections, Catalogue([], folder))  # the server starts again
        assert jobs.current() is None
        assert not inside.is_dir() or not list(inside.iterdir())
        assert len(corrections.examples()) == len(SENTENCES)
        tally.equal += 1
