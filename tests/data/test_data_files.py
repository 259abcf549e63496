"""The data files in data/: free of errors, apart from one another, and as many as their page says."""

from __future__ import annotations

from pathlib import Path

from lamella.data.dataset import load_examples
from lamella.data.examples import Example

DATA = Path(__file__).resolve().parents[2] / "data"
FILES = sorted(DATA.glob("*.json"))
TEST = DATA / "many-kinds-test.json"


def kinds(examples: list[Example]) -> set[str]:
    """The kinds of texts, which begin the titles."""
    return {str(example.context.title).partition(":")[0] for example in examples}


def test_the_files_have_no_errors_and_the_sizes_on_their_page() -> None:
    page = (DATA / "README.md").read_text(encoding="utf-8")
    assert len(FILES) == 9
    for file in FILES:
        examples = load_examples(file, labelled=True).examples  # refuses errors
        texts = len({example.context for example in examples})
        unanswerable = sum(not example.answerable for example in examples)
        assert f"| `{file.name}` | {texts:,} | {len(examples):,} | {unanswerable:,} |" in page


def test_no_text_and_no_question_is_in_two_files() -> None:
    texts: dict[str, str] = {}
    ids: dict[str, str] = {}
    for file in FILES:
        for example in load_examples(file, labelled=True).examples:
            assert texts.setdefault(example.context, file.name) == file.name
            assert ids.setdefault(example.question_id, file.name) == file.name


def test_most_questions_without_an_answer_have_one_like_them_with_an_answer() -> None:
    """That is what the contrast files are for: words of the text and of other questions do not tell them apart."""
    examples = load_examples(DATA / "contrast-held-articles.json", labelled=True).examples
    words = {example.question_id: set(example.question.lower().split()) for example in examples}
    by_text: dict[str, list[Example]] = {}
    for example in examples:
        by_text.setdefault(example.context.text, []).append(example)
    overlap = [
        max(len(words[e.question_id] & words[o.question_id]) / len(words[e.question_id]) for o in group if o.answerable)
        for group in by_text.values()
        for e in group
        if not e.answerable
    ]
    assert sum(share > 0.3 for share in overlap) > len(overlap) / 2


def test_the_kinds_of_the_test_file_are_in_no_other_file() -> None:
    tested = kinds(load_examples(TEST, labelled=True).examples)
    assert tested
    for file in FILES:
        if file != TEST:
            assert not tested & kinds(load_examples(file, labelled=True).examples)
