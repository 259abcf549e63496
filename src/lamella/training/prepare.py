"""What a pass needs before it can begin: data, encoder, learners; nothing is written here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from lamella import registry
from lamella.config import RunConfig
from lamella.data.dataset import Dataset, load_examples
from lamella.data.feature_cache import cached_features
from lamella.data.features import Features
from lamella.data.feed import Feed, Recipe
from lamella.encoder.cache import open_cache
from lamella.encoder.device import choose_precision
from lamella.encoder.tuning import trainable_line
from lamella.errors import ConfigError, DataError
from lamella.inference.one_pass import Encode
from lamella.models.base_encoder import load_encoder
from lamella.models.facts import Facts, data_facts
from lamella.models.model import ReaderModel
from lamella.models.names import resolve_encoder_from
from lamella.plan import Pass
from lamella.scoring.calibrate import check_tunable
from lamella.training.learner import Learner, Randomness, layers_of, make_learner
from lamella.training.overfit import best_possible, spread
from lamella.training.processes import Processes
from lamella.training.steps import Steps
from lamella.training.warm_start import Start, as_its_start, begin_with
from lamella.validation import THRESHOLD_OVERLAP

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """Everything a pass needs, read and checked before a folder is touched."""

    configs: Pass
    learners: list[Learner]
    steps: Steps
    dev: Features
    threshold: Features  # to tune it on, once training is over
    feed: Feed
    targets: dict[str, float]  # of the overfit check: what each model can reach
    starts: list[Start]
    files: list[dict[str, Any]]  # name, size and sha256 of each data file, as it was read
    made_from: dict[str, str]  # hashes of what is learnt from: a run goes on with nothing else
    encode: Encode | None  # for all learners at once; None where the one learner trains its encoder
    encode_dev: Encode | None

    @property
    def any_config(self) -> RunConfig:
        """All but the learner's options is the same in each."""
        return next(iter(self.configs.values()))

    @property
    def needs(self) -> tuple[Path, ...]:
        found = [(*learner.model.folders, *learner.objective.folders) for learner in self.learners]
        found += [start.folders for start in self.starts]
        return tuple(dict.fromkeys(folder for folders in found for folder in folders))


def prepare(
    configs: Pass, processes: Processes, *, overfit: int | None = None, cache: Path | None = None, say: Say
) -> Prepared:
    """Read the data, load the encoder, build the models, cut the windows.

    With `overfit` so many training questions are those to score on as well. With `cache` the hidden states are read
    from there, and the encoder stands by idle.
    """
    config = next(iter(configs.values()))
    if not config.data.train:
        raise ConfigError("run file", ["data.train: is required and was not given."])
    train_data = read_data(config.data.train, config, config.data.max_train_samples, say)
    if overfit is None:
        dev_data = read_data(config.data.dev, config, config.data.max_eval_samples, say)
    else:
        dev_data = train_data = replace(train_data, examples=spread(train_data.examples, overfit))
    leaked = {one.context.text for one in train_data.examples} & {one.context.text for one in dev_data.examples}
    if leaked and overfit is None:
        say(f"{len(leaked)} contexts are in the train and in the dev data: the scores will be too good")
    threshold_data = read_data(config.data.threshold, config, None, say)
    if threshold_data.examples:
        check_tunable(threshold_data.examples, config.data.threshold)
        apart = {one.context.text for one in threshold_data.examples}
        for split, other in {"train": train_data, "dev": dev_data}.items():
            if shared := len(apart & {one.context.text for one in other.examples}):
                say(f"{shared} contexts are in the threshold and in the {split} data: {THRESHOLD_OVERLAP[split]}")

    pooler = any(one.learner.reads_pooled for one in configs.values())
    base = load_encoder(config.encoder.name, dropout=config.encoder.dropout, pooler=pooler)
    facts = Facts(
        train=data_facts(config.data.train, train_data.examples),
        dev=data_facts(config.data.dev, dev_data.examples) if config.data.dev and overfit is None else None,
    )
    models, randomness, starts = {}, {}, {}
    for name, one in configs.items():
        set_seed(one.learner.seed)
        model = ReaderModel(base, one).to(processes.device)
        model.facts = facts.model_copy(update={"fraction": one.learner.fraction})
        model.precision = choose_precision(config.training.precision, processes.device)
        models[name] = model
        if processes.rank:  # the same weights in every process, but not the same dropout
            torch.manual_seed(one.learner.seed * 1_000_003 + processes.rank)
        randomness[name] = Randomness(processes.device)
        whose = f"{name}: " if len(configs) > 1 else ""
        say(f"{whose}{trainable_line(model)}")
        if one.learner.start is not None:
            starts[name] = begin_with(model, one.learner.start)
            say(f"{whose}{starts[name].remark}")
            model.facts = model.facts.model_copy(update={"start": starts[name].facts})

    recipe = Recipe(base.tokenizer, config)
    feed = Feed(recipe, train_data.examples, log=say)
    train = feed(0)
    if not len(train):
        raise DataError(f"{', '.join(config.data.train)}: no window is left to train on; see data.negative_windows.")
    if train.lost_answers:
        say(f"{train.lost_answers} answers lie on no token and are taught as no answer")
    dev = cached_features(dev_data.examples, base.tokenizer, config.windows, log=say)
    threshold = cached_features(threshold_data.examples, base.tokenizer, config.windows, log=say)
    steps = Steps(feed, config.training, [one.learner.fraction for one in configs.values()])
    learners = [
        make_learner(
            models[name],
            one.learner,
            steps.taken_by(one.learner.fraction),
            name=name,
            stratum=steps.stratum(one.learner.fraction),
            randomness=randomness[name],
            pass_models=list(models.values()),
            alone=processes.count == 1,
            train=None if feed.augments else train,
        )
        for name, one in configs.items()
    ]
    for learner in learners:
        taught_by = list(learner.objective.taught_by)
        learner.model.facts = learner.model.facts.model_copy(update={"teachers": taught_by})
    encode: Encode | None = None if base.encoder.trainable else learners[0].model.encode
    encode_dev: Encode | None = None
    storage = "live"
    if cache is not None:
        refuse_uncacheable(config)
        states = open_cache(cache, identity={"sha256": base.sha256})
        states.require(layers_of(learners))
        storage = states.index.storage
        encode, encode_dev = states.source(train), states.source(dev) if len(dev) else None
    _check_metric(config, list(models.values()), dev)
    targets = {} if overfit is None else {name: best_possible(model, dev) for name, model in models.items()}
    made_from = {
        "training data": _hash(train),
        "dev data": _hash(dev),
        "encoder weights": base.sha256,
        "hidden states": storage,
        **{f"start{f' of {name}' if len(configs) > 1 else ''}": start.sha256 for name, start in starts.items()},
        **{
            f"{what}{f' of {one.name}' if len(learners) > 1 else ''}": value
            for one in learners
            for what, value in one.objective.made_from.items()
        },
    }
    return Prepared(
        configs=configs,
        learners=learners,
        steps=steps,
        dev=dev,
        threshold=threshold,
        feed=feed,
        targets=targets,
        starts=list(starts.values()),
        files=_files(train_data, dev_data, threshold_data),
        made_from=made_from,
        encode=encode,
        encode_dev=encode_dev,
    )


