"""Readers on one encoder in memory, on torch: mixed batches give each reader the logits that it has alone."""

from __future__ import annotations

import gc
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from doubles import DEPTH, FAMILIES, HIDDEN, record_weights, save_tiny_encoder, tiny_run_config
from lamella import registry
from lamella.data.windows.padding import divide_by_length
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.sources import MODEL_WEIGHTS
from lamella.encoder.tensors import trained_tensors
from lamella.errors import ModelError, UsageError
from lamella.graph.support import NoGraphError
from lamella.heads.head import Head
from lamella.models.head_group import HeadGroup
from lamella.models.loading import load_model
from lamella.models.names import find_model
from lamella.models.recorded import RecordedPasses
from lamella.models.tensor_bank import TensorBank
from lamella.models.torch_encoders import TorchEncoders, TorchReader
from lamella.models.window_engine import join_logits
from shared_readers import HEADS, POOLED
from trained_readers import save_trained, windows_of

TUNINGS: dict[str, Any] = {
    "frozen": "frozen",
    "bitfit": "bitfit",
    "layer_norm": "layer_norm",
    "lora": {"name": "lora", "rank": 3, "alpha": 5, "targets": ["query", "ffn_output"]},
    "lora with the rest": {"name": "lora", "rank": 5, "also": ["layer_norm", "bias"]},
    "token types": {"name": "lora", "rank": 5, "targets": ["key", "ffn_input"], "also": ["token_types"]},
    "rslora": {"name": "lora", "rank": 4, "rslora": True, "targets": ["attention_output", "value"]},
    "pissa": {"name": "lora", "rank": 2, "init": "pissa", "alpha": 3},
    "ia3": {"name": "ia3", "targets": ["query", "key", "value", "ffn_input", "ffn_output"]},
    "adapter": {"name": "adapter", "size": 6},
    "fewer adapters": {"name": "adapter", "size": 4, "leave_out": [1]},
}
NO_TYPES = ("distilbert", "eurobert", "modernbert", "mpnet", "roberta", "xlm-roberta", "deberta-v2")
NO_BIASES = ("eurobert", "modernbert")
WITHOUT = {
    "token types": NO_TYPES,
    "fewer adapters": ("albert",),
    "bitfit": NO_BIASES,
    "lora with the rest": NO_BIASES,
}
OWN_PASS: dict[str, tuple[Any, str]] = {
    "full": ("full", "changes whole weight matrices"),
    "top_k": ("top_k", "changes whole weight matrices"),
    "dora": ({"name": "lora", "dora": True}, "DoRA rescales whole weight matrices"),
    "adapter and a layer": ({"name": "adapter", "k": 1}, "changes whole weight matrices"),
}


@pytest.fixture
def encoders() -> TorchEncoders:
    return TorchEncoders("cpu")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("encoder") / "bert", "bert", pooler=True)


