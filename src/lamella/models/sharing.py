"""Foresee from its configuration whether a reader can share its base encoder; no tensor is read.

Loading it decides: tensors that do not fit, or an encoder with other weights, are found only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lamella.encoder.config_check import read_configuration
from lamella.encoder.sources import MODEL_CONFIG, MODEL_FORMAT, find_local_encoder, is_model, is_peft
from lamella.errors import EncoderError
from lamella.files import read_json
from lamella.graph.encoder_config import read_encoder_config
from lamella.graph.support import TASKS, NoGraphError
from lamella.graph.tuned_tensors import TUNINGS
from lamella.models.base_tokenizer import tokenizer_folder
from lamella.models.onnx_model import ONNX_FORMAT
from lamella.models.tokenizer_file import TOKENIZER


def check_sharing(folder: Path, *, as_graph: bool) -> None:
    """Raise NoGraphError, with the reason, if a model cannot share its encoder, on onnxruntime (`as_graph`) or torch.

    Raise EncoderError if its encoder is not on this machine.
    """
    if is_peft(folder):
        raise NoGraphError("it is a LoRA folder of peft")
    config = read_json(folder / MODEL_CONFIG)
    if ONNX_FORMAT in config:
        raise NoGraphError("it is an exported graph")
    if MODEL_FORMAT not in config:
        raise NoGraphError("it is a checkpoint with an encoder of its own")
    if config.get("tuned_before"):
        raise NoGraphError("its encoder was tuned more than once")
    _check_tuning(config["tuning"])
    if as_graph and config["head"]["task"]["name"] not in TASKS:
        raise NoGraphError(f"the task {config['head']['task']['name']} has no graph builder")
    _check_base(config["base"]["name"], as_graph)
    if not (tokenizer_folder(folder, find=find_local_encoder) / TOKENIZER).is_file():
        raise NoGraphError(f"its tokenizer has no {TOKENIZER} with a first token")


def _check_tuning(tuning: Mapping[str, Any]) -> None:
    name = tuning["name"]
    if name not in TUNINGS:
        raise NoGraphError(f"the tuning {name} is not one that readers on a shared encoder can have")
    if name == "full" or (name in ("top_k", "adapter") and tuning["k"]):
        raise NoGraphError(f"its tuning {name} changes whole weight matrices")
    if tuning.get("dora"):
        raise NoGraphError("DoRA rescales whole weight matrices")


@lru_cache(maxsize=64)  # many readers have one base; errors are not kept
def _check_base(name: str, as_graph: bool) -> None:
    source = find_local_encoder(name)
    if source is None:
        raise EncoderError(f"{name}: this machine does not have it.")
    if is_model(source.folder):
        raise NoGraphError("its base is a reader")
    if as_graph:
        read_encoder_config(read_configuration(source))
