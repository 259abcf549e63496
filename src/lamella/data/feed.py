"""The windows of every epoch: always the same, or made afresh from augmented examples by processes of their own."""

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
from lamella.data.feature_cache import Say, cached_features
from lamella.data.features import Features, featurise, join_features

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Recipe:
    """How examples become the windows of an epoch; it travels to the processes that follow it."""

    tokenizer: PreTrainedTokenizerFast
    config: RunConfig

    def features(
        self, examples: Sequence[Example], epoch: int | None = None, epochs: int = 1, *, say: Say = lambda line: None
    ) -> Features:
        """Cut windows, or take those that an earlier run cut; of an epoch of an augmentation, from changed texts.

        What happens to an example depends on the seed, the epoch and its id alone, not on who follows the recipe.
        """
        data, seed, windows = self.config.data, self.config.training.order_seed, self.config.windows
        if epoch is not None and data.augment is not None:
            augment = registry.build("augmentation", data.augment)
            examples = augment(examples, epoch=epoch, epochs=epochs, seed=seed)
            return featurise(examples, self.tokenizer, windows, negative_windows=data.negative_windows, seed=seed)
        return cached_features(
            examples, self.tokenizer, windows, negative_windows=data.negative_windows, seed=seed, say=say
        )


class Feed:
    """Gives the windows of an epoch; while one is learnt from, workers prepare the next."""

    def __init__(self, recipe: Recipe, examples: Sequence[Example], *, say: Say = lambda line: None) -> None:
        self.recipe, self.examples, self.say = recipe, examples, say
        self.workers = recipe.config.data.workers
        self.changes = recipe.config.data.augment is not None
        self.epochs = self._count_epochs() if self.changes else 1
        self.epoch: int | None = None
        self.current: Features | None = None
        self.pool: ProcessPoolExecutor | None = None
        self.next: tuple[int, list[Future[Features]]] | None = None

    def __call__(self, epoch: int) -> Features:
        if self.current is not None and (not self.changes or epoch == self.epoch):
            return self.current
        if not self.changes or not self.workers:
            self.current = self.recipe.features(self.examples, epoch, self.epochs, say=self.say)
        else:
            if self.next is None or self.next[0] != epoch:
                self.next = (epoch, self._submit(epoch))
            self.current = join_features([piece.result() for piece in self.next[1]])
            self.next = (epoch + 1, self._submit(epoch + 1)) if epoch + 1 < self.epochs else None
        self.epoch = epoch
        return self.current

    def close(self) -> None:
        """Let the workers go."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.pool = None

    def _count_epochs(self) -> int:
        """How many epochs there will be; of a number of steps, as many as the texts make that are not augmented."""
        training = self.recipe.config.training
        if training.max_steps is None:
            return max(1, math.ceil(training.epochs))
        windows = len(self.recipe.features(self.examples, say=self.say))
        return max(1, math.ceil(training.max_steps * training.batch_size * training.accumulate / max(1, windows)))

    def _submit(self, epoch: int) -> list[Future[Features]]:
        if self.pool is None:
            # Not forked: the libraries of this process have threads by now, and a fork would freeze their locks.
            self.pool = ProcessPoolExecutor(
                self.workers, mp_context=get_context("spawn"), initializer=_remember, initargs=(self.recipe,)
            )
        size = math.ceil(len(self.examples) / self.workers)
        parts = [self.examples[begin : begin + size] for begin in range(0, len(self.examples), size)]
        return [self.pool.submit(_follow, part, epoch, self.epochs) for part in parts]


_recipe: Recipe | None = None  # of a worker


def _remember(recipe: Recipe) -> None:
    global _recipe
    _recipe = recipe
    if parent := parent_process():
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - no bar of its own on the terminal; errors go back as such


def _follow(examples: Sequence[Example], epoch: int, epochs: int) -> Features:
    assert _recipe is not None
    return _recipe.features(examples, epoch, epochs)


def _end_with(parent: BaseProcess) -> None:
    """A parent that is killed cannot tell its workers to end: they watch it."""
    parent.join()
    os._exit(1)
