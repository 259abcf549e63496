"""The options of a run: their names, types, defaults and descriptions.

Configuration goes one way: file -> checked options -> objects. The sections `data`, `windows`, `encoder` and `training`
describe the pass over the data; `learner` describes what is trained in it. `run_file` reads these options from a file,
`validation` checks them as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
)

from lamella import registry
from lamella.decoding_options import DecodingOptions
from lamella.section import FileName, Section, Share, file_name

DEFAULT_ENCODER = "all-MiniLM-L6-v2"
POOLED = -1  # the encoder's pooled output, where layers are given by number


def _part(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return dict(value)
    raise ValueError('the name of a part, or a table with "name" and its options')


def _list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else [value]


def _steps(value: str) -> str:
    if not re.fullmatch("[1-9][0-9]* steps?", value):
        raise ValueError('a text such as "300 steps"')
    return value


def _module_name(value: str) -> str:
    if not all(name.isidentifier() for name in value.split(".")):
        raise ValueError('the name of a module, such as "my_package.parts"')
    return value


PartSpec = Annotated[dict[str, Any], BeforeValidator(_part)]
PartList = Annotated[list[PartSpec], BeforeValidator(_list), Field(min_length=1)]
Paths = Annotated[list[FileName], BeforeValidator(_list)]
Fraction = Annotated[float, Field(gt=0, le=1)]
# The results that can select the best checkpoint, besides those of `training.metrics`.
METRICS = (
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
)
QUESTION_METRICS = ("question_exact", "question_f1")  # of dev questions with several contexts
Interval = Annotated[float, Field(gt=0)] | Annotated[str, AfterValidator(_steps)]
Modules = Annotated[list[Annotated[str, AfterValidator(_module_name)]], BeforeValidator(_list)]


ADDED_DATA_OPTIONS = ("contexts_per_question", "context_order", "negative_contexts", "licences")
FolderKind = Literal["model", "logits"]  # a saved model, or a run with kept logits


class TeacherFolder(NamedTuple):
    """A folder that a teacher reads, as the run file names it."""

    name: str
    kind: FolderKind


class TrainFile(Section):
    """A training file, and how often an epoch takes its questions.

    With a weight or a share of negatives, a question about several contexts is taken with one of them at a time.
    """

    file: FileName = Field(description="the data file")
    weight: float = Field(default=1.0, gt=0, le=100, description="how often an epoch takes each question, on average")
    negatives: Share = Field(
        default=0.0,
        description="share of the answerable questions that get another context of the file, which resembles theirs "
        "and does not contain the answer; drawn again every epoch",
    )

    @property
    def plain(self) -> bool:
        """Whether every epoch takes the examples as they are."""
        return self.weight == 1 and not self.negatives


NameOrTrainFile = Annotated[
    Annotated[FileName, Tag("name")] | Annotated[TrainFile, Tag("table")],
    Discriminator(lambda entry: "table" if isinstance(entry, Mapping | TrainFile) else "name"),
]


class DataOptions(Section):
    """The data files, and how to treat the questions in them."""

    train: Annotated[list[NameOrTrainFile], BeforeValidator(_list)] = Field(
        default=[],
        description="training files; `demo:train` is bundled; a table gives a file a weight and a share of negatives: "
        '`{ file = "reviews.json", weight = 2, negatives = 0.5 }`',
    )
    licences: dict[str, str] = Field(
        default={},
        description="licences of training files, for the model's card, by the names in `train`; names of other files "
        'are ignored: `{ "reviews.json" = "CC BY 4.0" }`',
    )
    dev: Paths = Field(default=[], description="files to evaluate on; `demo:dev` is bundled; empty: no evaluation")
    threshold: Paths = Field(
        default=[],
        description="files to tune the no-answer threshold on after training; must differ from `train` and `dev`",
    )
    on_bad_answer: Literal["refuse", "fix", "skip"] = Field(
        default="refuse",
        description="what to do with a file that has errors: refuse it, repair it, or skip the faulty questions",
    )
    max_train_samples: int | None = Field(default=None, ge=1, description="use only the first N training questions")
    max_eval_samples: int | None = Field(default=None, ge=1, description="evaluate only the first N questions")
    contexts_per_question: int | None = Field(
        default=None, ge=1, description="train on at most N contexts of each question about several"
    )
    context_order: Literal["answerable_first", "given"] | None = Field(
        default=None,
        description="contexts that `contexts_per_question` prefers: those with an answer (`answerable_first`, the "
        "default), or the first in their given order (`given`)",
    )
    negative_contexts: float | None = Field(
        default=None,
        ge=0,
        description="of questions about several contexts, train on at most this many contexts without an answer for "
        "each with one, over all questions of a file",
    )
    negative_windows: Literal["keep", "drop", "subsample"] = Field(
        default="keep",
        description="training windows that miss the answer of an answerable question: keep all, drop all, or keep one "
        "per question",
    )
    augment: PartSpec | None = Field(
        default=None, description="augmentation of the training texts, drawn again every epoch"
    )
    workers: int = Field(
        default=1, ge=0, description="processes that augment the next epoch in advance; 0: augment between epochs"
    )

    @property
    def train_files(self) -> list[TrainFile]:
        """The training files with their weights; a repeated entry counts once, as in every list of data files."""
        entries = (TrainFile(file=entry) if isinstance(entry, str) else entry for entry in self.train)
        return list(dict.fromkeys(entries))

    def files(self, split: str) -> list[str]:
        """Return the names of the files of a split."""
        return [entry if isinstance(entry, str) else entry.file for entry in getattr(self, split)]


class WindowOptions(Section):
    """How a question and its context are cut into windows of tokens."""

    max_seq_length: int = Field(default=384, ge=16, description="tokens per window, special tokens included")
    doc_stride: int = Field(default=128, ge=0, description="tokens shared by neighbouring windows (the *overlap*)")
    stride_is: Literal["overlap", "step"] = Field(
        default="overlap",
        description="how to read doc_stride; `step`: tokens by which a window advances, as in the original BERT code",
    )
    max_query_length: int = Field(default=64, ge=1, description="tokens per question; longer questions are cut")


class EncoderOptions(Section):
    """The pretrained encoder, and which of its weights are trained."""

    name: Annotated[str, Field(min_length=1), AfterValidator(file_name)] = Field(
        default=DEFAULT_ENCODER,
        description="a folder, a saved model, a packaged encoder or a Hugging Face hub id",
    )
    from_run: str | None = Field(
        default=None,
        alias="from",
        description='use the encoder of another run in the same folder instead of `name`: `"first"`, or its checkpoint '
        'of `training.save_at`, `"first@0.3"`',
    )
    tuning: PartSpec = Field(default={"name": "full"}, description="which encoder weights are trained")
    dropout: Share | None = Field(
        default=None, description="hidden and attention dropout; unset: the encoder's own values"
    )


class TrainingOptions(Section):
    """The training loop: length, batches, evaluation and checkpoints."""

    epochs: float = Field(default=2.0, ge=0, description="passes over the training data; may be a fraction")
    max_steps: int | None = Field(default=None, ge=0, description="stop after N optimiser steps")
    batch_size: int = Field(default=16, ge=1, description="windows per batch")
    accumulate: int = Field(default=1, ge=1, description="gradient accumulation steps")
    order_seed: int = Field(default=0, ge=0, description="random seed of the data order")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="number format; `auto`: bf16 where GPU or CPU has fast instructions for it, else fp32",
    )
    compile: bool = Field(
        default=False,
        description="on a GPU, compile the layers of a trained encoder: faster steps, after some seconds; needs a C "
        "compiler",
    )
    evaluate_every: Interval = Field(
        default=1.0, description='epochs between evaluations on the dev files, or steps: "300 steps"'
    )
    checkpoint_every: Interval = Field(
        default=1.0, description='epochs (or "300 steps") between the checkpoints that `--resume` continues from'
    )
    keep: Literal["best", "last"] = Field(
        default="best",
        description="model that is saved and scored: the best checkpoint by `metric` on the dev files, or the last",
    )
    metric: str | None = Field(
        default=None, description="metric used to select the best checkpoint; unset: F1, or the task's own metric"
    )
    metrics: Annotated[list[PartSpec], BeforeValidator(_list)] = Field(
        default=[], description="metrics to compute on the dev files besides exact match and F1"
    )
    patience: int | None = Field(
        default=None, ge=1, description="early stopping: evaluations without improvement before a learner stops"
    )
    target: float | None = Field(default=None, description="stop a learner once its metric reaches this value")
    save_at: list[Annotated[float, Field(ge=0)]] = Field(
        default=[], description="epochs at which to save extra copies of the model in `models/`; 0: before training"
    )
    eval_batch_size: int = Field(default=32, ge=1, description="windows per batch in evaluation")
    strata: list[Fraction] = Field(
        default=[],
        description="fractions of the questions at which to split the data, so that no batch crosses a split; the "
        "learners' own fractions are added automatically",
    )
    trackers: list[Literal["tensorboard", "wandb"]] = Field(
        default=[], description="experiment trackers to log to, besides `history.jsonl`"
    )

    @property
    def metric_names(self) -> list[str]:
        """The metrics of `metrics`, and then the one that selects the best checkpoint if it is set."""
        names = [*(registry.split(metric)[0] for metric in self.metrics), *([self.metric] if self.metric else [])]
        return list(dict.fromkeys(names))


HEAD_OPTIONS = ("task", "mixer", "layers", "skip", "beside")  # the options of a learner that define its head


class LearnerOptions(Section):
    """What is trained on the encoder: head, loss and optimiser."""

    task: PartSpec = Field(default={"name": "span"}, description="what the reader predicts")
    mixer: PartList = Field(
        default=[{"name": "last"}], description="stages that turn the hidden layers into the task's input"
    )
    layers: Literal["encoder", "all", "pooled", "pooled+all"] | list[int] = Field(
        default="encoder",
        description="layers the mixer sees: `encoder` (1..L), `all` (0..L, 0: embeddings), `pooled` (the pooled "
        "output), `pooled+all`, or a list of layer numbers",
    )
    skip: bool = Field(default=False, description="also feed the encoder's last layer to the task")
    beside: Annotated[list[PartSpec], BeforeValidator(_list)] = Field(
        default=[], description="stages of a second mixer, in parallel to the first"
    )
    loss: PartSpec = Field(default={"name": "cross_entropy"}, description="training loss")
    learning_rate: float = Field(default=5e-5, gt=0, description="peak learning rate of the encoder")
    head_learning_rate: float | None = Field(
        default=None, gt=0, description="peak learning rate of the head; unset: same as the encoder's"
    )
    weight_decay: float = Field(default=0.01, ge=0, description="weight decay, not of biases, norms and layer weights")
    schedule: PartSpec = Field(default={"name": "linear"}, description="learning-rate schedule")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="AdamW's epsilon, added to the root of the squares")
    bias_correction: bool = Field(
        default=True,
        description="correct the bias of AdamW's first steps; false, with an epsilon of 1e-6: as in the BERT code",
    )
    max_grad_norm: float = Field(default=1.0, ge=0, description="norm to which gradients are clipped; 0: no clipping")
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="random seed of the head's weights and of dropout")
    fraction: Fraction = Field(default=1.0, description="fraction of the training questions to use")
    distil: PartSpec | None = Field(default=None, description="distillation: a teacher whose logits are learnt too")
    start: str | None = Field(
        default=None,
        min_length=1,
        description="warm start: a model or run to continue from; encoder, head and window options that are not given "
        "are taken from it",
    )

    @property
    def teacher_folders(self) -> list[TeacherFolder]:
        """The folders that the distiller declares to read (its trait `reads`), in the order of the run file."""
        if self.distil is None:
            return []
        name, options = registry.split(self.distil)
        reads: Mapping[str, FolderKind] = registry.trait("distiller", name, "reads")
        return [
            TeacherFolder(folder, kind) for option, kind in reads.items() for folder in _list(options.get(option, []))
        ]

    @property
    def reads_pooled(self) -> bool:
        """Whether the head reads the encoder's pooled output, which is built only for such heads."""
        if not isinstance(self.layers, str) or not self.layers.startswith("pooled"):
            return False
        visible = (POOLED,) if self.layers == "pooled" else (POOLED, 0, 1)
        first_stages = [stages[0]["name"] for stages in (self.mixer, self.beside) if stages]
        return any(POOLED in cast(Any, registry.part("mixer", name).make).reads(visible) for name in first_stages)


