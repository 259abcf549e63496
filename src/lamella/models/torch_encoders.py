"""One base encoder in memory for many readers, on torch: a batch may mix readers, each row has its own changes.

Windows of all readers on an encoder are padded to one batch and go through it together. What a reader changes is in a
bank on the device (see `tensor_bank`), from which each row of the batch gets its own (see `row_modules`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamella.data.windows.batches import Batch
from lamella.data.windows.padding import check_window_length, divide_by_length
from lamella.data.windows.tokenizer_check import check_ids
from lamella.encoder.device import HALF_TYPES, choose_precision, find_device, round_parameters
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.row_modules import use_row_changes
from lamella.encoder.sources import (
    MODEL_CONFIG,
    MODEL_WEIGHTS,
    Source,
    find_encoder,
    is_model,
    is_saved_model,
    verified_hash,
)
from lamella.encoder.tensors import read_tensors
from lamella.errors import EncoderError, ModelError
from lamella.files import read_json
from lamella.graph.support import NoGraphError
from lamella.heads.head import Head
from lamella.models.base_encoder import load_base, reported_as_damage
from lamella.models.base_tokenizer import open_tokenizer_of
from lamella.models.graph_model import find_original
from lamella.models.head_group import HeadGroup
from lamella.models.recorded import Inputs, RecordedPasses, encoder_inputs, enlarge_inputs
from lamella.models.row_delta import RowDelta, without_values
from lamella.models.saved import SavedModel, check_weights, read_saved
from lamella.models.tensor_bank import ChosenSlots, TensorBank
from lamella.models.tokenizer_file import TOKENIZER, Tokenizers
from lamella.models.window_engine import CPU_MEMORY, GPU_MEMORY, Pace, Row, SharingModel, pace_of, pad_rows
from lamella.user_cache import remembered_sha256

ENCODER, HEAD = "encoder.model.", "head."
FACTORS = ("inputs", "outputs")


class TorchEncoder:
    """A base encoder on a device; its readers hold their own tensors only. Threads may share it."""

    def __init__(self, folder: Path, saved: SavedModel, device: torch.device, precision: str) -> None:
        """Load the base encoder of a reader."""
        base = load_base(folder, saved, pooler=saved.config.learner.reads_pooled)
        self.device, self.name, self.folders, self.pad_id = device, base.name, base.folders, base.tokenizer.pad_token_id
        self.encoder = base.encoder.eval()
        self._outline = without_values(self.encoder)
        model = self.encoder.model
        if model.config.model_type == "modernbert" and device.type == "cpu":
            model.set_attn_implementation("sdpa")  # ours packs all windows into one row, where they lose their readers
        dtype = HALF_TYPES.get(precision, torch.float32)
        if precision in HALF_TYPES:
            round_parameters(model, precision)
        torch.nn.Module.to(model, device)  # the method of transformers has no types
        self._changes = use_row_changes(self.encoder)
        self._own = {
            name: value.detach().float().cpu()
            for name, value in model.named_parameters()
            if value.dim() == 1 or "token_type_embeddings" in name
        }
        self.bank = TensorBank(device, dtype, partial(_default, model, self._own))
        self._deltas: dict[str, RowDelta] = {}
        self._heads: WeakValueDictionary[str, HeadGroup] = WeakValueDictionary()
        self.passes = RecordedPasses(device)  # which runs one at a time
        self._lock = threading.Lock()

    def delta(self, tuning: dict[str, Any]) -> RowDelta:
        """Return what reads the changes of readers with this tuning."""
        key = json.dumps(tuning, sort_keys=True)
        with self._lock:
            if key not in self._deltas:
                self._deltas[key] = RowDelta(tuning, self._outline)
            return self._deltas[key]

    def head(self, spec: dict[str, Any], longest: int) -> HeadGroup:
        """Return the heads with these options; they are in memory while a reader uses one of them."""
        key = json.dumps([spec, longest], sort_keys=True)
        with self._lock:
            group = self._heads.get(key)
            if group is None:
                head = Head(self.encoder.depth, self.encoder.hidden_size, longest=longest, **spec)
                group = self._heads[key] = HeadGroup(head, self.device)
            return group

    def read(self, folder: Path, saved: SavedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Read what a reader changes in the encoder, and the tensors of its head."""
        path = folder / MODEL_WEIGHTS
        tensors = read_tensors(path)
        if strange := next((name for name in tensors if not name.startswith((ENCODER, HEAD))), None):
            raise ModelError(f"{path}: does not fit its configuration: {strange} is unexpected.")
        with reported_as_damage(folder):
            delta = self.delta(saved.config.encoder.tuning)
        changes = delta.read(_under(tensors, ENCODER), self.encoder.model, self._own, str(path))
        return changes, _under(tensors, HEAD)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Return the logits of windows in one pass, each [2, T] or [2, 1]; they may belong to any of its readers."""
        readers: list[TorchReader] = [row.delta for row in rows]
        longest = max(reader.windows.max_seq_length for reader in readers)
        padded = pad_rows(rows, self.pad_id or 0, longest)
        check_window_length(padded.mask.shape[1], self.encoder.longest_window)
        inputs = encoder_inputs(padded)
        if self.device.type == "cuda":
            inputs = enlarge_inputs(inputs, self.encoder.longest_window, self.pad_id or 0)
            readers += readers[:1] * (len(inputs["mask"]) - len(readers))  # rows of padding are copies of the first
        mixed = _MixedPass.of(self, readers)
        inputs |= {name: torch.tensor(numbers) for name, numbers in mixed.numbers().items()}
        logits = self.passes.begin(mixed.logits, inputs, key=mixed.key, tensors=mixed.changes.values).get()
        widths = (len(row.input_ids) if row.delta.gives_text else 1 for row in rows)
        return [logits[:, number, :width] for number, width in enumerate(widths)]

    def hidden_layers(self, batch: Batch, layers: Sequence[int], changes: Mapping[str, Tensor]) -> HiddenStates:
        """Run the encoder with the changes of each row, by path and kind."""
        by_path: dict[str, dict[str, Tensor]] = {}
        for name, tensor in changes.items():
            path, _, kind = name.rpartition(":")
            by_path.setdefault(path, {})[kind] = tensor
        self._changes.current = by_path
        try:
            hidden: HiddenStates = self.encoder(batch, layers)
            return hidden
        finally:
            self._changes.current = {}


@dataclass(frozen=True)
class _MixedPass:
    """A pass over windows of several readers: where the tensors of each are."""

    encoder: TorchEncoder
    changes: ChosenSlots
    heads: dict[HeadGroup, tuple[ChosenSlots, list[int]]]  # and the windows that each group of heads has

    @classmethod
    def of(cls, encoder: TorchEncoder, readers: Sequence[TorchReader]) -> _MixedPass:
        groups: dict[HeadGroup, list[int]] = {}
        for number, reader in enumerate(readers):
            groups.setdefault(reader.head, []).append(number)
        heads = {
            group: (group.bank.choose([readers[number].head_place for number in own]), own)
            for group, own in groups.items()
        }
        return cls(encoder, encoder.bank.choose([reader.place for reader in readers]), heads)

    @property
    def key(self) -> Hashable:
        """What decides, besides the shapes of its inputs, which operations this pass has."""
        heads = tuple((group, slots.values, slots.names) for group, (slots, _) in self.heads.items())
        return self.changes.names, heads

    def numbers(self) -> dict[str, list[int]]:
        """Return its inputs besides the windows: the slot of each reader, and the windows of each group of heads."""
        numbers = {"slots": self.changes.slots}
        for place, (slots, windows) in enumerate(self.heads.values()):
            numbers |= {f"slots {place}": slots.slots, f"windows {place}": windows}
        return numbers

    def logits(self, inputs: Inputs) -> Tensor:
        """Return the logits [2, B, T]; of a head that reads only [CLS], only the first position counts."""
        batch = Batch.of_inputs(inputs)
        layers = sorted({layer for group in self.heads for layer in group.head.layers})
        hidden = self.encoder.hidden_layers(batch, layers, self.changes.gather(inputs["slots"]))
        logits = torch.zeros(2, *batch.mask.shape, device=batch.mask.device)
        for place, (group, (slots, _)) in enumerate(self.heads.items()):
            own, windows = hidden.only(group.head.layers), inputs[f"windows {place}"]
            if len(self.heads) > 1:
                own = own[windows]
            output = group.logits(own, slots.gather(inputs[f"slots {place}"]))
            logits[:, :, : output.shape[2]].index_copy_(1, windows, output)
        return logits


class TorchReader(SharingModel):
    """A reader on a shared encoder: a model as `lamella.inference` asks it. Its own memory is that of its delta."""

    def __init__(
        self, encoder: TorchEncoder, folder: Path, saved: SavedModel, tokenizer: Any, encoders: TorchEncoders
    ) -> None:
        changes, head = encoder.read(folder, saved)
        self.encoder, self.run, self.device = encoder, encoders.run, encoder.device
        self.tokenizer, self.folders = tokenizer, (folder, *encoder.folders)
        self.windows, self.decoding = saved.config.windows, saved.config.decoding
        self.head = encoder.head(saved.head, self.windows.max_seq_length)
        self.gives_text = not self.head.head.at_cls
        self.head_place = self.head.add(head, str(folder / MODEL_WEIGHTS))
        self.place = encoder.bank.add(changes)
        self.nbytes = self.place.nbytes + self.head_place.nbytes

    @property
    def shared_part(self) -> object:
        """The encoder in memory that its readers share; it leaves with the last of them."""
        return self.encoder


class TorchEncoders:
    """Opens readers so that those on equal base encoders share one. An encoder is in memory while a reader uses it.

    It is the engine of all of these readers.
    """

    def __init__(
        self,
        device: str | None = None,
        precision: str = "auto",
        *,
        most_tokens: int = 16_384,
        threads: int | None = None,
    ) -> None:
        """Open nothing yet; `most_tokens`, with padding, go through an encoder at once."""
        self._device, self._precision, self.most_tokens, self._threads = device, precision, most_tokens, threads
        self._tokenizers = Tokenizers()
        self._encoders: WeakValueDictionary[str, TorchEncoder] = WeakValueDictionary()
        self._opening: dict[str, threading.Lock] = {}

    @cached_property
    def device(self) -> torch.device:
        """The device of all encoders."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        return find_device(self._device)

    @cached_property
    def precision(self) -> str:
        """The number format of all encoders."""
        return choose_precision(self._precision, self.device)

    @property
    def pace(self) -> Pace:
        """How questions should reach them."""
        return pace_of(self.device.type, self.precision)

    @property
    def usual_memory(self) -> int:
        """Bytes for the tensors of readers, unless the user sets them."""
        return CPU_MEMORY if self.device.type == "cpu" else GPU_MEMORY

    def overlap(self, windows: int) -> int:
        """Return 0: a batch runs as a whole."""
        return 0

    def reader(self, source: Source) -> TorchReader:
        """Open a reader; raise NoGraphError, with the reason, if it needs an encoder of its own."""
        folder = source.folder
        if not is_saved_model(folder):
            what = "a LoRA folder of peft" if is_model(folder) else "a checkpoint with an encoder of its own"
            raise NoGraphError(f"it is {what}")
        saved = read_saved(folder)
        check_weights(folder, saved, hash_file=remembered_sha256)
        if saved.tuned_before:
            raise NoGraphError("its encoder was tuned more than once")
        try:
            base = find_encoder(saved.base_name)
        except EncoderError as error:
            raise ModelError(f"{folder}: the base encoder cannot be loaded: {error}") from None
        if is_model(base.folder):
            raise NoGraphError("its base is a reader")
        config = read_json(base.folder / MODEL_CONFIG)
        encoder = self._encoder(folder, saved, base, config)
        tokenizer = open_tokenizer_of(folder, str(config.get("model_type")), self._tokenizers.open)
        if tokenizer is None:
            raise NoGraphError(f"its tokenizer has no {TOKENIZER} with a first token")
        check_ids(tokenizer, encoder.encoder.vocabulary_size, folder)
        return TorchReader(encoder, folder, saved, tokenizer, self)

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Return the logits of each window, [2, T] or [2, 1], in order; they may belong to any of the readers."""
        logits: list[NDArray[np.float32]] = [np.empty((2, 0), np.float32)] * len(rows)
        encoders: dict[TorchEncoder, list[int]] = {}
        for number, row in enumerate(rows):
            encoders.setdefault(row.delta.encoder, []).append(number)
        for encoder, numbers in encoders.items():
            for batch in self._batches(rows, numbers):
                for number, own in zip(batch, encoder.run([rows[number] for number in batch]), strict=True):
                    logits[number] = own
        return logits

    def _batches(self, rows: Sequence[Row], numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield windows for one pass each, of similar length, so that little is padding, within the budget."""
        lengths = np.array([len(rows[number].input_ids) for number in numbers])
        # On a GPU a small pass takes as long as a larger one.
        for similar in divide_by_length(lengths) if self.device.type == "cpu" else [np.arange(len(numbers))]:
            batch: list[int] = []
            for index in sorted(similar, key=lengths.__getitem__):
                if batch and (len(batch) + 1) * lengths[index] > self.most_tokens:
                    yield batch
                    batch = []
                batch.append(numbers[index])
            yield batch

    def _encoder(self, folder: Path, saved: SavedModel, base: Source, config: Any) -> TorchEncoder:
        sha256 = verified_hash(base, hash_file=remembered_sha256)
        pooled = saved.config.learner.reads_pooled  # the pooler is not part of the hash of the tensors
        tensors = None if pooled else saved.base_tensors_sha256
        if tensors is None and sha256 != saved.base_sha256:
            raise NoGraphError(f"its base encoder {saved.base_name} is not the file that it was trained on")
        if saved.rounding is not None:  # readers on the rounded copy must not share the original with this one
            tensors = find_original(folder, saved, base, sha256, reads_pooled=pooled) or tensors
        key = json.dumps([tensors or sha256, pooled, config], sort_keys=True)
        with self._opening.setdefault(key, threading.Lock()):  # other encoders can be opened at the same time
            encoder = self._encoders.get(key)
            if encoder is None:
                encoder = self._encoders[key] = TorchEncoder(folder, saved, self.device, self.precision)
            return encoder


def _default(model: torch.nn.Module, own: dict[str, Tensor], name: str) -> Tensor | float:
    """Return what changes nothing: own values, factors of 1, and 0 for what is added."""
    path, _, kind = name.rpartition(":")
    if kind in ("weight", "bias") and not isinstance(model.get_submodule(path), torch.nn.Linear):
        return own[f"{path}.{kind}"]
    return 1.0 if kind in FACTORS else 0.0


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
