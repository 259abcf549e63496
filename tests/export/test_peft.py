"""Interchange with peft: folders that it wrote load here, and folders written here load there, with equal logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForQuestionAnswering

from doubles import FAMILIES, corpus, save_tiny_encoder, tiny_batch, tiny_config, tiny_run_config
from lamella.data.windows.batches import Batch
from lamella.encoder.families import FAMILIES as ENCODERS
from lamella.encoder.families import reads_token_types
from lamella.encoder.pretrained import quiet
from lamella.errors import LamellaError, LamellaWarning
from lamella.export.peft_export import save_as_peft
from lamella.inference.reader import Reader
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.plan import make_plan
from lamella.training.run import train_plan

pytestmark = [
    pytest.mark.usefixtures("one_thread", "on_cpu"),
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
]

ALL = ["query", "key", "value", "attention_output", "ffn_input", "ffn_output"]
SMALL = ["layer_norm", "bias", "token_types"]
# our options of LoRA, and those of peft
RELATIVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "rslora": ({"rslora": True}, {"use_rslora": True}),
    "dora": ({"dora": True}, {"use_dora": True}),
    "pissa": ({"init": "pissa"}, {"init_lora_weights": "pissa"}),
}


def has_token_types(family: str) -> bool:
    return reads_token_types(tiny_config(family))


# every relative on five families, and LoRA on the others, which name their modules like BERT
CASES = [
    (family, kind)
    for family in FAMILIES
    if ENCODERS[family].linear_qa
    for kind in (RELATIVES if family in ("bert", "deberta-v2", "distilbert", "mpnet", "roberta") else ["lora"])
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {family: save_tiny_encoder(folder / family, family) for family in FAMILIES}


def test_a_family_without_a_linear_head_in_transformers_is_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    """LoRA of peft on ModernBERT would change query, key and value together."""
    model = ReaderModel(load_encoder(str(bases["modernbert"])), tiny_run_config(encoder={"tuning": "lora"}))
    model.save(tmp_path / "model")
    with pytest.raises(LamellaError, match="expected an encoder with a linear question answering head"):
        save_as_peft(tmp_path / "model", tmp_path / "peft")
    config = peft.LoraConfig(target_modules=["Wqkv"])
    with quiet():
        stock = AutoModelForQuestionAnswering.from_pretrained(bases["modernbert"])
        peft.get_peft_model(stock, config).save_pretrained(tmp_path / "peft")
    with pytest.raises(LamellaError, match=r"expected LoRA on an encoder with a linear .* got modernbert\.$"):
        ReaderModel.from_pretrained(tmp_path / "peft")


def disturb(module: nn.Module) -> None:
    """Change every trained parameter, so that each matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def stock_logits(model: Any, family: str) -> Tensor:
    batch: Batch = tiny_batch(family)
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
    if has_token_types(family):
        inputs["token_type_ids"] = batch.token_types
    with torch.no_grad():
        output = model.eval()(**inputs)
    return torch.stack([output.start_logits, output.end_logits])


def own_logits(folder: Path, family: str) -> Tensor:
    with torch.no_grad():
        found: Tensor = ReaderModel.from_pretrained(folder)(tiny_batch(family))
    return found


def assert_equal(actual: Tensor, expected: Tensor, family: str, **tolerance: float) -> None:
    mask = tiny_batch(family).mask
    torch.testing.assert_close(actual[:, mask], expected[:, mask], **({"rtol": 1e-4, "atol": 1e-5} | tolerance))


def written_by_peft(base: Path, folder: Path, family: str = "bert", **options: Any) -> Tensor:
    """Write a trained LoRA folder with peft, and return its logits."""
    names = ENCODERS[family].projections
    targets = [names["query"].rpartition(".")[2], names["ffn_output"].rpartition(".")[2]]
    torch.manual_seed(2)
    with quiet():
        model = AutoModelForQuestionAnswering.from_pretrained(base)
        given = {"r": 3, "lora_alpha": 5, "target_modules": targets, "task_type": "QUESTION_ANS", **options}
        tuned = peft.get_peft_model(model, peft.LoraConfig(**given))
        disturb(tuned)
        tuned.save_pretrained(str(folder))
    return stock_logits(tuned, family)


def read_by_peft(base: Path, folder: Path) -> Any:
    with quiet():
        model = AutoModelForQuestionAnswering.from_pretrained(base)
        return peft.PeftModel.from_pretrained(model, str(folder))


