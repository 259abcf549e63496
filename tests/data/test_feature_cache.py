"""The window cache: the right windows or none, whatever the folder contains, within a size limit."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from doubles import AWKWARD, FAMILIES, tiny_run_config, tiny_tokenizer
from lamella.config import WindowOptions
from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.formats import read
from lamella.data.windows import feature_cache
from lamella.data.windows.feature_arrays import to_arrays
from lamella.data.windows.feature_cache import CONTENT, cached_features
from lamella.data.windows.features import Features, featurise
from lamella.data.windows.feed import Feed, Recipe
from lamella.user_cache import ABANDONED_AFTER, cache_folder

DEMO = read("demo:train").examples
LONG = WindowOptions(max_seq_length=64, doc_stride=24, max_query_length=12)  # several windows per context
ODD = (
    Example("lost", "Where?", Context("a\u200b\u200b b"), (Answer("\u200b\u200b", 1),)),  # an answer on no token
    Example("empty", "", Context("")),
    Example("odd", "Qui \ud800?", Context(AWKWARD, "Titre"), (Answer("Zoë", AWKWARD.index("Zoë")),)),
)
SOME = (*DEMO[:60:2], *ODD)
PINNED = "b2c02102916a735c"  # hash of the windows of SOME


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a new cache that also caches small sets."""
    monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path))
    monkeypatch.setattr(feature_cache, "MIN_QUESTIONS", 1)
    return tmp_path / "features"


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call no window may be cut."""

    def cut(*_: Any, **__: Any) -> Features:
        raise AssertionError("windows were cut")

    return lambda: monkeypatch.setattr(feature_cache, "featurise", cut)


def assert_equal(cached: Features, fresh: Features) -> None:
    for field in fields(Features):
        actual, expected = getattr(cached, field.name), getattr(fresh, field.name)
        if isinstance(expected, np.ndarray):
            assert actual.dtype == expected.dtype, field.name
            np.testing.assert_array_equal(actual, expected, err_msg=field.name)
        elif field.name != "offsets":
            assert actual == expected, field.name
            assert type(actual) is type(expected), field.name
    assert type(cached.offsets) is type(fresh.offsets)
    assert [id(array) for array in cached.offsets] != [id(array) for array in fresh.offsets]
    first = {id(array): index for index, array in reversed(list(enumerate(fresh.offsets)))}
    for actual, expected in zip(cached.offsets, fresh.offsets, strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        np.testing.assert_array_equal(actual, expected)
        assert actual is cached.offsets[first[id(expected)]]  # one array for all questions about a context


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


class TestContent:
    @settings(max_examples=25)
    @given(
        family=st.sampled_from(FAMILIES),
        options=st.builds(
            WindowOptions,
            max_seq_length=st.integers(16, 200),
            doc_stride=st.integers(0, 150),
            stride_is=st.sampled_from(["overlap", "step"]),
            max_query_length=st.integers(1, 64),
        ),
        negatives=st.sampled_from(["keep", "drop", "subsample"]),
        seed=st.integers(0, 5),
        some=st.lists(st.sampled_from([*DEMO[::9], *ODD]), min_size=1, max_size=25),
    )
    def test_cached_windows_equal_windows_cut_now(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        family: str,
        options: WindowOptions,
        negatives: Any,
        seed: int,
        some: list[Example],
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LAMELLA_CACHE", str(tmp_path_factory.mktemp("cache")))
            patch.setattr(feature_cache, "MIN_QUESTIONS", 1)
            tokenizer = tiny_tokenizer(family)
            how: Any = {"negative_windows": negatives, "seed": seed}
            fresh = featurise(some, tokenizer, options, **how)
            cached_features(some, tokenizer, options, **how)
            patch.setattr(feature_cache, "featurise", None)
            assert_equal(cached_features(some, tokenizer, options, **how), fresh)

    @pytest.mark.usefixtures("folder")
    def test_the_whole_demo(self, forbidden: Callable[[], None]) -> None:
        tokenizer = tiny_tokenizer("bert")
        assert_equal(cached_features(DEMO, tokenizer, LONG), featurise(DEMO, tokenizer, LONG))
        forbidden()
        assert_equal(cached_features(list(DEMO), tokenizer, LONG), featurise(DEMO, tokenizer, LONG))

    def test_the_log_names_the_file_that_is_written_or_read(self, folder: Path) -> None:
        lines: list[str] = []
        for _ in range(2):
            features = cached_features(SOME, tiny_tokenizer("bert"), LONG, log=lines.append)
        (path,) = files(folder)
        written, read_back = lines
        assert written == f"cached {len(features)} windows of {len(SOME)} questions for later runs in {path}"
        assert read_back == f"read {len(features)} cached windows of {len(SOME)} questions from {path}"

    def test_windows_are_cut_as_before(self) -> None:
        """If this fails, cached windows differ from new ones: increase FORMAT in features.py and pin the new hash."""
        digest = hashlib.sha256()
        for negatives in ("keep", "subsample"):
            features = featurise(SOME, tiny_tokenizer("bert"), LONG, negative_windows=negatives)  # type: ignore[arg-type]
            for name, array in sorted(to_arrays(features).items()):
                digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
        assert digest.hexdigest()[:16] == PINNED


class TestKey:
    def changed(self) -> dict[str, Any]:
        example = SOME[0]
        answer = example.answers[0]
        elsewhere = replace(answer, begin_char=answer.begin_char + 1)
        return {
            "a question": (replace(example, question=example.question + "?"), *SOME[1:]),
            "a text": (replace(example, context=Context(example.context.text + " ")), *SOME[1:]),
            "a place": (replace(example, answers=(elsewhere, *example.answers[1:])), *SOME[1:]),
            "an answer": (replace(example, answers=(replace(answer, text=answer.text[:-1]),)), *SOME[1:]),
            "no answer": (replace(example, answers=()), *SOME[1:]),
            "an id": (replace(example, id="another"), *SOME[1:]),
            "the order": SOME[::-1],
            "one less": SOME[:-1],
            "one twice": (*SOME, SOME[-1]),
        }

    def test_every_change_of_the_examples_changes_the_key(self, folder: Path) -> None:
        tokenizer = tiny_tokenizer("bert")
        cached_features(SOME, tokenizer, LONG)
        for number, (what, examples) in enumerate(self.changed().items(), start=2):
            assert_equal(cached_features(examples, tokenizer, LONG), featurise(examples, tokenizer, LONG))
            assert len(files(folder)) == number, what

    def test_texts_with_the_same_concatenation_have_different_keys(self, folder: Path) -> None:
        context, tokenizer = Context("the tower"), tiny_tokenizer("bert")
        for first, second in (("ab", "c"), ("a", "bc"), ('a", "b', "c"), ("", "abc")):
            cached_features([Example("1", first, context), Example("2", second, context)], tokenizer, LONG)
        assert len(files(folder)) == 4

    def test_every_option_changes_the_key(self, folder: Path) -> None:
        tokenizer = tiny_tokenizer("bert")
        others = {"max_seq_length": 65, "doc_stride": 23, "stride_is": "step", "max_query_length": 11}
        assert set(others) == set(WindowOptions.model_fields)
        for name, value in others.items():
            cached_features(SOME, tokenizer, LONG.model_copy(update={name: value}))
        for negatives in ("keep", "drop", "subsample"):
            cached_features(SOME, tokenizer, LONG, negative_windows=negatives)  # type: ignore[arg-type]
        assert len(files(folder)) == len(others) + 3

    def test_a_seed_counts_only_if_windows_are_drawn(self, folder: Path) -> None:
        for seed in range(3):
            cached_features(SOME, tiny_tokenizer("bert"), LONG, seed=seed)
        assert len(files(folder)) == 1
        for seed in range(3):
            cached_features(SOME, tiny_tokenizer("bert"), LONG, negative_windows="subsample", seed=seed)
        assert len(files(folder)) == 4

    def test_the_key_depends_on_the_behaviour_of_the_tokenizer(self, folder: Path) -> None:
        tokenizer = tiny_tokenizer("bert")
        again = tiny_tokenizer.__wrapped__("bert")  # another object with the same content
        cached_features(SOME, tokenizer, LONG)
        cached_features(SOME, again, LONG)
        assert len(files(folder)) == 1
        again.backend_tokenizer.enable_truncation(7)  # not used when windows are cut
        cached_features(SOME, again, LONG)
        assert len(files(folder)) == 1
        again.add_tokens(["zzzz"])
        cached_features(SOME, again, LONG)
        assert len(files(folder)) == 2
        for number, family in enumerate(sorted(set(FAMILIES) - {"bert", "electra", "distilbert"}), start=3):
            cached_features(SOME, tiny_tokenizer(family), LONG)
            assert len(files(folder)) == number

    @pytest.mark.parametrize("of", [feature_cache, feature_cache.windows_module])
    def test_a_new_format_version_changes_the_key(self, folder: Path, monkeypatch: pytest.MonkeyPatch, of: Any) -> None:
        cached_features(SOME, tiny_tokenizer("bert"), LONG)
        monkeypatch.setattr(of, "FORMAT", of.FORMAT + 1)
        cached_features(SOME, tiny_tokenizer("bert"), LONG)
        assert len(files(folder)) == 2


def cut_off(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(share * path.stat().st_size))


def flip(share: float) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(share * (len(data) - 1))] ^= 1
        path.write_bytes(data)

    return harm


def without_an_array(path: Path) -> None:
    arrays = load_file(path)
    del arrays["rows"]
    save_file(arrays, path)


def of_other_questions(path: Path) -> None:
    cached_features(SOME[1:], tiny_tokenizer("bert"), LONG)
    (other,) = set(path.parent.iterdir()) - {path}
    other.replace(path)


HARMS = {
    "empty": cut_off(0),
    "a few bytes": lambda path: os.truncate(path, 5),
    "cut in the middle": cut_off(0.5),
    "cut near the end": cut_off(0.99),
    "a text": lambda path: path.write_text("not a safetensors file, but longer than its header"),
    "a changed header": flip(0.001),
    "a changed byte": flip(0.5),
    "a changed last byte": flip(1),
    "without an array": without_an_array,
    "of other questions": of_other_questions,
}


class TestFaults:
    @pytest.mark.parametrize("harm", HARMS)
    def test_a_damaged_file_is_written_again(self, folder: Path, harm: str, forbidden: Callable[[], None]) -> None:
        tokenizer, lines = tiny_tokenizer("bert"), list[str]()
        fresh = cached_features(SOME, tokenizer, LONG)
        (path,) = files(folder)
        intact = path.read_bytes()
        HARMS[harm](path)
        assert path.read_bytes() != intact
        assert_equal(cached_features(SOME, tokenizer, LONG, log=lines.append), fresh)
        assert "for later runs" in lines[0]
        assert path.read_bytes() == intact
        forbidden()
        assert_equal(cached_features(SOME, tokenizer, LONG), fresh)

    def test_a_folder_instead_of_a_file(self, folder: Path) -> None:
        fresh = cached_features(SOME, tiny_tokenizer("bert"), LONG)
        (path,) = files(folder)
        path.unlink()
        (path / "something").mkdir(parents=True)
        assert_equal(cached_features(SOME, tiny_tokenizer("bert"), LONG), fresh)

    def test_a_folder_that_cannot_be_created(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path / "file"))
        lines: list[str] = []
        cached_features(SOME, tiny_tokenizer("bert"), LONG, log=lines.append)
        assert not lines
        assert not files(folder)

    def test_a_full_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        lines: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            cached_features(SOME, tiny_tokenizer("bert"), LONG, log=lines.append)
        assert not lines
        assert not files(folder)

    def test_a_read_only_folder_is_still_used(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, forbidden: Callable[[], None]
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        fresh = cached_features(SOME, tiny_tokenizer("bert"), LONG)
        assert files(folder)
        monkeypatch.setattr(os, "utime", refuse)
        forbidden()
        assert_equal(cached_features(SOME, tiny_tokenizer("bert"), LONG), fresh)

    def test_many_threads_at_once(self, folder: Path) -> None:
        tokenizer = tiny_tokenizer("bert")
        with ThreadPoolExecutor(6) as threads:
            cached = list(threads.map(lambda _: cached_features(SOME, tokenizer, LONG), range(12)))
        fresh = featurise(SOME, tokenizer, LONG)
        for features in cached:
            assert_equal(features, fresh)
        assert len(files(folder)) == 1  # and no partial file


class TestBounds:
    def test_the_least_recently_used_files_are_removed_first(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer = tiny_tokenizer("bert")

        def use(count: int, age: int) -> Path:
            before = set(files(folder))
            cached_features(SOME[:count], tokenizer, LONG)
            (path,) = set(files(folder)) - before
            os.utime(path, (time.time() - age, time.time() - age))
            return path

        oldest, middle, newest = use(20, 300), use(21, 200), use(22, 100)
        cached_features(SOME[:20], tokenizer, LONG)  # used again
        monkeypatch.setattr(feature_cache, "MAX_BYTES", 4 * oldest.stat().st_size)
        last = use(23, 0)
        assert set(files(folder)) == {oldest, middle, newest, last} - {middle}

    def test_a_file_beyond_the_limit_is_not_written(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cached_features(SOME[:5], tiny_tokenizer("bert"), LONG)
        before, lines = files(folder), list[str]()
        monkeypatch.setattr(feature_cache, "MAX_BYTES", before[0].stat().st_size + 10)
        cached_features(SOME, tiny_tokenizer("bert"), LONG, log=lines.append)
        assert files(folder) == before
        assert not lines

    def test_abandoned_partial_files_are_removed(self, folder: Path) -> None:
        folder.mkdir()
        young, old, foreign = (folder / name for name in (".a.lamella-part", ".b.lamella-part", "notes.txt"))
        for path in (young, old, foreign):
            path.touch()
        for path in (old, foreign):
            os.utime(path, (time.time() - 2 * ABANDONED_AFTER,) * 2)
        cached_features(SOME, tiny_tokenizer("bert"), LONG)
        assert {young, foreign} < set(files(folder))
        assert old not in files(folder)

    def test_small_sets_are_not_cached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LAMELLA_CACHE", str(tmp_path))
        assert len(DEMO) < feature_cache.MIN_QUESTIONS
        cached_features(DEMO, tiny_tokenizer("bert"), LONG)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"LAMELLA_CACHE": "/fast/disk", "XDG_CACHE_HOME": "/cache"}, "/fast/disk/features"),
        ({"LAMELLA_CACHE": "~/kept"}, "/home/ada/kept/features"),
        ({"LAMELLA_CACHE": "", "XDG_CACHE_HOME": "/cache"}, None),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/lamella/features"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "/home/ada/.cache/lamella/features"),
        ({"XDG_CACHE_HOME": ""}, "/home/ada/.cache/lamella/features"),
        ({}, "/home/ada/.cache/lamella/features"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="expects POSIX paths")
def test_the_cache_folder(variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAMELLA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/ada", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder(CONTENT) == (expected if expected is None else Path(expected))


def test_training_caches_plain_windows_but_not_augmented_ones(folder: Path, forbidden: Callable[[], None]) -> None:
    tokenizer, lines = tiny_tokenizer("bert"), list[str]()
    augmenting = Recipe(tokenizer, tiny_run_config(data={"augment": "eda", "workers": 0}))
    Feed(augmenting, DEMO[:8], log=lines.append)(0)
    assert not files(folder)
    assert not lines
    plain = Recipe(tokenizer, tiny_run_config(data={"negative_windows": "subsample"}, training={"order_seed": 3}))
    windows = plain.config.windows
    fresh = featurise(DEMO, tokenizer, windows, negative_windows="subsample", seed=3)
    assert_equal(Feed(plain, DEMO, log=lines.append)(0), fresh)
    forbidden()
    assert_equal(Feed(plain, DEMO, log=lines.append)(0), fresh)
    assert len(files(folder)) == 1
    assert len(lines) == 2
