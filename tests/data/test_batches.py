"""Batches: every window once, in a reproducible order, with little padding."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import AWKWARD, FAMILIES, example, tiny_tokenizer
from lamella.config import WindowOptions
from lamella.data.demo import data_path
from lamella.data.examples import Answer, Context, Example
from lamella.data.windows.batches import BucketOrder, Totals, collate
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.padding import Indices, longest_first

TENSORS = ("input_ids", "mask", "token_types", "is_context", "start", "end")


def demo_features(family: str = "bert", **options: Any) -> Features:
    document = json.loads(data_path("demo:dev").read_text(encoding="utf-8"))
    examples = []
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            shared = Context(paragraph["context"])
            for qa in paragraph["qas"]:
                answers = tuple(Answer(answer["text"], answer["answer_start"]) for answer in qa["answers"])
                examples.append(Example(qa["id"], qa["question"], shared, answers))
    return featurise(examples, tiny_tokenizer(family), WindowOptions(max_seq_length=128, doc_stride=32, **options))


@pytest.fixture(scope="module", params=FAMILIES)
def features(request: pytest.FixtureRequest) -> Features:
    return demo_features(request.param)


def squad_like_lengths(count: int = 20_000) -> np.ndarray:
    """Return window lengths with SQuAD's average of about 170 tokens, at most 384."""
    return np.minimum(384, np.random.default_rng(0).lognormal(5.05, 0.42, count)).astype(np.int64)


def padding_share(lengths: np.ndarray, batches: list[np.ndarray]) -> float:
    """Return the share of padding among all positions of all batches."""
    positions = sum(len(batch) * int(lengths[batch].max()) for batch in batches)
    return 1 - sum(int(lengths[batch].sum()) for batch in batches) / positions


def batches_of(order: BucketOrder, epoch: int = 0) -> list[Indices]:
    return [batch for group in order.epoch(epoch) for batch in group.batches]


class TestOrder:
    @settings(max_examples=60, deadline=None)
    @given(
        lengths=st.lists(st.integers(5, 384), max_size=200),
        size=st.integers(1, 40),
        seed=st.integers(0, 2**31),
        epoch=st.integers(0, 50),
    )
    def test_every_window_exactly_once(self, lengths: list[int], size: int, seed: int, epoch: int) -> None:
        order = BucketOrder(np.array(lengths, np.int64), size, seed=seed)
        batches = batches_of(order, epoch)
        assert sorted(window for batch in batches for window in batch) == list(range(len(lengths)))
        assert len(batches) == len(order)
        assert all(0 < len(batch) <= size for batch in batches)
        assert sum(len(batch) < size for batch in batches) <= 1

    def test_every_window_exactly_once_over_many_buckets(self) -> None:
        order = BucketOrder(squad_like_lengths(5003), 16)
        batches = batches_of(order)
        assert sorted(np.concatenate(batches)) == list(range(5003))
        assert len(batches) == len(order) == 313

    def test_the_same_seed_and_epoch_give_the_same_order(self) -> None:
        lengths = squad_like_lengths(1000)

        def order(seed: int, epoch: int) -> list[list[int]]:
            return [batch.tolist() for batch in batches_of(BucketOrder(lengths, 16, seed=seed), epoch)]

        assert order(1, 2) == order(1, 2)
        assert order(1, 2) != order(2, 2)
        assert order(1, 2) != order(1, 3)
        assert order(1, 2) != order(2, 1)

    def test_epochs_have_different_batches_and_not_only_a_different_order(self) -> None:
        order = BucketOrder(squad_like_lengths(1000), 16)
        first, second = ({frozenset(batch.tolist()) for batch in batches_of(order, epoch)} for epoch in (0, 1))
        assert len(first & second) < len(first) / 10

    def test_batches_are_not_ordered_by_length(self) -> None:
        lengths = squad_like_lengths(2000)
        means = [lengths[batch].mean() for batch in batches_of(BucketOrder(lengths, 16))]
        assert abs(np.corrcoef(np.arange(len(means)), means)[0, 1]) < 0.3

    @settings(max_examples=30, deadline=None)
    @given(windows=st.integers(0, 300), size=st.integers(1, 20), skip=st.integers(0, 30))
    def test_skip_drops_the_first_batches(self, windows: int, size: int, skip: int) -> None:
        order = BucketOrder(squad_like_lengths(windows), size, seed=5)
        whole = [batch.tolist() for batch in batches_of(order, 1)]
        assert [batch.tolist() for group in order.epoch(1, skip=skip) for batch in group.batches] == whole[skip:]

    def test_there_is_much_less_padding_than_in_random_batches(self) -> None:
        lengths = squad_like_lengths()
        bucketed = padding_share(lengths, batches_of(BucketOrder(lengths, 16)))
        shuffled = np.random.default_rng(1).permutation(len(lengths))
        at_random = padding_share(lengths, [shuffled[at : at + 16] for at in range(0, len(shuffled), 16)])
        assert at_random > 0.4
        assert bucketed < 0.05

    def test_padding_of_the_demo_set(self, features: Features) -> None:
        lengths = features.lengths
        shuffled = np.random.default_rng(1).permutation(len(lengths))
        at_random = padding_share(lengths, [shuffled[at : at + 8] for at in range(0, len(shuffled), 8)])
        assert padding_share(lengths, batches_of(BucketOrder(lengths, 8))) < at_random / 2


