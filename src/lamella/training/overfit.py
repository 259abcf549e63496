"""The overfit check: if a reader cannot memorise a few questions, something is wrong with it.

The best possible score is the one that decoding the true labels gives: an answer longer than `max_answer_length`, or
one that ends within a token, is out of reach for any reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lamella import registry
from lamella.data.examples import Example
from lamella.data.windows.features import Features
from lamella.data.windows.padding import longest_first, pad
from lamella.errors import RunError
from lamella.inference.decode import decode
from lamella.inference.window_merger import WindowMerger
from lamella.models.model import ReaderModel
from lamella.plan import Plan
from lamella.scoring.evaluate import score_predictions
from lamella.scoring.metrics import language_of

STEPS = 400
# Nothing may hinder memorising: no dropout, no weight decay, no decay of the learning rate.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "data": {"augment": None, "max_eval_samples": None, "threshold": []},
    "encoder": {"dropout": 0.0},
    "learner": {
        "fraction": 1.0,
        "distil": None,
        "weight_decay": 0.0,
        "schedule": {"name": "constant", "warmup": 0.05},
    },
    "training": {
        "batch_size": 16,
        "accumulate": 1,
        "max_steps": STEPS,
        "evaluate_every": "20 steps",
        "keep": "best",
        "patience": None,
        "save_at": [],
        "strata": [],
    },
}

RATES = {"learning_rate": 1e-4, "head_learning_rate": 1e-3}  # used if the run file sets none


def overfit_plan(plan: Plan) -> Plan:
    """Return the same runs with the options of the check."""
    passes = []
    for configs in plan.passes:
        changed = {}
        for name, config in configs.items():
            given = config.learner.model_fields_set
            rates = {option: rate for option, rate in RATES.items() if option not in given}
            stages = {
                option: [_without_dropout("mixer", stage) for stage in getattr(config.learner, option)]
                for option in ("mixer", "beside")
            }
            metric = "answerability_accuracy" if config.learner.task["name"] == "answerability" else "exact"
            sections = {
                section: getattr(config, section).model_copy(update=dict(options))
                for section, options in OPTIONS.items()
            }
            tuning = _without_dropout("tuning", config.encoder.tuning)
            sections["encoder"] = sections["encoder"].model_copy(update={"tuning": tuning})
            sections["learner"] = sections["learner"].model_copy(update={**rates, **stages})
            sections["training"] = sections["training"].model_copy(update={"metric": metric})
            changed[name] = config.model_copy(update=sections)
        passes.append(changed)
    return replace(plan, passes=tuple(passes))


def _without_dropout(family: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    has = any(option.name == "dropout" for option in registry.part(family, spec["name"]).options)
    return {**spec, "dropout": 0.0} if has else dict(spec)


def sample_evenly(examples: Sequence[Example], count: int) -> tuple[Example, ...]:
    """Return `count` examples, evenly from all: the first ones of a file are often about one topic."""
    if len(examples) <= count:
        return tuple(examples)
    return tuple(examples[place] for place in np.linspace(0, len(examples) - 1, count).round().astype(int))


def best_possible_score(model: ReaderModel, features: Features) -> float:
    """Return the score of a model that predicts the true labels."""
    if not model.gives_text:
        return 100.0
    merger = WindowMerger(model.decoding)
    for windows in longest_first(features.lengths, 64):
        padded = pad(features, windows)
        logits = np.zeros((2, *padded.mask.shape))
        for row, label in zip(logits, (padded.start, padded.end), strict=True):
            np.put_along_axis(row, label[:, None], 10.0, axis=1)
        merger.add(features, decode(logits, padded, model.decoding))
    predictions = merger.predictions(features.examples)
    language = language_of(features.examples)
    return float(score_predictions(model, features.examples, predictions, language=language)["exact"])


def check_memorised(scores: Mapping[str, Mapping[str, Any]], targets: Mapping[str, float]) -> list[str]:
    """Return a line for every run; raise if one of them did not reach the best possible score."""
    reached: list[str] = []
    missed: list[str] = []
    for name, target in targets.items():
        metric = "exact" if "exact" in scores[name] else "answerability_accuracy"
        score = float(scores[name].get(metric, 0.0))
        line = f"{name}: {metric} {score:.2f} of {target:.2f} possible, at step {scores[name].get('step', 0)}"
        (reached if score >= target - 1e-9 else missed).append(line)
    if missed:
        raise RunError(
            f"not memorised within {STEPS} steps: {'; '.join(missed)}. Is the encoder trained (encoder.tuning)? "
            "Are the labels right (lamella check)?"
        )
    return reached
