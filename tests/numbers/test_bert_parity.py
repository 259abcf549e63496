"""The last-layer head on real weights is BERT's own question answering model: with the same logits and loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BertForQuestionAnswering

from lamella.data.dataset import load_examples
from lamella.data.windows.batches import Batch, collate
from lamella.data.windows.features import Features, featurise
from lamella.encoder.sources import packaged_encoder
from lamella.heads.losses import CrossEntropy
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.validation import check_config

ENCODER = "all-MiniLM-L6-v2"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(packaged_encoder(ENCODER) is None, reason="the bundled encoder is not installed"),
]


@pytest.fixture(scope="module")
def reader() -> ReaderModel:
    torch.manual_seed(0)
    config = check_config({"windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 32}}, where="")
    model = ReaderModel(load_encoder(ENCODER), config).eval()
    with torch.no_grad():
        model.head.task.b.copy_(torch.tensor([0.3, -0.2]))  # they start at zero, and would not be tested
    return model


@pytest.fixture(scope="module")
def reference(reader: ReaderModel) -> BertForQuestionAnswering:
    model = BertForQuestionAnswering(reader.encoder.model.config).eval()
    model.bert.load_state_dict(reader.encoder.model.state_dict())
    with torch.no_grad():
        model.qa_outputs.weight.copy_(reader.head.task.q)
        model.qa_outputs.bias.copy_(reader.head.task.b)
    return model


@pytest.fixture(scope="module")
def windows(reader: ReaderModel) -> Features:
    return featurise(load_examples(["demo:dev"]).examples, reader.tokenizer, reader.windows)


def inputs(batch: Batch) -> dict[str, torch.Tensor]:
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.mask.long(),
        "token_type_ids": batch.token_types,
    }


def test_the_logits_are_equal_at_every_real_token(
    reader: ReaderModel, reference: BertForQuestionAnswering, windows: Features
) -> None:
    selected = np.argsort(windows.lengths, kind="stable")[:: len(windows) // 8]  # from the shortest to the longest
    batch = collate(windows, selected)
    assert (~batch.mask).any()
    with torch.no_grad():
        logits, expected = reader(batch), reference(**inputs(batch))
    for actual, target in zip(logits, (expected.start_logits, expected.end_logits), strict=True):
        assert target[batch.mask].std() > 0.05  # there is something to compare
        torch.testing.assert_close(actual[batch.mask], target[batch.mask], atol=1e-5, rtol=0)


def test_the_loss_is_equal_without_pads(
    reader: ReaderModel, reference: BertForQuestionAnswering, windows: Features
) -> None:
    selected = np.flatnonzero(windows.lengths == windows.lengths.max())[:8]  # full windows, some without an answer
    batch = collate(windows, selected)
    assert batch.mask.all()
    assert len(selected) > 3
    assert len(set(batch.start.tolist())) > 1
    with torch.no_grad():
        loss = CrossEntropy()(reader.head.task.choices(reader(batch), batch), batch)["loss"]
        expected = reference(**inputs(batch), start_positions=batch.start, end_positions=batch.end).loss
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
