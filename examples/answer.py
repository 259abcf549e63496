"""Ask the reader that comes with the package about a text: python examples/answer.py"""

from __future__ import annotations

from pathlib import Path

import lamella

TEXT = Path(__file__).with_name("titan.txt").read_text(encoding="utf-8")
QUESTIONS = ["When did the probe land on Titan?", "Who discovered Titan?", "Who discovered Enceladus?"]


def main() -> None:
    reader = lamella.Reader.load()
    for question, answers in zip(QUESTIONS, reader.ask(QUESTIONS, TEXT, top_k=2), strict=True):
        print(question)
        for answer in answers:
            print(f"  {answer['probability']:.2f}  {answer['answer'] or '(no answer)'}")


if __name__ == "__main__":
    main()
