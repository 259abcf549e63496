"""The chosen number format, the warning for one that the processor lacks, and rounding to one."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from doubles import tiny_encoder
from lamella import environment
from lamella.encoder import device
from lamella.encoder.device import choose_precision, round_parameters

CPU = torch.device("cpu")


def test_rounding_keeps_the_frequencies_of_positions() -> None:
    """Rounded, they would move the tokens of a long window."""
    encoder = tiny_encoder("eurobert").encoder
    before = {name: buffer.clone() for name, buffer in encoder.named_buffers()}
    round_parameters(encoder, "bf16")
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.bfloat16}
    assert any("inv_freq" in name for name in before)
    for name, buffer in encoder.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer, before[name])


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


@pytest.mark.parametrize(
    ("vendor", "flags", "chosen"),
    [
        ("GenuineIntel", "avx512_bf16 amx_bf16", "bf16"),
        ("GenuineIntel", "avx512_bf16 amx_int8", "fp32"),
        ("AuthenticAMD", "avx512f avx512_bf16", "bf16"),
        ("AuthenticAMD", "avx2", "fp32"),
    ],
)
def test_auto_chooses_bf16_on_a_cpu_with_fast_instructions_for_it(
    vendor: str, flags: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = f"vendor_id\t: {vendor}\nmodel name\t: CPU\nflags\t\t: fpu {flags}\n"
    (tmp_path / "cpuinfo").write_text(about, encoding="utf-8")
    monkeypatch.setattr(environment, "CPU_INFO", tmp_path / "cpuinfo")
    assert choose_precision("auto", CPU) == chosen
    assert choose_precision("auto", torch.device("mps")) == "fp32"
    assert environment.environment()["processor"] == "CPU"