@pytest.fixture(scope="module")
def trained(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("readers")
    tunings = [{"name": "lora", "rank": rank} for rank in (2, 3, 5, 9)]
    return [
        save_trained(folder / str(seed), bert, seed=seed, encoder={"tuning": tuning})
        for seed, tuning in enumerate(tunings)
    ]


def open_reader(encoders: TorchEncoders, folder: Path) -> TorchReader:
    return encoders.reader(find_model(str(folder)))


def mix(readers: list[TorchReader]) -> list[Any]:
    """Return the logits of the same windows for each reader, computed in one batch in which the readers alternate."""
    padded = windows_of(readers[0])
    rows = [row for group in zip(*(reader.rows(padded) for reader in readers), strict=True) for row in group]
    outputs = list(readers[0].run(rows))
    return [
        join_logits(outputs[place :: len(readers)], padded.mask.shape[1] if reader.gives_text else 1)
        for place, reader in enumerate(readers)
    ]


def expected(folder: Path) -> Any:
    """Return the logits of these windows by the reader with an encoder of its own; 0 at the padding."""
    model: Any = load_model(folder, device="cpu", backend="torch", inference_only=True)
    padded = windows_of(model)
    logits = model.logits(padded)
    return logits * padded.mask if model.gives_text else logits


def assert_mixed(readers: list[TorchReader], folders: list[Path]) -> None:
    for reader, mixed, folder in zip(readers, mix(readers), folders, strict=True):
        right = expected(folder)
        within = 1e-4 * max(1.0, float(np.abs(right).max()))
        np.testing.assert_allclose(mixed, right, atol=within, rtol=0, err_msg=str(folder))
        np.testing.assert_allclose(reader.logits(windows_of(reader)), right, atol=within, rtol=0, err_msg=str(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_readers_of_every_tuning_share_an_encoder(family: str, encoders: TorchEncoders, tmp_path: Path) -> None:
    base = save_tiny_encoder(tmp_path / "base", family)
    folders = [
        save_trained(tmp_path / name, base, seed=seed, encoder={"tuning": tuning})
        for seed, (name, tuning) in enumerate(TUNINGS.items())
        if family not in WITHOUT.get(name, ())
    ]
    readers = [open_reader(encoders, folder) for folder in folders]
    assert len({id(reader.encoder) for reader in readers}) == 1
    assert len({id(reader.head) for reader in readers}) == 1
    assert_mixed(readers, folders)


def test_readers_with_different_heads_share_an_encoder(bert: Path, encoders: TorchEncoders, tmp_path: Path) -> None:
    folders = [
        save_trained(tmp_path / f"{name} {seed}", bert, seed=seed, encoder={"tuning": "lora"}, learner=learner)
        for name, learner in HEADS.items()
        for seed in range(2)
    ]
    readers = [open_reader(encoders, folder) for folder in folders]
    assert len({id(reader.encoder) for reader in readers}) == 1
    assert len({id(reader.head) for reader in readers}) == len(HEADS)
    assert_mixed(readers, folders)


def test_heads_that_read_the_pooled_output_share_an_encoder(
    bert: Path, encoders: TorchEncoders, tmp_path: Path
) -> None:
    folders = [
        save_trained(tmp_path / str(seed), bert, seed=seed, encoder={"tuning": "bitfit"}, learner=POOLED)
        for seed in range(2)
    ]
    assert_mixed([open_reader(encoders, folder) for folder in folders], folders)


@pytest.mark.parametrize("name", OWN_PASS)
def test_some_tunings_need_an_encoder_of_their_own(
    name: str, bert: Path, encoders: TorchEncoders, tmp_path: Path
) -> None:
    tuning, reason = OWN_PASS[name]
    folder = save_trained(tmp_path / "reader", bert, encoder={"tuning": tuning})
    with pytest.raises(NoGraphError, match=reason):
        open_reader(encoders, folder)


def test_a_reader_on_a_reader_needs_its_own_encoder(
    trained: list[Path], encoders: TorchEncoders, tmp_path: Path
) -> None:
    above = save_trained(tmp_path / "above", trained[0], encoder={"tuning": "lora"})
    with pytest.raises(NoGraphError, match="its base is a reader"):
        open_reader(encoders, above)


def test_tensors_that_do_not_fit_are_an_error(trained: list[Path], encoders: TorchEncoders, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained[0], tmp_path / "damaged"))
    tensors = load_file(folder / MODEL_WEIGHTS)
    name = next(name for name in tensors if name.endswith("lora.A"))
    save_file({**tensors, name: tensors[name][:, 1:].copy()}, folder / MODEL_WEIGHTS)
    record_weights(folder)
    with pytest.raises(ModelError, match="has shape"):
        open_reader(encoders, folder)
    save_file({**tensors, "stray": tensors[name]}, folder / MODEL_WEIGHTS)
    record_weights(folder)
    with pytest.raises(ModelError, match="stray is unexpected"):
        open_reader(encoders, folder)


def test_a_device_that_this_machine_lacks_is_an_error(trained: list[Path]) -> None:
    with pytest.raises(UsageError, match="'cuda:99' cannot be used here"):
        open_reader(TorchEncoders("cuda:99"), trained[0])


def test_half_precision_stays_near(trained: list[Path]) -> None:
    encoders = TorchEncoders("cpu", "fp16")
    readers = [open_reader(encoders, folder) for folder in trained]
    assert readers[0].encoder.bank.dtype == torch.float16
    padded = windows_of(readers[0])
    short = int(padded.mask.sum(1).argmin())  # a CPU only emulates it
    outputs = encoders.run([reader.rows(padded)[short] for reader in readers])
    for output, folder in zip(outputs, trained, strict=True):
        right = expected(folder)[:, short, : output.shape[1]]
        assert 0 < np.abs(output - right).max() < 0.02 * np.abs(right).max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_mixes_readers_in_half_precision(family: str, tmp_path: Path) -> None:
    base = save_tiny_encoder(tmp_path / "base", family)
    tunings = {name: TUNINGS[name] for name in ("layer_norm", "lora", "pissa", "ia3", "adapter")}
    folders = [
        save_trained(tmp_path / name, base, seed=seed, encoder={"tuning": tuning})
        for seed, (name, tuning) in enumerate(tunings.items())
    ]
    encoders = TorchEncoders("cuda", "bf16")
    readers = [open_reader(encoders, folder) for folder in folders]
    assert encoders.pace.patience > 0
    for _ in range(4):  # without a graph, recorded, and replayed twice
        for mixed, folder in zip(mix(readers), folders, strict=True):
            right = expected(folder)
            assert 0 < np.abs(mixed - right).max() < 0.1 * np.abs(right).max()
    passes = readers[0].encoder.passes
    assert passes.problem is None
    assert len(passes) > 0


def test_recorded_passes_of_mixed_readers_equal_plain_ones(trained: list[Path]) -> None:
    plain, recorded = TorchEncoders("cpu"), TorchEncoders("cpu")
    right, readers = ([open_reader(encoders, folder) for folder in trained] for encoders in (plain, recorded))
    passes = readers[0].encoder.passes = RecordedPasses(torch.device("cpu"), capture=lambda body: body)
    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 0], [0, 0, 0], [2, 2, 2], [0, 1, 2]):
        padded = windows_of(right[0])
        rows, expected_rows = ([of[number].rows(padded)[0] for number in order] for of in (readers, right))
        for output, other in zip(recorded.run(rows), plain.run(expected_rows), strict=True):
            np.testing.assert_array_equal(output, other)
    assert len(passes) > 0
    open_reader(recorded, trained[0])
    extra = [open_reader(recorded, folder) for folder in trained * 4]  # the bank is built anew
    rows, expected_rows = ([of[0].rows(padded)[0], of[1].rows(padded)[0]] for of in (extra, right))
    for output, other in zip(recorded.run(rows), plain.run(expected_rows), strict=True):
        np.testing.assert_array_equal(output, other)
    assert len(passes) == 0, "graphs of the old bank are dropped"


