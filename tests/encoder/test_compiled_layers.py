"""Compiled layers train as plain ones do, and their copies have weights of their own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import save_tiny_encoder, tiny_batch, tiny_encoder
from lamella import registry
from lamella.encoder import compiled_layers
from lamella.encoder.compiled_layers import compile_layers
from lamella.encoder.encoder import Encoder
from lamella.errors import UsageError
from lamella.plan import load_plan
from lamella.training.fitting.processes import Processes, make_accelerator
from lamella.training.prepare import prepare_pass
from run_files import write_run_file

FAMILIES = ("albert", "bert", "deberta-v2", "modernbert", "mpnet")


def gradients(encoder: Encoder, device: str = "cpu") -> dict[str, torch.Tensor]:
    encoder.zero_grad()
    hidden = encoder(tiny_batch(encoder.model.config.model_type).to(torch.device(device)), [encoder.depth])
    (hidden.layers[0] * hidden.mask[..., None]).square().sum().backward()
    return {name: value.grad for name, value in encoder.named_parameters() if value.grad is not None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what compiled code is called with; compiling itself takes a minute on a CPU."""
    calls: list[Any] = []

    def watched(function: Any, dynamic: bool) -> Any:
        def run(layer: Any, *arguments: Any, **options: Any) -> Any:
            calls.append(layer)
            return function(layer, *arguments, **options)

        return run

    monkeypatch.setattr(torch, "compile", watched)
    monkeypatch.setattr(compiled_layers, "_can_compile", lambda: True)
    monkeypatch.setattr(compiled_layers, "_compiled", compiled_layers._compiled.__wrapped__)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_run_in_training_only(family: str, calls: list[Any]) -> None:
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain, compiled = (tiny_encoder(family, **({} if family == "modernbert" else options)).encoder for _ in range(2))
    compile_layers(compiled)
    right = gradients(plain.train())
    assert not calls
    found = gradients(compiled.train())
    assert calls == (compiled.layer_modules * compiled.depth)[: compiled.depth]
    torch.testing.assert_close(found, right)
    compiled.eval()(tiny_batch(family), [0])
    assert len(calls) == compiled.depth, "none in evaluation"


@pytest.mark.parametrize(
    ("encoder", "training", "noted"),
    [
        ("", "compile = true", "training.compile"),
        ('tuning = "full"\ndropout = 0.2', "compile = false", ""),
        ('tuning = "frozen"\ndropout = 0.2', "compile = false", "encoder.dropout"),
    ],
)
def test_an_option_without_effect_is_noted(
    tmp_path: Path, on_cpu: None, encoder: str, training: str, noted: str
) -> None:
    name = save_tiny_encoder(tmp_path / "tiny")
    file = write_run_file(tmp_path / "run.toml", f'name = "{name}"\n{encoder}', training=training)
    (configs,) = load_plan(file).passes
    lines: list[str] = []
    prepare_pass(configs, Processes(make_accelerator([], tmp_path)), log=lines.append)
    assert [line.split()[0] for line in lines if "has no effect" in line] == noted.split()


def test_a_copy_runs_with_its_own_weights(calls: list[Any]) -> None:
    encoder = tiny_encoder().encoder.train()
    compile_layers(encoder)
    other = copy.deepcopy(encoder)
    gradients(other)
    assert calls == other.layer_modules


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UsageError, match=r"training\.compile: needs Triton and a C compiler"):
        compile_layers(tiny_encoder().encoder)


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own code
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_gradients_equal_plain_ones(family: str) -> None:
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain, compiled = (
        tiny_encoder(family, **({} if family == "modernbert" else options)).encoder.cuda().train() for _ in range(2)
    )
    compile_layers(compiled)
    torch.testing.assert_close(gradients(compiled, "cuda"), gradients(plain, "cuda"), atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own code
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_lora_of_a_rank_that_is_no_multiple_of_8_compiles() -> None:
    shape = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
    found = []
    for compiles in (False, True):
        encoder = tiny_encoder("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shape).encoder
        torch.manual_seed(0)
        registry.build("tuning", {"name": "lora", "rank": 19}, encoder)
        for name, value in encoder.named_parameters():
            if name.endswith(".B"):
                torch.nn.init.normal_(value, std=0.1)
        encoder.cuda().train()
        if compiles:
            compile_layers(encoder)
        with torch.autocast("cuda", torch.bfloat16):
            found.append(gradients(encoder, "cuda"))
    torch.testing.assert_close(*found, atol=0.05, rtol=0.05)
