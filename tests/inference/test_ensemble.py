"""Ensembles: the arithmetic by hand, the same answers from stored logits, a single pass of a shared encoder."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from doubles import example, save_tiny_encoder, tiny_run_config, tiny_tokenizer
from lamella import runs
from lamella.data.examples import Example
from lamella.data.file_formats.formats import read
from lamella.data.windows.features import featurise, featurise_in_slices
from lamella.data.windows.padding import Padded, longest_first, pad
from lamella.decoding_options import DecodingOptions
from lamella.encoder.encoder import Encoder
from lamella.errors import DataError, LamellaError, ModelError, RunError, UnreadableError, UsageError
from lamella.files import read_json, write_json
from lamella.inference.combine import combine_logits, combine_spans
from lamella.inference.decode import decode, mask_logits
from lamella.inference.ensemble import Ensemble, EnsembleAnswers
from lamella.inference.members import Member, _open, open_members
from lamella.inference.predict import predict
from lamella.inference.prediction import Prediction, rank
from lamella.inference.prediction_files import write_predictions
from lamella.inference.stored_logits import LogitsWriter, StoredLogits, same_windows
from lamella.models.base_encoder import load_encoder
from lamella.models.model import ReaderModel
from lamella.scoring.calibrate import fingerprint
from lamella.scoring.ensemble_gain import write_ensemble
from lamella.scoring.metrics import score

pytestmark = pytest.mark.usefixtures("one_thread", "read_once")
HOWS = ("max", "mean", "product")


# --- models and runs to combine


@pytest.fixture(scope="module", autouse=True)
def all_on_the_cpu() -> Iterator[None]:
    """Answers are compared to the last digit, and a GPU sums in no fixed order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamella.encoder.device.choose_device", lambda: torch.device("cpu"))
        yield


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("base") / "bert")


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_encoder(tmp_path_factory.mktemp("base") / "roberta", "roberta")


@pytest.fixture(scope="module")
def questions() -> list[Example]:
    """The last question has four windows; in the tests of slices its context spans two slices."""
    examples = list(read("demo:dev").examples[:9])
    long = " ".join(dict.fromkeys(example.context.text for example in read("demo:dev").examples))[:1500]
    return [*examples, example(long, "Saturn", question="Which planet has rings?", id="long")]


def save_reader(folder: Path, base: Path, *, seed: int, scale: float = 20.0, **sections: Any) -> Path:
    """A random head, with logits large enough for clear decisions."""
    torch.manual_seed(seed)
    config = tiny_run_config(**{"encoder": {"tuning": "frozen"}, **sections})
    model = ReaderModel(load_encoder(str(base)), config).eval()
    with torch.no_grad():
        model.head.task.q.mul_(scale)
    model.save(folder)
    return folder


