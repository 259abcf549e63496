"""A run file: TOML with `--set` on top, checked as a whole, every problem said at once.

Configuration goes one way: file -> checked options -> objects. The sections `data`, `windows`, `encoder` and `training`
describe the pass over the data; `learner` describes what is trained in it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lamella import registry
from lamella.errors import ConfigError, UnknownNameError, UnreadableError
from lamella.files import read_json, read_text

DEFAULT_ENCODER = "all-MiniLM-L6-v2"
POOLED = -1  # stands among the numbers of layers for the encoder's pooled output
# Why a threshold is tuned on other questions than these.
TUNING_ELSEWHERE = {
    "train": "a reader is surer of what it has learnt, and the threshold would be that of another reader.",
    "dev": "a threshold tuned on the questions that are scored makes the score too good.",
}
SPECIAL_TOKENS = 4  # at most: RoBERTa's <s> question </s></s> context </s>


def _one_part(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return dict(value)
    raise ValueError('the name of a part, or a table with "name" and its options')


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else [value]


PartSpec = Annotated[dict[str, Any], BeforeValidator(_one_part)]
PartList = Annotated[list[PartSpec], BeforeValidator(_listed), Field(min_length=1)]
Paths = Annotated[list[str], BeforeValidator(_listed)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Metric = Literal[
    "exact",
    "f1",
    "HasAns_exact",
    "HasAns_f1",
    "NoAns_exact",
    "NoAns_f1",
    "best_exact",
    "best_f1",
    "answerability_accuracy",
    "answerability_f1",
]
Interval = Annotated[float, Field(gt=0)] | Annotated[str, Field(pattern=r"^[1-9][0-9]* steps$")]


class Section(BaseModel):
    """A table of the run file."""

    model_config = ConfigDict(**registry.STRICT, frozen=True, serialize_by_alias=True)


class DataOptions(Section):
    """Which files, and what to do with their faults."""

    train: Paths = Field(default=[], description="data files to learn from; `demo:train` is bundled")
    dev: Paths = Field(default=[], description="data files to score on, `demo:dev` among them; none: nothing is scored")
    threshold: Paths = Field(
        default=[],
        description="data files to tune the threshold for no answer on, after training; neither of train nor of dev",
    )
    on_bad_answer: Literal["refuse", "fix", "skip"] = Field(
        default="refuse", description="a file with errors is refused, mended, or read without its faulty questions"
    )
    max_train_samples: int | None = Field(default=None, ge=1, description="take only the first so many questions")
    max_eval_samples: int | None = Field(default=None, ge=1, description="score only the first so many questions")
    negative_windows: Literal["keep", "drop", "subsample"] = Field(
        default="keep",
        description="training windows of an answerable question that miss its answer: all, none, or one a question",
    )
    augment: PartSpec | None = Field(default=None, description="changes the training texts, afresh every epoch")
    workers: int = Field(
        default=1, ge=0, description="processes that prepare the next epoch of an augmentation; 0: none, it waits"
    )


class WindowOptions(Section):
    """How a question and its context become windows of tokens."""

    max_seq_length: int = Field(default=384, ge=16, description="tokens of a window, special ones included")
    doc_stride: int = Field(default=128, ge=0, description="tokens that neighbouring windows share (the *overlap*)")
    stride_is: Literal["overlap", "step"] = Field(
        default="overlap",
        description="`step` reads doc_stride as the original BERT code did: how far a window advances",
    )
    max_query_length: int = Field(default=64, ge=1, description="a longer question is cut to so many tokens")


class EncoderOptions(Section):
    """The pretrained encoder, and what of it is trained."""

    name: str = Field(
        default=DEFAULT_ENCODER, min_length=1, description="a folder, a saved model, a packaged encoder or a hub id"
    )
    from_run: str | None = Field(
        default=None,
        alias="from",
        description='in place of name: a run beside this one, `"first"`, or what its save_at kept, `"first@0.3"`',
    )
    tuning: PartSpec = Field(default={"name": "full"}, description="which weights of the encoder are trained")
    dropout: Share | None = Field(
        default=None, description="hidden and attention dropout; unset keeps the encoder's own"
    )


class TrainingOptions(Section):
    """The pass over the data."""

    epochs: float = Field(default=2.0, ge=0, description="times through the data; a fraction is allowed")
    max_steps: int | None = Field(default=None, ge=0, description="stop after so many optimiser steps")
    batch_size: int = Field(default=16, ge=1, description="windows a batch")
    accumulate: int = Field(default=1, ge=1, description="batches an optimiser step")
    order_seed: int = Field(default=0, ge=0, description="fixes the order of the data")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="`auto` is bf16 where the hardware computes it, else fp32"
    )
    evaluate_every: Interval = Field(
        default=1.0, description='epochs between two evaluations on the dev files, or a text such as "300 steps"'
    )
    checkpoint_every: Interval = Field(
        default=1.0, description="the same between two checkpoints, from which `--resume` goes on"
    )
    metric: Metric | None = Field(
        default=None, description="what the best model is the best by; unset: F1, or that of the task"
    )
    patience: int | None = Field(
        default=None, ge=1, description="stop a learner after so many evaluations without a better score"
    )
    target: float | None = Field(default=None, description="stop a learner whose score is at least this")
    save_at: list[Annotated[float, Field(ge=0)]] = Field(
        default=[], description="epochs at which the model is kept as well, in `models/`; 0 is the untrained one"
    )
    eval_batch_size: int = Field(default=32, ge=1, description="windows a batch when scoring")
    strata: list[Fraction] = Field(
        default=[],
        description="fractions of the questions that no batch crosses; those of the learners join by themselves",
    )
    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        default=[], description="where losses and scores are shown as well; `history.jsonl` is always written"
    )


HEAD_OPTIONS = ("task", "mixer", "layers", "skip", "beside")  # of a learner: what its head is built of


class LearnerOptions(Section):
    """What is trained, and how."""

    task: PartSpec = Field(default={"name": "span"}, description="what is asked of the reader")
    mixer: PartList = Field(default=[{"name": "last"}], description="stages from hidden layers to the task's input")
    layers: Literal["encoder", "all", "pooled", "pooled+all"] | list[int] = Field(
        default="encoder",
        description="what the mixer may see: layers 1..L, 0..L (0: embeddings), the pooled output, it and all, a list",
    )
    skip: bool = Field(default=False, description="the task reads the encoder's last layer beside the mixer's output")
    beside: Annotated[list[PartSpec], BeforeValidator(_listed)] = Field(
        default=[], description="a second list of stages beside the mixer's"
    )
    loss: PartSpec = Field(default={"name": "cross_entropy"}, description="what training makes small")
    learning_rate: float = Field(default=5e-5, gt=0, description="peak learning rate of the encoder")
    head_learning_rate: float | None = Field(default=None, gt=0, description="that of the head; unset: the same")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW's decay; biases and LayerNorms are spared")
    schedule: PartSpec = Field(default={"name": "linear"}, description="the learning rate over the steps")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this norm")
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="fixes the head's initial weights and the dropout")
    fraction: Fraction = Field(default=1.0, description="learn from this share of the questions")
    distil: PartSpec | None = Field(default=None, description="a teacher whose logits are learnt as well")
    start: str | None = Field(
        default=None,
        min_length=1,
        description="a model or run to start with; what is not said of encoder, head and windows is taken from it",
    )

    @property
    def reads_pooled(self) -> bool:
        """Whether the head reads the encoder's pooled output, which is built for no other."""
        if not isinstance(self.layers, str) or not self.layers.startswith("pooled"):
            return False
        seen = (POOLED,) if self.layers == "pooled" else (POOLED, 0, 1)
        firsts = [stages[0]["name"] for stages in (self.mixer, self.beside) if stages]
        return any(POOLED in cast(Any, registry.part("mixer", name).make).reads(seen) for name in firsts)


