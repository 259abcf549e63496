"""Time every mixer against the encoder: forward of a head, forward of a frozen BERT-base.

    python benchmarks/mixers.py [--quick] [--out mixers.json]

The encoder has random weights (its speed does not depend on them); windows have SQuAD's mean length. `ratio` is the
time of the encoder (the peer) divided by the time of the most expensive cheap mixer (pooling, dot, multiplicative,
compress): 4 or more means that each of them takes at most a quarter of the encoder's time.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from lamella import registry
from lamella.data.windows.batches import Batch
from lamella.encoder.encoder import Encoder
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.heads.head import Head
from lamella.version import __version__

DEPTH, HIDDEN, TOKENS = 12, 768, 170
CHEAP = ("last", "average", "first_last", "scalar_mix", "dot", "multiplicative", "compress")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="2 windows, 3 repeats")
    arguments.add_argument("--out", type=Path, help="write the numbers to this json file")
    options = arguments.parse_args()
    repeats, windows = (3, 2) if options.quick else (7, 8)

    torch.manual_seed(0)
    config = BertConfig(hidden_size=HIDDEN, num_hidden_layers=DEPTH, vocab_size=1000)
    encoder = Encoder(BertModel(config, add_pooling_layer=False).eval().requires_grad_(False))
    batch = make_batch(windows)
    hidden = encoder(batch, range(1, DEPTH + 1))
    heads = {
        name: Head(DEPTH, HIDDEN, mixer=[{"name": name}], task={"name": "span"}).eval()
        for name in registry.names("mixer")
    }
    jobs: dict[str, Callable[[], object]] = {"encoder": lambda: encoder(batch, range(1, DEPTH + 1))}
    for name, head in heads.items():
        read = tuple(hidden.layers[layer - 1] for layer in head.layers)
        jobs[name] = lambda head=head, read=read: head(type(hidden)(read, hidden.mask, hidden.is_context))
    times = measure(jobs, repeats)

    of_encoder = times.pop("encoder")
    shares = {name: [mine / its for mine, its in zip(own, of_encoder, strict=True)] for name, own in times.items()}
    for name, share in sorted(shares.items(), key=lambda item: statistics.median(item[1])):
        low, high = 100 * min(share), 100 * max(share)
        print(f"{name:<16} {100 * statistics.median(share):7.1f} %   ({low:.1f} to {high:.1f})")
    slowest = [max(times[name][turn] for name in CHEAP) for turn in range(repeats)]
    ratios = [its / mine for mine, its in zip(slowest, of_encoder, strict=True)]
    result = {
        "repeats": repeats,
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ours": statistics.median(slowest),
        "peer": statistics.median(of_encoder),
        "unit": "s",
        "work": {
            "bytes": sum(layer.nbytes for layer in hidden.layers),
            "threads": torch.get_num_threads(),
            "of": "read the hidden states once",
        },
        "seconds": {name: statistics.median(times[name]) for name in heads},
        "share_of_encoder": {name: statistics.median(share) for name, share in shares.items()},
        "windows": windows,
        "tokens": TOKENS,
        "threads": torch.get_num_threads(),
        "versions": {"lamella": __version__, "python": platform.python_version(), **library_versions()},
    }
    if options.out:
        write_json(options.out, result)
    spread = f"{min(ratios):.1f} to {max(ratios):.1f}"
    print(f"mixers: the encoder takes {statistics.median(ratios):.1f} x as long as the slowest cheap mixer ({spread})")


def make_batch(windows: int) -> Batch:
    """Make windows without padding: 15 tokens of question, the rest context."""
    ids = torch.randint(5, 1000, (windows, TOKENS))
    real = torch.ones_like(ids, dtype=torch.bool)
    context = real.clone()
    context[:, :15] = False
    zeros = torch.zeros(windows, dtype=torch.int64)
    return Batch(ids, real, context.long(), context, zeros, zeros, zeros.numpy())


def measure(jobs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every job in every round; a round runs all jobs in turn, so that load affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    with torch.inference_mode():
        for job in jobs.values():
            job()  # warm
        for _ in range(repeats):
            for name, job in jobs.items():
                began = time.perf_counter()
                job()
                times[name].append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
