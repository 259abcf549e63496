"""Documents: the files of folders, ready to be asked about."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lamella.data.question_words import content_words
from lamella.data.word_ranking import WordRanking, number_terms
from lamella.documents.find_files import FoundFiles, find_files
from lamella.documents.index_file import INDEX, DocumentRecord, StoredIndex, Terms, write_index
from lamella.documents.markdown_text import blank_markup, close_marks
from lamella.documents.passages import Passage, PassageIndex, cut
from lamella.documents.read_files import ReadProblem, read_files
from lamella.errors import DataError, UsageError, one_line, printable, shorten, warn
from lamella.files import flatten_paths, locked
from lamella.user_cache import file_state

PathLike = str | os.PathLike[str]

TEXTS_KEPT = 64  # texts of an index that are kept in memory after they were read


@dataclass(frozen=True)
class _Document:
    """A document with its passages; one that could not be read has none."""

    path: Path
    record: DocumentRecord
    text: Callable[[], str]
    spans: NDArray[np.int64]
    terms: Callable[[], Terms]
    is_stored: bool

    @property
    def name(self) -> str:
        return str(self.path)


class Documents:
    """The texts of files, cut into passages that are ranked for a question.

    >>> documents = Documents("docs", "notes/*.pdf")
    >>> reader.ask("How do I resume a run?", documents)

    A folder that `lamella index` has indexed is not read again, except for the files that changed since. Files that
    cannot be read are skipped, with a warning for each.
    """

    def __init__(self, *sources: PathLike | Iterable[PathLike], encoding: str | None = None) -> None:
        """Read txt, md, html, pdf and docx files, also in gzip: folders, files and glob patterns, or lists of them."""
        paths = list(flatten_paths(sources, "Documents: expected folders, files or glob patterns"))
        if not paths:
            raise UsageError("Documents: expected folders, files or glob patterns, got none.")
        self._load(find_files(paths), encoding)
        if not len(self):
            raise _nothing_to_read(", ".join(paths))

    @classmethod
    def index(cls, folder: PathLike, encoding: str | None = None) -> Documents:
        """Read the documents of a folder and write their index; from an index that is there, take what did not change.

        Files that were read with another encoding, or with none, are read again. If the documents of an index are all
        gone, it becomes empty.
        """
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing there"
            raise UsageError(f"index {folder}: expected a folder, got {found}; check the path.")
        with locked(folder, advice="wait for it"):
            documents = cls.__new__(cls)
            documents._load(find_files([folder]), encoding, for_index=True)
            if not len(documents) and not documents.index_file.exists():
                raise _nothing_to_read(os.fspath(folder))
            documents._write()
        return documents

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Documents:
        """Make documents of texts by name, without files."""
        if not isinstance(texts, Mapping) or not all(isinstance(part, str) for part in chain(*texts.items())):
            raise UsageError(f"Documents: expected a dictionary of texts by name, got {shorten(texts)}.")
        if not texts:
            raise UsageError("Documents: expected texts, got none.")
        new_terms: dict[str, int] = {}
        documents = cls.__new__(cls)
        documents._folder, documents.removed, documents._has_index = None, 0, False
        documents._set(
            [
                _new_document(Path(name), DocumentRecord(name, (), kind="txt"), text, new_terms)
                for name, text in texts.items()
            ]
        )
        return documents

    @property
    def names(self) -> list[str]:
        """The names of the files, in the order of their numbers; a skipped file keeps its number."""
        return [document.name for document in self._documents]

    @property
    def skipped(self) -> dict[str, str]:
        """The files that could not be read, with the reasons."""
        return {document.name: document.record.problem for document in self._documents if document.record.problem}

    @property
    def read(self) -> int:
        """How many files were read now, and not taken from an index."""
        return sum(not document.is_stored for document in self._documents)

    @property
    def changed(self) -> bool:
        """Whether the documents differ from those of the index on disk, or there is none."""
        return bool(self.read or self.removed or not self._has_index)

    @property
    def index_file(self) -> Path:
        """The file for the index of these documents, which must be those of one folder."""
        if self._folder is None:
            raise UsageError("index: expected the documents of one folder, got files or several folders.")
        return self._folder / INDEX

    def __len__(self) -> int:
        return sum(not document.record.problem for document in self._documents)

    def __repr__(self) -> str:
        return f"<Documents: {len(self)} files, {len(self.passages)} passages>"

    def save(self) -> Path:
        """Write the index into the folder, for later calls; return its file."""
        path = self.index_file
        with locked(path.parent, advice="wait for it"):
            self._write()
        return path

    def rank(self, question: str, count: int) -> list[Passage]:
        """Return the best passages for a question, best first."""
        return self.passages.rank(content_words(question), count)

    def best(self, question: str, count: int) -> tuple[list[Passage], bool]:
        """Return the best passages for a question in text order, and whether any of them shares a word with it."""
        return self.passages.best(content_words(question), count)

    def place(self, number: int, position: int) -> dict[str, Any]:
        """Return where a character of a document is: its file, and its page, line or paragraph, counted from 1."""
        document, record = self._documents[number], self._documents[number].record
        if record.pages:
            unit, count = "page", bisect.bisect_right(record.pages, position)
        else:
            unit, separator = ("line", "\n") if record.kind in ("txt", "md") else ("paragraph", "\n\n")
            count = self.texts[number].count(separator, 0, position) + 1
        return {"file": document.name, unit: count}

    def whole(self, number: int, begin: int, end: int) -> tuple[int, int]:
        """Return the place of an answer in a document, with the markup that belongs to it."""
        if self._documents[number].record.kind != "md":
            return begin, end
        return close_marks(self.texts[number], begin, end)

    def words(self, passage: Passage) -> str:
        """Return the text of a passage as a reader reads it: with spaces instead of markup."""
        words: str = self._words[passage.text]
        return words[passage.begin : passage.end]

    def _load(self, found: Sequence[FoundFiles], encoding: str | None, *, for_index: bool = False) -> None:
        documents: list[_Document] = []
        stored = None
        new_terms: dict[str, int] = {}
        removed = 0
        for files in found:
            stored = None if files.folder is None else _open_index(files.folder / INDEX)
            documents += _read(files, stored, encoding, new_terms, for_index=for_index)
            removed += len({record.name for record in stored.records}.difference(files.names)) if stored else 0
        for document in documents:
            if document.record.problem:
                warn(f"{printable(document.name)}: skipped: {document.record.problem}.")
        self._folder = found[0].folder if len(found) == 1 else None
        self.removed = removed  # documents of the index that do not exist any more
        self._has_index = stored is not None
        self._set(documents, stored)

    def _write(self) -> None:
        if self.changed:
            numbers, _ = self._numbered
            write_index(self.index_file, [document.record for document in self._documents], self.passages, numbers)

    def _set(self, documents: Sequence[_Document], stored: StoredIndex | None = None) -> None:
        """Take the documents, and make their passages ready to be ranked; `stored` is the index of their folder."""
        kinds = [document.record.kind for document in documents]
        texts = _Texts(len(documents), lambda number: documents[number].text())
        self._documents, self.texts = documents, texts
        self._words = _Texts(len(documents), lambda number: _without_markup(texts[number], kinds[number]))
        spans = [document.spans for document in documents]
        owners = np.repeat(np.arange(len(spans)), [len(part) for part in spans])
        places = np.column_stack([owners, np.concatenate([np.zeros((0, 2), np.int64), *spans])])
        if stored is not None and self._folder is not None and not self.changed:
            vocabulary = {term: number for number, term in enumerate(stored.vocabulary)}
            ranking = WordRanking.of_matrix(stored.matrix, len(places), vocabulary)
        else:
            self._numbered = _renumber([document.terms() for document in documents])
            ranking = WordRanking.of_terms(*self._numbered)
        self.passages = PassageIndex.of_ranking(self.texts, places, ranking)


class _Texts(Sequence[str]):
    """The texts of documents, read or made when they are asked for."""

    def __init__(self, length: int, read: Callable[[int], str]) -> None:
        self._length, self._read = length, lru_cache(TEXTS_KEPT)(read)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: Any) -> Any:
        return self._read(number)


def _open_index(path: Path) -> StoredIndex | None:
    if not path.is_file():
        return None
    try:
        return StoredIndex(path)
    except ValueError as error:
        advice = f"so the files are read; replace it with: lamella index {printable(str(path.parent))}"
        warn(f"{printable(str(path))}: cannot be used ({one_line(error)}), {advice}")
        return None


def _nothing_to_read(sources: str) -> DataError:
    return DataError(f"{printable(sources)}: expected a txt, md, html, pdf or docx file, found none that can be read.")


def _is_current(record: DocumentRecord, state: tuple[int, ...], encoding: str | None, *, for_index: bool) -> bool:
    """Whether a file need not be read again; who asks without an encoding accepts the text of any."""
    if not state or record.state != state:
        return False
    return record.encoding == encoding or (encoding is None and not record.problem and not for_index)


def _read(
    files: FoundFiles, stored: StoredIndex | None, encoding: str | None, new_terms: dict[str, int], *, for_index: bool
) -> list[_Document]:
    """Return the documents of some files: from the index if they did not change, else from the files themselves."""
    numbers = {} if stored is None else {record.name: number for number, record in enumerate(stored.records)}
    documents: dict[str, _Document] = {}
    states = {name: _state(files.path(name)) for name in files.names}
    for name, state in states.items():
        if stored is not None and name in numbers:
            record = stored.records[numbers[name]]
            if _is_current(record, state, encoding, for_index=for_index):
                documents[name] = _stored_document(files.path(name), stored, numbers[name])
    names = [name for name in files.names if name not in documents]
    for name, found in zip(names, read_files([files.path(name) for name in names], encoding), strict=True):
        record = DocumentRecord(name, states[name], encoding=encoding)
        if isinstance(found, ReadProblem):
            state = states[name] if found.lasting else ()
            record = replace(record, problem=found.reason, state=state)
            documents[name] = _new_document(files.path(name), record, "", new_terms)
            continue
        record = replace(record, kind=found.kind, pages=found.pages)
        documents[name] = _new_document(files.path(name), record, found.text, new_terms)
    return [documents[name] for name in files.names]


def _stored_document(path: Path, stored: StoredIndex, number: int) -> _Document:
    return _Document(
        path,
        stored.records[number],
        lambda: stored.text(number),
        stored.spans_of(number),
        lambda: stored.terms_of(number),
        is_stored=True,
    )


def _new_document(path: Path, record: DocumentRecord, text: str, new_terms: dict[str, int]) -> _Document:
    words = _without_markup(text, record.kind)
    spans = list(cut(words))
    numbers = [number_terms(words[begin:end], new_terms) for begin, end in spans]
    terms = Terms(
        np.fromiter(chain(*numbers), np.int32),
        np.cumsum([len(passage) for passage in numbers], dtype=np.int64),
        new_terms,
    )
    places = np.array(spans, np.int64).reshape(-1, 2)
    return _Document(path, record, lambda: text, places, lambda: terms, is_stored=False)


def _without_markup(text: str, kind: str) -> str:
    """Return a text of the same length to search and to read; what is shown comes from the text itself."""
    return blank_markup(text) if kind == "md" else text


def _state(path: Path) -> tuple[int, ...]:
    try:
        return tuple(file_state(path))
    except OSError:  # removed a moment ago; reading it will give the reason
        return ()


def _renumber(terms: Sequence[Terms]) -> tuple[list[list[int]], dict[str, int]]:
    """Return the terms of all passages by the numbers of one vocabulary, which has only the terms that occur."""
    vocabulary: dict[str, int] = {}
    by_vocabulary: dict[int, list[Terms]] = {}
    for part in terms:
        by_vocabulary.setdefault(id(part.vocabulary), []).append(part)
    new_numbers: dict[int, NDArray[np.int32]] = {}
    for key, parts in by_vocabulary.items():
        names = list(parts[0].vocabulary)
        new_numbers[key] = np.zeros(len(names), np.int32)
        for number in np.unique(np.concatenate([part.numbers for part in parts])).tolist():
            new_numbers[key][number] = vocabulary.setdefault(names[number], len(vocabulary))
    passages: list[list[int]] = []
    for part in terms:
        numbers = new_numbers[id(part.vocabulary)][part.numbers].tolist()
        begins = [0, *part.ends.tolist()]
        passages += [numbers[begin:end] for begin, end in pairwise(begins)]
    return passages, vocabulary
