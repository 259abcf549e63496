"""Make questions about whole articles: data for the threshold and the penalty of readers that meet long texts.

    python docs/whole_articles.py data/squad2-train-backtranslated data/squad-train-human

For each NAME, read NAME-all-held.json.gz, a SQuAD file, and write NAME-articles.json.gz. Each of up to 700 answerable
questions is asked about the paragraphs around its own, up to 6,000, 12,000 or 24,000 characters of its article. Every
other question loses its paragraph and all that contain an answer, and so becomes unanswerable. The same names in the
same order give the same files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

LENGTHS = (6_000, 12_000, 24_000)  # characters
QUESTIONS = 700
PARAGRAPHS = 8  # an article with fewer is no long text
BETWEEN = "\n\n"

Question = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", type=Path, metavar="NAME", help="a data file, without -all-held.json.gz")
    chance = random.Random(1)
    for name in parser.parse_args().names:
        with gzip.open(f"{name}-all-held.json.gz", "rt", encoding="utf-8") as file:
            articles = json.load(file)["data"]
        made = [{"title": title, "paragraphs": [text]} for title, text in ask(articles, name.name, chance)]
        with gzip.open(f"{name}-articles.json.gz", "wt", encoding="utf-8") as file:
            json.dump({"version": "2", "data": made}, file)


def ask(articles: list[dict[str, Any]], name: str, chance: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Return the title of an article and a paragraph with one question, for each question."""
    paragraphs = [list(dict.fromkeys(paragraph["context"] for paragraph in a["paragraphs"])) for a in articles]
    questions = [
        (number, paragraph["context"], question)
        for number, article in enumerate(articles)
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
        if question["answers"] and len(paragraphs[number]) >= PARAGRAPHS
    ]
    chance.shuffle(questions)
    asked = []
    for place, (number, own, question) in enumerate(questions[:QUESTIONS]):
        length = chance.choice(LENGTHS)
        texts, answers = paragraphs[number], question["answers"]
        centre = texts.index(own)
        if place % 2:
            texts = [text for text in texts if text != own and not _holds(text, answers)]
            if not texts:
                continue
            centre, answers = min(centre, len(texts) - 1), []
        before, context = _around(texts, centre, length)
        moved = [{"text": answer["text"], "answer_start": answer["answer_start"] + before} for answer in answers]
        made = {"id": f"{name}-art-{place}", "question": question["question"], "answers": moved}
        title = articles[number].get("title", name)
        asked.append((title, {"context": context, "qas": [{**made, "is_impossible": not moved}]}))
    return asked


def _holds(text: str, answers: list[Question]) -> bool:
    return any(answer["text"].lower() in text.lower() for answer in answers)


def _around(texts: list[str], centre: int, length: int) -> tuple[int, str]:
    """Return the paragraphs around one, up to a length, and how many characters stand before it."""
    first = last = centre
    size = len(texts[centre])
    while size < length and (first > 0 or last < len(texts) - 1):
        if first > 0:
            first -= 1
            size += len(texts[first]) + len(BETWEEN)
        if last < len(texts) - 1:
            last += 1
            size += len(texts[last]) + len(BETWEEN)
    before = sum(len(text) + len(BETWEEN) for text in texts[first:centre])
    return before, BETWEEN.join(texts[first : last + 1])


if __name__ == "__main__":
    main()
