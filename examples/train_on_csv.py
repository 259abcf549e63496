"""Adapt the reader that comes with the package to a CSV file of your own: python examples/train_on_csv.py

The file has the columns question, context and answers; an empty answer means that the text has none.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lamella

QUESTIONS = Path(__file__).with_name("moons.csv")


def main(out: str = "runs/moons") -> None:
    run = lamella.train(
        train=QUESTIONS,
        dev="demo:dev",
        out=out,
        overwrite=True,
        log=print,
        # Start from the bundled reader: a few questions are enough to adapt it, and too few to train a new one.
        learner={"start": "default", "learning_rate": 3e-4},
        training={"epochs": 2},
        data={"max_eval_samples": 20},  # a fast demonstration; use all of your data
    )
    print(f"F1 on questions about other texts: {run.metrics['f1']:.1f}")
    print(f"size of the reader: {run.cost['model_bytes'] / 1e6:.1f} MB, without its encoder")
    print(run.reader().ask("Which moon has volcanoes?", "Io, a moon of Jupiter, has over 400 active volcanoes."))


if __name__ == "__main__":
    main(*sys.argv[1:])
