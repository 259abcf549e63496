"""The list of all benchmarks: what each compares, its goal, and how `make bench` runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any


@dataclass(frozen=True)
class Goal:
    """The ratio that was set as a goal, and where it is stated."""

    ratio: float
    source: str = ""  # a page, relative to docs/
    at_most: bool = False
    of: Callable[[dict[str, Any]], float] = itemgetter("ratio")  # the number in the result that it is about
    what: str = ""  # that number in words, if it is not the ratio
    where: Callable[[dict[str, Any]], str] | None = None  # the data that gave it

    def met(self, ratio: float) -> bool:
        return ratio <= self.ratio if self.at_most else ratio >= self.ratio


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, as `make bench` runs it and the page describes it."""

    name: str
    what: str
    peer: str
    ratio: str  # how to read it
    script: str = ""  # default: the name
    arguments: tuple[str, ...] = ()
    goal: Goal | None = None
    goals_at: str = ""  # where the page has several goals instead of one
    remark: str = ""  # why a goal is missed, or what to know about the number

    @property
    def file(self) -> str:
        return f"{self.script or self.name}.py"


def slowest_stage(result: dict[str, Any]) -> float:
    """Return the time of the slowest stage, as a share of the encoder's."""
    return max(map(_slowest, result["data"].values()))


def slowest_data(result: dict[str, Any]) -> str:
    """Return the data with the slowest stage."""
    return f"on `{max(result['data'], key=lambda name: _slowest(result['data'][name]))}`"


def _slowest(data: dict[str, Any]) -> float:
    return max(float(stage["of_encoder"]) for stage in data["stages"].values())


# Of the ways to run a reader, by backend and precision: times the questions per second of the pipeline.
WAYS = {("torch", "fp32"): 1.8, ("onnx", "fp32"): 2.5, ("onnx", "int8"): 4.0, ("torch", "bf16"): 3.5}

FASTER, COST = "times as fast", "times the cost"

BENCHMARKS = (
    Benchmark(
        "ask", "one question from the command line", "import torch and transformers, load the encoder", COST,
        goal=Goal(1.3, at_most=True),
    ),
    Benchmark(
        "inference", "questions on a CPU, as `auto` answers them",
        "the pipeline of transformers 4.57, in its own environment", FASTER, goals_at="#what-auto-chooses",
    ),
    Benchmark(
        "train_speed", "full fine-tuning", "`transformers.Trainer`, windows padded to 384 tokens", FASTER,
        goal=Goal(4),
        remark="Dropout and the optimiser count as our time, and not as products. A padded window has 2.4 times the "
        "operations of ours. Where both run at about the same share of the limit, as on ARM (52 and 47 %), "
        "little more can be gained.",
    ),
    Benchmark(
        "fanout", "8 heads in one pass of a frozen encoder", "8 passes with one head each, computed from one", FASTER,
        goal=Goal(6),
    ),
    Benchmark(
        "cache", "an epoch of a head on cached hidden states", "the same epoch with the encoder", FASTER, goal=Goal(10)
    ),
    Benchmark(
        "mixers", "the slowest cheap mixer", "the forward pass of BERT-base", FASTER,
        goal=Goal(4, "concepts/heads.md#what-a-mixer-costs"),
    ),
    Benchmark(
        "encoders", "a training step of DeBERTa", "the model of transformers", FASTER,
        arguments=("--kinds", "training", "--tokens", "128"),
    ),
    Benchmark(
        "encoders-modernbert", "a batch of ModernBERT with padding", "the model of transformers", FASTER,
        script="encoders", arguments=("--family", "modernbert", "--kinds", "batch", "--shortest", "0.9"),
    ),
    Benchmark("featurise", "cutting questions into labelled windows", "the method of `run_qa.py`", FASTER),
    Benchmark("decode", "decoding logits into n-best lists", "the loop of `run_qa.py`", FASTER, goal=Goal(5)),
    Benchmark("metric", "scoring by exact match and F1", "the same definitions as plain loops", FASTER),
    Benchmark(
        "stages", "predict, evaluate and train beside an encoder of 5,000 windows/s", "that encoder alone", FASTER,
        goal=Goal(
            1, "decisions/0057-stages.md", at_most=True, of=slowest_stage, what="the slowest stage over the encoder: ",
            where=slowest_data,
        ),
        remark="The slowest command on the bundled set, repeated to 1,500 questions; the goal is about each stage "
        "alone. It is missed on HotpotQA: with ten contexts per question, cutting windows takes 2.6 times such an "
        "encoder's time, three quarters of it in the tokenizers library ([57](decisions/0057-stages.md)).",
    ),
    Benchmark("documents", "a question about a folder of documents", "a question about the passages it reads", COST),
    Benchmark(
        "serve", "a question to the server, 16 clients", "`Reader.ask` with a list", COST,
        arguments=("overhead", "one", "batching", "mixed"),
        goal=Goal(1.1, "decisions/0044-deployment.md", at_most=True),
    ),
    Benchmark(
        "serve-lists", "64 clients of a server whose encoder sleeps 3 ms per batch", "one client", FASTER,
        script="serve", arguments=("lists",), goal=Goal(6, "decisions/0063-question-lists.md"),
        remark="One Python process speaks HTTP, cuts windows and decodes. In a profile, its event loop holds the "
        "interpreter's lock three quarters of the time that it is held, so other threads wait. A single client got "
        "faster, too, by not waiting for a batch that nobody joins ([63](decisions/0063-question-lists.md)).",
    ),
    Benchmark(
        "shared_encoder", "8 readers on one encoder, mixed", "one merged reader", COST,
        goal=Goal(1.3, "decisions/0044-deployment.md", at_most=True),
    ),
    Benchmark(
        "shared_machine", "training 8 heads beside two other programs per core", "a thread per core", FASTER,
        remark="More in [a shared machine](#a-shared-machine).",
    ),
    Benchmark(
        "growth", "64 heads in one pass of a frozen encoder", "64 passes with one head each, computed from one", FASTER,
        remark="The curves are in [growth](#growth-of-time-and-memory).",
    ),
)  # fmt: skip

# Scripts that `make bench` does not run, and why.
APART = {
    "long_run": "measures memory over 45 minutes; [above](#memory-over-a-long-time)",
    "trust": "tries broken inputs, and counts what becomes of them",
    "rounded_base": "measures answers and not time, with a model that was trained on a rounded copy of its encoder",
}
