"""Tells somebody outside of a failure: by a command, a webhook, or a file. Silent unless one is configured.

    RQWEN3_NOTICE_COMMAND='mail -s rqwen3 me@example.org'   the message on standard input
    RQWEN3_NOTICE_WEBHOOK=URL                              POST of {"text": message}
    RQWEN3_NOTICE_FILE=PATH                                appended

One that fails is reported, and keeps none of the others from being told.
"""

import json
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from rqwen3_pipeline.settings import Settings

TIMEOUT_S = 30


def tell(settings: Settings, message: str) -> list[str]:
    """Send a message every configured way.

    Returns:
        What went wrong, a sentence each; empty if all went well or nothing is configured.
    """
    ways: list[tuple[str, Callable[[str], None]]] = []
    if settings.notice_command:
        command = settings.notice_command
        ways.append(("RQWEN3_NOTICE_COMMAND", lambda text: _run(command, text)))
    if settings.notice_webhook:
        url = settings.notice_webhook
        ways.append(("RQWEN3_NOTICE_WEBHOOK", lambda text: _post(url, text)))
    if settings.notice_file:
        path = settings.notice_file
        ways.append(("RQWEN3_NOTICE_FILE", lambda text: _append(path, text)))
    problems: list[str] = []
    for name, send in ways:
        try:
            send(message)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            problems.append(f"{name}: the notice was not delivered: {error}")
    return problems


def _run(command: str, message: str) -> None:
    done = subprocess.run(
        shlex.split(command), input=message, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"{command!r} ended with exit code {done.returncode}: {done.stderr.strip()[:300]}")


def _post(url: str, message: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no http or https address")
    body = json.dumps({"text": message}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answered {error.code} {error.reason}") from error


def _append(path: Path, message: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {message}\n")
