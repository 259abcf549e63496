"""The small table of `docs/how-to/reproduce.md`, made from a fresh clone by the commands on that page."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_commands_of_the_guide_make_a_table_from_a_fresh_clone(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    guide = (clone / "docs" / "how-to" / "reproduce.md").read_text(encoding="utf-8")
    match = re.search(r"## Try it small\n.*?```sh\n(.*?)```", guide, re.DOTALL)
    assert match
    environment = {**os.environ, "PYTHONPATH": str(clone / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    commands = match[1].splitlines()
    steps = ["sweep", "compare", "report", "ensemble", "analyse"]
    assert [command.split()[:2] for command in commands] == [["lamella", step] for step in steps]
    errors = ""
    for command in commands:
        arguments = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(arguments, cwd=clone, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        errors += done.stderr
    assert "note: configs/papers/pce-table2.toml: --set encoder.name replaces" in errors
    page = (clone / "pce-table2.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `([\w-]+)` \| \d+\.\d+ \| \d+\.\d+ \|", page, re.MULTILINE)
    assert rows == ["bert-no-fine-tuning", "bert", "albert", "weighted", "dot"]  # published and ours
    assert page.count("| not run") == page.count("| not run: both rows have the same encoder |") == 2
    assert "| Dot-product attention over the layers beats the last layer. | `dot` − `albert`, F1 | +0.32 | " in page
    ElementTree.parse(clone / "pce-table2.svg")
    assert (clone / "runs" / "ensemble" / "predictions.json").is_file()
    analysis = json.loads((clone / "runs" / "analysis" / "analysis.json").read_text(encoding="utf-8"))
    assert [run["run"] for run in analysis["runs"]] == ["weighted", "dot"]
    assert analysis["runs"][0]["layer_weights"]["layers"]
    assert "mean_context_tokens" in analysis["runs"][1]["right"]
