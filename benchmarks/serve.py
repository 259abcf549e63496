"""Measure the server against the bare `Reader`, over loopback, with clients that share the cores with it.

    python benchmarks/serve.py [SECTION ...] [--quick] [--out results/serve.json] [--device cuda]
    python benchmarks/serve.py batching --device cuda --reader models/mpnet

Sections; without any, all of them run, one after the other:

- load: 64 clients for 60 seconds; no error, and every answer equal to the Reader's.
- overhead: CPU seconds per question of the server with 64 clients, against `Reader.ask` with a list of questions.
- one: milliseconds of a single request more than `Reader.ask` takes.
- batching: answers per second of 64 clients, against a server whose encoder gets one request at a time, and runs it on
  all cores; the same per CPU second of the server, which other work on the machine does not change; and against a
  single client (`one_client`). `most`: what batches could gain if no core ever waited, from the time of a window on all
  cores and its CPU time on one. `short`: the same with short texts.
- lists: answers per second of 64 clients, against one client, if the encoder only sleeps for 3 ms per batch: what the
  process around it can do, as on a fast GPU. `one_by_one`: against 64 clients whose questions are computed one at a
  time. `cpu`: CPU ms of the server per question of 64 clients, and of one.
- mixed: CPU seconds per question with 32 readers at random, against one of them on the same server.
- memory: a server that has been asked with 100 readers, against one with a folder of one reader. PSS is the
  proportional set size of the server's process; `uss` counts only pages that no other process has. `alone`: against a
  server that can only have one reader, and merges it. `resident`: with enough --memory for all 100 at once.
- registered: the 95th percentile of the latency with 1,000 readers against 8, asked uniformly at random, which is the
  worst case for the limit of memory; `zipf` asks them as often as words are used.
- loading: milliseconds of POST /v1/models/NAME, by the clock and of CPU time, and the latency of others meanwhile
  against the latency without.
- flat: memory over 20,000 requests: its median over the last quarter against the second.

Every comparison alternates both sides in one run and is repeated. The peer of a ratio is what stands after "against".
No text is sent twice unless stated: the server would find its tokens in a cache. The readers are the packaged one with
noise added to its tensors, so that their answers differ. Clients use raw sockets; their CPU seconds are reported. With
--out, sections that the file already has are kept, so that they can be measured one at a time. Needs Linux (/proc).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file, save

from lamella import Reader, load_examples
from lamella.config import DEFAULT_ENCODER
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import pad
from lamella.data.windows.tokens import without_truncation
from lamella.encoder.pretrained import load_tokenizer
from lamella.encoder.sources import DEFAULT_READER, MODEL_CONFIG, MODEL_WEIGHTS, READERS, find_encoder
from lamella.environment import library_versions
from lamella.files import read_json, write_json
from lamella.models.loading import load_model
from suite.work import reading_flops

NOISE = 0.02  # of the standard deviation of each tensor: some answers differ, most stay sensible
TICKS = os.sysconf("SC_CLK_TCK")
START = """
import json, sys
from pathlib import Path
from lamella.serve.http_server import serve
from lamella.serve.settings import Settings
options = json.loads(sys.argv[1])
folder = options.pop("folder", None)
if (seconds := options.pop("encoder_seconds", None)) is not None:
    import time
    import numpy as np
    from lamella.models.window_engine import ON_GPU
    from lamella.serve import reader_pool

    class SleepingEngine:  # takes the same time for every batch, and no CPU time
        pace = ON_GPU

        def __init__(self, model):
            pass

        def overlap(self, windows):
            return 0

        def run(self, rows):
            time.sleep(seconds)
            return [np.stack([row.is_context, row.is_context]).astype(np.float32) for row in rows]

    reader_pool.OwnEngine = SleepingEngine