class TestStrata:
    """Strata of the data in one pass: no step mixes them, and every epoch has all windows of each."""

    @settings(max_examples=60, deadline=None)
    @given(
        strata=st.lists(st.integers(-1, 3), max_size=120),
        size=st.integers(1, 9),
        accumulate=st.integers(1, 4),
        epoch=st.integers(0, 9),
    )
    def test_no_step_mixes_strata_and_none_is_lost(
        self, strata: list[int], size: int, accumulate: int, epoch: int
    ) -> None:
        lengths, of_window = squad_like_lengths(len(strata)), np.array(strata, np.int64)
        order = BucketOrder(lengths, size, seed=3, accumulate=accumulate, strata=of_window)
        groups = list(order.epoch(epoch))
        assert len(groups) == len(order)
        for group in groups:
            assert 1 <= len(group.batches) <= accumulate
            assert all((of_window[batch] == group.stratum).all() for batch in group.batches)
            assert all(0 < len(batch) <= size for batch in group.batches)
        seen = sorted(int(window) for group in groups for batch in group.batches for window in batch)
        assert seen == np.flatnonzero(of_window >= 0).tolist()
        for stratum in set(strata) - {-1}:
            assert sum(group.stratum == stratum for group in groups) == order.groups_in(stratum)

    def test_steps_of_different_strata_are_shuffled(self) -> None:
        strata = np.repeat([0, 1], 800)
        order = BucketOrder(squad_like_lengths(1600), 16, strata=strata)
        first_half = [group.stratum for group in order.epoch(0)][:50]
        assert 10 < sum(first_half) < 40

    def test_the_batches_of_the_first_stratum_do_not_depend_on_the_others(self) -> None:
        lengths = squad_like_lengths(300)
        two = BucketOrder(lengths, 8, strata=np.repeat([0, 1], [100, 200]))
        three = BucketOrder(lengths, 8, strata=np.repeat([0, 1, 2], [100, 100, 100]))
        for_two, for_three = (
            {tuple(group.batches[0].tolist()) for group in order.epoch(4) if group.stratum == 0}
            for order in (two, three)
        )
        assert for_two == for_three


def test_totals_count_windows_and_tokens(features: Features) -> None:
    parts = [collate(features, np.arange(7)), collate(features, np.arange(7, 12))]
    whole = Totals.of([collate(features, np.arange(12))])
    assert Totals.of(parts) == whole
    assert whole.windows == 12
    assert whole.answerable == sum(features.start[:12] != features.template.cls)
    assert whole.tokens == features.rows[12]
    assert Totals.of([]) == Totals(0, 0, 0)


