"""What is written while a pass trains: histories, scores, the best models, checkpoints; by one process alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.config import TrainingOptions
from lamella.data.features import Features
from lamella.encoder.sources import MODEL_WEIGHTS
from lamella.encoder.tensors import put_tensors, read_tensors
from lamella.errors import ConfigError
from lamella.files import append_json_line, write_json
from lamella.inference.one_pass import Encode, predict_many
from lamella.inference.prediction import Prediction
from lamella.inference.prediction_files import write_predictions
from lamella.models.model import ReaderModel
from lamella.scoring.calibrate import tune_decoding
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of
from lamella.stopwatch import Stopwatch
from lamella.training.batch_splitting import Splitter
from lamella.training.checkpoint import save_checkpoint
from lamella.training.learner import Learner, Record
from lamella.training.processes import Processes
from lamella.training.steps import Position

SHORT = {"exact": "EM", "f1": "F1", "answerability_accuracy": "accuracy", "answerability_f1": "no-answer F1"}


class PassWatcher:
    """Keeps the books of a pass: each learner's in the learner's own run folder."""

    def __init__(
        self,
        learners: Sequence[Learner],
        folders: Mapping[str, Path],
        checkpoint_path: Path,
        dev: Features,
        options: TrainingOptions,
        processes: Processes,
        *,
        splitter: Splitter,
        encode_dev: Encode | None,
        targets: Mapping[str, float],
        made_from: Mapping[str, str],
        earlier: float = 0.0,
        say: Callable[[str], None],
    ) -> None:
        self.learners, self.folders, self.checkpoint_path = learners, folders, checkpoint_path
        self.dev, self.options, self.processes = dev, options, processes
        self.splitter, self.encode_dev, self.targets, self.say = splitter, encode_dev, targets, say
        self.made_from = made_from
        self.language = language_of(dev.examples)
        self.answering: dict[str, float] = {}  # seconds that each learner's last answers to the dev questions took
        self.evaluating = Stopwatch()
        self.earlier, self.began = earlier, time.perf_counter()  # seconds of the pass before it was resumed, and since

    @property
    def pass_seconds(self) -> float:
        """How long the pass has trained until now, in all its sittings; without its evaluations."""
        return self.earlier + time.perf_counter() - self.began - self.evaluating.seconds

    def log(self, learner: Learner, records: Sequence[Record]) -> None:
        if self.processes.is_main:
            for record in records:
                append_json_line(self.folders[learner.name] / runs.HISTORY, record)
        for record in records:
            self._track(learner, record)

    def evaluate(self, learners: Sequence[Learner], step: int, epoch: float) -> None:
        """Score some learners in one pass over the dev windows; the best of each (the last, without any) is kept."""
        with self.evaluating:
            self._evaluate(learners, epoch)

    def _evaluate(self, learners: Sequence[Learner], epoch: float) -> None:
        if not len(self.dev):
            self._save(learners, runs.MODEL)
            return
        for learner in learners if len(self.learners) > 1 else ():
            if not learner.is_finite():
                learner.ended = learner.failed = "its weights are no longer numbers: training has diverged."
        learners = [learner for learner in learners if not learner.failed]
        for learner, predictions in zip(learners, self._predict(learners, self.dev, self.encode_dev), strict=True):
            results = score_predictions(learner.model, self.dev.examples, predictions, language=self.language)
            record = {"event": "evaluation", "step": learner.steps, "epoch": round(epoch, 6), **results}
            self.log(learner, [record])
            metric = self._metric(learner, results)
            if not learner.best or results[metric] > learner.best[metric]:
                learner.best, learner.stale = {key: value for key, value in record.items() if key != "event"}, 0
                self._save([learner], runs.MODEL)
                self._write_best(learner, predictions)
            else:
                learner.stale += 1
            target = self.targets.get(learner.name, self.options.target)
            if target is not None and results[metric] >= target - 1e-9:
                learner.ended = f"reached {metric} {results[metric]:.2f}"
            elif self.options.patience and learner.stale >= self.options.patience:
                learner.ended = f"no better {metric} for {learner.stale} evaluations"
            if len(self.learners) == 1:
                self.say(f"epoch {epoch:.2f}: {headline(learner.model, results, self.options.metric)}")
        if len(self.learners) > 1 and learners:
            leader = max(learners, key=lambda one: one.best[self._metric(one, one.best)])
            self.say(
                f"epoch {epoch:.2f}: {leader.name} leads, {headline(leader.model, leader.best, self.options.metric)}"
            )

    def tune_thresholds(self, features: Features, data: Sequence[str]) -> None:
        """Give the best model of every learner its threshold, and score it on the dev data once more with that."""
        learners = [learner for learner in self.learners if not learner.failed]
        self.processes.from_main(None)  # until the best models are written
        for learner in learners:
            path = self.folders[learner.name] / runs.MODEL / MODEL_WEIGHTS
            put_tensors(learner.model, read_tensors(path), str(path))
        for learner, predictions in zip(learners, self._predict(learners, features, None), strict=True):
            tuned = tune_decoding(
                learner.model.decoding,
                features.examples,
                predictions,
                data=data,
                gives_text=learner.model.gives_text,
                language=language_of(features.examples),
            )
            learner.model.decoding = tuned.decoding
            learner.model.facts = learner.model.facts.model_copy(update={"calibrated": tuned.report})
            front = f"{learner.name}: " if len(self.learners) > 1 else ""
            self.say(f"{front}{tuned.lines()[0]}")
        if not len(self.dev):
            self._save(learners, runs.MODEL)
            return
        for learner, predictions in zip(learners, self._predict(learners, self.dev, self.encode_dev), strict=True):
            results = score_predictions(learner.model, self.dev.examples, predictions, language=self.language)
            learner.best = {"step": learner.best["step"], "epoch": learner.best["epoch"], **results}
            self.log(learner, [{"event": "threshold", **learner.best}])
            self._save([learner], runs.MODEL)
            self._write_best(learner, predictions)

    def keep(self, learners: Sequence[Learner], epoch: float) -> None:
        self._save(learners, f"{runs.MODELS}/{epoch:g}")

    def checkpoint(self, position: Position) -> None:
        histories = {name: file_size(folder / runs.HISTORY) for name, folder in self.folders.items()}
        save_checkpoint(
            self.checkpoint_path,
            self.learners,
            position,
            self.processes,
            pieces=self.splitter.pieces,
            histories=histories,
            made_from=self.made_from,
            seconds=self.pass_seconds,
        )

    def _predict(
        self, learners: Sequence[Learner], features: Features, encode: Encode | None
    ) -> list[dict[str, Prediction]]:
        clocks = [Stopwatch() for _ in learners]
        found = predict_many(
            [learner.model for learner in learners],
            features,
            encode=encode,
            batch_size=self.options.eval_batch_size,
            rank=self.processes.rank,
            processes=self.processes.count,
            gather=self.processes.gather,
            clocks=clocks,
        )
        if features is self.dev and encode is None:  # from a cache, an encoder's time would be missing
            seconds = [clock.seconds * self.processes.count for clock in clocks]
            self.answering |= dict(zip((one.name for one in learners), seconds, strict=True))
        return found

    def _write_best(self, learner: Learner, predictions: Mapping[str, Prediction]) -> None:
        if self.processes.is_main:
            folder = self.folders[learner.name]
            write_predictions(folder, learner.model, predictions, self.dev.examples)
            write_json(folder / runs.RESULTS, learner.best)

    def _save(self, learners: Sequence[Learner], name: str) -> None:
        if self.processes.is_main:
            for learner in learners:
                results = learner.best if name == runs.MODEL else None  # those of another moment are not its own
                learner.model.save(self.folders[learner.name] / name, results=results)

    def _metric(self, learner: Learner, results: Mapping[str, Any]) -> str:
        metric = self.options.metric or learner.model.head.task.headline[1]
        if metric not in results:
            raise ConfigError("training.metric", [f"expected one of {', '.join(results)}. Got {metric!r}."])
        return str(metric)

    def _track(self, learner: Learner, record: Record) -> None:
        """To the trackers; of several learners each has its name before its numbers."""
        if not self.options.trackers:
            return
        front = f"{learner.name}/" if len(self.learners) > 1 else ""
        numbers = {
            f"{front}{key}": value
            for key, value in record.items()
            if isinstance(value, int | float) and key != "step" and math.isfinite(value)
        }
        self.processes.accelerator.log(numbers, step=int(record["step"]))


def headline(model: ReaderModel, results: Mapping[str, Any], metric: str | None = None) -> str:
    """The two numbers that are told of a task, and the one that decides where it is another."""
    keys = dict.fromkeys([*model.head.task.headline, *([metric] if metric else [])])
    return "  ".join(f"{SHORT.get(key, key)} {results[key]:.2f}" for key in keys)


def file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
