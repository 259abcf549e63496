"""Tiny readers of every family, tuning and head, with weights that training seems to have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from doubles import corpus, examples_about, tiny_run_config
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import Padded, pad
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel


def save_trained(folder: Path, base: Path, *, seed: int = 3, **sections: Any) -> Path:
    """Write a reader whose trained weights differ from their start so much that they matter."""
    config = tiny_run_config(**sections)
    model = ReaderModel(load_encoder(str(base), pooler=config.learner.reads_pooled), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save(folder)
    return folder


def windows_of(model: Any) -> Padded:
    """Windows of different lengths, from a few tokens to the maximum."""
    texts = [context[: 30 + 150 * number] for number, context in enumerate(corpus()[:5])]
    features = featurise(examples_about([*texts, ""]), model.tokenizer, model.windows)
    assert features.lengths.max() == model.windows.max_seq_length
    return pad(features, np.arange(len(features)))
