"""Write the hidden states that the learners of a run file read to disk."""

from __future__ import annotations

from pathlib import Path

from lamella.encoder.extraction import CacheReport, write_cache
from lamella.encoder.storage import Storage
from lamella.errors import UsageError
from lamella.plan import Plan
from lamella.progress import Log, silent
from lamella.training.early_checks import check_cacheable, check_data_files
from lamella.training.fitting.learner import layers_read_by
from lamella.training.fitting.processes import Processes, make_accelerator
from lamella.training.prepare import prepare_pass, resolve_references
from lamella.training.splits import SPLITS


def extract(
    plan: Plan,
    out: Path,
    *,
    storage: Storage = "fp16",
    all_layers: bool = False,
    overwrite: bool = False,
    log: Log = silent,
) -> CacheReport:
    """Write the hidden states that the learners of a plan read, for its training and dev windows, into a cache."""
    if len(plan.passes) > 1:
        raise UsageError(
            f"extract: expected a run file of one pass, got {len(plan.passes)}; take the options of the encoder, the "
            "data and the windows out of its grid."
        )
    configs = resolve_references(plan.passes[0], out.parent)
    config = next(iter(configs.values()))
    check_cacheable(config)
    check_data_files(config, SPLITS, where=plan.where)
    prepared = prepare_pass(configs, Processes(make_accelerator()), log=log)
    model, layers = prepared.learners[0].model, set(layers_read_by(prepared.learners))
    if all_layers:
        layers |= set(range(model.encoder.depth + 1))
    splits = {"train": prepared.windows.train, "dev": prepared.windows.dev}
    return write_cache(
        out,
        model.encoder,
        {name: features for name, features in splits.items() if len(features)},
        sorted(layers),
        identity={"sha256": model.loaded_sha256},
        storage=storage,
        precision=model.precision,
        batch_size=config.training.eval_batch_size,
        overwrite=overwrite,
        log=log,
    )