@pytest.fixture(scope="module")
def readers(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three heads on one encoder."""
    folder = tmp_path_factory.mktemp("readers")
    mixers = ["last", "scalar_mix", "average"]
    return [
        save_reader(folder / f"r{seed}", bert, seed=seed, learner={"mixer": mixer}) for seed, mixer in enumerate(mixers)
    ]


def predict_run(folder: Path, model: Path, questions: Sequence[Example], *, keep: bool = False) -> Path:
    """A run folder as `lamella predict` writes it."""
    reader = ReaderModel.load(model)
    writer = LogitsWriter(reader) if keep else None
    with runs.new_run(folder, "predict"):
        write_predictions(folder, reader, predict(reader, questions, batch_size=4, sink=writer))
        if writer is not None:
            writer.write(folder)
    return folder


@pytest.fixture(scope="module")
def kept(readers: list[Path], questions: list[Example], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of the readers, with logits."""
    folder = tmp_path_factory.mktemp("kept")
    return [predict_run(folder / f"p{at}", reader, questions, keep=True) for at, reader in enumerate(readers)]


def combine(names: Sequence[Path], examples: Sequence[Example] | None = None, **options: Any) -> EnsembleAnswers:
    members = open_members([str(name) for name in names], run=examples is not None, precision="fp32")
    return Ensemble(members, examples, **options).answer(batch_size=4)


def combine_with_itself(name: Path, examples: Sequence[Example] | None = None, **options: Any) -> EnsembleAnswers:
    """Combine a member with itself, which `open_members` refuses."""
    member = _open(str(name), "first", run=examples is not None, precision="fp32")
    return Ensemble([member, replace(member, name="second")], examples, **options).answer(batch_size=4)


def texts(answered: EnsembleAnswers) -> dict[str, str]:
    return {id: prediction.text(0.0) for id, prediction in answered.predictions.items()}


def close(ours: Prediction, theirs: Prediction, tolerance: float = 1e-5) -> bool:
    """Whether two predictions have the same candidates in the same order, with close numbers."""
    places = [
        [(candidate.text, candidate.begin_char, candidate.end_char) for candidate in both.candidates]
        for both in (ours, theirs)
    ]
    numbers = [[candidate.probability for candidate in both.candidates] for both in (ours, theirs)]
    return (
        places[0] == places[1]
        and np.allclose(*numbers, atol=tolerance)
        and math.isclose(ours.null_odds, theirs.null_odds, abs_tol=100 * tolerance)
    )


# --- combining tokens


@pytest.fixture(scope="module")
def padded(questions: list[Example]) -> Padded:
    features = featurise(questions, tiny_tokenizer("bert"), tiny_run_config().windows)
    return pad(features, np.arange(len(features)))


def random_logits(padded: Padded, count: int, seed: int = 0, scale: float = 4.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal((2, *padded.mask.shape))).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("how", HOWS)
def test_tokens_are_combined_by_the_formula(padded: Padded, how: Any) -> None:
    """For max it is BERTVision's: a softmax per member, the maximum at every token, no renormalisation."""
    members = random_logits(padded, 3)
    found = np.exp(combine_logits(members, padded, how, scaled=False))
    for output in range(2):
        for row in range(len(padded.mask)):
            allowed = [t for t in range(padded.mask.shape[1]) if t == padded.cls or padded.is_context[row, t]]
            shares = []
            for member in members:
                weights = np.exp(member[output, row, allowed].astype(float))
                shares.append(weights / weights.sum())
            expected = {"max": np.max(shares, 0), "mean": np.mean(shares, 0), "product": np.prod(shares, 0) ** (1 / 3)}
            np.testing.assert_allclose(found[output, row, allowed], expected[how], rtol=1e-9)
            forbidden = sorted(set(range(padded.mask.shape[1])) - set(allowed))
            assert not found[output, row, forbidden].any()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("method", ["joint", "independent"])
def test_a_model_combined_with_itself_decodes_as_itself(padded: Padded, how: Any, method: Any) -> None:
    (logits,) = random_logits(padded, 1)
    options = DecodingOptions(method=method)
    combined = combine_logits([logits, logits], padded, how, scaled=method == "joint")
    ours, alone = decode(combined, padded, options, normalised=False), decode(logits, padded, options)
    np.testing.assert_array_equal(ours.start, alone.start)
    np.testing.assert_array_equal(ours.end, alone.end)
    np.testing.assert_allclose(ours.score, alone.score, atol=1e-9)
    np.testing.assert_allclose(ours.null, alone.null, atol=1e-9)


def test_independent_decoding_of_a_maximum_is_bertvision_s(padded: Padded) -> None:
    """Its window score is max_t s_t times max_t e_t of vectors that no longer sum to 1."""
    members = random_logits(padded, 2)
    combined = combine_logits(members, padded, "max", scaled=False)
    found = decode(combined, padded, DecodingOptions(method="independent"), normalised=False)
    best = np.exp(combined).max(2).prod(0)
    leading = np.where(found.score[:, 0] > found.null, found.score[:, 0], found.null)
    np.testing.assert_allclose(np.exp(leading), best)
    renormalised = decode(combined, padded, DecodingOptions(method="independent"))
    assert not np.allclose(renormalised.null, found.null)


@given(seed=st.integers(0, 10_000), count=st.integers(2, 4), how=st.sampled_from(HOWS))
@settings(max_examples=30)
def test_neither_member_order_nor_logit_shifts_matter(padded: Padded, seed: int, count: int, how: Any) -> None:
    members = random_logits(padded, count, seed)
    shifted = [member + np.float32(number) for number, member in enumerate(members)]
    plain = combine_logits(members, padded, how, scaled=False)
    np.testing.assert_allclose(combine_logits(members[::-1], padded, how, scaled=False), plain, atol=1e-9)
    np.testing.assert_allclose(combine_logits(shifted, padded, how, scaled=False), plain, atol=1e-4)
    product, mean, largest = (combine_logits(members, padded, how) for how in ("product", "mean", "max"))
    allowed = np.isfinite(largest)
    assert (product[allowed] <= mean[allowed] + 1e-9).all()
    assert (mean[allowed] <= largest[allowed] + 1e-9).all()


def test_a_token_that_a_member_rules_out(padded: Padded) -> None:
    first, second = random_logits(padded, 2)
    row, token = 0, int(np.flatnonzero(padded.is_context[0])[3])
    first[:, row, token] = -np.inf
    for how in HOWS:
        combined = combine_logits([first, second], padded, how)  # type: ignore[arg-type]
        assert np.isfinite(combined[:, row, token]).all() == (how != "product")
        decode(combined, padded, DecodingOptions(), normalised=False)
    first[0, row, padded.cls] = np.nan
    with pytest.raises(ModelError, match="expected finite numbers"):
        combine_logits([first, second], padded, "mean")


# --- combining spans


def listed(null: float, **answers: tuple[int, float]) -> Prediction:
    """An n-best list by probability: `Rome=(3, 0.6)` begins at 3."""
    spans = [(text, begin, begin + len(text), math.log(p), 0) for text, (begin, p) in answers.items()]
    return rank(sorted(spans, key=lambda span: -span[3]), math.log(null))


ONE = listed(0.3, Rome=(3, 0.6), inRome=(0, 0.1))
TWO = listed(0.8, Rome=(3, 0.2))


@pytest.mark.parametrize(
    ("how", "null", "rome", "in_rome"),
    [
        ("max", 0.8, 0.6, 0.2),
        ("mean", 0.55, 0.4, 0.15),
        ("product", math.sqrt(0.24), math.sqrt(0.12), math.sqrt(0.02)),
    ],
)
def test_spans_are_combined_as_by_hand(how: Any, null: float, rome: float, in_rome: float) -> None:
    """The second member lacks inRome, which gets its lowest probability, 0.2."""
    found = combine_spans([ONE, TWO], how)
    assert [candidate.text for candidate in found.candidates] == ["", "Rome", "inRome"]
    assert [math.exp(candidate.score) for candidate in found.candidates] == pytest.approx([null, rome, in_rome])
    total = null + rome + in_rome
    assert [candidate.probability for candidate in found.candidates] == pytest.approx(
        [null / total, rome / total, in_rome / total]
    )
    assert found.null_odds == pytest.approx(math.log(null / rome))


@pytest.mark.parametrize("how", [*HOWS, "vote"])
def test_a_list_combined_with_itself_is_itself(how: Any) -> None:
    for member in (ONE, TWO):
        found = combine_spans([member, member], how, texts=[member.text(0.0)] * 2)
        assert [candidate.text for candidate in found.candidates] == [candidate.text for candidate in member.candidates]
        if how != "vote":
            assert close(found, member, 1e-9)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([listed(0.1, A=(0, 0.9)), listed(0.1, A=(0, 0.9)), listed(0.99, B=(2, 0.01))], "A"),  # two of three
        ([listed(0.1, A=(0, 0.9)), listed(0.95, B=(2, 0.05)), listed(0.6, A=(0, 0.4))], ""),
        ([listed(0.1, A=(0, 0.9)), listed(0.1, B=(2, 0.5), A=(0, 0.4))], "A"),  # a tie: 0.65 against 0.3
        ([listed(0.9, A=(0, 0.1)), listed(0.45, A=(0, 0.55))], ""),  # a tie with "no answer": 0.675 against 0.325
        ([listed(0.1, A=(0, 0.9)), listed(0.1, A=(5, 0.9)), listed(0.1, B=(2, 0.9))], "A"),  # a text at two places
    ],
)
def test_a_vote_counts_texts_and_breaks_ties_by_the_mean(members: list[Prediction], expected: str) -> None:
    found = combine_spans(members, "vote", texts=[member.text(0.0) for member in members])
    assert found.text(0.0) == expected
    assert len({candidate.text for candidate in found.candidates}) == len(found.candidates)


