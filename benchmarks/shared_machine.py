"""Time training while other programs use the cores, with the number of threads that Lamella chooses and with all.

    python benchmarks/shared_machine.py [--quick] [--programs 4] [--out shared_machine.json]

Other programs are processes that spin, by default two per core; without them, the machine is as idle as you leave it.
The peer is the same training with as many threads as there are cores, which is torch's default; ours has the number
that `lamella train` would choose there (`threads`). Both run in turn. Two trainings: `heads`, eight heads in one pass
of the frozen all-MiniLM-L6-v2, with many small operations; and `full`, fine-tuning of all of it, with few large ones.
`wall` and `cpu` are the peer's seconds by the clock and of the processor, divided by ours. `ratio` is `wall` of `heads`
beside other programs; `idle` must be about 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fanout import EIGHT, train
from lamella.config import DEFAULT_ENCODER, LearnerOptions, RunConfig, TrainingOptions
from lamella.cores import CoreMeter, usable_cores
from lamella.data.dataset import load_examples
from lamella.data.windows.features import featurise
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.models.base_encoder import load_encoder
from suite.programs import other_programs
from suite.work import encoder_flops

FULL = (LearnerOptions(learning_rate=1e-4),)
SETTLE = 1.0  # seconds in which the use of the cores is measured, as in the preparation of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="1 step of 4 windows, 3 repeats")
    parser.add_argument(
        "--programs", type=int, default=2 * usable_cores(), help="other programs (default: %(default)s)"
    )
    arguments = parser.parse_args()
    steps, batch, repeats = (1, 4, 3) if arguments.quick else (6, 8, 5)

    base = load_encoder(DEFAULT_ENCODER)
    features = featurise(load_examples(["demo:train"]).examples, base.tokenizer, RunConfig().windows)
    options = TrainingOptions(
        max_steps=steps, batch_size=batch, precision="fp32", evaluate_every=1000, checkpoint_every=1000
    )
    jobs: dict[str, Callable[[], object]] = {
        "heads": lambda: train(EIGHT, base, features, options),
        "full": lambda: train(FULL, load_encoder(DEFAULT_ENCODER), features, options, tuning="full"),
    }
    with other_programs(arguments.programs):
        busy = {name: compare(job, repeats) for name, job in jobs.items()}
    idle = {name: compare(job, repeats) for name, job in jobs.items()}
    result = {
        **{key: busy["heads"][key] for key in ("ratio", "spread", "ours", "peer")},
        "unit": "s",
        "work": {
            "flops": steps * options.batch_size * encoder_flops(features.lengths) / len(features),
            "of": "the products of the encoder on a core of its own",
        },
        "programs": arguments.programs,
        "cores": usable_cores(),
        "busy": busy,
        "idle": idle,
        "repeats": repeats,
        "versions": library_versions(),
    }
    if arguments.out:
        write_json(arguments.out, result)
    for name in jobs:
        for place, rows in (("busy", busy), ("idle", idle)):
            row = rows[name]
            print(
                f"{name}, {place}: {row['threads']} threads: {row['ours']:.2f} s, all: {row['peer']:.2f} s; wall "
                f"{row['ratio']:.2f} x, CPU {row['cpu']:.2f} x"
            )
    low, high = result["spread"]
    print(f"shared_machine: {result['ratio']:.1f} x as fast as with a thread per core ({low:.1f} to {high:.1f})")


def compare(job: Callable[[], object], repeats: int) -> dict[str, Any]:
    """Run a job in turn with the chosen number of threads and with a thread per core."""
    meter = CoreMeter()
    time.sleep(SETTLE)
    threads = meter.free_cores()
    counts = {"ours": threads, "peer": usable_cores()}
    wall: dict[str, list[float]] = {who: [] for who in counts}
    cpu: dict[str, list[float]] = {who: [] for who in counts}
    for _ in range(repeats):
        for who, count in counts.items():
            torch.set_num_threads(count)
            began, worked = time.perf_counter(), time.process_time()
            job()
            wall[who].append(time.perf_counter() - began)
            cpu[who].append(time.process_time() - worked)
    ratios = [peer / ours for ours, peer in zip(wall["ours"], wall["peer"], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "cpu": statistics.median(peer / ours for ours, peer in zip(cpu["ours"], cpu["peer"], strict=True)),
        "ours": statistics.median(wall["ours"]),
        "peer": statistics.median(wall["peer"]),
        "threads": threads,
    }


if __name__ == "__main__":
    main()
