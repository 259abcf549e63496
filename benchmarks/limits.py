"""Measure the limits of this machine: matrix products, memory traffic, and the start of a process.

    python benchmarks/limits.py [--quick] [--out limits.json]

`flops` are floating-point operations per second of a large matrix product by precision and number of threads: torch in
fp32 and bf16, onnxruntime with uint8 times int8. `bytes` are bytes per second of a copy larger than the caches, read
and written bytes both counted. `start` are the seconds in which Python starts and imports numpy, onnxruntime and
tokenizers. All are the best of several repeats: a limit is what the machine can do when nothing disturbs it.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from lamella.environment import environment, library_versions
from lamella.files import write_json
from lamella.graph.onnx_file import Node, Value, encode_graph

SIZES = (256, 1024)  # rows and columns of the matrices; the large ones only if the processor is fast enough
SLOW = 1.0  # seconds of a product that is not tried
COPIED = 1 << 28  # bytes, more than any cache holds
START = "import numpy, onnxruntime, tokenizers"
FEATURES = Path("/proc/cpuinfo")
# Instructions for matrix products, as the kernel of Linux names them on ARM and x86.
PRODUCTS = ("asimddp", "i8mm", "bf16", "sve", "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16")

Product = Callable[[int, int], Callable[[], object]]  # from its size and the number of threads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the numbers to this json file")
    parser.add_argument("--quick", action="store_true", help="3 repeats instead of 10")
    arguments = parser.parse_args()
    limits = measure(3 if arguments.quick else 10)
    if arguments.out:
        write_json(arguments.out, limits)
    for precision, by_threads in limits["flops"].items():
        print(f"{precision}: " + ", ".join(f"{rate / 1e9:.0f} GFLOP/s on {n}" for n, rate in by_threads.items()))
    print("memory: " + ", ".join(f"{rate / 1e9:.1f} GB/s on {n}" for n, rate in limits["bytes"].items()))
    print(f"start of a process: {limits['start']:.2f} s")


def describe() -> dict[str, Any]:
    """Return what the machine is, without measuring anything."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "processor": environment()["processor"],
        "instructions": instructions(),
    }


def measure(repeats: int) -> dict[str, Any]:
    """Return the limits, for one thread and for all cores."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    counts = sorted({1, cores})
    products = {"fp32": fp32_product, "bf16": bf16_product, "int8": int8_product}
    flops = {
        precision: {str(threads): rate(make, threads, repeats) for threads in counts}
        for precision, make in products.items()
    }
    traffic = {str(threads): 2 * COPIED / best(copy(threads), repeats) for threads in counts}
    start = best(lambda: subprocess.run([sys.executable, "-c", START], check=True), repeats)
    return {
        **describe(),
        "flops": flops,
        "bytes": traffic,
        "start": start,
        "load": [load, os.getloadavg()[0]],
        "versions": library_versions(),
    }


def rate(make: Product, threads: int, repeats: int) -> float:
    """Return the operations per second of the largest product that does not take too long."""
    found = 0.0
    for size in SIZES:
        if not found or 2 * size**3 / found < SLOW:
            found = 2 * size**3 / best(make(size, threads), repeats)
    return found


def best(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest repeat; the first is not timed."""
    work()
    return min(seconds(work) for _ in range(repeats))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def fp32_product(size: int, threads: int) -> Callable[[], object]:
    return torch_product(size, threads, torch.float32)


def bf16_product(size: int, threads: int) -> Callable[[], object]:
    return torch_product(size, threads, torch.bfloat16)


def torch_product(size: int, threads: int, dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    torch.set_num_threads(threads)
    return lambda: a @ b


def int8_product(size: int, threads: int) -> Callable[[], object]:
    """Multiply in a graph of one node, the product that quantised models are made of."""
    random = np.random.default_rng(0)
    weights = random.integers(-127, 127, (size, size), dtype=np.int8)
    node = Node("product", "MatMulInteger", ["x", "w"], ["y"])
    graph = encode_graph(
        [node], [Value("x", "uint8", (size, size))], [Value("y", "int32", (size, size))], {"w": weights}
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    x = random.integers(0, 255, (size, size), dtype=np.uint8)
    return lambda: session.run(None, {"x": x})


def copy(threads: int) -> Callable[[], object]:
    source, target = (torch.ones(COPIED // 4) for _ in range(2))
    torch.set_num_threads(threads)
    return lambda: target.copy_(source)


def instructions() -> list[str]:
    """Return the instructions for matrix products that the processor has; empty on systems other than Linux."""
    found = set(FEATURES.read_text(encoding="utf-8", errors="replace").split()) if FEATURES.exists() else set()
    return [name for name in PRODUCTS if name in found]


if __name__ == "__main__":
    main()
