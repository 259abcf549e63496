"""Time an epoch of a small head on cached hidden states, against running the encoder.

    python benchmarks/cache.py [--quick] [--out cache.json]

A head (`scalar_mix`, `dot`) on the frozen all-MiniLM-L6-v2, in fp32, on the windows of the bundled training set. A
plain loop reads or encodes each batch, then runs the head's forward, backward and AdamW step. `ratio` is live over
cached (fp16) seconds per epoch, for the head that gains less. Both use one thread: with more, threads wait for each
other at every step, and the numbers would measure how busy the machine is. The files have just been written, so they
are read from the page cache, not from the disk. The script also prints the bytes per real token, against a cache that
pads every window to 386 tokens and keeps all layers in fp16, as BERTVision's does.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import torch

from lamella import registry
from lamella.config import DEFAULT_ENCODER, WindowOptions
from lamella.data.dataset import load_examples
from lamella.data.windows.batches import Batch, BucketOrder, collate
from lamella.data.windows.features import Features, featurise
from lamella.encoder.cache import open_cache
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.extraction import write_cache
from lamella.encoder.storage import Storage, round_states
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.heads.head import Head
from lamella.models.base_encoder import load_encoder

HEADS = ("scalar_mix", "dot")
STORAGES: tuple[Storage, ...] = get_args(Storage)
BATCH_SIZE = 16
PADDED_TO = 386
CACHED_EPOCHS = 3  # measured together: a single one is so short that an interruption would dominate it

States = Callable[[Batch, Sequence[int]], HiddenStates]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="48 questions, 3 repeats")
    arguments = parser.parse_args()
    count, repeats = (48, 3) if arguments.quick else (256, 5)

    torch.set_num_threads(1)
    loaded = load_encoder(DEFAULT_ENCODER)
    encoder = loaded.encoder.requires_grad_(False).eval()
    examples = load_examples(["demo:train"]).examples[:count]
    features = featurise(examples, loaded.tokenizer, WindowOptions(max_seq_length=384, doc_stride=128))
    layers = range(1, encoder.depth + 1)
    identity = {"encoder": loaded.name, "sha256": loaded.sha256}
    with tempfile.TemporaryDirectory() as temporary:
        sources: dict[str, States] = {"live": encoder}
        reports = {}
        for storage in STORAGES:
            folder = Path(temporary) / storage
            reports[storage] = write_cache(
                folder, encoder, {"train": features}, layers, identity=identity, storage=storage, log=print
            )
            sources[storage] = open_cache(folder, identity=identity).source(features)
        agree(features, encoder.depth, encoder.hidden_size, sources)
        times = measure(features, encoder.depth, encoder.hidden_size, sources, repeats)

    ratios = {
        (name, storage): [live / own for live, own in zip(times[name, "live"], times[name, storage], strict=True)]
        for name, storage in itertools.product(HEADS, STORAGES)
    }
    worse = [min(ratios[name, "fp16"][turn] for name in HEADS) for turn in range(repeats)]
    slower = min(HEADS, key=lambda name: statistics.median(ratios[name, "fp16"]))
    tokens = len(features.input_ids)
    padded = len(features) * PADDED_TO * (encoder.depth + 1) * encoder.hidden_size * 2 / tokens
    result = {
        "ratio": statistics.median(worse),
        "spread": [min(worse), max(worse)],
        "ours": statistics.median(times[slower, "fp16"]),
        "peer": statistics.median(times[slower, "live"]),
        "unit": "s",
        "work": {
            "bytes": tokens * reports["fp16"].bytes_per_token,
            "of": "read the cached hidden states once",
        },
        "seconds": {f"{name} {source}": statistics.median(own) for (name, source), own in times.items()},
        "ratios": {f"{name} {storage}": statistics.median(own) for (name, storage), own in ratios.items()},
        "bytes_per_token": {storage: report.bytes_per_token for storage, report in reports.items()},
        "bytes_per_token_padded": padded,
        "times_smaller": {storage: padded / report.bytes_per_token for storage, report in reports.items()},
        "relative_error": {storage: max(report.errors.values()) for storage, report in reports.items()},
        "extraction": {storage: report.seconds for storage, report in reports.items()},
        "windows": len(features),
        "tokens": tokens,
        "batch_size": BATCH_SIZE,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "versions": library_versions(),
    }
    if arguments.out:
        write_json(arguments.out, result)
    for (name, storage), own in ratios.items():
        spread = f"({min(own):.1f} to {max(own):.1f})"
        seconds = statistics.median(times[name, storage])
        print(f"{name:<10} {storage}  {statistics.median(own):5.1f} x as fast as live  {spread}  {seconds:.3f} s")
    print(
        f"padded to {PADDED_TO}, fp16, {encoder.depth + 1} layers: {padded:.0f} bytes per real token; "
        f"here, {len(layers)} layers:"
    )
    for storage, report in reports.items():
        smaller, error = padded / report.bytes_per_token, max(report.errors.values())
        print(f"{storage}  {report.bytes_per_token:6.0f} bytes per token  {smaller:4.1f} x smaller  error {error:.1e}")
    print(
        f"cache: an epoch is {result['ratio']:.1f} x as fast as live ({min(worse):.1f} to {max(worse):.1f}), fp16, the "
        f"worse of {' and '.join(HEADS)}; a token {padded / reports['fp16'].bytes_per_token:.1f} x smaller than padded"
    )


def train(features: Features, depth: int, hidden_size: int, mixer: str, states: States) -> list[float]:
    """Train a fresh head for an epoch and return its losses."""
    torch.manual_seed(0)
    head = Head(depth, hidden_size, mixer=[{"name": mixer}], task={"name": "span"})
    loss = registry.build("loss", "cross_entropy")
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3, fused=True)
    losses = []
    for group in BucketOrder(features.lengths, BATCH_SIZE).epoch(0):
        batch = collate(features, group.batches[0])
        value = loss(head.task.choices(head(states(batch, head.layers)), batch), batch)["loss"]
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        losses.append(value.item())
    return losses


def agree(features: Features, depth: int, hidden_size: int, sources: dict[str, States]) -> None:
    """Check that the losses equal those of live states rounded the same way: a faster wrong epoch is no result."""
    computed: dict[bytes, HiddenStates] = {}

    def live(batch: Batch, layers: Sequence[int]) -> HiddenStates:
        key = batch.windows.tobytes()
        if key not in computed:  # all heads read the same layers of the same batches
            computed[key] = sources["live"](batch, layers)
        return computed[key]

    for mixer, storage in itertools.product(HEADS, STORAGES):

        def rounded(batch: Batch, layers: Sequence[int], storage: Storage = storage) -> HiddenStates:
            return round_states(live(batch, layers), storage)

        expected = train(features, depth, hidden_size, mixer, rounded)
        losses = train(features, depth, hidden_size, mixer, sources[storage])
        for live_loss, cached_loss in zip(expected, losses, strict=True):
            if abs(live_loss - cached_loss) > 1e-4 * live_loss:
                raise SystemExit(f"{mixer} from {storage}: expected a loss of {live_loss} as live, got {cached_loss}")


def measure(
    features: Features, depth: int, hidden_size: int, sources: dict[str, States], repeats: int
) -> dict[tuple[str, str], list[float]]:
    """Return the seconds per epoch of each head from each source, taken in turn so that load affects all alike."""
    times: dict[tuple[str, str], list[float]] = {job: [] for job in itertools.product(HEADS, sources)}
    for _ in range(repeats):
        for (mixer, source), own in times.items():
            epochs = 1 if source == "live" else CACHED_EPOCHS
            began = time.perf_counter()
            for _ in range(epochs):
                train(features, depth, hidden_size, mixer, sources[source])
            own.append((time.perf_counter() - began) / epochs)
    return times


if __name__ == "__main__":
    main()
