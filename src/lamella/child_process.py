"""Start modules of the package in processes of their own."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")  # in names of environment variables


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the package.

    `python -m` would look for modules in the current folder first. That may be a folder of documents from anywhere, and
    a json.py in it would be run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment(**variables: str) -> dict[str, str]:
    """Return the environment to run a module in, with some variables set.

    The package is found wherever the process starts: a relative PYTHONPATH means nothing in another folder. Variables
    that look like secrets are left out: no such process needs any, and one of them parses documents from anywhere.
    """
    package = Path(__file__).resolve().parents[1]
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {name: value for name, value in os.environ.items() if not _SECRET.search(name.upper())}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), **variables}