settings = Settings(models=tuple(options.pop("models", ())), folder=folder and Path(folder), **options)
serve(settings, "127.0.0.1", 0, lambda address, service: print(address, flush=True))
"""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    repeats: int = 5
    clients: int = 64
    seconds: float = 60.0  # of the section load
    questions: int = 64  # per turn
    pairs: int = 100  # of single requests
    readers: int = 100
    registered: int = 1000
    loads: int = 30
    requests: int = 20_000  # of the section flat
    length: int | None = None  # most characters of a text


QUICK = Sizes(
    repeats=3,
    clients=16,
    seconds=3,
    questions=16,
    pairs=10,
    readers=12,
    registered=40,
    loads=5,
    requests=200,
    length=150,
)
ENCODER = 0.003  # seconds per batch in the section lists
REPEATS = 10  # of a window in the section batching
SHORT = 80  # characters of a text where its length does not matter


class Question(NamedTuple):
    """A request to the server."""

    question: str
    context: str
    model: str | None = None


class Reply(NamedTuple):
    """The response to a question."""

    asked: Question
    status: int
    seconds: float
    body: bytes


@dataclass
class Bench:
    """What all sections share."""

    sizes: Sizes
    folder: Path
    device: str | None
    reader: str | None = None  # None: the packaged one
    texts: list[tuple[str, str]] = field(default_factory=list)  # questions and contexts
    _made: int = 0
    _asked: int = 0

    def questions(
        self, number: int, models: Sequence[str | None] = (None,), *, seed: int = 0, length: int | None = None
    ) -> list[Question]:
        """Return questions about texts that were never sent before; each goes to one of the models at random."""
        choose = random.Random(seed)
        made = []
        for _ in range(number):
            question, context = self.texts[self._asked % len(self.texts)]
            made.append(
                Question(question, f"{context[: length or self.sizes.length]} [{self._asked}]", choose.choice(models))
            )
            self._asked += 1
        return made

    def readers(self, number: int) -> Path:
        """Return a folder with this number of readers; they are links to one copy of each."""
        while self._made < number:
            make_reader(self.folder / "made" / f"reader-{self._made}", seed=self._made)
            self._made += 1
        folder = self.folder / f"readers-{number}"
        if not folder.is_dir():
            folder.mkdir()
            for each in range(number):
                (folder / f"reader-{each}").symlink_to(self.folder / "made" / f"reader-{each}")
        return folder

    @contextlib.contextmanager
    def server(self, **settings: Any) -> Iterator[Server]:
        """Start a server, and stop it at the end."""
        settings = {"queue": 1024, "timeout": 120.0, "device": self.device, **settings}
        if self.reader and "folder" not in settings:
            settings.setdefault("models", [self.reader])
        environment = os.environ | {"LAMELLA_CACHE": str(self.folder / "cache")}
        with (self.folder / "server.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(settings, default=str)],
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
            )  # fmt: skip
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise SystemExit(
                    f"serve: the server did not start:\n{(self.folder / 'server.log').read_text()[-2000:]}"
                )
            server = Server(process.pid, int(address.rpartition(":")[2]))
            server.ask(self.questions(8), 8)
            yield server
        finally:
            process.terminate()
            process.wait()


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    pid: int
    port: int

    @property
    def cpu(self) -> float:
        """CPU seconds that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self) -> dict[str, float]:
        """Return its memory in MiB."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        uss = kib["Private_Clean"] + kib["Private_Dirty"]
        return {"pss": kib["Pss"] / 1024, "uss": uss / 1024, "rss": kib["Rss"] / 1024}

    def ask(self, questions: Iterable[Question], clients: int) -> list[Reply]:
        """Send requests, as many at a time as there are clients; return the replies in the order of their end."""
        return asyncio.run(send(self.port, questions, clients))

    def cpu_of(self, questions: Sequence[Question], clients: int) -> float:
        """Return the CPU seconds per question; every one must be answered."""
        before = self.cpu
        check(self.ask(questions, clients))
        return (self.cpu - before) / len(questions)

    def rate_of(self, questions: Sequence[Question], clients: int) -> float:
        """Return the answers per second; every question must be answered."""
        began = time.perf_counter()
        check(self.ask(questions, clients))
        return len(questions) / (time.perf_counter() - began)


async def send(port: int, questions: Iterable[Question], clients: int) -> list[Reply]:
    """Send each question when a client is free."""
    waiting = iter(questions)
    replies: list[Reply] = []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for asked in waiting:
            body = json.dumps({"question": asked.question, "context": asked.context, "model": asked.model}).encode()
            began = time.perf_counter()
            status, answer = await exchange(reader, writer, "POST", "/v1/ask", body)
            replies.append(Reply(asked, status, time.perf_counter() - began, answer))
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return replies


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: bytes
) -> tuple[int, bytes]:
    """Send one request over an open connection; return the status and the body of its response."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


