"""The contract of tunings: exactly the declared parameters move, and exactly those are saved.

The checks are those of `lamella.testing`; a tuning that is registered later is checked here without a new test.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from doubles import DEPTH, FAMILIES, HIDDEN, save_tiny_encoder, tiny_batch, tiny_encoder, tiny_run_config
from lamella import registry
from lamella.encoder.encoder import Encoder
from lamella.encoder.tuning import trainable_line
from lamella.errors import ConfigError
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.testing import check_tuning
from lamella.testing.tuning_checks import TUNING_CHECKS, TuningCase, snapshot, train_steps, trainable_names

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")

# (tuning, family) -> why the two do not go together, in the words of the error
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("top_k", "albert"): "one layer's weights",  # serve at every depth, so none is on top
    ("bitfit", "eurobert"): "no biases",
    ("bitfit", "modernbert"): "no biases",
}

# What a tuning trains of the encoder; a tuning that is not here must train a part of it.
TRAINS_ALL, TRAINS_NONE = {"full"}, {"frozen"}

CASES = [
    pytest.param(TuningCase(tuning, family), id=f"{tuning}-{family}")
    for tuning, family in itertools.product(registry.names("tuning"), FAMILIES)
    if (tuning, family) not in EXCEPTIONS
]
every_tuning = pytest.mark.parametrize("case", CASES)

# Tunings with options: they add other tensors to an encoder than by default, or train less of it.
WITH_OPTIONS: list[dict[str, Any]] = [
    {"name": "top_k", "k": 0},
    {"name": "top_k", "k": 2},
    {"name": "top_k", "k": DEPTH},
    {"name": "adapter", "leave_out": [1, 3], "size": 5},
    {"name": "adapter", "k": 1, "zero": True},
    {"name": "lora", "targets": ["key", "attention_output", "ffn_input", "ffn_output"], "rank": 2, "dropout": 0.3},
    {"name": "lora", "dora": True, "rslora": True, "targets": ["query", "ffn_output"], "dropout": 0.3},
    {"name": "lora", "init": "pissa", "b_learning_rate_ratio": 4.0, "targets": ["value", "ffn_input"]},
    {"name": "ia3", "targets": ["query", "ffn_input"]},
]

# The tunings that add tensors to an encoder, with options that start from exactly the encoder they are given.
ADDING: list[dict[str, Any]] = [{"name": "adapter", "zero": True}, {"name": "lora"}, {"name": "ia3"}]
ADDED = {
    "adapter": re.compile(r"\.adapter(_\d+)?\."),
    "lora": re.compile(r"\.lora(_\w+)?\.[AB]$"),
    "ia3": re.compile(r"\.ia3(_\w+)?\.factor$"),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {family: save_tiny_encoder(folder / family, family) for family in FAMILIES}


@every_tuning
@pytest.mark.parametrize("check", TUNING_CHECKS)
def test_every_tuning_keeps_the_contract(check: str, case: TuningCase) -> None:
    TUNING_CHECKS[check](case)


@pytest.mark.parametrize("family", ["bert", "distilbert", "eurobert", "modernbert", "mpnet"])
@pytest.mark.parametrize("tuning", WITH_OPTIONS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_exactly_the_declared_parameters_move_with_options(tuning: dict[str, Any], family: str) -> None:
    name, options = registry.split(tuning)
    TUNING_CHECKS["moves_exactly_its_parameters"](TuningCase(name, family, options))


@pytest.mark.parametrize(("tuning", "family"), EXCEPTIONS)
def test_a_tuning_refuses_the_families_that_it_does_not_go_with(tuning: str, family: str) -> None:
    with pytest.raises(ConfigError, match=EXCEPTIONS[tuning, family]):
        registry.build("tuning", tuning, tiny_encoder(family).encoder)


@every_tuning
def test_what_is_trained(case: TuningCase) -> None:
    encoder = tiny_encoder(case.family).encoder
    names = {name for name, _ in encoder.named_parameters()}
    case.apply(encoder)
    trained = trainable_names(encoder)
    if case.tuning in TRAINS_ALL:
        assert trained == names
    elif case.tuning in TRAINS_NONE:
        assert trained == set()
    else:
        assert trained
    assert encoder.trainable is bool(trained)


@every_tuning
def test_only_adapters_are_stacked(case: TuningCase) -> None:
    encoder = tiny_encoder(case.family).encoder
    plain = set(encoder.state_dict())
    case.apply(encoder)
    once, added = trainable_names(encoder), set(encoder.state_dict()) - plain
    case.apply(encoder)
    assert bool(added) is any(spec["name"] == case.tuning for spec in ADDING)
    if case.tuning == "adapter":
        assert not trainable_names(encoder) & added
        assert trainable_names(encoder) - once == {name.replace(".adapter.", ".adapter_2.") for name in added}
    else:  # LoRA and IA³ are merged into the weights first
        assert trainable_names(encoder) == once


def tuned_model(base: Path, tuning: str) -> ReaderModel:
    """A model whose tuned parameters have all moved."""
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(encoder={"tuning": tuning})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def last_layer(encoder: Encoder, family: str) -> Tensor:
    batch = tiny_batch(family)
    with torch.no_grad():
        return encoder.eval()(batch, (DEPTH,)).layers[0][batch.mask]


def one_after_another() -> list[Any]:
    """Return every pair on four families; the others add parts as BERT does.

    BERT and ModernBERT, whose projections are fused, have all pairs in the fast lane. The two others have three pairs
    of different tunings there, each tuning first once and second once.
    """
    fast = {("adapter", "ia3"), ("ia3", "lora"), ("lora", "adapter")}
    families = ("albert", "bert", "distilbert", "modernbert")
    return [
        pytest.param(
            family,
            first["name"],
            second,
            id=f"{family}-{first['name']}-{second['name']}",
            marks=()
            if family in ("bert", "modernbert") or (first["name"], second["name"]) in fast
            else pytest.mark.slow,
        )
        for family, first, second in itertools.product(families, ADDING, ADDING)
    ]


@pytest.mark.parametrize(("family", "first", "second"), one_after_another())
def test_a_part_added_to_a_tuned_encoder_starts_from_it_and_leaves_what_it_learnt(
    family: str, first: str, second: dict[str, Any], bases: dict[str, Path], tmp_path: Path
) -> None:
    """A saved model as the base of the next one."""
    if (family, first, second["name"]) == ("albert", "adapter", "ia3"):
        second = {**second, "targets": ["key", "value"]}  # the third has the adapter
    tuned_model(bases[family], first).save(tmp_path / "first")
    loaded = load_encoder(str(tmp_path / "first"))
    before, parts = last_layer(loaded.encoder, family), snapshot(loaded.encoder)
    assert not torch.allclose(before, last_layer(load_encoder(str(bases[family])).encoder, family), atol=1e-3)

    model = ReaderModel(loaded, tiny_run_config(encoder={"tuning": second}))
    merged = first in ("lora", "ia3") and second["name"] in ("lora", "ia3")
    start = last_layer(model.encoder, family)
    if merged:
        torch.testing.assert_close(start, before, atol=1e-5, rtol=0)
    else:
        assert torch.equal(start, before)

    train_steps(model, family)
    after = snapshot(model.encoder)
    for name, value in parts.items():
        if ADDED[first].search(name) and not merged:
            assert torch.equal(after[name], value), name
    trained = trainable_names(model.encoder)
    new = {name for name in trained if ADDED[second["name"]].search(name)}
    assert new
    assert not merged or new == trained
    assert first != "adapter" or not any(".adapter." in name for name in trained)

    model.save(tmp_path / "second")
    assert set(load_file(tmp_path / "second" / "model.safetensors")) == {f"encoder.{name}" for name in trained} | {
        "head.task.q",
        "head.task.b",
    }
    batch = tiny_batch(family)
    assert torch.equal(ReaderModel.load(tmp_path / "second")(batch), model(batch))


@pytest.mark.parametrize(
    ("family", "steps"),
    [
        pytest.param("albert", ["adapter", "ia3"], id="on a linear layer with an adapter"),
        pytest.param("distilbert", ["adapter", {"name": "lora", "targets": ["attention_output"]}], id="the same"),
    ],
)
def test_what_cannot_be_stacked_is_refused(family: str, steps: list[Any]) -> None:
    encoder = tiny_encoder(family).encoder
    for step in steps[:-1]:
        registry.build("tuning", step, encoder)
    with pytest.raises(ConfigError, match="has an adapter of an earlier run") as caught:
        registry.build("tuning", steps[-1], encoder)
    assert len(caught.value.problems) == 1


def test_the_line_for_the_user_counts_right() -> None:
    model = ReaderModel(tiny_encoder("bert"), tiny_run_config(encoder={"tuning": "frozen"}))
    layer = 4 * (HIDDEN * HIDDEN + HIDDEN) + (HIDDEN * 48 + 48) + (48 * HIDDEN + HIDDEN) + 2 * 2 * HIDDEN
    embeddings = (1000 + 130 + 2) * HIDDEN + 2 * HIDDEN
    head = 2 * HIDDEN + 2
    total = embeddings + DEPTH * layer + head
    assert trainable_line(model) == (
        f"trainable params: 66 || all params: {total:,} || trainable%: {100 * head / total:.4f}"
    )
    full = ReaderModel(tiny_encoder("bert"), tiny_run_config())
    assert trainable_line(full) == f"trainable params: {total:,} || all params: {total:,} || trainable%: 100.0000"


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """Return a function that registers a tuning for one test and returns its name."""
    registry.names("tuning")
    family = registry.FAMILIES["tuning"]
    monkeypatch.setitem(registry.FAMILIES, "tuning", replace(family, parts=dict(family.parts)))

    def register(make: Any) -> str:
        registry.register("tuning", "wrong")(make)
        return "wrong"

    return register


def undeclared(encoder: Encoder) -> None:
    """Trains nothing, and does not declare it."""
    encoder.requires_grad_(False)


def unused(encoder: Encoder) -> None:
    """Adds a parameter that nothing uses."""
    encoder.requires_grad_(False)
    encoder.model.register_parameter("unused", nn.Parameter(torch.ones(1)))


def refuses(encoder: Encoder) -> None:
    """Goes with no encoder."""
    raise ConfigError("encoder.tuning", ["not today."])


def unsaved(encoder: Encoder) -> None:
    """Changes weights that it does not train."""
    encoder.requires_grad_(False)
    encoder.layer_modules[-1].requires_grad_(True)
    with torch.no_grad():
        next(encoder.layer_modules[0].parameters()).add_(torch.rand(1))


def other_the_second_time(encoder: Encoder) -> None:
    """Trains the top layer, then the one below."""
    trained = trainable_names(encoder)
    encoder.requires_grad_(False)
    everything = len(trained) == len(list(encoder.parameters()))
    encoder.layer_modules[-1 if everything else 0].requires_grad_(True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (undeclared, "its trait trains_encoder is True, expected False; declare it where the tuning is registered"),
        (unused, "parameters did not move in training: encoder.model.unused"),
        (refuses, "refused every encoder: not today."),
        (unsaved, "tensors of the loaded reader differ from the saved one: "),
        (other_the_second_time, "applied twice, it trains other parameters"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_tuning_that_breaks_the_contract_is_refused_in_words(
    make: Any, message: str, tuning: Callable[[Any], str]
) -> None:
    with pytest.raises(AssertionError) as caught:
        check_tuning(tuning(make))
    assert message in str(caught.value)


RELATIVES = pytest.mark.parametrize("options", [{"rslora": True}, {"dora": True}, {"init": "pissa"}], ids=str)


@RELATIVES
@pytest.mark.parametrize("family", ["albert", "bert", "distilbert", "modernbert"])  # the others apply them as BERT does
def test_the_relatives_of_lora_keep_the_contract(family: str, options: dict[str, Any]) -> None:
    for check in TUNING_CHECKS.values():
        check(TuningCase("lora", family, {**options, "targets": ["value", "ffn_output"]}))


@pytest.mark.slow
@RELATIVES
def test_the_relatives_of_lora_keep_the_contract_on_every_encoder(options: dict[str, Any]) -> None:
    check_tuning("lora", **options, targets=["value", "ffn_output"])


@pytest.mark.parametrize(
    ("options", "added"), [({}, 0), ({"rslora": True, "init": "pissa"}, 0), ({"dora": True}, DEPTH * (HIDDEN + 48))]
)
def test_dora_adds_a_number_per_output(options: dict[str, Any], added: int) -> None:
    tuning = {"name": "lora", "rank": 3, "targets": ["query", "ffn_input"], **options}
    model = ReaderModel(tiny_encoder("bert"), tiny_run_config(encoder={"tuning": tuning}))
    lora = DEPTH * 3 * (HIDDEN + HIDDEN + HIDDEN + 48)
    assert trainable_line(model).startswith(f"trainable params: {lora + added + 2 * HIDDEN + 2:,} ||")


def test_the_options_reach_the_tuning_and_a_family_may_be_refused() -> None:
    check_tuning("top_k", k=2)
    with pytest.raises(AssertionError, match=r"refused every encoder: sise: no such option"):
        check_tuning("adapter", sise=2)
