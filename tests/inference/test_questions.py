"""Reading questions to answer: ids that predictions could not keep apart are refused."""

from __future__ import annotations

import pytest

from lamella.data.examples import Context, Example
from lamella.errors import DataError
from lamella.inference.questions import check_unique_ids

ROME = Context("In Rome.")


@pytest.mark.parametrize(
    "examples",
    [
        [Example("a", "Who?", ROME), Example("a", "When?", ROME)],
        [Example("a", "Who?", ROME), Example("a", "Who?", ROME)],
        [Example("a#0", "Who?", ROME, group="a"), Example("a#1", "When?", ROME, group="a")],
        [Example("a", "Who?", ROME), Example("b", "When?", ROME, group="a")],
    ],
)
def test_an_id_of_several_questions_is_refused(examples: list[Example]) -> None:
    with pytest.raises(DataError, match="question id 'a': expected one question, got several") as error:
        check_unique_ids(examples)
    assert "\n" not in str(error.value)


def test_a_question_about_several_contexts_has_one_id() -> None:
    check_unique_ids([Example("a#0", "Who?", ROME, group="a"), Example("a#1", "Who?", Context("In Oslo."), group="a")])
