"""A training run from its configuration to a finished run folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import set_seed

from lamella import runs
from lamella.config import RunConfig
from lamella.data.batches import BucketOrder
from lamella.data.features import Features, featurise
from lamella.data.loading import Loaded, load_examples
from lamella.encoder.loading import load_encoder
from lamella.encoder.precision import choose_precision
from lamella.encoder.tuning import trainable_line
from lamella.errors import DataError
from lamella.inference.evaluate import language_of
from lamella.inference.model import ReaderModel
from lamella.inference.predict import predict_features, score_predictions, write_predictions
from lamella.training.learner import make_learner
from lamella.training.loop import fit, total_steps


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs, read and checked before a folder is touched."""

    config: RunConfig
    accelerator: Accelerator
    model: ReaderModel
    train: Features
    dev: Features


def prepare(config: RunConfig, *, say: Callable[[str], None]) -> Prepared:
    """Read the data, load the encoder, build the model, cut the windows."""
    train_data = read_data(config.data.train, config, config.data.max_train_samples, say)
    dev_data = read_data(config.data.dev, config, config.data.max_eval_samples, say)
    leaked = {one.context.text for one in train_data.examples} & {one.context.text for one in dev_data.examples}
    if leaked:
        say(f"{len(leaked)} contexts are in the train and in the dev data: the scores will be too good")

    precision = config.training.precision
    accelerator = Accelerator(mixed_precision="fp16" if precision == "fp16" else "no")  # fp16 needs its gradient scaler
    set_seed(config.learner.seed)
    base = load_encoder(config.encoder.name, dropout=config.encoder.dropout, pooler=config.learner.reads_pooled)
    model = ReaderModel(base, config).to(accelerator.device)
    model.precision = choose_precision(precision, accelerator.device)
    say(trainable_line(model))

    train = featurise(
        train_data.examples,
        model.tokenizer,
        config.windows,
        negative_windows=config.data.negative_windows,
        seed=config.training.order_seed,
    )
    if not len(train):
        raise DataError(f"{', '.join(config.data.train)}: no window is left to train on; see data.negative_windows.")
    if train.lost_answers:
        say(f"{train.lost_answers} answers lie on no token and are taught as no answer")
    return Prepared(config, accelerator, model, train, featurise(dev_data.examples, model.tokenizer, config.windows))


def train(run: Prepared, folder: Path, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Train into an open run folder; the best dev scores, or {} without dev data."""
    options, model = run.config.training, run.model
    runs.write_json(folder / runs.CONFIG, run.config.model_dump(mode="json"))
    steps = total_steps(options, len(BucketOrder(run.train.lengths, options.batch_size)))
    learner = make_learner(model, run.config.learner, steps)
    keeper = _BestModel(model, run.dev, options.eval_batch_size, folder, say)
    say(
        f"training on {len(run.train.examples)} questions in {len(run.train)} windows: {steps} steps, "
        f"{model.precision} on {run.accelerator.device.type}"
    )
    began = time.perf_counter()
    fit(
        learner,
        run.train,
        options,
        run.accelerator,
        log=_logger(folder),
        evaluate=keeper.evaluate,
        save=lambda epoch: model.save(folder / runs.MODELS / f"{epoch:g}"),
    )
    say(f"trained in {time.perf_counter() - began:.0f} s")
    if keeper.best:
        say(f"best at epoch {keeper.best['epoch']:g}: {_headline(model, keeper.best)}")
    return keeper.best


def read_data(paths: Sequence[str], config: RunConfig, limit: int | None, say: Callable[[str], None]) -> Loaded:
    """The first examples of some files, checked; says what was mended or skipped."""
    if not paths:
        return Loaded((), (), mended=0, skipped=0)
    loaded = load_examples(paths, on_bad_answer=config.data.on_bad_answer, labelled=True)
    if loaded.mended or loaded.skipped:
        say(f"{', '.join(paths)}: {loaded.mended} problems mended, {loaded.skipped} questions skipped")
    return replace(loaded, examples=loaded.examples[:limit])


class _BestModel:
    """Scores the model on the dev windows and keeps the best one (the last, where there is nothing to score)."""

    def __init__(
        self, model: ReaderModel, dev: Features, batch_size: int, folder: Path, say: Callable[[str], None]
    ) -> None:
        self.model, self.dev, self.batch_size, self.folder, self.say = model, dev, batch_size, folder, say
        self.language = language_of(dev.examples)
        self.best: dict[str, Any] = {}

    def evaluate(self, step: int, epoch: float) -> None:
        if not len(self.dev):
            self.model.save(self.folder / runs.MODEL)
            return
        predictions = predict_features(self.model, self.dev, batch_size=self.batch_size)
        results = score_predictions(self.model, self.dev.examples, predictions, language=self.language)
        runs.append_json_line(self.folder / runs.HISTORY, {"step": step, "epoch": round(epoch, 6), **results})
        self.say(f"epoch {epoch:.2f}: {_headline(self.model, results)}")
        deciding = self.model.head.task.headline[1]
        if not self.best or results[deciding] > self.best[deciding]:
            self.best = {"step": step, "epoch": round(epoch, 6), **results}
            self.model.save(self.folder / runs.MODEL)
            write_predictions(self.folder, self.model, predictions)
            runs.write_json(self.folder / runs.RESULTS, self.best)


def _headline(model: ReaderModel, results: Mapping[str, Any]) -> str:
    """The two numbers that are told of a task."""
    short = {"exact": "EM", "f1": "F1", "answerability_accuracy": "accuracy", "answerability_f1": "no-answer F1"}
    return "  ".join(f"{short[key]} {results[key]:.2f}" for key in model.head.task.headline)


def _logger(folder: Path) -> Callable[[dict[str, Any]], None]:
    return lambda record: runs.append_json_line(folder / runs.HISTORY, record)
