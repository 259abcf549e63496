"""Run files of a few steps on a few questions."""

from __future__ import annotations

from pathlib import Path


def write_run_file(path: Path, encoder: str, more: str = "", *, steps: int = 4, training: str = "") -> Path:
    """Write a run file; `encoder` and `training` are lines of these sections, `more` is appended."""
    path.write_text(
        f"""
[data]
train = "demo:train"
dev = "demo:dev"
max_train_samples = 8
max_eval_samples = 4
[windows]
max_seq_length = 128
doc_stride = 32
max_query_length = 24
[training]
max_steps = {steps}
batch_size = 4
precision = "fp32"
checkpoint_every = "1 steps"
{training}
[encoder]
{encoder}
{more}
"""
    )
    return path