def written_here(base: Path, folder: Path, **sections: Any) -> None:
    model = ReaderModel(load_encoder(str(base)), tiny_run_config(**sections))
    disturb(model)
    model.save(folder)


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_folder_of_peft_has_the_same_logits_here(
    family: str, kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    expected = written_by_peft(bases[family], tmp_path / "peft", family, **RELATIVES[kind][1])
    assert_equal(own_logits(tmp_path / "peft", family), expected, family)
    model = ReaderModel.load(tmp_path / "peft")
    model.save(tmp_path / "saved")
    assert torch.equal(own_logits(tmp_path / "saved", family), own_logits(tmp_path / "peft", family))
    also = ["token_types"] if has_token_types(family) else []
    assert model.tuning.items() >= {"rank": 3, "alpha": 5, "also": also, **RELATIVES[kind][0]}.items()


def test_token_types_are_ignored_where_peft_ignores_them(bases: dict[str, Path], tmp_path: Path) -> None:
    """Its class for question answering does, so that the folder was trained without them."""
    ignored, passed = (
        written_by_peft(bases["bert"], tmp_path / name, task_type=task, modules_to_save=["qa_outputs"])
        for name, task in (("with task", "QUESTION_ANS"), ("without", None))
    )
    assert not torch.allclose(ignored, passed, atol=0.01)
    assert_equal(own_logits(tmp_path / "with task", "bert"), ignored, "bert")
    assert_equal(own_logits(tmp_path / "without", "bert"), passed, "bert")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"bias": "all", "use_dora": True}, id="every bias"),
        pytest.param({"bias": "lora_only"}, id="some biases"),
        pytest.param({"modules_to_save": ["LayerNorm", "token_type_embeddings"], "bias": "all"}, id="small parts"),
        pytest.param({"modules_to_save": ["embeddings.LayerNorm"]}, id="one LayerNorm"),
        pytest.param({"layers_to_transform": [1], "use_dora": True}, id="one layer"),
        pytest.param(
            {"rank_pattern": {"layer.1.attention.self.query": 7}, "alpha_pattern": {"1.output.dense": 2.5}},
            id="patterns",
        ),
        pytest.param({"rank_pattern": {"query": 7}, "use_rslora": True, "lora_alpha": 1}, id="patterns of rslora"),
        pytest.param({"rank_pattern": {"query": 7}, "init_lora_weights": "pissa"}, id="patterns of pissa"),
        pytest.param({"lora_alpha": 0.5, "lora_dropout": 0.1}, id="a fraction as alpha"),
        pytest.param({"init_lora_weights": "gaussian"}, id="another start"),
        pytest.param({"task_type": None, "modules_to_save": ["qa_outputs"]}, id="no task"),
    ],
)
def test_what_peft_can_train_beside_plain_lora(options: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    expected = written_by_peft(bases["bert"], tmp_path / "peft", **options)
    assert_equal(own_logits(tmp_path / "peft", "bert"), expected, "bert")


@pytest.mark.parametrize("options", [{"type_vocab_size": 2}, {}])
def test_some_debertas_have_token_types(options: dict[str, int], tmp_path: Path) -> None:
    """The configuration of an encoder leaves out the defaults of its kind: for DeBERTa, none; for BERT, two."""
    base = save_tiny_encoder(tmp_path / "base", "deberta-v2", **options)
    expected = written_by_peft(base, tmp_path / "peft", "deberta-v2")
    assert_equal(own_logits(tmp_path / "peft", "deberta-v2"), expected, "deberta-v2")
    assert ReaderModel.load(tmp_path / "peft").tuning["also"] == (["token_types"] if options else [])


def test_the_base_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny_encoder(tmp_path / "encoders" / "somebody" / "tiny")
    expected = written_by_peft(base, tmp_path / "encoders" / "me" / "adapter")
    path = tmp_path / "encoders" / "me" / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "somebody/tiny"}))
    monkeypatch.setenv("LAMELLA_ENCODERS", str(tmp_path / "encoders"))
    model = ReaderModel.from_pretrained("me/adapter")
    assert model.base_name == "somebody/tiny"
    with torch.no_grad():
        assert_equal(model(tiny_batch()), expected, "bert")


def test_the_head_may_be_that_of_the_base(tmp_path: Path) -> None:
    base = save_tiny_encoder(tmp_path / "encoder")
    with quiet():
        stock = AutoModelForQuestionAnswering.from_pretrained(base)
        disturb(stock)
        stock.save_pretrained(tmp_path / "base")
    for file in base.glob("*token*"):
        shutil.copy(file, tmp_path / "base")
    expected = written_by_peft(tmp_path / "base", tmp_path / "peft", task_type=None)
    assert not any("qa_outputs" in name for name in load_file(tmp_path / "peft" / "adapter_model.safetensors"))
    assert_equal(own_logits(tmp_path / "peft", "bert"), expected, "bert")


