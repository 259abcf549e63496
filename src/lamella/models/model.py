"""A reader model: an encoder with a head, and the folder it is saved in.

The folder holds only what training changed; the rest is the base encoder, named with its hashes.

    config.json         format, base encoder, tuning, head, windows, decoding, facts of the training
    model.safetensors   the trained tensors, `encoder.` and `head.` in front of their names
    README.md           the model card
    tokenizer files
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from lamella import registry
from lamella.config import HEAD_OPTIONS, DecodingOptions, RunConfig, WindowOptions
from lamella.data.batches import Batch
from lamella.data.padding import Padded, refuse_longer_windows
from lamella.encoder.encoder import Encoder, HiddenStates
from lamella.encoder.precision import autocast
from lamella.encoder.pretrained import FORMAT_VERSION, LoadedEncoder, fitting, load_base, quiet, read_saved
from lamella.encoder.sources import MODEL_CONFIG, MODEL_FORMAT, MODEL_WEIGHTS, is_saved_model, model_folder
from lamella.encoder.tensors import put_tensors, read_tensors, round_to_half, trained_tensors
from lamella.encoder.tuning import count_parameters, tune_in_turn
from lamella.errors import RunError, UsageError, one_line
from lamella.files import TEMPORARY, read_json, write_bytes, write_json, write_text
from lamella.heads.head import Head
from lamella.models.card import CARD, Facts, facts_from, model_card
from lamella.runs import MODEL, run_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from lamella.scoring.calibrate import Tuned


class ReaderModel(nn.Module):
    """Encoder and head; gives the task's logits for a batch."""

    def __init__(
        self, base: LoadedEncoder, config: RunConfig, *, tuned_before: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """A new reader; `tuned_before` are the tunings that a flattened chain of models went through before its own."""
        super().__init__()
        self.base_name, self.base_sha256 = base.name, base.sha256
        self.base_tensors_sha256 = base.tensors_sha256
        self.folders = self.bases = base.folders  # what it was loaded from, and what of that it stands on
        self.tokenizer: PreTrainedTokenizerFast = base.tokenizer
        # With all options, also those left to their defaults: as they are saved, and so that two can be compared.
        self.tuning: dict[str, Any] = registry.complete("tuning", config.encoder.tuning)
        self.tuned_before = [registry.complete("tuning", tuning) for tuning in tuned_before]
        self.head_spec = _complete_head({name: getattr(config.learner, name) for name in HEAD_OPTIONS})
        self.plugins = self._plugins(config.plugins)  # the modules of other packages that it needs to be loaded
        self.precision = "fp32"
        self.lean = False  # for answers alone: what was learnt cannot be told from the encoder any more
        self.facts = Facts()
        self.windows: WindowOptions = config.windows
        self.decoding: DecodingOptions = config.decoding
        if self.windows.max_seq_length > base.encoder.longest_window:
            raise UsageError(
                f"windows.max_seq_length: expected at most {base.encoder.longest_window}, all the positions that "
                f"{base.name} has. Got {self.windows.max_seq_length}."
            )
        self.base_parameters = count_parameters(base.encoder)[1]  # before anything is put into it
        tune_in_turn(base.encoder, [*self.tuned_before, self.tuning])
        self.encoder: Encoder = base.encoder
        self.head = Head(
            base.encoder.depth, base.encoder.hidden_size, longest=config.windows.max_seq_length, **self.head_spec
        )

    @property
    def gives_text(self) -> bool:
        """Whether it finds answers; one that reads [CLS] alone can only tell whether there is one."""
        return not self.head.at_cls

    @property
    def keeps_encoder(self) -> bool:
        """Whether its encoder is its base as it was: all such models on one base can share a pass of it."""
        return self.tuning["name"] == "frozen" and not self.tuned_before

    @property
    def positions(self) -> int:
        """The most tokens that a window can have."""
        return self.encoder.longest_window

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def encode(self, batch: Batch, layers: Sequence[int]) -> HiddenStates:
        """The encoder's part. Half precision, where chosen, is for it alone."""
        with autocast(self.device, self.precision):
            hidden: HiddenStates = self.encoder(batch, layers)
        return hidden

    def forward(self, batch: Batch, hidden: HiddenStates | None = None) -> Tensor:
        """The logits; from `hidden` where the layers were made already, for several heads or by a cache.

        A head is cheap and its logits are compared with one another: it computes in fp32.
        """
        if hidden is None:
            hidden = self.encode(batch, self.head.layers)
        with torch.autocast(self.device.type, enabled=False):
            logits: Tensor = self.head(hidden.only(self.head.layers))
        return logits  # [O, B, T]

    @torch.inference_mode()
    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """The logits of windows as they come from the data, back as an array; the model must be in eval mode."""
        refuse_longer_windows(padded, self.positions)
        found: NDArray[np.float32] = self(Batch.of(padded).to(self.device)).float().cpu().numpy()
        return found

    def save(
        self,
        folder: Path,
        *,
        results: Mapping[str, Any] | None = None,
        half: bool = False,
        name: str | None = None,
    ) -> None:
        """Write the model folder; a reader sees the old one, the new one, or none, never a mixture.

        `results` are what it scored, for the card. `half` rounds the trained tensors to fp16. `name` is what it will be
        loaded by, where that is not the folder.
        """
        self._refuse_lean()
        trained = {name: value.detach().cpu().contiguous() for name, value in trained_tensors(self).items()}
        if half:
            trained = round_to_half(trained)
        if folder.exists() and not is_saved_model(folder) and not is_empty(folder):
            raise UsageError(f"{folder}: holds something else than a model; choose another folder to save into.")
        if folder.resolve() in [base.resolve() for base in self.bases]:
            raise UsageError(f"{folder}: holds what this model stands on; choose another folder to save into.")
        facts = self.facts if results is None else self.facts.model_copy(update={"results": dict(results)})
        # One key of metadata at most: safetensors writes them in random order, and equal models should hash equal.
        weights = save(trained, {"format": "pt"})
        with replacing(folder) as fresh:
            write_bytes(fresh / MODEL_WEIGHTS, weights)
            with quiet():
                self.tokenizer.save_pretrained(fresh)
            write_json(fresh / MODEL_CONFIG, self._config(facts))
            card = model_card(self, facts, len(weights), name=name or os.path.abspath(folder), half=half)
            write_text(fresh / CARD, card)

    def store_tuned(self, folder: Path, tuned: Tuned) -> None:
        """Put a threshold with what was found of it into the folder that this model was loaded from, and on its card.

        The weights, by which others know it, stay as they are; so does all else that the folder says.
        """
        self._refuse_lean()
        self.decoding = tuned.decoding
        self.facts = self.facts.model_copy(update={"calibrated": dict(tuned.report)})
        weights = folder / MODEL_WEIGHTS
        half = all(value.dtype == torch.float16 for value in read_tensors(weights).values())
        card = model_card(self, self.facts, weights.stat().st_size, name=os.path.abspath(folder), half=half)
        known = {key: value for key, value in self._config(self.facts).items() if key in ("decoding", "facts")}
        write_json(folder / MODEL_CONFIG, {**read_json(folder / MODEL_CONFIG), **known})
        write_text(folder / CARD, card)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """The same under the name that transformers has for it."""
        self.save(Path(folder))

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str]) -> ReaderModel:
        """Load a model folder, a run folder or a model of the hub, on the CPU."""
        from lamella.models.loading import load_model

        model = load_model(name, device="cpu", precision="fp32")
        if not isinstance(model, cls):
            raise UsageError(
                f"{name}: expected a model folder of Lamella's. Found another kind, which Reader.load takes."
            )
        return model

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, commit_message: str = "Upload a Lamella reader"
    ) -> str:
        """Upload the model folder to the hub, into a repository that is made where there is none; gives its address."""
        from huggingface_hub import HfApi

        if os.path.isabs(self.base_name):
            raise UsageError(
                f"push_to_hub: this model stands on {self.base_name}, a folder that nobody else has; one on a saved "
                "model can be pushed after: lamella export MODEL --flatten DIR"
            )
        hub = HfApi()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / MODEL
            self.save(folder, name=repo_id)
            try:
                repository = hub.create_repo(repo_id, private=private, exist_ok=True)
                hub.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message=commit_message)
            except Exception as error:  # the client's own, and those of its HTTP library: which one, is its affair
                raise RunError(f"push_to_hub: {repo_id!r} cannot be written: {one_line(error)}.") from error
        return str(repository)

    @classmethod
    def load(cls, path: Path) -> ReaderModel:
        """Load a model folder, or that of a run folder."""
        folder = model_folder(path)
        if not is_saved_model(folder):
            state = run_state(path) if path.is_dir() else None
            found = f"a run that is {state}, without one" if state else "neither" if path.exists() else "nothing there"
            raise UsageError(f"{path}: expected a model folder, or a run folder with one. Found {found}.")
        saved = read_saved(folder)
        base = load_base(folder, saved, pooler=saved.config.learner.reads_pooled)
        with fitting(folder):
            model = cls(base, saved.config, tuned_before=saved.tuned_before)
        model.facts = facts_from(saved.facts, str(folder / MODEL_CONFIG))
        put_tensors(model, read_tensors(folder / MODEL_WEIGHTS), str(folder / MODEL_WEIGHTS))
        model.folders = (folder, *model.folders)
        return model.eval()

    def _refuse_lean(self) -> None:
        if self.lean:
            raise UsageError(
                "this model was loaded for answers alone, with what it learnt merged or rounded, and cannot be saved; "
                "load it with ReaderModel.from_pretrained."
            )

    def _plugins(self, named: Sequence[str]) -> list[str]:
        parts = [("tuning", part) for part in (*self.tuned_before, self.tuning)]
        parts += [("mixer", part) for part in (*self.head_spec["mixer"], *self.head_spec["beside"])]
        parts += [("task", self.head_spec["task"])]
        return list(dict.fromkeys([*named, *registry.outside_modules(parts)]))

    def _config(self, facts: Facts) -> dict[str, Any]:
        before = self.tuned_before
        tensors = {"tensors_sha256": self.base_tensors_sha256} if self.base_tensors_sha256 else {}
        known = facts.model_dump(mode="json", exclude_defaults=True)
        return {
            MODEL_FORMAT: FORMAT_VERSION,
            **({"plugins": self.plugins} if self.plugins else {}),
            "base": {"name": self.base_name, "sha256": self.base_sha256, **tensors},
            **({"tuned_before": before} if before else {}),
            "tuning": self.tuning,
            "head": self.head_spec,
            "windows": self.windows.model_dump(),
            "decoding": self.decoding.model_dump(),
            **({"facts": known} if known else {}),
        }


def _complete_head(spec: Mapping[str, Any]) -> dict[str, Any]:
    stages = {key: [registry.complete("mixer", one) for one in spec[key]] for key in ("mixer", "beside")}
    return {**spec, "task": registry.complete("task", spec["task"]), **stages}


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which takes the place of `folder` when all is written, and vanishes otherwise."""
    fresh = folder.parent / f".{folder.name}.{uuid.uuid4().hex}{TEMPORARY}"
    try:
        fresh.mkdir(parents=True)
        yield fresh
        _exchange(fresh, folder)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}).") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def refuse_occupied(folder: Path) -> None:
    """Before the work, and whatever lies there: an export replaces nothing."""
    if folder.exists() and not is_empty(folder):
        raise UsageError(f"{folder}: is there already, and not empty; choose another folder to export to.")


def is_empty(folder: Path) -> bool:
    """Whether it is a folder in which nothing lies."""
    return folder.is_dir() and not any(folder.iterdir())


def _exchange(fresh: Path, folder: Path) -> None:
    """Put a finished folder in the place of an old one, which steps aside: no system call replaces a full folder."""
    if folder.exists():
        aside = folder.parent / f".{folder.name}.old{TEMPORARY}"
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        os.rename(fresh, folder)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(fresh, folder)
