"""Time encoders as Lamella runs them against transformers' own model: training steps, batches, single windows.

    python benchmarks/encoders.py [--family deberta-v2] [--tokens 170] [--shortest 1] [--device cpu] [--quick]
                                  [--out encoders.json]

The encoders have the size of a published one and random weights (speed does not depend on them). Windows have one
length, so that no padding is skipped; `--shortest 0.9` gives a batch the padding that is usual in training, 5 %. Both
run the same batch in turn, in fp32 on a CPU and in bf16 on a GPU. Batches and single windows are run as a reader runs
them. `ratio` is the time of transformers divided by ours, for each kind of step, as the median over the repeats, with
its range; the one of the file is that of the first kind. With OMP_NUM_THREADS=1 it is the time of the processor, which
other programs hardly affect.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lamella.data.windows.batches import Batch
from lamella.encoder.device import autocast
from lamella.encoder.encoder import Encoder
from lamella.encoder.fast_deberta import keep_positions
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.version import __version__

KINDS = ("training", "batch", "single")
SMALL = {"vocab_size": 1000, "hidden_size": 384, "num_hidden_layers": 12, "intermediate_size": 1536}
SIZES: dict[str, dict[str, Any]] = {
    "bert": {**SMALL, "num_attention_heads": 12},  # e5-small
    "modernbert": {  # ModernBERT-base, with 6 of its 22 layers
        "vocab_size": 1000,
        "num_hidden_layers": 6,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "deberta-v2": {  # DeBERTa-v3-xsmall
        **SMALL,
        "num_attention_heads": 6,
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=SIZES, default="deberta-v2")
    parser.add_argument("--tokens", type=int, default=170, help="length of a window (170: the mean of SQuAD)")
    parser.add_argument(
        "--shortest", type=float, default=1.0, help="length of the shortest window, as a share of the longest"
    )
    parser.add_argument("--batch", type=int, default=16, help="windows per batch")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what to time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="2 windows per batch, 3 repeats")
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    options = parser.parse_args()
    repeats, windows = (3, 2) if options.quick else (9, options.batch)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModel
    peer = auto.from_config(transformers.AutoConfig.for_model(options.family, **SIZES[options.family]))
    ours = Encoder(copy.deepcopy(peer)).to(options.device)
    peer.to(options.device)

    kinds: dict[str, dict[str, Any]] = {}
    for kind in options.kinds:
        count = 1 if kind == "single" else windows
        batch = make_batch(count, options.tokens, options.shortest).to(torch.device(options.device))
        both = [lambda batch=batch: run_ours(ours, batch), lambda batch=batch: run_peer(peer, batch)]
        ours.train(kind == "training")
        peer.train(kind == "training")
        if kind != "training" and options.family == "deberta-v2":
            keep_positions(ours)  # what loading a reader does
        step = training_step if kind == "training" else inference_step
        times = measure([lambda run=run, step=step: step(run) for run in both], repeats, options.device)
        ratios = [its / mine for mine, its in zip(*times, strict=True)]
        kinds[kind] = {
            "windows": count,
            "ratio": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
            "ours": statistics.median(times[0]),
            "peer": statistics.median(times[1]),
            "flops": (3 if kind == "training" else 1) * forward_flops(peer, batch),
        }
        print(
            f"{options.family} {kind:<9} {statistics.median(ratios):5.2f} x  ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    first = kinds[options.kinds[0]]
    if options.out:
        versions = {"lamella": __version__, "python": platform.python_version(), **library_versions()}
        facts = {name: getattr(options, name) for name in ("family", "tokens", "shortest", "device")}
        write_json(
            options.out,
            {
                **{key: first[key] for key in ("ratio", "spread", "ours", "peer")},
                "unit": "s",
                "work": {
                    "flops": first["flops"],
                    "threads": torch.get_num_threads(),
                    "of": f"the products of transformers' model, {options.kinds[0]}",
                },
                **facts,
                "repeats": repeats,
                "threads": torch.get_num_threads(),
                "kinds": kinds,
                "versions": versions,
            },
        )
    low, high = first["spread"]
    print(f"encoders: {options.kinds[0]}: {first['ratio']:.2f} x as fast as transformers ({low:.2f} to {high:.2f})")


def make_batch(windows: int, tokens: int, shortest: float = 1.0) -> Batch:
    """Make windows with lengths from `shortest` · `tokens` up to `tokens`."""
    ids = torch.randint(5, 1000, (windows, tokens))
    lengths = torch.linspace(tokens, shortest * tokens, windows).round()
    real, zeros = torch.arange(tokens) < lengths[:, None], torch.zeros(windows, dtype=torch.int64)
    return Batch(ids, real, torch.zeros_like(ids), real, zeros, zeros, np.arange(windows))


def run_ours(encoder: Encoder, batch: Batch) -> torch.Tensor:
    with in_precision_of(batch):
        return encoder(batch, [encoder.depth]).layers[0]


def run_peer(model: Any, batch: Batch) -> torch.Tensor:
    with in_precision_of(batch):
        last: torch.Tensor = model(input_ids=batch.input_ids, attention_mask=batch.mask.long()).last_hidden_state
    return last


def forward_flops(model: Any, batch: Batch) -> int:
    """Count the operations of the products, with attention as plain products: the counter cannot see into a kernel."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run_peer(model, batch)
    model.train(was_training)
    return int(counter.get_total_flops())


def in_precision_of(batch: Batch) -> Any:
    device = batch.input_ids.device
    return autocast(device, "bf16" if device.type == "cuda" else "fp32")


def training_step(run: Callable[[], torch.Tensor]) -> None:
    run().square().mean().backward()


def inference_step(run: Callable[[], torch.Tensor]) -> None:
    with torch.inference_mode():
        run()


def measure(jobs: list[Callable[[], None]], repeats: int, device: str) -> list[list[float]]:
    """Return the seconds of every job in every round; a round runs all jobs in turn, so that load affects all alike."""
    times: list[list[float]] = [[] for _ in jobs]
    one_core = device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if one_core else time.perf_counter
    for _ in range(2):
        for job in jobs:
            job()  # warm
    for _ in range(repeats):
        for job, seconds in zip(jobs, times, strict=True):
            wait_for(device)
            began = clock()
            job()
            wait_for(device)
            seconds.append(clock() - began)
    return times


def wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
