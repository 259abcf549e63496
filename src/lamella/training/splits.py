"""The questions of a run: its training, dev and threshold splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lamella.config import QUESTION_METRICS, DataOptions, RunConfig
from lamella.data.context_choice import choose_contexts
from lamella.data.dataset import Dataset, load_examples
from lamella.data.examples import Example
from lamella.data.mixture import Mixture, mix
from lamella.errors import ConfigError, counted
from lamella.inference.several_contexts import has_several_contexts
from lamella.progress import Log
from lamella.scoring.calibrate import check_tunable
from lamella.training.overfit import sample_evenly
from lamella.validation import THRESHOLD_OVERLAP

SPLITS = ("train", "dev", "threshold")


@dataclass(frozen=True)
class Splits:
    """The examples of each split, checked; an empty one was not asked for."""

    train: Dataset
    dev: Dataset
    threshold: Dataset
    mixture: Mixture | None = None  # None: every epoch takes all training examples

    @property
    def train_examples(self) -> Sequence[Example]:
        """Every example that some epoch trains on."""
        return self.train.examples if self.mixture is None else self.mixture.examples

    @property
    def file_records(self) -> list[dict[str, Any]]:
        """Name, size and sha256 of each data file as it was read; a file of two splits is listed once."""
        files = {file.path: file for split in (self.train, self.dev, self.threshold) for file in split.files}
        return [{"name": name, "size": file.size, "sha256": file.sha256} for name, file in files.items()]


def read_splits(config: RunConfig, *, overfit: int | None = None, log: Log) -> Splits:
    """Read and check all splits; with `overfit`, N training questions are the dev split as well."""
    data = config.data
    train = _limit_contexts(read_split("train", config, data.max_train_samples, log), data)
    if overfit is not None:
        train = replace(train, examples=sample_evenly(train.examples, overfit))
        dev = train
    else:
        dev = read_split("dev", config, data.max_eval_samples, log)
        if shared := _count_shared_contexts(train, dev):
            log(f"{counted(shared, 'context')} in both the train and the dev data: the scores will be too high")
    threshold = read_split("threshold", config, None, log)
    if threshold.examples:
        check_tunable(threshold.examples, data.threshold)
        for name, split in {"train": train, "dev": dev}.items():
            if shared := _count_shared_contexts(threshold, split):
                overlap = f"{counted(shared, 'context')} in both the threshold and the {name} data"
                log(f"{overlap}: {THRESHOLD_OVERLAP[name]}")
    _check_metric_on(dev, config)
    mixture = None
    if overfit is None:
        mixture = mix(list(zip(data.train_files, train.by_file(), strict=True)), config.training)
    return Splits(train, dev, threshold, mixture)


def read_split(split: str, config: RunConfig, limit: int | None, log: Log) -> Dataset:
    """Read the first examples of one split, and report what was fixed or skipped."""
    names = config.data.files(split)
    if not names:
        return Dataset((), (), fixed=0, skipped=0)
    loaded = load_examples(names, on_bad_answer=config.data.on_bad_answer, labelled=True)
    if loaded.fixed or loaded.skipped:
        done = f"{counted(loaded.fixed, 'problem')} fixed, {counted(loaded.skipped, 'question')} skipped"
        log(f"{', '.join(names)}: {done}")
    if loaded.warnings:
        warnings = counted(loaded.warnings, "warning")
        log(f"{', '.join(names)}: {warnings}; see lamella check {' '.join(names)}")
    return loaded.first_questions(limit)


def _limit_contexts(train: Dataset, data: DataOptions) -> Dataset:
    """Return the training data with the contexts that the run file chooses of questions about several."""
    count, order, negatives = data.contexts_per_question, data.context_order, data.negative_contexts
    if count is None and negatives is None:
        return train
    if not has_several_contexts(train.examples):
        option = "contexts_per_question" if count is not None else "negative_contexts"
        raise ConfigError(
            f"data.{option}",
            ["expected training questions about several contexts, got one context each; make such data with: "
             "lamella convert IN OUT --multi-context N"],
        )  # fmt: skip
    limited = train.choose(
        lambda examples: choose_contexts(examples, count, order=order or "answerable_first", negatives=negatives)
    )
    if not limited.examples:
        raise ConfigError(
            "data.negative_contexts",
            [f"expected a limit that leaves some contexts, got {negatives:g}: no context contains an answer."],
        )
    return limited


def _count_shared_contexts(first: Dataset, second: Dataset) -> int:
    texts = {example.context.text for example in first.examples}
    return len(texts & {example.context.text for example in second.examples})


def _check_metric_on(dev: Dataset, config: RunConfig) -> None:
    """Check that the dev data has the questions that the metric scores; else it would fail after an epoch."""
    metric = config.training.metric
    if metric is None or not dev.examples:
        return
    if metric in QUESTION_METRICS and not has_several_contexts(dev.examples):
        raise ConfigError(
            "training.metric",
            [
                f"expected dev data with several contexts per question for {metric}, got one context each; use "
                f"{metric.removeprefix('question_')}."
            ],
        )
    answerable = {example.answerable for example in dev.examples}
    if (metric.startswith("HasAns") and True not in answerable) or (
        metric.startswith("NoAns") and False not in answerable
    ):
        raise ConfigError("training.metric", [f"expected a metric of questions that the dev data has, got {metric}."])
