"""Notices over a real command, a real server on loopback, and a file; and a failed run that is told."""

import http.server
import json
import threading

import dagster as dg
import pytest

from rqwen3_pipeline.notices import tell
from rqwen3_pipeline.sensors.notices import failure_notices
from rqwen3_pipeline.settings import Settings


class Listener(http.server.BaseHTTPRequestHandler):
    """Keeps what it is told, and answers as the server says."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.told.append(json.loads(body))  # pyright: ignore[reportAttributeAccessIssue]
        self.send_response(self.server.answer)  # pyright: ignore[reportAttributeAccessIssue]
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server():
    with http.server.HTTPServer(("127.0.0.1", 0), Listener) as server:
        server.told, server.answer = [], 200  # pyright: ignore[reportAttributeAccessIssue]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_tell_without_configuration_does_nothing():
    assert tell(Settings(), "message") == []


def test_tell_reaches_command_webhook_and_file(tmp_path, server):
    heard = tmp_path / "by command"
    settings = Settings(
        notice_command=f"dd of='{heard}' status=none",
        notice_webhook=f"http://127.0.0.1:{server.server_port}/hook",
        notice_file=tmp_path / "new folder" / "notices.log",
    )
    assert tell(settings, "two\nlines") == []
    assert heard.read_text() == "two\nlines"
    assert server.told == [{"text": "two\nlines"}]
    assert (tmp_path / "new folder" / "notices.log").read_text().endswith(" two\nlines\n")


def test_tell_that_fails_one_way_still_tells_the_others_and_says_what_failed(tmp_path, server):
    server.answer = 500
    settings = Settings(
        notice_command="false",
        notice_webhook=f"http://127.0.0.1:{server.server_port}/hook",
        notice_file=tmp_path / "notices.log",
    )
    problems = tell(settings, "message")
    assert ["exit code 1" in problems[0], "answered 500" in problems[1], len(problems)] == [True, True, 2]
    assert "message" in (tmp_path / "notices.log").read_text()


@pytest.mark.parametrize("webhook", ["file:///etc/hostname", "nonsense", "http://127.0.0.1:1/"])
def test_tell_of_an_address_that_is_none_or_does_not_answer_is_a_problem_and_no_error(webhook):
    (problem,) = tell(Settings(notice_webhook=webhook), "message")
    assert "RQWEN3_NOTICE_WEBHOOK: the notice was not delivered" in problem


def test_failed_run_is_told_with_its_partition_and_the_steps_own_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("RQWEN3_NOTICE_FILE", str(tmp_path / "notices.log"))

    @dg.op
    def breaks():
        raise ValueError("the shard is short")

    @dg.job
    def a_job():
        breaks()

    with dg.DagsterInstance.ephemeral() as instance:
        result = a_job.execute_in_process(
            instance=instance, raise_on_error=False, tags={"dagster/partition": "small.03"}
        )
        event = next(event for event in result.all_events if event.event_type_value == "PIPELINE_FAILURE")
        context = dg.build_run_status_sensor_context(
            sensor_name="failure_notices",
            dagster_instance=instance,
            dagster_run=result.dagster_run,
            dagster_event=event,
        ).for_run_failure()
        failure_notices(context)
    told = (tmp_path / "notices.log").read_text()
    assert "a_job small.03 failed" in told
    assert "the shard is short" in told