def test_a_vote_uses_the_members_own_thresholds() -> None:
    lists = [listed(0.6, A=(0, 0.4)), listed(0.6, A=(0, 0.4)), listed(0.9, A=(0, 0.1))]
    assert combine_spans(lists, "vote", texts=["", "", ""]).text(0.0) == ""
    assert combine_spans(lists, "vote", texts=["A", "A", ""]).text(0.0) == "A"


def test_a_member_without_spans_does_not_favour_those_of_others() -> None:
    silent = rank([], 3.0)
    sure = listed(0.05, A=(0, 0.9), B=(2, 0.05))
    for how in (*HOWS, "vote"):
        found = combine_spans([sure, silent], how, texts=["A", ""])  # type: ignore[arg-type]
        assert [candidate.text for candidate in found.candidates if candidate.text] == ["A", "B"]
        assert all(math.isfinite(candidate.score) for candidate in found.candidates)
    assert math.exp(combine_spans([sure, silent], "mean").best_span.score) == pytest.approx(0.45)
    assert combine_spans([silent, silent], "mean").text(0.0) == ""


def test_a_probability_that_underflowed_still_counts() -> None:
    far = rank([("A", 0, 1, 900.0, 0), ("B", 2, 3, 10.0, 0)], 0.0)
    assert far.candidates[-1].probability == 0.0
    assert all(math.isfinite(candidate.score) for candidate in combine_spans([far, far], "product").candidates)


def test_members_must_read_the_same_text() -> None:
    with pytest.raises(DataError, match="question q7: expected the same context for all members, got 'Rome'"):
        combine_spans([ONE, listed(0.5, Oslo=(3, 0.5))], "mean", question="q7")


def test_the_list_stays_as_long_as_asked() -> None:
    lists = [listed(0.1, A=(0, 0.5), B=(1, 0.2)), listed(0.1, C=(2, 0.6), D=(3, 0.1))]
    assert [candidate.text for candidate in combine_spans(lists, "max", n_best=2).candidates] == ["C", "A", ""]


# --- stored logits


def test_stored_logits_come_back_with_their_windows(
    readers: list[Path], kept: list[Path], questions: list[Example]
) -> None:
    stored = StoredLogits(kept[0])
    model = ReaderModel.load(readers[0])
    features = featurise(questions, model.tokenizer, model.windows)
    assert same_windows(stored.features, features)
    np.testing.assert_array_equal(stored.features.max_context, features.max_context)
    assert stored.features.template == features.template
    assert stored.decoding == model.decoding
    for indices in longest_first(features.lengths, 4):
        padded = pad(stored.features, indices)
        exact, found = model.logits(padded), stored.logits(padded)
        below = mask_logits(exact, padded).max(axis=2, keepdims=True) - exact
        assert (np.abs(found - exact) <= 2**-11 * np.abs(below) + 1e-5)[:, padded.mask].all()
        assert not found[:, ~padded.mask].any()
    tokens = len(features.input_ids)
    size = (kept[0] / runs.LOGITS).stat().st_size
    assert 4 * tokens < size < 12 * tokens + 50_000  # real tokens only


