"""The record of which model gave some answers."""

from __future__ import annotations

from typing import Any

from lamella.encoder.sources import MODEL_CONFIG, Source, hash_weights, is_saved_model
from lamella.files import read_json
from lamella.inference.protocols import QAModel

LEARNT_FROM = ("train", "fraction", "start", "teachers")  # of the facts of a model


def model_record(name: str, model: QAModel) -> dict[str, Any]:
    """Which model answers: its name as given, a hash of its weights; of ours also the base and what it learnt from."""
    folder = next(iter(model.folders), None)
    weights = [] if folder is None else Source(name, folder, "folder").weights or sorted(folder.glob("*.onnx"))
    record: dict[str, Any] = {"name": name, **({"sha256": hash_weights(weights)} if weights else {})}
    if folder is None or not is_saved_model(folder):
        return record
    config = read_json(folder / MODEL_CONFIG)
    facts = {key: value for key, value in config.get("facts", {}).items() if key in LEARNT_FROM}
    return {**record, "base": config["base"], "tuning": config["tuning"], "facts": facts}
