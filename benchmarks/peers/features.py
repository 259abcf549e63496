"""Measure what other tools offer for extractive question answering, for the table in the README.

    python benchmarks/peers/features.py [--environments .peers] [--out benchmarks/peers/features.json]

Each tool is installed into an environment of its own (minutes, network), and `probe.py` calls it there, offline, on the
same checkpoint: the bundled reader, exported for transformers. A tool that pip refuses to install beside transformers 5
is recorded with pip's reason, and probed with the transformers that it asks for.

`run_qa.py` of transformers is not a package and is not run here. Its probe is the one call by which it reads files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The versions that features.json records, which may be older than those in constraints.txt: raise them, then run this.
TORCH, TRANSFORMERS, TRANSFORMERS_4 = "torch==2.13.0", "transformers==5.22.2", "transformers==4.57.6"
PEFT, DATASETS = "peft==0.21.2", "datasets==5.2.0"
PACKAGES = {
    "transformers-4": (TRANSFORMERS_4,),
    "transformers-5": (TRANSFORMERS, PEFT, DATASETS),
    "run-qa-loader": (TRANSFORMERS, PEFT, DATASETS),
    "adapters": (TRANSFORMERS_4, "adapters==1.3.0"),
    "peft": (TRANSFORMERS, PEFT, DATASETS),
    "haystack": (TRANSFORMERS, "haystack-ai==3.4.0", "transformers-haystack==2.0.0"),
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HAYSTACK_TELEMETRY_ENABLED": "false"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where the environments are created")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("features.json"), help="the file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, text = Path(folder) / "stock", ROOT / "examples" / "titan.txt"
        squad = ROOT / "src" / "lamella" / "data" / "demo" / "dev.json"
        subprocess.run(
            [sys.executable, "-m", "lamella", "export", "default", "--as-transformers", str(model)], check=True
        )
        # The reader itself, not its export: a checkpoint of transformers has no room for the tuned threshold.
        tools = {"lamella": probe(Path(sys.executable), "lamella", "default", text, squad)}
        for tool, packages in PACKAGES.items():
            print(tool, flush=True)
            tools[tool] = probe(prepare(arguments.environments / tool, packages), tool, str(model), text, squad)
    five = arguments.environments / "transformers-5" / "bin" / "python"
    adapters = PACKAGES["adapters"][-1]
    tools["adapters"]["installs_with_transformers_5"] = try_install(five, adapters)
    tools["adapters"]["imports_with_transformers_5"] = try_import(five, adapters, also="requests")
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "tools": tools,
    }
    arguments.out.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def probe(python: Path, tool: str, model: str, text: Path, squad: Path) -> dict[str, Any]:
    """Run the probes of a tool in its environment."""
    script = Path(__file__).with_name("probe.py")
    done = subprocess.run(
        [str(python), str(script), tool, model, str(text), str(squad)],
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        check=True,
    )
    findings: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return findings


def prepare(folder: Path, packages: tuple[str, ...]) -> Path:
    """Create an environment with some packages, unless it exists, and return its interpreter."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-qq", TORCH, *packages], check=True)
        (folder / "ready").touch()
    return python


def try_install(python: Path, package: str) -> dict[str, Any]:
    """Ask pip whether a package can be installed beside transformers 5; nothing is installed."""
    command = [str(python), "-m", "pip", "install", "--dry-run", "-qq", TORCH, TRANSFORMERS, package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return {"works": done.returncode == 0, "seen": reasons[-1].partition(": for help")[0] if reasons else "installs"}


def try_import(python: Path, package: str, also: str) -> dict[str, Any]:
    """Import a package beside transformers 5 although pip refuses: from a separate folder, with one more package."""
    with tempfile.TemporaryDirectory() as folder:
        install = [str(python), "-m", "pip", "install", "-qq", "--target", folder]
        subprocess.run([*install, "--no-deps", package], check=True)
        subprocess.run([*install, also], check=True)
        done = subprocess.run(
            [str(python), "-c", f"import {package.partition('==')[0]}"],
            env={**os.environ, **OFFLINE, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=False,
        )
    error = done.stderr.splitlines()[-1].partition(" (")[0] if done.returncode else ""  # without the path
    return {"works": not error, "seen": error or "imports"}


if __name__ == "__main__":
    main()
