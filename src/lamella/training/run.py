"""A training run from its plan to finished run folders."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from lamella import runs
from lamella.config import RunConfig
from lamella.data.features import Features, featurise
from lamella.data.feed import Feed, Recipe
from lamella.data.loading import Loaded, load_examples
from lamella.encoder.cache import open_cache
from lamella.encoder.extraction import CacheReport, write_cache
from lamella.encoder.loading import load_encoder
from lamella.encoder.precision import choose_precision
from lamella.encoder.sources import start_from
from lamella.encoder.storage import Storage
from lamella.encoder.tuning import trainable_line
from lamella.errors import ConfigError, DataError, RunError, UsageError
from lamella.inference.model import ReaderModel
from lamella.inference.predict import Encode
from lamella.plan import Pass, Plan
from lamella.training.checkpoint import load_checkpoint, put_checkpoint
from lamella.training.learner import Learner, Randomness, Record, make_learner
from lamella.training.loop import Splitter, fit
from lamella.training.overfit import best_possible, overfit_plan, spread, verdict
from lamella.training.processes import Processes, make_accelerator
from lamella.training.steps import BEGINNING, Steps
from lamella.training.watch import PassWatcher, headline

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """Everything a pass needs, read and checked before a folder is touched."""

    configs: Pass
    models: dict[str, ReaderModel]
    randomness: dict[str, Randomness]
    steps: Steps
    dev: Features
    feed: Feed
    targets: dict[str, float]  # of the overfit check: what each model can reach
    encode: Encode | None  # for all learners at once; None where the one learner trains its encoder
    encode_dev: Encode | None

    @property
    def any_config(self) -> RunConfig:
        """All but the learner's options is the same in each."""
        return next(iter(self.configs.values()))

    @property
    def needs(self) -> tuple[Path, ...]:
        return next(iter(self.models.values())).folders


def train_plan(
    plan: Plan,
    out: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    auto_batch: bool = False,
    overfit: int | None = None,
    cache: Path | None = None,
    say: Say = print,
) -> dict[str, Record]:
    """Train every run of a plan: one into `out` itself, several each into a folder of its name there.

    With `resume` what is finished stays, and a pass goes on from its last checkpoint. Gives the best scores of every
    run that was trained now, the same in all processes.
    """
    plan = replace(plan, passes=tuple(_located(configs, out.parent) for configs in plan.passes))
    if overfit is not None:
        plan = overfit_plan(plan)
    trackers = next(iter(plan.runs.values())).training.trackers
    processes = Processes(make_accelerator(trackers, out))
    if not processes.is_main:
        say = _silent
    if auto_batch and processes.count > 1:
        raise RunError("--auto-batch: expected one process; several would have to run out of memory together.")
    state = processes.from_main(runs.run_state(out) if out.exists() else None)
    if resume and state == "finished":
        say(f"{out}: is finished already")
        return {}
    best: dict[str, Record] = {}
    targets: dict[str, float] = {}
    several, checkpoint = len(plan.runs) > 1, out / runs.CHECKPOINT
    # A single run without a checkpoint has nothing to go on from; of several, some may be finished.
    goes_on = processes.from_main(resume and state is not None and (several or checkpoint.is_file()))
    prepared = prepare(plan.passes[0], processes, overfit=overfit, cache=cache, say=say)
    opened = runs.new_run(
        out,
        "train",
        overwrite=overwrite or resume,
        resume=goes_on,
        needs=prepared.needs,
        within=plan.runs if several else (),
    )
    with opened if processes.is_main else nullcontext():
        for number, configs in enumerate(plan.passes):
            folders = {name: out / name if several else out for name in configs}
            if goes_on:
                _refuse_other_options(configs, folders)
                if all(runs.run_state(folder) == "finished" for folder in folders.values()):
                    continue
            if number:
                prepared = prepare(configs, processes, overfit=overfit, cache=cache, say=say)
            if len(plan.passes) > 1:
                say(f"pass {number + 1} of {len(plan.passes)}: {', '.join(configs)}")
            content = load_checkpoint(checkpoint, list(configs), processes) if goes_on else None
            with ExitStack() as stack:
                stack.callback(prepared.feed.close)
                for folder in folders.values() if several and processes.is_main else ():
                    stack.enter_context(runs.new_run(folder, "train", overwrite=True, resume=content is not None))
                learners = train_pass(
                    prepared, folders, checkpoint, processes, content=content, auto_batch=auto_batch, say=say
                )
            best |= {learner.name: learner.best for learner in learners}
            targets |= prepared.targets
            if processes.is_main:
                for learner in learners:
                    if learner.failed:
                        runs.mark_failed(folders[learner.name], learner.failed)
                checkpoint.unlink(missing_ok=True)
        if several and processes.is_main:
            summarise(plan, out, say)
        for line in verdict(best, targets):
            say(line)
    if trackers:
        processes.accelerator.end_training()
    say(f"{out}: finished")
    return best


