"""The layers that an answer was read from: the weights of its tokens, in one window and in many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doubles import corpus, tiny_model
from lamella.data.examples import Context, Example
from lamella.data.windows.batches import Batch
from lamella.data.windows.features import featurise
from lamella.data.windows.padding import pad
from lamella.documents.collection import Documents
from lamella.errors import UsageError
from lamella.inference.answer_layers import layers_of_answer
from lamella.inference.answer_list import Answer
from lamella.inference.reader import Reader

pytestmark = pytest.mark.usefixtures("one_thread")

QUESTION = "Who kept bees?"


def reader(mixer: Any, **sections: Any) -> Reader:
    return Reader(tiny_model(seed=1, learner={"mixer": mixer, "layers": "all"}, **sections))


def test_the_tokens_of_an_answer_have_the_weights_of_their_window() -> None:
    asked = reader("dot")
    text = corpus()[0][:150]
    answers = asked.ask(QUESTION, text, top_k=3, layers=True)
    features = featurise([Example("0", QUESTION, Context(text))], asked.model.tokenizer, asked.model.windows)
    assert len(features) == 1
    model: Any = asked.model
    with torch.inference_mode():
        hidden = model.encode(Batch.of(pad(features, np.array([0]))), model.head.layers)
        expected = model.head.layer_weights(hidden)[:, :, 0].numpy()  # [O, L, T]
    found = [*answers, *filter(None, [answers.best_guess])]
    found = [answer for answer in found if answer["answer"]]
    assert found
    for answer in found:
        layers = answer["layers"]
        assert layers["layers"] == list(range(model.encoder.depth + 1))  # 0: the embeddings
        assert [layers["tokens"][0]["start"], layers["tokens"][-1]["end"]] == [answer["start"], answer["end"]]
        for token in layers["tokens"]:
            assert token["token"] == text[token["start"] : token["end"]]
            (place,) = np.flatnonzero(features.offsets[0][:, 0] == token["start"])
            place += features.context_begin[0]
            for number, output in enumerate(("start", "end")):
                assert token["weights"][output] == pytest.approx(expected[number, :, place], abs=1e-5)
                assert sum(token["weights"][output]) == pytest.approx(1, abs=1e-4)


def test_an_answer_far_into_a_long_text_is_found_in_its_window() -> None:
    asked = reader("dot", windows={"max_seq_length": 32, "doc_stride": 8, "max_query_length": 12})
    text = " ".join(corpus()[:3])
    answers = asked.ask(QUESTION, text, top_k=8, layers=True)
    spans = [answer for answer in answers if answer["answer"]]
    assert max(answer["start"] for answer in spans) > 300
    for answer in spans:
        tokens = answer["layers"]["tokens"]
        assert text[tokens[0]["start"] : tokens[-1]["end"]] == answer["answer"]


def test_layers_of_an_answer_from_documents_are_those_of_its_passage(tmp_path: Path) -> None:
    """The passage is read without markup, and not with the rest of its document."""
    bees = "The **keeper of the bees** was Huber, who could not see.\n\n"
    (tmp_path / "bees.md").write_text("\n\n".join([*corpus()[:6], bees, *corpus()[6:9]]), encoding="utf-8")
    asked, documents = reader("dot"), Documents(tmp_path)
    found = asked.ask(QUESTION, documents, passages=1, top_k=3, layers=True, threshold=100)
    ((passage,), _) = documents.best(QUESTION, 1)
    answers = [answer for answer in found if answer["answer"]]
    assert answers
    for answer in answers:
        tokens = answer["layers"]["tokens"]
        assert all(documents.texts[0][token["start"] : token["end"]] == token["token"] for token in tokens)
        place = {"start": tokens[0]["start"] - passage.begin, "end": tokens[-1]["end"] - passage.begin}
        alone = layers_of_answer(asked.model, QUESTION, Answer(place, text=documents.words(passage)))
        assert [token["weights"] for token in tokens] == [token["weights"] for token in alone["tokens"]]


def test_learned_weights_are_those_of_every_token() -> None:
    asked = reader({"name": "scalar_mix", "shared": True, "normalise": "softmax"})
    model: Any = asked.model
    learned = torch.softmax(model.head.stages[0].w, dim=-1).flatten().tolist()
    answers = asked.ask(QUESTION, corpus()[0], layers=True)
    answer = answers.best_guess or answers[0]
    for token in answer["layers"]["tokens"]:
        assert token["weights"]["start"] == token["weights"]["end"]
        assert np.array(token["weights"]["start"]) / sum(token["weights"]["start"]) == pytest.approx(learned, abs=1e-4)


def test_without_the_option_answers_have_no_layers() -> None:
    assert "layers" not in reader("dot").ask(QUESTION, corpus()[0])[0]


def test_a_head_or_model_without_layer_weights_is_refused() -> None:
    with pytest.raises(UsageError, match="layers: expected a head that weighs the layers, such as scalar_mix or dot"):
        reader("conv_1xn").ask(QUESTION, corpus()[0], layers=True)
    with pytest.raises(UsageError, match="load it with backend='torch'"):
        Reader.load("default", backend="onnx").ask("Who discovered Titan?", "Huygens discovered Titan.", layers=True)
