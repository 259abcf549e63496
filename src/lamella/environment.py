"""Record the environment that a result depends on: versions, platform, processor."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
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


def environment() -> dict[str, Any]:
    """Return what a result depends on besides its configuration."""
    return {
        "lamella": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "libraries": library_versions(),
        "arguments": sys.argv[1:],
    }


def library_versions() -> dict[str, str]:
    """Return the installed versions of the main libraries, without importing them."""
    from importlib import metadata  # here, as it is slow to import

    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
