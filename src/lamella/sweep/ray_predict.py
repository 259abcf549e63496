"""Predict on a Ray cluster: every worker loads the model once and answers a share of the questions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamella.data.examples import Example
from lamella.data.windows.features import slices
from lamella.errors import LamellaError, RunError, one_line
from lamella.inference.question_ids import check_unique_ids
from lamella.progress import progress

if TYPE_CHECKING:
    from lamella.inference.prediction import Prediction
    from lamella.models.loading import Precision

RETRIES = 2  # for a shard whose worker dies


def predict_on_ray(
    model: str,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    precision: Precision = "auto",
    answerable: float | None = None,
) -> dict[str, Prediction]:
    """Answer every example on the joined cluster; the answers and their order are the same as from `predict`.

    The questions are split where `predict` splits them, so that batches hold the same windows.
    """
    import ray
    from ray.util import ActorPool

    check_unique_ids(examples)
    shards = [examples[begin:end] for begin, end in slices(examples)]
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    on_gpus = resources.get("GPU", 0) >= 1
    count = max(1, min(len(shards), int(resources.get("GPU" if on_gpus else "CPU", 1))))
    machines = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    # Few workers share the cores of one machine. On several, a worker with more than one may fit on none of them.
    cpus = 1 if on_gpus or len(machines) > 1 else max(1, int(resources.get("CPU", 1)) // count)
    options = {"num_cpus": cpus, "num_gpus": 1 if on_gpus else 0, "max_restarts": RETRIES, "max_task_retries": RETRIES}
    worker = ray.remote(Worker).options(**options)
    facts = (model, Path.cwd(), batch_size, precision, answerable, None if on_gpus else cpus)
    pool = ActorPool([worker.remote(*facts) for _ in range(count)])
    predictions: dict[str, Prediction] = {}
    with progress("answering", len(examples)) as advance:
        try:
            for answered in pool.map(lambda actor, shard: actor.answer.remote(shard), shards):
                if isinstance(answered, LamellaError):
                    raise answered
                predictions.update(answered)
                advance(len(answered))
        except ray.exceptions.RayError as error:
            raise RunError(f"predict --engine ray: a worker was lost ({one_line(error)}).") from None
    return predictions


class Worker:
    """A process of the cluster, which holds the model."""

    def __init__(
        self,
        model: str,
        working_folder: Path,
        batch_size: int,
        precision: Precision,
        answerable: float | None,
        threads: int | None,  # as many as it reserves cores; onnxruntime would use all that the machine has
    ) -> None:
        if working_folder.is_dir():
            os.chdir(working_folder)  # the model may be named relative to where the command was started
        self._name, self._batch_size, self._precision = model, batch_size, precision
        self._answerable, self._threads = answerable, threads
        self._model: Any = None

    def answer(self, shard: Sequence[Example]) -> dict[str, Prediction] | LamellaError:
        """Return the answers, or the error: raised here, it would arrive wrapped in an error of Ray."""
        from lamella.inference.abstention import expecting
        from lamella.inference.predict import predict
        from lamella.models.loading import load_model

        try:
            if self._model is None:
                model = load_model(self._name, precision=self._precision, threads=self._threads, inference_only=True)
                self._model = expecting(model, self._answerable)
            return predict(self._model, shard, batch_size=self._batch_size)
        except LamellaError as error:
            return RunError(str(error))