def make_reader(folder: Path, *, seed: int) -> None:
    """Write the packaged reader with noise added to its tensors."""
    source, noise = READERS / DEFAULT_READER, np.random.default_rng(seed)
    tensors = {
        name: (tensor + NOISE * tensor.std() * noise.standard_normal(tensor.shape)).astype(tensor.dtype)
        for name, tensor in load_file(source / MODEL_WEIGHTS).items()
    }
    weights = save(tensors, {"format": "pt"})
    folder.mkdir(parents=True)
    (folder / MODEL_WEIGHTS).write_bytes(weights)
    config = read_json(source / MODEL_CONFIG) | {"weights_sha256": hashlib.sha256(weights).hexdigest()}
    write_json(folder / MODEL_CONFIG, config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())


# Sections


def load(bench: Bench) -> dict[str, Any]:
    """Let many clients ask for a while; compare every answer with the Reader's."""
    sizes, reader = bench.sizes, Reader.load()
    questions = bench.questions(2 * sizes.clients)
    expected = {asked: reader.ask(asked.question, asked.context).to_json() for asked in questions}
    with bench.server() as server:
        until = time.perf_counter() + sizes.seconds
        own, before = time.process_time(), server.cpu
        replies = server.ask(
            itertools.takewhile(lambda _: time.perf_counter() < until, itertools.cycle(questions)), sizes.clients
        )
        seconds, clients_cpu, cpu = time.perf_counter() - until + sizes.seconds, time.process_time() - own, server.cpu
    errors = sum(reply.status != 200 for reply in replies)
    differences = [difference(reply, expected[reply.asked]) for reply in replies if reply.status == 200]
    different = sum(each is None for each in differences)
    numbers = [each for each in differences if each is not None]
    return {
        "clients": sizes.clients, "seconds": seconds, "requests": len(replies), "errors": errors,
        "different": different, "largest_difference": max(numbers, default=None),
        "per_second": len(replies) / seconds, "latency": percentiles(replies),
        "cpu_server": cpu - before, "cpu_clients": clients_cpu,
        "goal": "no error, no answer that differs from the Reader's", "met": not errors and not different,
    }  # fmt: skip


def overhead(bench: Bench) -> dict[str, Any]:
    """Compare CPU seconds per question: server under load, and Reader."""
    reader, sizes = Reader.load(device=bench.device), bench.sizes
    ours, peer, clients, flops = [], [], [], []
    with bench.server() as server:
        for turn in range(sizes.repeats + 1):
            questions = bench.questions(sizes.questions)
            began = time.process_time()
            reader.ask([asked.question for asked in questions], [asked.context for asked in questions])
            alone, middle = time.process_time() - began, time.process_time()
            served = server.cpu_of(questions, sizes.clients)
            if turn:  # the first opens sessions
                ours.append(served * 1000)
                peer.append(alone * 1000 / len(questions))
                clients.append((time.process_time() - middle) * 1000 / len(questions))
                flops.append(reading_flops([(asked.question, asked.context) for asked in questions]) / len(questions))
    return {
        **compare(ours, peer, "CPU ms per question", most=1.10),
        "work": {
            "flops": statistics.median(flops),
            "precision": getattr(reader.model, "precision", "fp32"),
            "of": "the products of the encoder",
        },
        "cpu_clients": statistics.median(clients),
    }


def one(bench: Bench) -> dict[str, Any]:
    """Compare the latency of single requests with Reader.ask."""
    reader, sizes = Reader.load(device=bench.device), bench.sizes
    ours, peer = [], []

    async def measure(port: int) -> None:
        connection = await asyncio.open_connection("127.0.0.1", port)
        for asked in bench.questions(sizes.pairs + 10):
            body = json.dumps({"question": asked.question, "context": asked.context}).encode()
            began = time.perf_counter()
            reader.ask(asked.question, asked.context)
            middle = time.perf_counter()
            status, _ = await exchange(*connection, "POST", "/v1/ask", body)
            ours.append((time.perf_counter() - middle) * 1000)
            peer.append((middle - began) * 1000)
            if status != 200:
                raise SystemExit(f"serve: one: got status {status}")
        connection[1].close()

    with bench.server() as server:
        asyncio.run(measure(server.port))
    ours, peer = ours[10:], peer[10:]  # the first open sessions
    more = [own - other for own, other in zip(ours, peer, strict=True)]
    middle = statistics.median(more)
    return {
        **compare(ours, peer, "ms"), "more": middle, "more_quartiles": statistics.quantiles(more, n=4),
        "goal": "at most 5 ms more", "met": middle <= 5,
    }  # fmt: skip


