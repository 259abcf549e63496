"""The hidden states that the learners of a run file read, written to disk."""

from __future__ import annotations

from pathlib import Path

from lamella.encoder.extraction import CacheReport, write_cache
from lamella.encoder.storage import Storage
from lamella.errors import UsageError
from lamella.plan import Plan
from lamella.training.learner import layers_of
from lamella.training.prepare import Say, located, prepare, refuse_uncacheable
from lamella.training.processes import Processes, make_accelerator


def extract(
    plan: Plan,
    out: Path,
    *,
    storage: Storage = "fp16",
    all_layers: bool = False,
    overwrite: bool = False,
    say: Say = print,
) -> CacheReport:
    """Write the hidden states that the learners of a plan read, of its training and its dev windows, into a cache."""
    if len(plan.passes) > 1:
        raise UsageError("extract: expected a run file of one pass; its grid varies what the encoder reads.")
    configs = located(plan.passes[0], out.parent)
    config = next(iter(configs.values()))
    refuse_uncacheable(config)
    prepared = prepare(configs, Processes(make_accelerator()), say=say)
    model, layers = prepared.learners[0].model, set(layers_of(prepared.learners))
    if all_layers:
        layers |= set(range(model.encoder.depth + 1))
    splits = {"train": prepared.feed(0), "dev": prepared.dev}
    return write_cache(
        out,
        model.encoder,
        {name: features for name, features in splits.items() if len(features)},
        sorted(layers),
        identity={"sha256": model.base_sha256},
        storage=storage,
        precision=model.precision,
        batch_size=config.training.eval_batch_size,
        overwrite=overwrite,
        say=say,
    )
