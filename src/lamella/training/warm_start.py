"""Where a learner starts: with what another model on the same encoder has learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from lamella import registry
from lamella.config import RunConfig
from lamella.encoder.adapters import Adapter
from lamella.encoder.lora import Lora, layers_with, learnt_at
from lamella.encoder.sources import find_encoder, is_saved_model
from lamella.encoder.tensors import trained_tensors
from lamella.encoder.tuning import merge
from lamella.errors import ConfigError, EncoderError, ModelError, UsageError
from lamella.models.facts import StartFacts
from lamella.models.model import ReaderModel
from lamella.models.names import short_model_name
from lamella.models.saved import read_saved, weights_sha256

WHERE = "learner.start"
NOTHING = 1e-8  # the share of the largest squared singular value that may be rounding, where weights were merged


@dataclass(frozen=True)
class Start:
    """What a learner started with."""

    folders: tuple[Path, ...]  # where it lies
    name: str
    sha256: str
    remark: str

    @property
    def facts(self) -> StartFacts:
        """What the model is to tell of it."""
        return StartFacts(model=short_model_name(self.name), sha256=self.sha256)


def as_its_start(config: RunConfig) -> RunConfig:
    """A run, with what its file does not say of encoder, head and windows as the model has it that it starts with."""
    try:
        folder = find_encoder(config.learner.start).folder if config.learner.start else None
    except EncoderError:  # which `begin_with` will tell better
        folder = None
    if folder is None or not is_saved_model(folder):
        return config
    theirs = read_saved(folder).config
    taken: dict[str, dict[str, Any]] = {}
    for key in config.inherited_options:
        section, _, option = key.partition(".")
        taken.setdefault(section, {})[option] = getattr(getattr(theirs, section), option)
    sections = {section: getattr(config, section).model_copy(update=options) for section, options in taken.items()}
    plugins = list(dict.fromkeys([*config.plugins, *theirs.plugins]))
    return config.model_copy(update={**sections, "plugins": plugins})


def begin_with(model: ReaderModel, name: str) -> Start:
    """Put what a saved model learnt into a new one, before that is trained.

    A model of the same tuning gives its tensors as they are: training goes on. To LoRA, any model whose encoder keeps
    its shape gives the nearest thing that LoRA can be: for each projection the matrix of that rank which is nearest to
    what the model added to its weights, by their singular values (Eckart and Young), so that a fully trained model
    becomes a thin one, and training makes good what was lost. The head is taken over where it is built alike.
    """
    try:
        other = ReaderModel.from_pretrained(name)
    except (ModelError, UsageError) as error:
        raise ConfigError(WHERE, [str(error)]) from None
    if not _same_base(model, other):
        raise ConfigError(WHERE, [f"{name}: stands on {other.base_name!r}, and not on {model.base_name!r}."])
    same_tuning = (other.tuned_before, other.tuning) == (model.tuned_before, model.tuning)
    if not same_tuning and not registry.trait("tuning", model.tuning, "low_rank"):
        raise ConfigError(
            WHERE,
            [
                f"{name}: expected the same encoder.tuning as here, {_told(model)}, unless that is lora. Got "
                f"{_told(other)}."
            ],
        )
    if same_tuning:
        told = "all that it learnt in its encoder"
        _copy(trained_tensors(other.encoder), trained_tensors(model.encoder))
    else:
        told = _approach(model, other, name)
    same_head = other.head_spec == model.head_spec
    if same_head:
        _copy(trained_tensors(other.head), trained_tensors(model.head))
    head = "its head" if same_head else "a new head, for its own is built otherwise"
    return Start(
        other.folders, name, weights_sha256(other.folders[0]), f"starts with {told} of {name}, and with {head}"
    )


def _approach(model: ReaderModel, other: ReaderModel, name: str) -> str:
    """Make each LoRA of a model the nearest to what another added to the weights that it stands on."""
    if any(isinstance(module, Adapter) for module in other.encoder.modules()):
        raise ConfigError(WHERE, [f"{name}: has adapters, which LoRA cannot start with; only with weights of its own."])
    merge(other.encoder)
    theirs = dict(other.encoder.model.named_parameters())
    ours = trained_tensors(model.encoder.model)
    kept = added = 0.0
    for path, layer in layers_with(model.encoder.model).items():
        lora = cast(Lora, learnt_at(layer))
        difference = theirs[f"{path}.weight"].detach() - layer.weight.detach().cpu()  # [O, I]
        a, b, share = _nearest(difference, len(lora.A))
        scale, rank = lora.scale**-0.5, len(a)  # beyond that rank A is left as drawn, and B as 0
        _copy({"a": a * scale, "b": b * scale}, {"a": lora.A[:rank], "b": lora.B[:, :rank]})
        energy = float(difference.square().sum())
        kept, added = kept + share * energy, added + energy
    beside = {name: value for name, value in ours.items() if name in theirs}
    _copy(theirs, beside)
    return f"{100 * kept / added if added else 100:.0f} % of what was added to these projections"


def _nearest(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
    """Two factors A [R, I] and B [O, R] whose product B A is nearest to a matrix [O, I], and its share of the squares.

    There are fewer than `rank` of them where the matrix is of a lower one: a pair of zeros would never learn anything.
    U S Vᵀ being the matrix, its first singular values are split evenly between the two, so that they learn alike. They
    are found from the eigenvectors of the matrix times itself, along its shorter side: several times as fast, and what
    of their precision is lost by the square is won back by double precision.
    """
    if matrix.shape[0] > matrix.shape[1]:
        a, b, share = _nearest(matrix.T, rank)
        return b.T, a.T, share
    double = matrix.double()
    with one_thread():
        squares, u = torch.linalg.eigh(double @ double.T)  # in rising order
    squares, u = squares.flip(0), u.flip(1)
    rank = min(rank, int((squares > NOTHING * squares[0].clamp(min=0)).sum()))
    squares, u = squares[:rank], u[:, :rank]
    root = squares**0.25
    a, b = (u.T @ double) / root[:, None], u * root
    total = float(double.square().sum())
    return a.to(matrix.dtype), b.to(matrix.dtype), float(squares.sum()) / total if total else 1.0


@contextmanager
def one_thread() -> Iterator[None]:
    """Threads that wait for one another inside LAPACK wait long where other processes take their cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _copy(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> None:
    for name, value in ours.items():
        value.copy_(theirs[name])


def _same_base(one: ReaderModel, other: ReaderModel) -> bool:
    by_tensors = one.base_tensors_sha256 is not None and one.base_tensors_sha256 == other.base_tensors_sha256
    return one.base_sha256 == other.base_sha256 or by_tensors


def _told(model: ReaderModel) -> str:
    options = ", ".join(f"{name} = {value}" for name, value in model.tuning.items() if name != "name")
    return f"{model.tuning['name']} ({options})" if options else str(model.tuning["name"])
