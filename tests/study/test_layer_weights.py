"""The layers that a head reads, compared with numbers computed by hand and with plain loops over the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from doubles import example, save_tiny_encoder, tiny_model, tiny_run_config
from lamella.data.windows.batches import Batch
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import pad
from lamella.encoder.sources import MODEL_CONFIG, MODEL_WEIGHTS
from lamella.errors import ModelError
from lamella.files import read_json, write_json
from lamella.heads.pooling import ScalarMix
from lamella.inference.layer_means import KINDS, sums_by_kind, token_kinds
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.study.analysis.layer_weights import learned_weights, mean_attention, shares

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = [
    example("the bees dance in the dark hive", "dark hive", "Where do bees dance?", "a"),
    example("a press of iron", None, "What is it?", "b"),
    example("ice is old and white", "old", "How is the ice?", "c"),
]


def saved(folder: Path, mixer: Any, **learner: Any) -> Path:
    """Write a run folder with a model whose head differs from its initial state."""
    encoder = save_tiny_encoder(folder / "encoder")
    config = tiny_run_config(encoder={"name": str(encoder)}, learner={"mixer": mixer, **learner})
    model = ReaderModel(load_encoder(str(encoder)), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save(folder / "run" / "model")
    return folder / "run"


def test_the_weights_of_a_scalar_mix() -> None:
    tensors = {"w": torch.tensor(np.log([[1.0, 2.0, 1.0], [1.0, 1.0, 8.0]])), "gamma": torch.tensor([1.0, 2.0])}
    assert ScalarMix.learned_layer_weights(tensors, normalise="softmax").numpy() == pytest.approx(
        np.array([[0.25, 0.5, 0.25], [0.2, 0.2, 1.6]])
    )
    tensors = {"w": torch.tensor([[0.5, -0.25, 0.25]]), "gamma": torch.tensor([2.0])}
    raw = ScalarMix.learned_layer_weights(tensors, normalise="none").numpy()
    assert raw.tolist() == [[1.0, -0.5, 0.5]]
    assert shares(raw).tolist() == [[0.5, 0.25, 0.25]]
    assert shares(np.zeros((1, 2))).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("mixer", "layers", "outputs"),
    [
        ({"name": "scalar_mix"}, "encoder", ["start", "end"]),
        ({"name": "scalar_mix", "normalise": "softmax"}, "all", ["start", "end"]),
        ({"name": "scalar_mix", "shared": True}, [0, 3], ["both"]),
        ([{"name": "scalar_mix"}, {"name": "compress", "size": 4}], "encoder", ["start", "end"]),
    ],
)
def test_learned_weights_equal_those_in_the_model(mixer: Any, layers: Any, outputs: list[str], tmp_path: Path) -> None:
    run = saved(tmp_path, mixer, layers=layers)
    learned = learned_weights(run)
    assert learned is not None
    model = ReaderModel.load(run)
    assert list(learned["weights"]) == list(learned["share"]) == outputs
    assert tuple(learned["layers"]) == model.head.main_layers
    used = model.head.stages[0].weigh(lambda v: v, model.head.task.q)[..., 0, 0].detach().numpy()  # type: ignore[operator]
    assert np.array(list(learned["weights"].values())) == pytest.approx(used, rel=1e-5)
    assert mean_attention(run, EXAMPLES) is None


def test_both_classes_of_a_classifier_have_weights(tmp_path: Path) -> None:
    names = ["answer", "no answer"]
    learned = learned_weights(saved(tmp_path / "mix", "scalar_mix", task="answerability"))
    assert learned is not None
    assert list(learned["weights"]) == names
    run = saved(tmp_path / "dot", "dot", task="answerability")
    means = mean_attention(run, EXAMPLES)
    assert means is not None
    assert list(means["weights"]) == names
    assert means["weights"]["answer"] != means["weights"]["no answer"]


def test_a_model_without_such_weights_and_a_run_without_a_model(tmp_path: Path) -> None:
    run = saved(tmp_path, "average")
    assert learned_weights(run) is None
    assert mean_attention(run, EXAMPLES) is None
    assert learned_weights(tmp_path) is None


def test_a_damaged_model_is_reported_as_such(tmp_path: Path) -> None:
    run = saved(tmp_path, "scalar_mix")
    (run / "model" / MODEL_WEIGHTS).write_bytes(b"no")
    with pytest.raises(ModelError, match="damaged"):
        learned_weights(run)
    config = read_json(run / "model" / MODEL_CONFIG)
    write_json(run / "model" / MODEL_CONFIG, {**config, "head": {}})
    with pytest.raises(ModelError, match="damaged"):
        learned_weights(run)


def test_sums_by_kind() -> None:
    """Two layers, one window of four tokens: special, question, context, pad; a second of question, answer, pads."""
    weights = torch.tensor([[[[1, 2, 3, 99], [4, 5, 99, 99]], [[10, 20, 30, 99], [40, 50, 99, 99]]]])  # [1, 2, 2, 4]
    kinds = np.array([[0, 1, 2, -1], [1, 3, -1, -1]])
    assert sums_by_kind(weights, kinds).tolist() == [[[1, 10], [6, 60], [3, 30], [5, 50]]]


def test_kinds_of_tokens() -> None:
    model = tiny_model()
    features = featurise(EXAMPLES, model.tokenizer, model.windows)
    padded = pad(features, np.arange(3))
    kinds = token_kinds(features, padded)
    for row, asked in enumerate(EXAMPLES):
        by_kind = {
            kind: model.tokenizer.convert_ids_to_tokens(padded.input_ids[row][kinds[row] == number].tolist())
            for number, kind in enumerate(KINDS)
        }
        answer = asked.answers[0].text if asked.answers else ""
        assert by_kind["special"] == ["[CLS]", "[SEP]", "[SEP]"]
        assert by_kind["question"] == model.tokenizer.tokenize(asked.question)
        assert by_kind["answer"] == model.tokenizer.tokenize(answer)
        assert by_kind["context"] == model.tokenizer.tokenize(asked.context.text.replace(answer or "\n", " "))
        assert (kinds[row] == -1).sum() == (~padded.mask[row]).sum()


@pytest.mark.parametrize("mixer", ["dot", {"name": "multiplicative", "shared": False}, "encoder_block"])
def test_mean_attention_is_the_mean_over_the_tokens(mixer: Any, tmp_path: Path) -> None:
    run = saved(tmp_path, mixer, layers="all")
    means = mean_attention(run, EXAMPLES, batch_size=2)
    assert means is not None
    model = ReaderModel.load(run).eval()
    features = featurise(EXAMPLES, model.tokenizer, model.windows)
    padded = pad(features, np.arange(3))
    kinds = token_kinds(features, padded)
    with torch.inference_mode():
        weights = model.head.layer_weights(model.encode(Batch.of(padded), model.head.layers))
    assert weights is not None
    assert means["layers"] == [0, 1, 2, 3]
    assert means["questions"] == 3
    for output, name in enumerate(("start", "end")):
        for number, kind in enumerate(KINDS):
            tokens = [weights[output, :, row, place].numpy() for row, place in np.argwhere(kinds == number).tolist()]
            assert means["tokens"][kind] == len(tokens)
            assert means["weights"][name][kind] == pytest.approx(np.mean(tokens, axis=0), abs=0.01)  # bf16 may be used
            assert sum(means["weights"][name][kind]) == pytest.approx(1)


def test_the_weights_of_an_encoder_block_are_the_softmax_of_its_scores() -> None:
    model = tiny_model(learner={"mixer": [{"name": "encoder_block", "heads": 2}]})
    features = featurise(EXAMPLES[:1], model.tokenizer, model.windows)
    with torch.inference_mode():
        hidden = model.encode(Batch.of(pad(features, np.arange(1))), model.head.layers)
        weights = model.head.layer_weights(hidden)
        block: Any = model.head.stages[0]
        query, token = block.query(model.head.task.q[1]), 4
        keys = torch.stack([block.key(layer[0, token]) for layer in hidden.layers])  # [L, W]
        heads = [torch.softmax(keys[:, part] @ query[part] / 16**0.5, 0) for part in (slice(0, 16), slice(16, 32))]
    assert weights is not None
    torch.testing.assert_close(weights[1, :, 0, token], (heads[0] + heads[1]) / 2)


def test_weights_in_a_precision_that_numpy_may_lack(tmp_path: Path) -> None:
    """numpy has no bf16 of its own; the weights are right all the same."""
    run = saved(tmp_path, "scalar_mix")
    before = learned_weights(run)
    path = run / "model" / MODEL_WEIGHTS
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    learned = learned_weights(run)
    assert before is not None
    assert learned is not None
    assert learned["weights"]["start"] == pytest.approx(before["weights"]["start"], rel=1e-2)