def batching(bench: Bench) -> dict[str, Any]:
    """Compare answers per second with and without batches."""
    least = 1.25 if bench.device in (None, "cpu") else 6.0
    with bench.server() as server, bench.server(batch_tokens=1) as one_by_one:
        long, short = (compare_batches(bench, server, one_by_one, length) for length in (None, SHORT))
    goal = {"goal": f"at least {least:g} x", "met": long["ratio"] >= least}
    return {**long, **goal, "clients": bench.sizes.clients, "short": short}


def compare_batches(bench: Bench, server: Server, one_by_one: Server, length: int | None) -> dict[str, Any]:
    """Compare two servers on texts of at most this length; a server with one client, and the encoder, in turns."""
    sizes = bench.sizes
    on_cpu = bench.device in (None, "cpu")
    number = sizes.questions
    if not on_cpu:
        number *= 16  # about a second: in a few rounds of all clients, opening their connections would count
    elif length is not None:
        number *= 4
    encoder = Encoder.load(bench, length) if on_cpu else None
    ours, peer, alone, cpu, windows = [], [], [], [], []
    for turn in range(sizes.repeats + 1):
        before = server.cpu, one_by_one.cpu
        rates = [each.rate_of(bench.questions(number, length=length), sizes.clients) for each in (server, one_by_one)]
        used = one_by_one.cpu - before[1], server.cpu - before[0]
        single = server.rate_of(bench.questions(number // 4, length=length), 1)
        if encoder:
            windows.append(encoder.measure())
        if turn:
            ours.append(rates[0])
            peer.append(rates[1])
            alone.append(single)
            cpu.append(used[0] / used[1])
    compared = {
        **compare(ours, peer, "answers per second"),
        "one_client": compare(ours, alone, "answers per second"),
        "answers_per_cpu_second": statistics.median(cpu),
    }
    if encoder:
        clock, core = (min(each) for each in zip(*windows, strict=True))
        compared |= {"most": clock / (core / encoder.shared.threads), "tokens": encoder.tokens}
    return compared


def lists(bench: Bench) -> dict[str, Any]:
    """Compare many clients with one, where the encoder takes no CPU time."""
    many, one, computed_alone, cpu, cpu_alone = [], [], [], [], []
    clients, number, settings = Sizes.clients, 8 * Sizes.questions, {"encoder_seconds": ENCODER, "device": "cpu"}

    def questions(share: int = 1) -> list[Question]:
        return bench.questions(number // share, length=sys.maxsize)  # these numbers depend on the length

    with bench.server(**settings) as server, bench.server(**settings, batch_tokens=1) as one_by_one:
        for turn in range(bench.sizes.repeats + 1):
            used = [server.cpu]
            rates = [server.rate_of(questions(), clients)]
            used.append(server.cpu)
            rates.append(server.rate_of(questions(4), 1))
            used.append(server.cpu)
            rates.append(one_by_one.rate_of(questions(2), clients))
            if turn:
                for found, rate in zip((many, one, computed_alone), rates, strict=True):
                    found.append(rate)
                cpu.append((used[1] - used[0]) * 1000 / number)
                cpu_alone.append((used[2] - used[1]) * 1000 / (number // 4))
    return {
        **compare(many, one, "answers/s", least=6.0),
        "one_by_one": compare(many, computed_alone, "answers/s"),
        "cpu": compare(cpu, cpu_alone, "CPU ms per question"),
        "encoder_ms": ENCODER * 1000,
        "work": {"seconds": tokenising_seconds(questions()), "of": "the tokenizers library on all cores"},
    }


def tokenising_seconds(questions: Sequence[Question]) -> float:
    """Return the seconds per question that the tokenizers library takes for a list of questions and their contexts."""
    plain = without_truncation(load_tokenizer(find_encoder(DEFAULT_ENCODER)))
    texts = [text for asked in questions for text in (asked.question, asked.context)]
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        plain.encode_batch(texts, add_special_tokens=False)
        times.append(time.perf_counter() - began)
    return min(times) / len(questions)


class Encoder(NamedTuple):
    """The encoder of a reader, with a window of a usual length."""

    shared: Any  # a window runs on all cores
    single: Any  # on one
    window: Any
    tokens: int

    @classmethod
    def load(cls, bench: Bench, length: int | None) -> Encoder:
        """Load it twice, and tokenise a text of the benchmark."""
        reader = bench.reader or DEFAULT_READER
        shared, single = (load_model(reader, backend="onnx", threads=threads) for threads in (None, 1))
        asked = bench.questions(1, length=length)[0]
        examples = load_examples([{"question": asked.question, "context": asked.context}]).examples
        window = pad(featurise(examples, shared.tokenizer, shared.windows), np.arange(1))
        for model in (shared, single):
            model.logits(window)
        return cls(shared, single, window, int(window.mask.sum()))

    def measure(self) -> tuple[float, float]:
        """Return the seconds of a window on all cores by the clock, and its CPU seconds on one: the least of several,
        which other work on the machine changes little."""
        clock, cpu = [], []
        for _ in range(REPEATS):
            began = time.perf_counter()
            self.shared.logits(self.window)
            clock.append(time.perf_counter() - began)
            began = time.process_time()
            self.single.logits(self.window)
            cpu.append(time.process_time() - began)
        return min(clock), min(cpu)


def mixed(bench: Bench) -> dict[str, Any]:
    """Compare CPU seconds per question: many readers at random, and one of them."""
    sizes, number = bench.sizes, min(32, bench.sizes.readers)
    names = [f"reader-{each}" for each in range(number)]
    folder, chosen = bench.readers(number), random.Random(0)
    ours, peer = [], []
    with bench.server(folder=folder) as server:
        for turn in range(sizes.repeats + 1):
            many = server.cpu_of(bench.questions(sizes.questions, names, seed=turn), sizes.clients)
            single = server.cpu_of(bench.questions(sizes.questions, [chosen.choice(names)]), sizes.clients)
            if turn:
                ours.append(many * 1000)
                peer.append(single * 1000)
        asked = bench.questions(sizes.questions, names)
        replies = server.ask(asked, sizes.clients)
    different = 0
    for name in names[:: max(1, number // 4)]:
        reader = Reader.load(folder / name)
        for reply in (reply for reply in check(replies) if reply.asked.model == name):
            expected = reader.ask(reply.asked.question, reply.asked.context).to_json()
            different += difference(reply, expected) is None
    return {**compare(ours, peer, "CPU ms per question", most=1.3), "readers": number, "different": different}


def memory(bench: Bench) -> dict[str, Any]:
    """Compare the memory of servers: after questions to many readers, and to one."""
    sizes = bench.sizes
    names = [f"reader-{each}" for each in range(sizes.readers)]
    one, all_names = bench.readers(1), bench.readers(sizes.readers)
    sides: dict[str, tuple[Sequence[str | None], dict[str, Any]]] = {
        "ours": (names, {"folder": all_names}),
        "peer": (names[:1], {"folder": one}),
        "alone": ((None,), {}),
        "resident": (names, {"folder": all_names, "memory": 1 << 30}),
    }
    pss: dict[str, list[float]] = {side: [] for side in sides}
    uss: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(3):
        for side, (models, settings) in sides.items():
            with bench.server(**settings) as server:
                for model in models:
                    check(server.ask(bench.questions(1, [model], length=SHORT), 1))
                check(server.ask(bench.questions(sizes.questions, models), sizes.clients))
                time.sleep(3)  # freed memory is returned after a moment
                measured = server.memory()
                pss[side].append(measured["pss"])
                uss[side].append(measured["uss"])
    return {
        **compare(pss["ours"], pss["peer"], "MiB PSS", most=1.3),
        "uss": compare(uss["ours"], uss["peer"], "MiB USS"),
        "alone": compare(pss["ours"], pss["alone"], "MiB PSS"),
        "resident": compare(pss["resident"], pss["peer"], "MiB PSS"),
        "readers": sizes.readers,
    }


def registered(bench: Bench) -> dict[str, Any]:
    """Compare the latency of a server with many readers with that of one with a few."""
    sizes = bench.sizes
    names = [f"reader-{each}" for each in range(sizes.registered)]
    weights = [1 / (rank + 1) for rank in range(sizes.registered)]
    found: dict[str, list[float]] = {"ours": [], "peer": [], "zipf": []}
    with bench.server(folder=bench.readers(sizes.registered)) as many, bench.server(folder=bench.readers(8)) as few:
        for turn in range(sizes.repeats + 1):
            popular = random.Random(turn).choices(names, weights, k=sizes.questions)
            zipf = [asked for name in popular for asked in bench.questions(1, [name])]
            turns = {
                "ours": (many, bench.questions(sizes.questions, names, seed=turn)),
                "peer": (few, bench.questions(sizes.questions, names[:8], seed=turn)),
                "zipf": (many, zipf),
            }
            for side, (server, questions) in turns.items():
                replies = check(server.ask(questions, 8))
                if turn:
                    found[side].append(percentiles(replies)["p95"])
    return {
        **compare(found["ours"], found["peer"], "ms, 95th percentile", most=2.0),
        "zipf": compare(found["zipf"], found["peer"], "ms, 95th percentile"),
        "readers": sizes.registered, "clients": 8,
    }  # fmt: skip


def loading(bench: Bench) -> dict[str, Any]:
    """Load readers while others are asked."""
    sizes, number = bench.sizes, bench.sizes.readers
    idle, busy, ours, peer = [], [], [], []
    cpu = 0.0

    async def load_some(port: int, first: int, times: list[float]) -> None:
        connection = await asyncio.open_connection("127.0.0.1", port)
        for each in range(first, first + sizes.loads):
            began = time.perf_counter()
            status, body = await exchange(*connection, "POST", f"/v1/models/reader-{each % number}", b"")
            times.append((time.perf_counter() - began) * 1000)
            if status != 200:
                raise SystemExit(f"serve: loading: {body.decode()}")
            await asyncio.sleep(0.05)
        connection[1].close()

    async def with_loads(port: int, questions: Sequence[Question], first: int) -> list[Reply]:
        replies, _ = await asyncio.gather(send(port, questions, 8), load_some(port, first, busy))
        return replies

    with bench.server(folder=bench.readers(number)) as server:
        asyncio.run(load_some(server.port, 0, []))  # opens the encoder
        for turn in range(3):
            first = turn * sizes.loads
            before = server.cpu
            asyncio.run(load_some(server.port, first, idle))
            cpu += server.cpu - before
            peer.append(percentiles(check(server.ask(bench.questions(sizes.questions), 8)))["p95"])
            replies = asyncio.run(with_loads(server.port, bench.questions(sizes.questions), first))
            ours.append(percentiles(check(replies))["p95"])
    middle = statistics.median(idle)
    return {
        **compare(ours, peer, "ms, 95th percentile of other requests"),
        "load_ms": middle, "load_ms_quartiles": statistics.quantiles(idle, n=4), "load_cpu_ms": cpu * 1000 / len(idle),
        "load_ms_busy": statistics.median(busy), "load_ms_busy_quartiles": statistics.quantiles(busy, n=4),
        "goal": "a load of at most 100 ms", "met": middle <= 100,
    }  # fmt: skip


def flat(bench: Bench) -> dict[str, Any]:
    """Watch the memory over many requests; their texts are short, differ, and soon fill the cache of tokens."""
    sizes = bench.sizes
    names = [None, *(f"reader-{each}" for each in range(8))]
    found = []
    with bench.server(folder=bench.readers(8), token_cache=1 << 20) as server:
        for step in range(20):
            check(server.ask(bench.questions(sizes.requests // 20, names, seed=step, length=SHORT), 16))
            found.append(server.memory()["pss"])
    return {**compare(found[15:], found[5:10], "MiB PSS", most=1.05), "pss": found, "requests": sizes.requests}


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    each.__name__: each for each in (load, overhead, one, batching, lists, mixed, memory, registered, loading, flat)
}


# Numbers


def compare(
    ours: Sequence[float], peer: Sequence[float], unit: str, *, most: float | None = None, least: float | None = None
) -> dict[str, Any]:
    """Return the median ratio, its spread, and whether it meets its goal."""
    ratios = [own / other for own, other in zip(ours, peer, strict=True)]
    ratio = statistics.median(ratios)
    compared = {
        "ratio": ratio, "spread": [min(ratios), max(ratios)], "ours": statistics.median(ours),
        "peer": statistics.median(peer), "unit": unit, "repeats": len(ratios),
    }  # fmt: skip
    if most is not None:
        compared |= {"goal": f"at most {most:g} x", "met": ratio <= most}
    if least is not None:
        compared |= {"goal": f"at least {least:g} x", "met": ratio >= least}
    return compared


def check(replies: Sequence[Reply]) -> Sequence[Reply]:
    """Check that every question was answered."""
    if wrong := next((reply for reply in replies if reply.status != 200), None):
        raise SystemExit(f"serve: expected status 200, got {wrong.status}: {wrong.body.decode()}")
    return replies


def difference(reply: Reply, expected: dict[str, Any]) -> float | None:
    """Return the largest difference of a number from the Reader's; None if another answer was given."""
    (found,) = json.loads(reply.body)["results"]
    answers = [*zip(found["answers"], expected["answers"], strict=True)]
    if found["no_answer"] != expected["no_answer"]:
        return None
    if any(own[key] != other[key] for own, other in answers for key in ("answer", "start", "end")):
        return None
    numbers = [abs(own[key] - other[key]) for own, other in answers for key in ("probability", "score")]
    return max([*numbers, abs(found["na_prob"] - expected["na_prob"])])


def percentiles(replies: Sequence[Reply]) -> dict[str, float]:
    """Return percentiles of the latency in milliseconds."""
    times = sorted(reply.seconds * 1000 for reply in replies)
    return {f"p{share}": times[min(len(times) - 1, len(times) * share // 100)] for share in (50, 95, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"one or more of: {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="small sizes and three repeats")
    parser.add_argument("--device", help="device of the server and the Reader, such as cuda; default: the CPU")
    parser.add_argument("--reader", help="reader of the section batching; default: the packaged one")
    arguments = parser.parse_args()
    if unknown := set(arguments.sections) - set(SECTIONS):
        parser.error(f"expected sections among {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}")
    if arguments.reader and arguments.sections != ["batching"]:
        parser.error("--reader: expected the section batching alone")

    measured: dict[str, Any] = {}
    if arguments.out and arguments.out.is_file():
        measured = read_json(arguments.out).get("sections", {})
    with tempfile.TemporaryDirectory(prefix="lamella-serve-") as folder:
        os.environ["LAMELLA_CACHE"] = str(Path(folder) / "cache")
        bench = Bench(QUICK if arguments.quick else Sizes(), Path(folder), arguments.device, arguments.reader)
        bench.texts = [(each.question, each.context.text) for each in load_examples("demo:dev").examples]
        for name in arguments.sections or SECTIONS:
            before = os.getloadavg()[0]
            measured[name] = {**SECTIONS[name](bench), "load": [before, os.getloadavg()[0]]}
            print_section(name, measured[name])
            if arguments.out:
                write_json(arguments.out, summarise(measured))
    if under_load := measured.get("overhead"):
        low, high = under_load["spread"]
        text = f"{under_load['ratio']:.2f} x the CPU seconds of the bare Reader ({low:.2f} to {high:.2f})"
        print(f"serve: {text}")


def summarise(measured: dict[str, Any]) -> dict[str, Any]:
    """Return all sections, and as the main number the overhead under load, or that of the only section."""
    keys = ("ratio", "spread", "ours", "peer", "unit", "work")
    ordered = {name: measured[name] for name in SECTIONS if name in measured}
    main_section = next(iter(ordered.values())) if len(ordered) == 1 else ordered.get("overhead", {})
    main_number = {key: main_section[key] for key in keys if key in main_section}
    return {**main_number, "sections": ordered, "versions": library_versions()}


def print_section(name: str, found: dict[str, Any]) -> None:
    """Print the numbers of a section on a line."""

    def show(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(show, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} {show(each)}" for key, each in value.items()) + "}"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    print(f"{name}: " + "; ".join(f"{key} {show(value)}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
