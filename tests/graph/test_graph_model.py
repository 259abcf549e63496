"""Models loaded as graphs: chosen where they fit, made once, read from the cache; damage and races; no torch."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from doubles import corpus, examples_about, save_tiny_encoder, tiny_config, tiny_run_config, tiny_tokenizer
from lamella import Reader, environment
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import pad
from lamella.data.windows.tokens import without_truncation
from lamella.encoder.sources import DEFAULT_READER, hash_weights
from lamella.errors import LamellaWarning, ModelError, UsageError
from lamella.graph.encoder_config import DEFAULTS, DISTILBERT, OWN_DEFAULTS, PREFIXES, read_encoder_config
from lamella.graph.reader_graph import ReaderGraph
from lamella.graph.tensor_files import read_tensor_files
from lamella.inference.questions import read_questions
from lamella.models import graph_cache, loading
from lamella.models.base_encoder import load_encoder
from lamella.models.loading import load_model
from lamella.models.model import ReaderModel
from lamella.models.onnx_model import OnnxModel
from lamella.models.tokenizer_file import TOKENIZER, open_tokenizer
from lamella.models.transformers_model import StockModel
from lamella.user_cache import remembered_sha256

pytestmark = pytest.mark.usefixtures("one_thread")
ON_CPU: dict[str, Any] = {"device": "cpu", "precision": "fp32"}


def change(model: ReaderModel, seed: int = 0) -> ReaderModel:
    """Change the trained weights so much that they matter."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save_reader(folder: Path, base: Path | str, **sections: Any) -> Path:
    change(ReaderModel(load_encoder(str(base)), tiny_run_config(**sections))).save(folder)
    return folder


def assert_equal(in_torch: Any, graph: Any, within: float = 1e-5) -> None:
    texts = [context[: 30 + 200 * number] for number, context in enumerate(corpus()[:3])]
    features = featurise(examples_about(texts), in_torch.tokenizer, in_torch.windows)
    padded = pad(features, np.arange(len(features)))
    expected, found = in_torch.logits(padded), graph.logits(padded)
    np.testing.assert_allclose(found[:, padded.mask], expected[:, padded.mask], atol=within, rtol=0)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("base") / "bert", num_hidden_layers=2)


@pytest.fixture(scope="module")
def saved(bert: Path) -> Path:
    return save_reader(bert.parent / "reader", bert, encoder={"tuning": "lora"})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


def load_graph(folder: Path) -> OnnxModel:
    model = load_model(folder, **ON_CPU)
    assert isinstance(model, OnnxModel)
    return model


# --- which backend


def test_auto_takes_the_graph_where_it_fits(saved: Path) -> None:
    assert isinstance(load_model(saved), OnnxModel)
    assert isinstance(load_model(saved, device=torch.device("cpu")), OnnxModel)
    assert isinstance(load_model(saved, backend="onnx"), OnnxModel)
    assert isinstance(load_model(saved, backend="torch"), ReaderModel)
    assert isinstance(load_model(saved, device="cpu", precision="fp16"), ReaderModel)
    with pytest.raises(UsageError, match="device: 'cuda:99' cannot be used here"):
        load_model(saved, device="cuda:99")


@pytest.mark.parametrize("type", ["cuda", "cpu"])
def test_auto_takes_torch_if_it_would_use_a_gpu(type: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "GPU_DEVICES", (str(saved),))  # a file that exists
    monkeypatch.setattr("lamella.encoder.device.choose_device", lambda: torch.device(type))
    assert loading.suits_onnx(None, "auto") == (type == "cpu")
    assert loading.suits_onnx("cpu", "auto")


