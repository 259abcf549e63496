"""The process that adapts a reader, in its working folder: train, then tune and score it on what was left out.

`lamella.serve.adaptation` starts it, and it ends when its stdin closes: the server is then gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lamella.child_process import module_command
from lamella.data.dataset import load_examples
from lamella.errors import LamellaError, counted
from lamella.files import read_json, write_json
from lamella.inference.predict import predict
from lamella.models.loading import load_model
from lamella.runs import MODEL
from lamella.scoring.metrics import QuestionScores, language_of, score_questions
from lamella.scoring.significance import mcnemar, paired_difference
from lamella.scoring.tuned_folder import store_tuned
from lamella.serve.adaptation import LEFT_OUT, LOG, REQUEST, RUN, RUN_FILE, STATE
from lamella.serve.adapted_threshold import answers_at, choose_threshold

FEW = 30  # questions below which a difference proves little
LEVEL = 0.05  # p-value below which it is hardly chance


def main() -> None:
    threading.Thread(target=_end_with_server, daemon=True).start()
    with contextlib.suppress(AttributeError, OSError):
        os.nice(10)  # answering comes first
    command = module_command("lamella", "train", RUN_FILE, "--out", RUN)
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        write_json(Path(STATE), {"state": "failed", "message": _last_line()})
        return
    write_json(Path(STATE), {"state": "scoring"})
    try:
        request = read_json(Path(REQUEST))
        examples = load_examples(LEFT_OUT).examples
        parent, adapted = (load_model(model, inference_only=True) for model in (request["source"], RUN))
        answers = answers_at(parent.decoding, predict(parent, examples))
        choice = choose_threshold(adapted, parent.decoding, examples)
        folder = Path(RUN, MODEL)
        store_tuned(folder, choice.tuned, folder)
        language = language_of(examples)
        scores = [score_questions(examples, each, language=language) for each in (answers, choice.answers)]
        verdict = compare(*scores, split=request["split"])
        threshold = {
            "value": choice.tuned.decoding.null_score_diff_threshold,
            "sentence": choice.sentence(request["model"]),
        }
        write_json(Path(STATE), {"state": "finished", "verdict": {**verdict, "threshold": threshold}})
    except LamellaError as error:
        write_json(Path(STATE), {"state": "failed", "message": str(error)})


def compare(before: QuestionScores, after: QuestionScores, *, split: str) -> dict[str, Any]:
    """Return how two readers answered the same questions, and a sentence that claims no more than that shows."""
    won = int(((after.exact == 1) & (before.exact == 0)).sum())
    lost = int(((after.exact == 0) & (before.exact == 1)).sum())
    chance = float(mcnemar(np.array([won]), np.array([lost]))[0])
    difference = paired_difference(after.f1, before.f1).in_percent()
    result = "unclear" if chance >= LEVEL else "better" if won > lost else "worse"
    count = len(before.ids)
    return {
        "questions": count,
        "before": _summary(before),
        "after": _summary(after),
        "gained": won,
        "lost": lost,
        "chance": chance,
        "f1_difference": {key: round(getattr(difference, key), 2) for key in ("value", "low", "high")},
        "result": result,
        "sentence": _sentence(result, count, won, lost, split),
    }


def _sentence(result: str, count: int, won: int, lost: int, split: str) -> str:
    changed = f"{counted(won, 'answer')} became right and {lost} became wrong"
    if result == "unclear":
        few = f"{counted(count, 'question')} prove little" if count < FEW else "The difference is small"
        sentence = (
            f"{few}: {changed}, which may be chance." if won + lost else f"{few}: no answer became right or wrong."
        )
    else:
        sentence = f"The adapted reader is {result}: {changed}, which is hardly chance."
    if split == "question":
        sentence += " It was trained on other questions about the same texts, so expect less from it on new texts."
    return sentence


def _summary(scores: QuestionScores) -> Mapping[str, Any]:
    return {"right": int(scores.exact.sum()), "f1": round(100 * float(scores.f1.mean()), 2)}


def _end_with_server() -> None:
    """Wait until the server closes the pipe, then end this process and those it has started."""
    with contextlib.suppress(OSError):
        sys.stdin.buffer.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _last_line() -> str:
    lines = [line.strip() for line in Path(LOG).read_text("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else "The training ended without a message."


if __name__ == "__main__":
    main()