def test_a_folder_of_peft_answers_predicts_and_is_trained_further(
    bases: dict[str, Path], tmp_path: Path, lamella: Any
) -> None:
    folder = tmp_path / "peft"
    written_by_peft(bases["bert"], folder, use_rslora=True)
    with pytest.warns(LamellaWarning, match="LoRA folders of peft have no graph builder; it runs on torch"):
        answer = Reader.load(folder).ask("Who wrote it?", corpus()[0])
    assert answer is not None
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"id": "1", "question": "Who?", "context": corpus()[0]}) + "\n")
    code, _, err = lamella("predict", questions, "--model", folder, "--out", tmp_path / "out")
    assert code == 0, err
    assert set(json.loads((tmp_path / "out" / "predictions.json").read_text())) == {"1"}

    given: dict[str, Any] = {
        "data": {"train": "demo:train", "max_train_samples": 6},
        "windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 24},
        "learner": {"start": str(folder)},
        "training": {"max_steps": 0, "batch_size": 4, "precision": "fp32"},
    }
    lines: list[str] = []
    train_plan(make_plan(given, where="test"), tmp_path / "run", log=lines.append)
    assert any("warm start" in line and "all encoder weights, and its head" in line for line in lines)
    assert torch.equal(own_logits(tmp_path / "run", "bert"), own_logits(folder, "bert"))
    written_here(folder, tmp_path / "next", encoder={"tuning": "bitfit"})  # as the encoder of a run
    assert ReaderModel.load(tmp_path / "next").base_name == str(folder)
    shutil.rmtree(folder)
    assert ReaderModel.load(tmp_path / "run").base_name == str(bases["bert"])


@pytest.mark.parametrize(
    ("family", "kind", "also"),
    [
        *((family, kind, SMALL if has_token_types(family) else SMALL[:-1]) for family, kind in CASES),
        *(("bert", "dora", also) for also in ([], ["layer_norm"], ["bias"])),
    ],
)
def test_peft_loads_it_with_equal_logits(
    family: str, kind: str, also: list[str], bases: dict[str, Path], tmp_path: Path
) -> None:
    tuning = {"name": "lora", "rank": 3, "alpha": 5, "targets": ALL, "also": also, **RELATIVES[kind][0]}
    written_here(bases[family], tmp_path / "model", encoder={"tuning": tuning})
    save_as_peft(tmp_path / "model", tmp_path / "peft")
    expected = own_logits(tmp_path / "model", family)
    assert_equal(stock_logits(read_by_peft(bases[family], tmp_path / "peft"), family), expected, family)
    assert_equal(own_logits(tmp_path / "peft", family), expected, family)  # and back


def test_only_the_chosen_projections_are_targets(bases: dict[str, Path], tmp_path: Path) -> None:
    """The name of one projection of BERT, output.dense, is the end of another's, attention.output.dense."""
    written_here(bases["bert"], tmp_path / "model", encoder={"tuning": {"name": "lora", "targets": ["ffn_output"]}})
    save_as_peft(tmp_path / "model", tmp_path / "peft")
    model = read_by_peft(bases["bert"], tmp_path / "peft")
    wrapped = [name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.Linear)]
    assert [name.partition("layer.")[2] for name in wrapped] == ["0.output.dense", "1.output.dense", "2.output.dense"]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"encoder": {"tuning": "full"}}, "expected the tuning lora, got full"),
        ({"encoder": {"tuning": "adapter"}}, "expected an encoder without adapters"),
        ({"encoder": {"tuning": "lora"}, "learner": {"mixer": "scalar_mix"}}, r"reads only the encoder's last layer"),
    ],
)
def test_a_model_that_peft_cannot_express_is_refused(
    sections: dict[str, Any], expected: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    written_here(bases["bert"], tmp_path / "model", **sections)
    with pytest.raises(LamellaError, match=f"cannot be written as a LoRA folder of peft: .*{expected}"):
        save_as_peft(tmp_path / "model", tmp_path / "peft")
    assert not (tmp_path / "peft").exists()


def test_a_model_on_another_model_is_refused(bases: dict[str, Path], tmp_path: Path, lamella: Any) -> None:
    written_here(bases["bert"], tmp_path / "first", encoder={"tuning": "bitfit"})
    written_here(tmp_path / "first", tmp_path / "second", encoder={"tuning": "lora"})
    code, _, err = lamella("export", tmp_path / "second", "--peft", tmp_path / "peft")
    assert (code, "expected LoRA directly on a pretrained encoder" in err) == (1, True)


EDITS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "expected peft_type LORA, got 'LOHA'; merge it with merge_and_unload of peft"),
    ({"use_qalora": True}, "expected plain LoRA, rsLoRA or DoRA, got use_qalora"),
    ({"of_a_later_version": {"on": True}}, "got of_a_later_version"),
    ({"init_lora_weights": "olora"}, "init_lora_weights 'olora' changed the base encoder itself"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changed the base encoder itself"),
    ({"base_model_name_or_path": "/nowhere"}, "the base encoder cannot be loaded: .*/nowhere"),
    ({"base_model_name_or_path": None}, "with base_model_name_or_path"),
    ({"revision": "v2"}, "got revision"),
    ({"lora_alpha": "x"}, "lora_alpha: expected a number, got 'x'"),
    ({"lora_alpha": 0}, "lora_alpha: expected a number greater than 0, got 0"),
    ({"lora_dropout": "x"}, "lora_dropout: expected a number, got 'x'"),
    ({"alpha_pattern": [1]}, r"alpha_pattern: expected a table, got \[1\]"),
    ({"alpha_pattern": {"query": None}}, "alpha_pattern.query: expected a number, got None"),
    ({"alpha_pattern": {"(": 1}}, r"alpha_pattern: expected regular expressions, got '\('"),
]