def test_slices_are_stored_like_windows_made_in_one_go(questions: list[Example], tmp_path: Path) -> None:
    tokenizer, windows = tiny_tokenizer("bert"), tiny_run_config().windows

    class Model:
        gives_text, decoding = True, DecodingOptions()

    writer = LogitsWriter(Model())
    written = []
    for features in featurise_in_slices(questions, tokenizer, windows, size=3):
        for indices in longest_first(features.lengths, 2):
            padded = pad(features, indices)
            logits = padded.input_ids + np.array([0, 0.5])[:, None, None]
            writer.add(features, padded, logits)
        written.append(features)
    assert sum(len(features.examples) for features in written) > len(questions)  # one question spans two slices
    writer.write(tmp_path)
    kept, whole = StoredLogits(tmp_path), featurise(questions, tokenizer, windows)
    assert same_windows(kept.features, whole)
    padded = pad(whole, np.arange(len(whole)))
    np.testing.assert_array_equal(kept.logits(padded)[0][padded.mask], padded.input_ids[padded.mask])
    np.testing.assert_array_equal(kept.logits(padded)[1][padded.mask], padded.input_ids[padded.mask] + 0.5)


def test_logits_beyond_fp16_are_clipped(padded: Padded, questions: list[Example], tmp_path: Path) -> None:
    class Model:
        gives_text, decoding = True, DecodingOptions()

    features = featurise(questions, tiny_tokenizer("bert"), tiny_run_config().windows)
    writer = LogitsWriter(Model())
    logits = np.zeros((2, *padded.mask.shape), np.float32)
    logits[0, :, padded.cls], logits[1, :, 1] = 1e6, -np.inf
    writer.add(features, padded, logits)
    writer.write(tmp_path)
    found = StoredLogits(tmp_path).logits(padded)
    assert (found[0, :, padded.cls] == 1e6).all()
    assert (found[0, :, 1] == 1e6 - 65504).all()
    assert (found[1, :, 1] == -65504).all()


def test_windows_differ_by_tokens_questions_and_options(questions: list[Example]) -> None:
    bert, windows = tiny_tokenizer("bert"), tiny_run_config().windows
    ours = featurise(questions, bert, windows)
    assert same_windows(ours, featurise(questions, bert, windows))
    assert not same_windows(ours, featurise(questions, tiny_tokenizer("roberta"), windows))
    assert not same_windows(ours, featurise(questions[::-1], bert, windows))
    assert not same_windows(ours, featurise(questions[:-1], bert, windows))
    assert not same_windows(ours, featurise(questions, bert, windows.model_copy(update={"doc_stride": 16})))


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / runs.LOGITS).write_bytes((folder / runs.LOGITS).read_bytes()[:-7]),
        lambda folder: (folder / runs.LOGITS).write_bytes(b"nothing"),
        lambda folder: (folder / runs.LOGITS_INDEX).write_text('{"format": 1}'),
        lambda folder: (folder / runs.LOGITS_INDEX).write_text("[]"),
        lambda folder: shutil.copy(folder.parent / "other" / runs.LOGITS, folder),
        lambda folder: rewrite_index(folder, sha256="0" * 64),
        lambda folder: rewrite_index(folder, without="sha256", questions=[]),
        lambda folder: rewrite_arrays(folder, example=lambda array: array + 1000),
        lambda folder: rewrite_arrays(folder, example=lambda array: array - 1),
        lambda folder: rewrite_arrays(folder, first_token=lambda array: array + 1000),
        lambda folder: rewrite_arrays(folder, context_end=lambda array: array + 1000),
        lambda folder: rewrite_arrays(folder, context_begin=lambda array: array[:-1]),
        lambda folder: rewrite_arrays(folder, rows=lambda array: array + 1),
        lambda folder: rewrite_arrays(folder, max_context=lambda array: array[:-1]),
    ],
)
def test_damaged_logits_are_reported(kept: list[Path], tmp_path: Path, harm: Callable[[Path], Any]) -> None:
    """This includes logits of another model on the same windows."""
    shutil.copytree(kept[1], tmp_path / "other")
    harm(Path(shutil.copytree(kept[0], tmp_path / "p")))
    with pytest.raises(UnreadableError) as caught:
        StoredLogits(tmp_path / "p")
    assert str(caught.value) == (
        f"{tmp_path / 'p'}: its stored logits are damaged, or logits.safetensors and logits.json belong to different "
        "runs; predict again with --keep-logits."
    )


def rewrite_index(folder: Path, without: str = "", **entries: Any) -> None:
    index = json.loads((folder / runs.LOGITS_INDEX).read_text())
    index.pop(without, None)
    (folder / runs.LOGITS_INDEX).write_text(json.dumps({**index, **entries}))


