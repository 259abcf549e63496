"""Long contexts: put the context of each question among others of the data.

The more text is read, the more often some wrong span looks like an answer. A reader that was trained and tuned on
paragraphs meets papers and manuals; data with long contexts shows how it does on them, and tunes it for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lamella.data.examples import Answer, Context, Example
from lamella.data.negatives import fold_text, is_negative
from lamella.errors import UsageError, shorten

BETWEEN = "\n\n"  # contexts that were joined
LONG = "-long"  # ends the id of a question whose context was lengthened, so that it can be used beside the original


def lengthen_contexts(
    examples: Sequence[Example],
    characters: int,
    *,
    lost_answers: Mapping[str, Collection[str]] | None = None,
    seed: int = 0,
) -> list[Example]:
    """Return the examples with contexts of about this many characters, each made of its own and of others.

    Contexts of the same article come first, then random ones; none of them contains an answer of the question. For a
    negative, `lost_answers` holds the answers that its question had: a context with one of them would answer it again.
    The question's own context has a random place among the others. Data with too little text gives shorter contexts.
    Ids end in "-long".

    >>> from lamella import load_examples
    >>> rows = [
    ...     {"id": "t", "question": "Who discovered Titan?", "context": "Huygens found Titan.", "answers": ["Huygens"]},
    ...     {"id": "r", "question": "Who discovered Rhea?", "context": "Cassini found Rhea.", "answers": ["Cassini"]},
    ... ]
    >>> lengthen_contexts(load_examples(rows).examples, 40)[0].context.text
    'Cassini found Rhea.\\n\\nHuygens found Titan.'
    """
    if any(example.group is not None for example in examples):
        raise UsageError("long contexts: expected questions with one context each; make these with --negatives 0.")
    lost_answers = lost_answers or {}
    for example in examples:
        if not example.answerable and is_negative(example.id) and example.id not in lost_answers:
            raise UsageError(
                f"long contexts: expected the answers that the question of {shorten(example.id)} had, so that no added "
                "context contains one, but a file of negatives does not keep them; make both at once from the original "
                "file: --negatives with --lengthen."
            )
    contexts = list({example.context.text: example.context for example in examples}.values())
    folded = [fold_text(context.text) for context in contexts]
    same_article: dict[str, list[int]] = {}
    for number, context in enumerate(contexts):
        if context.title:
            same_article.setdefault(context.title, []).append(number)
    random = np.random.default_rng([seed, len(examples)])
    lengthened = []
    for example in examples:
        texts = lost_answers.get(example.id) or [answer.text for answer in example.answers]
        answers = [fold_text(text) for text in texts]
        related = random.permutation(same_article.get(example.context.title, []))
        others: list[str] = []
        size = len(example.context.text)
        for number in (*related.tolist(), *random.permutation(len(contexts)).tolist()):
            if size >= characters:
                break
            text = contexts[number].text
            if text == example.context.text or text in others or any(answer in folded[number] for answer in answers):
                continue
            others.append(text)
            size += len(BETWEEN) + len(text)
        lengthened.append(_place(example, others, int(random.integers(len(others) + 1))))
    return lengthened


def _place(example: Example, others: Sequence[str], place: int) -> Example:
    """Return the example with its context at a place among others."""
    before = "".join(text + BETWEEN for text in others[:place])
    after = "".join(BETWEEN + text for text in others[place:])
    context = Context(f"{before}{example.context.text}{after}", example.context.title)

    def moved(answers: Sequence[Answer]) -> tuple[Answer, ...]:
        return tuple(replace(answer, begin_char=answer.begin_char + len(before)) for answer in answers)

    return Example(
        f"{example.id}{LONG}",
        example.question,
        context,
        moved(example.answers),
        moved(example.plausible_answers),
    )
