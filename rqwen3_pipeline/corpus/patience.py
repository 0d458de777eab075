"""How this project speaks to the Hub: one HTTP client with patience, and no other place that waits.

The Hub's own client gets its HTTP client from here, so that every request it makes (listings,
configuration, files) is repeated by one rule: on 408, 429 and 5xx, and where the connection fails,
after as long as `Retry-After` or `RateLimit` ask for, else after growing waits with some chance in
them, so that many jobs do not come back at once. It gives up after `TRIES` requests or when
`RQWEN3_HUB_PATIENCE_S` would be over, and says so. Any other answer is final. A connection that breaks
inside a body is handed on in the form that makes the Hub's client go on from that byte.

Import this and `install` before `huggingface_hub` and `datasets`, lazily: it takes a second.
"""

import functools
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

# Plain HTTP, whose every request is counted and resumed here; HF_HUB_DISABLE_XET=0 takes the Hub's other protocol.
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # workers would write over each other's
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # one request to another host, which a firewall may swallow

import httpx2
from huggingface_hub import constants, set_client_factory
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import parse_ratelimit_headers

from model.errors import SourceError
from rqwen3_pipeline.settings import Settings

TRIES = 12
"""Most times that one request is sent."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""The waits double from the first to the longest, where the server names none."""
CONNECT_PATIENCE_S = 30.0
"""Where nothing answers at all, more patience only hides that there is no network."""
STALLED_S = 60.0
"""A connection that says nothing for so long counts as broken, where the Hub's client sets no time of its own."""
SAID_FROM_S = 5.0
AGAIN_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class HubUnavailableError(SourceError):
    """The Hub did not answer, or only with errors that pass, for as long as was allowed."""


def wait_hint_s(headers: Mapping[str, str]) -> float | None:
    """How long a server asks to wait, in seconds: by `Retry-After` (seconds or a date) or `RateLimit`.

    Returns:
        The longer of the two; None if it asks for nothing.
    """
    hints: list[float] = []
    after = headers.get("Retry-After", "").strip()
    if after.isdigit():
        hints.append(float(after))
    elif after:
        try:
            until = parsedate_to_datetime(after)
        except ValueError:
            until = None
        if until is not None:
            until = until if until.tzinfo else until.replace(tzinfo=UTC)
            hints.append(max(0.0, (until - datetime.now(UTC)).total_seconds()))
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        hints.append(float(limit.reset_in_seconds))
    return max(hints, default=None)


class _Resumable(httpx2.SyncByteStream):
    """A body whose broken connection reads as an early end, which the Hub's client resumes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._stream
        except httpx2.ReadError as error:
            raise httpx2.RemoteProtocolError(str(error)) from error

    def close(self) -> None:
        self._stream.close()


class PatientClient(httpx2.Client):
    """An HTTP client that repeats what may pass."""

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request, and again while the answer is one that may pass.

        Raises:
            HubUnavailableError: it did not pass within `TRIES` requests or the time allowed.
            OfflineModeIsEnabled: HF_HUB_OFFLINE is set.
        """
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled(f"{request.url}: HF_HUB_OFFLINE is set")
        began = time.monotonic()
        for number in range(1, TRIES + 1):
            hint, allowed_s, cause = None, Settings().hub_patience_s, None
            try:
                response = super().send(request, **options)
            except (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError) as error:
                seen, cause = f"{type(error).__name__} ({error})", error
                if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
                    allowed_s = min(allowed_s, CONNECT_PATIENCE_S)
            else:
                if response.status_code not in AGAIN_STATUS:
                    if options.get("stream"):
                        response.stream = _Resumable(response.stream)
                    return response
                response.close()
                seen, hint = f"status {response.status_code}", wait_hint_s(response.headers)
            wait_s = _wait_s(number, hint)
            spent_s = time.monotonic() - began
            if number == TRIES or spent_s + wait_s > allowed_s:
                raise _gave_up(request, seen, number, spent_s, hint) from cause
            if wait_s >= SAID_FROM_S:
                print(f"  the Hub: {seen}; waiting {wait_s:.0f} s", file=sys.stderr, flush=True)
            time.sleep(wait_s)
        raise AssertionError("unreachable")


def _wait_s(number: int, hint: float | None) -> float:
    if hint is not None:
        return hint + random.uniform(0.0, 1.0 + hint / 10)
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0)


def _gave_up(
    request: httpx2.Request, seen: str, number: int, spent_s: float, hint: float | None
) -> HubUnavailableError:
    url = str(request.url).split("?", 1)[0]
    asked = f", which asks to wait {hint:,.0f} s" if hint is not None else ""
    return HubUnavailableError(
        f"{request.method} {url}: {seen}{asked}, after {number} requests in {spent_s:.0f} s. Run it again later, "
        "or allow more: RQWEN3_HUB_PATIENCE_S=3600"
    )


def make_client() -> httpx2.Client:
    """The Hub's HTTP client, with patience; proxies and certificates come from the environment."""
    return PatientClient(follow_redirects=True, timeout=STALLED_S)


@functools.cache
def install() -> None:
    """Give the Hub's client this HTTP client, for the rest of the process."""
    set_client_factory(make_client)
