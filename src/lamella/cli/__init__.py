"""The command line: one thin function per command. Heavy imports stay inside them, so that `--help` is instant."""

from lamella.cli import (
    answer_commands,
    ask_command,
    data_commands,
    index_command,
    model_commands,
    serve_command,
    study_commands,
    training_commands,
)
from lamella.cli.app import app, with_one_command

__all__ = [
    "answer_commands",
    "app",
    "ask_command",
    "data_commands",
    "index_command",
    "model_commands",
    "serve_command",
    "study_commands",
    "training_commands",
    "with_one_command",
]
