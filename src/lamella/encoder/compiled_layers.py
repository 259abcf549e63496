"""Compile the layers of an encoder for training on a GPU: what lies between its matrix products runs in few kernels.

All layers of an encoder share the compiled code, for batches of any shape. Evaluation runs the layers as they are.
"""

from __future__ import annotations

import functools
import os
import shutil
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lamella.encoder.encoder import Encoder
from lamella.errors import UsageError


def compile_layers(encoder: Encoder) -> None:
    """Let the layers of an encoder be compiled when they are first trained; their weights stay the same objects."""
    if not _can_compile():
        raise UsageError(
            "training.compile: needs Triton and a C compiler, such as gcc; install them, or set it to false."
        )
    for layer in encoder.layer_modules:
        kind: Any = type(layer)
        layer.__class__ = _compiled(kind)


def _can_compile() -> bool:
    compiler = os.environ.get("CC", "").split()[:1] or ["gcc", "cc", "clang"]
    return find_spec("triton") is not None and any(map(shutil.which, compiler))


@functools.cache
def _compiled(kind: Any) -> Any:
    """Return a class of layers that run compiled in training.

    It is the class that changes, not the layer: a copy of a layer, such as a teacher's, runs with its own weights.
    """
    compiled = torch.compile(kind.forward, dynamic=True)

    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        run = compiled if self.training else kind.forward
        return run(self, *arguments, **options)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
