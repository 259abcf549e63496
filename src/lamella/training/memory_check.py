"""Check before a pass that it fits into memory: a batch of every learner is estimated from a forward of two windows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from lamella.config import HEAD_OPTIONS
from lamella.data.windows.batches import Batch, collate
from lamella.encoder.device import is_out_of_memory
from lamella.encoder.encoder import HiddenStates
from lamella.errors import RunError, counted
from lamella.models.model import ReaderModel
from lamella.training.fitting.learner import layers_read_by
from lamella.training.free_memory import NO_LIMIT, VARIABLE, free_memory
from lamella.training.prepare import PreparedPass

SAMPLE = 2  # windows of the forward: normalisations over a batch need more than one
STATES = 3  # tensors of each trained parameter: its gradient, and two of the optimiser


@dataclass(frozen=True)
class LearnerMemory:
    """What the training of a learner takes, in bytes, besides its weights."""

    name: str
    state: int  # gradients and optimiser, all the time
    window: float  # activations per window, only while this learner computes its gradients


@dataclass(frozen=True)
class PassMemory:
    """What a pass will take, in bytes, besides what it has taken already: the weights of encoder and heads."""

    learners: tuple[LearnerMemory, ...]
    hidden: float  # per window: the layers of a shared encoder

    def total(self, batch: int, learners: Sequence[LearnerMemory] | None = None) -> float:
        """Return the peak with batches of `batch` windows: learners compute one after the other."""
        learners = self.learners if learners is None else learners
        widest = max((learner.window for learner in learners), default=0.0)
        return sum(learner.state for learner in learners) + batch * (self.hidden + widest)

    def fitting_batch(self, limit: int) -> int:
        """Return the largest batch that fits; 0 if none does."""
        fixed, per_window = self.total(0), self.total(1) - self.total(0)
        return max(0, int((limit - fixed) / per_window)) if per_window else 0

    def fitting_learners(self, batch: int, limit: int) -> int:
        """Return how many of the learners fit into one pass, the smallest first."""
        order = sorted(self.learners, key=lambda learner: batch * learner.window + learner.state)
        return max(count for count in range(len(order) + 1) if not count or self.total(batch, order[:count]) <= limit)


def check_memory(prepared: PreparedPass, device: torch.device, *, auto_batch: bool = False) -> None:
    """Raise an error if the pass would not fit into the memory that is left.

    With `auto_batch`, batches are split as needed, so that a single window must fit.
    """
    limit = free_memory(device)
    if limit is None or not prepared.steps.total:
        return
    options = prepared.any_config.training
    batch = 1 if auto_batch else options.batch_size
    try:
        memory = estimate_memory(prepared)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        clear_device_cache(garbage_collection=True)
        return  # a step may fit where two windows do not: it is split, or ends with its own advice
    if memory.total(batch) > limit:
        raise RunError(_describe(memory, batch, limit, int(prepared.windows.train.lengths.max())))


def estimate_memory(prepared: PreparedPass) -> PassMemory:
    """Estimate what a pass takes, from a forward of its longest windows; random numbers and models stay as they are."""
    learners, features = prepared.learners, prepared.windows.train
    device = learners[0].model.device
    longest = np.argsort(-features.lengths, kind="stable")[:SAMPLE]
    batch = collate(features, np.resize(longest, SAMPLE)).to(device)
    hidden: HiddenStates | None = None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if prepared.hidden_states.encode is not None:
            with torch.no_grad():
                hidden = prepared.hidden_states.encode(batch, layers_read_by(learners))
        shared = [] if hidden is None else [*hidden.layers, *([] if hidden.pooled is None else [hidden.pooled])]
        windows: dict[str, float] = {}  # heads with the same options are measured once
        memories = []
        for learner in learners:
            options = prepared.configs[learner.name].learner.model_dump(mode="json", include=set(HEAD_OPTIONS))
            key = json.dumps(options, sort_keys=True)
            if key not in windows:
                windows[key] = _activations(learner.model, batch, hidden, shared) / SAMPLE
            state = STATES * sum(parameter.nbytes for parameter in learner.parameters)
            memories.append(LearnerMemory(learner.name, state, windows[key]))
    return PassMemory(tuple(memories), sum(layer.nbytes for layer in shared) / SAMPLE)


def _activations(model: ReaderModel, batch: Batch, hidden: HiddenStates | None, shared: Sequence[Tensor]) -> int:
    """Return the bytes of what a forward keeps for its backward, and of the largest gradient on the way back."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *shared)}
    sizes: dict[int, int] = {}
    kept = []  # so that no address is used twice

    def pack(tensor: Tensor) -> None:
        """Count a tensor. It is not saved: no backward follows.

        A saved tensor that knows how it was computed would keep the whole computation alive, in a circle that is never
        freed; with it, CUDA graphs cannot be captured.
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor.detach())

    was_training, buffers = model.training, {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
            model(batch, hidden)
    finally:
        model.train(was_training)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])  # running means
    return sum(sizes.values()) + max(sizes.values(), default=0)


def _describe(memory: PassMemory, batch: int, limit: int, tokens: int) -> str:
    learners = memory.learners
    widest = max(learners, key=lambda learner: learner.window)
    needs = (
        f"expected {gigabytes(memory.total(batch))} of free memory for {counted(len(learners), 'learner')} with "
        f"batches of {counted(batch, 'window')} of up to {tokens} tokens, got {gigabytes(limit)}"
    )
    advice = []
    if size := memory.fitting_batch(limit):
        advice.append(f"lower training.batch_size to {size} (and raise training.accumulate)")
    if len(learners) > 1 and (count := memory.fitting_learners(batch, limit)):
        advice.append(f"train at most {count} of these learners in a pass ({widest.name} takes the most)")
    if not advice:
        too_many = memory.total(0) > limit  # gradients and optimiser alone, whatever the batch
        advice.append(
            "train fewer parameters, with another encoder.tuning" if too_many else "lower windows.max_seq_length"
        )
    return f"memory: {needs}; {', or '.join(advice)}. {VARIABLE}={NO_LIMIT} tries anyway."


def gigabytes(size: float) -> str:
    """Return a size in GB, with enough digits for small ones."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e9:.2g} GB"
