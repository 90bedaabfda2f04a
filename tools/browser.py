"""Prints the Chromium or Chrome that the tests of pages open, and installs one if there is none.

Debian's Chromium is installed where that is possible (root and apt-get), and Playwright's own elsewhere.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)


def browser() -> str | None:
    """Returns the path of an installed browser; None without one."""
    return next((path for path in _paths() if _works(path)), None)


def _paths() -> Iterator[str]:
    yield from (path for name in NAMES if (path := shutil.which(name)))
    yield from (path for path in MAC if Path(path).exists())
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        yield play.chromium.executable_path


def _works(path: str) -> bool:
    """Returns whether a program starts; on Ubuntu, a name may be there that only says what to install."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def install() -> None:
    """Installs a browser: Debian's, or else Playwright's own."""
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        calm = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", *words], env=calm, stdout=subprocess.DEVNULL, check=False)
        if browser() is not None:
            return
    subprocess.run([sys.executable, "-m", "playwright", "install", "chromium"], check=True)


if __name__ == "__main__":
    if browser() is None:
        install()
    found = browser()
    print(found or "no Chromium or Chrome could be installed: install one, and try again")
    sys.exit(found is None)
