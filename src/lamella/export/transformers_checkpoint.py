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
    """Write a model as a checkpoint for `AutoModelForQuestionAnswering`; one that has no such form is refused."""
    from transformers import AutoModelForQuestionAnswering

    check_output_folder(folder)
    model = ReaderModel.from_pretrained(name)
    if reason := _why_not(model):
        raise ModelError(f"{name}: cannot be a checkpoint of transformers: {reason}")
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
        tokenizer = model.tokenizer  # by its length whoever loads the checkpoint knows how long a window may be
        tokenizer.model_max_length = min(tokenizer.model_max_length, model.encoder.longest_window)
        with new_folder(folder) as fresh:
            stock.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)


def _why_not(model: ReaderModel) -> str | None:
    """What of a model such a checkpoint cannot express."""
    spec = model.head_spec
    mixers = [stage["name"] for stage in spec["mixer"]]
    if not model.gives_text:
        return f"its task is {spec['task']['name']}, and theirs is to find a span."
    if mixers != ["last"] or model.head.main_layers != (model.encoder.depth,):
        told = "layer " + str(model.head.main_layers[-1]) if mixers == ["last"] else ", ".join(mixers)
        return f"its head reads {told}, and theirs the encoder's last layer alone (mixer last)."
    if spec["skip"] or spec["beside"]:
        return "its head reads something beside the last layer (learner.skip, learner.beside)."
    if any(isinstance(module, Adapter) for module in model.encoder.modules()):
        return "its encoder carries adapters, which no weights of the encoder itself can stand for."
    return None
