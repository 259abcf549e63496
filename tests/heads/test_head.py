"""A head: the layers it reads, how its branches join, what it refuses, and the pooled output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from doubles import DEPTH, FAMILIES, save_tiny_encoder, tiny_batch, tiny_config, tiny_run_config, tiny_tokenizer
from lamella.config import POOLED
from lamella.encoder.encoder import HiddenStates
from lamella.encoder.families import FAMILIES as FAMILY_TABLE
from lamella.errors import ConfigError, EncoderError, ModelError
from lamella.heads.head import Head
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel

pytestmark = pytest.mark.usefixtures("one_thread")

POOLED_FAMILIES = [family for family in FAMILIES if FAMILY_TABLE[family].optional_pooler]
B, T, H, L = 2, 5, 8, 4


def make_head(*mixer: Any, task: str = "span", beside: Any = (), **options: Any) -> Head:
    def table(spec: Any) -> Any:
        return {"name": spec} if isinstance(spec, str) else spec

    main, second = [table(spec) for spec in mixer], [table(spec) for spec in beside]
    return Head(L, H, mixer=main, beside=second, task={"name": task}, **options).eval()


def problem(*mixer: Any, **options: Any) -> str:
    """Return the single problem that building the head reports."""
    with pytest.raises(ConfigError) as caught:
        make_head(*mixer, **options)
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("layers", "task", "expected"),
    [
        ("encoder", "span", (1, 2, 3, 4)),
        ("all", "span", (0, 1, 2, 3, 4)),
        ([2], "span", (2,)),
        ([0, 3], "answerability", (0, 3)),
        ("all", "answerability", (0, 1, 2, 3, 4)),
        ("pooled+all", "answerability", (POOLED, 0, 1, 2, 3, 4)),
    ],
)
def test_the_layers_that_a_mixer_of_all_layers_reads(layers: Any, task: str, expected: tuple[int, ...]) -> None:
    head = make_head("average", layers=layers, task=task)
    assert head.layers == head.main_layers == expected


@pytest.mark.parametrize(
    ("mixer", "options", "expected"),
    [
        pytest.param(["last"], {}, (4,), id="last"),
        pytest.param(["last"], {"layers": [1, 3]}, (3,), id="last of a list"),
        pytest.param(["last"], {"layers": [3, 1]}, (1,), id="last of a list is its last, not its highest"),
        pytest.param(["first_last"], {}, (1, 4), id="first_last"),
        pytest.param(["first_last"], {"layers": "all"}, (0, 4), id="first_last with the embeddings"),
        pytest.param(["first_last"], {"layers": [2]}, (2,), id="first_last of a single layer"),
        pytest.param(["average"], {"layers": [0, 2], "skip": True}, (0, 2, 4), id="a skip adds the last"),
        pytest.param(["average"], {"skip": True}, (1, 2, 3, 4), id="a skip of a layer that is read already"),
        pytest.param(["last"], {"beside": ["first_last"]}, (1, 4), id="stages beside add their layers"),
        pytest.param(["last", "compress"], {}, (4,), id="the first stage decides"),
    ],
)
def test_only_layers_that_are_read_are_requested(
    mixer: list[str], options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert make_head(*mixer, **options).layers == expected


@pytest.mark.parametrize("layers", [[0, 3], [3, 0]])
def test_layers_are_read_in_the_order_of_the_list(layers: list[int]) -> None:
    head = make_head({"name": "compress", "size": 2}, layers=layers)
    h = {0: torch.randn(B, T, H), 3: torch.randn(B, T, H)}
    mask = torch.ones(B, T, dtype=torch.bool)
    assert head.layers == (0, 3)  # the encoder returns them from the bottom up
    logits = head(HiddenStates((h[0], h[3]), mask, mask))
    x = torch.stack([h[layer] for layer in layers])[None]
    narrow = head.stages[0](x, None, head.task.q)  # [1, C, B, T, 2]
    torch.testing.assert_close(logits, head.task(torch.cat(list(narrow[0]), -1)[None]))


@pytest.mark.parametrize("layers", [[5], [-1], [0, 9, 2], [1, 1], []])
def test_layers_must_exist_and_differ(layers: list[int]) -> None:
    line = problem("average", layers=layers)
    assert line == f"expected different layers from 0 to 4, got {layers}."


def test_the_pooled_output_needs_a_task_that_reads_cls() -> None:
    for layers in ("pooled", "pooled+all"):
        assert "the pooled output needs a task that reads [CLS] alone" in problem("average", layers=layers)


@pytest.mark.parametrize("stage", ["dot", "multiplicative", "encoder_block"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"after": ["compress"]}, id="followed by compress"),
        pytest.param({"after": [{"name": "compress", "size": H}]}, id="followed by compress of the same width"),
        pytest.param({"before": ["scalar_mix"]}, id="after another"),
        pytest.param({"before": [{"name": "compress", "size": 3}]}, id="after compress"),
        pytest.param({"skip": True}, id="with a skip"),
        pytest.param({"beside": ["last"]}, id="with stages beside"),
    ],
)
def test_a_stage_that_reads_the_tasks_vectors_is_the_only_stage(stage: str, options: dict[str, Any]) -> None:
    mixer = [*options.get("before", []), stage, *options.get("after", [])]
    line = problem(*mixer, **{name: value for name, value in options.items() if name in ("skip", "beside")})
    assert line.startswith(f"{stage} compares the layers with the task's vectors: expected no other stage")
    if "beside" in options:
        problem(*options["beside"], beside=[stage])


def test_the_heads_of_an_encoder_block() -> None:
    assert problem({"name": "encoder_block", "heads": 3}) == "encoder_block.heads: expected a divisor of 8, got 3."
    for width, heads in [(768, 12), (384, 6), (312, 4), (200, 2), (50, 1)]:  # by default a divisor of the width
        head = Head(1, width, mixer=[{"name": "encoder_block"}], task={"name": "span"})
        assert head.stages[0].heads == heads


def test_a_task_that_reads_cls_reads_nothing_else() -> None:
    for options in ({}, {"skip": True}, {"beside": [{"name": "compress", "size": 2}]}):
        head = make_head("scalar_mix", task="answerability", **options)
        h = [torch.randn(B, T, H) for _ in head.layers]
        changed = [torch.cat([layer[:, :1], torch.randn(B, T - 1, H)], 1) for layer in h]
        mask = torch.ones(B, T, dtype=torch.bool)
        logits = head(HiddenStates(tuple(h), mask, mask))
        assert logits.shape == (2, B, 1)
        assert torch.equal(head(HiddenStates(tuple(changed), mask, mask)), logits)


def test_the_stages_beside_are_built_for_the_same_number_of_tokens() -> None:
    for task, longest in (("span", 100), ("answerability", 1)):
        head = make_head("last", beside=["last"], task=task, longest=100)
        assert [stage.out_shape.longest for stage in (head.stages[0], head.beside[0])] == [longest, longest]


def save_with_pooler(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    transformers.AutoModel.from_config(tiny_config(family)).save_pretrained(folder)
    tiny_tokenizer(family).save_pretrained(folder)
    return folder


def pooled_run(tuning: Any = "frozen", **learner: Any) -> Any:
    learner = {"task": "answerability", "mixer": "scalar_mix", "layers": "pooled+all", **learner}
    return tiny_run_config(encoder={"tuning": tuning}, learner=learner)


@pytest.mark.parametrize("family", POOLED_FAMILIES)
def test_the_pooled_output_equals_that_of_transformers(family: str, tmp_path: Path) -> None:
    folder, batch = save_with_pooler(tmp_path / "base", family), tiny_batch(family)
    encoder = load_encoder(str(folder), pooler=True).encoder
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.mask.long()}
    if encoder.token_types:
        inputs["token_type_ids"] = batch.token_types
    reference = transformers.AutoModel.from_pretrained(folder).eval()(**inputs)
    hidden = encoder.eval()(batch, (POOLED, 0, DEPTH))
    assert hidden.pooled is not None
    assert len(hidden.layers) == 2
    torch.testing.assert_close(hidden.pooled, reference.pooler_output, atol=1e-6, rtol=0)
    at_cls = hidden.at_cls()
    assert torch.equal(at_cls.layers[0][:, 0], hidden.pooled)
    assert torch.equal(at_cls.layers[2], hidden.layers[1][:, :1])
    assert encoder(batch, (0, DEPTH)).pooled is None

    # In the head it is the first of the channels: with all weight on it, nothing else is read.
    model = ReaderModel(load_encoder(str(folder), pooler=True), pooled_run()).eval()
    with torch.no_grad():
        mix = model.head.stages[0]
        assert mix.w.shape == (2, DEPTH + 2)
        mix.w.zero_()[:, 0] = 1
        logits = model(batch)
        expected = reference.pooler_output @ model.head.task.q.T + model.head.task.b
    torch.testing.assert_close(logits[:, :, 0].T, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tuning", ["frozen", "full", {"name": "top_k", "k": 1}], ids=str)
@pytest.mark.parametrize("family", POOLED_FAMILIES)
def test_a_reader_of_the_pooled_output_survives_saving(family: str, tuning: Any, tmp_path: Path) -> None:
    if family == "albert" and tuning not in ("frozen", "full"):
        tuning = "layer_norm"
    folder, batch = save_with_pooler(tmp_path / "base", family), tiny_batch(family)
    model = ReaderModel(load_encoder(str(folder), pooler=True), pooled_run(tuning))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    before = model.eval()(batch)
    model.save(tmp_path / "model")
    assert torch.equal(ReaderModel.load(tmp_path / "model")(batch), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_without_a_pooler_is_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = save_tiny_encoder(tmp_path / "base", family)
    with pytest.raises(EncoderError) as caught:
        load_encoder(str(folder), pooler=True)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    if family in POOLED_FAMILIES:
        assert "pooler." in message
        assert "missing" in message
    else:
        assert f"{family} encoders have no pooled output" in message
    load_encoder(str(folder))


def test_a_model_on_an_encoder_that_lost_its_pooler(tmp_path: Path) -> None:
    folder = save_with_pooler(tmp_path / "base", "bert")
    ReaderModel(load_encoder(str(folder), pooler=True), pooled_run()).save(tmp_path / "model")
    save_tiny_encoder(folder)
    with pytest.raises(ModelError, match=r"the base encoder cannot be loaded: .*pooler\.") as caught:
        ReaderModel.load(tmp_path / "model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tuning", ["full", "bitfit", "adapter"])
@pytest.mark.parametrize(("first", "second"), [("encoder", "pooled+all"), ("pooled+all", "encoder")])
def test_a_tuned_encoder_serves_heads_that_read_the_pooled_output_and_heads_that_do_not(
    first: str, second: str, tuning: str, tmp_path: Path
) -> None:
    """BERTVision's two stages, of which only one reads it: if the first does not, its pretrained weights stay."""
    folder, batch = save_with_pooler(tmp_path / "base", "bert"), tiny_batch()
    tuned = ReaderModel(load_encoder(str(folder), pooler=first == "pooled+all"), pooled_run(tuning, layers=first))
    with torch.no_grad():
        for parameter in tuned.encoder.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    tuned.eval().save(tmp_path / "first")

    loaded = load_encoder(str(tmp_path / "first"), pooler=second == "pooled+all")
    last = tuned.encoder(batch, (DEPTH,)).layers[0]
    assert torch.equal(loaded.encoder.eval()(batch, (DEPTH,)).layers[0], last)
    if second == "pooled+all":
        pretrained = load_encoder(str(folder), pooler=True).encoder.model.pooler
        assert torch.equal(loaded.encoder.model.pooler.dense.weight, pretrained.dense.weight)
    else:
        assert loaded.encoder.model.pooler is None
    model = ReaderModel(loaded, pooled_run("full", layers=second)).eval()
    model.save(tmp_path / "second")
    assert torch.equal(ReaderModel.load(tmp_path / "second")(batch), model(batch))


def test_the_width_that_the_task_reads() -> None:
    assert make_head("average").task.q.shape == (2, H)
    assert make_head("average", skip=True).task.q.shape == (2, 2 * H)
    assert make_head({"name": "compress", "size": 3}, beside=["last"], skip=True).task.q.shape == (2, 3 * L + 2 * H)
