"""What can be wrong with a data file: every kind of problem, how bad it is, what `--fix` does about it.

An *error* means that training would learn something false or that a question is lost; a file with errors is refused. A
*warning* is worth a look and never refuses a file; a *note* is odd but common in good files, and not counted. An error
that cannot be mended is left out: the answer, and the question with it when no other answer remains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Severity = Literal["error", "warning", "note"]


class Kind(NamedTuple):
    """One row of the table below; `fix` is None where `--fix` cannot mend it."""

    severity: Severity
    fix: str | None
    meaning: str


KINDS: dict[str, Kind] = {
    # The file
    "broken_line": Kind("error", None, "A line of a JSONL file is not JSON."),
    "broken_csv_row": Kind("error", None, "A CSV row has more or fewer cells than the header, or broken quotes."),
    "duplicate_key": Kind("error", "The last value is taken.", "A JSON object has the same key twice."),
    "not_a_number": Kind("warning", "Read as null.", "NaN or Infinity, which JSON does not have."),
    "lone_surrogate": Kind(
        "error", "Replaced by U+FFFD.", "Half of a UTF-16 pair, such as `\\ud83d` alone: no character."
    ),
    "no_questions": Kind("warning", None, "The file has no question that can be read."),
    # Fields that are absent or of the wrong type
    "missing_field": Kind("error", None, "A field that cannot be done without is absent or null."),
    "missing_id": Kind("warning", "An id is made from its place and its text.", "A question has no id."),
    "missing_answer_start": Kind(
        "error", "The first occurrence of the text is taken.", "An answer does not say where in the context it is."
    ),
    "wrong_type_data": Kind("error", None, "`data` is not a list."),
    "wrong_type_article": Kind("error", None, "An article, or a row of a flat file, is not an object."),
    "wrong_type_title": Kind("warning", "A number becomes text, anything else no title.", "`title` is not text."),
    "wrong_type_paragraphs": Kind("error", None, "`paragraphs` is not a list."),
    "wrong_type_paragraph": Kind("error", None, "A paragraph is not an object."),
    "wrong_type_context": Kind("error", None, "`context` (or `contents`) is not text."),
    "wrong_type_qas": Kind("error", None, "`qas` is not a list."),
    "wrong_type_qa": Kind("error", None, "A question with its answers is not an object."),
    "wrong_type_id": Kind("error", "A number becomes text, anything else a new id.", "`id` is not text."),
    "wrong_type_question": Kind("error", None, "`question` is not text."),
    "wrong_type_answers": Kind("error", None, "`answers` (or `answer`) is not a list."),
    "wrong_type_answer": Kind("error", None, "An answer is not an object."),
    "wrong_type_answer_text": Kind("error", None, "The `text` of an answer is not text."),
    "wrong_type_answer_start": Kind(
        "error",
        'A whole number in disguise (`"12"`, `12.0`) is taken, else the first occurrence of the text.',
        "`answer_start` is not a whole number.",
    ),
    "wrong_type_is_impossible": Kind("error", "The answers decide.", "`is_impossible` is neither true nor false."),
    "wrong_type_plausible_answers": Kind(
        "warning", "They are left out.", "`plausible_answers` cannot be read as answers."
    ),
    # What is there and what is said about it
    "empty_article": Kind("warning", "It is left out.", "An article has no paragraphs."),
    "empty_paragraph": Kind("note", "It is left out.", "A paragraph has no questions."),
    "empty_context": Kind("error", None, "A context is empty or only white space."),
    "empty_question": Kind("error", None, "A question is empty or only white space."),
    "empty_answer": Kind("error", None, "The text of an answer is empty or only white space."),
    "empty_text_for_no_answer": Kind(
        "warning", "Read as no answer.", "An empty text, marked impossible or at -1, stands for *no answer*."
    ),
    "impossible_with_answers": Kind("error", "The answers are kept.", "Marked impossible, yet it has answers."),
    "answerable_without_answers": Kind("error", None, "Marked answerable, yet it has no answers."),
    "unlabelled": Kind(
        "warning", None, "Neither answers nor `is_impossible`: counts, and is written, as unanswerable."
    ),
    "plausible_on_answerable": Kind("warning", None, "Plausible (wrong) answers beside right ones."),
    # Answers that are not at their offset
    "answer_start_out_of_range": Kind(
        "error", "Moved to the nearest occurrence.", "The offset is negative or beyond the end of the context."
    ),
    "answer_shifted": Kind("error", "Moved to the nearest occurrence.", "The answer is elsewhere in the context."),
    "offset_in_utf16": Kind(
        "error", "Counted again in characters.", "The offset counts UTF-16 units, as JavaScript and Java do."
    ),
    "offset_in_utf8_bytes": Kind("error", "Counted again in characters.", "The offset counts UTF-8 bytes."),
    "offset_without_leading_space": Kind(
        "error", "The leading space is counted.", "The offset was counted in the context without its leading space."
    ),
    "offset_before_space": Kind(
        "error", "Moved behind the space.", "The offset points at the space in front of the answer."
    ),
    "answer_edge_space": Kind(
        "error", "The space is taken off.", "The answer begins or ends with space that the context lacks there."
    ),
    "answer_case": Kind("error", "Spelt as in the context.", "Upper and lower case differ from the context."),
    "answer_whitespace": Kind(
        "error",
        "Spelt as in the context.",
        "White space differs from the context: doubled, no-break, a line end, an invisible character.",
    ),
    "answer_unicode": Kind(
        "error", "Spelt as in the context.", "Another Unicode form (NFC, NFD, NFKC, NFKD) than in the context."
    ),
    "answer_spelling": Kind(
        "error", "Spelt as in the context.", "Case, white space and Unicode form together differ from the context."
    ),
    "answer_not_in_context": Kind("error", None, "The answer is nowhere in the context."),
    "plausible_answer_misplaced": Kind(
        "warning", "Mended as an answer would be, or left out.", "A plausible answer is not at its offset."
    ),
    # The same thing twice
    "duplicate_question": Kind(
        "error", "The later one is left out.", "The same id with the same question, context and answers."
    ),
    "duplicate_id": Kind("error", "The later one gets another id.", "The same id for two different questions."),
    "question_in_two_files": Kind(
        "error", "It is left out of the later file.", "The same id, question, context and answers in two files."
    ),
    "id_in_two_files": Kind(
        "error", "It gets another id in the later file.", "The same id for different questions in two files."
    ),
    "conflicting_answers": Kind(
        "note", None, "The same question twice about one context, without an answer in common."
    ),
    "context_in_two_files": Kind("warning", None, "The same context in two files: a leak, if one is to score."),
    "context_under_two_titles": Kind("note", None, "The same context under two titles of a file."),
    # Odd text
    "control_character": Kind("warning", None, "An invisible control character."),
    "replacement_character": Kind("warning", None, "U+FFFD, the trace of a character that was lost in decoding."),
    "mojibake": Kind("warning", None, "UTF-8 text that was decoded as Latin-1 or Windows-1252."),
    # What the tokenizer makes of it
    "question_cut": Kind("warning", None, "The question has more tokens than `max_query_length`, and will be cut."),
    "question_longer_than_window": Kind(
        "warning", None, "The question alone fills `max_seq_length`; perhaps a context strayed into it."
    ),
    "unknown_tokens": Kind("warning", None, "More than 5 % of the tokens of a script are unknown to the encoder."),
}


@dataclass(frozen=True)
class Problem:
    """One fault of one file. `id` is the question's, or its place in the file where it has none."""

    kind: str
    file: str
    reason: str
    article: str | None = None
    id: str | None = None
    line: int | None = None
    column: int | None = None
    # Which of the file's examples it is about. Ids would not do: they can be absent, or be the very thing repeated.
    example: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no such kind of problem: {self.kind}")

    @property
    def severity(self) -> Severity:
        return KINDS[self.kind].severity

    @property
    def fixable(self) -> bool:
        return KINDS[self.kind].fix is not None

    def to_json(self) -> dict[str, Any]:
        """The problem as `lamella check --json` prints it."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "article": self.article,
            "id": self.id,
            "severity": self.severity,
            "kind": self.kind,
            "reason": self.reason,
            "fixable": self.fixable,
        }

    def __str__(self) -> str:
        """One line, the place first: `dev.json: Normans: 56dd: error answer_shifted: ... [--fix: ...]`."""
        position = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        place = ": ".join(_one_line(part) for part in (position, self.article, self.id) if part)
        fix = KINDS[self.kind].fix
        mending = f" [--fix: {fix.rstrip('.')}]" if fix else ""
        return f"{place}: {self.severity} {self.kind}: {self.reason}{mending}"


def quote(text: str, longest: int = 40) -> str:
    """A text from a file as a message shows it: on one line, escaped where it must be, not too long."""
    return repr(text if len(text) <= longest else f"{text[: longest - 3]}...")


def _one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]
