"""What a person sees of a page: Chromium loads it, runs its scripts, and gives the text that is then on it."""

import html
import re
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; .ci/run installs it")


def text_on(address: str, patience_s: float = 60) -> str:
    """The visible text of a page once its requests are answered, white space as single spaces."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000"]
    command += [f"--virtual-time-budget={patience_s * 1000:.0f}", "--dump-dom", address]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=4 * patience_s).stdout
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())
