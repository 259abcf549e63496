"""Provide the windows of every epoch: always the same, or cut from newly augmented examples by worker processes."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from lamella import registry
from lamella.config import RunConfig
from lamella.data.examples import Example
from lamella.data.windows.feature_cache import cached_features
from lamella.data.windows.features import Features, featurise, join_features
from lamella.progress import Log

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Recipe:
    """How to make the windows of an epoch from examples; it is sent to the worker processes."""

    tokenizer: PreTrainedTokenizerFast
    config: RunConfig

    def features(
        self, examples: Sequence[Example], epoch: int | None = None, epochs: int = 1, *, log: Log = lambda line: None
    ) -> Features:
        """Return cached or newly cut windows; for an epoch with an augmentation, windows of augmented examples.

        The result depends only on the seed, the epoch and the ids of the examples, not on the process.
        """
        data, seed, windows = self.config.data, self.config.training.order_seed, self.config.windows
        if epoch is not None and data.augment is not None:
            examples = self.augment(examples, epoch, epochs)
            return featurise(examples, self.tokenizer, windows, negative_windows=data.negative_windows, seed=seed)
        return cached_features(
            examples, self.tokenizer, windows, negative_windows=data.negative_windows, seed=seed, log=log
        )

    def augment(self, examples: Sequence[Example], epoch: int, epochs: int) -> list[Example]:
        """Return the augmented examples of an epoch."""
        assert self.config.data.augment is not None
        augment = registry.build("augmentation", self.config.data.augment)
        augmented: list[Example] = augment(examples, epoch=epoch, epochs=epochs, seed=self.config.training.order_seed)
        return augmented


class Feed:
    """Returns the windows of an epoch; workers prepare the next epoch while this one is used.

    `taken` is how often an epoch trains on each of them, on average: with a fraction of the questions less than once.
    """

    def __init__(
        self, recipe: Recipe, examples: Sequence[Example], *, taken: float = 1.0, log: Log = lambda line: None
    ) -> None:
        self.recipe, self.examples, self.taken, self.log = recipe, examples, taken, log
        self.workers = recipe.config.data.workers
        self.augments = recipe.config.data.augment is not None
        self.epochs = self._count_epochs() if self.augments else 1
        self.epoch: int | None = None
        self.current: Features | None = None
        self.pool: ProcessPoolExecutor | None = None
        self.next: tuple[int, list[Future[Features]]] | None = None

    def __call__(self, epoch: int) -> Features:
        if self.current is not None and (not self.augments or epoch == self.epoch):
            return self.current
        if not self.augments or not self.workers:
            self.current = self.recipe.features(self.examples, epoch, self.epochs, log=self.log)
        else:
            if self.next is None or self.next[0] != epoch:
                self.next = (epoch, self._submit(epoch))
            self.current = join_features([piece.result() for piece in self.next[1]])
            self.next = (epoch + 1, self._submit(epoch + 1)) if epoch + 1 < self.epochs else None
        self.epoch = epoch
        return self.current

    def close(self) -> None:
        """Stop the workers."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.pool = None

    def _count_epochs(self) -> int:
        """Return the number of epochs; for a number of steps, estimate it from the windows without augmentation.

        An augmentation may add examples, such as unchanged copies.
        """
        training = self.recipe.config.training
        if training.max_steps is None:
            return max(1, math.ceil(training.epochs))
        added = len(self.recipe.augment(self.examples, 0, 2)) / max(1, len(self.examples))
        windows = self.taken * added * len(self.recipe.features(self.examples, log=self.log))
        return max(1, math.ceil(training.max_steps * training.batch_size * training.accumulate / max(1, windows)))

    def _submit(self, epoch: int) -> list[Future[Features]]:
        if self.pool is None:
            # Not forked: libraries have started threads, and a fork could copy their locks while they are held.
            self.pool = ProcessPoolExecutor(
                self.workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(self.recipe,)
            )
        size = math.ceil(len(self.examples) / self.workers)
        parts = [self.examples[begin : begin + size] for begin in range(0, len(self.examples), size)]
        return [self.pool.submit(_make_features, part, epoch, self.epochs) for part in parts]


_recipe: Recipe | None = None  # set in worker processes


def _start_worker(recipe: Recipe) -> None:
    global _recipe
    _recipe = recipe
    if parent := parent_process():
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - no progress bars of workers; errors are returned


def _make_features(examples: Sequence[Example], epoch: int, epochs: int) -> Features:
    assert _recipe is not None
    return _recipe.features(examples, epoch, epochs)


def _exit_with(parent: BaseProcess) -> None:
    """Exit when the parent exits: a parent that is killed cannot stop its workers."""
    parent.join()
    os._exit(1)