class TestLongestFirst:
    @settings(max_examples=60, deadline=None)
    @given(lengths=st.lists(st.integers(5, 384), max_size=100), size=st.integers(1, 20))
    def test_all_windows_come_longest_first(self, lengths: list[int], size: int) -> None:
        batches = list(longest_first(np.array(lengths, np.int64), size))
        order = [window for batch in batches for window in batch]
        assert sorted(order) == list(range(len(lengths)))
        assert [lengths[window] for window in order] == sorted(lengths, reverse=True)
        assert all(len(batch) == size for batch in batches[:-1])


class TestCollate:
    def test_a_batch_has_the_content_of_the_features(self, features: Features) -> None:
        for windows in batches_of(BucketOrder(features.lengths, 7, seed=1)):
            batch = collate(features, windows)
            assert batch.windows.tolist() == windows.tolist()
            for row, window in enumerate(windows):
                length = int(features.lengths[window])
                ids = features.input_ids[features.rows[window] : features.rows[window + 1]]
                begin, end = int(features.context_begin[window]), int(features.context_end[window])
                pads = batch.input_ids.shape[1] - length
                kind = features.template.context_type
                assert batch.input_ids[row].tolist() == [*ids.tolist(), *[features.template.pad_id] * pads]
                assert batch.mask[row].tolist() == [True] * length + [False] * pads
                assert batch.token_types[row].tolist() == [0] * begin + [kind] * (length - begin) + [0] * pads
                assert batch.is_context[row].nonzero().flatten().tolist() == list(range(begin, end))
                assert (int(batch.start[row]), int(batch.end[row])) == (features.start[window], features.end[window])

    def test_pads_with_the_tokenizers_own_token(self) -> None:
        for family in FAMILIES:
            tokenizer = tiny_tokenizer(family)
            features = featurise([example("the tower"), example(AWKWARD)], tokenizer, WindowOptions())
            shorter = collate(features, np.array([0, 1])).input_ids[0]
            assert shorter[-1] == tokenizer.pad_token_id

    def test_pads_to_a_multiple_of_eight_of_the_longest_in_the_batch(self, features: Features) -> None:
        widths = set()
        for windows in longest_first(features.lengths, 5):
            longest = int(features.lengths[windows].max())
            width = collate(features, windows).input_ids.shape[1]
            assert width % 8 == 0
            assert longest <= width < longest + 8
            widths.add(width)
        assert len(widths) > 1

    @pytest.mark.parametrize("length", [16, 65, 127, 130])
    def test_never_pads_beyond_max_seq_length(self, length: int) -> None:
        """An encoder with 130 positions accepts a window of 130 tokens, but not one padded to 136."""
        options = WindowOptions(max_seq_length=length, doc_stride=2, max_query_length=8)
        features = featurise([example("the tower of stone " * 60)], tiny_tokenizer("bert"), options)
        assert features.lengths.max() == length
        batch = collate(features, np.arange(len(features)))
        assert batch.input_ids.shape[1] == length

    def test_types(self, features: Features) -> None:
        batch = collate(features, np.array([3, 1]))
        kinds = {name: getattr(batch, name).dtype for name in TENSORS}
        assert kinds == dict.fromkeys(TENSORS, torch.int64) | {"mask": torch.bool, "is_context": torch.bool}

    def test_to_keeps_everything(self, features: Features) -> None:
        batch = collate(features, np.array([0, 4, 2]))
        same = batch.to(torch.device("cpu"))
        for name in TENSORS:
            assert torch.equal(getattr(same, name), getattr(batch, name))
        elsewhere = batch.to(torch.device("meta"))
        for name in TENSORS:
            assert getattr(elsewhere, name).device.type == "meta"
            assert getattr(elsewhere, name).shape == getattr(batch, name).shape
        assert same.windows.tolist() == elsewhere.windows.tolist() == [0, 4, 2]
