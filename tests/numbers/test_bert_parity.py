"""The last-layer head on real weights is BERT's own question answering model: same logits, same loss."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from transformers import BertForQuestionAnswering

from lamella.data.dataset import load_examples
from lamella.data.windows.batches import Batch, collate
from lamella.data.windows.features import Features, featurise
from lamella.encoder.sources import PACKAGED
from lamella.heads.losses import CrossEntropy
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.validation import check_config

ENCODER = "all-MiniLM-L6-v2"

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        importlib.util.find_spec(PACKAGED[ENCODER].module) is None, reason="the bundled encoder is not installed"
    ),
]


@pytest.fixture(scope="module")
def ours() -> ReaderModel:
    torch.manual_seed(0)
    config = check_config({"windows": {"max_seq_length": 128, "doc_stride": 32, "max_query_length": 32}}, where="")
    model = ReaderModel(load_encoder(ENCODER), config).eval()
    with torch.no_grad():
        model.head.task.b.copy_(torch.tensor([0.3, -0.2]))  # they start as zeros, and would not be compared
    return model


@pytest.fixture(scope="module")
def theirs(ours: ReaderModel) -> BertForQuestionAnswering:
    model = BertForQuestionAnswering(ours.encoder.model.config).eval()
    model.bert.load_state_dict(ours.encoder.model.state_dict())
    with torch.no_grad():
        model.qa_outputs.weight.copy_(ours.head.task.q)
        model.qa_outputs.bias.copy_(ours.head.task.b)
    return model


@pytest.fixture(scope="module")
def windows(ours: ReaderModel) -> Features:
    return featurise(load_examples(["demo:dev"]).examples, ours.tokenizer, ours.windows)


def inputs(batch: Batch) -> dict[str, torch.Tensor]:
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.mask.long(),
        "token_type_ids": batch.token_types,
    }


def test_the_logits_are_equal_at_every_real_token(
    ours: ReaderModel, theirs: BertForQuestionAnswering, windows: Features
) -> None:
    chosen = np.argsort(windows.lengths, kind="stable")[:: len(windows) // 8]  # from the shortest to the longest
    batch = collate(windows, chosen)
    assert (~batch.mask).any()
    with torch.no_grad():
        logits, expected = ours(batch), theirs(**inputs(batch))
    for found, wanted in zip(logits, (expected.start_logits, expected.end_logits), strict=True):
        assert wanted[batch.mask].std() > 0.05  # there is something to compare
        torch.testing.assert_close(found[batch.mask], wanted[batch.mask], atol=1e-5, rtol=0)


def test_the_loss_is_equal_where_nothing_is_padded(
    ours: ReaderModel, theirs: BertForQuestionAnswering, windows: Features
) -> None:
    chosen = np.flatnonzero(windows.lengths == windows.lengths.max())[:8]  # full windows, some without an answer
    batch = collate(windows, chosen)
    assert batch.mask.all()
    assert len(chosen) > 3
    assert len(set(batch.start.tolist())) > 1
    with torch.no_grad():
        found = CrossEntropy()(ours.head.task.choices(ours(batch), batch), batch)["loss"]
        wanted = theirs(**inputs(batch), start_positions=batch.start, end_positions=batch.end).loss
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