@pytest.mark.parametrize("flags", ["amx_bf16 amx_tile avx512_bf16", "avx512_bf16 avx512_vnni"])
def test_auto_takes_torch_on_a_processor_with_amx(
    flags: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu vme {flags}\n", encoding="utf-8")
    monkeypatch.setattr(environment, "CPU_INFO", tmp_path / "cpuinfo")
    faster = flags.startswith("amx_bf16")
    assert isinstance(load_model(saved, device="cpu"), ReaderModel if faster else OnnxModel)
    assert isinstance(load_model(saved, device="cpu", precision="fp32"), OnnxModel)
    assert isinstance(load_model(saved, backend="onnx"), OnnxModel)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert isinstance(load_model(saved, device="cpu"), OnnxModel)


def test_asking_does_not_wait_for_torch(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lamella: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: amx_bf16\n", encoding="utf-8")
    monkeypatch.setattr(environment, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(loading, "_load_torch", lambda *arguments: pytest.fail("torch was used"))
    assert lamella("ask", "Who?", "--text", "Huygens found Titan.", "--model", saved)[0] == 0


def test_the_tokenizer_of_a_graph_is_not_copied_and_reads_long_texts(saved: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(saved / TOKENIZER))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(tmp_path / TOKENIZER))
    opened = open_tokenizer(tmp_path, "bert")
    assert opened is not None
    plain = without_truncation(opened)
    assert plain is opened.backend_tokenizer
    assert len(plain.encode("", add_special_tokens=False)) == 0
    assert len(plain.encode(corpus()[0])) > 4


@pytest.mark.parametrize("family", ["deberta-v2", "eurobert", "modernbert"])
def test_a_model_without_a_graph_runs_on_torch_with_a_line(family: str, tmp_path: Path) -> None:
    base = save_tiny_encoder(tmp_path / "base", family, num_hidden_layers=1)
    folder = save_reader(tmp_path / "reader", base)
    problem = f"{folder}: no ONNX graph can be made from this model: encoders of type {family} have no graph builder"
    with pytest.warns(LamellaWarning) as lines:
        assert isinstance(load_model(folder, **ON_CPU), ReaderModel)
    assert [str(line.message) for line in lines] == [f"{problem}; it runs on torch, which takes longer to start."]
    with pytest.raises(UsageError) as caught:
        load_model(folder, backend="onnx")
    assert str(caught.value) == f"{problem}; load it with backend 'torch'."


@pytest.mark.parametrize(
    "option", [{"hidden_act": "mish"}, {"is_decoder": True}, {"position_embedding_type": "relative_key"}]
)
def test_an_unknown_variant_has_no_graph(option: dict[str, Any], bert: Path, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "bert")
    shutil.copytree(saved, tmp_path / "reader")
    for path, changes in (
        (tmp_path / "bert" / "config.json", option),
        (tmp_path / "reader" / "config.json", {}),
    ):
        config = json.loads(path.read_text())
        if not changes:
            changes = {"base": {**config["base"], "name": str(tmp_path / "bert")}}
        path.write_text(json.dumps({**config, **changes}))
    with pytest.raises(UsageError, match="has no graph builder; load it with backend 'torch'"):
        load_model(tmp_path / "reader", backend="onnx")


@pytest.mark.parametrize("family", sorted(PREFIXES))
def test_the_defaults_are_those_of_transformers(family: str) -> None:
    defaults = transformers.AutoConfig.for_model(family)
    ours = read_encoder_config(
        {"model_type": family, "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4}
    )
    for key in ({*DEFAULTS} | {*OWN_DEFAULTS.get(family, {})}) - {"is_decoder", "position_embedding_type"}:
        name = DISTILBERT.get(key, key) if family == "distilbert" else key
        assert getattr(ours, key) == getattr(defaults, name, DEFAULTS[key]), key


# --- what is merged and loaded


@pytest.mark.parametrize(
    "tuning",
    [
        {"name": "lora", "rslora": True, "rank": 3},
        {"name": "lora", "dora": True, "targets": ["query", "ffn_output"]},
        {"name": "lora", "init": "pissa", "dora": True, "also": ["bias", "layer_norm", "token_types"]},
        {"name": "ia3", "targets": ["query", "attention_output", "ffn_input", "ffn_output"]},
        {"name": "adapter", "leave_out": [1], "k": 1, "size": 5},
    ],
    ids=str,
)
def test_the_options_of_tunings(tuning: dict[str, Any], bert: Path, tmp_path: Path) -> None:
    folder = save_reader(tmp_path / "reader", bert, encoder={"tuning": tuning})
    assert_equal(load_model(folder, **ON_CPU, backend="torch"), load_graph(folder))


def test_a_chain_of_models_also_flattened_and_rounded(bert: Path, tmp_path: Path) -> None:
    from lamella.export.flatten import flatten
    from lamella.export.half import halve

    first = save_reader(tmp_path / "first", bert, encoder={"tuning": "adapter"})
    second = save_reader(tmp_path / "second", first, encoder={"tuning": "lora"})
    third = save_reader(tmp_path / "third", second, encoder={"tuning": {"name": "adapter", "k": 1}})
    flatten(str(third), tmp_path / "flat")
    halve(str(third), tmp_path / "half")
    for folder in (second, third, tmp_path / "flat", tmp_path / "half"):
        in_torch, graph = load_model(folder, **ON_CPU, backend="torch"), load_graph(folder)
        assert_equal(in_torch, graph)
        assert graph.folders == in_torch.folders


@pytest.mark.parametrize("family", sorted(PREFIXES))
def test_a_checkpoint_of_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForQuestionAnswering.from_config(tiny_config(family)).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer(family)
    tokenizer.model_max_length = 128
    tokenizer.save_pretrained(tmp_path)
    tokenizer.model_max_length = 10**30
    in_torch, graph = load_model(tmp_path, **ON_CPU, backend="torch"), load_graph(tmp_path)
    assert isinstance(in_torch, StockModel)
    assert_equal(in_torch, graph)
    assert (graph.windows, graph.decoding, graph.config.positions) == (
        in_torch.windows,
        in_torch.decoding,
        in_torch.positions,
    )


def test_shards_bf16_and_old_names(tmp_path: Path, bert: Path) -> None:
    """The same numbers in other files: two shards, bf16, and the names that LayerNorms had in the oldest files."""
    base = tmp_path / "base"
    shutil.copytree(bert, base)
    tensors = {name: value.bfloat16() for name, value in load_file(bert / "model.safetensors").items()}
    names = sorted(tensors)
    old = {
        name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for name in names
    }
    (base / "model.safetensors").unlink()
    parts = {f"model-0000{part}-of-00002.safetensors": names[part - 1 :: 2] for part in (1, 2)}
    for file, chosen in parts.items():
        save_file({old[name]: tensors[name] for name in chosen}, base / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {old[name]: file for file, chosen in parts.items() for name in chosen}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = save_reader(tmp_path / "reader", base, encoder={"tuning": "bitfit"})
    assert_equal(load_model(folder, **ON_CPU, backend="torch"), load_graph(folder))


@pytest.mark.parametrize("tuning", ["full", "lora", "adapter", "layer_norm", "ia3", "bitfit"])
def test_a_missing_tensor_is_reported_as_by_torch(tuning: str, bert: Path, tmp_path: Path) -> None:
    folder = save_reader(tmp_path / "reader", bert, encoder={"tuning": tuning})
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in sorted(tensors) if name.startswith("encoder."))
    save_file({name: value for name, value in tensors.items() if name != lost}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["weights_sha256"]  # as in folders of older versions
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"{lost} is missing"):
        load_model(folder, **ON_CPU)


def test_a_damaged_delta_and_another_base(saved: Path, bert: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "reader")
    weights = tmp_path / "reader" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    with pytest.raises(ModelError, match="the file is damaged or was replaced"):
        load_model(tmp_path / "reader", **ON_CPU)
    base = shutil.copytree(bert, tmp_path / "bert")
    folder = save_reader(tmp_path / "other", base)
    save_tiny_encoder(base, seed=1, num_hidden_layers=2)
    with pytest.raises(ModelError, match="use the encoder that the model was trained on"):
        load_model(folder, **ON_CPU)
    shutil.rmtree(base)
    with pytest.raises(ModelError, match="the base encoder cannot be loaded"):
        load_model(folder, **ON_CPU)


@pytest.mark.parametrize("family", sorted(PREFIXES))
def test_the_same_encoder_in_another_file(family: str, tmp_path: Path) -> None:
    """As part of a checkpoint with a head, and with a pooler."""
    base = save_tiny_encoder(tmp_path / "base", family)
    folder = save_reader(tmp_path / "reader", base)
    expected = load_graph(folder)
    tensors = load_file(base / "model.safetensors")
    more = {PREFIXES[family] + name: value for name, value in tensors.items()}
    extra = {f"{PREFIXES[family]}pooler.dense.weight": torch.ones(2), "qa_outputs.bias": torch.ones(2)}
    save_file({**more, **extra}, base / "model.safetensors", {"format": "pt"})
    assert_equal(expected, load_graph(folder), within=0)


# --- the cache


def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the graphs that are built."""
    built: list[str] = []
    build = ReaderGraph.encode

    def encode(self: Any, **options: Any) -> bytes:
        built.append("in the cache" if options else "in memory")
        return build(self, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(ReaderGraph, "encode", encode)
    return built


def test_a_graph_is_made_once(saved: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = builds(monkeypatch)
    first = load_graph(saved)
    (entry,) = cache.iterdir()
    assert {path.name for path in entry.iterdir()} == {"model.onnx", "model.onnx.data", "state.json"}
    copy = shutil.copytree(saved, tmp_path / "copy")  # the same model elsewhere
    for folder in (saved, copy):
        assert_equal(first, load_graph(folder), within=0)
    assert built == ["in the cache"]
    config = json.loads((copy / "config.json").read_text())
    config["decoding"]["null_score_diff_threshold"] = -7.0  # not part of the graph
    (copy / "config.json").write_text(json.dumps(config))
    assert load_graph(copy).decoding.null_score_diff_threshold == -7.0
    assert built == ["in the cache"]


def test_the_same_delta_on_another_encoder_is_another_graph(saved: Path, cache: Path, tmp_path: Path) -> None:
    encoder = save_tiny_encoder(tmp_path / "bert", seed=1, num_hidden_layers=2)
    copy = shutil.copytree(saved, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["base"] |= {"name": str(encoder), "sha256": hash_weights([encoder / "model.safetensors"])}
    (copy / "config.json").write_text(json.dumps(config))
    first, second = load_graph(saved), load_graph(copy)
    assert len(list(cache.iterdir())) == 2
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equal(first, second)


@pytest.mark.parametrize("file", ["model.onnx", "model.onnx.data", "state.json"])
@pytest.mark.parametrize("damage", ["removed", "cut", "changed", "empty"])
def test_a_damaged_graph_is_made_again(
    file: str, damage: str, saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_graph(saved)
    (entry,) = cache.iterdir()
    path, content = entry / file, (entry / file).read_bytes()
    contents = {"cut": content[: len(content) // 2], "empty": b"", "changed": bytes([content[0] ^ 1]) + content[1:]}
    path.unlink()  # the first model has the file in its memory
    if damage != "removed":
        path.write_bytes(contents[damage])
    built = builds(monkeypatch)
    assert_equal(first, load_graph(saved), within=0)
    assert_equal(first, load_graph(saved), within=0)
    assert built == ["in the cache"]


def test_without_a_cache_or_space_the_graph_stays_in_memory(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_graph(saved)
    built = builds(monkeypatch)
    monkeypatch.setenv("LAMELLA_CACHE", "")
    assert_equal(expected, load_graph(saved), within=0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path / "file"))  # no folder can be made in it
    assert_equal(expected, load_graph(saved), within=0)
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path / "full"))

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert_equal(expected, load_graph(saved), within=0)
    assert built.count("in memory") == 3
    assert not list((tmp_path / "full" / "graphs").iterdir())


def test_a_read_only_cache_is_still_used(saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_graph(saved)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    built = builds(monkeypatch)
    load_graph(saved)
    assert not built


def test_several_processes_may_make_a_graph_at_once(saved: Path, cache: Path) -> None:
    """Threads stand in for processes: they meet at the same files."""
    models: list[OnnxModel] = []
    threads = [threading.Thread(target=lambda: models.append(load_graph(saved))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == 6
    assert len(list(cache.iterdir())) == 1
    assert_equal(models[0], models[-1], within=0)


def test_the_least_recently_used_graphs_are_removed(
    saved: Path, bert: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_graph(saved)
    (old,) = cache.iterdir()
    os.utime(old, (1, 1))
    abandoned = cache / ".x.lamella-part"
    abandoned.mkdir()
    os.utime(abandoned, (1, 1))
    monkeypatch.setattr(graph_cache, "MAX_BYTES", 1)
    load_graph(save_reader(tmp_path / "second", bert))
    (left,) = cache.iterdir()
    assert left != old


def test_a_hash_is_computed_again_if_the_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "file"
    path.write_bytes(b"one")
    status = path.stat()
    first = remembered_sha256(path)
    with monkeypatch.context() as patch:
        patch.setattr("lamella.user_cache.file_sha256", None)  # not called
        assert remembered_sha256(path) == first
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # the times of writing can be set
    assert remembered_sha256(path) != first
    for memory in (tmp_path / "cache" / "hashes").iterdir():
        memory.write_text("{")
    path.write_bytes(b"one")
    assert remembered_sha256(path) == first


# --- without torch


def test_asking_imports_no_torch(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(corpus()[0], encoding="utf-8")
    script = f"""
import sys
sys.argv = ["lamella", "ask", "What is it?", "--context", {str(tmp_path / "text.txt")!r}, "--model", {str(saved)!r}]
from lamella.__main__ import main
try:
    main()
except SystemExit as ended:
    print(ended.code, end=" ")
heavy = {{"torch", "transformers", "accelerate", "onnx", "google.protobuf"}}
print(sorted(heavy & set(sys.modules)), "onnxruntime" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stderr == ""
    assert ended.stdout.splitlines()[-1] == "0 [] True"


def test_the_room_imports_no_torch() -> None:
    modules = [
        f"lamella.graph.{path.stem}" for path in Path(loading.__file__).parents[1].joinpath("graph").glob("*.py")
    ]
    script = (
        f"import sys, importlib; [importlib.import_module(name) for name in {modules!r}]; "
        "print({'torch', 'transformers', 'onnx', 'onnxruntime', 'google.protobuf'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


# --- the packaged reader


def test_the_default_reader_gives_the_answers_of_torch() -> None:
    examples = read_questions("demo:dev")[:8]
    in_torch, graph = (Reader.load(DEFAULT_READER, **ON_CPU, backend=kind) for kind in ("torch", "auto"))  # type: ignore[arg-type]
    assert isinstance(graph.model, OnnxModel)
    features = featurise(examples, in_torch.model.tokenizer, in_torch.model.windows)
    padded = pad(features, np.arange(len(features)))
    expected, found = in_torch.model.logits(padded), graph.model.logits(padded)
    np.testing.assert_allclose(found[:, padded.mask], expected[:, padded.mask], atol=1e-4, rtol=0)
    plain = [without_truncation(reader.model.tokenizer) for reader in (in_torch, graph)]
    assert plain[0].to_str() == plain[1].to_str()
    for example in examples:
        both = [reader.ask(example.question, example.context.text) for reader in (in_torch, graph)]
        assert [answer["answer"] for answer in both[0]] == [answer["answer"] for answer in both[1]]


def test_a_checkpoint_of_a_kind_that_answers_with_more_than_text_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.LayoutLMConfig(vocab_size=100, max_2d_position_embeddings=8, **sizes)
    transformers.LayoutLMForQuestionAnswering(config).save_pretrained(tmp_path)
    tiny_tokenizer("bert").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no model with start and end logits for LayoutLM\.$"):
        load_model(tmp_path, **ON_CPU, backend="torch")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in (1, 2)]
    for path in paths:
        save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(
        ModelError, match=r"2\.safetensors: expected other tensors than the files before it, got a again"
    ):
        read_tensor_files(paths)
