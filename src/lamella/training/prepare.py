"""What a pass needs before it can begin: data, encoder, models, windows, learners; nothing is written here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedTokenizerFast

from lamella.config import RunConfig
from lamella.data.doctor.checks import UNKNOWN_RATE
from lamella.data.windows.feature_cache import cached_features
from lamella.data.windows.features import Features
from lamella.data.windows.feed import Feed, Recipe
from lamella.encoder.cache import open_cache
from lamella.encoder.compiled_layers import compile_layers
from lamella.encoder.device import choose_precision
from lamella.encoder.pretrained import LoadedEncoder
from lamella.encoder.tuning import trainable_line
from lamella.errors import DataError, counted
from lamella.inference.one_pass import Encode
from lamella.models.base_encoder import load_encoder
from lamella.models.facts import Facts, data_facts, mixture_facts
from lamella.models.model import ReaderModel
from lamella.models.names import resolve_encoder_from
from lamella.plan import Pass
from lamella.progress import Log, silent
from lamella.training.early_checks import check_cacheable
from lamella.training.fitting.learner import Learner, RandomStream, layers_read_by, make_learner
from lamella.training.fitting.processes import Processes
from lamella.training.fitting.steps import Steps
from lamella.training.overfit import best_possible_score
from lamella.training.splits import Splits, read_splits
from lamella.training.warm_start import WarmStart, apply_warm_start, inherit_options


@dataclass(frozen=True)
class PreparedPass:
    """Everything a pass needs, read and checked before a folder is touched."""

    configs: Pass
    learners: list[Learner]
    steps: Steps
    windows: Windows
    hidden_states: HiddenStateSource
    targets: dict[str, float]  # of the overfit check: the score that each model can reach
    starts: list[WarmStart]
    files: list[dict[str, Any]]  # name, size and sha256 of each data file, as it was read
    source_hashes: dict[str, str]  # of what is learnt from; a resumed run must have the same

    @property
    def any_config(self) -> RunConfig:
        """One config of the pass: all but the learner's options is the same in each."""
        return next(iter(self.configs.values()))

    @property
    def needs(self) -> tuple[Path, ...]:
        """The folders that were read, which must not be written over."""
        folders = [
            *(folder for learner in self.learners for folder in (*learner.model.folders, *learner.objective.folders)),
            *(folder for start in self.starts for folder in start.folders),
        ]
        return tuple(dict.fromkeys(folders))


@dataclass(frozen=True)
class BuiltModel:
    """A new model, its own random numbers, and what it starts with."""

    model: ReaderModel
    random_stream: RandomStream
    start: WarmStart | None


@dataclass(frozen=True)
class Windows:
    """The windows of each split; those of the training data per epoch."""

    feed: Feed
    train: Features  # of the first epoch
    dev: Features
    threshold: Features  # to tune the threshold on after training


@dataclass(frozen=True)
class HiddenStateSource:
    """Where the hidden layers of a batch come from."""

    storage: str  # "live", or the number format of a cache
    encode: Encode | None  # for all learners at once; None where the single learner trains its encoder
    encode_dev: Encode | None  # a cache of the dev windows; None where the encoder runs


def prepare_pass(
    configs: Pass,
    processes: Processes,
    *,
    overfit: int | None = None,
    cache: Path | None = None,
    log: Log = silent,
) -> PreparedPass:
    """Read the data, load the encoder, build the models, cut the windows, make the learners.

    With `overfit`, N training questions are also the dev data. With `cache`, hidden states are read from that folder
    and the encoder does not run.
    """
    config = next(iter(configs.values()))
    splits = read_splits(config, overfit=overfit, log=log)
    pooler = any(config.learner.reads_pooled for config in configs.values())
    base = load_encoder(config.encoder.name, dropout=config.encoder.dropout, pooler=pooler)
    models = build_models(configs, base, _describe_data(config, splits, overfit), processes, log)
    windows = cut_windows(splits, config, base.tokenizer, log)
    fractions = [config.learner.fraction for config in configs.values()]
    steps = Steps(windows.feed, config.training, fractions, splits.mixture)
    if config.training.compile and not any(_compiles(configs[name], built) for name, built in models.items()):
        log("training.compile has no effect here: it compiles the layers of a trained encoder on a GPU")
    if config.encoder.dropout is not None and not any(built.model.encoder.trainable for built in models.values()):
        log("encoder.dropout has no effect here: a frozen encoder runs without dropout")
    learners = make_learners(configs, models, windows, steps, processes)
    hidden_states = choose_hidden_states(config, base, learners, windows, cache)
    starts = {name: built.start for name, built in models.items() if built.start is not None}
    targets = {}
    if overfit is not None:
        targets = {name: best_possible_score(built.model, windows.dev) for name, built in models.items()}
    return PreparedPass(
        configs=configs,
        learners=learners,
        steps=steps,
        windows=windows,
        hidden_states=hidden_states,
        targets=targets,
        starts=list(starts.values()),
        files=splits.file_records,
        source_hashes=_hash_sources(windows, base.loaded_sha256, hidden_states, starts, learners),
    )


def resolve_references(configs: Pass, runs_folder: Path) -> Pass:
    """Replace `encoder.from` by the folder it means, and fill in the options that a warm start decides."""
    return {name: inherit_options(resolve_encoder_from(config, runs_folder)) for name, config in configs.items()}


