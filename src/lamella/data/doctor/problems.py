"""The kinds of problems a data file can have: severity, meaning, and what `--fix-to` does about each.

An *error* means that training would learn something false or that a question is lost; a file with errors is refused. A
*warning* deserves a look and never refuses a file. A *note* is unusual but common in good files, and is not counted. An
error that cannot be fixed drops the answer, and its question if no other answer remains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lamella.errors import printable, truncate

LONGEST_NAME = 100  # characters of an id or a title that a message shows

Severity = Literal["error", "warning", "note"]


class Kind(NamedTuple):
    """One row of the table below; `fix` is None if `--fix-to` cannot repair the problem."""

    severity: Severity
    fix: str | None
    meaning: str


KINDS: dict[str, Kind] = {
    # The file
    "broken_line": Kind("error", None, "A line of a JSONL file is not valid JSON."),
    "broken_csv_row": Kind("error", None, "A CSV row has more or fewer cells than the header, or broken quotes."),
    "duplicate_key": Kind("error", "Uses the last value.", "A JSON object has the same key twice."),
    "not_a_number": Kind("warning", "Reads it as null.", "NaN or Infinity, which JSON does not allow."),
    "lone_surrogate": Kind(
        "error", "Replaces it with U+FFFD.", "Half of a UTF-16 surrogate pair, such as a single `\\ud83d`."
    ),
    "no_questions": Kind("warning", None, "The file has no readable question."),
    # Missing fields and wrong types
    "missing_field": Kind("error", None, "A required field is missing or null."),
    "missing_id": Kind("warning", "Generates an id from position and text.", "A question has no id."),
    "missing_answer_start": Kind(
        "error",
        "Uses the first occurrence of the text.",
        "An answer has no `answer_start`. In flat data, only if its text occurs several times in the context.",
    ),
    "wrong_type_data": Kind("error", None, "`data` is not a list."),
    "wrong_type_article": Kind("error", None, "An article, or a row of a flat file, is not an object."),
    "wrong_type_title": Kind("warning", "Converts a number to text, else drops the title.", "`title` is not text."),
    "wrong_type_paragraphs": Kind("error", None, "`paragraphs` is not a list."),
    "wrong_type_paragraph": Kind("error", None, "A paragraph is not an object."),
    "wrong_type_context": Kind("error", None, "`context` (or `contents`) is not text."),
    "wrong_type_qas": Kind("error", None, "`qas` is not a list."),
    "wrong_type_qa": Kind("error", None, "A question with its answers is not an object."),
    "wrong_type_id": Kind(
        "error", "Converts a number to text, else generates an id.", "`id` is neither text nor an integer."
    ),
    "wrong_type_question": Kind("error", None, "`question` is not text."),
    "wrong_type_answers": Kind("error", None, "`answers` (or `answer`) is neither a list nor text."),
    "wrong_type_answer": Kind("error", None, "An answer is not an object."),
    "wrong_type_answer_text": Kind("error", None, "The `text` of an answer is not text."),
    "wrong_type_answer_start": Kind(
        "error",
        'Converts `"12"` or `12.0` to a whole number, else uses the first occurrence of the text.',
        "`answer_start` is not a whole number.",
    ),
    "wrong_type_is_impossible": Kind(
        "error", "Ignores it and uses the answers.", "`is_impossible` is neither true nor false."
    ),
    "wrong_type_plausible_answers": Kind("warning", "Drops them.", "`plausible_answers` cannot be read as answers."),
    "wrong_type_group": Kind("warning", "Converts a number to text, else ignores it.", "`group` is not text."),
    # Empty and contradictory entries
    "empty_article": Kind("warning", "Drops it.", "An article has no paragraphs."),
    "empty_paragraph": Kind("note", "Drops it.", "A paragraph has no questions."),
    "empty_context": Kind("error", None, "A context is empty or only white space."),
    "empty_question": Kind("error", None, "A question is empty or only white space."),
    "empty_answer": Kind("error", None, "The text of an answer is empty or only white space."),
    "empty_text_for_no_answer": Kind(
        "warning", "Reads it as no answer.", "An empty text, marked impossible or at -1, is used for *no answer*."
    ),
    "impossible_with_answers": Kind("error", "Keeps the answers.", "A question is marked impossible but has answers."),
    "answerable_without_answers": Kind("error", None, "A question is marked answerable but has no answers."),
    "unlabelled": Kind(
        "warning", None, "Neither answers nor `is_impossible` is given: read and written as unanswerable."
    ),
    "plausible_on_answerable": Kind("warning", None, "A question has both answers and plausible (wrong) answers."),
    # Answers that are not at their offset
    "answer_start_out_of_range": Kind(
        "error", "Moves it to the nearest occurrence.", "The offset is negative or beyond the end of the context."
    ),
    "answer_shifted": Kind(
        "error", "Moves it to the nearest occurrence.", "The answer is at another position in the context."
    ),
    "offset_in_utf16": Kind(
        "error", "Converts the offset to characters.", "The offset counts UTF-16 units, as JavaScript and Java do."
    ),
    "offset_in_utf8_bytes": Kind("error", "Converts the offset to characters.", "The offset counts UTF-8 bytes."),
    "offset_without_leading_space": Kind(
        "error", "Adds the leading space to the offset.", "The offset ignores the leading space of the context."
    ),
    "offset_before_space": Kind(
        "error", "Moves the offset past the space.", "The offset points at the space before the answer."
    ),
    "answer_edge_space": Kind(
        "error", "Strips the space.", "The answer begins or ends with space that the context does not have there."
    ),
    "answer_case": Kind("error", "Uses the spelling of the context.", "Upper and lower case differ from the context."),
    "answer_whitespace": Kind(
        "error",
        "Uses the spelling of the context.",
        "White space differs from the context: doubled, no-break, a line break, an invisible character.",
    ),
    "answer_unicode": Kind(
        "error",
        "Uses the spelling of the context.",
        "The Unicode normal form (NFC, NFD, NFKC, NFKD) differs from the context.",
    ),
    "answer_spelling": Kind(
        "error",
        "Uses the spelling of the context.",
        "Several of case, white space and Unicode form differ from the context.",
    ),
    "answer_not_in_context": Kind("error", None, "The answer does not occur in the context."),
    "plausible_answer_misplaced": Kind(
        "warning", "Corrects it like an answer, or drops it.", "A plausible answer is not at its offset."
    ),
    # Duplicates
    "duplicate_question": Kind(
        "error", "Drops the later one.", "Two entries have the same id, question, context and answers."
    ),
    "duplicate_id": Kind("error", "Gives the later one a new id.", "Two different questions have the same id."),
    "question_in_two_files": Kind(
        "error", "Drops it from the later file.", "Two files have the same id, question, context and answers."
    ),
    "id_in_two_files": Kind(
        "error", "Gives it a new id in the later file.", "Different questions in two files have the same id."
    ),
    "conflicting_answers": Kind(
        "note", None, "The same question about the same context appears twice, without a common answer."
    ),
    "context_in_two_files": Kind(
        "warning", None, "Two files have the same context: a leak, if one of them is used for scoring."
    ),
    "context_under_two_titles": Kind("note", None, "The same context appears under two titles of a file."),
    # Suspicious characters
    "control_character": Kind("warning", None, "A text contains an invisible control character."),
    "replacement_character": Kind(
        "warning", None, "A text contains U+FFFD: a character was lost when the text was decoded."
    ),
    "mojibake": Kind("warning", None, "UTF-8 text was decoded as Latin-1 or Windows-1252."),
    # Token counts
    "question_cut": Kind("warning", None, "The question has more than `max_query_length` tokens and is truncated."),
    "question_longer_than_window": Kind(
        "warning", None, "The question alone fills `max_seq_length`; perhaps it contains a context by mistake."
    ),
    "unknown_tokens": Kind(
        "warning",
        None,
        "Over 2 % of the tokens of a file, or 5 % of those of a script, are unknown to the encoder.",
    ),
}


@dataclass(frozen=True)
class Problem:
    """One problem of one file. `id` is the id of the question, or its position in the file if it has none."""

    kind: str
    file: str
    reason: str
    article: str | None = None
    id: str | None = None
    line: int | None = None
    column: int | None = None
    # Index of the example concerned. An id would not do: it can be missing or duplicated.
    example: int | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of problem: {self.kind}")

    @property
    def severity(self) -> Severity:
        return KINDS[self.kind].severity

    @property
    def fixable(self) -> bool:
        return KINDS[self.kind].fix is not None

    def to_json(self) -> dict[str, Any]:
        """Return the problem as `lamella check --json` prints it."""
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

    @property
    def place(self) -> str:
        """Where it is, as a line about it begins: `dev.json: Normans: 56dd`."""
        position = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        return ": ".join([position, *(_one_line(part) for part in (self.article, self.id) if part)])

    def __str__(self) -> str:
        """Format as one line, position first: `dev.json: Normans: 56dd: error answer_shifted: ... [--fix-to: ...]`."""
        fix = KINDS[self.kind].fix
        option = (
            "on_bad_answer='fix'" if self.file.startswith("<") else "--fix-to"
        )  # data in memory has no command line
        hint = f" [{option}: {fix.rstrip('.')}]" if fix else ""
        return f"{self.place}: {self.severity} {self.kind}: {self.reason}{hint}"


def quote(text: str, longest: int = 40) -> str:
    """Return a text as messages show it: on one line, quoted, escaped and shortened."""
    return repr(truncate(text, longest))


def _one_line(text: str) -> str:
    return truncate(printable(text), LONGEST_NAME)
