"""Train four heads in one pass of a frozen encoder and compare them: python examples/compare_heads.py"""

from __future__ import annotations

import sys

import lamella


def main(out: str = "runs/heads") -> None:
    runs = lamella.train(
        train="demo:train",
        dev="demo:dev",
        out=out,
        overwrite=True,
        encoder={"name": "default", "tuning": "frozen"},
        learner={"learning_rate": 1e-2},
        training={"epochs": 1, "batch_size": 8},
        data={"max_train_samples": 40, "max_eval_samples": 30},  # a fast demonstration; use all of your data
        grid={"learner": {"mixer": ["last", "average", "scalar_mix", "dot"]}},
    )
    print(lamella.compare(runs, baseline="last"))
    best = max(runs.runs.values(), key=lambda run: run.metrics["f1"])
    print(f"best: {best.path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
