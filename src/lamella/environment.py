"""Record the environment that a result depends on: versions, platform, processor."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import Any

from lamella.version import __version__

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "onnxruntime",
)
CPU_INFO = Path("/proc/cpuinfo")  # where Linux describes the processor and lists its features


def environment() -> dict[str, Any]:
    """Return what a result depends on besides its configuration."""
    return {
        "lamella": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "libraries": library_versions(),
        "arguments": _arguments(),
    }


def _arguments() -> list[str]:
    """Return the arguments of the command line; not those of other programs, which may be secret."""
    program = Path(sys.argv[0])
    return sys.argv[1:] if program.stem == "lamella" or program.parts[-2:] == ("lamella", "__main__.py") else []


def library_versions() -> dict[str, str]:
    """Return the installed versions of the main libraries, without importing them."""
    from importlib import metadata  # here, as it is slow to import

    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def has_amx() -> bool:
    """Return whether the CPU multiplies bf16 matrices with AMX; False on systems other than Linux.

    Questions per second of torch on two of Intel's cores: fp32 38, bf16 with AMX 95 to 123, and 27 with AVX512_BF16
    alone (docs/decisions/0034-graphs.md).
    """
    return "amx_bf16" in _cpu_info().split()


def has_fast_bf16() -> bool:
    """Return whether torch on this CPU is faster in bf16 than in fp32; False on systems other than Linux.

    That is so with AMX, and on AMD's processors with AVX512_BF16. On Intel's without AMX it is not (see `has_amx`).
    """
    found = _cpu_info()
    return has_amx() or ("AuthenticAMD" in found and "avx512_bf16" in found.split())


def has_int8_products() -> bool:
    """Return whether an x86 CPU multiplies unsigned by signed bytes without overflow; False on other systems.

    There a graph in int8 has one scale per token, which was twice as fast per product with AVX512_VNNI; AVX_VNNI and
    AMX compute the same (docs/decisions/0036-int8.md).
    """
    return not {"avx512_vnni", "avx_vnni", "amx_int8"}.isdisjoint(_cpu_info().split())


def _processor() -> str:
    for line in _cpu_info().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _cpu_info() -> str:
    with contextlib.suppress(OSError):
        return CPU_INFO.read_text(encoding="utf-8", errors="replace")
    return ""
