"""Write a model with LoRA as a folder that peft loads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast

from safetensors.torch import save
from torch import Tensor, nn
from torch.linalg import vector_norm

from lamella.encoder.lora import Lora, change_of, changed_layers
from lamella.encoder.pretrained import quiet
from lamella.encoder.sources import PEFT_CONFIG, PEFT_WEIGHTS, hub_id
from lamella.encoder.tensors import trained_tensors
from lamella.errors import ModelError
from lamella.export.transformers_checkpoint import obstacle
from lamella.files import check_output_folder, new_folder, write_bytes, write_json
from lamella.models.model import ReaderModel
from lamella.models.peft_folder import HEAD, MAGNITUDE, PREFIX, TASK


def save_as_peft(name: str | os.PathLike[str], folder: Path) -> None:
    """Write a model as a LoRA folder for `peft.PeftModel.from_pretrained`; raise an error if it cannot be one.

    The folder holds LoRA, the head and the small parts that were trained too. Window options and the no-answer
    threshold have no place in it.
    """
    check_output_folder(folder)
    model = ReaderModel.from_pretrained(name)
    if reason := _obstacle(model):
        raise ModelError(f"{name}: cannot be written as a LoRA folder of peft: {reason}")
    prefix = f"{model.encoder.model.base_model_prefix}."  # of the encoder in a question answering model
    tensors = {f"{PREFIX}{prefix}{key}": value for key, value in _encoder_tensors(model.encoder.model).items()}
    tensors |= {f"{PREFIX}{HEAD}.weight": model.head.task.q, f"{PREFIX}{HEAD}.bias": model.head.task.b}
    config = _config(model, prefix)
    tokenizer = model.tokenizer
    tokenizer.model_max_length = min(tokenizer.model_max_length, model.encoder.longest_window)
    with new_folder(folder, replace=False) as fresh, quiet():
        write_json(fresh / PEFT_CONFIG, config)
        write_bytes(fresh / PEFT_WEIGHTS, save({key: value.detach().contiguous() for key, value in tensors.items()}))
        tokenizer.save_pretrained(fresh)


def _obstacle(model: ReaderModel) -> str | None:
    """Return what such a folder cannot express about a model, if anything."""
    if reason := obstacle(model):
        return reason
    if model.tuning["name"] != "lora":
        return f"expected the tuning lora, got {model.tuning['name']}."
    if model.tuned_before or len(model.base_folders) > 1:
        return "expected LoRA directly on a pretrained encoder, got a model on another model."
    return None


def _encoder_tensors(encoder: nn.Module) -> dict[str, Tensor]:
    """Return the trained tensors of an encoder under the names of peft, which wraps the layers with LoRA."""
    layers = changed_layers(encoder)
    tensors: dict[str, Tensor] = {}
    for name, value in trained_tensors(encoder).items():
        path, _, kind = name.rpartition(".")
        if not path.endswith(f".{Lora.name}"):
            tensors[f"{path}.base_layer.{kind}" if path in layers else name] = value
    for path, layer in layers.items():
        lora = cast(Lora, change_of(layer))
        a, b = lora.factors()
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b * lora.scale if lora.pissa else b}
        if lora.m is not None:
            tensors[f"{path}.{MAGNITUDE}"] = vector_norm(layer.weight, dim=1) + lora.m
    return tensors


def _config(model: ReaderModel, prefix: str) -> dict[str, Any]:
    tuning, encoder = model.tuning, model.encoder
    layers = changed_layers(encoder.model)
    pissa = tuning.get("init") == "pissa"  # becomes plain LoRA of twice the rank, with the scale in B
    rank = 2 * tuning["rank"] if pissa else tuning["rank"]
    numbered = sorted({re.sub(r"\d+", r"\\d+", re.escape(prefix + path)) for path in layers})
    whole = [HEAD]
    if "layer_norm" in tuning["also"]:
        norms = (path for path, module in encoder.model.named_modules() if isinstance(module, nn.LayerNorm))
        whole += sorted({path.rpartition(".")[2] for path in norms})
    if "token_types" in tuning["also"]:
        whole.append("token_type_embeddings")
    return {
        "peft_type": "LORA",
        "task_type": None if encoder.token_types else TASK,  # with it, peft would ignore token types
        "base_model_name_or_path": hub_id(model.base_name),
        "r": rank,
        "lora_alpha": rank if pissa else tuning["alpha"],
        "lora_dropout": tuning["dropout"],
        "target_modules": "|".join(numbered),
        "modules_to_save": whole,
        "bias": "all" if "bias" in tuning["also"] else "none",
        "use_rslora": bool(tuning.get("rslora")) and not pissa,
        "use_dora": bool(tuning.get("dora")),
        "init_lora_weights": True,
        "inference_mode": True,
    }
