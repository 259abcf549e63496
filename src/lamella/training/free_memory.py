"""How much more memory this process may take: on its GPU, or in main memory, within the limits of its container."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import torch

from lamella.errors import UsageError

VARIABLE = "LAMELLA_MEMORY"
NO_LIMIT = "none"
MEMORY_INFO = Path("/proc/meminfo")
# The limit and the use of a control group: version 2, then version 1.
GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that this process may still take on a device; None if that is unknown.

    `$LAMELLA_MEMORY` replaces what the system reports: a number of bytes, such as `8G`, or `none` for no limit.
    """
    given = os.environ.get(VARIABLE, "").strip()
    if given:
        return _parse(given)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    known = [memory for memory in (_available_memory(), _left_in_group()) if memory is not None]
    return min(known, default=None)


def _parse(text: str) -> int | None:
    if text.lower() == NO_LIMIT:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{VARIABLE}: expected a number of bytes, such as 8G, or {NO_LIMIT}, got {text!r}.")
    return int(float(match[1]) * UNITS[match[2].upper()])


def _available_memory() -> int | None:
    """Return the memory that Linux can give without swapping."""
    with contextlib.suppress(OSError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", MEMORY_INFO.read_text(encoding="ascii"), re.MULTILINE)
        return 1024 * int(match[1]) if match else None
    return None


def _left_in_group() -> int | None:
    """Return what is left of the limit of a container, where files that were read count as used, but can be dropped."""
    for limit, used in GROUPS:
        with contextlib.suppress(OSError, ValueError):  # `max`: no limit
            left = int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii"))
            files = re.search(r"^(?:total_)?inactive_file (\d+)", (limit.parent / "memory.stat").read_text(), re.M)
            return max(0, left + (int(files[1]) if files else 0))
    return None
