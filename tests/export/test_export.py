"""Exports: flattened, in half precision, as a transformers checkpoint; and models that cannot be exported so."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from doubles import (
    DEPTH,
    FAMILIES,
    corpus,
    examples_about,
    record_weights,
    save_tiny_encoder,
    tiny_batch,
    tiny_run_config,
    tiny_tokenizer,
)
from lamella.data.windows.batches import Batch
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import Padded, pad
from lamella.encoder.families import FAMILIES as FAMILY_TABLE
from lamella.errors import ModelError, RunError, UsageError
from lamella.export.flatten import flatten
from lamella.export.half import halve
from lamella.export.transformers_checkpoint import save_as_transformers
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.transformers_model import StockModel

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")

FULL_LORA = {"name": "lora", "rank": 2, "targets": ["query", "attention_output", "ffn_output"]}
RELATIVE = {"name": "lora", "rank": 2, "dora": True, "init": "pissa", "rslora": True}
CHAINS: list[list[Any]] = [
    ["full"],
    ["frozen", "frozen"],
    ["full", "frozen"],
    ["full", "adapter"],
    ["lora", "frozen"],
    ["lora", "lora"],
    ["full", RELATIVE],
    [RELATIVE, {**RELATIVE, "rank": 3}],
    ["ia3", "full"],
    ["bitfit", "layer_norm", "ia3"],
    [FULL_LORA, "adapter", "bitfit"],
    ["adapter", "adapter", "lora"],
    ["adapter", {"name": "adapter", "k": 1}],
    ["full", "adapter", "lora", {"name": "ia3", "targets": ["key", "value"]}, "frozen"],
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {family: save_tiny_encoder(folder / family, family) for family in FAMILIES}


def tuned(base: Path, folder: Path, seed: int = 0, **sections: Any) -> ReaderModel:
    """A saved model with all trained parameters changed."""
    config = tiny_run_config(**sections)
    torch.manual_seed(seed)
    model = ReaderModel(load_encoder(str(base), pooler=config.learner.reads_pooled), config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save(folder)
    return model


def chain_of(tunings: Sequence[Any], base: Path, folder: Path) -> Path:
    """A chain of models, each with the previous one as its base; return the last."""
    for number, tuning in enumerate(tunings):
        tuned(base, folder / str(number), seed=number, encoder={"tuning": tuning})
        base = folder / str(number)
    return base


def logits(model: ReaderModel, family: str = "bert") -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tiny_batch(family))
    return found


def names(tunings: Sequence[Any]) -> str:
    return "-".join(tuning if isinstance(tuning, str) else tuning["name"] for tuning in tunings)


# --- flattened


FLATTENED = [
    *(pytest.param(tunings, "bert", id=names(tunings)) for tunings in CHAINS),
    # here an adapter follows a linear layer that LoRA may have wrapped
    *(pytest.param(CHAINS[-4], family, id=f"{names(CHAINS[-4])}-{family}") for family in ("albert", "distilbert")),
    *(pytest.param(CHAINS[-1], family, id=f"{names(CHAINS[-1])}-{family}") for family in ("albert", "distilbert")),
]


@pytest.mark.parametrize(("tunings", "family"), FLATTENED)
def test_a_flat_model_has_the_same_logits_as_its_chain(
    tunings: list[Any], family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    last = chain_of(tunings, bases[family], tmp_path / "chain")
    expected = logits(ReaderModel.load(last), family)
    flatten(last, tmp_path / "flat")
    shutil.rmtree(tmp_path / "chain")
    flat = ReaderModel.load(tmp_path / "flat")
    assert torch.equal(logits(flat, family), expected)
    assert flat.base_name == str(bases[family])
    assert flat.keeps_encoder is ({*names(tunings).split("-")} == {"frozen"})
    flatten(tmp_path / "flat", tmp_path / "again" / "flat")
    for file in (tmp_path / "flat").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / "flat" / file.name).read_bytes(), file.name


def test_a_flat_model_holds_exactly_what_its_chain_changed(bases: dict[str, Path], tmp_path: Path) -> None:
    last = chain_of(["bitfit", "lora", "adapter", "frozen"], bases["bert"], tmp_path / "chain")
    flat = flatten(last, tmp_path / "flat")
    held = load_file(tmp_path / "flat" / "model.safetensors")
    encoder = {name.removeprefix("encoder.") for name in held if name.startswith("encoder.")}
    pretrained = load_encoder(str(bases["bert"])).encoder.state_dict()
    changed = {
        name
        for name, value in flat.encoder.state_dict().items()
        if name not in pretrained or not torch.equal(value, pretrained[name])
    }
    assert encoder == changed
    assert any(name.endswith("query.weight") for name in changed)
    assert not any(name.endswith("key.weight") for name in changed)
    config = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert [tuning["name"] for tuning in config["tuned_before"]] == ["bitfit", "lora", "adapter"]
    assert config["tuning"] == {"name": "frozen"}


def test_a_flat_model_can_be_a_base(bases: dict[str, Path], tmp_path: Path) -> None:
    last = chain_of(["lora", "adapter", "lora"], bases["bert"], tmp_path / "chain")
    flatten(last, tmp_path / "flat")
    on_chain = tuned(last, tmp_path / "one", encoder={"tuning": "adapter"})
    on_flat = tuned(tmp_path / "flat", tmp_path / "two", encoder={"tuning": "adapter"})
    assert torch.equal(logits(on_flat), logits(on_chain))
    assert torch.equal(logits(ReaderModel.load(tmp_path / "two")), logits(on_chain))


@pytest.mark.parametrize("layers", ["encoder", "pooled+all"])
def test_poolers_come_and_go_along_a_chain(layers: str, tmp_path: Path) -> None:
    save_tiny_encoder(tmp_path / "base", pooler=True)
    task, mixer = {"task": "answerability"}, {"mixer": "average"}
    other = "encoder" if layers == "pooled+all" else "pooled+all"
    tuned(tmp_path / "base", tmp_path / "first", learner={**task, **mixer, "layers": other})
    tuned(tmp_path / "first", tmp_path / "second", 1, encoder={"tuning": "bitfit"}, learner={**task, "layers": layers})
    expected = logits(ReaderModel.load(tmp_path / "second"))
    flatten(tmp_path / "second", tmp_path / "flat")
    assert torch.equal(logits(ReaderModel.load(tmp_path / "flat")), expected)


@pytest.mark.parametrize("change", ["missing", "is unexpected"])
def test_a_flat_model_with_other_tensors_is_refused(change: str, bases: dict[str, Path], tmp_path: Path) -> None:
    flatten(chain_of(["lora", "adapter"], bases["bert"], tmp_path / "chain"), tmp_path / "flat")
    file = tmp_path / "flat" / "model.safetensors"
    tensors = load_file(file)
    merged = "encoder.model.encoder.layer.0.attention.self.query.weight"
    if change == "missing":
        del tensors[merged]
    else:
        merged = merged.replace("query", "key")
        tensors[merged] = torch.zeros(32, 32)
    save_file(tensors, file)
    record_weights(tmp_path / "flat")
    with pytest.raises(ModelError, match=rf"{merged} (is )?{change}\.$"):
        ReaderModel.load(tmp_path / "flat")


@pytest.mark.parametrize("before", [3, ["tuned_later"], [3], "full"])
def test_a_damaged_list_of_earlier_tunings_is_refused(before: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    flatten(chain_of(["lora", "adapter"], bases["bert"], tmp_path / "chain"), tmp_path / "flat")
    file = tmp_path / "flat" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tuned_before": before}))
    with pytest.raises(ModelError) as caught:
        ReaderModel.load(tmp_path / "flat")
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


# --- half precision


def test_a_half_model_is_half_as_large_and_loads_in_full(bases: dict[str, Path], tmp_path: Path) -> None:
    model = tuned(bases["bert"], tmp_path / "model")
    halve(tmp_path / "model", tmp_path / "half")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("model", "half")]
    assert 0.45 < sizes[1] / sizes[0] < 0.6
    loaded = ReaderModel.load(tmp_path / "half")
    assert {value.dtype for value in loaded.parameters()} == {torch.float32}
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].half().float()), name
    halve(tmp_path / "half", tmp_path / "again")  # rounding twice changes nothing
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "half" / "model.safetensors"
    ).read_bytes()


def test_a_number_beyond_half_precision_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    model = tuned(bases["bert"], tmp_path / "model", encoder={"tuning": "frozen"})
    with torch.no_grad():
        model.head.task.b[1] = -70000.0
    model.save(tmp_path / "model")
    with pytest.raises(ModelError, match=r"^head\.task\.b: expected values in the range of fp16, found 70000;"):
        halve(tmp_path / "model", tmp_path / "half")
    assert os.listdir(tmp_path) == ["model"]


# --- transformers checkpoint


def windows(family: str) -> Padded:
    texts = [context[: 60 * (number + 1)] for number, context in enumerate(corpus()[:4])]
    features = featurise(examples_about(texts), tiny_tokenizer(family), tiny_run_config().windows)
    return pad(features, np.arange(len(features)))


@pytest.mark.parametrize(
    "tuning", ["full", "frozen", "top_k", "bitfit", "layer_norm", "lora", RELATIVE, "ia3"], ids=str
)
@pytest.mark.parametrize("family", [family for family in FAMILIES if FAMILY_TABLE[family].linear_qa])
def test_transformers_loads_it_with_equal_logits(
    family: str, tuning: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    if (family, tuning) == ("albert", "top_k"):
        pytest.skip("one layer's weights serve at every depth, so none is on top")
    model = tuned(bases[family], tmp_path / "model", encoder={"tuning": tuning})
    save_as_transformers(tmp_path / "model", tmp_path / "stock")
    found, report = transformers.AutoModelForQuestionAnswering.from_pretrained(
        tmp_path / "stock", output_loading_info=True
    )
    assert not any(report.values()), report
    assert found.config.architectures == [type(found).__name__]
    padded = windows(family)
    batch = Batch.of(padded)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
    if model.encoder.token_types:
        inputs["token_type_ids"] = batch.token_types
    with torch.no_grad():
        output = found.eval()(**inputs)
    stock = torch.stack([output.start_logits, output.end_logits])
    exact = 1e-5 if tuning in ("lora", "ia3") else 2e-6  # merged, or only summed in another order
    own = torch.from_numpy(model.logits(padded))
    torch.testing.assert_close(stock[:, batch.mask], own[:, batch.mask], atol=exact, rtol=1e-6)

    back = load_model(tmp_path / "stock", device="cpu", precision="fp32", backend="torch")
    assert isinstance(back, StockModel)
    again = torch.from_numpy(back.logits(padded))
    torch.testing.assert_close(again[:, batch.mask], stock[:, batch.mask], atol=2e-6, rtol=1e-6)  # attention is own
    assert back.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    assert back.windows.max_seq_length == model.encoder.longest_window
    for file in (*(tmp_path / "stock").glob("*.json"), *(tmp_path / "model").glob("tokenizer*.json")):
        assert str(tmp_path.parent) not in file.read_text(encoding="utf-8"), file.name


@pytest.mark.parametrize("family", [family for family in FAMILIES if not FAMILY_TABLE[family].linear_qa])
def test_a_family_without_a_linear_head_in_transformers_is_refused(
    family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    tuned(bases[family], tmp_path / "model", encoder={"tuning": "frozen"})
    with pytest.raises(ModelError, match=rf"expected an encoder with a linear question .* got {family}\.$"):
        save_as_transformers(tmp_path / "model", tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


def test_a_chain_and_an_encoder_with_its_own_labels(tmp_path: Path) -> None:
    save_tiny_encoder(tmp_path / "base", num_labels=5)
    last = chain_of(["lora", "full", "frozen"], tmp_path / "base", tmp_path / "chain")
    save_as_transformers(last, tmp_path / "stock")
    found = load_model(tmp_path / "stock", device="cpu", precision="fp32", backend="torch").logits(windows("bert"))
    np.testing.assert_allclose(found, ReaderModel.load(last).logits(windows("bert")), atol=1e-5)


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"encoder": {"tuning": "adapter"}}, "expected an encoder without adapters"),
        (
            {"learner": {"mixer": "average"}},
            "expected a head that reads only the encoder's last layer \\(mixer last\\), got average",
        ),
        ({"learner": {"mixer": ["last", {"name": "compress", "size": 4}]}}, "got last, compress"),
        (
            {"learner": {"layers": [1, 2]}},
            "expected a head that reads only the encoder's last layer \\(mixer last\\), got layer 2",
        ),
        ({"learner": {"skip": True}}, "expected a head without a second branch"),
        ({"learner": {"beside": "average"}}, "expected a head without a second branch"),
        ({"learner": {"task": "answerability"}}, "expected the task span, got answerability"),
    ],
)
def test_a_model_that_transformers_cannot_express_is_refused(
    sections: dict[str, Any], reason: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    tuned(bases["bert"], tmp_path / "model", **sections)
    with pytest.raises(ModelError, match=f"cannot be written as a transformers checkpoint: .*{reason}") as caught:
        save_as_transformers(tmp_path / "model", tmp_path / "stock")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["model"]


def test_adapters_below_are_refused_too_and_the_last_layer_may_be_chosen_by_number(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    last = chain_of(["adapter", "frozen"], bases["bert"], tmp_path / "chain")
    with pytest.raises(ModelError, match="expected an encoder without adapters"):
        save_as_transformers(last, tmp_path / "stock")
    tuned(bases["bert"], tmp_path / "model", learner={"layers": [0, DEPTH]})
    save_as_transformers(tmp_path / "model", tmp_path / "stock")
    assert (tmp_path / "stock" / "model.safetensors").is_file()


def test_an_export_has_the_permissions_of_the_umask(bases: dict[str, Path], tmp_path: Path) -> None:
    tuned(bases["bert"], tmp_path / "model", encoder={"tuning": "full"})
    before = os.umask(0o027)
    try:
        for export in (save_as_transformers, flatten, halve):
            export(tmp_path / "model", tmp_path / export.__name__)
            files = list((tmp_path / export.__name__).iterdir())
            assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o640}
            assert stat.S_IMODE((tmp_path / export.__name__).stat().st_mode) == 0o750
    finally:
        os.umask(before)


# --- the command


@pytest.fixture
def model_folder(bases: dict[str, Path], tmp_path: Path) -> Path:
    tuned(bases["bert"], tmp_path / "model", encoder={"tuning": "lora"})
    return tmp_path / "model"


@pytest.mark.parametrize("mode", ["--flatten", "--half", "--as-transformers"])
def test_the_command_writes_a_folder_that_can_be_asked(
    mode: str, model_folder: Path, lamella: Any, tmp_path: Path
) -> None:
    code, out, err = lamella("export", model_folder, mode, tmp_path / "new")
    assert (code, out, err) == (0, f"{tmp_path / 'new'}: written\n", "")
    text = tmp_path / "text.txt"
    text.write_text("The tower was built by Robert Stevenson in 1811.")
    code, out, err = lamella("ask", "Who built it?", "--context", text, "--model", tmp_path / "new")
    assert (code, err) == (0, "")
    assert sorted(os.listdir(tmp_path)) == ["model", "new", "text.txt"]


def test_exactly_one_output_format_is_required(model_folder: Path, lamella: Any, tmp_path: Path) -> None:
    for arguments, got in [
        ([], "none"),
        (["--half", tmp_path / "a", "--flatten", tmp_path / "b"], "--flatten, --half"),
    ]:
        code, out, err = lamella("export", model_folder, *arguments)
        assert (code, out) == (2, "")
        assert "export: expected exactly one output format of --flatten, --half, --as-transformers" in err
        assert err.endswith(f"got {got}.\n")
        assert err.count("\n") == 1


@pytest.mark.parametrize("mode", ["--flatten", "--half", "--as-transformers"])
def test_an_export_replaces_nothing(mode: str, model_folder: Path, lamella: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = (model_folder / "model.safetensors").read_bytes()
    for folder in (model_folder, tmp_path / "file"):
        code, out, err = lamella("export", model_folder, mode, folder)
        assert (code, out) == (1, "")
        assert err.endswith(f"{folder}: exists already and is not an empty folder; choose another folder.\n")
    assert (model_folder / "model.safetensors").read_bytes() == before
    code, out, err = lamella("export", model_folder, mode, tmp_path / "file" / "below")
    assert (code, out) == (1, "")
    assert "cannot be written (Not a directory)" in err
    assert err.count("\n") == 1
    code, _, err = lamella("export", tmp_path / "absent", mode, tmp_path / "new")
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "new").exists()


def test_a_transformers_checkpoint_is_not_converted(model_folder: Path, tmp_path: Path) -> None:
    save_as_transformers(model_folder, tmp_path / "stock")
    with pytest.raises(UsageError, match=r"expected a model folder of Lamella, found another kind"):
        save_as_transformers(tmp_path / "stock", tmp_path / "again")


def test_a_failure_leaves_nothing_half_written(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    with pytest.raises(RunError, match=r"stock: cannot be written \(No space left on device\)\.$"):
        save_as_transformers(model_folder, tmp_path / "stock")
    assert os.listdir(tmp_path) == ["model"]