def rewrite_arrays(folder: Path, **changes: Callable[[Any], Any]) -> None:
    """Rewrite arrays in a run folder from before files were hashed."""
    arrays = load_file(folder / runs.LOGITS)
    changed = {name: change(arrays[name]) for name, change in changes.items()}
    save_file({**arrays, **changed}, folder / runs.LOGITS)
    rewrite_index(folder, without="sha256")


def test_logits_without_a_hash_still_open(kept: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kept[0], tmp_path / "p"))
    rewrite_index(folder, without="sha256")
    assert same_windows(StoredLogits(folder).features, StoredLogits(kept[0]).features)


def test_logits_of_another_version_or_missing(kept: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kept[0], tmp_path / "p"))
    (folder / runs.LOGITS).unlink()
    with pytest.raises(UnreadableError, match=r"logits\.safetensors: no such file"):
        StoredLogits(folder)
    (folder / runs.LOGITS_INDEX).write_text('{"format": 2}')
    with pytest.raises(
        UnreadableError, match=r"logits\.json: expected format 1, got 2, written by another version of lamella;"
    ):
        StoredLogits(folder)


# --- members of all kinds


@pytest.mark.parametrize("how", HOWS)
def test_stored_logits_give_the_same_answers_as_the_models(
    readers: list[Path], kept: list[Path], questions: list[Example], how: Any
) -> None:
    live, stored, mixed = (
        combine(names, data, how=how, level="token")
        for names, data in ((readers, questions), (kept, None), ([readers[0], *kept[1:]], questions))
    )
    assert live.level == stored.level == mixed.level == "token"
    assert texts(live) == texts(stored) == texts(mixed)
    for id, prediction in live.predictions.items():
        assert math.isclose(prediction.null_odds, stored.predictions[id].null_odds, abs_tol=0.1)
        assert prediction.best_span.text == stored.predictions[id].best_span.text
    members = [together.members for together in (live, stored, mixed)]
    assert [list(member) for member in members] == [["r0", "r1", "r2"], ["p0", "p1", "p2"], ["r0", "p1", "p2"]]
    for names in zip(*members, strict=True):
        assert len({json.dumps(member[name].texts) for member, name in zip(members, names, strict=True)}) == 1


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("level", ["token", "span"])
def test_a_reader_with_itself_is_itself(readers: list[Path], questions: list[Example], how: Any, level: Any) -> None:
    alone = predict(ReaderModel.load(readers[1]), questions, batch_size=4)
    found = combine_with_itself(readers[1], questions, how=how, level=level)
    assert list(found.members) == ["first", "second"]
    assert found.level == level
    for id, prediction in alone.items():
        assert close(found.predictions[id], prediction), id
        assert all(close(member.predictions[id], prediction, 1e-9) for member in found.members.values())


def test_readers_together_differ_from_each(readers: list[Path], questions: list[Example]) -> None:
    """Otherwise the tests above would show nothing."""
    found = combine(readers, questions, how="mean")
    answers = [texts(found), *(member.texts for member in found.members.values())]
    assert len({json.dumps(answer) for answer in answers}) == 4
    assert len({prediction.text(0.0) for prediction in found.predictions.values()}) >= 3


@pytest.mark.parametrize("level", ["token", "span"])
def test_heads_on_one_encoder_share_its_pass(
    readers: list[Path], questions: list[Example], monkeypatch: pytest.MonkeyPatch, level: Any
) -> None:
    """The answers equal those of each head alone, bit for bit, for the cost of one pass."""
    calls: list[int] = []
    forward = Encoder.forward
    monkeypatch.setattr(
        Encoder, "forward", lambda self, batch, layers: calls.append(id(self)) or forward(self, batch, layers)
    )
    found = combine(readers, questions, level=level)
    model = ReaderModel.load(readers[0])
    batches = math.ceil(len(featurise(questions, model.tokenizer, model.windows)) / 4)
    assert len(calls) == batches > 2
    for folder, answered in zip(readers, found.members.values(), strict=True):
        assert answered.predictions == predict(ReaderModel.load(folder), questions, batch_size=4)


def test_tuned_encoders_are_not_shared(
    bert: Path, readers: list[Path], questions: list[Example], tmp_path: Path
) -> None:
    for name, tuning in (("full", "full"), ("lora", "lora")):
        save_reader(tmp_path / name, bert, seed=5, encoder={"tuning": tuning})
    tuned = ReaderModel.load(tmp_path / "full")
    with torch.no_grad():
        for value in tuned.encoder.parameters():
            value.mul_(1.3)
    tuned.save(tmp_path / "full")
    folders = [readers[0], tmp_path / "full", tmp_path / "lora", readers[1]]
    members = open_members([str(folder) for folder in folders], run=True, precision="fp32")
    models: list[Any] = [member.model for member in members]
    assert models[0].encoder is models[3].encoder
    assert len({id(model.encoder) for model in models}) == 3
    found = Ensemble(members, questions).answer(batch_size=4)
    for folder, answered in zip(folders, found.members.values(), strict=True):
        assert answered.predictions == predict(ReaderModel.load(folder), questions, batch_size=4)