class Calibration(Section):
    """From null odds to the probability of "no answer".

    `temperature`: the logistic function of odds / temperature + bias. `isotonic`: the probability at some odds, a
    straight line between two of them, level beyond the ends.
    """

    method: Literal["temperature", "isotonic"]
    temperature: float = Field(default=1.0, gt=0)
    bias: float = 0.0
    odds: list[float] = []
    probability: list[Share] = []

    @model_validator(mode="after")
    def _steps_rise(self) -> Calibration:
        if len(self.odds) != len(self.probability) or (self.method == "isotonic" and not self.odds):
            raise ValueError("a probability for each of the odds, and at least one where it is isotonic")
        if self.odds != sorted(set(self.odds)) or self.probability != sorted(self.probability):
            raise ValueError("odds that rise, with probabilities that never fall")
        return self


class TunedOn(Section):
    """The questions that a threshold was tuned on."""

    data: str = Field(description="the names of the files, without their folders")
    questions: int = Field(ge=1)
    sha256: str = Field(description="of the sorted question ids")


class DecodingOptions(Section):
    """From logits to an answer."""

    n_best_size: int = Field(default=20, ge=1, description="candidates kept for a question")
    max_answer_length: int = Field(default=30, ge=1, description="tokens of an answer")
    method: Literal["joint", "independent"] = Field(
        default="joint",
        description="the best start and end together, or (as BERTVision) each by itself, with no limit of length",
    )
    max_context_only: bool = Field(
        default=False,
        description="an answer may start only in the window that shows the most text around it (as BERT's own code)",
    )
    null_score_diff_threshold: float = Field(
        default=0.0, description='"no answer" wins when its score exceeds the best span\'s by more than this'
    )
    calibration: Calibration | None = Field(
        default=None, description='from null odds to the probability of "no answer"; `lamella calibrate` writes it'
    )
    tuned_on: TunedOn | None = Field(
        default=None, description="what the threshold was tuned on; `lamella calibrate` writes it"
    )


