"""The Hub's real client against a small server on loopback that speaks what a file download needs."""

import hashlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

BODY = b'{"version": "1.0"}'
ETAG = hashlib.sha256(BODY).hexdigest()


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, *, with_body):
        found = self.path.split("?")[0] == "/Qwen/Qwen3-0.6B/resolve/main/tokenizer.json"
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(BODY) if found else 0))
        if found:
            self.send_header("ETag", f'"{ETAG}"')
            self.send_header("X-Repo-Commit", "a" * 40)
        else:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if found and with_body:
            self.wfile.write(BODY)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(environment, repo="Qwen/Qwen3-0.6B"):
    """In a process of its own, as the client reads its environment when it is imported."""
    code = f"from rqwen3_pipeline.corpus.hub import fetch_tokenizer\nprint(fetch_tokenizer({repo!r}).read_bytes())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def environment(tmp_path, hub, monkeypatch):
    import os

    return {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1"}


def test_tokenizer_is_downloaded_and_then_served_from_the_cache_offline(environment):
    assert fetch(environment).stdout.strip() == repr(BODY)
    offline = {**environment, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert fetch(offline).stdout.strip() == repr(BODY)


def test_tokenizer_offline_and_not_cached_names_the_way_out(environment):
    found = fetch({**environment, "HF_HUB_OFFLINE": "1"})
    assert found.returncode != 0
    assert "TOKENIZER=FILE" in found.stderr


def test_repository_missing_is_named(environment):
    found = fetch(environment, "Qwen/none")
    assert found.returncode != 0
    assert "tokenizer.json of Qwen/none" in found.stderr
