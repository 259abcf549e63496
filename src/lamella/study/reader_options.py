"""The options that tell readers apart: runs that differ only in their seeds are one reader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

from lamella import runs
from lamella.config import RunConfig
from lamella.decoding_options import DecodingOptions
from lamella.models.names import short_model_name

SEED_OPTIONS = ("learner.seed", "training.order_seed")
BASE_OPTIONS = ("encoder.name", "learner.start")  # may name a model of another run
NO_EFFECT = ("data.workers", "data.licences", "training.checkpoint_every")  # on what is trained
ENSEMBLE_DECODING = "ensemble.decoding"
_SEED_WORD = re.compile(r"[-_.](?:order_)?seed[-_=]?\d+(?=@|$)")


def reader_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that tell its reader from others, under their full names.

    Left out are the seeds and what has no effect on training. Models of other runs have the names of these, without
    seeds. An option that was added after the run has its default, with which runs are as they were before; so have the
    decoding options of an ensemble, which are recorded in one object.
    """
    return {
        key: _comparable(key, value)
        for key, value in {**_defaults(), **options}.items()
        if key not in (*SEED_OPTIONS, *NO_EFFECT)
    }


def _comparable(key: str, value: Any) -> Any:
    if key in BASE_OPTIONS:
        return name_of_base(value)
    if key == ENSEMBLE_DECODING and isinstance(value, Mapping):
        return {**_decoding_defaults(), **value}
    return value


@cache
def _defaults() -> Mapping[str, Any]:
    return RunConfig().flat()


@cache
def _decoding_defaults() -> Mapping[str, Any]:
    return DecodingOptions().model_dump()


def without_seed(name: str) -> str:
    """Return the name of a run without the word for its seed: `dot-seed1` is `dot`, `bert-seed1@0.3` is `bert@0.3`."""
    return _SEED_WORD.sub("", name)


def name_of_base(name: Any) -> Any:
    """Return the name under which a base model is compared: one of another run by the run's name, without its seed.

    So heads on `bert-seed0@0.3` and `bert-seed1@0.3` differ only in their seeds, in whatever folders these runs are.
    """
    if not isinstance(name, str):
        return name
    path = PurePath(name)
    if path.name == runs.MODEL or path.parent.name == runs.MODELS:
        name = short_model_name(name)
    return name if "/" in name else without_seed(name)
