"""Write a model as a transformers checkpoint."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch

from lamella.encoder.adapters import Adapter
from lamella.encoder.pretrained import quiet
from lamella.encoder.tuning import merge
from lamella.errors import ModelError
from lamella.files import check_output_folder, new_folder
from lamella.models.model import ReaderModel


def save_as_transformers(name: str | os.PathLike[str], folder: Path) -> None:
    """Write a model as a checkpoint for `AutoModelForQuestionAnswering`; raise an error if it cannot be one."""
    from transformers import AutoModelForQuestionAnswering

    check_output_folder(folder)
    model = ReaderModel.from_pretrained(name)
    if reason := obstacle(model):
        raise ModelError(f"{name}: cannot be written as a transformers checkpoint: {reason}")
    merge(model.encoder)
    config = copy.deepcopy(model.encoder.model.config)
    config.num_labels = 2  # start and end
    with quiet():
        stock: Any = AutoModelForQuestionAnswering.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        encoder = getattr(stock, stock.base_model_prefix)
        encoder.load_state_dict(model.encoder.model.state_dict())
        with torch.no_grad():
            stock.qa_outputs.weight.copy_(model.head.task.q)
            stock.qa_outputs.bias.copy_(model.head.task.b)
        tokenizer = model.tokenizer  # loaders read the maximum window length from it
        tokenizer.model_max_length = min(tokenizer.model_max_length, model.encoder.longest_window)
        with new_folder(folder, replace=False) as fresh:
            stock.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)


def obstacle(model: ReaderModel) -> str | None:
    """Return what such a checkpoint cannot express about a model, if anything."""
    spec = model.head_spec
    mixers = [stage["name"] for stage in spec["mixer"]]
    if not model.encoder.family.linear_qa:
        kind = model.encoder.model.config.model_type
        return f"expected an encoder with a linear question answering head in transformers, got {kind}."
    if not model.gives_text:
        return f"expected the task span, got {spec['task']['name']}."
    if mixers != ["last"] or model.head.main_layers != (model.encoder.depth,):
        reads = f"layer {model.head.main_layers[-1]}" if mixers == ["last"] else ", ".join(mixers)
        return f"expected a head that reads only the encoder's last layer (mixer last), got {reads}."
    if spec["skip"] or spec["beside"]:
        return "expected a head without a second branch, got one with learner.skip or learner.beside."
    if any(isinstance(module, Adapter) for module in model.encoder.modules()):
        return "expected an encoder without adapters: they cannot be merged into its weights."
    return None
