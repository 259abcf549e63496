"""Take the README's picture of the page: start a server, ask a sample question in Chromium, and save what it shows."""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "page.png"
WIDTH, HEIGHT = 1280, 880
QUESTION = "How long did it send data?"

sys.path.insert(0, str(ROOT / "tests"))

from chromium import emulate, eventually, resize, started_browser  # noqa: E402
from running_server import running_server  # noqa: E402


def take_picture() -> bytes:
    """Return the page with an answer, as PNG."""
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server, started_browser() as browser:
        resize(browser, WIDTH, HEIGHT)
        browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        emulate(browser, dark=False)
        browser.get(server.address)
        eventually(browser, "return document.querySelectorAll('.chip').length > 0")
        field = browser.find_element("id", "question")
        field.send_keys(QUESTION, "\n")
        eventually(browser, "return document.querySelector('#text mark.answer')")
        # No caret, no animation half-way: the same picture every time.
        browser.execute_script("document.activeElement.blur(); document.getAnimations().forEach(each => each.finish())")
        return base64.b64decode(browser.get_screenshot_as_base64())


if __name__ == "__main__":
    try:
        PICTURE.write_bytes(take_picture())
    except pytest.skip.Exception as missing:
        sys.exit(f"docs/images/page.png is not renewed: {missing}")
