from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from rqwen3_pipeline.corpus import patience
from rqwen3_pipeline.corpus.patience import HubUnavailableError, PatientClient, wait_hint_s
from tests.loopback_hub import OK, Step, loopback_hub


@pytest.fixture
def hub():
    with loopback_hub() as server:
        server.repositories["a/b"].commit({"f": b"hello"})
        yield server


@pytest.fixture
def waits(monkeypatch):
    """Waits instead of sleeping them; the clock follows."""
    waited: list[float] = []
    monkeypatch.setattr(patience.time, "sleep", waited.append)
    monkeypatch.setattr(patience.time, "monotonic", lambda: sum(waited))
    return waited


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": ""}, None),
        ({"RateLimit": '"api";r=0;t=55'}, 55.0),
        ({"RateLimit": '"api";r=12;t=55'}, None),
        ({"RateLimit": '"api";r=0;t=55', "Retry-After": "7"}, 55.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ],
)
def test_wait_hint_of_headers(headers, seconds):
    assert wait_hint_s(headers) == seconds


def test_wait_hint_of_a_date_is_the_time_until_then():
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    hint = wait_hint_s({"Retry-After": date})
    assert hint is not None
    assert 87 <= hint <= 90


def test_waits_grow_with_chance_and_stop_growing(hub, waits, monkeypatch):
    monkeypatch.setenv("RQWEN3_HUB_PATIENCE_S", "100000")
    hub.plans["/f"] = [Step(status=503)]
    with PatientClient() as client, pytest.raises(HubUnavailableError, match="status 503, after 12 requests"):
        client.get(f"{hub.endpoint}/a/b/resolve/main/f")
    assert len(hub.requests) == patience.TRIES == len(waits) + 1
    for number, waited in enumerate(waits):
        most = min(60.0, 2.0**number)
        assert most / 2 <= waited <= most


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_asked_for_again(hub, waits, status):
    hub.plans["/f"] = [Step(status=status), Step(status=status, headers={"Retry-After": "30"}), OK]
    with PatientClient() as client:
        assert client.get(f"{hub.endpoint}/a/b/resolve/main/f").content == b"hello"
    assert len(waits) == 2
    assert 30.0 <= waits[1] <= 34.0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 416, 501])
def test_any_other_answer_is_final(hub, waits, status):
    hub.plans["/f"] = [Step(status=status, headers={"Retry-After": "30"})]
    with PatientClient() as client:
        assert client.get(f"{hub.endpoint}/a/b/resolve/main/f").status_code == status
    assert (len(hub.requests), waits) == (1, [])


def test_patience_ends_before_a_wait_that_would_exceed_it(hub, waits, monkeypatch):
    monkeypatch.setenv("RQWEN3_HUB_PATIENCE_S", "50")
    hub.plans["/f"] = [Step(status=429, headers={"Retry-After": "20"})]
    with PatientClient() as client, pytest.raises(HubUnavailableError, match="asks to wait 20 s"):
        client.get(f"{hub.endpoint}/a/b/resolve/main/f")
    assert sum(waits) <= 50
    assert len(hub.requests) == 3


def test_nothing_that_answers_is_given_up_sooner(waits, monkeypatch):
    monkeypatch.setenv("RQWEN3_HUB_PATIENCE_S", "100000")
    with PatientClient() as client, pytest.raises(HubUnavailableError, match="ConnectError"):
        client.get("http://127.0.0.1:9/f")
    assert sum(waits) <= patience.CONNECT_PATIENCE_S


def test_a_body_that_ends_early_is_asked_for_again(hub, waits):
    hub.plans["/f"] = [Step(cut=2), OK]
    with PatientClient() as client:
        assert client.get(f"{hub.endpoint}/a/b/resolve/main/f").content == b"hello"
    assert (len(hub.requests), len(waits)) == (2, 1)


def test_a_connection_reset_inside_a_streamed_body_reads_as_an_early_end(hub):
    hub.plans["/f"] = [Step(cut=2, reset=True)]
    url = f"{hub.endpoint}/a/b/resolve/main/f"
    with (
        pytest.raises(patience.httpx2.RemoteProtocolError),
        PatientClient() as client,
        client.stream("GET", url) as response,
    ):
        response.read()
    assert len(hub.requests) == 1
