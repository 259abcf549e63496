"""The command line: one thin function a command. Heavy imports stay inside them, so that `--help` is instant."""

from lamella.cli import answers, data, study, training
from lamella.cli.app import app

__all__ = ["answers", "app", "data", "study", "training"]
