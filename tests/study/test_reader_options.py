"""Which options tell the readers of two runs apart."""

from __future__ import annotations

from typing import Any

import pytest

from lamella.config import RunConfig
from lamella.study.reader_options import reader_options


def options(**changes: Any) -> dict[str, Any]:
    return {**RunConfig().flat(), **{key.replace("__", "."): value for key, value in changes.items()}}


def test_an_option_that_was_added_later_has_its_default() -> None:
    old = options()
    del old["training.compile"]
    assert reader_options(old) == reader_options(options(training__compile=False))
    assert reader_options(old) != reader_options(options(training__compile=True))


def test_a_decoding_option_of_an_ensemble_that_was_added_later_has_its_default() -> None:
    before, after = ({"ensemble.decoding": {"method": "independent", **more}} for more in ({}, {"merge": "scores"}))
    assert reader_options(before) == reader_options(after)
    assert reader_options(before) != reader_options(
        {"ensemble.decoding": {**after["ensemble.decoding"], "merge": "leads"}}
    )


@pytest.mark.parametrize(
    "key", ["learner.seed", "training.order_seed", "data.workers", "data.licences", "training.checkpoint_every"]
)
def test_seeds_and_options_without_effect_are_left_out(key: str) -> None:
    assert reader_options({**options(), key: 7}) == reader_options(options())


def test_a_model_of_another_run_goes_by_its_name() -> None:
    first, second = (options(encoder__name=f"bert-seed{seed}@0.3") for seed in (0, 1))
    assert reader_options(first) == reader_options(second)
    assert reader_options(first) != reader_options(options(encoder__name="bert-seed0@1"))
