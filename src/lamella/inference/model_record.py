"""The record of the model that answers, for a run folder."""

from __future__ import annotations

from typing import Any

from lamella.encoder.sources import MODEL_CONFIG, Source, hash_weights, is_saved_model
from lamella.files import read_json
from lamella.inference.protocols import QAModel

PROVENANCE = ("train", "fraction", "start", "teachers", "mean_of")  # keys of a model's facts


def model_record(name: str, model: QAModel, answerable: float | None = None) -> dict[str, Any]:
    """Return the name of a model as given and the hash of its weights; for our own also its base and provenance.

    `answerable` is the share of answerable questions that the model expects.
    """
    folder = next(iter(model.folders), None)
    weights = [] if folder is None else Source(name, folder, "folder").weights or sorted(folder.glob("*.onnx*"))
    record: dict[str, Any] = {"name": name, **({"sha256": hash_weights(weights)} if weights else {})}
    if answerable is not None:
        record["answerable"] = answerable
    if folder is None or not is_saved_model(folder):
        return record
    config = read_json(folder / MODEL_CONFIG)
    facts = {key: value for key, value in config.get("facts", {}).items() if key in PROVENANCE}
    return {**record, "base": config["base"], "tuning": config["tuning"], "facts": facts}
