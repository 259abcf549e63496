"""The question answering pipeline of transformers 4 as a process: each line of input makes it answer all questions.

    python pipeline.py MODEL QUESTIONS.json

It runs in its own environment, created by `benchmarks/inference.py`. For every line on standard input it answers the
questions one by one, as its users did, and prints one line of JSON: the seconds, the CPU seconds and the answers.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers
from transformers import pipeline


def main() -> None:
    model, questions = sys.argv[1:]
    with open(questions, encoding="utf-8") as file:
        pairs = json.load(file)
    answer = pipeline("question-answering", model=model, device="cpu")
    answer(question=pairs[0][0], context=pairs[0][1])
    facts = {"transformers": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        answers = [answer(question=q, context=text, handle_impossible_answer=True) for q, text in pairs]
        taken = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
        print(json.dumps({**taken, "answers": answers}), flush=True)


if __name__ == "__main__":
    main()
