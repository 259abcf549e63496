"""A reader model: an encoder with a head, and the folder it is saved in.

The folder holds only what training changed; the rest is the base encoder, named with its hash.

    config.json         format, base encoder, tuning, head, windows, decoding
    model.safetensors   the trained tensors, `encoder.` and `head.` in front of their names
    tokenizer files
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lamella import registry
from lamella.config import DecodingOptions, RunConfig, WindowOptions
from lamella.encoder.encoder import Encoder
from lamella.encoder.precision import autocast
from lamella.encoder.sources import (
    MODEL_CONFIG,
    MODEL_FORMAT,
    MODEL_WEIGHTS,
    LoadedEncoder,
    is_saved_model,
    load_base,
    model_folder,
    put_tensors,
    quiet,
    read_tensors,
)
from lamella.errors import ConfigError, ModelError, UsageError
from lamella.heads.head import Head
from lamella.runs import read_json, run_state, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from lamella.data.batches import Batch

FORMAT_VERSION = 1


class ReaderModel(nn.Module):
    """Encoder and head; gives the task's logits for a batch."""

    def __init__(self, base: LoadedEncoder, config: RunConfig) -> None:
        super().__init__()
        self.base_name, self.base_sha256 = base.name, base.sha256
        self.tokenizer: PreTrainedTokenizerFast = base.tokenizer
        self.tuning: dict[str, Any] = config.encoder.tuning
        self.head_spec: dict[str, Any] = {"mixer": config.learner.mixer, "task": config.learner.task}
        self.precision = "fp32"
        self.windows: WindowOptions = config.windows
        self.decoding: DecodingOptions = config.decoding
        if self.windows.max_seq_length > base.encoder.longest_window:
            raise ConfigError(
                "windows.max_seq_length",
                [f"expected at most {base.encoder.longest_window}, all the positions that {base.name} has. "
                 f"Got {self.windows.max_seq_length}."],
            )  # fmt: skip
        registry.build("tuning", self.tuning, base.encoder)
        self.encoder: Encoder = base.encoder
        self.head = Head(base.encoder.depth, base.encoder.hidden_size, **self.head_spec)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, batch: Batch) -> Tensor:
        """Half precision, where chosen, is for the encoder; a head is cheap and its logits are compared: it runs in fp32."""
        with autocast(self.device, self.precision):
            hidden = self.encoder(batch, self.head.layers)
        with torch.autocast(self.device.type, enabled=False):
            logits: Tensor = self.head(hidden)
        return logits  # [O, B, T]

    def save(self, folder: Path) -> None:
        """Write the model folder; a reader sees the old one, the new one, or none, never a mixture."""
        trained = {
            name: value.detach().cpu().contiguous() for name, value in self.named_parameters() if value.requires_grad
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            # One key of metadata at most: safetensors writes them in random order, and equal models should hash equal.
            save_file(trained, fresh / MODEL_WEIGHTS, {"format": "pt"})
            with quiet():
                self.tokenizer.save_pretrained(fresh)
            write_json(fresh / MODEL_CONFIG, self._config())
            fresh.chmod(0o755)
            _exchange(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    @classmethod
    def load(cls, path: Path) -> ReaderModel:
        """Load a model folder, or that of a run folder."""
        folder = model_folder(path)
        if not is_saved_model(folder):
            state = run_state(path) if path.is_dir() else None
            found = (
                f"a run that is {state} and has no model yet" if state else "none there" if path.exists() else "nothing"
            )
            raise UsageError(f"{path}: expected a model folder, or a run folder with one. Found {found}.")
        saved = read_json(folder / MODEL_CONFIG)
        version = saved.get(MODEL_FORMAT)
        if version != FORMAT_VERSION:
            raise ModelError(f"{folder}: expected model format {FORMAT_VERSION}. Got {version!r}; update lamella.")
        try:
            config = RunConfig.model_validate(
                {
                    "encoder": {"name": saved["base"]["name"], "tuning": saved["tuning"]},
                    "learner": saved["head"],
                    "windows": saved["windows"],
                    "decoding": saved["decoding"],
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            problem = str(error).splitlines()[0]
            raise ModelError(f"{folder / MODEL_CONFIG}: is damaged or of another version ({problem}).") from None
        model = cls(load_base(folder, saved), config)
        put_tensors(model, read_tensors(folder / MODEL_WEIGHTS), str(folder / MODEL_WEIGHTS))
        return model.eval()

    def _config(self) -> dict[str, Any]:
        return {
            MODEL_FORMAT: FORMAT_VERSION,
            "base": {"name": self.base_name, "sha256": self.base_sha256},
            "tuning": self.tuning,
            "head": self.head_spec,
            "windows": self.windows.model_dump(),
            "decoding": self.decoding.model_dump(),
        }


def _exchange(fresh: Path, folder: Path) -> None:
    """Put a finished folder in the place of an old one, which steps aside: no system call replaces a full folder."""
    if folder.exists():
        aside = folder.parent / f".{folder.name}.old"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        os.rename(fresh, folder)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(fresh, folder)