def located(configs: Pass, runs_folder: Path) -> Pass:
    """The same runs with `encoder.from` resolved to a folder, and what they leave to the model they start with said."""
    return {name: as_its_start(resolve_encoder_from(config, runs_folder)) for name, config in configs.items()}


def named_folders(configs: Pass) -> list[Path]:
    """The folders on disk that some runs name as their encoder, their start or their teachers."""
    named = [
        name
        for config in configs.values()
        for name in (*config.model_names, *(config.learner.distil or {}).get("runs", []))
    ]
    return [Path(os.path.expanduser(name)) for name in named if os.path.isdir(os.path.expanduser(name))]


def refuse_uncacheable(config: RunConfig) -> None:
    if registry.trait("tuning", config.encoder.tuning, "trains_encoder"):
        raise ConfigError(
            "encoder.tuning", ["expected frozen: the hidden states of an encoder that learns change at every step."]
        )
    if config.data.augment is not None:
        raise ConfigError(
            "data.augment", ["expected none with a cache: augmented texts are new in every epoch, and so in no cache."]
        )


def _check_metric(config: RunConfig, models: Sequence[ReaderModel], dev: Features) -> None:
    """A metric that the dev data or the task does not have would show only after an epoch."""
    metric = config.training.metric
    if metric is None or not len(dev):
        return
    answerable = {example.answerable for example in dev.examples}
    absent = (metric.startswith("HasAns") and True not in answerable) or (
        metric.startswith("NoAns") and False not in answerable
    )
    if absent:
        raise ConfigError("training.metric", [f"{metric}: the dev data has no question of that kind."])
    if any(not model.gives_text for model in models) and not metric.startswith("answerability"):
        raise ConfigError("training.metric", [f"{metric}: a reader of answerability gives no text to score so."])


def _files(*data: Dataset) -> list[dict[str, Any]]:
    """What says years later which files these were; one that is read twice is told once."""
    read = {file.path: file for one in data for file in one.files}
    return [{"name": name, "size": file.size, "sha256": file.sha256} for name, file in read.items()]


def _hash(features: Features) -> str:
    """Of windows and labels."""
    digest = hashlib.sha256()
    for array in (features.input_ids, features.rows, features.start, features.end):
        digest.update(array.tobytes())
    return digest.hexdigest()


def read_data(paths: Sequence[str], config: RunConfig, limit: int | None, say: Say) -> Dataset:
    """The first examples of some files, checked; reports what was fixed or skipped."""
    if not paths:
        return Dataset((), (), fixed=0, skipped=0)
    loaded = load_examples(paths, on_bad_answer=config.data.on_bad_answer, labelled=True)
    if loaded.fixed or loaded.skipped:
        say(f"{', '.join(paths)}: {loaded.fixed} problems fixed, {loaded.skipped} questions skipped")
    return replace(loaded, examples=loaded.examples[:limit])
