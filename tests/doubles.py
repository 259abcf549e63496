"""Small stand-ins for tests: the tiny encoders of `lamella.testing`, random readers, and the examples of `samples`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamella.data.file_formats.formats import read
from lamella.files import file_sha256
from lamella.models.model import ReaderModel
from lamella.testing.tiny import (
    AWKWARD,
    DEPTH,
    FAMILIES,
    HIDDEN,
    corpus,
    save_tiny_encoder,
    tiny_batch,
    tiny_config,
    tiny_encoder,
    tiny_run_config,
    tiny_tokenizer,
)
from samples import example, examples_about

__all__ = [
    "AWKWARD",
    "DEPTH",
    "FAMILIES",
    "HIDDEN",
    "corpus",
    "example",
    "examples_about",
    "record_weights",
    "save_tiny_encoder",
    "tiny_batch",
    "tiny_config",
    "tiny_encoder",
    "tiny_model",
    "tiny_run_config",
    "tiny_tokenizer",
    "write_short_questions",
]


def tiny_model(
    family: str = "bert", *, seed: int = 0, dropout: bool = True, layers: int = DEPTH, **sections: Any
) -> ReaderModel:
    """Return a random reader in evaluation mode."""
    options: dict[str, Any] = {} if layers == DEPTH else {"num_hidden_layers": layers}
    if not dropout:
        options |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ReaderModel(tiny_encoder(family, seed=seed, **options), tiny_run_config(**sections)).eval()


def record_weights(folder: Path) -> None:
    """Record the hash of a model's tensors, as if it had been saved with them; other folders have none to record."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if "weights_sha256" in config:
        config["weights_sha256"] = file_sha256(folder / "model.safetensors")
        path.write_text(json.dumps(config), encoding="utf-8")


def write_short_questions(path: Path) -> Path:
    """Write bundled questions with a sentence or two around their answers, so that many steps take seconds."""
    lines = []
    for original in read("demo:train").examples[::13]:
        middle = original.answers[0].begin_char if original.answers else len(original.context.text) // 2
        begin = original.context.text.rfind(" ", 0, max(0, middle - 60)) + 1
        text = original.context.text[begin : begin + 200]
        answers = [{"text": a.text, "answer_start": a.begin_char - begin} for a in original.answers[:1]]
        lines.append(
            json.dumps({"id": original.id, "question": original.question, "context": text, "answers": answers})
        )
    path.write_text("\n".join(lines))
    return path