def prepare(
    configs: Pass, processes: Processes, *, overfit: int | None = None, cache: Path | None = None, say: Say
) -> Prepared:
    """Read the data, load the encoder, build the models, cut the windows.

    With `overfit` so many training questions are those to score on as well. With `cache` the hidden states are read
    from there, and the encoder stands by idle.
    """
    config = next(iter(configs.values()))
    if not config.data.train:
        raise ConfigError("data", ["train: is required and was not given."])
    train_data = read_data(config.data.train, config, config.data.max_train_samples, say)
    if overfit is None:
        dev_data = read_data(config.data.dev, config, config.data.max_eval_samples, say)
    else:
        dev_data = train_data = replace(train_data, examples=spread(train_data.examples, overfit))
    leaked = {one.context.text for one in train_data.examples} & {one.context.text for one in dev_data.examples}
    if leaked and overfit is None:
        say(f"{len(leaked)} contexts are in the train and in the dev data: the scores will be too good")

    pooler = any(one.learner.reads_pooled for one in configs.values())
    base = load_encoder(config.encoder.name, dropout=config.encoder.dropout, pooler=pooler)
    models, randomness = {}, {}
    for name, one in configs.items():
        set_seed(one.learner.seed)
        model = ReaderModel(base, one).to(processes.device)
        model.precision = choose_precision(config.training.precision, processes.device)
        models[name] = model
        if processes.rank:  # the same weights in every process, but not the same dropout
            torch.manual_seed(one.learner.seed * 1_000_003 + processes.rank)
        randomness[name] = Randomness(processes.device)
        say(f"{name + ': ' if len(configs) > 1 else ''}{trainable_line(model)}")

    recipe = Recipe(base.tokenizer, config)
    feed = Feed(recipe, train_data.examples)
    train = feed(0)
    if not len(train):
        raise DataError(f"{', '.join(config.data.train)}: no window is left to train on; see data.negative_windows.")
    if train.lost_answers:
        say(f"{train.lost_answers} answers lie on no token and are taught as no answer")
    dev = featurise(dev_data.examples, base.tokenizer, config.windows)
    steps = Steps(feed, config.training, [one.learner.fraction for one in configs.values()])
    encode: Encode | None = None if base.encoder.trainable else next(iter(models.values())).encode
    encode_dev: Encode | None = None
    if cache is not None:
        _refuse_uncacheable(config)
        states = open_cache(cache, identity={"sha256": base.sha256})
        encode, encode_dev = states.source(train), states.source(dev) if len(dev) else None
    targets = {} if overfit is None else {name: best_possible(model, dev) for name, model in models.items()}
    return Prepared(configs, models, randomness, steps, dev, feed, targets, encode, encode_dev)


