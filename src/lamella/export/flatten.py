"""Flatten a chain of models into one model on the pretrained encoder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from lamella import registry
from lamella.files import check_output_folder
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.models.saved import read_chain


def flatten(name: str | os.PathLike[str], folder: Path) -> ReaderModel:
    """Write a model whose base is another model as one on the pretrained encoder, with equal logits.

    The written model lists the tunings of the whole chain, and holds every tensor that any of them changed.
    """
    check_output_folder(folder)
    model = ReaderModel.from_pretrained(name)
    chain = read_chain(model.folders[0])
    *before, last = [tuning for link in reversed(chain) for tuning in link.tunings]
    config = chain[0].config
    pretrained = load_encoder(chain[-1].base_name, pooler=config.learner.reads_pooled)
    flat = ReaderModel(
        replace(
            pretrained,
            tokenizer=model.tokenizer,
            sha256=chain[-1].base_sha256,
            tensors_sha256=chain[-1].base_tensors_sha256 or pretrained.tensors_sha256,  # older models have none
            rounding=chain[-1].rounding,
            original_sha256=model.original_sha256,
        ),
        config.model_copy(update={"encoder": config.encoder.model_copy(update={"tuning": last})}),
        tuned_before=[tuning for tuning in before if registry.trait("tuning", tuning, "trains_encoder")],
    )
    flat.load_state_dict(model.state_dict())
    flat.facts = model.facts
    flat.save(folder, replace=False)
    return flat
