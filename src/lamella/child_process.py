"""Start modules of the package in processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the package.

    `python -m` would look for modules in the current folder first. That may be a folder of documents from anywhere, and
    a json.py in it would be run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment(**variables: str) -> dict[str, str]:
    """Return the environment to run a module in, with some variables set.

    The package is found wherever the process starts: a relative PYTHONPATH means nothing in another folder.
    """
    package = Path(__file__).resolve().parents[1]
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
