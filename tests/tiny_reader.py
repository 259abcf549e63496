"""A tiny BERT reader, written without torch: its folders are as transformers and Lamella write them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from lamella.config import RunConfig
from lamella.models.card import Contents, model_card
from lamella.models.facts import Facts
from lamella.models.saved import SavedModel
from lamella.validation import check_config
from samples import plain_tokenizer

HIDDEN, HEADS, INNER = 32, 4, 48
CLS, FAR = 2, 10.0  # the first token of every window, and the size of its embedding
WINDOWS = {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24}


def save_tiny_bert(folder: Path, *, layers: int = 1, seed: int = 0) -> Path:
    """Write a random encoder with the tokenizer of `samples`, and return its folder."""
    words = plain_tokenizer().backend_tokenizer.get_vocab_size()
    sizes = {"vocab_size": words, "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS}
    sizes |= {"intermediate_size": INNER, "max_position_embeddings": 128, "type_vocab_size": 2}
    random = np.random.default_rng(seed)
    tensors: dict[str, NDArray[np.float32]] = {}

    def matrix(name: str, outputs: int, inputs: int) -> None:
        tensors[f"{name}.weight"] = random.normal(0, inputs**-0.5, (outputs, inputs)).astype(np.float32)

    def linear(name: str, outputs: int, inputs: int) -> None:
        matrix(name, outputs, inputs)
        tensors[f"{name}.bias"] = np.zeros(outputs, np.float32)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = np.ones(HIDDEN, np.float32), np.zeros(HIDDEN, np.float32)

    for kind, rows in (("word", words), ("position", 128), ("token_type", 2)):
        matrix(f"embeddings.{kind}_embeddings", rows, HIDDEN)
    tensors["embeddings.word_embeddings.weight"][CLS] = np.eye(1, HIDDEN) * FAR  # so that heads can recognise it
    norm("embeddings.LayerNorm")
    for layer in (f"encoder.layer.{number}" for number in range(layers)):
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            linear(f"{layer}.attention.{name}", HIDDEN, HIDDEN)
        linear(f"{layer}.intermediate.dense", INNER, HIDDEN)
        linear(f"{layer}.output.dense", HIDDEN, INNER)
        norm(f"{layer}.attention.output.LayerNorm")
        norm(f"{layer}.output.LayerNorm")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    _write_json(folder / "config.json", {"model_type": "bert", "architectures": ["BertModel"], **sizes})
    _save_tokenizer(folder)
    return folder


def save_tiny_reader(folder: Path, encoder: Path, *, seed: int = 0, abstains: float = 0.0, **sections: Any) -> Path:
    """Write a reader with a random head on a frozen encoder, and return its folder.

    The more it `abstains`, the higher are its null odds: 0 gives about -10, 4 about 10.
    """
    output = np.random.default_rng(seed).normal(0, 1, (2, HIDDEN)).astype(np.float32)
    output[:, 0] += abstains
    weights = save({"head.task.q": output, "head.task.b": np.zeros(2, np.float32)}, {"format": "pt"})
    config = check_config(
        {"windows": WINDOWS, "encoder": {"name": str(encoder), "tuning": "frozen"}, **sections}, where="tests"
    )
    saved = _saved(encoder, config, hashlib.sha256(weights).hexdigest())
    contents = Contents(str(folder), True, 2 * HIDDEN + 2, 10_000, len(weights))
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    _write_json(folder / "config.json", saved.to_json())
    (folder / "README.md").write_text(model_card(saved, contents), encoding="utf-8")
    _save_tokenizer(folder)
    return folder


def save_tiny_checkpoint(folder: Path) -> Path:
    """Write a random question answering model as transformers saves it, and return its folder."""
    save_tiny_bert(folder)
    tensors = {f"bert.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    tensors["qa_outputs.weight"], tensors["qa_outputs.bias"] = np.ones((2, HIDDEN), np.float32), np.zeros(2, np.float32)
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    for file, options in {
        "config.json": {"architectures": ["BertForQuestionAnswering"]},
        "tokenizer_config.json": {"model_max_length": 128},
    }.items():
        _write_json(folder / file, {**json.loads((folder / file).read_bytes()), **options})
    return folder


def _saved(encoder: Path, config: RunConfig, weights_sha256: str) -> SavedModel:
    base = hashlib.sha256((encoder / "model.safetensors").read_bytes()).hexdigest()
    return SavedModel(str(encoder), base, None, config, (), Facts(), weights_sha256)


def _save_tokenizer(folder: Path) -> None:
    plain_tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table), encoding="utf-8")
