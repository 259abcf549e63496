"""A model in other forms: its chain of bases flattened, its tensors in half, a checkpoint as transformers has it."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lamella.encoder.adapters import Adapter
from lamella.encoder.pretrained import load_encoder, quiet, read_chain
from lamella.encoder.tuning import merge
from lamella.errors import ModelError
from lamella.models.model import ReaderModel, refuse_occupied, replacing


def flatten(name: str | os.PathLike[str], folder: Path) -> ReaderModel:
    """Write a model that stands on others as one on the pretrained encoder below them all, with equal logits.

    It lists the tunings of the whole chain, and holds all tensors that any of them changed.
    """
    refuse_occupied(folder)
    model = ReaderModel.from_pretrained(name)
    chain = read_chain(model.folders[0])
    *before, last = [tuning for link in reversed(chain) for tuning in link.tunings]
    config = chain[0].config
    pretrained = load_encoder(chain[-1].base_name, pooler=config.learner.reads_pooled)
    flat = ReaderModel(
        replace(pretrained, tokenizer=model.tokenizer, sha256=chain[-1].base_sha256),
        config.model_copy(update={"encoder": config.encoder.model_copy(update={"tuning": last})}),
        tuned_before=[tuning for tuning in before if tuning["name"] != "frozen"],
    )
    flat.load_state_dict(model.state_dict())
    flat.facts = model.facts
    flat.save(folder)
    return flat


def halve(name: str | os.PathLike[str], folder: Path) -> ReaderModel:
    """Write a model with its trained tensors rounded to fp16; one that was saved without its base's hash gets that."""
    refuse_occupied(folder)
    model = ReaderModel.from_pretrained(name)
    if model.base_tensors_sha256 is None:  # the model's own encoder is tuned
        model.base_tensors_sha256 = load_encoder(model.base_name).tensors_sha256
    model.save(folder, half=True)
    return model


def as_transformers(name: str | os.PathLike[str], folder: Path) -> None:
    """Write a model as a checkpoint for `AutoModelForQuestionAnswering`; one that has no such form is refused."""
    from transformers import AutoModelForQuestionAnswering

    refuse_occupied(folder)
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
        with replacing(folder) as fresh:
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