def train_pass(
    run: Prepared,
    folders: Mapping[str, Path],
    checkpoint: Path,
    processes: Processes,
    *,
    content: Mapping[str, Any] | None = None,
    auto_batch: bool = False,
    say: Say,
) -> list[Learner]:
    """Train the learners of a pass into their open run folders, from its beginning or from a checkpoint's content."""
    options, steps = run.any_config.training, run.steps
    learners = [
        make_learner(
            run.models[name],
            config.learner,
            steps.taken_by(config.learner.fraction),
            name=name,
            stratum=steps.stratum(config.learner.fraction),
            randomness=run.randomness[name],
            pass_models=list(run.models.values()),
        )
        for name, config in run.configs.items()
    ]
    start, splitter = BEGINNING, Splitter(automatic=auto_batch, say=say)
    if content:
        start = put_checkpoint(content, learners, processes)
        splitter.pieces = content["pieces"]
        say(f"resuming after step {start.step} of {steps.total}")
    if processes.is_main:
        for name, folder in folders.items():
            runs.write_json(folder / runs.CONFIG, run.configs[name].model_dump(mode="json"))
            _cut(folder / runs.HISTORY, content["histories"][name] if content else 0)
    if options.trackers:
        processes.accelerator.init_trackers("lamella", config={"epochs": options.epochs})
    watcher = PassWatcher(
        learners,
        folders,
        checkpoint,
        run.dev,
        options,
        processes,
        splitter=splitter,
        encode_dev=run.encode_dev,
        targets=run.targets,
        say=say,
    )
    together = f" for {len(learners)} learners at once" if len(learners) > 1 else ""
    together += f", {processes.count} processes" if processes.count > 1 else ""
    say(
        f"training on {len(steps.ranks)} questions in {steps.windows} windows: {steps.total} steps{together}, "
        f"{learners[0].model.precision} on {processes.device.type}"
    )
    for learner in learners if run.encode is None else ():
        if learner.objective.more_forwards:
            say(f"its teacher runs an encoder {learner.objective.more_forwards} times more on every batch")
    began = time.perf_counter()
    fit(learners, steps, options, processes, watcher, encode=run.encode, start=start, split=splitter)
    say(f"trained in {time.perf_counter() - began:.0f} s")
    for learner in learners:
        front = f"{learner.name}: " if len(learners) > 1 else ""
        if learner.ended:
            say(f"{front}ended at step {learner.steps}: {learner.ended}")
        if learner.best:
            say(f"{front}best at epoch {learner.best['epoch']:g}: {headline(learner.model, learner.best)}")
    if all(learner.failed for learner in learners):
        raise RunError(str(learners[0].failed))
    return learners


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
    configs = _located(plan.passes[0], out.parent)
    config = next(iter(configs.values()))
    _refuse_uncacheable(config)
    prepared = prepare(configs, Processes(make_accelerator()), say=say)
    model = next(iter(prepared.models.values()))
    layers = {layer for one in prepared.models.values() for layer in one.head.layers}
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


def read_data(paths: Sequence[str], config: RunConfig, limit: int | None, say: Say) -> Loaded:
    """The first examples of some files, checked; says what was mended or skipped."""
    if not paths:
        return Loaded((), (), mended=0, skipped=0)
    loaded = load_examples(paths, on_bad_answer=config.data.on_bad_answer, labelled=True)
    if loaded.mended or loaded.skipped:
        say(f"{', '.join(paths)}: {loaded.mended} problems mended, {loaded.skipped} questions skipped")
    return replace(loaded, examples=loaded.examples[:limit])


def summarise(plan: Plan, out: Path, say: Say) -> None:
    """Write what the runs differ in beside what they scored, and say it best first."""
    rows = []
    for name in plan.runs:
        path = out / name / runs.RESULTS
        scores = runs.read_json(path) if path.is_file() else {}
        rows.append({"run": name, "options": dict(plan.varied[name]), "scores": scores})
    varied = sorted({key for row in rows for key in row["options"]})
    runs.write_json(out / runs.SUMMARY, {"varied": varied, "runs": rows})
    if varied:
        say(f"runs differ in {', '.join(varied)}; see {out / runs.SUMMARY}")


def _located(configs: Pass, runs_folder: Path) -> Pass:
    return {name: start_from(config, runs_folder) for name, config in configs.items()}


def _refuse_uncacheable(config: RunConfig) -> None:
    if config.encoder.tuning["name"] != "frozen":
        raise ConfigError(
            "encoder.tuning", ["expected frozen: the hidden states of an encoder that learns change at every step."]
        )
    if config.data.augment is not None:
        raise ConfigError(
            "data.augment", ["expected none with a cache: augmented texts are new in every epoch, and so in no cache."]
        )


def _refuse_other_options(configs: Pass, folders: Mapping[str, Path]) -> None:
    """A run goes on as it began: with other options its result would be neither the one nor the other."""
    for name, config in configs.items():
        path = folders[name] / runs.CONFIG
        if not path.is_file():
            continue
        now, then = config.model_dump(mode="json"), runs.read_json(path)
        for section, options in now.items():
            for option, value in options.items():
                before = then.get(section, {}).get(option)
                if before != value:
                    raise RunError(
                        f"{path}: the run began with {section}.{option} = {before!r}. Got {value!r}; resume it with "
                        "the options it began with, or start anew with --overwrite."
                    )


def _cut(path: Path, length: int) -> None:
    """Forget what a history says of the time after a checkpoint."""
    if path.is_file():
        with path.open("r+b") as file:
            file.truncate(length)


def _silent(line: str) -> None:
    pass