class RunConfig(Section):
    """All options of a run."""

    data: DataOptions = DataOptions()
    windows: WindowOptions = WindowOptions()
    encoder: EncoderOptions = EncoderOptions()
    learner: LearnerOptions = LearnerOptions()
    training: TrainingOptions = TrainingOptions()
    decoding: DecodingOptions = DecodingOptions()

    @property
    def models_read(self) -> list[str]:
        """The names of the models that a run reads: its encoder, what it starts with, its teachers."""
        start = [] if self.learner.start is None else [self.learner.start]
        return [self.encoder.name, *start, *(self.learner.distil or {}).get("models", [])]

    @property
    def left_to_start(self) -> list[str]:
        """The options, by their full names, that a run leaves to the model it starts with, where there is one."""
        if self.learner.start is None:
            return []
        left = [f"encoder.{key}" for key in ("name", "tuning") if key not in self.encoder.model_fields_set]
        left += [f"learner.{key}" for key in HEAD_OPTIONS if key not in self.learner.model_fields_set]
        if not self.windows.model_fields_set:  # all or none: not every length goes with every other
            left += [f"windows.{key}" for key in WindowOptions.model_fields]
        return left

    def flat(self) -> dict[str, Any]:
        """Every option under its full name, `learner.seed`, as JSON has it."""
        table = self.model_dump(mode="json")
        return {f"{section}.{name}": value for section, options in table.items() for name, value in options.items()}


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file (TOML, or the `config.json` of a run), put `key=value` overrides on it, check all of it."""
    table, problems = read_table(path, overrides)
    return check_config(table, where=str(path or "configuration"), problems=problems)


def same_file(one: str, other: str) -> bool:
    """Whether two names mean the same data file, however its path is written."""
    paths = [os.path.realpath(os.path.expanduser(name)) for name in (one, other) if not name.startswith("demo:")]
    return one == other or (len(paths) == 2 and paths[0] == paths[1])


def read_table(path: Path | None, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """A run file with the overrides on it, not checked yet, and what is wrong with the overrides."""
    table = {} if path is None else _read_file(path)
    return table, [problem for override in overrides if (problem := _apply(table, override))]


def check_config(table: Mapping[str, Any], *, where: str, problems: Sequence[str] = ()) -> RunConfig:
    """Check a whole configuration: its keys and types, the options of the parts it names, the rules across them."""
    found = list(problems)
    faulty: set[str] = set()
    try:
        config = RunConfig.model_validate(dict(table))
    except ValidationError as error:
        found += registry.explain(error, table, RunConfig)
        faulty = {str(finding["loc"][0]) for finding in error.errors()}
        config = _sound_part(table, error)
    found += _part_problems(config)
    found += [problem for problem in _rule_problems(config) if problem.partition(".")[0] not in faulty]
    if found:
        raise ConfigError(where, found)
    return config


def _sound_part(table: Mapping[str, Any], error: ValidationError) -> RunConfig:
    """The configuration without its faulty options, so that what else is wrong is found in the same breath."""
    sound = {name: dict(section) if isinstance(section, Mapping) else section for name, section in table.items()}
    for finding in error.errors():
        section, *keys = finding["loc"]
        if keys and isinstance(sound.get(str(section)), dict):
            sound[str(section)].pop(keys[0], None)
        else:
            sound.pop(str(section), None)
    return RunConfig.model_validate(sound)


def _part_problems(config: RunConfig) -> list[str]:
    named = [
        ("tuning", "encoder.tuning", config.encoder.tuning),
        ("task", "learner.task", config.learner.task),
        *(("mixer", f"learner.mixer[{place}]", stage) for place, stage in enumerate(config.learner.mixer)),
        *(("mixer", f"learner.beside[{place}]", stage) for place, stage in enumerate(config.learner.beside)),
        ("loss", "learner.loss", config.learner.loss),
        ("schedule", "learner.schedule", config.learner.schedule),
        *([("distiller", "learner.distil", config.learner.distil)] if config.learner.distil else []),
        *([("augmentation", "data.augment", config.data.augment)] if config.data.augment else []),
    ]
    problems = []
    for family, where, spec in named:
        name, options = registry.split(spec)
        try:
            problems += registry.part(family, name).problems(options, where)
        except UnknownNameError as error:
            problems.append(f"{where}: {error}")
    return problems


def _rule_problems(config: RunConfig) -> list[str]:
    """What no single option can say: the rules across options."""
    problems = []
    windows = config.windows
    room = windows.max_seq_length - windows.max_query_length - SPECIAL_TOKENS
    if room < 1:
        problems.append(
            f"windows.max_seq_length: expected room for a question of max_query_length {windows.max_query_length} "
            f"tokens, {SPECIAL_TOKENS} special tokens and some context. Got {windows.max_seq_length}."
        )
    elif windows.stride_is == "overlap" and windows.doc_stride >= room:
        problems.append(
            f"windows.doc_stride: expected an overlap below {room}, the context tokens that fit beside the longest "
            f"question. Got {windows.doc_stride}."
        )
    elif windows.stride_is == "step" and windows.doc_stride < 1:
        problems.append(f"windows.doc_stride: expected a step of at least 1. Got {windows.doc_stride}.")
    problems += [
        f"training.{option}: needs data.dev, on which the score is taken. There is none."
        for option in ("patience", "target")
        if getattr(config.training, option) is not None and not config.data.dev
    ]
    problems += [
        f"data.threshold: {name} is in data.{split} too; {reason}"
        for split, reason in TUNING_ELSEWHERE.items()
        for name in config.data.threshold
        if any(same_file(name, other) for other in getattr(config.data, split))
    ]
    if config.training.max_steps is None and config.training.epochs == 0:
        problems.append("training.epochs: is 0; to save an untrained model say max_steps = 0 as well.")
    return problems


def _read_file(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        table = read_json(path)
    else:
        try:
            table = tomllib.loads(read_text(path))
        except tomllib.TOMLDecodeError as error:
            raise UnreadableError(f"{path}: broken TOML: {error}.") from None
        except (RecursionError, ValueError):
            raise UnreadableError(f"{path}: TOML beyond all measure, too deep or with a number too long.") from None
    if not isinstance(table, dict):
        raise UnreadableError(f"{path}: expected tables of options. Found {registry.shorten(table)}.")
    return table


def _apply(table: dict[str, Any], override: str) -> str | None:
    """Put one `section.key=value` into the table; the value is TOML, or a text whose quotes were left out."""
    key, equals, text = override.partition("=")
    keys = [name.strip() for name in key.split(".")]
    text = text.strip()
    if not equals or not all(keys):
        return f"--set {override}: expected section.key=value."
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if text[:1] in ("[", "{", '"', "'"):
            return f'--set {override}: expected a value as TOML writes it, say ["a", "b"] or {{name = "a", k = 3}}.'
        value = text
    except (RecursionError, ValueError):
        return f"--set {key}: expected a value of reasonable size."
    return _put(table, keys, value, override)


def _put(table: dict[str, Any], keys: Sequence[str], value: Any, override: str) -> str | None:
    name, *rest = keys
    if not rest:
        table[name] = value
        return None
    inner = table.setdefault(name, {})
    if isinstance(inner, str):  # `--set encoder.tuning.k=3` on `tuning = "top_k"`
        inner = table[name] = {"name": inner}
    # Several tables, `[[learner]]`, each get the value; a list of anything else is no table.
    tables = inner if isinstance(inner, list) and inner and all(isinstance(one, dict) for one in inner) else [inner]
    for one in tables:
        if not isinstance(one, dict):
            return f"--set {override}: {name} is not a table."
        if problem := _put(one, rest, value, override):
            return problem
    return None
