"""Formats are recognised by content; faults are reported with their positions, and the rest is read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella import registry
from lamella.data.examples import Answer, Context, Example
from lamella.data.file_formats.formats import DataFile, read
from lamella.errors import LamellaError, UnknownNameError, UnreadableError

SEOUL = "서울은 대한민국의 수도이다. 한강이 흐른다."
ELBE = "The Elbe flows through Dresden and Hamburg. Near Hamburg it is wide."


def row(**changes: Any) -> dict[str, Any]:
    valid = {
        "id": "e1",
        "title": "Elbe",
        "question": "Where is it wide?",
        "context": ELBE,
        "answers": [{"text": "Near Hamburg", "answer_start": ELBE.index("Near")}],
    }
    return {**valid, **changes}


def nested(context: str = ELBE, version: str | None = "v2.0", **changes: Any) -> dict[str, Any]:
    qa = row(**changes)
    title, _ = qa.pop("title"), qa.pop("context")
    document = {"data": [{"title": title, "paragraphs": [{"context": context, "qas": [qa]}]}]}
    return document if version is None else {"version": version, **document}


def multi_context(**changes: Any) -> dict[str, Any]:
    qa = {"id": "m1", "question": "Which city?", "answer": "Hamburg", **changes}
    paragraphs = [{"title": "Elbe", "contents": ELBE}, {"title": "Oslo", "contents": "Oslo is by the sea."}]
    return {"data": [{"qa": qa, "paragraphs": paragraphs}]}


def as_csv(*rows: dict[str, Any], delimiter: str = ",") -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_lines(*rows: Any) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in rows)


CSV_ROW = {"id": "e1", "question": "Where is it wide?", "context": ELBE, "answers": "Near Hamburg"}
CONTENTS = {
    "nested": (json.dumps(nested()), "squad"),
    "nested, indented": (json.dumps(nested(), indent=4), "squad"),
    "nested 1.1": (json.dumps(nested(version="1.1")), "squad"),
    "a list of articles": (json.dumps(nested()["data"]), "squad"),
    "articles, a line each": (as_lines(*nested()["data"] * 2), "squad"),
    "Korean": (json.dumps(nested(SEOUL, version=None, answers=[{"text": "서울", "answer_start": 0}])), "korquad"),
    "KorQuAD by its version": (json.dumps(nested(version="KorQuAD_v1.0_dev")), "korquad"),
    "a list of rows": (json.dumps([row()]), "flat"),
    "rows under data": (json.dumps({"version": "0.1.0", "data": [row()]}), "flat"),
    "one row": (json.dumps(row()), "flat"),
    "JSONL": (as_lines(row(), row(id="e2")), "flat"),
    "CSV": (as_csv(CSV_ROW), "flat"),
    "CSV with semicolons": (as_csv(CSV_ROW, delimiter=";"), "flat"),
    "CSV with tabs": (as_csv(CSV_ROW, delimiter="\t"), "flat"),
    "several contexts": (json.dumps(multi_context()), "multi_context"),
}


def read_text(folder: Path, text: str, name: str = "data") -> DataFile:
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return read(path)


def only(file: DataFile) -> Example:
    assert file.problems == ()
    (example,) = file.examples
    return example


def kinds(file: DataFile) -> list[str]:
    return [problem.kind for problem in file.problems]


@pytest.mark.parametrize("name", ["data.json", "data.jsonl", "data.csv", "data.gz", "data"])
@pytest.mark.parametrize("content", CONTENTS)
def test_the_format_is_recognised_by_content_not_by_name(content: str, name: str, tmp_path: Path) -> None:
    text, format = CONTENTS[content]
    plain = read_text(tmp_path, text, name)
    assert plain.format == format
    assert plain.examples
    assert plain.problems == ()
    for data in (gzip.compress(text.encode()), b"\xef\xbb\xbf" + text.encode(), text.encode() + b"\r\n\r\n"):
        (tmp_path / name).write_bytes(data)
        again = read(tmp_path / name)
        assert (again.format, len(again.examples)) == (format, len(plain.examples))


def test_every_format_is_recognised_by_some_content() -> None:
    assert {format for _, format in CONTENTS.values()} == set(registry.names("format"))


def test_a_nested_file(tmp_path: Path) -> None:
    plausible = [{"text": "Dresden", "answer_start": ELBE.index("Dresden")}]
    document = nested()
    document["data"][0]["paragraphs"][0]["qas"].append(
        {"id": "e2", "question": "Who?", "answers": [], "is_impossible": True, "plausible_answers": plausible}
    )
    file = read_text(tmp_path, json.dumps(document))
    first, second = file.examples
    assert (file.path, file.version, file.problems) == (str(tmp_path / "data"), "v2.0", ())
    assert (first.id, first.question, first.group) == ("e1", "Where is it wide?", None)
    assert (first.context.text, first.context.title) == (ELBE, "Elbe")
    assert first.answers == (Answer("Near Hamburg", 44),)
    assert second.answers == ()
    assert second.plausible_answers == (Answer("Dresden", 23),)
    assert second.context is first.context


@pytest.mark.parametrize(
    "answers",
    [
        [{"text": "Near Hamburg", "answer_start": 44}],
        {"text": ["Near Hamburg"], "answer_start": [44]},
        {"text": "Near Hamburg", "answer_start": 44},
        ["Near Hamburg"],
        "Near Hamburg",
    ],
)
def test_the_notations_of_answers_in_a_flat_row(answers: Any, tmp_path: Path) -> None:
    assert only(read_text(tmp_path, json.dumps([row(answers=answers)]))).answers == (Answer("Near Hamburg", 44),)
    cell = answers if isinstance(answers, str) else json.dumps(answers)
    assert only(read_text(tmp_path, as_csv(row(answers=cell)))).answers == (Answer("Near Hamburg", 44),)
    cell = answers if isinstance(answers, str) else repr(answers)
    assert only(read_text(tmp_path, as_csv(row(answers=cell)))).answers in (
        (Answer("Near Hamburg", 44),),
        (Answer("['Near Hamburg']", 0),),  # a Python list of texts is read as one text
    )


@pytest.mark.parametrize("answers", [[], {}, {"text": [], "answer_start": []}, ""])
def test_a_flat_row_without_answers_is_unanswerable(answers: Any, tmp_path: Path) -> None:
    assert only(read_text(tmp_path, json.dumps([row(answers=answers)]))).answers == ()
    cell = answers if isinstance(answers, str) else json.dumps(answers)
    assert only(read_text(tmp_path, as_csv(row(answers=cell)))).answers == ()


def test_a_plain_answer_that_occurs_several_times_is_placed_at_the_first_and_reported(tmp_path: Path) -> None:
    file = read_text(tmp_path, as_csv({**CSV_ROW, "answers": "Hamburg"}))
    assert file.examples[0].answers == (Answer("Hamburg", 35),)
    (problem,) = file.problems
    assert problem.kind == "missing_answer_start"
    assert problem.reason == "line 2.answers[0]: 'Hamburg' occurs 2 times in the context; expected answer_start"


ASKED = {"id": "e1", "question": "Where is it wide?", "context": ELBE}


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"answer": "Dresden"}, (Answer("Dresden", 23),)),
        ({"answer_text": "Dresden"}, (Answer("Dresden", 23),)),
        ({"answer_text": "Hamburg", "answer_start": 49}, (Answer("Hamburg", 49),)),
        ({"answer": "Hamburg", "answer_start": 49}, (Answer("Hamburg", 49),)),
        ({"answers": "Hamburg", "answer_start": 49}, (Answer("Hamburg", 49),)),
        ({"answer_text": "", "answer_start": -1}, ()),
        ({"answer": ""}, ()),
    ],
)
def test_the_names_of_an_answer_in_a_flat_row(fields: dict[str, Any], answers: Any, tmp_path: Path) -> None:
    for text in (json.dumps([ASKED | fields]), as_csv(ASKED | fields), as_csv(ASKED | fields, delimiter="\t")):
        assert only(read_text(tmp_path, text)).answers == answers


def test_several_texts_with_their_offsets_beside_them(tmp_path: Path) -> None:
    fields = {"answer_text": ["Hamburg", "Near Hamburg"], "answer_start": [49, 44]}
    expected = (Answer("Hamburg", 49), Answer("Near Hamburg", 44))
    assert only(read_text(tmp_path, json.dumps([ASKED | fields]))).answers == expected
    file = read_text(tmp_path, json.dumps([ASKED | fields | {"answer_start": [49]}]))
    assert kinds(file) == ["missing_answer_start"]
    assert "[0].answer_text: expected an answer_start for each of 2 texts, got 1" in file.problems[0].reason


@pytest.mark.parametrize("start", ["49", "49.0", " 49 "])
def test_offsets_in_csv_cells_are_numbers(start: str, tmp_path: Path) -> None:
    text = as_csv(ASKED | {"answer_text": "Hamburg", "answer_start": start})
    assert only(read_text(tmp_path, text)).answers == (Answer("Hamburg", 49),)
    file = read_text(tmp_path, as_csv(ASKED | {"answer_text": "Hamburg", "answer_start": "there"}))
    assert kinds(file) == ["wrong_type_answer_start"]


@pytest.mark.parametrize("answers", [{"text": "Dresden"}, [{"text": "Dresden"}], {"text": ["Dresden"]}])
def test_an_answer_of_a_flat_row_needs_no_offset_if_it_occurs_once(answers: Any, tmp_path: Path) -> None:
    assert only(read_text(tmp_path, json.dumps([row(answers=answers)]))).answers == (Answer("Dresden", 23),)
    assert kinds(read_text(tmp_path, json.dumps(nested(answers=[{"text": "Dresden"}])))) == ["missing_answer_start"]


def test_a_null_field_is_called_null_and_an_absent_one_missing(tmp_path: Path) -> None:
    def reasons(document: Any) -> list[str]:
        return [problem.reason for problem in read_text(tmp_path, json.dumps(document)).problems]

    where = "data[0].paragraphs[0].qas[0]"
    assert reasons(nested(question=None)) == [f"{where}.question is null"]
    assert reasons(nested(answers=[{"text": None, "answer_start": 0}])) == [f"{where}.answers[0].text is null"]
    assert reasons(nested(answers=[{"answer_start": 0}])) == [f"{where}.answers[0].text is missing"]
    start = nested(answers=[{"text": "Dresden", "answer_start": None}])
    assert reasons(start) == [f"{where}.answers[0].answer_start is null"]
    assert reasons(multi_context(answer=None)) == ["data[0].qa.answer is null; treated as unanswerable"]
    absent = nested()
    del absent["data"][0]["paragraphs"][0]["context"]
    assert reasons(absent) == ["data[0].paragraphs[0].context is missing"]


@pytest.mark.parametrize("group", [5, ["a"], True])
def test_a_group_of_another_type_is_reported(group: Any, tmp_path: Path) -> None:
    file = read_text(tmp_path, json.dumps([row(group=group)]))
    assert kinds(file) == ["wrong_type_group"]
    assert file.examples[0].group == ("5" if group == 5 else None)


def test_lines_of_other_types_among_jsonl_are_reported(tmp_path: Path) -> None:
    file = read_text(tmp_path, as_lines(row(), 5, None, "x", row(id="e2")))
    assert [example.id for example in file.examples] == ["e1", "e2"]
    assert [(problem.kind, problem.line) for problem in file.problems] == [
        ("wrong_type_article", line) for line in (2, 3, 4)
    ]


def test_a_csv_file_may_end_its_lines_with_cr(tmp_path: Path) -> None:
    text = as_csv(CSV_ROW).replace("\r\n", "\r")
    assert only(read_text(tmp_path, text)).answers == (Answer("Near Hamburg", 44),)


def test_csv_cells(tmp_path: Path) -> None:
    text = as_csv(
        {"ID": "1", " Question ": "Multi\nline?", "context": 'It says "yes", then\r\nno.', "answers": '"yes"'},
        {"ID": "2", " Question ": "Why?", "context": "x" * 200_000, "answers": ""},
    )
    limit = csv.field_size_limit()
    first, second = read_text(tmp_path, text).examples
    assert (first.id, first.question, first.context.text) == ("1", "Multi\nline?", 'It says "yes", then\r\nno.')
    assert first.answers == (Answer('"yes"', 8),)
    assert len(second.context.text) == 200_000
    assert csv.field_size_limit() == limit
    file = read_text(
        tmp_path, as_csv({**CSV_ROW, "is_impossible": "TRUE"}, {**CSV_ROW, "id": "2", "is_impossible": "0"})
    )
    assert kinds(file) == ["impossible_with_answers"]


@pytest.mark.parametrize(
    ("columns", "cells"),
    [("answers,answer", ",Rome"), ("answer,answer_text,answer_start", ",Rome,3"), ("answers,answer", "Rome,")],
)
def test_an_empty_cell_does_not_hide_the_answer_in_another(columns: str, cells: str, tmp_path: Path) -> None:
    rows = f"id,question,context,{columns}\na,Where?,In Rome.,{cells}\nb,Where?,In Rome.{',' * columns.count(',')},\n"
    answered, unanswerable = read_text(tmp_path, rows).examples
    assert answered.answers == (Answer("Rome", 3),)
    assert not unanswerable.answerable


def test_broken_csv_rows_are_skipped(tmp_path: Path) -> None:
    good = f'"a","Why?","{ELBE}","Dresden"\n'
    text = f'id,question,context,answers\n{good}"b" oops,"Why?","x",""\nc,Why?\n\n{good.replace("a", "d", 1)}"e","Why?'
    file = read_text(tmp_path, text)
    assert [example.id for example in file.examples] == ["a", "d"]
    assert [(problem.kind, problem.line) for problem in file.problems] == [
        ("broken_csv_row", 3), ("broken_csv_row", 4), ("broken_csv_row", 7)
    ]  # fmt: skip
    assert file.unread == 3


def test_broken_lines_are_skipped(tmp_path: Path) -> None:
    second = json.dumps(row(id="e2", question="Is U+2028 (\u2028) no line end?"), ensure_ascii=False)
    text = f'{json.dumps(row())}\n\n{{"id": \n{second}\n'
    file = read_text(tmp_path, text)
    assert [example.id for example in file.examples] == ["e1", "e2"]
    (problem,) = file.problems
    assert (problem.kind, problem.line, problem.id, file.unread) == ("broken_line", 3, None, 1)
    assert problem.column is not None


def test_equal_contexts_of_rows_are_shared(tmp_path: Path) -> None:
    file = read_text(
        tmp_path, as_lines(row(), row(id="e2"), row(id="e3", title="Other"), row(id="e4", context="x Near"))
    )
    first, second, third, fourth = (example.context for example in file.examples)
    assert first is second
    assert len({first, third, fourth}) == 3


def test_a_question_about_several_contexts(tmp_path: Path) -> None:
    first, second = read_text(tmp_path, json.dumps(multi_context())).examples
    assert (first.id, first.group, first.answers) == ("m1#0", "m1", (Answer("Hamburg", 35),))
    assert (second.id, second.group, second.answers) == ("m1#1", "m1", ())
    assert (second.context.title, second.context.text) == ("Oslo", "Oslo is by the sea.")
    several = read_text(tmp_path, json.dumps(multi_context(answer=["sea", "Hamburg", "sea"])))
    assert [example.answers for example in several.examples] == [(Answer("Hamburg", 35),), (Answer("sea", 15),)]


def test_an_integer_is_an_id(tmp_path: Path) -> None:
    line = {"id": 17, "question": "Where?", "context": "In Oslo.", "answer": "Oslo"}
    file = read_text(tmp_path, json.dumps(line), "flat")
    assert ([example.id for example in file.examples], file.problems) == (["17"], ())


def test_questions_about_several_contexts_need_no_id(tmp_path: Path) -> None:
    document = {"data": [multi_context(id=None)["data"][0], multi_context(id=None)["data"][0]]}
    file = read_text(tmp_path, json.dumps(document))
    assert file.problems == ()
    assert len({example.id for example in file.examples}) == 4
    assert len({example.group for example in file.examples}) == 2
    again = read_text(tmp_path, json.dumps(document), "elsewhere")
    assert [example.id for example in again.examples] == [example.id for example in file.examples]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"answer": ""}, "empty_answer"),
        ({"answer": 5}, "wrong_type_answers"),
        ({"answer": ["Hamburg", None]}, "wrong_type_answers"),
        ({"question": None}, "missing_field"),
        ({"question": 5}, "wrong_type_question"),
    ],
)
def test_a_faulty_question_about_several_contexts_is_skipped(change: Any, kind: str, tmp_path: Path) -> None:
    document = multi_context(**change)
    document["data"].append(multi_context(id="m2")["data"][0])
    file = read_text(tmp_path, json.dumps(document))
    assert kinds(file) == [kind]
    assert file.problems[0].id == "m1"
    assert [example.id for example in file.examples] == ["m2#0", "m2#1"]
    assert file.unread == 1


def test_a_problem_of_all_questions_is_reported_once(tmp_path: Path) -> None:
    unlabelled = [{"question": f"Where {number}?", "context": ELBE} for number in range(3)]
    for text in (json.dumps(unlabelled), as_lines(*unlabelled), as_csv(*unlabelled)):
        file = read_text(tmp_path, text)
        assert [(problem.kind, problem.id) for problem in file.problems] == [("missing_id", None), ("unlabelled", None)]
        assert len({example.id for example in file.examples}) == 3
    entries = [multi_context(id=name, answer=None)["data"][0] for name in "ab"]
    assert kinds(read_text(tmp_path, json.dumps(entries))) == ["unlabelled"]


def test_a_test_set_without_answers_is_read(tmp_path: Path) -> None:
    file = read_text(tmp_path, json.dumps(nested(answers=[], is_impossible=False)))
    assert len(file.examples) == 1
    assert kinds(file) == ["answerable_without_answers"]


def test_faults_without_a_name_are_located_by_index(tmp_path: Path) -> None:
    document = nested(id=None)
    del document["data"][0]["title"]
    document["data"][0]["paragraphs"][0]["qas"].append(7)
    missing, wrong = read_text(tmp_path, json.dumps(document)).problems
    assert (missing.article, missing.id) == ("data[0]", "data[0].paragraphs[0].qas[0]")
    assert (wrong.article, wrong.id) == ("data[0]", "data[0].paragraphs[0].qas[1]")


def test_a_bad_answer_does_not_drop_the_other_answers(tmp_path: Path) -> None:
    answers = [{"answer_start": 3}, {"text": "Near Hamburg", "answer_start": 44}, 5]
    file = read_text(tmp_path, json.dumps(nested(answers=answers)))
    assert kinds(file) == ["missing_field", "wrong_type_answer"]
    assert file.examples[0].answers == (Answer("Near Hamburg", 44),)
    file = read_text(tmp_path, json.dumps(nested(answers=answers[::2])))
    assert (file.examples, file.unread) == ((), 1)  # reading it as unanswerable would be wrong


@pytest.mark.parametrize(
    ("start", "read_as"), [("44", 44), (44.0, 44), ("near the end", 35), (True, 35), ([44], 35), (44.5, 35)]
)
def test_offsets_written_as_other_types(start: Any, read_as: int, tmp_path: Path) -> None:
    text = "Near Hamburg" if read_as == 44 else "Hamburg"
    file = read_text(tmp_path, json.dumps(nested(answers=[{"text": text, "answer_start": start}])))
    assert kinds(file) == ["wrong_type_answer_start"]
    assert file.examples[0].answers == (Answer(text, read_as),)


def test_surrogates(tmp_path: Path) -> None:
    text = json.dumps(nested(question="\ud83d\ude00 and \ud83d?", answers=[], is_impossible=True))
    file = read_text(tmp_path, text)
    assert file.examples[0].question == "😀 and \ufffd?"  # a pair is a character, half a pair is not
    (problem,) = file.problems
    assert (problem.kind, problem.article, problem.id) == ("lone_surrogate", "Elbe", "e1")
    assert "\\ud83d" in problem.reason
    assert problem.reason.isascii()


def test_repeated_keys_and_constants_are_located(tmp_path: Path) -> None:
    text = as_lines(row(), row(id="e2")).replace('"id": "e2"', '"id": "e2", "score": NaN, "score": -Infinity')
    file = read_text(tmp_path, text)
    assert [(problem.kind, problem.id, problem.line) for problem in file.problems] == [
        ("duplicate_key", "e2", 2), ("not_a_number", "e2", 2)
    ]  # fmt: skip
    assert len(file.examples) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b'{"data": [\n  {"title": }]}', ":2:13: broken JSON"),
        (b'{"data": []} {}', ":1:14: broken JSON"),
        (b'{"data": "caf\xe9"}', "got byte 0xe9 at position 13 (probably cp1252)"),
        ('{"data": []}'.encode("utf-16")[:-1], "expected UTF-16 text, got byte 0x7d at position 24"),
        ('{"data": []}'.encode("utf-16-le"), "got zero bytes (probably utf-16-le); save it as UTF-8, or convert it"),
        ('{"data": "é"}'.encode("utf-16-be"), "(probably utf-16-be); save it as UTF-8, or convert it: lamella convert"),
        (gzip.compress(b'{"data": []}', mtime=0)[:-9], "truncated or damaged"),
        (b"\x1f\x8b and then nothing", "truncated or damaged"),
        (b'{"a": 1, "b": 2}', "unknown format: got the keys 'a', 'b'; expected one of: flat"),
        (b'[{"text": "x"}]', "unknown format: got the keys 'text' in its entries"),
        (b"[]", "got an empty list"),
        (b"[1, 2]", "got a list without objects"),
        (b"12", "got 12"),
        (b"Once upon a time, there was a text.", "and context, got text that begins with 'Once upon a time, there"),
        (b"<!DOCTYPE html><html>Not found</html>", "got an HTML page."),
        (
            b"id,question,answer\n1,Who?,he\n",
            ":1: expected a CSV header with the columns question and context, got 'id'",
        ),
        (
            b"id;context\n1;It rains.\n",
            "got 'id', 'context'; add the column question, or rename the one that holds it.",
        ),
        (b"id;text\n1;It rains.\n", "add the columns question and context, or rename those that hold them."),
        (gzip.compress(gzip.compress(b"[]", mtime=0), mtime=0), "got a gzip file; unpack it."),
        (b"question,context,context\na,b,c\n", ":1: expected every column once, got 'context' 2 times"),
        (b"Id,Predicted\n1,he\n", "got predictions (the columns 'id', 'predicted'); score them with: lamella evaluate"),
        (b"\0" * 99, "contains only zero bytes"),
        (b'{"data": [{"title": "Elbe",', "(the file ends here; it may be truncated)."),
        (b'{"a": \n{"b": \n', "broken JSON"),
        (b"[" * 200_000, "cannot be parsed: it is nested too deeply."),
        (b'{"data": ' + b"1" * 5000 + b"}", "cannot be parsed: it has a number of thousands of digits."),
    ],
)
def test_an_unreadable_file_is_explained_in_one_line(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(data)
    with pytest.raises(UnreadableError) as error:
        read(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="no such file"):
        read(tmp_path / "absent.json")
    with pytest.raises(UnreadableError, match="got a folder"):
        read(tmp_path)
    with pytest.raises(UnreadableError, match="cannot be read"):
        read("a\0b")
    with pytest.raises(UnknownNameError, match="demo:train"):
        read("demo:trian")


def test_the_bundled_files_are_read_by_name() -> None:
    assert read("demo:train").examples


def test_a_new_format_is_one_class(tmp_path: Path) -> None:
    try:

        @registry.register("format", "couplets")
        class Couplets:
            """Pairs of a text and a question."""

            def likeness(self, document: Any) -> int:
                return sum("couplet" in entry for entry in document.objects)

            def read(self, document: Any, source: Any) -> None:
                for number, entry in enumerate(document.objects):
                    text, question = entry["couplet"]
                    source.add(Example(str(number), question, Context(text)), [], document.place(number))

        file = read_text(tmp_path, json.dumps([{"couplet": ["It rains.", "Does it?"]}]))
        assert (file.format, only(file).question) == ("couplets", "Does it?")
    finally:
        registry.FAMILIES["format"].parts.pop("couplets", None)


def well_typed(example: Example) -> bool:
    answers = example.answers + example.plausible_answers
    return (
        isinstance(example.context, Context)
        and all(
            type(text) is str for text in (example.id, example.question, example.context.text, example.context.title)
        )
        and all(type(answer.text) is str and type(answer.begin_char) is int for answer in answers)
        and (example.group is None or type(example.group) is str)
        and example.id != ""
    )


def places_in(value: Any) -> list[tuple[str | int, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(), *((key, *rest) for key in keys for rest in places_in(value[key]))]


def planted(value: Any, path: tuple[str | int, ...], plant: Any) -> Any:
    if not path:
        return plant
    if isinstance(value, dict):
        return {**value, path[0]: planted(value[path[0]], path[1:], plant)}
    return [planted(item, path[1:], plant) if index == path[0] else item for index, item in enumerate(value)]


KEYS = [
    "data",
    "title",
    "paragraphs",
    "context",
    "contents",
    "qas",
    "qa",
    "id",
    "question",
    "answers",
    "answer",
    "text",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=2), inner),
    max_leaves=8,
)
DOCUMENTS = [nested(is_impossible=False, plausible_answers=[]), {"data": [row()]}, multi_context()]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DOCUMENTS), st.data(), JSON)
def test_any_value_anywhere_is_read_or_refused_in_one_line(document: Any, data: st.DataObject, plant: Any) -> None:
    broken = planted(document, data.draw(st.sampled_from(places_in(document))), plant)
    for text in (json.dumps(broken), as_lines(broken, broken)):
        read_safely(text.encode())


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([text for text, _ in CONTENTS.values()]), st.data())
def test_any_damage_to_the_bytes_is_read_or_refused_in_one_line(text: str, data: st.DataObject) -> None:
    content = bytearray(text.encode())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place : place + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=6))
    read_safely(bytes(content))


def read_safely(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        path.write_bytes(content)
        try:
            file = read(path)
            messages = [str(problem) for problem in file.problems]
            assert all(well_typed(example) for example in file.examples)
        except LamellaError as error:
            messages = [str(error)]
    assert not any("\n" in message for message in messages)
    "".join(messages).encode("utf-8")


def test_published_files(real_data: Path) -> None:
    def numbers(name: str) -> tuple[str, int, int, int, int]:
        file = read(real_data / name)
        contexts = {example.context for example in file.examples}
        unanswerable = sum(not example.answerable for example in file.examples)
        return file.format, len(file.examples), unanswerable, len(contexts), file.unread

    assert numbers("cs224n-dev.json.gz") == ("squad", 6078, 3168, 646, 0)
    assert numbers("KorQuAD_v1.0_dev.json") == ("korquad", 5774, 0, 963, 0)  # and one paragraph without questions
    assert numbers("squad-train-human.json.gz") == ("squad", 18259, 348, 3338, 0)
    assert numbers("hotpot-multicontext-dev.json.gz") == ("multi_context", 14950, 12329, 14615, 0)
    with pytest.raises(UnreadableError, match="'orig_answer'"):
        read(real_data / "squad2-train-backtranslated.provenance.jsonl.gz")


def test_a_large_file_is_read_in_seconds(real_data: Path) -> None:
    began = time.perf_counter()
    assert len(read(real_data / "squad2-train-backtranslated.json.gz").examples) == 111_265
    assert time.perf_counter() - began < 15