@pytest.mark.parametrize(("edit", "expected"), EDITS, ids=lambda value: next(iter(value)) if value else "")
def test_a_folder_that_computes_something_else_is_refused(
    edit: dict[str, Any], expected: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    written_by_peft(bases["bert"], tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(LamellaError, match=expected) as caught:
        ReaderModel.from_pretrained(tmp_path / "peft")
    assert "\n" not in str(caught.value)


def rename(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: rename(tensors, "bert.encoder", "vit.blocks"), "expected LoRA on projections of the encoder"),
        (lambda tensors: rename(tensors, "qa_outputs", "classifier"), "the tuning lora cannot hold .*classifier"),
        (
            lambda tensors: tensors | {"base_model.model.bert.embeddings.word_embeddings.weight": torch.zeros(1, 1)},
            r"adapter_model.safetensors: the tuning lora cannot hold base_model.model.bert.embeddings.word_embeddings",
        ),
        (
            lambda tensors: {name: value for name, value in tensors.items() if "qa_outputs" not in name},
            "expected a head for question answering",
        ),
        (
            lambda tensors: {name: value for name, value in tensors.items() if "1.output.dense.lora_B" not in name},
            r"encoder.layer.1.output.dense.lora_B.weight: expected shape \[32, 3\], found none",
        ),
        (
            lambda tensors: {name: value[..., :5].clone() for name, value in tensors.items()},
            r"lora_A.weight: expected shape \[3, 32\], found shape \[3, 5\]",
        ),
        (
            lambda tensors: {name: value[:0] if "lora_A" in name else value for name, value in tensors.items()},
            r"lora_A.weight: expected a matrix with at least one row, found shape \[0, 32\]",
        ),
        (
            lambda tensors: tensors | {"base_model.model.qa_outputs.weight": torch.tensor(1.0)},
            "expected a head for question answering",
        ),
    ],
)
def test_other_tensors_are_refused(change: Any, expected: str, bases: dict[str, Path], tmp_path: Path) -> None:
    written_by_peft(bases["bert"], tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(LamellaError, match=expected) as caught:
        ReaderModel.from_pretrained(tmp_path / "peft")
    assert "\n" not in str(caught.value)


def test_a_pickle_is_never_loaded(bases: dict[str, Path], tmp_path: Path) -> None:
    written_by_peft(bases["bert"], tmp_path / "peft")
    (tmp_path / "peft" / "adapter_model.safetensors").rename(tmp_path / "peft" / "adapter_model.bin")
    with pytest.raises(LamellaError, match="a pickle, which is never loaded"):
        ReaderModel.from_pretrained(tmp_path / "peft")


def test_nothing_is_written_into_a_folder_of_peft(bases: dict[str, Path], tmp_path: Path, lamella: Any) -> None:
    written_by_peft(bases["bert"], tmp_path / "peft")
    before = {file.name: file.read_bytes() for file in (tmp_path / "peft").iterdir()}
    with pytest.raises(LamellaError, match="expected a model folder or an empty one"):
        ReaderModel.load(tmp_path / "peft").save(tmp_path / "peft")
    code, _, err = lamella("calibrate", "demo:dev", "--model", tmp_path / "peft")
    assert (code, "expected a Lamella model folder" in err) == (2, True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "peft").iterdir()} == before
