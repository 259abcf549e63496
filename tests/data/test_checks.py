"""The data doctor finds and locates every planted fault, and fixes it as documented."""

from __future__ import annotations

import copy
import json
import re
import tempfile
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from lamella.data.dataset import load_examples
from lamella.data.doctor.checks import Report, check
from lamella.data.doctor.fixes import diagnose, fix
from lamella.data.doctor.problems import KINDS, Problem
from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.formats import DataFile, read
from lamella.data.file_formats.writers import write_squad
from lamella.errors import DataError, UnreadableError

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "checks.md"

BEE = "A honey bee visits about 100 flowers in one flight. It dances to tell the others where they are."
HIVE = "A hive holds up to 60,000 bees in summer, and a single queen."
TIDE = "The Moon raises two tides a day. In the Bay of Fundy the water rises by 16 metres."


def valid_document() -> dict[str, Any]:
    """Return a valid SQuAD 2.0 document; each plant below adds a fault."""
    return {
        "version": "v2.0",
        "data": [
            {
                "title": "Bees",
                "paragraphs": [
                    {
                        "context": BEE,
                        "qas": [
                            question("bee-1", "How many flowers does a bee visit in a flight?", (BEE, "about 100")),
                            question("bee-2", "Why does a bee dance?", (BEE, "to tell the others where they are")),
                            question("bee-3", "How many flowers does a wasp visit?"),
                        ],
                    },
                    {"context": HIVE, "qas": [question("bee-4", "How many queens has a hive?", (HIVE, "a single"))]},
                ],
            },
            {
                "title": "Tides",
                "paragraphs": [
                    {"context": TIDE, "qas": [question("tide-1", "What raises the tides?", (TIDE, "The Moon"))]}
                ],
            },
        ],
    }


def question(id: str, text: str, *answers: tuple[str, str]) -> dict[str, Any]:
    entries = [{"text": answer, "answer_start": context.index(answer)} for context, answer in answers]
    return {"id": id, "question": text, "answers": entries, "is_impossible": not entries}


@dataclass
class Bed:
    """A valid document and its parts, in which faults are planted."""

    folder: Path
    document: dict[str, Any]

    @property
    def article(self) -> dict[str, Any]:
        return self.document["data"][0]

    @property
    def paragraph(self) -> dict[str, Any]:
        return self.article["paragraphs"][0]

    @property
    def qa(self) -> dict[str, Any]:
        return self.paragraph["qas"][0]

    @property
    def answer(self) -> dict[str, Any]:
        return self.qa["answers"][0]

    def save(self, document: Any = None, name: str = "data.json") -> str:
        return self.save_text(json.dumps(self.document if document is None else document), name)

    def save_text(self, text: str, name: str = "data.json") -> str:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def put_answer(self, text: str, begin: int) -> None:
        self.qa["answers"] = [{"text": text, "answer_start": begin}]

    def put_context(self, text: str, answer: str, begin: int) -> None:
        """Replace the first paragraph by another one with one question."""
        self.paragraph["context"] = text
        self.paragraph["qas"] = [self.qa]
        self.put_answer(answer, begin)


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path, valid_document())


@dataclass(frozen=True)
class Place:
    """The expected location of a planted fault."""

    article: str | None = None
    id: str | None = None
    line: int | None = None
    column: int | None = None
    paths: tuple[str, ...] = ()  # if the plant wrote its own files


BEE_1 = Place("Bees", "bee-1")
Plant = Callable[[Bed], Place]
PLANTS: dict[str, Plant] = {}


def plant(kind: str) -> Callable[[Plant], Plant]:
    def add(function: Plant) -> Plant:
        assert kind not in PLANTS
        PLANTS[kind] = function
        return function

    return add