def test_a_batch_is_cut_at_the_budget_of_tokens(trained: list[Path]) -> None:
    whole, cut = (TorchEncoders("cpu", most_tokens=most) for most in (16_384, 200))
    padded = windows_of(open_reader(whole, trained[0]))
    lengths = padded.mask.sum(1)
    outputs = []
    for encoders in (whole, cut):
        rows = [row for folder in trained for row in open_reader(encoders, folder).rows(padded)]
        batches = list(encoders._batches(rows, range(len(rows))))
        assert sorted(number for batch in batches for number in batch) == list(range(len(rows)))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(len(rows[i].input_ids) for i in batch) <= encoders.most_tokens
        outputs.append((len(batches), encoders.run(rows)))
    numbers = np.array([len(row.input_ids) for row in rows])
    assert outputs[0][0] == len(divide_by_length(numbers)) < outputs[1][0] < len(rows), lengths
    for a, b in zip(outputs[0][1], outputs[1][1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_every_mixer_runs_for_several_readers_at_once() -> None:
    """vmap covers all operations of the heads; what differs is only the order of sums."""
    torch.manual_seed(0)
    for name in registry.names("mixer"):
        spec = tiny_run_config(learner={"mixer": name}).learner
        head = Head(DEPTH, HIDDEN, mixer=spec.mixer, task=spec.task, longest=128)
        assert_together(HeadGroup(head, torch.device("cpu")), together=True)


def test_a_head_that_cannot_run_for_several_readers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer of a plugin may read values back."""
    run = Head.forward
    monkeypatch.setattr(Head, "forward", lambda head, hidden: run(head, hidden) * float(hidden.mask.any().item()))
    spec = tiny_run_config().learner
    head = Head(DEPTH, HIDDEN, mixer=spec.mixer, task=spec.task, longest=128)
    assert_together(HeadGroup(head, torch.device("cpu")), together=False)


def assert_together(group: HeadGroup, *, together: bool) -> None:
    """Compare a batch of three readers, two of them different, with the same windows one by one."""
    own = trained_tensors(group.head)
    different = {name: own[name] + 0.1 * torch.randn(own[name].shape) for name in own if own[name].is_floating_point()}
    first, second = (group.add({**own, **tensors}, "tests") for tensors in ({}, different))
    layers = tuple(torch.randn(3, 20, HIDDEN) for _ in group.head.layers)
    mask = torch.arange(20) < torch.tensor([20, 12, 15])[:, None]
    hidden = HiddenStates(layers, mask, mask & (torch.arange(20) > 5), None, group.head.layers)
    with torch.inference_mode():
        mixed = group.logits(hidden, group.bank.gather([first, second, first]))
        assert group._together == together
        alone = [
            group.logits(hidden[n : n + 1], group.bank.gather([place]))
            for n, place in enumerate((first, second, first))
        ]
    torch.testing.assert_close(mixed, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


# --- readers come and go


def test_an_encoder_leaves_memory_with_its_last_reader(trained: list[Path], encoders: TorchEncoders) -> None:
    readers = [open_reader(encoders, folder) for folder in trained]
    bank = readers[0].encoder.bank
    assert len(bank) == len(trained)
    del readers[1:]
    gc.collect()
    assert (len(encoders._encoders), len(bank)) == (1, 1)
    readers.clear()
    assert len(encoders._encoders) == 0, "without the help of the garbage collector: it may hold gigabytes"


def test_readers_are_loaded_and_removed_while_batches_run(trained: list[Path], encoders: TorchEncoders) -> None:
    right = [expected(folder) for folder in trained]
    steady = open_reader(encoders, trained[1])
    running, problems = threading.Event(), []
    running.set()

    def ask_steadily() -> None:
        padded = windows_of(steady)
        while running.is_set():
            if not np.allclose(steady.logits(padded), right[1], atol=1e-4):
                problems.append("wrong logits")

    thread = threading.Thread(target=ask_steadily)
    thread.start()
    try:
        held: list[tuple[int, TorchReader]] = []
        for step in range(24):
            number = step * 7 % len(trained)
            held.append((number, open_reader(encoders, trained[number])))
            if step % 8 == 7:  # the bank grows, is emptied, and is built again
                for (number, _), mixed in zip(held, mix([reader for _, reader in held]), strict=True):
                    np.testing.assert_allclose(mixed, right[number], atol=1e-4)
                held.clear()
    finally:
        running.clear()
        thread.join()
    assert not problems


def tensors_of(rank: int, value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((rank, 3), value), "b": torch.full((2,), value)}


def test_a_bank_grows_and_shrinks_with_its_readers() -> None:
    bank = TensorBank(torch.device("cpu"))
    places = [bank.add(tensors_of(rank=2, value=value)) for value in range(100)]
    large = bank.nbytes
    assert bank.gather(places)["b"][:, 0].tolist() == list(range(100))
    kept = places[::40]
    places.clear()
    kept.append(bank.add(tensors_of(rank=1, value=7)))
    assert bank.nbytes < large / 8
    gathered = bank.gather(kept)
    assert gathered["b"][:, 1].tolist() == [0, 40, 80, 7]
    assert gathered["a"][3].tolist() == [[7] * 3, [0] * 3], "lower ranks are padded with zeros"
    del kept[:3], gathered
    wide = bank.add(tensors_of(rank=500, value=1))
    assert bank.gather([kept[0], wide])["a"].shape == (2, 500, 3)
    large = bank.nbytes
    del wide
    kept.append(bank.add(tensors_of(rank=4, value=3)))
    assert bank.nbytes < large / 8, "the rank falls when the reader with the highest has left"
    assert bank.gather(kept)["a"].shape == (2, 4, 3)


def test_a_reader_without_a_tensor_has_the_default() -> None:
    bank = TensorBank(torch.device("cpu"), default=lambda name: torch.tensor([5.0, 6.0]) if name == "b" else 1.0)
    first, second = bank.add({"a": torch.zeros(1, 3)}), bank.add({"b": torch.zeros(2)})
    gathered = bank.gather([first, second])
    assert gathered["a"].tolist() == [[[0.0] * 3], [[1.0] * 3]]
    assert gathered["b"].tolist() == [[5.0, 6.0], [0.0, 0.0]]
    assert set(bank.gather([first, first])) == {"a"}, "a batch computes only what its readers change"
