"""What tests of shared encoders have in common: heads to share one with, and why a model cannot."""

from __future__ import annotations

from typing import Any

from lamella.encoder.sources import Source
from lamella.graph.support import NoGraphError
from lamella.models.shared_encoder import SharedEncoders

HEADS: dict[str, Any] = {
    "last": {"mixer": "last"},
    "weighed layers": {"mixer": "scalar_mix"},
    "attention over layers": {"mixer": {"name": "multiplicative", "shared": False}},
    "low layers": {"mixer": "dot", "layers": [0, 1]},
    "a block": {"mixer": "encoder_block"},
    "two branches": {"mixer": ["last", {"name": "compress", "size": 12}], "beside": "inception"},
    "filters from the question": {"mixer": {"name": "context_cnn", "filters_from": "question"}},
    "answerability": {"mixer": "average", "task": "answerability"},
}
POOLED = {"mixer": "first_last", "task": "answerability", "layers": "pooled+all"}


def why_not_shared(source: Source) -> str | None:
    """Return why a model needs an encoder of its own on onnxruntime; None if it can share one."""
    try:
        SharedEncoders(threads=1).reader(source)
    except NoGraphError as reason:
        return str(reason)
    return None