def build_models(
    configs: Pass, base: LoadedEncoder, facts: Facts, processes: Processes, log: Log
) -> dict[str, BuiltModel]:
    """Build the model of each run from its own seed, and load what it starts with."""
    models = {}
    for name, config in configs.items():
        prefix = f"{name}: " if len(configs) > 1 else ""
        set_seed(config.learner.seed)
        model = ReaderModel(base, config).to(processes.device)
        model.precision = choose_precision(config.training.precision, processes.device)
        model.facts = facts.model_copy(update={"fraction": config.learner.fraction, "keep": config.training.keep})
        if processes.rank:  # the same weights in every process, but not the same dropout
            torch.manual_seed(config.learner.seed * 1_000_003 + processes.rank)
        random_stream = RandomStream(processes.device)
        log(f"{prefix}{trainable_line(model)}")
        start = None
        if config.learner.start is not None:
            start = apply_warm_start(model, config.learner.start)
            log(f"{prefix}{start.remark}")
            if start.warning is not None:
                log(f"{prefix}{start.warning}")
            model.facts = model.facts.model_copy(update={"start": start.facts})
        models[name] = BuiltModel(model, random_stream, start)
    return models


def cut_windows(splits: Splits, config: RunConfig, tokenizer: PreTrainedTokenizerFast, log: Log) -> Windows:
    """Cut the examples of all splits into windows of tokens."""
    taken = max([config.learner.fraction, *config.training.strata])  # the strata include the fractions of all learners
    taken *= 1.0 if splits.mixture is None else float(splits.mixture.counts.mean())
    feed = Feed(Recipe(tokenizer, config), splits.train_examples, taken=taken, log=log)
    train = feed(0)
    if not len(train):
        names = ", ".join(config.data.files("train"))
        raise DataError(f"{names}: no window is left to train on; see data.negative_windows.")
    if train.lost_answers:
        log(f"{counted(train.lost_answers, 'answer')} without any token, trained as no answer")
    unknown = float((train.input_ids == tokenizer.unk_token_id).mean())
    if unknown > UNKNOWN_RATE:
        log(
            f"{', '.join(config.data.files('train'))}: {unknown:.1%} of the tokens are unknown to the tokenizer of "
            f"{config.encoder.name}: the reader cannot tell these words apart; choose an encoder that knows them"
        )
    dev = cached_features(splits.dev.examples, tokenizer, config.windows, log=log)
    threshold = cached_features(splits.threshold.examples, tokenizer, config.windows, log=log)
    return Windows(feed, train, dev, threshold)


def make_learners(
    configs: Pass, models: Mapping[str, BuiltModel], windows: Windows, steps: Steps, processes: Processes
) -> list[Learner]:
    """Give each model its objective, optimiser and schedule."""
    learners = []
    for name, config in configs.items():
        built, fraction = models[name], config.learner.fraction
        learner = make_learner(
            built.model,
            config.learner,
            steps.count_for(fraction),
            name=name,
            stratum=steps.stratum(fraction),
            random_stream=built.random_stream,
            pass_models=[neighbour.model for neighbour in models.values()],
            single_process=processes.count == 1,
            train=None if windows.feed.augments else windows.train,
        )
        if _compiles(config, built):
            compile_layers(built.model.encoder)
        teachers = list(learner.objective.teacher_facts)
        learner.model.facts = learner.model.facts.model_copy(update={"teachers": teachers})
        learners.append(learner)
    return learners


def _compiles(config: RunConfig, built: BuiltModel) -> bool:
    return config.training.compile and built.model.device.type == "cuda" and built.model.encoder.trainable


def choose_hidden_states(
    config: RunConfig, base: LoadedEncoder, learners: list[Learner], windows: Windows, cache: Path | None
) -> HiddenStateSource:
    """Choose between a cache on disk, the shared frozen encoder, and an encoder that its learner trains."""
    if cache is None:
        return HiddenStateSource("live", None if base.encoder.trainable else learners[0].model.encode, None)
    check_cacheable(config)
    states = open_cache(cache, identity={"sha256": base.loaded_sha256})
    states.require(layers_read_by(learners))
    encode_dev = states.source(windows.dev) if len(windows.dev) else None
    return HiddenStateSource(states.index.storage, states.source(windows.train), encode_dev)


def _describe_data(config: RunConfig, splits: Splits, overfit: int | None) -> Facts:
    scored = bool(config.data.dev) and overfit is None
    return Facts(
        train=data_facts(config.data.files("train"), splits.train.examples, config.data.licences),
        dev=data_facts(config.data.files("dev"), splits.dev.examples) if scored else None,
        mixture=mixture_facts(splits.mixture),
    )


def _hash_sources(
    windows: Windows,
    encoder_sha256: str,
    hidden_states: HiddenStateSource,
    starts: Mapping[str, WarmStart],
    learners: list[Learner],
) -> dict[str, str]:
    """Hash everything that the pass learns from; the keys are the words of the error when one changed."""

    def key(source: str, learner: str) -> str:
        return f"{source} of {learner}" if len(learners) > 1 else source

    return {
        "training data": _hash_windows(windows.train),
        "dev data": _hash_windows(windows.dev),
        "encoder weights": encoder_sha256,
        "hidden states": hidden_states.storage,
        **{key("start", name): start.sha256 for name, start in starts.items()},
        **{
            key(source, learner.name): sha256
            for learner in learners
            for source, sha256 in learner.objective.source_hashes.items()
        },
    }


def _hash_windows(features: Features) -> str:
    """Hash tokens and labels."""
    digest = hashlib.sha256()
    for array in (features.input_ids, features.rows, features.start, features.end):
        digest.update(array.tobytes())
    return digest.hexdigest()
