"""What 8 and 32 heads cost that learn from one pass of a frozen encoder, beside one head and beside 8 runs.

    python benchmarks/fanout.py [--quick] [--out fanout.json]

Every pass is the training loop itself on the CPU in fp32, with all-MiniLM-L6-v2 frozen, over windows of the bundled
set: each batch is encoded once, and each learner then does its forward, backward, clipping, AdamW and schedule. The
heads are those of the pooling and attention families but `encoder_block`: eight of them, and the same with four seeds.
The peer is eight passes of one learner each, reckoned from one that is timed; which of the eight that is changes from
round to round. What a run does besides its pass (loading, cutting windows) would count eight times as well and is left
out. `ratio` is the time of eight runs over that of one run with eight learners.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator

from lamella.config import DEFAULT_ENCODER, EncoderOptions, LearnerOptions, RunConfig, TrainingOptions
from lamella.data.dataset import load_examples
from lamella.data.features import Features, featurise
from lamella.encoder.pretrained import LoadedEncoder, load_encoder
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.models.model import ReaderModel
from lamella.training.learner import Learner, Record, make_learner
from lamella.training.loop import fit
from lamella.training.processes import Processes
from lamella.training.steps import Position, Steps

FROZEN = EncoderOptions(tuning={"name": "frozen"})
MIXERS = (
    {"name": "last"},
    {"name": "average"},
    {"name": "first_last"},
    {"name": "scalar_mix"},
    {"name": "scalar_mix", "shared": True, "normalise": "softmax"},
    {"name": "dot"},
    {"name": "multiplicative"},
    {"name": "multiplicative", "shared": False},
)
EIGHT = tuple(LearnerOptions(mixer=[mixer], learning_rate=1e-3) for mixer in MIXERS)
MANY = tuple(one.model_copy(update={"seed": seed}) for seed in range(4) for one in EIGHT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="8 steps, 3 rounds")
    arguments = parser.parse_args()
    steps, rounds = (8, 3) if arguments.quick else (24, 8)

    base = load_encoder(DEFAULT_ENCODER)
    features = featurise(load_examples(["demo:train"]).examples, base.tokenizer, RunConfig().windows)
    options = TrainingOptions(max_steps=steps, precision="fp32", evaluate_every=1000, checkpoint_every=1000)
    train(MANY, base, features, options.model_copy(update={"max_steps": 1}))  # warm
    times: dict[int, list[float]] = {1: [], len(EIGHT): [], len(MANY): []}
    for turn in range(rounds):  # in turn, so that a busy moment touches all alike
        place = turn % len(EIGHT)
        alone, losses_alone = train(EIGHT[place : place + 1], base, features, options)
        together, losses = train(EIGHT, base, features, options)
        many, _ = train(MANY, base, features, options)
        agree(losses_alone[0], losses[place])
        for count, seconds in zip(times, (alone, together, many), strict=True):
            times[count].append(seconds)

    of_one, of_eight, of_many = times.values()
    ratios = [len(EIGHT) * one / eight for one, eight in zip(of_one, of_eight, strict=True)]
    costs = {
        "cost_of_8": [eight / one for one, eight in zip(of_one, of_eight, strict=True)],
        "cost_of_32": [many / one for one, many in zip(of_one, of_many, strict=True)],
    }
    result = {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": statistics.median(of_eight),
        "peer": len(EIGHT) * statistics.median(of_one),
        **{name: statistics.median(cost) for name, cost in costs.items()},
        "cost_spreads": {name: [min(cost), max(cost)] for name, cost in costs.items()},
        "seconds": {str(count): seconds for count, seconds in times.items()},
        "steps": steps,
        "batch_size": options.batch_size,
        "mean_length": float(features.lengths.mean()),
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
    }
    if arguments.out:
        write_json(arguments.out, result)
    for count, seconds in times.items():
        a_step = 1000 * statistics.median(seconds) / steps
        print(f"{count:>2} heads: {a_step:6.0f} ms a step of {options.batch_size} windows")
    for count, (name, cost) in zip((len(EIGHT), len(MANY)), costs.items(), strict=True):
        print(f"{count:>2} heads cost {result[name]:.2f} x what one costs ({min(cost):.2f} to {max(cost):.2f})")
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    print(f"fanout: 8 heads in one pass cost {result['ratio']:.1f} x less than 8 runs ({spread})")


def train(
    wanted: Sequence[LearnerOptions], base: LoadedEncoder, features: Features, options: TrainingOptions
) -> tuple[float, list[list[float]]]:
    """How long one pass takes, and the losses of each of its learners."""
    steps = Steps(lambda epoch: features, options, [1.0])
    learners = []
    for number, one in enumerate(wanted):
        torch.manual_seed(one.seed)
        model = ReaderModel(base, RunConfig(encoder=FROZEN, learner=one))
        learners.append(make_learner(model, one, steps.total, name=str(number)))
    watcher = Losses()
    processes = Processes(Accelerator(cpu=True))
    began = time.perf_counter()
    fit(learners, steps, options, processes, watcher, encode=learners[0].model.encode)
    return time.perf_counter() - began, [watcher.losses[one.name] for one in learners]


class Losses:
    """Watches a pass for its losses alone."""

    def __init__(self) -> None:
        self.losses: dict[str, list[float]] = {}

    def log(self, learner: Learner, records: Sequence[Record]) -> None:
        self.losses.setdefault(learner.name, []).extend(record["loss"] for record in records)

    def evaluate(self, learners: Sequence[Learner], step: int, epoch: float) -> None: ...

    def keep(self, learners: Sequence[Learner], epoch: float) -> None: ...

    def checkpoint(self, position: Position) -> None: ...


def agree(alone: list[float], together: list[float]) -> None:
    """A cheaper wrong answer is no result: among others, a learner becomes what it becomes alone."""
    if any(abs(one - other) > 1e-6 for one, other in zip(alone, together, strict=True)):
        raise SystemExit(f"losses differ: {alone} alone, {together} among others")


if __name__ == "__main__":
    main()
