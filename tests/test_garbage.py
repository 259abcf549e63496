"""A process that serves leaves what it has loaded out of garbage collection."""

from __future__ import annotations

import subprocess
import sys

import pytest

SPARE = """
import gc, weakref
from lamella.garbage import spare_existing_objects
class Node: pass
def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)
old = cycle()
spare_existing_objects()
assert old() is None, "what was garbage already stays in memory"
assert gc.get_freeze_count() > 1000
new = cycle()
gc.collect()
assert new() is None, "new garbage stays in memory"
assert gc.isenabled() and gc.get_threshold()[0] > 700
"""
SERVE = """
import gc, os
from lamella.serve.http_server import serve
from lamella.serve.settings import Settings
serve(Settings(), "127.0.0.1", 0, lambda address, service: os._exit(0 if gc.get_freeze_count() else 3))
"""


@pytest.mark.parametrize("code", [SPARE, SERVE], ids=["spare", "serve"])
def test_existing_objects_are_spared(code: str) -> None:
    if code == SERVE:
        pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