def test_bertvision_ensembles_are_reproduced(bert: Path, questions: list[Example], tmp_path: Path) -> None:
    """A softmax per member, the maximum, the best start and the best end; the surest window of a question wins."""
    alone = {"decoding": {"method": "independent"}}
    folders = [save_reader(tmp_path / f"i{seed}", bert, seed=seed, scale=6.0, **alone) for seed in (0, 1)]
    found = combine(folders, questions, how="max", level="token")
    models = [ReaderModel.load(folder) for folder in folders]
    features = featurise(questions, models[0].tokenizer, models[0].windows)
    best: dict[str, tuple[float, str]] = {}
    for window in range(len(features)):
        padded = pad(features, np.array([window]))
        allowed = np.flatnonzero(padded.is_context[0] | (np.arange(padded.mask.shape[1]) == padded.cls))
        weights = [np.exp(model.logits(padded)[:, 0, allowed].astype(float)) for model in models]
        largest = np.max([weight / weight.sum(1, keepdims=True) for weight in weights], axis=0)  # [2, allowed]
        start, end = allowed[largest.argmax(1)]
        text = ""
        if padded.cls not in (start, end) and start <= end:
            begin, stop = features.characters(window, start, end)
            text = questions[features.example[window]].context.text[begin:stop]
        id = questions[features.example[window]].id
        best[id] = max(best.get(id, (0.0, "")), (float(largest.max(1).prod()), text))
    assert len(features) > len(questions)
    assert {id: text for id, (_, text) in best.items()} == texts(found)
    for id, (share, text) in best.items():
        chosen = found.predictions[id].chosen(0.0)
        assert (chosen.text, math.exp(chosen.score)) == (text, pytest.approx(share, rel=1e-5))


def test_different_tokenizers_combine_at_the_span_level(
    readers: list[Path], roberta: Path, questions: list[Example], tmp_path: Path
) -> None:
    other = save_reader(tmp_path / "other", roberta, seed=4)
    members = open_members([str(readers[0]), str(other)], run=True, precision="fp32")
    ensemble = Ensemble(members, questions)
    assert ensemble.level == "span"
    assert ensemble.why_not_by_token == "r0 and other split the texts into different tokens or windows"
    found = ensemble.answer(batch_size=4)
    contexts = {example.id: example.context.text for example in questions}
    for id, prediction in found.predictions.items():
        lists = [member.predictions[id] for member in found.members.values()]
        assert close(prediction, combine_spans(lists, "mean"), 1e-12)
        assert all(
            contexts[id][candidate.begin_char : candidate.end_char] == candidate.text
            for candidate in prediction.candidates
        )
    with pytest.raises(
        UsageError, match="--level token: r0 and other split the texts into different tokens or windows"
    ):
        Ensemble(members, questions, level="token")


def test_equal_tokens_suffice_for_differently_written_tokenizers(
    readers: list[Path], questions: list[Example], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(readers[1], tmp_path / "copy"))
    tokenizer = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["truncation"] = {"direction": "Right", "max_length": 20, "strategy": "LongestFirst", "stride": 0}
    tokenizer["model"]["max_input_chars_per_word"] = 99
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert combine([readers[0], copy], questions).level == "token"


def test_the_threshold_is_the_ensemble_s_own(bert: Path, questions: list[Example], tmp_path: Path) -> None:
    eager = {"decoding": {"null_score_diff_threshold": 1e6}}
    folders = [save_reader(tmp_path / f"e{seed}", bert, seed=seed, **eager) for seed in (0, 1)]
    found = combine(folders, questions)
    assert found.decoding.null_score_diff_threshold == 0.0
    assert all(all(member.texts.values()) for member in found.members.values())  # a member keeps its own threshold
    assert found.predictions == combine(folders, questions, threshold=2.0).predictions


def test_a_member_s_calibration_does_not_apply_to_the_ensemble(
    bert: Path, questions: list[Example], tmp_path: Path
) -> None:
    """Nor was the ensemble's threshold tuned on any data."""
    tuned_on = {"data": "dev.json", "questions": len(questions), "sha256": fingerprint(questions)}
    calibrated = {"calibration": {"method": "temperature", "temperature": 100.0, "bias": 3.0}, "tuned_on": tuned_on}
    folders = [save_reader(tmp_path / f"c{seed}", bert, seed=seed, decoding=calibrated) for seed in (0, 1)]
    results = write_ensemble(tmp_path / "run", combine(folders, questions), questions)
    assert "threshold_tuned_on_these" not in results
    odds, na_prob = (read_json(tmp_path / "run" / name) for name in (runs.NULL_ODDS, runs.NA_PROB))
    assert na_prob == pytest.approx({id: 1 / (1 + math.exp(-value)) for id, value in odds.items()})


@pytest.mark.parametrize("threshold", [math.nan, math.inf])
def test_a_threshold_must_be_finite(readers: list[Path], questions: list[Example], threshold: float) -> None:
    message = refused(lambda: combine(readers, questions, threshold=threshold), UsageError)
    assert message == f"--threshold: expected a finite number, got {threshold}."


