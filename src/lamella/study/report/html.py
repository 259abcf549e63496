"""The HTML report: one file about any number of runs, which opens in any browser and needs no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources

from lamella.study.report.collect import collect
from lamella.study.report.values import ReportValues
from lamella.version import __version__


def html_report(
    folders: Sequence[str | os.PathLike[str]],
    *,
    data: str | None = None,
    title: str | None = None,
    layers: bool = False,
) -> tuple[str, int, list[str]]:
    """Return the HTML of the report, the number of runs in it, and the notes for the user."""
    content = collect(folders, data, layers=layers)
    shown = content["runs"]
    default = str(shown[0]["name"]) if len(shown) == 1 else f"{len(shown)} runs"
    return render(content, title=title or default), len(shown), content["notes"]


def render(content: ReportValues, *, title: str) -> str:
    """Return the HTML file with scripts, styles and content inside it.

    The content security policy forbids every request and all scripts except the two in the file, which it identifies
    by their hashes: a text from the data or the name of a run is displayed, never executed.
    """
    assets = resources.files("lamella.study.report") / "assets"
    library, script = ((assets / name).read_text("utf-8") for name in ("plotly-cartesian.min.js", "report.js"))
    hashes = " ".join(f"'sha256-{_sha256(source)}'" for source in (library, script))
    made = {"made": datetime.now(UTC).strftime("%Y-%m-%d"), "lamella": __version__}
    parts = {
        "title": html.escape(title),
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:",
        "style": (assets / "report.css").read_text("utf-8"),
        "library": library,
        "content": _embedded({**content, **made}),
        "script": script,
    }
    # In a single pass, so that an @name@ inside inserted text stays text.
    return re.sub(
        "@(" + "|".join(parts) + ")@", lambda match: parts[match[1]], (assets / "report.html").read_text("utf-8")
    )


def _embedded(content: ReportValues) -> str:
    """Return JSON that cannot close its script element, and that can be encoded as UTF-8 whatever it contains."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
