"""Time many readers on one encoder in memory, against one reader with its tensors merged into the encoder.

    python benchmarks/shared_encoder.py [--quick] [--device cuda] [--out shared_encoder.json]

The readers are variants of the bundled one with LoRA of rank 26 in every linear layer. The peer answers all windows
with the bundled reader. Ours answers each window with another reader. Both run in turn: on onnxruntime a window per
core, or with `--device` on torch in one padded batch, in bf16 on a GPU. Numbers are CPU seconds, and on a GPU seconds
by the clock. `load` are the milliseconds in which a further reader is loaded, and `one` is our time if all windows
belong to one reader.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from lamella.data.file_formats.formats import read
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import pad
from lamella.encoder.sources import DEFAULT_READER, MODEL_CONFIG, MODEL_WEIGHTS, READERS
from lamella.environment import library_versions
from lamella.files import write_json
from lamella.models.loading import load_model
from lamella.models.names import find_model
from lamella.models.shared_encoder import SharedEncoders
from suite.work import encoder_flops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--readers", type=int, default=32, help="readers on one encoder, and windows (default: 32)")
    parser.add_argument("--device", help="run on torch on this device, such as cuda or cpu (default: onnxruntime)")
    parser.add_argument("--quick", action="store_true", help="8 readers and three repeats instead of seven")
    arguments = parser.parse_args()
    count, repeats = (8, 3) if arguments.quick else (arguments.readers, 7)

    device = arguments.device
    on_gpu = device is not None and not device.startswith("cpu")
    if device is None:
        merged: Any = load_model(READERS / DEFAULT_READER, backend="onnx")
        encoders: Any = SharedEncoders()
    else:
        from lamella.models.torch_encoders import TorchEncoders

        merged = load_model(READERS / DEFAULT_READER, device=device, backend="torch", inference_only=True)
        encoders = TorchEncoders(device)
    measure = clock_seconds if on_gpu else cpu_seconds
    features = featurise(read("demo:dev").examples[:count], merged.tokenizer, merged.windows)
    padded = pad(features, np.arange(count))
    readers: list[Any] = []
    load = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            source = find_model(str(save_variant(Path(folder) / str(number), seed=number)))
            load.append(measure(lambda source=source: readers.append(encoders.reader(source))))  # type: ignore[misc]
    rows = [reader.rows(padded)[number] for number, reader in enumerate(readers)]
    runs: dict[str, Callable[[], Any]] = {
        "peer": lambda: merged.logits(padded),
        "ours": lambda: list(encoders.run(rows)),
        "one": lambda: list(encoders.run(readers[0].rows(padded))),
    }
    begin = os.getloadavg()[0]
    for run in runs.values():
        run()  # not timed: opens sessions and allocates memory
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(measure(run))
    ratios = [ours / peer for ours, peer in zip(seconds["ours"], seconds["peer"], strict=True)]
    result = {
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        **{name: statistics.median(times) for name, times in seconds.items()},
        "unit": "s" if on_gpu else "CPU s",
        "work": {"flops": encoder_flops(features.lengths[:count]), "of": "the products of the encoder"},
        "readers": count,
        "device": device or "onnxruntime",
        "load": 1000 * statistics.median(load[1:]),  # the first opens the encoder
        "load_spread": [1000 * min(load[1:]), 1000 * max(load[1:])],
        "bytes": readers[0].nbytes,
        "machine_load": [begin, os.getloadavg()[0]],
        "repeats": repeats,
        "versions": library_versions(),
    }
    if arguments.out:
        write_json(arguments.out, result)
    unit = "" if on_gpu else "CPU "
    for name, times in seconds.items():
        print(f"{name}: {statistics.median(times):.4f} {unit}s ({min(times):.4f} to {max(times):.4f})")
    print(f"load: {result['load']:.1f} {unit}ms, {readers[0].nbytes / 1e6:.1f} MB per reader")
    least, most = min(ratios), max(ratios)
    print(f"{count} readers mixed take {statistics.median(ratios):.3f} x one merged ({least:.3f} to {most:.3f})")
    print(f"shared_encoder: {statistics.median(ratios):.1f} x one merged reader ({least:.1f} to {most:.1f})")


def save_variant(folder: Path, *, seed: int) -> Path:
    """Write the bundled reader with all its tensors changed a little, and return its folder."""
    shutil.copytree(READERS / DEFAULT_READER, folder)
    random = np.random.default_rng(seed)
    tensors = load_file(folder / MODEL_WEIGHTS)
    changed = {
        name: (tensor * random.normal(1, 0.02, tensor.shape)).astype(tensor.dtype) for name, tensor in tensors.items()
    }
    save_file(changed, folder / MODEL_WEIGHTS)
    config = json.loads((folder / MODEL_CONFIG).read_bytes())
    config["weights_sha256"] = hashlib.sha256((folder / MODEL_WEIGHTS).read_bytes()).hexdigest()
    write_json(folder / MODEL_CONFIG, config)
    return folder


def clock_seconds(run: Callable[[], Any]) -> float:
    """Time by the clock: logits are returned as arrays, so the device has finished."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def cpu_seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


if __name__ == "__main__":
    main()
