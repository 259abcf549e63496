"""A pass that does not fit into memory is refused before anything is written, with numbers and advice."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from doubles import save_tiny_encoder
from lamella.errors import UsageError
from lamella.plan import load_plan
from lamella.training import free_memory as memory
from lamella.training.fitting.processes import Processes, make_accelerator
from lamella.training.free_memory import free_memory
from lamella.training.memory_check import PassMemory, estimate_memory
from lamella.training.prepare import PreparedPass, prepare_pass
from outcomes import outcome
from run_files import write_run_file

pytestmark = pytest.mark.usefixtures("one_thread", "on_cpu", "read_once")
Lamella = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")
HEADS = """
[[run]]
name = "last"
[[run]]
name = "adapter"
learner = { layers = "all", mixer = { name = "compress", size = 8 } }
[[run]]
name = "wide"
learner = { layers = "all", mixer = { name = "conv_nxn", maps = 16 } }
[[run]]
name = "normalised"
learner = { layers = "all", mixer = { name = "xception", widths = [2, 2, 4, 4] } }
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads on a frozen encoder, in one pass."""
    folder = tmp_path_factory.mktemp("memory")
    encoder = save_tiny_encoder(folder / "tiny")
    return write_run_file(folder / "heads.toml", f'name = "{encoder}"\ntuning = "frozen"', HEADS, steps=2)


@pytest.fixture(scope="module")
def prepared(file: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedPass:
    (configs,) = load_plan(file).passes
    return prepare_pass(configs, Processes(make_accelerator([], tmp_path_factory.mktemp("trackers"))))


@pytest.fixture(scope="module")
def estimate(prepared: PreparedPass) -> PassMemory:
    return estimate_memory(prepared)


def test_a_pass_that_does_not_fit_is_refused_and_the_advice_fits(
    file: Path, estimate: PassMemory, tmp_path: Path, lamella: Lamella, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    limit = int(estimate.total(2)) + 1  # half of the batch
    monkeypatch.setenv("LAMELLA_MEMORY", str(limit))
    code, _, err = lamella("train", file, "--out", out)
    assert (code, err.count("\n")) == (1, 1)
    assert "GB of free memory for 4 learners with batches of 4 windows of up to 128 tokens, got" in err
    assert "lower training.batch_size to 2 (and raise training.accumulate)" in err
    assert (advised := re.search(r"train at most (\d) of these learners in a pass \((\w+) takes the most\)", err))
    assert int(advised[1]) == estimate.fitting_learners(4, limit) < 4
    assert advised[2] == max(estimate.learners, key=lambda learner: learner.window).name
    assert not out.exists()
    _, table, _ = lamella("sweep", file, "--out", tmp_path / "sweep")
    assert f"train at most {advised[1]} of these learners in a pass" in table
    smaller = ("--set", "training.batch_size=2", "--set", "training.accumulate=2")
    assert lamella("train", file, "--out", out, *smaller)[0] == 0
    assert lamella("train", file, "--out", out, "--overwrite", "--auto-batch")[0] == 0
    monkeypatch.setenv("LAMELLA_MEMORY", "1K")
    assert "LAMELLA_MEMORY=none tries anyway." in lamella("train", file, "--out", tmp_path / "new")[2]
    assert "train fewer parameters, with another encoder.tuning" in lamella("train", file, "--out", tmp_path / "new")[2]
    monkeypatch.setenv("LAMELLA_MEMORY", str(int(estimate.total(0)) + 1))
    assert "lower windows.max_seq_length" in lamella("train", file, "--run", "wide", "--out", tmp_path / "new")[2]


def test_the_check_changes_neither_models_nor_random_numbers(
    file: Path, tmp_path: Path, lamella: Lamella, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("none", "100G"):
        monkeypatch.setenv("LAMELLA_MEMORY", value)
        assert lamella("train", file, "--out", tmp_path / value)[0] == 0
    for name in ("last", "normalised"):
        assert outcome(tmp_path / "none" / name) == outcome(tmp_path / "100G" / name)


def test_the_estimate_draws_no_random_numbers(prepared: PreparedPass, estimate: PassMemory) -> None:
    before = torch.get_rng_state()
    assert estimate_memory(prepared) == estimate
    assert torch.get_rng_state().equal(before)


def test_the_estimate_leaves_no_computation_behind(prepared: PreparedPass) -> None:
    """A computation that is alive when CUDA graphs are captured makes the capture fail, and every step slow."""

    def computed() -> int:
        gc.collect()
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        return sum(tensor.grad_fn is not None for tensor in tensors)

    before = computed()
    estimate_memory(prepared)
    assert computed() == before


def test_the_estimate_is_near_what_a_step_allocates(prepared: PreparedPass, estimate: PassMemory) -> None:
    """Counted by torch's profiler: what is live at most, in a step of the head that takes the most."""
    from lamella.data.windows.batches import Totals, collate

    widest = max(estimate.learners, key=lambda learner: learner.window)
    (learner,) = [learner for learner in prepared.learners if learner.name == widest.name]
    features = prepared.windows.train
    batch = collate(features, (-features.lengths).argsort()[:4])
    encode = prepared.hidden_states.encode
    assert encode is not None
    hidden = encode(batch, learner.model.head.layers)
    learner.model.train()
    with torch.profiler.profile(profile_memory=True) as profiler:
        learner.add_gradients(batch, hidden, Totals.of([batch]))
    live = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    learner.zero_gradients()
    assert 4 * widest.window == pytest.approx(peak, rel=0.35)


def test_free_memory_is_the_least_of_what_the_system_and_the_container_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, limit, used = (tmp_path / name for name in ("meminfo", "memory.max", "memory.current"))
    monkeypatch.setattr(memory, "MEMORY_INFO", info)
    monkeypatch.setattr(memory, "GROUPS", ((limit, used),))
    assert free_memory(CPU) is None
    info.write_text("MemTotal:       9000 kB\nMemAvailable:   3000 kB\n")
    limit.write_text("max\n")
    assert free_memory(CPU) == 3000 * 1024
    limit.write_text("2000000\n")
    used.write_text("1500000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert free_memory(CPU) == 600_000
    for text, expected in (("1.5G", 1610612736), ("200 MB", 200 * 2**20), ("7", 7), ("none", None)):
        monkeypatch.setenv("LAMELLA_MEMORY", text)
        assert free_memory(CPU) == expected
    monkeypatch.setenv("LAMELLA_MEMORY", "much")
    with pytest.raises(UsageError, match="LAMELLA_MEMORY: expected a number of bytes, such as 8G, or none, got 'much'"):
        free_memory(CPU)