def rows() -> list[dict[str, Any]]:
    return [
        {"title": article["title"], "context": paragraph["context"], **qa}
        for article in valid_document()["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]


@plant("broken_line")
def _(bed: Bed) -> Place:
    lines = [json.dumps(row) for row in rows()]
    lines[2] = '{"id": bee-3}'
    return Place(line=3, column=8, paths=(bed.save_text("\n".join(lines)),))


@plant("broken_csv_row")
def _(bed: Bed) -> Place:
    text = f'id,question,context,answers\na,Why dance?,"{BEE}",\nb,Where, then?,"{BEE}",\n'
    return Place(line=3, paths=(bed.save_text(text),))


@plant("duplicate_key")
def _(bed: Bed) -> Place:
    text = json.dumps(bed.document).replace('"id": "bee-1"', '"id": "bee-1", "id": "bee-1"')
    return Place("Bees", "bee-1", paths=(bed.save_text(text),))


@plant("not_a_number")
def _(bed: Bed) -> Place:
    bed.qa["score"] = float("nan")
    return BEE_1


@plant("lone_surrogate")
def _(bed: Bed) -> Place:
    bed.qa["note"] = "\ud83d"
    return BEE_1


@plant("no_questions")
def _(bed: Bed) -> Place:
    bed.document["data"] = []
    return Place()


@plant("missing_field")
def _(bed: Bed) -> Place:
    del bed.qa["question"]
    return BEE_1


@plant("missing_id")
def _(bed: Bed) -> Place:
    del bed.qa["id"]
    return Place("Bees", "data[0].paragraphs[0].qas[0]")


@plant("missing_answer_start")
def _(bed: Bed) -> Place:
    del bed.answer["answer_start"]
    return BEE_1


@plant("wrong_type_data")
def _(bed: Bed) -> Place:
    bed.document["data"] = "the articles"
    return Place()


@plant("wrong_type_article")
def _(bed: Bed) -> Place:
    bed.document["data"].append("Tides")
    return Place()


@plant("wrong_type_title")
def _(bed: Bed) -> Place:
    bed.article["title"] = 1984
    return Place()


@plant("wrong_type_paragraphs")
def _(bed: Bed) -> Place:
    bed.article["paragraphs"] = {"0": bed.paragraph}
    return Place("Bees")


@plant("wrong_type_paragraph")
def _(bed: Bed) -> Place:
    bed.article["paragraphs"].append(BEE)
    return Place("Bees")


@plant("wrong_type_context")
def _(bed: Bed) -> Place:
    bed.paragraph["context"] = [BEE]
    return Place("Bees")


@plant("wrong_type_qas")
def _(bed: Bed) -> Place:
    bed.paragraph["qas"] = {"0": bed.qa}
    return Place("Bees")


@plant("wrong_type_qa")
def _(bed: Bed) -> Place:
    bed.paragraph["qas"].append("Why does a bee dance?")
    return Place("Bees", "data[0].paragraphs[0].qas[3]")


@plant("wrong_type_id")
def _(bed: Bed) -> Place:
    bed.qa["id"] = 1.5
    return Place("Bees", "1.5")


@plant("wrong_type_question")
def _(bed: Bed) -> Place:
    bed.qa["question"] = ["How many flowers?"]
    return BEE_1


@plant("wrong_type_answers")
def _(bed: Bed) -> Place:
    bed.qa["answers"] = "about 100"
    return BEE_1


@plant("wrong_type_answer")
def _(bed: Bed) -> Place:
    bed.qa["answers"].append("about 100")
    return BEE_1


@plant("wrong_type_answer_text")
def _(bed: Bed) -> Place:
    bed.answer["text"] = 100
    return BEE_1


@plant("wrong_type_answer_start")
def _(bed: Bed) -> Place:
    bed.answer["answer_start"] = str(bed.answer["answer_start"])
    return BEE_1


@plant("wrong_type_is_impossible")
def _(bed: Bed) -> Place:
    bed.qa["is_impossible"] = "false"
    return BEE_1


@plant("wrong_type_group")
def _(bed: Bed) -> Place:
    bed.qa["group"] = ["bees"]
    return BEE_1


@plant("wrong_type_plausible_answers")
def _(bed: Bed) -> Place:
    bed.paragraph["qas"][2]["plausible_answers"] = 100
    return Place("Bees", "bee-3")


@plant("empty_article")
def _(bed: Bed) -> Place:
    bed.document["data"].append({"title": "Dunes", "paragraphs": []})
    return Place("Dunes")


@plant("empty_paragraph")
def _(bed: Bed) -> Place:
    bed.article["paragraphs"].append({"context": "Bees sleep.", "qas": []})
    return Place("Bees")


@plant("empty_context")
def _(bed: Bed) -> Place:
    bed.paragraph["context"] = " \n"
    return Place("Bees")


@plant("empty_question")
def _(bed: Bed) -> Place:
    bed.qa["question"] = "\t"
    return BEE_1


@plant("empty_answer")
def _(bed: Bed) -> Place:
    bed.put_answer(" ", 1)
    return BEE_1


@plant("empty_text_for_no_answer")
def _(bed: Bed) -> Place:
    bed.paragraph["qas"][2]["answers"] = [{"text": "", "answer_start": -1}]
    return Place("Bees", "bee-3")


@plant("impossible_with_answers")
def _(bed: Bed) -> Place:
    bed.qa["is_impossible"] = True
    return BEE_1


@plant("answerable_without_answers")
def _(bed: Bed) -> Place:
    bed.qa["answers"] = []
    return BEE_1


@plant("unlabelled")
def _(bed: Bed) -> Place:
    del bed.qa["answers"], bed.qa["is_impossible"]
    return BEE_1


@plant("plausible_on_answerable")
def _(bed: Bed) -> Place:
    bed.qa["plausible_answers"] = [{"text": "one", "answer_start": BEE.index("one")}]
    bed.paragraph["qas"][2]["plausible_answers"] = copy.deepcopy(bed.qa["answers"])  # correct use
    return BEE_1


@plant("answer_start_out_of_range")
def _(bed: Bed) -> Place:
    bed.answer["answer_start"] = 4000
    return BEE_1


@plant("answer_shifted")
def _(bed: Bed) -> Place:
    bed.answer["answer_start"] -= 3
    return BEE_1


@plant("offset_in_utf16")
def _(bed: Bed) -> Place:
    bed.put_context("🐝🐝 Bees dance.", "Bees", 5)
    return BEE_1


@plant("offset_in_utf8_bytes")
def _(bed: Bed) -> Place:
    bed.put_context("Für Bienen: they dance.", "they", 13)
    return BEE_1


@plant("offset_without_leading_space")
def _(bed: Bed) -> Place:
    bed.put_context("   Bees dance at noon.", "dance", 5)
    return BEE_1


@plant("offset_before_space")
def _(bed: Bed) -> Place:
    bed.answer["answer_start"] -= 1
    return BEE_1


@plant("answer_edge_space")
def _(bed: Bed) -> Place:
    bed.put_answer("about 100\n", BEE.index("about 100"))
    return BEE_1


@plant("answer_case")
def _(bed: Bed) -> Place:
    bed.put_answer("About 100", BEE.index("about 100"))
    return BEE_1


@plant("answer_whitespace")
def _(bed: Bed) -> Place:
    bed.put_answer("about\u00a0100", BEE.index("about 100"))
    return BEE_1


@plant("answer_unicode")
def _(bed: Bed) -> Place:
    bed.put_context("The café is full of bees.", unicodedata.normalize("NFD", "café"), 4)
    return BEE_1


@plant("answer_spelling")
def _(bed: Bed) -> Place:
    bed.put_context("The grand café is full of bees.", unicodedata.normalize("NFD", "Grand  Café"), 4)
    return BEE_1


@plant("answer_not_in_context")
def _(bed: Bed) -> Place:
    bed.put_answer("about ninety", BEE.index("about 100"))
    return BEE_1


@plant("plausible_answer_misplaced")
def _(bed: Bed) -> Place:
    bed.paragraph["qas"][2]["plausible_answers"] = [{"text": "about 100", "answer_start": 3}]
    return Place("Bees", "bee-3")


@plant("duplicate_question")
def _(bed: Bed) -> Place:
    bed.paragraph["qas"].append(copy.deepcopy(bed.qa))
    return BEE_1


@plant("duplicate_id")
def _(bed: Bed) -> Place:
    bed.document["data"][1]["paragraphs"][0]["qas"][0]["id"] = "bee-1"
    return Place("Tides", "bee-1")


@plant("question_in_two_files")
def _(bed: Bed) -> Place:
    # The context must not be in both files as a whole, or the leak of the context would be reported too.
    paths = bed.save(), bed.save({"data": [article_of("Bees", BEE, bed.qa)]}, "other.json")
    return Place("Bees", "bee-1", paths=paths)


@plant("id_in_two_files")
def _(bed: Bed) -> Place:
    other = article_of("Owls", "Owls hunt at night.", question("bee-1", "When do owls hunt?"))
    return Place("Owls", "bee-1", paths=(bed.save(), bed.save({"data": [other]}, "other.json")))


@plant("conflicting_answers")
def _(bed: Bed) -> Place:
    bed.paragraph["qas"].append(question("bee-9", bed.qa["question"].upper()))
    return Place("Bees", "bee-9")


@plant("context_in_two_files")
def _(bed: Bed) -> Place:
    other = article_of("The bee", BEE.replace(". ", ".\n"), question("owl-1", "Do owls dance?"))
    return Place("The bee", paths=(bed.save(), bed.save({"data": [other]}, "other.json")))


@plant("context_under_two_titles")
def _(bed: Bed) -> Place:
    bed.document["data"].append(article_of("Dances", BEE, question("dance-1", "Who taught them?")))
    return Place("Dances")


@plant("control_character")
def _(bed: Bed) -> Place:
    bed.qa["question"] += "\x00"
    return BEE_1


@plant("replacement_character")
def _(bed: Bed) -> Place:
    bed.paragraph["context"] += " Caf\ufffd."
    return Place("Bees")


@plant("mojibake")
def _(bed: Bed) -> Place:
    bed.paragraph["context"] += " The bee’s café.".encode().decode("cp1252")
    return Place("Bees")


@plant("question_cut")
def _(bed: Bed) -> Place:
    bed.qa["question"] = "Why " * 65
    return BEE_1


@plant("question_longer_than_window")
def _(bed: Bed) -> Place:
    bed.qa["question"] = "Why " * 400
    return BEE_1


@plant("unknown_tokens")
def _(bed: Bed) -> Place:
    bed.document["data"].append(article_of("Пчёлы", "Пчёлы танцуют.", question("ru-1", "Why does a bee dance?")))
    return Place()


def article_of(title: str, context: str, *qas: dict[str, Any]) -> dict[str, Any]:
    return {"title": title, "paragraphs": [{"context": context, "qas": list(qas)}]}


def word_tokenizer() -> Tokenizer:
    """Make a tokenizer for the words of the valid document that truncates and pads, like those of sentence encoders."""
    words = re.findall(r"\w+|[^\w\s]", json.dumps(valid_document(), ensure_ascii=False) + " Why")
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["[UNK]", *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    return tokenizer


NEEDS_TOKENIZER = {"question_cut", "question_longer_than_window", "unknown_tokens"}
ALSO_FOUND = {"question_in_two_files": {"context_in_two_files"}, "wrong_type_data": {"no_questions"}}


def examine(paths: tuple[str, ...], kind: str = "") -> tuple[list[DataFile], Report]:
    files = [read(path) for path in paths]
    return files, check(files, tokenizer=word_tokenizer() if kind in NEEDS_TOKENIZER else None)


def fixed_report(files: list[DataFile], report: Report, folder: Path) -> Report:
    """Return the report of the files after they are fixed, written and read again."""
    paths = []
    for number, file in enumerate(files):
        paths.append(folder / f"fixed-{number}.json")
        write_squad(fix(file, report.problems).examples, paths[-1])
    return check([read(path) for path in paths])


def test_the_valid_document_has_no_problems(bed: Bed) -> None:
    files, report = examine((bed.save(),))
    assert report.problems == ()
    assert len(files[0].examples) == 5


def test_every_kind_is_planted() -> None:
    assert set(PLANTS) == set(KINDS)


@pytest.mark.parametrize("kind", PLANTS)
def test_a_planted_fault_is_found_located_and_fixed(kind: str, bed: Bed) -> None:
    place = PLANTS[kind](bed)
    files, report = examine(place.paths or (bed.save(),), kind)
    assert {problem.kind for problem in report.problems} == {kind} | ALSO_FOUND.get(kind, set())
    (problem,) = (problem for problem in report.problems if problem.kind == kind)
    location = Place(problem.article, problem.id, problem.line, problem.column)
    assert location == Place(place.article, place.id, place.line, place.column)
    assert problem.file == files[-1].path
    assert "\n" not in str(problem)

    _, fixed, dropped = fix(files[-1], report.problems)
    assert problem.fixable == (KINDS[kind].fix is not None)
    assert fixed == problem.fixable
    assert dropped == ([problem] if problem.severity == "error" and not problem.fixable else [])
    assert fixed_report(files, report, bed.folder).errors == ()


def test_the_result_of_a_fix(bed: Bed) -> None:
    """One fault for each outcome: respelled, moved, renamed, answer dropped, question dropped."""
    bed.answer["text"] = "ABOUT 100"
    bed.answer["answer_start"] += 8
    bed.qa["answers"].append({"text": "ninety", "answer_start": 0})
    bed.paragraph["qas"][1]["answers"][0]["answer_start"] = -1
    bed.paragraph["qas"][2]["id"] = "bee-1"
    bed.article["paragraphs"][1]["qas"][0]["answers"] = [{"text": "two", "answer_start": 4}]
    (file,), report = examine((bed.save(),))
    examples, fixed, dropped = fix(file, report.problems)
    assert [example.answers for example in examples] == [
        (Answer("about 100", BEE.index("about 100")),),
        (Answer("to tell the others where they are", BEE.index("to tell")),),
        (),
        (Answer("The Moon", 0),),
    ]
    assert [example.id.rpartition("-")[0] for example in examples] == ["bee", "bee", "bee-1", "tide"]
    assert fixed == 3
    assert [problem.kind for problem in dropped] == ["answer_not_in_context"] * 2
    assert fix(file, report.problems).examples == examples


@pytest.mark.parametrize(
    ("context", "text", "begin", "kind", "fixed"),
    [
        ("a bee, a hive", "bee", 2, None, None),
        ("bee or bee", "bee", 5, "answer_shifted", ("bee", 7)),
        ("bee or bee", "bee", 2, "answer_shifted", ("bee", 0)),
        ("a bee", "bee", -2, "answer_start_out_of_range", ("bee", 2)),
        ("a bee", "bee", 10**30, "answer_start_out_of_range", ("bee", 2)),
        ("🐝 Bee", "Bee", 3, "offset_in_utf16", ("Bee", 2)),
        ("🐝 Bee", "Bee", 5, "offset_in_utf8_bytes", ("Bee", 2)),
        ("서울은 수도", "수도", 10, "offset_in_utf8_bytes", ("수도", 4)),
        ("  a bee", "bee", 2, "offset_without_leading_space", ("bee", 4)),
        ("a  bee", "bee", 1, "offset_before_space", ("bee", 3)),
        ("a bee.", " bee ", 2, "answer_edge_space", ("bee", 2)),
        ("a\tbee.", " bee", 1, "answer_edge_space", ("bee", 2)),
        ("Straße", "STRASSE", 0, "answer_case", ("Straße", 0)),
        ("the Bee", "bee", 1, "answer_case", ("Bee", 4)),
        ("honey\n\u200bbee", "honey bee", 0, "answer_whitespace", ("honey\n\u200bbee", 0)),
        ("honey bee", "honey  bee", 0, "answer_whitespace", ("honey bee", 0)),
        ("ﬁve bees", "five", 0, "answer_unicode", ("ﬁve", 0)),
        (
            unicodedata.normalize("NFD", "한국 수도"),
            "수도",
            3,
            "answer_unicode",
            (unicodedata.normalize("NFD", "수도"), 7),
        ),
        ("Ångström", "ångstro\u0308m", 0, "answer_spelling", ("Ångström", 0)),
        ("käse", "ka", 0, "answer_not_in_context", None),
        (unicodedata.normalize("NFD", "한"), "하", 0, "answer_not_in_context", None),
        ("a bee", "wasp", 2, "answer_not_in_context", None),
        ("a bee", "\u200b", 0, "answer_not_in_context", None),
        ("a bee", "", 2, "empty_answer", None),
    ],
)
def test_the_cause_of_a_misplaced_answer(
    context: str, text: str, begin: int, kind: str | None, fixed: tuple[str, int] | None
) -> None:
    diagnosis = diagnose(Answer(text, begin), context)
    assert (diagnosis and diagnosis.kind) == kind
    assert (diagnosis and diagnosis.answer) == (fixed and Answer(*fixed))


TEXTS = st.text("aAbB  \n\u00a0\u200béÉe\u0301ß한하\u1112\u1161ﬁ🐝", max_size=30)


@given(TEXTS, TEXTS, st.integers(-40, 80))
def test_a_fixed_answer_is_always_in_the_context(context: str, text: str, begin: int) -> None:
    diagnosis = diagnose(Answer(text, begin), context)
    answer = Answer(text, begin) if diagnosis is None else diagnosis.answer
    if answer is not None:
        assert answer.text.strip()
        assert answer.begin_char >= 0
        assert context[answer.begin_char : answer.end_char] == answer.text


@given(TEXTS, st.data())
def test_an_answer_of_the_context_is_always_found(context: str, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, len(context)))
    text = context[begin : data.draw(st.integers(begin, len(context)))]
    claimed = begin + data.draw(st.integers(-50, 50))
    diagnosis = diagnose(Answer(text, claimed), context)
    if text.strip():
        assert (diagnosis is None) == (claimed >= 0 and context[claimed : claimed + len(text)] == text)
        assert diagnosis is None or diagnosis.answer is not None
    else:
        assert diagnosis is not None
        assert diagnosis.kind == "empty_answer"


def places_in(value: Any) -> list[tuple[str | int, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(), *((key, *rest) for key in keys for rest in places_in(value[key]))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.sampled_from(["", " ", "bee-2", BEE, "\ud83d"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "answer_start", "id", "question", "context", "qas", "paragraphs", "answers"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(places_in(valid_document())[1:]), JSON), min_size=1, max_size=3))
def test_a_fixed_file_has_no_errors_whatever_was_planted(plants: list[tuple[tuple[str | int, ...], Any]]) -> None:
    document = valid_document()
    for path, value in plants:
        owner: Any = document
        try:
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier plant removed this position
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        try:
            file = read(path)
        except UnreadableError:
            return  # the document has no known format any more
        report = check([file])
        assert fixed_report([file], report, Path(folder)).errors == ()
        assert all("\n" not in str(problem) for problem in report.problems)
        json.dumps(report.to_json(), allow_nan=False)


def test_a_repeated_question_about_several_contexts_keeps_its_examples_together(bed: Bed) -> None:
    def entry(text: str, *contents: str) -> dict[str, Any]:
        paragraphs = [{"title": "t", "contents": content} for content in contents]
        return {"qa": {"id": "q", "question": text, "answer": "Rome"}, "paragraphs": paragraphs}

    path = bed.save({"data": [entry("Where?", "In Rome.", "In Oslo."), entry("Whence?", "From Rome.", "No.", "Ah.")]})
    (file,), report = examine((path,))
    assert [problem.kind for problem in report.problems] == ["duplicate_id"] * 3
    examples = fix(file, report.problems).examples
    assert [example.group == "q" for example in examples] == [True, True, False, False, False]
    assert len({example.group for example in examples}) == 2
    assert fixed_report([file], report, bed.folder).errors == ()


def test_three_files_with_the_same_id_have_no_errors_after_the_fix(bed: Bed) -> None:
    owls = {"data": [article_of("Owls", "Owls hunt at night.", question("bee-1", "When do owls hunt?"))]}
    files, report = examine((bed.save(), bed.save(owls, "b.json"), bed.save(owls, "c.json")))
    assert [problem.kind for problem in report.errors] == ["id_in_two_files", "question_in_two_files"]
    assert files[1].path in report.errors[1].reason
    assert fixed_report(files, report, bed.folder).errors == ()


def test_a_question_about_several_contexts_is_reported_once(bed: Bed) -> None:
    paragraphs = [{"title": "t", "contents": f"Context {number}."} for number in range(5)]
    entry = {"qa": {"id": "q", "question": "Bad\ufffd?", "answer": "x"}, "paragraphs": paragraphs}
    _, report = examine((bed.save({"data": [entry]}),))
    assert [problem.kind for problem in report.problems] == ["replacement_character"]


def test_pooled_contexts_leak_only_if_they_contain_an_answer(bed: Bed) -> None:
    def save(id: str, answer: str, name: str) -> str:
        paragraphs = [{"title": "t", "contents": "In Rome."}, {"title": "t", "contents": "In Oslo."}]
        entry = {"qa": {"id": id, "question": f"Where is {id}?", "answer": answer}, "paragraphs": paragraphs}
        return bed.save({"data": [entry]}, name)

    _, report = examine((save("a", "Rome", "a.json"), save("b", "Oslo", "b.json")))
    assert report.problems == ()
    _, report = examine((save("a", "Rome", "a.json"), save("b", "Rome", "b.json")))
    assert [problem.kind for problem in report.problems] == ["context_in_two_files"]


def test_answers_that_overlap_do_not_conflict(bed: Bed) -> None:
    bed.paragraph["qas"].append(question("bee-9", bed.qa["question"], (BEE, "100")))
    assert examine((bed.save(),))[1].problems == ()


@pytest.mark.parametrize("text", ["CAFÉ\u00a0» — 4\u00a0×\u00a0100", "“Å” Ñandú È – « à »", "서울 東京 “Ð”"])
def test_correct_letters_are_not_mojibake(text: str, bed: Bed) -> None:
    bed.paragraph["context"] += text
    assert examine((bed.save(),))[1].problems == ()


@pytest.mark.parametrize("text", ["é", "’", "Да", "한국어", "š", "🎉", "🐝", "\u00a0", "\ufeff"])
def test_utf8_read_as_windows_1252_is_mojibake(text: str, bed: Bed) -> None:
    wrong = "".join(bytes([byte]).decode("latin-1" if byte in UNDEFINED else "cp1252") for byte in text.encode())
    bed.paragraph["context"] += wrong
    (problem,) = (problem for problem in examine((bed.save(),))[1].problems if problem.kind == "mojibake")
    original = re.search("was '(.+)' before it was decoded wrongly$", problem.reason)
    assert original is not None
    assert original[1] in text or original[1] == repr(text)[1:-1]


UNDEFINED = {0x81, 0x8D, 0x8F, 0x90, 0x9D}  # undefined in Windows-1252; lenient decoders map them to C1 controls


def test_statistics(bed: Bed) -> None:
    (statistics,) = examine((bed.save(),))[1].statistics
    counts = (statistics.articles, statistics.contexts, statistics.questions, statistics.unanswerable)
    assert (statistics.format, statistics.version, *counts) == (
        "squad", "v2.0", 2, 3, 5, 1
    )  # fmt: skip
    assert statistics.context_length.longest == len(BEE)
    assert statistics.context_length.mean == pytest.approx((len(BEE) + len(HIVE) + len(TIDE)) / 3, abs=0.05)
    assert statistics.tokens is None


def test_tokens_are_counted_without_truncation_and_per_script(bed: Bed) -> None:
    PLANTS["unknown_tokens"](bed)
    bed.qa["question"] = "Why " * 65
    tokenizer = word_tokenizer()
    report = check([read(bed.save())], tokenizer=tokenizer)
    tokens = report.statistics[0].tokens
    assert tokens is not None
    assert tokens.questions.longest == 65
    assert tokens.questions_cut == 1
    assert (tokens.scripts["cyrillic"].tokens, tokens.scripts["cyrillic"].unknown_rate) == (3, 2 / 3)
    assert tokens.scripts["latin"].unknown == 0
    assert tokenizer.truncation is not None  # the tokenizer of the caller is unchanged
    (problem,) = (problem for problem in report.problems if problem.kind == "unknown_tokens")
    assert problem.reason.startswith("cyrillic: 66.7%")


def test_training_refuses_a_file_with_errors_in_one_line(bed: Bed) -> None:
    bed.answer["answer_start"] += 1
    bed.paragraph["qas"][1]["question"] = ""
    path = bed.save()
    with pytest.raises(DataError) as refusal:
        load_examples([path])
    message = str(refusal.value)
    assert "\n" not in message
    assert f"{path}: 2 errors" in message
    assert f"lamella check {path}" in message
    assert "set on_bad_answer to fix or skip (--on-bad-answer on the command line)" in message


def test_training_fixes_or_skips_faulty_questions(bed: Bed) -> None:
    bed.answer["answer_start"] += 1
    bed.paragraph["qas"][1]["question"] = ""
    del bed.article["paragraphs"][1]["context"]
    path = bed.save()
    fixed = load_examples([path], on_bad_answer="fix")
    assert [example.id for example in fixed.examples] == ["bee-1", "bee-3", "tide-1"]
    assert (fixed.fixed, fixed.skipped) == (1, 2)
    skipped = load_examples([path], on_bad_answer="skip")
    assert [example.id for example in skipped.examples] == ["bee-3", "tide-1"]
    assert (skipped.fixed, skipped.skipped) == (0, 3)
    ignored = load_examples([path], on_bad_answer="ignore")
    assert [example.id for example in ignored.examples] == ["bee-1", "bee-2", "bee-3", "tide-1"]
    assert (ignored.fixed, ignored.skipped) == (0, 1)


def test_training_accepts_and_counts_warnings(bed: Bed) -> None:
    assert load_examples([bed.save()]).warnings == 0
    PLANTS["control_character"](bed)
    loaded = load_examples([bed.save()])
    assert (len(loaded.examples), loaded.fixed, loaded.skipped, loaded.warnings) == (5, 0, 0, 1)


@pytest.mark.parametrize("start", [int("9" * 309), -int("9" * 309), 1e300, "9" * 309])
def test_a_problem_shows_the_beginning_of_a_long_value(start: Any, bed: Bed) -> None:
    bed.answer["answer_start"] = start
    bed.qa["id"] = "x" * 5000
    _, report = examine((bed.save(),))
    assert report.errors
    for problem in report.errors:
        assert len(problem.reason) < 300
        assert len(str(problem)) < 700 + len(problem.file)
        assert "…" in str(problem)


def test_training_refuses_an_empty_file(bed: Bed) -> None:
    bed.document["data"] = []
    with pytest.raises(DataError, match="no usable question is left"):
        load_examples([bed.save()])


def test_a_file_given_twice_is_read_once(bed: Bed) -> None:
    path = bed.save()
    assert len(load_examples([path, Path(path)]).examples) == 5


def test_the_reference_page_lists_exactly_the_known_kinds() -> None:
    def row(kind: str) -> tuple[str, ...]:
        severity, fix, meaning = KINDS[kind]
        return (
            f"`{kind}`",
            severity,
            fix or ("Drops it." if severity == "error" else "Nothing."),
            meaning,
        )

    lines = REFERENCE.read_text(encoding="utf-8").splitlines()
    listed = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("| `")]
    assert listed == [row(kind) for kind in KINDS]


def test_a_problem_must_be_of_a_known_kind() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        Problem("bad_luck", "data.json", "it rained")


@pytest.mark.parametrize("name", ["demo:train", "demo:dev"])
def test_the_bundled_files_have_no_problems(name: str) -> None:
    assert check([read(name)]).problems == ()


@pytest.mark.parametrize(
    ("name", "most_warnings"),
    [
        ("cs224n-dev.json.gz", 5),
        ("KorQuAD_v1.0_dev.json", 1),
        ("squad-train-human.json.gz", 2),
        ("hotpot-multicontext-dev.json.gz", 12),
    ],
)
def test_published_files_have_no_errors_and_few_warnings(name: str, most_warnings: int, real_data: Path) -> None:
    report = check([read(real_data / name)])
    assert report.errors == ()
    assert len(report.warnings) <= most_warnings


def test_an_empty_context_is_located_by_its_questions() -> None:
    context = Context(" ")
    blank = tuple(Example(id, "Where?", context, ()) for id in ("q1", "q2", "q3"))
    problems = check([DataFile("memory", "flat", None, blank, ())]).problems
    reasons = [problem.reason for problem in problems if problem.kind == "empty_context"]
    assert reasons == ["context ' ' is empty (question 'q1' and 2 more)"]


def test_examples_made_in_python_can_be_checked() -> None:
    broken = Example("q", "Where?", Context("In Rome."), (Answer("Oslo", 3),))
    report = check([DataFile("memory", "flat", None, (broken,), ())])
    assert [problem.kind for problem in report.problems] == ["answer_not_in_context"]