# --- errors


def refused(call: Callable[[], Any], kind: type[LamellaError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_members_that_cannot_be_combined(
    bert: Path, readers: list[Path], kept: list[Path], questions: list[Example], tmp_path: Path
) -> None:
    single = predict_run(tmp_path / "one", readers[0], questions)
    fewer = predict_run(tmp_path / "fewer", readers[1], questions[1:])
    opened = lambda *names, run=False: open_members([str(name) for name in names], run=run)  # noqa: E731
    assert refused(lambda: opened(single), UsageError).endswith("expected at least two runs or models, got 1.")
    assert "pass the questions with --data" in refused(lambda: opened(single, readers[0]), UsageError)
    assert "neither a model folder nor a run folder" in refused(
        lambda: opened(single, tmp_path / "absent", run=True), UsageError
    )
    message = refused(lambda: combine([single, fewer]), DataError)
    assert message.startswith(
        f"fewer: expected answers to the same 10 questions as the other members, 1 missing (first {questions[0].id})"
    )
    assert "as the other members, got 10" in refused(lambda: combine([fewer, single]), DataError)
    assert refused(lambda: combine_with_itself(single, level="token"), UsageError) == (
        "--level token: first has no logits; predict again with --keep-logits, or name its model and --data."
    )
    full = kept[1]
    assert combine_with_itself(full, questions[:3]).level == "span"
    assert "stored the logits of more questions" in refused(
        lambda: combine_with_itself(full, questions[:3], level="token"), UsageError
    )
    assert "a vote counts texts" in refused(lambda: combine_with_itself(full, how="vote", level="token"), UsageError)
    answerable = save_reader(tmp_path / "a", bert, seed=0, learner={"task": "answerability"})
    assert "only decides whether" in refused(lambda: opened(single, answerable, run=True), UsageError)
    assert "only decides whether" in refused(lambda: LogitsWriter(ReaderModel.load(answerable)), UsageError)
    write_json(single / runs.RUN, {"state": "failed"})
    assert "expected a finished run, got one that is failed" in refused(lambda: opened(single, full), RunError)
    (fewer / runs.NBEST).write_text('{"q": [{"text": "a"}]}')
    assert "expected text, probability, score, start and end" in refused(lambda: opened(fewer, full), UnreadableError)


def test_the_same_member_twice_is_refused(readers: list[Path], kept: list[Path], tmp_path: Path) -> None:
    spelled = readers[0].parent / "." / "x" / ".." / "r0"
    linked = tmp_path / "linked"
    linked.symlink_to(readers[0])
    for again in (readers[0], f"{readers[0]}/", spelled, linked):
        message = refused(lambda again=again: open_members([str(readers[0]), str(again)], run=True), UsageError)
        assert message == f"ensemble: {readers[0]} and {again} are the same reader; name each member once."
    assert "are the same reader" in refused(lambda: open_members([str(kept[1]), f"{kept[1]}/"], run=False), UsageError)
    copied = shutil.copytree(readers[0], tmp_path / "copied")
    message = refused(lambda: open_members([str(readers[0]), str(readers[1]), str(copied)], run=True), UsageError)
    assert message == f"ensemble: {readers[0]} and {copied} hold the same model; name each member once."


# --- runs and commands


def test_gains_are_differences_of_official_scores(
    readers: list[Path], questions: list[Example], tmp_path: Path
) -> None:
    found = combine(readers, questions, how="product")
    with runs.new_run(tmp_path / "out", "ensemble") as folder:
        results = write_ensemble(folder, found, questions)
    assert results == json.loads((tmp_path / "out" / runs.RESULTS).read_text())
    assert list(results["gains"]) == ["r0", "r1", "r2"]
    for name, member in found.members.items():
        own, gain = score(questions, member.texts), results["gains"][name]
        for key in ("exact", "f1"):
            assert gain[key] == pytest.approx(results[key] - own[key])
            assert gain[f"{key}_interval"][0] <= gain[key] <= gain[f"{key}_interval"][1]
    official = score(questions, json.loads((tmp_path / "out" / runs.PREDICTIONS).read_text()))
    assert {key: results[key] for key in official} == pytest.approx(official)


@pytest.fixture(scope="module")
def data(questions: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The questions in a file."""
    path = tmp_path_factory.mktemp("data") / "dev.jsonl"
    rows = [
        {
            "id": example.id,
            "question": example.question,
            "context": example.context.text,
            "answers": [{"text": answer.text, "answer_start": answer.begin_char} for answer in example.answers],
        }
        for example in questions
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_command_from_models_from_runs_and_from_its_own_runs(
    readers: list[Path], data: Path, lamella: Any, tmp_path: Path
) -> None:
    exact = ("--precision", "fp32")
    for at in (0, 1):
        arguments = ("--model", readers[at], "--out", tmp_path / f"p{at}", *exact, "--keep-logits")
        assert lamella("predict" if at else "evaluate", data, *arguments)[0] == 0
    how = ("--how", "max", "--out")
    code, out, err = lamella("ensemble", *readers[:2], "--data", data, *how, tmp_path / "live", *exact, "--json")
    assert (code, err) == (0, "")
    live = json.loads(out)
    assert (live["how"], live["level"], live["total"], len(live["gains"])) == ("max", "token", 10, 2)
    code, out, err = lamella("ensemble", tmp_path / "p0", tmp_path / "p1", *how, tmp_path / "kept")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{tmp_path / 'kept'}: 10 questions answered by 2 readers together",
        "max, at the token level",
        "not scored: pass --data FILE to see the gain over each reader",
    ]
    names = {runs.RUN, runs.ENVIRONMENT, runs.CONFIG, runs.PREDICTIONS, runs.NBEST, runs.NULL_ODDS, runs.NA_PROB}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == names
    assert {path.name for path in (tmp_path / "live").iterdir()} == {*names, runs.RESULTS}
    answers = [json.loads((tmp_path / name / runs.PREDICTIONS).read_text()) for name in ("live", "kept")]
    assert answers[0] == answers[1]
    code, out, err = lamella("ensemble", tmp_path / "kept", tmp_path / "p1", "--data", data, "--out", tmp_path / "more")
    assert (code, err) == (0, "")
    assert "mean, at the span level (kept has no logits; predict again with --keep-logits" in out
    assert "over kept  exact " in out
    code, out, err = lamella("evaluate", data, tmp_path / "live" / runs.PREDICTIONS, "--json")
    assert json.loads(out)["f1"] == pytest.approx(live["f1"])


def test_a_usage_error_changes_no_folder(readers: list[Path], lamella: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, code, message in (
        ((readers[0], readers[1]), 2, "pass the questions with --data"),
        ((readers[0],), 2, "at least two runs or models"),
        ((readers[0], readers[1], "--data", "demo:dev", "--how", "vote", "--level", "token"), 2, "a vote counts texts"),
        ((readers[0], readers[1], "--data", tmp_path / "absent.json"), 2, "absent.json"),
    ):
        found = lamella("ensemble", *arguments, "--out", out)
        assert (found[0], found[1], found[2].count("\n")) == (code, "", 1)
        assert message in found[2]
        assert not out.exists()
    assert lamella("ensemble", *readers, "--data", "demo:dev", "--out", readers[0])[0] == 1
    for option in (["--keep-logits"], ["--batch-size", "8"], ["--precision", "fp32"]):
        code, _, err = lamella("evaluate", "demo:dev", tmp_path / "p.json", *option)
        assert (code, f"evaluate {option[0]}: needs --model" in err) == (2, True)


def test_questions_without_labels_are_answered_and_not_scored(
    readers: list[Path], questions: list[Example], lamella: Any, tmp_path: Path
) -> None:
    rows = [{"id": example.id, "question": example.question, "context": example.context.text} for example in questions]
    (tmp_path / "bare.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, err = lamella(
        "ensemble", *readers, "--data", tmp_path / "bare.jsonl", "--out", tmp_path / "out", "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out) == {"how": "mean", "level": "token", "total": len(questions)}
    assert not (tmp_path / "out" / runs.RESULTS).exists()


def test_overwriting_a_run_removes_its_logits(kept: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kept[0], tmp_path / "p"))
    with runs.new_run(folder, "predict", overwrite=True):
        assert {path.name for path in folder.iterdir()} == {runs.RUN, runs.ENVIRONMENT}


def test_runs_are_combined_without_torch(kept: list[Path], tmp_path: Path) -> None:
    folders = [str(folder) for folder in kept]
    script = (
        "import sys; from lamella.__main__ import main\n"
        f"out, folders = {str(tmp_path)!r}, {folders!r}\n"
        "for level in ('token', 'span'):\n"
        "    sys.argv = ['lamella', 'ensemble', *folders, '--level', level, '--out', out + '/' + level]\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert not ended.code\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]", ended.stdout


def test_a_folder_of_several_runs_stands_for_all_of_them(kept: list[Path], tmp_path: Path) -> None:
    with runs.new_run(tmp_path / "many", "train", within=["p0", "p1"]) as folder:
        for run in kept[:2]:
            shutil.copytree(run, folder / run.name)
    found = combine([folder, kept[2]])
    assert list(found.members) == ["p0", "p1", "p2"]
    assert found.predictions == combine(kept).predictions


def test_a_member_is_what_its_folder_holds(readers: list[Path], questions: list[Example], tmp_path: Path) -> None:
    """A training run has a model and predictions: with questions its model runs, otherwise its predictions are used."""
    folder = predict_run(tmp_path / "run", readers[0], questions)
    ReaderModel.load(readers[0]).save(folder / runs.MODEL)
    names = [str(folder), str(readers[1])]
    member: Member = open_members(names, run=True, precision="fp32")[0]
    assert member.model is not None
    assert member.answers is None
    other = predict_run(tmp_path / "other", readers[1], questions)
    stored = open_members([str(folder), str(other)], run=False)[0]
    assert stored.model is None
    assert stored.answers is not None
    alone = predict(ReaderModel.load(readers[0]), questions, batch_size=4)
    assert all(close(stored.answers.predictions[id], prediction, 1e-12) for id, prediction in alone.items())
