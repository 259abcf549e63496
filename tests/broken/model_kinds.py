"""Kinds of models: saved models, encoders, LoRA folders of peft, exported graphs, and the calibrations in them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from broken.damage import Damage
from broken.data_kinds import TITAN, squad
from broken.json_damage import broken_json, dump_json
from broken.kind import Files, Folders, Kind, damage_all, damage_file
from broken.oracle import run_command
from tiny_reader import HIDDEN, save_tiny_bert, save_tiny_checkpoint, save_tiny_reader

QUESTION = ("Who discovered Titan?", "--text", TITAN)
CALIBRATIONS: dict[str, dict[str, Any]] = {
    "temperature": {"method": "temperature", "temperature": 2.0, "bias": 0.5, "answerable": 0.5},
    "isotonic": {"method": "isotonic", "odds": [-1.0, 0.0, 2.0], "probability": [0.1, 0.5, 0.9]},
    "features": {
        "method": "features",
        "bias": 0.1,
        "features": [{"name": "null_odds", "mean": 0.0, "scale": 1.0, "weight": 1.0}],
        "fitted_on": {"data": "dev.json", "questions": 100, "sha256": "0" * 64},
    },
}
PEFT_PREFIX = "base_model.model."
PEFT_OPTIONS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "QUESTION_ANS",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.1,
    "alpha_pattern": {"encoder.layer.0.attention.self.value": 16},
    "rank_pattern": {},
    "target_modules": ["query", "value"],
    "modules_to_save": ["qa_outputs"],
    "init_lora_weights": True,
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "revision": None,
}


def _ask(folders: Folders) -> Iterator[list[object]]:
    yield ["ask", *QUESTION, "--model", folders.inputs, "--json"]


def _saved_models() -> Kind:
    def sound(folder: Path, beside: Path) -> None:
        save_tiny_bert(beside / "encoder")
        folder.rmdir()
        save_tiny_reader(folder, beside / "encoder")
        (folder / "README.md").unlink()

    return Kind("saved models", sound, damage_all, _ask)


def _tampered_models() -> Kind:
    """Return saved models with damaged weights whose hash fits them: as somebody would make who means harm."""

    def sound(folder: Path, beside: Path) -> None:
        save_tiny_bert(beside / "encoder")
        save_tiny_reader(folder / "reader", beside / "encoder")
        (folder / "model.safetensors").write_bytes((folder / "reader" / "model.safetensors").read_bytes())

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_file("model.safetensors", files["model.safetensors"], structure="safetensors")

    def commands(folders: Folders) -> Iterator[list[object]]:
        for model in tampered_model(folders):
            yield ["ask", *QUESTION, "--model", model, "--json"]

    return Kind("tampered models", sound, damages, commands)


def tampered_model(folders: Folders) -> Iterator[Path]:
    """Yield the model with the damaged weights, unless there are none."""
    weights, model = folders.inputs / "model.safetensors", folders.output.with_name("tampered")
    if not weights.is_file():
        return
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(folders.inputs / "reader", model)
    config = json.loads((model / "config.json").read_bytes())
    config["weights_sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(weights.read_bytes())
    yield model


REDIRECTS: dict[str, dict[str, Any]] = {
    "other weights": {"transformers_weights": "other.safetensors"},
    "weights outside": {"transformers_weights": "../beside/encoder/model.safetensors"},
    "a pickle": {"transformers_weights": "pytorch_model.bin"},
    "a kernel of the hub": {"_attn_implementation": "owner/kernel"},
    "code of the hub": {"auto_map": {"AutoModel": "owner/repository--modeling.Model"}},
    "code beside it": {"auto_map": {"AutoModel": "modeling.Model", "AutoConfig": "configuration.Config"}},
    "quantised weights": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
}


def _encoders() -> Kind:
    """Return encoders below a saved model that is sound."""

    def sound(folder: Path, beside: Path) -> None:
        folder.rmdir()
        save_tiny_bert(folder)
        shutil.copytree(folder, beside / "encoder")
        save_tiny_reader(beside / "reader", beside / "encoder")
        (beside / "data.json").write_text(json.dumps(squad()))

    def damages(files: Files) -> Iterator[Damage]:
        yield from damage_all(files)
        config = json.loads(files["config.json"])
        for name, options in REDIRECTS.items():
            yield Damage(f"config.json names {name}", "config.json", dump_json({**config, **options}))

    def commands(folders: Folders) -> Iterator[list[object]]:
        yield ["ask", *QUESTION, "--model", reader_above(folders)]
        yield ["check", folders.beside / "data.json", "--encoder", folders.inputs]

    return Kind("encoders", sound, damages, commands, reports=True)


def reader_above(folders: Folders) -> Path:
    """Return a sound reader on the damaged encoder."""
    reader = folders.output.with_name("reader")
    shutil.rmtree(reader, ignore_errors=True)
    shutil.copytree(folders.beside / "reader", reader)
    config = json.loads((reader / "config.json").read_bytes())
    config["base"]["name"] = str(folders.inputs)
    (reader / "config.json").write_text(json.dumps(config))
    return reader


def _checkpoints() -> Kind:
    """Return question answering models as transformers saves them."""

    def sound(folder: Path, _: Path) -> None:
        folder.rmdir()
        save_tiny_checkpoint(folder)

    def damages(files: Files) -> Iterator[Damage]:
        for file in ("config.json", "tokenizer_config.json"):
            yield from damage_file(file, files[file], structure="json")

    return Kind("checkpoints", sound, damages, _ask)


def _peft_folders() -> Kind:
    """Return LoRA folders as peft saves them."""

    def sound(folder: Path, beside: Path) -> None:
        save_tiny_bert(beside / "encoder")
        random = np.random.default_rng(0)
        tensors = {f"{PEFT_PREFIX}qa_outputs.weight": random.normal(0, 1, (2, HIDDEN)).astype(np.float32)}
        tensors[f"{PEFT_PREFIX}qa_outputs.bias"] = np.zeros(2, np.float32)
        for name in ("query", "value"):
            path = f"{PEFT_PREFIX}bert.encoder.layer.0.attention.self.{name}"
            tensors[f"{path}.lora_A.weight"] = random.normal(0, 1, (4, HIDDEN)).astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = random.normal(0, 1, (HIDDEN, 4)).astype(np.float32)
        (folder / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        config = {"base_model_name_or_path": str(beside / "encoder"), **PEFT_OPTIONS}
        (folder / "adapter_config.json").write_text(json.dumps(config))

    return Kind("peft folders", sound, damage_all, _ask, needs=["torch"])


def _exported_models() -> Kind:
    def sound(folder: Path, beside: Path) -> None:
        folder.rmdir()
        save_tiny_bert(beside / "encoder")
        save_tiny_reader(beside / "reader", beside / "encoder")
        outcome = run_command(["export", beside / "reader", "--onnx", folder])
        assert outcome.code == 0, outcome

    return Kind("exported models", sound, damage_all, _ask)


def _calibrations() -> Kind:
    def sound(folder: Path, beside: Path) -> None:
        save_tiny_bert(beside / "encoder")
        save_tiny_reader(beside / "reader", beside / "encoder")
        (beside / "data.json").write_text(json.dumps(squad()))
        (folder / "calibration.json").write_text(json.dumps(CALIBRATIONS["temperature"]))

    def damages(files: Files) -> Iterator[Damage]:
        for method, calibration in CALIBRATIONS.items():
            for name, changed in broken_json(calibration):
                yield Damage(f"{method}: {name}", "calibration.json", changed)

    def commands(folders: Folders) -> Iterator[list[object]]:
        model = calibrated_reader(folders)
        yield ["ask", *QUESTION, "--model", model, "--answer", "balanced"]
        yield ["predict", folders.beside / "data.json", "--model", model, "--out", folders.output]

    return Kind("calibrations", sound, damages, commands)


def calibrated_reader(folders: Folders) -> Path:
    """Return a reader with the damaged calibration in its config.json, as text: it may be no JSON."""
    model = folders.output.with_name("reader")
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(folders.beside / "reader", model)
    config = json.loads((model / "config.json").read_bytes())
    config["decoding"]["calibration"] = "\ue000"
    text = (folders.inputs / "calibration.json").read_bytes().decode("utf-8", "surrogatepass")
    (model / "config.json").write_bytes(dump_json(config, text))
    return model


def model_kinds() -> Iterator[Kind]:
    """Yield the kinds of models."""
    yield _saved_models()
    yield _tampered_models()
    yield _encoders()
    yield _checkpoints()
    yield _peft_folders()
    yield _exported_models()
    yield _calibrations()
