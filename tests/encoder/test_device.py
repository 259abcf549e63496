"""The chosen number format, and the warning for one that the processor lacks."""

from __future__ import annotations

import warnings

import pytest
import torch

from lamella.encoder import device
from lamella.encoder.device import choose_precision

CPU = torch.device("cpu")


def test_bf16_on_a_processor_without_it_gives_a_warning_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_bf16_products", lambda: False)
    with pytest.warns(UserWarning, match="'bf16': this processor only emulates it, up to hundreds of times") as caught:
        assert choose_precision("bf16", CPU) == "bf16"
    assert "\n" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_precision("fp32", CPU) == "fp32"
        monkeypatch.setattr(device, "has_bf16_products", lambda: True)
        assert choose_precision("bf16", CPU) == "bf16"


@pytest.mark.parametrize(("has_it", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_chooses_bf16_if_the_processor_has_it(monkeypatch: pytest.MonkeyPatch, has_it: bool, chosen: str) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_it)
    assert choose_precision("auto", CPU) == chosen
