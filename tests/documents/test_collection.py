"""Documents: files of every kind, broken ones, places of answers, and an index that outlives its process."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from lamella import Documents, LamellaWarning, Reader
from lamella.documents import collection, index_file, read_files
from lamella.documents.index_file import INDEX, StoredIndex
from lamella.errors import DataError, UsageError
from lamella.files import locked
from made_files import make_docx, make_pdf, page, paragraph

pytestmark = pytest.mark.usefixtures("one_thread")

TITAN = "Christiaan Huygens discovered the moon Titan in 1655."


FILES = {
    "moons.txt": f"About moons.\n\n{TITAN}\n".encode(),
    "deep/mill.md": b"# The mill\n\nThe mill was built in 1790 by Ann Smith.\n",
    "deep/er/road.html": b"<h1>Roads</h1><p>The road to Perth is 12 miles long.</p>",
    "bridge.pdf": make_pdf(page("Contents"), page("The bridge crosses the Tay."), compressed=True),
    "tower.docx": make_docx(paragraph("Towers") + paragraph("The tower is painted red.")),
    "harbour.txt.gz": gzip.compress(b"The harbour freezes in January."),
    ".hidden.txt": b"Nobody reads this.",
    "picture.png": b"\x89PNG",
}


def make_folder(folder: Path) -> Path:
    """Write a document of each kind."""
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "notes")


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader.load(device="cpu", precision="fp32")


def best_files(documents: Documents, question: str) -> list[str]:
    return [Path(documents.names[passage.text]).name for passage in documents.rank(question, 3)]


def test_an_answer_names_its_place(folder: Path, reader: Reader) -> None:
    expected = {
        "Who discovered Titan?": ("Christiaan Huygens", "moons.txt", {"line": 3}),
        "Who built the mill?": ("Ann Smith", "deep/mill.md", {"line": 3}),
        "How long is the road?": ("12 miles", "deep/er/road.html", {"paragraph": 2}),
        "What does the bridge cross?": ("Tay", "bridge.pdf", {"page": 2}),
        "Which colour is the tower?": ("red", "tower.docx", {"paragraph": 2}),
        "When does the harbour freeze?": ("January", "harbour.txt.gz", {"line": 1}),
    }
    documents = Documents(folder)
    results = reader.ask(list(expected), documents)
    for (answer, file, place), (best,) in zip(expected.values(), results, strict=True):
        assert answer in best["answer"]
        assert best["file"] == str(folder / file)
        assert place.items() <= best.items()
        assert best["answer"] in best["sentence"]


def test_an_answer_shows_the_file_as_it_is_although_it_is_read_without_markup(folder: Path, reader: Reader) -> None:
    line = "**A page** has 2**20 bytes, and __main__.py writes it."
    (folder / "page.md").write_text(f"# Pages\n\n{line}\n", encoding="utf-8")
    Documents(folder).save()
    documents = Documents(folder)
    assert documents.read == 0
    (passage,) = documents.rank("page", 1)
    assert "  A page   has 2**20 bytes" in documents.words(passage)
    for question, answer in {
        "How many bytes does a page have?": "2**20",
        "Which script writes the page?": "__main__.py",
    }.items():
        best = reader.ask(question, documents)[0]
        assert answer in best["answer"]
        assert best["sentence"].endswith(line)
        assert best["line"] == 3


def test_the_own_docs_answer_a_question_about_a_run(reader: Reader) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    best = reader.ask("What is the exit code after Ctrl-C?", Documents(docs), passages=8)[0]
    assert best["answer"] == "130"
    assert best["file"].endswith("long-runs.md")


def test_question_words_do_not_rank(folder: Path) -> None:
    (folder / "chatter.txt").write_text("How do I do it? I do what I do, and how. Who am I?", encoding="utf-8")
    documents = Documents(folder)
    assert best_files(documents, "How do I find the harbour?")[0] == "harbour.txt.gz"
    assert best_files(documents, "Who am I?")[0] == "chatter.txt"  # it has no other words, but one


@pytest.mark.parametrize(
    ("question", "answer", "other"),
    [
        ("Where are the headquarters of the WHO?", "The WHO has headquarters in Geneva.", "Headquarters: headquarters"),
        ("Where did the students riot in May?", "In May students began to riot in Paris.", "Students riot: a riot in"),
        ("Will Will Smith sing?", "Will Smith does sing.", "Smith, Smith: sing, Smith"),
    ],
)
def test_question_words_that_are_names_do_rank(question: str, answer: str, other: str) -> None:
    others = {str(number): f"{other} {number}." for number in range(30)}
    assert best_files(Documents.from_texts({**others, "answer": answer}), question)[0] == "answer"
    # The first word begins with a capital in any case, and I is always written with one.
    decoys = Documents.from_texts({"answer": "The mill is old.", "decoy": "Where? Am I where? Where am I?"})
    assert best_files(decoys, "Where do I find a mill?") == ["answer", "decoy"]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_korean_document_is_found_whatever_its_normal_form(form: Literal["NFC", "NFD"]) -> None:
    texts = {"a": "서울은 대한민국의 수도이다.", "b": "부산은 항구 도시이다.", "c": "Å sjø i Norge."}
    documents = Documents.from_texts({name: unicodedata.normalize(form, text) for name, text in texts.items()})
    assert best_files(documents, "대한민국의 수도는 어디인가?")[0] == "a"
    assert best_files(documents, "Wo liegt sjø?")[0] == "c"


def test_files_and_patterns_are_sources_too_and_a_file_counts_once(folder: Path) -> None:
    assert len(Documents(folder)) == 6
    assert Documents(folder / "*.txt", folder / "moons.txt").names == [str(folder / "moons.txt")]
    assert len(Documents(folder / "**" / "*.*")) == 6
    assert len(Documents(folder / "deep", folder)) == 6
    for source in ("nothing", folder / "*.rst"):
        with pytest.raises(UsageError, match=r"no such file|matches this pattern"):
            Documents(source)
    with pytest.raises(UsageError, match="got none"):
        Documents()


def test_links_and_other_spellings_of_a_file_count_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert len(Documents("moons.txt", "./moons.txt")) == 1
    (folder / "other.txt").symlink_to("moons.txt")
    (folder / "deeper").symlink_to("deep")
    assert len(Documents(folder)) == 6


def test_links_out_of_a_folder_are_skipped(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("The safe is behind the mirror.", encoding="utf-8")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.warns(LamellaWarning, match=r"link\.txt: skipped: links to a file outside of the folder"):
        assert len(Documents(folder)) == 6
    assert len(Documents(folder / "link.txt")) == 1  # named by itself


def test_links_to_folders_outside_are_skipped_with_a_warning(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "safe.txt").write_text("The safe is behind the mirror.", encoding="utf-8")
    (folder / "deep" / "shared").symlink_to(tmp_path / "shared")
    (folder / "deep" / "up").symlink_to(folder)  # its files are read by their own names, so without a warning
    with pytest.warns(LamellaWarning, match=r"deep/shared: skipped: links to a folder outside") as warnings:
        assert len(Documents(folder)) == 6
    assert len(warnings) == 1


def test_documents_without_text_cannot_be_asked(reader: Reader) -> None:
    with pytest.raises(UsageError, match="ask: expected documents with text, got none"):
        reader.ask("Who discovered Titan?", Documents.from_texts({"empty": ""}))


def test_pipes_and_devices_are_skipped(folder: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    with pytest.warns(LamellaWarning, match=r"pipe\.txt: skipped: expected a regular file"):
        assert len(Documents(folder)) == 6
    (folder / "zero.txt").symlink_to("/dev/zero")
    with pytest.warns(LamellaWarning, match="regular file"), pytest.raises(DataError):
        Documents(folder / "zero.txt")


def test_a_file_is_read_up_to_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_files, "MOST_BYTES", 40)
    (folder / "short.txt").write_text("Short.", encoding="utf-8")
    with pytest.warns(LamellaWarning, match="MiB, got more"):
        assert list(Documents(folder / "*.txt").skipped) == [str(folder / "moons.txt")]


def test_lists_of_paths_are_sources_and_other_arguments_get_one_line(folder: Path) -> None:
    assert len(Documents([folder / "moons.txt", str(folder / "deep")])) == 3
    for wrong in (3, None, b"notes", {"a": "A text."}, []):
        with pytest.raises(UsageError, match="Documents: expected folders, files or glob patterns, got"):
            Documents(wrong)  # type: ignore[arg-type]
    for texts in ({}, ["A text."], {"a": 3}, {3: "A text."}):
        with pytest.raises(UsageError, match="Documents: expected"):
            Documents.from_texts(texts)  # type: ignore[arg-type]


def test_broken_files_are_named_and_skipped(folder: Path) -> None:
    broken = {
        "damaged.pdf": b"%PDF-1.7 nothing follows",
        "no.pdf": b"plain text",
        "damaged.docx": b"PK no archive",
        "empty.docx": make_docx(""),
        "old.docx": b"\xd0\xcf\x11\xe0 rest",
        "damaged.txt.gz": gzip.compress(b"text" * 1000)[:40],
        "binary.txt": b"a\0b" * 50,
        "blank.txt": b" \n",
    }
    for name, data in broken.items():
        (folder / name).write_bytes(data)
    with pytest.warns(LamellaWarning) as warnings:
        documents = Documents(folder)
    assert len(documents) == 6
    assert {Path(name).name for name in documents.skipped} == set(broken)
    messages = [str(warning.message) for warning in warnings]
    assert len(messages) == len(broken)
    assert all("\n" not in message and ": skipped: " in message for message in messages)
    with pytest.warns(LamellaWarning), pytest.raises(DataError, match="none that can be read"):
        Documents(folder / "no.pdf", folder / "blank.txt")


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("indexed"))
    Documents(folder).save()
    return folder


def write_by_hand(source: Path, path: Path, name: str, change: Callable[[NDArray[Any]], NDArray[Any]] | None) -> None:
    """Write an index with one tensor changed, or without it, and with the hash of what it holds."""
    with safe_open(source, framework="numpy") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.offset_keys()}, file.metadata()
    changed = tensors.pop(name)
    if change is not None:
        tensors[name] = np.ascontiguousarray(change(changed))
    sha256 = index_file._sha256({key: (len(tensor), tensor) for key, tensor in tensors.items()})
    save_file(tensors, path, metadata | {"sha256": sha256})


class TestIndex:
    def test_only_changed_files_are_read_again(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = Documents(folder)
        assert (first.read, first.changed) == (6, True)
        assert first.save() == folder / INDEX
        monkeypatch.setattr(collection, "read_files", lambda paths, _: iter([None] * len(paths)))
        again = Documents(folder)
        assert (again.read, again.removed, again.changed) == (0, 0, False)
        assert again.names == first.names
        assert list(again.texts) == list(first.texts)
        question = "Who built the mill in 1790?"
        assert again.passages.rank(question, 10) == first.passages.rank(question, 10)

    def test_changed_new_and_removed_files(self, folder: Path) -> None:
        Documents(folder).save()
        (folder / "moons.txt").write_text("Titan is a moon with a thick atmosphere of nitrogen.", encoding="utf-8")
        (folder / "new.txt").write_text("The ferry leaves at noon.", encoding="utf-8")
        (folder / "bridge.pdf").unlink()
        for is_saved in (False, True):  # the same from the files and from the index that was updated
            documents = Documents(folder)
            assert documents.changed != is_saved
            assert best_files(documents, "When does the ferry leave?")[0] == "new.txt"
            assert best_files(documents, "the atmosphere of Titan")[0] == "moons.txt"
            assert "bridge.pdf" not in map(os.path.basename, documents.names)
            assert not documents.passages.ranking.scores("Huygens Tay").any()  # words that left
            documents.save()
        (folder / INDEX).unlink()
        question = "Who built the mill near the road?"
        assert Documents(folder).passages.rank(question, 10) == documents.passages.rank(question, 10)

    def test_a_broken_file_is_not_tried_again_but_named(self, folder: Path) -> None:
        (folder / "damaged.pdf").write_bytes(b"%PDF-1.7 nothing follows")
        with pytest.warns(LamellaWarning, match=r"damaged\.pdf: skipped"):
            Documents(folder).save()
        with pytest.warns(LamellaWarning, match=r"damaged\.pdf: skipped"):
            assert Documents(folder).read == 0

    def test_a_failure_that_may_pass_is_not_kept(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("lamella.documents.text_process.PROCESS_SECONDS", 0.0)
            with pytest.warns(LamellaWarning, match="is read within 0 seconds"):
                assert len(Documents.index(folder)) == 3
        assert len(Documents(folder)) == 6
        documents = Documents.index(folder)
        assert (len(documents), documents.read) == (6, 3)
        assert Documents.index(folder).read == 0

    def test_files_of_another_encoding_are_indexed_again(self, folder: Path) -> None:
        (folder / "moons.txt").write_bytes("Die Brücke ist grün.".encode("cp1252"))
        with pytest.warns(LamellaWarning, match=r"moons\.txt: skipped"):
            Documents.index(folder, "utf-8")
        assert not Documents(folder).skipped
        Documents.index(folder, "cp1252")
        assert Documents(folder).read == 0  # who asks need not know the encoding
        assert Documents.index(folder).read == 6
        assert Documents.index(folder).read == 0

    def test_the_index_of_a_folder_that_became_empty(self, tmp_path: Path, lamella: Any) -> None:
        assert lamella("index", tmp_path)[0] == 1
        (tmp_path / "secret.txt").write_text("The safe is behind the mirror.", encoding="utf-8")
        assert lamella("index", tmp_path)[0] == 0
        (tmp_path / "secret.txt").unlink()
        code, out, err = lamella("index", tmp_path)
        assert (code, err) == (0, "")
        assert "0 documents in 0 passages (0 read, 1 removed)" in out
        assert b"mirror" not in (tmp_path / INDEX).read_bytes()
        (tmp_path / INDEX).write_bytes(b"no index")
        with pytest.warns(LamellaWarning, match="cannot be used"):
            Documents.index(tmp_path)
        assert not Documents.index(tmp_path).changed

    def test_a_locked_folder_is_not_read(self, folder: Path, lamella: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collection, "read_files", None)
        with locked(folder):
            code, out, err = lamella("index", folder)
        assert (code, out) == (1, "")
        assert err.endswith("another process is writing here; wait for it.\n")

    @pytest.mark.parametrize("content", [b"", b"no index", b"\x02\0\0\0\0\0\0\0{}"])
    def test_a_damaged_index_is_not_used(self, folder: Path, content: bytes) -> None:
        (folder / INDEX).write_bytes(content)
        with pytest.warns(LamellaWarning, match="cannot be used"):
            documents = Documents(folder)
        assert documents.read == 6
        documents.save()
        assert Documents(folder).read == 0

    @pytest.mark.parametrize(
        ("name", "damage"),
        [
            ("texts", lambda tensor: np.where(np.arange(len(tensor)) == 9, np.uint8(0xFF), tensor)),
            ("text_ends", lambda tensor: tensor[:-1]),
            ("spans", lambda tensor: tensor + 1),
            ("term_ends", lambda tensor: tensor[::-1]),
            ("scores", lambda tensor: tensor[:3]),
            ("scored", lambda tensor: tensor + 100),
            ("terms", lambda tensor: tensor.view(np.float32)),
            ("documents", lambda _: np.frombuffer(b'[{"name": {}}]', np.uint8)),
            ("documents", lambda _: np.frombuffer(b'["name"]', np.uint8)),
        ],
    )
    def test_an_index_with_a_damaged_tensor_is_not_used(
        self, indexed: Path, tmp_path: Path, name: str, damage: Callable[[NDArray[Any]], NDArray[Any]]
    ) -> None:
        with safe_open(indexed / INDEX, framework="numpy") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.offset_keys()}, file.metadata()
        path = tmp_path / INDEX
        save_file(tensors, path, metadata)
        StoredIndex(path)
        save_file(tensors | {name: np.ascontiguousarray(damage(tensors[name]))}, path, metadata)
        with pytest.raises(ValueError, match="is damaged"):
            StoredIndex(path)

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("terms", lambda tensor: tensor.astype(np.int64), r"terms: expected I32 in 1 dimension, found I64 \[\d+\]"),
            ("spans", lambda tensor: tensor.ravel(), "spans: expected I64 in 2 dimensions, found I64"),
            ("texts", None, "expected the tensors documents, texts, .*, found documents,"),
            ("text_ends", lambda tensor: tensor[:-1], r"text_ends: expected \d+ places that rise to \d+"),
            ("text_ends", lambda tensor: tensor - 2 * tensor[0], "text_ends: expected"),
            ("passage_ends", lambda tensor: tensor[::-1], "passage_ends: expected"),
            ("term_ends", lambda tensor: tensor + 1, "term_ends: expected"),
            ("score_begins", lambda tensor: tensor + 1, "score_begins: expected"),
            ("scored", lambda tensor: tensor[1:], "scores: expected as many numbers of passages, from 0"),
            ("scored", lambda tensor: tensor + 1000, r"scored: expected numbers below \d+"),
            ("terms", lambda tensor: tensor - tensor.max() - 1, r"terms: expected numbers below \d+"),
            ("spans", lambda tensor: tensor - 1, "spans: expected places within the texts"),
            ("spans", lambda tensor: tensor + 100_000, "spans: expected places within the texts"),
            (
                "documents",
                lambda tensor: np.frombuffer(b'[{"name": 3, "state": []}]', np.uint8),
                "documents: expected a",
            ),
            (
                "documents",
                lambda tensor: np.frombuffer(b'[{"name": "a", "state": 7}]', np.uint8),
                "documents: expected a",
            ),
        ],
    )
    def test_an_index_made_by_hand_is_checked(
        self, indexed: Path, folder: Path, name: str, change: Callable[[NDArray[Any]], NDArray[Any]], message: str
    ) -> None:
        """Its hash is right; the files are read instead, as if it were damaged."""
        write_by_hand(indexed / INDEX, folder / INDEX, name, change)
        with pytest.warns(
            LamellaWarning, match=rf"cannot be used \({message}.*replace it with: lamella index \S"
        ) as caught:
            documents = Documents(folder)
        assert len(caught) == 1
        assert documents.read == 6

    def test_a_text_that_is_not_utf8_is_reported(self, indexed: Path, tmp_path: Path) -> None:
        write_by_hand(indexed / INDEX, tmp_path / INDEX, "texts", lambda tensor: np.full_like(tensor, 0xFF))
        with pytest.raises(DataError, match=r"the text of \S+ is not UTF-8; replace it with: lamella index \S+$"):
            StoredIndex(tmp_path / INDEX).text(0)

    @pytest.mark.skipif(os.name == "nt", reason="Windows has other access rights")
    def test_only_the_owner_can_read_the_index(self, folder: Path) -> None:
        assert Documents(folder).save().stat().st_mode & 0o777 == 0o600

    def test_a_killed_process_leaves_the_old_index(self, folder: Path) -> None:
        """Kill a process that has written a new index and not yet given it the name of the old one."""
        Documents(folder).save()
        before = (folder / INDEX).read_bytes()
        (folder / "new.txt").write_text("The ferry leaves at noon.", encoding="utf-8")
        slow = (
            "import os, sys, time\n"
            "from lamella import Documents\n"
            "real = os.fsync\n"
            "def fsync(handle):\n"
            "    real(handle)\n"
            "    print('written', flush=True)\n"
            "    time.sleep(60)\n"  # between the new file and its new name
            "os.fsync = fsync\n"
            "Documents(sys.argv[1]).save()\n"
        )
        process = subprocess.Popen([sys.executable, "-c", slow, str(folder)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process:
            assert process.stdout.readline() == b"written\n"
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert (folder / INDEX).read_bytes() == before
        assert list(folder.glob(".*part"))
        documents = Documents(folder)
        assert documents.read == 1
        documents.save()
        assert not list(folder.glob(".*part"))
        assert Documents(folder).read == 0


class TestCommands:
    def test_a_folder_is_indexed_and_asked(self, folder: Path, lamella: Any) -> None:
        code, out, err = lamella("index", folder)
        assert (code, err) == (0, "")
        assert "6 documents in 6 passages (6 read, 0 removed)" in out
        assert json.loads(lamella("index", folder, "--json")[1])["read"] == 0
        code, out, err = lamella("ask", "--in", folder, "Who discovered Titan?")
        assert (code, err) == (0, "")
        first, sentence = out.splitlines()
        assert first.startswith("Christiaan Huygens  [")
        assert first.endswith(f"{folder / 'moons.txt'}:3]")
        assert sentence == f"  [Christiaan Huygens]{TITAN.removeprefix('Christiaan Huygens')}"
        record = json.loads(lamella("ask", "What does the bridge cross?", "--in", folder, "--json")[1])
        assert record["answers"][0]["page"] == 2
        assert record["passages"] == {"read": 6, "of": 6}

    def test_names_are_printed_on_one_line(self, folder: Path, lamella: Any) -> None:
        (folder / "moons.txt").rename(folder / "two\nlines.txt")
        (folder / "no\npicture.pdf").write_bytes(b"no PDF")
        code, out, err = lamella("ask", "--in", folder, "Who discovered Titan?")
        assert (code, err.count("\n"), out.count("\n")) == (0, 1, 2)
        assert r"no\npicture.pdf: skipped" in err
        assert r"two\nlines.txt:3]" in out

    def test_a_shell_may_expand_the_files(self, folder: Path, lamella: Any) -> None:
        files = [folder / "moons.txt", folder / "tower.docx"]
        for arguments in (["Who discovered Titan?", "--in", *files], ["--in", *files, "Who discovered Titan?"]):
            code, out, err = lamella("ask", *arguments, "--top-k", 1)
            assert (code, err) == (0, "")
            assert "moons.txt:3]" in out
        code, _, err = lamella("ask", "Who discovered Titan?", "--in", files[0], folder / "typo.txt")
        assert code == 2
        assert "typo.txt" in err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["ask", "Who?", "--in", "nothing"], "no such file or folder"),
            (["ask", "Who?", "--in", ".", "--text", "x"], "got both"),
            (["ask", "Who", "discovered", "it?", "--text", "x"], "put the question in quotes"),
            (["index", "nothing"], "expected a folder"),
            (["ask", "Who?", "--in", "a.txt", "--encoding", "klingon"], "expected the name of a text encoding"),
        ],
    )
    def test_mistakes_get_one_line(
        self, arguments: list[str], message: str, lamella: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("a.txt").write_text("A text.", encoding="utf-8")
        code, out, err = lamella(*arguments)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
