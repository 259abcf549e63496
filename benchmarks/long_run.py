"""Measure the memory of training and of a server over a long time.

    python benchmarks/long_run.py [--minutes 30 15] [--quick] [--out results/long_run.json]

`--minutes` gives the minutes of training and of serving; 0 skips one of them, and keeps what the file has of it.

- train: `lamella train` in a process of its own, with adapters on the default encoder, augmented texts that are new in
  every epoch, an evaluation and a checkpoint per epoch. At the end it gets SIGTERM, and must write a checkpoint.
- serve: a server with the packaged reader, asked by 4 clients. No text is sent twice, and every request must be
  answered. The cache for tokens has 4 MiB instead of 64, so that it is full within the first quarter.

The memory is the sum of the proportional set sizes (PSS) of the process and its children, in MiB, sampled about 200
times. The first quarter of the time does not count: memory grows while batches of new lengths arrive. `growth` is the
median of the last quarter over the median of the second, and `per_hour` the slope of a line through the last three
quarters. `others` is the mean number of cores that other programs used meanwhile. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lamella import load_examples
from lamella.cores import busy_seconds
from lamella.environment import library_versions
from lamella.files import read_json, write_json

SAMPLES = 200
CLIENTS = 4
RUN_FILE = """
[data]
train = "demo:train"
dev = "demo:dev"
augment = { name = "eda", rate = 0.1 }
[encoder]
tuning = "adapter"
[training]
epochs = 100000
checkpoint_every = 1
keep = "last"
"""
SERVER = """
from lamella.serve.http_server import serve
from lamella.serve.settings import Settings

serve(Settings(token_cache=4 * 2**20), "127.0.0.1", 0, lambda address, service: print(address, flush=True))
"""
Sample = tuple[float, float]  # seconds since the start, MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, nargs=2, default=(30.0, 15.0), metavar=("TRAIN", "SERVE"))
    parser.add_argument("--quick", action="store_true", help="one minute of each, to try the script")
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    minutes = (1.0, 1.0) if arguments.quick else arguments.minutes
    found: dict[str, Any] = read_json(arguments.out) if arguments.out and arguments.out.exists() else {}
    found |= {"versions": library_versions(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        for name, measure, length in zip(("train", "serve"), (train, serve), minutes, strict=True):
            if length:
                busy, own = busy_seconds(), sum(os.times()[:4])
                found[name] = measure(Path(folder), 60 * length)
                others = max(0.0, busy_seconds() - busy - sum(os.times()[:4]) + own)  # CPU seconds of other programs
                found[name]["others"] = round(others / found[name]["seconds"], 2)
                print(describe(name, found[name]), flush=True)
    if arguments.out:
        write_json(arguments.out, found)


def train(folder: Path, seconds: float) -> dict[str, Any]:
    """Train until the time is over."""
    (folder / "run.toml").write_text(RUN_FILE)
    out = folder / "run"
    with (folder / "train.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lamella", "train", str(folder / "run.toml"), "--out", str(out)],
            stdout=log,
            stderr=log,
        )
    samples = sample(process, seconds, ready=(out / "config.json").is_file)
    process.send_signal(signal.SIGTERM)
    code = process.wait()
    if code != 128 + signal.SIGTERM or not (out / "checkpoint.pt").is_file():
        raise SystemExit(
            f"train: expected a checkpoint after SIGTERM, got exit code {code}:\n{log_of(folder, 'train')}"
        )
    events = [json.loads(line)["event"] for line in (out / "history.jsonl").read_text().splitlines()]
    return summary(samples) | {"steps": events.count("step"), "evaluations": events.count("evaluation")}


def serve(folder: Path, seconds: float) -> dict[str, Any]:
    """Ask a server until the time is over."""
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    address = re.search(r"http://([^:/]+):(\d+)", process.stdout.readline())
    if address is None:
        raise SystemExit(f"serve: expected an address:\n{log_of(folder, 'serve')}")
    over, texts, statuses = threading.Event(), questions(), list[int]()
    lock = threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection(address[1], int(address[2]), timeout=60)
        while not over.is_set():
            with lock:
                body = next(texts)
            connection.request("POST", "/v1/ask", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in clients:
        thread.start()
    try:
        samples = sample(process, seconds, ready=lambda: bool(statuses))
    finally:
        over.set()
        for thread in clients:
            thread.join()
        process.terminate()
        code = process.wait()
    failed = sum(status != 200 for status in statuses)
    if code or failed:
        raise SystemExit(f"serve: {failed} requests failed, exit code {code}:\n{log_of(folder, 'serve')}")
    return summary(samples) | {"requests": len(statuses), "errors": failed}


def questions() -> Iterator[dict[str, str]]:
    """Return questions about texts that are never twice the same."""
    examples = load_examples("demo:dev").examples
    for number, example in enumerate(itertools.cycle(examples)):
        yield {"question": example.question, "context": f"Text {number}. {example.context.text}"}


def sample(process: subprocess.Popen[Any], seconds: float, *, ready: Callable[[], bool]) -> list[Sample]:
    """Sample the memory of a process for a time, which begins when it is ready."""
    while not ready() and process.poll() is None:
        time.sleep(0.1)
    began, samples = time.monotonic(), list[Sample]()
    while (passed := time.monotonic() - began) < seconds:
        if process.poll() is not None:
            raise SystemExit(f"the process ended after {passed:.0f} s with exit code {process.returncode}")
        samples.append((round(passed, 1), round(memory(process.pid), 1)))
        time.sleep(min(seconds / SAMPLES, seconds - passed))
    return samples


def memory(pid: int) -> float:
    """Return the MiB of a process and of its children; those that have just ended count nothing."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return own / 1024 + sum(memory(int(child)) for child in children)


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the growth of the memory and its curve."""
    quarter = len(samples) // 4
    seconds, mib = np.array(samples[quarter:]).T
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    medians = [statistics.median(size for _, size in part) for part in (second, last)]
    return {
        "seconds": samples[-1][0],
        "mib": {"second_quarter": medians[0], "last_quarter": medians[1], "most": float(mib.max())},
        "growth": round(medians[1] / medians[0], 4),
        "per_hour": round(float(np.polyfit(seconds, mib, 1)[0]) * 3600, 1),
        "curve": [list(each) for each in samples],
    }


def describe(name: str, found: dict[str, Any]) -> str:
    done = f"{found['steps']} steps" if name == "train" else f"{found['requests']} requests"
    return (
        f"{name}: {found['mib']['last_quarter']:.0f} MiB after {found['seconds'] / 60:.1f} minutes and {done}; "
        f"{found['growth']:.3f} x the second quarter's, {found['per_hour']:+.0f} MiB per hour"
    )


def log_of(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text()[-2000:]


if __name__ == "__main__":
    main()
