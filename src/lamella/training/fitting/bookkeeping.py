"""What is written while a pass trains: histories, scores, models, checkpoints; by the main process alone."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamella import runs
from lamella.data.windows.features import Features
from lamella.encoder.sources import MODEL_WEIGHTS
from lamella.encoder.tensors import put_tensors, read_tensors
from lamella.errors import ConfigError, counted
from lamella.files import append_json_line, write_json
from lamella.inference.one_pass import Encode, predict_many
from lamella.inference.prediction import Prediction
from lamella.inference.prediction_files import write_predictions
from lamella.models.model import ReaderModel
from lamella.progress import Log
from lamella.scoring.answer_metrics import build_metrics
from lamella.scoring.calibrate import tune_decoding
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of
from lamella.stopwatch import Stopwatch
from lamella.training.fitting.batch_splitting import Splitter
from lamella.training.fitting.checkpoint import save_checkpoint
from lamella.training.fitting.dev_measures import DevMeasures
from lamella.training.fitting.learner import Learner, Record
from lamella.training.fitting.processes import Processes
from lamella.training.fitting.steps import Position
from lamella.training.prepare import PreparedPass

SHORT = {
    "exact": "EM",
    "f1": "F1",
    "question_exact": "per question EM",
    "question_f1": "F1",
    "answerability_accuracy": "accuracy",
    "answerability_f1": "no-answer F1",
}


class Bookkeeper:
    """Writes what the training loop reports: each learner's records into the learner's own run folder."""

    def __init__(
        self,
        prepared: PreparedPass,
        folders: Mapping[str, Path],
        checkpoint_path: Path,
        processes: Processes,
        *,
        splitter: Splitter,
        earlier_seconds: float = 0.0,
        log: Log,
    ) -> None:
        self.learners, self.folders, self.checkpoint_path = prepared.learners, folders, checkpoint_path
        self.options, self.targets = prepared.any_config.training, prepared.targets
        self.dev, self.encode_dev = prepared.windows.dev, prepared.hidden_states.encode_dev
        self.source_hashes = prepared.source_hashes
        self.processes, self.splitter, self.log = processes, splitter, log
        self.language = language_of(self.dev.examples)
        self.metrics = build_metrics(self.options.metrics)
        self.answer_seconds: dict[str, float] = {}  # by learner: the time its last answers to the dev questions took
        self.not_training = Stopwatch()  # evaluations, saved models, checkpoints
        self.earlier_seconds, self.began = earlier_seconds, time.perf_counter()

    @property
    def pass_seconds(self) -> float:
        """How long the pass has trained, also before it was resumed, without evaluations and saving."""
        return self.earlier_seconds + time.perf_counter() - self.began - self.not_training.seconds

    def write_history(self, learner: Learner, records: Sequence[Record]) -> None:
        """Append records to the learner's history, and send them to the trackers."""
        if self.processes.is_main:
            for record in records:
                append_json_line(self.folders[learner.name] / runs.HISTORY, record)
        for record in records:
            self._track(learner, record)

    def evaluate(self, learners: Sequence[Learner], step: int, epoch: float) -> None:
        """Score learners in one pass over the dev windows, and save the models that `training.keep` keeps.

        Without dev data, the last model is saved.
        """
        seconds = {learner.name: learner.training_seconds(self.pass_seconds) for learner in learners}
        with self.not_training:
            self._evaluate(learners, epoch, seconds)

    def _evaluate(self, learners: Sequence[Learner], epoch: float, seconds: Mapping[str, float]) -> None:
        if not len(self.dev):
            self._save(learners, runs.MODEL)
            return
        for learner in learners if len(self.learners) > 1 else ():
            if not learner.has_finite_weights():
                learner.ended = learner.failed = "its weights are not finite: training has diverged."
        learners = [learner for learner in learners if not learner.failed]
        measures = [DevMeasures(learner.model) for learner in learners]
        answers = self._predict(learners, self.dev, self.encode_dev, measures)
        for learner, predictions, measured in zip(learners, answers, measures, strict=True):
            self._record_evaluation(learner, predictions, measured, epoch, seconds[learner.name])
        if len(self.learners) > 1 and learners:
            leader = max(learners, key=lambda learner: learner.kept[self._metric(learner, learner.kept)])
            scores = describe_scores(leader.model, leader.kept, self.options.metric_names)
            self.log(f"epoch {epoch:.2f}: {leader.name} leads, {scores}")

    def _record_evaluation(
        self,
        learner: Learner,
        predictions: Mapping[str, Prediction],
        measured: DevMeasures,
        epoch: float,
        seconds: float,
    ) -> None:
        """Score one learner, save it if it is to be kept so far, and decide whether it stops."""
        results = self._score(learner, predictions)
        metric = self._metric(learner, results)
        scores = {"step": learner.steps, "epoch": round(epoch, 6), **results}
        beside = {"seconds": round(seconds, 3), "dev_loss": measured.dev_loss}
        self.write_history(learner, [{"event": "evaluation", **scores, **beside}])
        improved = not learner.best or results[metric] > learner.best[metric]
        if improved:
            learner.best, learner.stale = scores, 0
        else:
            learner.stale += 1
        if improved or self.options.keep == "last":
            learner.kept = scores
            self._save([learner], runs.MODEL)
            self._write_kept(learner, predictions)
            if self.processes.is_main and (layers := measured.layer_weights()):
                write_json(self.folders[learner.name] / runs.LAYERS, layers)
        target = self.targets.get(learner.name, self.options.target)
        if target is not None and results[metric] >= target - 1e-9:
            learner.ended = f"reached {metric} {results[metric]:.2f}"
        elif self.options.patience and learner.stale >= self.options.patience:
            learner.ended = f"no better {metric} for {counted(learner.stale, 'evaluation')}"
        if len(self.learners) == 1:
            self.log(f"epoch {epoch:.2f}: {describe_scores(learner.model, results, self.options.metric_names)}")

    def tune_thresholds(self, features: Features, data: Sequence[str]) -> None:
        """Tune the threshold of each learner's saved model, and score that model on the dev data again."""
        learners = [learner for learner in self.learners if not learner.failed]
        self.processes.broadcast(None)  # wait until the models are written
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
            prefix = f"{learner.name}: " if len(self.learners) > 1 else ""
            for line in tuned.summary():
                self.log(f"{prefix}{line}")
        if not len(self.dev):
            self._save(learners, runs.MODEL)
            return
        for learner, predictions in zip(learners, self._predict(learners, self.dev, self.encode_dev), strict=True):
            results = self._score(learner, predictions)
            learner.kept = {"step": learner.kept["step"], "epoch": learner.kept["epoch"], **results}
            self.write_history(learner, [{"event": "threshold", **learner.kept}])
            self._save([learner], runs.MODEL)
            self._write_kept(learner, predictions)

    def save_models(self, learners: Sequence[Learner], epoch: float) -> None:
        """Save the models of an epoch of `save_at`."""
        with self.not_training:
            self._save(learners, f"{runs.MODELS}/{epoch:g}")

    def save_checkpoint(self, position: Position) -> None:
        """Write the checkpoint that `--resume` continues from."""
        histories = {name: _file_size(folder / runs.HISTORY) for name, folder in self.folders.items()}
        seconds = self.pass_seconds
        with self.not_training:
            save_checkpoint(
                self.checkpoint_path,
                self.learners,
                position,
                self.processes,
                pieces=self.splitter.pieces,
                histories=histories,
                source_hashes=self.source_hashes,
                seconds=seconds,
            )

    def _predict(
        self,
        learners: Sequence[Learner],
        features: Features,
        encode: Encode | None,
        measures: Sequence[DevMeasures] = (),
    ) -> list[dict[str, Prediction]]:
        clocks = [Stopwatch() for _ in learners]
        predictions = predict_many(
            [learner.model for learner in learners],
            features,
            encode=encode,
            batch_size=self.options.eval_batch_size,
            rank=self.processes.rank,
            processes=self.processes.count,
            gather=self.processes.gather,
            clocks=clocks,
            measures=measures,
        )
        if features is self.dev and encode is None:  # from a cache, the encoder's time would be missing
            seconds = [clock.seconds * self.processes.count for clock in clocks]
            self.answer_seconds |= dict(zip((learner.name for learner in learners), seconds, strict=True))
        return predictions

    def _score(self, learner: Learner, predictions: Mapping[str, Prediction]) -> dict[str, Any]:
        return score_predictions(
            learner.model, self.dev.examples, predictions, language=self.language, metrics=self.metrics
        )

    def _write_kept(self, learner: Learner, predictions: Mapping[str, Prediction]) -> None:
        if self.processes.is_main:
            folder = self.folders[learner.name]
            write_predictions(folder, learner.model, predictions, self.dev.examples)
            write_json(folder / runs.RESULTS, learner.kept)

    def _save(self, learners: Sequence[Learner], name: str) -> None:
        if self.processes.is_main:
            for learner in learners:
                results = learner.kept if name == runs.MODEL else None  # scores of another epoch are not its own
                learner.model.save(self.folders[learner.name] / name, results=results)

    def _metric(self, learner: Learner, results: Mapping[str, Any]) -> str:
        """The metric that selects the best checkpoint."""
        metric = self.options.metric or learner.model.head.task.headline[1]
        if metric not in results:
            raise ConfigError("training.metric", [f"expected one of {', '.join(results)}, got {metric!r}."])
        return str(metric)

    def _track(self, learner: Learner, record: Record) -> None:
        """Send numbers to the trackers, under the learner's name where there are several."""
        if not self.options.trackers:
            return
        prefix = f"{learner.name}/" if len(self.learners) > 1 else ""
        numbers = {
            f"{prefix}{key}": value
            for key, value in record.items()
            if isinstance(value, int | float) and key != "step" and math.isfinite(value)
        }
        self.processes.accelerator.log(numbers, step=int(record["step"]))


def describe_scores(model: ReaderModel, results: Mapping[str, Any], metrics: Sequence[str] = ()) -> str:
    """Return the two headline scores of a task, and those of `metrics` that the task has, in a line.

    Where questions have several contexts, the headline scores are per context, and those per question follow.
    """
    headline = model.head.task.headline
    shown = [*headline, *(f"question_{key}" for key in headline), *metrics]
    keys = dict.fromkeys(key for key in shown if key in results)
    return "  ".join(f"{SHORT.get(key, key)} {results[key]:.2f}" for key in keys)


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
