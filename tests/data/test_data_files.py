"""The data files in data/: free of errors, apart from one another, and as many as their page says."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

from lamella.data.dataset import load_examples
from lamella.data.examples import Example

DATA = Path(__file__).resolve().parents[2] / "data"
FILES = sorted(file for file in DATA.glob("*.json") if not file.stem.endswith("-half"))  # those are made from others
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


def test_one_in_five_contrast_questions_without_an_answer_is_nearly_one_with_an_answer() -> None:
    by_text: dict[str, list[Example]] = {}
    for file in DATA.glob("contrast-*.json"):
        for example in load_examples(file, labelled=True).examples:
            by_text.setdefault(example.context.text, []).append(example)
    near = [
        any(changed_words(example, other) <= 3 for other in group if other.answerable)
        for group in by_text.values()
        for example in group
        if not example.answerable
    ]
    assert 0.18 < sum(near) / len(near) < 0.22


def changed_words(one: Example, other: Example) -> int:
    """Return how many words must be replaced, at most, to make one question of the other."""
    words, others = (example.question.lower().split() for example in (one, other))
    matched = sum(block.size for block in SequenceMatcher(None, words, others, autojunk=False).get_matching_blocks())
    return max(len(words), len(others)) - matched


def test_the_kinds_of_the_test_file_are_in_no_other_file() -> None:
    tested = kinds(load_examples(TEST, labelled=True).examples)
    assert tested
    for file in FILES:
        if file != TEST:
            assert not tested & kinds(load_examples(file, labelled=True).examples)