class RunConfig(Section):
    """All options of a run."""

    plugins: Modules = Field(default=[], description="modules of other packages that register parts")
    data: DataOptions = Field(default_factory=DataOptions)
    windows: WindowOptions = Field(default_factory=WindowOptions)
    encoder: EncoderOptions = Field(default_factory=EncoderOptions)
    learner: LearnerOptions = Field(default_factory=LearnerOptions)
    training: TrainingOptions = Field(default_factory=TrainingOptions)
    decoding: DecodingOptions = Field(default_factory=DecodingOptions)

    @property
    def model_names(self) -> list[str]:
        """The names of the models that the run loads: its encoder, its warm start, its teachers."""
        start = [] if self.learner.start is None else [self.learner.start]
        teachers = [teacher.name for teacher in self.learner.teacher_folders if teacher.kind == "model"]
        return [self.encoder.name, *start, *teachers]

    @property
    def inherited_options(self) -> list[str]:
        """The full names of the options that are taken from the warm start, if there is one."""
        if self.learner.start is None:
            return []
        inherited = [f"encoder.{key}" for key in ("name", "tuning") if key not in self.encoder.model_fields_set]
        inherited += [f"learner.{key}" for key in HEAD_OPTIONS if key not in self.learner.model_fields_set]
        if not self.windows.model_fields_set:  # all or none: the lengths must fit together
            inherited += [f"windows.{key}" for key in WindowOptions.model_fields]
        return inherited

    def flat(self) -> dict[str, Any]:
        """Return every option of every section under its full name, such as `learner.seed`, as JSON values.

        `plugins`, `training.metrics` and `data.licences` are left out: alone, they do not change what is trained.
        """
        table = self.model_dump(mode="json", exclude={"plugins": True, "training": {"metrics"}, "data": {"licences"}})
        return {f"{section}.{name}": value for section, options in table.items() for name, value in options.items()}

    @model_serializer(mode="wrap")
    def _without_empty_additions(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out options that were added later and are not set: such runs are stored as before these existed."""
        table: dict[str, Any] = serialise(self)
        added = [(table, "plugins"), (table.get("training", {}), "metrics")]
        added += [(table.get("data", {}), key) for key in ADDED_DATA_OPTIONS]
        for options, key in added:
            if options.get(key) in (None, [], {}):
                options.pop(key, None)
        return table
