"""A reader model: an encoder with a head."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from lamella import registry
from lamella.config import HEAD_OPTIONS, EncoderOptions, LearnerOptions, RunConfig, WindowOptions
from lamella.data.windows.batches import Batch
from lamella.data.windows.padding import Padded, check_window_length, compute_by_length
from lamella.decoding_options import DecodingOptions
from lamella.encoder.device import autocast
from lamella.encoder.encoder import Encoder, HiddenStates
from lamella.encoder.lora import tensors_follow
from lamella.encoder.pretrained import LoadedEncoder
from lamella.encoder.sources import MODEL_WEIGHTS, is_model, is_saved_model, model_folder, weights_file
from lamella.encoder.tensors import put_tensors, read_tensors, round_to_half, trained_tensors
from lamella.encoder.tuning import count_parameters, tune_in_turn
from lamella.errors import RunError, UsageError, one_line
from lamella.files import is_empty
from lamella.graph.tuned_tensors import ParameterCounts
from lamella.heads.head import Head, Stage
from lamella.models.base_encoder import load_base, reported_as_damage
from lamella.models.card import Contents, LayerWeightTable, model_card
from lamella.models.facts import Facts
from lamella.models.names import find_model
from lamella.models.peft_tensors import read_model_tensors
from lamella.models.recorded import RecordedPasses, encoder_inputs, enlarge_inputs
from lamella.models.saved import (
    SavedModel,
    check_replaceable,
    check_weights,
    complete_head,
    read_saved,
    write_measured,
    write_saved,
)
from lamella.runs import MODEL, describe_run_without_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ReaderModel(nn.Module):
    """The PyTorch module of a reader: encoder and head; returns the logits of the task for a batch.

    Use `Reader` to ask questions. Use `ReaderModel` to save, convert or upload a model, or to run it in your own code:

        from lamella import ReaderModel

        model = ReaderModel.from_pretrained("default")  # a model folder, a run folder or a hub id
        model.save_pretrained("my-reader")  # only what training changed, plus the tokenizer and a model card
    """

    def __init__(
        self, base: LoadedEncoder, config: RunConfig, *, tuned_before: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Build an untrained model; `tuned_before` are the earlier tunings of a flattened chain of models."""
        super().__init__()
        self.base_name, self.base_sha256 = base.name, base.sha256
        self.base_tensors_sha256, self.base_rounding = base.tensors_sha256, base.rounding
        self.base_tokenizer_sha256 = base.tokenizer_sha256  # None: it is saved with a tokenizer of its own
        self.loaded_sha256, self.original_sha256 = base.loaded_sha256, base.original_sha256
        self.base_folders = base.folders
        self.folders = base.folders  # a loaded model puts its own folder in front
        self.tokenizer: PreTrainedTokenizerFast = base.tokenizer
        # With every default filled in: this is how they are saved, and two models can be compared.
        self.tuning: dict[str, Any] = registry.complete("tuning", config.encoder.tuning)
        self.tuned_before = [registry.complete("tuning", tuning) for tuning in tuned_before]
        self.head_spec = complete_head({name: getattr(config.learner, name) for name in HEAD_OPTIONS})
        self.plugins = self._plugins(config.plugins)  # the modules of other packages that it needs to be loaded
        self.precision = "fp32"
        self.rounded = False  # True if the weights are in `precision`, and not only the products
        self.inference_only = False  # True if the trained tensors were merged or rounded and cannot be saved
        self.counted: ParameterCounts | None = None  # of a model for inference only, before anything was merged
        self._passes: RecordedPasses | None = None  # on a GPU
        self._recorded_tensors: tuple[Tensor, ...] = ()  # of a model for inference only, whose tensors stay
        self.facts = Facts()
        self.windows: WindowOptions = config.windows
        self.decoding: DecodingOptions = config.decoding
        if self.windows.max_seq_length > base.encoder.longest_window:
            raise UsageError(
                f"windows.max_seq_length: expected at most {base.encoder.longest_window}, the number of positions of "
                f"{base.name}; got {self.windows.max_seq_length}."
            )
        self.base_parameters = count_parameters(base.encoder)[1]  # before the tuning adds any
        tune_in_turn(base.encoder, [*self.tuned_before, self.tuning])
        self.encoder: Encoder = base.encoder
        self.head = Head(
            base.encoder.depth, base.encoder.hidden_size, longest=config.windows.max_seq_length, **self.head_spec
        )

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str]) -> ReaderModel:
        """Load a model folder, a run folder or a model of the hub, on the CPU in fp32."""
        folder = find_model(os.fspath(name)).folder
        if not is_model(folder):
            raise UsageError(
                f"{os.fspath(name)}: expected a model folder of Lamella, found another kind; load it with Reader.load."
            )
        return cls.load(folder)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ReaderModel:
        """Load a model folder, the model of a run folder, or a LoRA folder of peft."""
        path = Path(os.path.expanduser(path))
        folder = model_folder(path)
        if not is_model(folder):
            found = describe_run_without_model(path) if path.is_dir() else None
            found = found or ("neither" if path.exists() else "nothing there")
            raise UsageError(f"{path}: expected a model folder, or a run folder with a model; found {found}.")
        saved = read_saved(folder)
        check_weights(folder, saved)
        base = load_base(folder, saved, pooler=saved.config.learner.reads_pooled)
        with reported_as_damage(folder), tensors_follow():
            model = cls(base, saved.config, tuned_before=saved.tuned_before)
        model.facts = saved.facts
        put_tensors(model, read_model_tensors(folder, model.encoder), str(weights_file(folder)))
        model.folders = (folder, *model.folders)
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model folder, under the method name that transformers uses; an earlier model is replaced."""
        folder = Path(os.path.expanduser(folder))
        check_replaceable(folder)
        self.save(folder)

    def save(
        self,
        folder: Path,
        *,
        results: Mapping[str, Any] | None = None,
        half: bool = False,
        name: str | None = None,
        replace: bool = True,
    ) -> None:
        """Write the model folder; other processes see the old folder or the new one, never a mixture.

        `results` are the scores to record. `half` rounds the trained tensors to fp16. `name` is what the model will be
        loaded by, if that is not the folder. A model that the folder holds is refused without `replace`.
        """
        self._check_savable()
        trained = {name: value.detach().cpu().contiguous() for name, value in trained_tensors(self).items()}
        if half:
            trained = round_to_half(trained)
        if folder.exists() and not is_saved_model(folder) and not is_empty(folder):
            raise UsageError(f"{folder}: expected a model folder or an empty one, found other files; choose another.")
        if folder.resolve() in [base.resolve() for base in self.base_folders]:
            raise UsageError(f"{folder}: holds the base of this model; choose another folder to save to.")
        # At most one key of metadata: safetensors writes them in random order, and equal models should hash equal.
        weights = save(trained, {"format": "pt"})
        facts = self.facts if results is None else self.facts.model_copy(update={"results": dict(results)})
        saved = self._saved(facts)
        card = model_card(saved, self._card_contents(name or os.path.abspath(folder), len(weights), half=half))
        write_saved(folder, saved, weights, self.tokenizer, card=card, replace_model=replace)

    def save_facts(self, folder: Path, **facts: Any) -> None:
        """Store facts measured after training, such as `int8`, in the folder it was loaded from and on its card."""
        self._check_savable()
        self.facts = self.facts.model_copy(update=facts)
        weights = folder / MODEL_WEIGHTS
        half = all(value.dtype == torch.float16 for value in read_tensors(weights).values())
        saved = self._saved(self.facts)
        contents = self._card_contents(os.path.abspath(folder), weights.stat().st_size, half=half)
        write_measured(folder, saved, card=model_card(saved, contents))

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, commit_message: str = "Upload a Lamella reader"
    ) -> str:
        """Upload the model folder to the hub and return its address; the repository is created if needed."""
        from huggingface_hub import HfApi

        if os.path.isabs(self.base_name):
            raise UsageError(
                f"push_to_hub: the base of this model is {self.base_name}, a folder that exists only on this machine. "
                "If it is a saved model, push the result of: lamella export MODEL --flatten DIR"
            )
        hub = HfApi()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / MODEL
            self.save(folder, name=repo_id)
            try:
                repository = hub.create_repo(repo_id, private=private, exist_ok=True)
                hub.upload_folder(repo_id=repository.repo_id, folder_path=folder, commit_message=commit_message)
            except Exception as error:  # the client raises its own errors and errors of its HTTP library
                raise RunError(f"push_to_hub: {repo_id!r} cannot be written: {one_line(error)}.") from error
        return str(repository)

    @property
    def gives_text(self) -> bool:
        """Whether it finds answers; a head that reads only [CLS] detects whether there is one."""
        return not self.head.at_cls

    @property
    def keeps_encoder(self) -> bool:
        """Whether its encoder equals the base encoder: all such models on one base can share a pass."""
        return not self.tuned_before and not registry.trait("tuning", self.tuning, "trains_encoder")

    @property
    def positions(self) -> int:
        """The maximum number of tokens in a window."""
        return self.encoder.longest_window

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def count_parameters(self) -> ParameterCounts:
        """Return the number of trained parameters, of all, and of the encoder without what the tuning adds to it."""
        return self.counted or ParameterCounts(*count_parameters(self), self.base_parameters)

    def encode(self, batch: Batch, layers: Sequence[int]) -> HiddenStates:
        """Run the encoder, in half precision if chosen."""
        with autocast(self.device, "fp32" if self.rounded else self.precision):
            hidden: HiddenStates = self.encoder(batch, layers)
        return hidden

    def forward(self, batch: Batch, hidden: HiddenStates | None = None) -> Tensor:
        """Return the logits; pass `hidden` if the layers are already computed, by a shared pass or a cache.

        The head always computes in fp32: it is cheap, and small differences between its logits matter.
        """
        if hidden is None:
            hidden = self.encode(batch, self.head.layers)
        with torch.autocast(self.device.type, enabled=False):
            logits: Tensor = self.head(hidden.only(self.head.layers))
        return logits  # [O, B, T]

    def logits(self, padded: Padded) -> NDArray[np.float32]:
        """Return the logits of a padded batch as an array [O, B, T]; the model must be in eval mode."""
        return self.begin_logits(padded)()

    @torch.inference_mode()
    def begin_logits(self, padded: Padded) -> Callable[[], NDArray[np.float32]]:
        """Begin to compute the logits of a padded batch; return a function that waits for them.

        Between the two, a GPU computes, and the caller can prepare the next batch.
        """
        check_window_length(padded.mask.shape[1], self.positions)
        device = self.device
        if device.type != "cuda":
            logits = compute_by_length(padded, self._compute) if device.type == "cpu" else self._compute(padded)
            return lambda: logits
        if self._passes is None:
            self._passes = RecordedPasses(device)
        rows, width = padded.mask.shape
        inputs = enlarge_inputs(encoder_inputs(padded), self.positions, self.tokenizer.pad_token_id or 0)
        if not self.inference_only or not self._recorded_tensors:  # to collect them takes as long as a small pass
            self._recorded_tensors = (*self.parameters(), *self.buffers())
        tensors = (self.precision, *(tensor.data_ptr() for tensor in self._recorded_tensors))
        pending = self._passes.begin(lambda own: self(Batch.of_inputs(own)), inputs, tensors=tensors)
        return lambda: pending.get()[:, :rows, :width]

    def _compute(self, padded: Padded) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self(Batch.of(padded).to(self.device)).float().cpu().numpy()
        return logits

    def _check_savable(self) -> None:
        if self.inference_only:
            raise UsageError(
                "this model was loaded for inference only, with its trained weights merged or rounded, and cannot be "
                "saved; load it with ReaderModel.from_pretrained."
            )

    def _plugins(self, named: Sequence[str]) -> list[str]:
        parts = [("tuning", part) for part in (*self.tuned_before, self.tuning)]
        parts += [("mixer", part) for part in (*self.head_spec["mixer"], *self.head_spec["beside"])]
        parts += [("task", self.head_spec["task"])]
        return list(dict.fromkeys([*named, *registry.outside_modules(parts)]))

    def _saved(self, facts: Facts) -> SavedModel:
        config = RunConfig(
            plugins=self.plugins,
            encoder=EncoderOptions(name=self.base_name, tuning=self.tuning),
            learner=LearnerOptions(**self.head_spec),
            windows=self.windows,
            decoding=self.decoding,
        )
        before = tuple(self.tuned_before)
        return SavedModel(
            self.base_name,
            self.base_sha256,
            self.base_tensors_sha256,
            config,
            before,
            facts,
            rounding=self.base_rounding,
            base_tokenizer_sha256=self.base_tokenizer_sha256,
        )

    def _card_contents(self, name: str, size: int, *, half: bool) -> Contents:
        return Contents(
            name=name,
            gives_text=self.gives_text,
            trained_parameters=self.count_parameters().trained,
            encoder_parameters=self.base_parameters,
            bytes=size,
            half=half,
            layer_weights=self._layer_weights(),
        )

    def _layer_weights(self) -> LayerWeightTable | None:
        """Return the layer weights, if the mixer learns weights that are the same for all tokens."""
        stage = cast(Stage, self.head.stages[0])
        _, options = registry.split(self.head_spec["mixer"][0])
        learned = stage.learned_layer_weights(stage.state_dict(), **options)  # [S, C]
        if learned is None:
            return None
        names = self.head.task.names_of_outputs() if len(learned) > 1 else ("weight",)
        rows = tuple((name, tuple(row)) for name, row in zip(names, learned.tolist(), strict=True))
        return LayerWeightTable(tuple(self.head.main_layers), rows)
