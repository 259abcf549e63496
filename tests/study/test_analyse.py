"""Analyses of runs, compared with numbers computed by hand on eight questions about two sentences."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner

from lamella import runs
from lamella.cli import app
from lamella.data.examples import Answer, Context, Example
from lamella.errors import DataError, LamellaError, RunError, UnreadableError, UsageError
from lamella.files import read_json, write_json
from lamella.inference.prediction import Candidate, Prediction, rank
from lamella.scoring.metrics import QuestionScores, score_questions
from lamella.study.analysis.analyse import analyse, evenly_spaced
from lamella.study.analysis.analysis_tables import analysis_tables
from lamella.study.analysis.confident_mistakes import AROUND, confident_mistakes, marked_context, mistakes_markdown
from lamella.study.analysis.groups import (
    by_fifths,
    by_name,
    by_quantiles,
    grouped_scores,
    groupings,
    question_word,
    token_counts,
)
from lamella.study.analysis.mistake_kinds import boundary_errors, confusion, near_misses, only_right, second_best
from lamella.study.analysis.terminal_tables import WIDTH, print_analysis

#         0123456789012345678901234567890123456789012345
HOUSE = "In 1901 Ada built the red house on a hill near Kent."  # 12 words, 52 characters
RIVER = "The Orb flows north for 80 miles."  # 7 words, 33 characters
QUESTIONS = [  # id, question, context, true answers
    ("a", "Who built the house?", HOUSE, ["Ada"]),
    ("b", "What did Ada build in 1901?", HOUSE, ["red house", "the red house"]),
    ("c", "In what year was it built?", HOUSE, ["1901"]),
    ("d", "Where did the house stand?", HOUSE, ["on a hill near Kent"]),
    ("e", "Who sold it?", HOUSE, []),
    ("f", "How many miles does it flow?", RIVER, ["80"]),
    ("g", "Name the lake.", RIVER, []),
    ("h", "Whose river is it?", RIVER, []),
]
# The n-best list with scores for each question, of a run that is right only in a and g.
FIRST = {
    "a": [("Ada", 5.0), ("", 1.0), ("1901", 0.0)],
    "b": [("built the red", 4.0), ("red house", 3.0), ("", 0.0)],  # a word early and a word short of "the red house"
    "c": [("", 3.0), ("1901", 2.0)],  # abstained; the second is right
    "d": [("a hill near Kent.", 6.0), ("Kent", 5.0), ("", 2.0)],  # a word short at the start
    "e": [("Ada", 2.0), ("", 1.0)],  # the second is right: no answer
    "f": [("north", 2.0), ("The Orb", 1.5), ("", 1.0)],  # elsewhere
    "g": [("", 3.0), ("Orb", 1.0)],
    "h": [("Orb", 4.0), ("The Orb", 3.0), ("", 2.0)],  # the second is wrong too
}
SECOND = {  # right in a, c, f
    "a": [("Ada", 5.0), ("", 1.0)],
    "b": [("", 5.0), ("Ada", 1.0)],
    "c": [("1901", 5.0), ("", 1.0)],
    "d": [("", 5.0), ("Kent", 1.0)],
    "e": [("Ada", 5.0), ("", 1.0)],
    "f": [("80", 5.0), ("", 1.0)],
    "g": [("Orb", 5.0), ("", 1.0)],
    "h": [("Orb", 5.0), ("", 1.0)],
}
Lists = dict[str, list[tuple[str, float]]]


def questions() -> list[Example]:
    contexts = {text: Context(text) for text in (HOUSE, RIVER)}
    return [
        Example(id, question, contexts[text], tuple(Answer(answer, text.index(answer)) for answer in answers))
        for id, question, text, answers in QUESTIONS
    ]


def predictions(lists: Lists) -> dict[str, Prediction]:
    ranked = {}
    for id, _, text, _ in QUESTIONS:
        spans = [(span, text.index(span), text.index(span) + len(span), score, 0) for span, score in lists[id] if span]
        ranked[id] = rank(spans, next(score for span, score in lists[id] if not span))
    return ranked


def texts(lists: Lists) -> dict[str, str]:
    return {id: best[0][0] for id, best in lists.items()}


def scores(lists: Lists) -> QuestionScores:
    return score_questions(questions(), texts(lists))


def write_run(folder: Path, lists: Lists, **config: Any) -> Path:
    """Write the files of a finished run."""
    ranked = predictions(lists)
    write_json(folder / runs.RUN, {"state": "finished", "command": "train"})
    if config:
        write_json(folder / runs.CONFIG, config)
    write_json(folder / runs.PREDICTIONS, texts(lists))
    write_json(folder / runs.NBEST, {id: p.n_best() for id, p in ranked.items()})
    write_json(folder / runs.NULL_ODDS, {id: prediction.null_odds for id, prediction in ranked.items()})
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    paragraphs = [
        {
            "context": text,
            "qas": [
                {
                    "id": id,
                    "question": question,
                    "is_impossible": not answers,
                    "answers": [{"text": answer, "answer_start": text.index(answer)} for answer in answers],
                }
                for id, question, about, answers in QUESTIONS
                if about == text
            ],
        }
        for text in (HOUSE, RIVER)
    ]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


def test_every_question_has_exactly_one_outcome() -> None:
    assert confusion(scores(FIRST)) == {
        "right_has_answer": 1,  # a
        "answered_wrongly": 3,  # b d f
        "abstained_wrongly": 1,  # c
        "right_no_answer": 1,  # g
        "answered_the_unanswerable": 2,  # e h
    }


def test_the_second_best_answer_where_the_first_is_wrong() -> None:
    counts = second_best(questions(), scores(FIRST), texts(FIRST), predictions(FIRST))
    assert counts == {
        "wrong": 6,  # b c d e f h
        "second_right": 3,  # b c e
        "second_right_share": 0.5,
        "second_right_has_answer_share": pytest.approx(2 / 3),  # b c
        "first_right_has_answer_share": 0.5,  # a of a g
    }


def test_the_second_best_is_the_best_remaining_candidate_at_any_threshold() -> None:
    """A threshold below 0 abstains though the span scores higher: the runner-up is that span."""
    chosen = {**texts(FIRST), "a": ""}
    counts = second_best(questions(), score_questions(questions(), chosen), chosen, predictions(FIRST))
    assert (counts["wrong"], counts["second_right"]) == (7, 4)


def test_a_list_of_one_has_no_second_best() -> None:
    lone = Prediction((Candidate("Ada", 8, 11, 1.0, 1.0),), null_odds=-1.0)
    counts = second_best([questions()[4]], score_questions([questions()[4]], {"e": "Ada"}), {"e": "Ada"}, {"e": lone})
    assert (counts["wrong"], counts["second_right"], counts["second_right_share"]) == (1, 0, 0.0)


def test_questions_that_only_one_run_gets_right() -> None:
    right = {"first": scores(FIRST).exact == 1, "second": scores(SECOND).exact == 1}
    alone = only_right(right, questions())
    assert alone["first"] == {
        "count": 1,
        "has_answer_share": 0.0,
        "mean_context_words": 7.0,
        "mean_question_words": 3.0,
        "mean_answer_words": None,
        "ids": ["g"],
    }
    assert alone["second"] == {
        "count": 2,
        "has_answer_share": 1.0,
        "mean_context_words": 9.5,  # 12 and 7
        "mean_question_words": 6.0,
        "mean_answer_words": 1.0,
        "ids": ["c", "f"],
    }


def test_near_misses_by_side_and_size() -> None:
    assert near_misses(questions(), scores(FIRST), texts(FIRST), predictions(FIRST)) == {
        "answered_wrongly": 3,
        "near_misses": 2,  # b d
        "too_long": 0,
        "too_short": 1,  # d
        "shifted": 1,  # b
        "same_words": 0,
        "start_too_early": 1,
        "start_too_late": 1,
        "end_too_early": 1,
        "end_too_late": 0,
        "both_ends_off": 1,
        "mean_extra_words": 0.5,  # b: one ("built", against "the red house"), d: none
        "mean_missing_words": 1.0,  # b: house; d: on
    }


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("red house", (0, 0)),
        ("the red house", (0, 0)),  # the other true answer
        ("built the red house", (1, 0)),
        ("red house on", (0, 1)),
        ("house", (-1, 0)),
        ("house on a", (-1, 2)),
        ("re", (0, -1)),  # a part of a word is that word
        ("Ada", None),
    ],
)
def test_boundaries_are_compared_with_the_closest_true_answer(span: str, expected: tuple[int, int] | None) -> None:
    begin = HOUSE.index(span)
    assert boundary_errors(questions()[1], Candidate(span, begin, begin + len(span), 0.0)) == expected


def test_an_answer_with_a_wrong_offset_is_searched_in_the_context() -> None:
    moved = Example("x", "?", Context(HOUSE), (Answer("Ada", 0),))
    assert boundary_errors(moved, Candidate("Ada built", 8, 17, 0.0)) == (0, 1)


def test_bins_have_edges_that_occur_in_the_data() -> None:
    grouping = by_quantiles([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, None])
    assert grouping.names == ["1–2", "3–4", "5–6", "7–8", "9–10"]
    assert grouping.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, -1]
    assert by_quantiles([1, 1, 1, 1, 2, 3]).names == ["1", "2", "3"]
    assert by_quantiles([7, 7]).names == ["7"]
    assert by_quantiles([None]).names == []


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_every_value_is_in_the_bin_that_names_it(values: list[int]) -> None:
    grouping = by_quantiles(values)
    assert len(grouping.names) <= 5
    for value, group in zip(values, grouping.group.tolist(), strict=True):
        low, _, high = grouping.names[group].partition("–")
        assert int(low) <= value <= int(high or low)
    assert set(grouping.group.tolist()) == set(range(len(grouping.names)))


def test_positions_in_fifths_and_names_by_frequency() -> None:
    assert by_fifths([0.0, 0.2, 0.39, 0.999, 1.0, None]).group.tolist() == [0, 1, 1, 4, 4, -1]
    assert by_name(["other", "who", "what", "who", "other", "other"]).names == ["who", "what", "other"]


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("Who is it?", "who"),
        ("To whom was it given?", "who"),
        ("In what year?", "what"),
        ("How many are there?", "how many"),
        ("How much?", "how many"),
        ("How is it?", "how"),
        ("What's that?", "what"),
        ("Name it.", "other"),
        ("Somewhat late?", "other"),
        ("", "other"),
    ],
)
def test_question_words(question: str, word: str) -> None:
    assert question_word(question) == word


def test_lengths_in_tokens() -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()  # punctuation marks are tokens
    by_words = groupings(questions())
    counted = token_counts(questions(), tokenizer)
    grouped = groupings(questions(), counted)
    assert list(grouped)[2:4] == ["context_tokens", "question_tokens"]
    assert {name: grouped[name].names for name in by_words} == {name: by_words[name].names for name in by_words}
    lengths = [len(tokenizer.encode(example.question, add_special_tokens=False).ids) for example in questions()]
    names = by_quantiles(lengths).names
    assert grouped["question_tokens"].names == names
    assert str(max(lengths)) in names[-1]
    right = {"first": scores(FIRST).exact == 1, "second": scores(SECOND).exact == 1}
    in_words, in_tokens = only_right(right, questions()), only_right(right, questions(), counted)
    (only,) = [example for example in questions() if example.id in in_tokens["first"]["ids"]]
    assert in_tokens["first"] == {
        **in_words["first"],
        "mean_context_tokens": len(tokenizer.encode(only.context.text).ids),
        "mean_question_tokens": len(tokenizer.encode(only.question).ids),
    }


def test_scores_by_group() -> None:
    rows_of = {name: grouped_scores(scores(FIRST), grouping) for name, grouping in groupings(questions()).items()}
    f1 = [1.0, 0.5, 0.0, 6 / 7, 0.0, 0.0, 1.0, 0.0]
    # b: "built red" for "red house"; d: 3 of 3 predicted words ("a" is dropped), of 4 true ones
    assert scores(FIRST).f1.tolist() == pytest.approx(f1)
    mean, third = 100 * sum(f1[:5]) / 5, pytest.approx(1 / 3)
    assert rows_of["context_length"] == [
        {
            "group": "7",
            "count": 3,
            "has_answer_share": third,
            "answered_share": pytest.approx(2 / 3),  # all but g
            "exact": pytest.approx(100 / 3),
            "f1": pytest.approx(100 / 3),
        },
        {
            "group": "8–12",
            "count": 5,
            "has_answer_share": 0.8,
            "answered_share": 0.8,  # all but c
            "exact": 20.0,
            "f1": pytest.approx(mean),
        },
    ]
    assert [(row["group"], row["count"], row["exact"]) for row in rows_of["question_word"]] == [
        ("who", 3, pytest.approx(100 / 3)),  # a e h
        ("what", 2, 0.0),
        ("how many", 1, 0.0),
        ("where", 1, 0.0),
        ("other", 1, 100.0),
    ]
    # The first answers: Ada, red house, 1901, on a hill near Kent, 80.
    assert [(row["group"], row["count"]) for row in rows_of["answer_length"]] == [("1", 3), ("2", 1), ("3–5", 1)]
    # They begin at 8, 22, 3, 32 of 52 and at 24 of 33: 0.15, 0.42, 0.06, 0.62, 0.73.
    assert [(row["group"], row["count"]) for row in rows_of["answer_position"]] == [
        ("0–20 %", 2),
        ("40–60 %", 1),
        ("60–80 %", 2),
    ]


def test_the_most_confident_mistakes_come_first() -> None:
    mistakes = confident_mistakes(questions(), scores(FIRST), texts(FIRST), predictions(FIRST))
    # The best leads by 1 in c and e, where nothing else is; in b and d by 1 and 4, in h by 1 and 2, in f by 0.5 and 1.
    assert [mistake.example.id for mistake in mistakes] == ["c", "e", "b", "d", "h", "f"]
    assert mistakes[0].confidence == pytest.approx(1 / (1 + math.exp(-1)))
    assert mistakes[2].confidence == pytest.approx(1 / (1 + math.exp(-1) + math.exp(-4)))
    least = confident_mistakes(questions(), scores(FIRST), texts(FIRST), predictions(FIRST), most=2)
    assert [mistake.example.id for mistake in least] == ["c", "e"]


def test_mistakes_as_markdown() -> None:
    mistakes = confident_mistakes(questions(), scores(FIRST), texts(FIRST), predictions(FIRST), most=3)
    page = mistakes_markdown({"first_run": mistakes, "none": []})
    assert "## first\\_run" in page
    assert (
        "### 1. In what year was it built?\n\n- predicted: no answer (73.1 %)\n- true: 1901\n"
        "- second: 1901 (26.9 %); null odds +1.00; id c\n\n> In ⟪1901⟫ Ada built the red house" in page
    )
    assert "- predicted: Ada (73.1 %)\n- true: no answer\n- second: no answer (26.9 %); null odds -1.00" in page
    assert "- true: red house / the red house" in page
    assert "> In 1901 Ada ⟦built ⟪the ⟪red⟧ house⟫⟫ on a hill" in page  # they overlap
    assert "## none\n\nNone." in page


def test_marks_in_a_long_context() -> None:
    text = "one " * 300 + "1. *two* " + "three " * 300 + "four." + " five" * 300
    asked = Example("x", "?", Context(text), (Answer("four", text.index("four")),))
    shown = marked_context(asked, Candidate("*two*", text.index("*"), text.index("*") + 5, 1.0))
    assert shown.startswith("… one one")
    assert "one 1. ⟦\\*two\\*⟧ three" in shown
    assert "three … three" in shown
    assert "three ⟪four⟫. five" in shown
    assert shown.endswith("five five …")
    assert len(shown) < 4 * AROUND + 50
    assert marked_context(Example("x", "?", Context("1. first")), Candidate("", 0, 0, 1.0)) == "1\\. first"


def test_several_runs_from_their_folders(tmp_path: Path, data: Path) -> None:
    first, second = write_run(tmp_path / "first", FIRST), write_run(tmp_path / "second", SECOND)
    numbers = analyse([str(first), str(second)], data=str(data)).numbers
    assert (numbers["questions"], numbers["questions_left_out"]) == (8, 0)
    assert [run["run"] for run in numbers["runs"]] == ["first", "second"]
    assert [run["exact"] for run in numbers["runs"]] == [25.0, 37.5]
    assert [run["HasAns_exact"] for run in numbers["runs"]] == [20.0, 60.0]
    assert [run["only_right"]["ids"] for run in numbers["runs"]] == [["g"], ["c", "f"]]
    assert numbers["runs"][1]["right"]["mean_context_words"] == pytest.approx(31 / 3)
    assert analyse([str(first)], data=str(data)).numbers["runs"][0]["only_right"] is None


def test_the_table_of_questions_that_only_one_run_gets_right_has_the_lengths_that_were_counted(
    tmp_path: Path, data: Path
) -> None:
    folders = [write_run(tmp_path / name, lists) for name, lists in (("first", FIRST), ("second", SECOND))]
    numbers = analyse([str(folder) for folder in folders], data=str(data)).numbers

    def columns() -> Sequence[str]:
        (table,) = [table for table in analysis_tables(numbers) if table.name == "only_right"]
        assert {len(row) for row in table.rows} == {len(table.columns)}
        return table.columns

    assert "context words" in columns()
    assert "context tokens" not in columns()
    for run in numbers["runs"]:
        for described in (run["right"], run["only_right"]):
            described |= {"mean_context_tokens": 9.0, "mean_question_tokens": 4.0}
    assert {"context tokens", "context tokens, all right", "question tokens"} <= set(columns())


def test_only_questions_that_all_runs_answered_are_analysed(tmp_path: Path, data: Path) -> None:
    first, second = write_run(tmp_path / "first", FIRST), write_run(tmp_path / "second", SECOND)
    for name in (runs.PREDICTIONS, runs.NBEST):
        whole = read_json(second / name)
        write_json(second / name, {id: whole[id] for id in "abc"})
    numbers = analyse([str(first), str(second)], data=str(data)).numbers
    assert (numbers["questions"], numbers["questions_left_out"]) == (3, 5)


def test_the_data_is_read_from_the_record_of_the_run(tmp_path: Path, data: Path) -> None:
    first = write_run(tmp_path / "first", FIRST, data={"dev": [str(data)]})
    assert analyse([str(first)]).numbers["data"] == [str(data)]
    scored = write_run(tmp_path / "scored", FIRST)
    write_json(scored / runs.RUN, {"state": "finished", "command": "evaluate", "data": {"files": [str(data)]}})
    assert analyse([str(first), str(scored)]).numbers["data"] == [str(data)]
    elsewhere = write_run(tmp_path / "elsewhere", SECOND, data={"dev": ["elsewhere.json"]})
    with pytest.raises(UsageError, match=r"same data.*--data"):
        analyse([str(first), str(elsewhere)])
    silent = write_run(tmp_path / "silent", SECOND)
    with pytest.raises(UsageError, match=r"silent: expected a record of the data.*--data"):
        analyse([str(first), str(silent)])


def test_runs_that_cannot_be_analysed(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UnreadableError, match=r"none: no such folder"):
        analyse([str(tmp_path / "none")], data=str(data))
    first = write_run(tmp_path / "first", FIRST)
    with pytest.raises(DataError, match=r"expected questions that all the runs answered, got none among 135 questions"):
        analyse([str(first)], data="demo:dev")
    write_json(first / runs.CONFIG, [1])
    with pytest.raises(LamellaError, match="damaged"):
        analyse([str(first)])
    (first / runs.NBEST).unlink()
    with pytest.raises(RunError, match=r"expected a run with nbest_predictions.json, got none; the run was not scored"):
        analyse([str(first)], data=str(data))
    write_json(first / runs.RUN, {"state": "unfinished", "command": "train"})
    with pytest.raises(RunError, match="unfinished"):
        analyse([str(first)], data=str(data))


def test_a_folder_of_several_runs_means_the_finished_ones(tmp_path: Path, data: Path) -> None:
    names = ["first", "second", "third", "fourth"]
    write_json(tmp_path / runs.RUN, {"state": "failed", "command": "train", "runs": names})
    write_run(tmp_path / "first", FIRST)
    write_run(tmp_path / "second", SECOND)
    write_json(tmp_path / "third" / runs.RUN, {"state": "failed", "command": "train"})
    numbers = analyse([str(tmp_path), str(tmp_path / "first")], data=str(data)).numbers
    assert [run["run"] for run in numbers["runs"]] == ["first", "second"]  # a run that is named twice counts once
    left_out = {str(tmp_path / "third"): "failed", str(tmp_path / "fourth"): "not started"}
    assert numbers["runs_left_out"] == left_out
    for name in ("first", "second"):
        write_json(tmp_path / name / runs.RUN, {"state": "interrupted", "command": "train"})
    with pytest.raises(RunError, match=r"expected at least one finished run with nbest_predictions\.json, got none"):
        analyse([str(tmp_path)], data=str(data))


def test_the_command(tmp_path: Path, data: Path) -> None:
    first, second = write_run(tmp_path / "first[bold]:fire:", FIRST), write_run(tmp_path / "second", SECOND)
    arguments = ["analyse", str(first), str(second), "--data", str(data), "--out", str(tmp_path / "out")]
    ended = CliRunner().invoke(app, [*arguments, "--json"])
    assert ended.exit_code == 0, ended.output
    printed = json.loads(ended.stdout)
    assert printed == read_json(tmp_path / "out" / runs.ANALYSIS)
    assert printed["runs"][0]["confusion"]["answered_wrongly"] == 3
    assert (tmp_path / "out" / runs.MISTAKES).read_text(encoding="utf-8").count("\n## ") == 2
    assert runs.run_state(tmp_path / "out") == "finished"
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, RunError)
    shown = CliRunner().invoke(app, [*arguments, "--overwrite"])
    assert shown.exit_code == 0, shown.output
    assert "8 questions of" in shown.stdout
    assert "first[bold]:fire:" in shown.stdout  # a name is no markup
    assert "25.0" in shown.stdout
    assert "how many" in shown.stdout


def test_a_table_that_is_too_wide_is_split_without_losing_numbers(tmp_path: Path, data: Path) -> None:
    name = "a-run-with-a-long-name-" * 5
    first = write_run(tmp_path / name, FIRST)
    numbers = analyse([str(first)], data=str(data)).numbers
    numbers["runs"][0]["confusion"] = {key: 7001 + n for n, key in enumerate(numbers["runs"][0]["confusion"])}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_analysis(numbers)
    for count in numbers["runs"][0]["confusion"].values():
        assert str(count) in printed.getvalue()
    for word in ("unanswerable", "missing"):
        assert word in printed.getvalue()
    assert max(map(len, printed.getvalue().splitlines())) <= WIDTH


def test_a_sample_is_taken_evenly_over_the_questions() -> None:
    many = [Example(str(number), "?", Context("text")) for number in range(10)]
    assert [example.id for example in evenly_spaced(many, 4)] == ["0", "2", "5", "7"]
    assert evenly_spaced(many, 20) == many
    assert evenly_spaced(many, 0) == []
