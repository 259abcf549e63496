"""Time 8 and 32 heads in one pass of a frozen encoder, against one head and against 8 separate runs.

    python benchmarks/fanout.py [--quick] [--out fanout.json]

Each pass is the real training loop on the CPU in fp32, with all-MiniLM-L6-v2 frozen, on windows of the bundled set:
each batch is encoded once, then each learner does its forward, backward, clipping, AdamW and schedule. The eight heads
are the pooling and attention mixers except `encoder_block`; the 32 are the same with four seeds. The peer is eight
passes with one learner each, computed from one that is timed; each round times another one. The rest of a run (loading,
cutting windows) would count eight times too and is left out. `ratio` is the time of eight runs divided by the time of
one run with eight learners.
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
from lamella.data.windows.features import Features, featurise
from lamella.encoder.pretrained import LoadedEncoder
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.training.fitting.learner import Learner, Record, make_learner
from lamella.training.fitting.loop import fit
from lamella.training.fitting.processes import Processes
from lamella.training.fitting.steps import Position, Steps
from suite.work import encoder_flops

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
MANY = tuple(learner.model_copy(update={"seed": seed}) for seed in range(4) for learner in EIGHT)


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
    for turn in range(rounds):  # in turn, so that load affects all alike
        place = turn % len(EIGHT)
        alone, losses_alone = train(EIGHT[place : place + 1], base, features, options)
        together, losses = train(EIGHT, base, features, options)
        many, _ = train(MANY, base, features, options)
        agree(losses_alone[0], losses[place])
        for count, seconds in zip(times, (alone, together, many), strict=True):
            times[count].append(seconds)

    of_one, of_eight, of_many = times.values()
    ratios = [len(EIGHT) * single / eight for single, eight in zip(of_one, of_eight, strict=True)]
    costs = {
        "cost_of_8": [eight / single for single, eight in zip(of_one, of_eight, strict=True)],
        "cost_of_32": [many / single for single, many in zip(of_one, of_many, strict=True)],
    }
    result = {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": statistics.median(of_eight),
        "peer": len(EIGHT) * statistics.median(of_one),
        "unit": "s",
        "work": {
            "flops": steps * options.batch_size * encoder_flops(features.lengths) / len(features),
            "threads": torch.get_num_threads(),
            "of": "the products of the encoder, once",
        },
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
        milliseconds = 1000 * statistics.median(seconds) / steps
        print(f"{count:>2} heads: {milliseconds:6.0f} ms per step of {options.batch_size} windows")
    for count, (name, cost) in zip((len(EIGHT), len(MANY)), costs.items(), strict=True):
        print(f"{count:>2} heads cost {result[name]:.2f} x the time of one ({min(cost):.2f} to {max(cost):.2f})")
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    print(f"fanout: 8 heads in one pass cost {result['ratio']:.1f} x less than 8 runs ({spread})")


def train(
    learner_options: Sequence[LearnerOptions],
    base: LoadedEncoder,
    features: Features,
    options: TrainingOptions,
    tuning: str = "frozen",
) -> tuple[float, list[list[float]]]:
    """Return the seconds of one pass, and the losses of each of its learners; only a frozen encoder can be shared."""
    steps = Steps(lambda epoch: features, options, [1.0])
    learners = []
    for number, learner in enumerate(learner_options):
        torch.manual_seed(learner.seed)
        model = ReaderModel(base, RunConfig(encoder=EncoderOptions(tuning={"name": tuning}), learner=learner))
        learners.append(make_learner(model, learner, steps.total, name=str(number)))
    watcher = Losses()
    processes = Processes(Accelerator(cpu=True))
    began = time.perf_counter()
    encode = learners[0].model.encode if tuning == "frozen" else None
    fit(learners, steps, options, processes, watcher, encode=encode)
    return time.perf_counter() - began, [watcher.losses[learner.name] for learner in learners]


class Losses:
    """Collects the losses of a pass and does nothing else."""

    def __init__(self) -> None:
        self.losses: dict[str, list[float]] = {}

    def write_history(self, learner: Learner, records: Sequence[Record]) -> None:
        self.losses.setdefault(learner.name, []).extend(record["loss"] for record in records)

    def evaluate(self, learners: Sequence[Learner], step: int, epoch: float) -> None: ...

    def save_models(self, learners: Sequence[Learner], epoch: float) -> None: ...

    def save_checkpoint(self, position: Position) -> None: ...


def agree(alone: list[float], together: list[float]) -> None:
    """Check that a learner trains the same among others as alone: a cheaper wrong answer is no result."""
    if any(abs(a - b) > 1e-6 for a, b in zip(alone, together, strict=True)):
        raise SystemExit(f"losses differ: {alone} alone, {together} among others")


if __name__ == "__main__":
    main()
