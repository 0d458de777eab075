"""A small Hugging Face Hub on loopback, for the real clients: it speaks its protocol and fails on plan.

It knows what `huggingface_hub` and `datasets` ask of it for data sets and single files: a revision's
commit, tree listings by pages, path lists, and `resolve`, whose large files are redirected to another
host with size and hash in the headers, and offered over Xet too (which is not served), as on the Hub.
Every request is counted. A plan is a list of `Step`s for paths that contain a word: each request takes
the next one, the last one for good.
"""

import hashlib
import json
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_FROM_BYTES = 100


@dataclass
class Step:
    """What one request gets instead of its answer, or on the way to it."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    """Close the connection after so many bytes of the body."""
    reset: bool = False
    """Reset it instead, as a firewall does."""
    body: bytes | None = None
    """Serve this instead of the file's bytes (of equal length, as a rule)."""
    hold: threading.Event | None = None
    """Wait for this after `cut` bytes were sent, or before the answer."""


OK = Step()


@dataclass
class Repository:
    """A repository at one or more commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by path, by commit; the last commit is main."""
    gated: bool = False

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a commit with these files and nothing else; returns its name."""
        names = json.dumps({path: hashlib.sha256(data).hexdigest() for path, data in files.items()}, sort_keys=True)
        name = hashlib.sha1(f"{len(self.commits)} {names}".encode()).hexdigest()
        self.commits[name] = files
        return name

    def find(self, revision: str) -> str | None:
        """The commit that a revision stands for."""
        if revision == "main" and self.commits:
            return list(self.commits)[-1]
        return revision if revision in self.commits else None


class LoopbackHub:
    """The server; its repositories, plans and the requests that came."""

    def __init__(self, page: int = 1000) -> None:
        self.page = page
        self.repositories: dict[str, Repository] = defaultdict(Repository)
        """Data sets by `datasets/<owner>/<name>`, models by `<owner>/<name>`."""
        self.plans: dict[str, list[Step]] = {}
        self.bytes_per_s = 0
        """Of each body; 0 for as fast as it goes."""
        self.requests: list[tuple[float, str, str, str]] = []
        """Time, method, path, and the Range header."""
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.server.daemon_threads = True
        self.server.hub = self  # type: ignore[attr-defined]

    @property
    def endpoint(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server.server_port}"

    def dataset(self, name: str) -> Repository:
        """A data set's repository, made when it is first asked for."""
        return self.repositories[f"datasets/{name}"]

    def count(self, word: str = "", method: str = "") -> int:
        """How many requests came whose path contains a word."""
        return len([1 for _, verb, path, _ in self.requests if word in path and method in ("", verb)])

    def step(self, path: str) -> Step:
        """The next step of the plan for a path."""
        with self.lock:
            for word, steps in self.plans.items():
                if word in path:
                    return steps.pop(0) if len(steps) > 1 else steps[0]
        return OK


@contextmanager
def loopback_hub(page: int = 1000) -> Iterator[LoopbackHub]:
    """Serve while the block runs."""
    hub = LoopbackHub(page)
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        thread.join()
        hub.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.sent = self.rfile.read(length) if length else b""
        path = unquote(urlsplit(self.path).path)
        with self.hub.lock:
            self.hub.requests.append((time.monotonic(), self.command, path, self.headers.get("Range") or ""))
        self.step = self.hub.step(path)
        if self.step.hold is not None and self.step.cut is None:
            self.step.hold.wait(60)
        if self.step.status != 200:
            self._answer(self.step.status, b"", self.step.headers)
        elif path.startswith("/cdn/"):
            self._blob(path.removeprefix("/cdn/"))
        elif path.startswith("/api/datasets/"):
            self._api(path.removeprefix("/api/"))
        elif "/resolve/" in path:
            self._resolve(path)
        else:
            self._answer(404, b"{}", {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.step.cut
        try:
            for part in self._parts(body if cut is None else body[:cut]):
                self.wfile.write(part)
            self.wfile.flush()
        except OSError:
            return
        if cut is not None and cut < len(body):
            if self.step.hold is not None:
                self.step.hold.wait(60)
            self.close_connection = True
            if self.step.reset:
                time.sleep(0.1)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    def _parts(self, body: bytes) -> Iterator[bytes]:
        """A body in parts of a hundredth of a second."""
        step = self.hub.bytes_per_s // 100 or max(len(body), 1)
        for start in range(0, len(body), step):
            yield body[start : start + step]
            if self.hub.bytes_per_s:
                time.sleep(0.01)

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _missing(self, code: str, status: int = 404) -> None:
        self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _repository(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and commit, or None when the refusal has been sent."""
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._missing("RepoNotFound", 401 if self.path.startswith("/api/") else 404)
            return None
        if repository.gated and not self.headers.get("Authorization"):
            self._missing("GatedRepo", 401)
            return None
        commit = repository.find(revision)
        if commit is None:
            self._missing("RevisionNotFound")
            return None
        return repository, commit

    def _api(self, path: str) -> None:
        kind, owner, name, *rest = path.split("/")
        action, revision = (rest[0], rest[1]) if len(rest) > 1 else ("revision", "main")
        found = self._repository(f"{kind}/{owner}/{name}", revision)
        if found is None:
            return
        repository, commit = found
        files = repository.commits[commit]
        if action == "revision":
            siblings = [{"rfilename": file} for file in files]
            self._json({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings, "private": False, "tags": []})
        elif action == "tree":
            self._tree(files, "/".join(rest[2:]))
        elif action == "paths-info":
            wanted = parse_qs(self.sent.decode())["paths"]
            self._json([_entry(file, files[file]) for file in wanted if file in files])
        else:
            self._answer(404, b"{}", {})

    def _tree(self, files: dict[str, bytes], folder: str) -> None:
        query = parse_qs(urlsplit(self.path).query)
        prefix = f"{folder}/" if folder else ""
        inside = {file: data for file, data in files.items() if file.startswith(prefix)}
        if folder and not inside:
            self._missing("EntryNotFound")
            return
        entries: dict[str, dict[str, Any]] = {}
        for file, data in sorted(inside.items()):
            parts = file[len(prefix) :].split("/")
            for depth in range(1, len(parts)):
                path = prefix + "/".join(parts[:depth])
                entries[path] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            entries[file] = _entry(file, data)
        if query.get("recursive", ["false"])[0].lower() != "true":
            entries = {path: entry for path, entry in entries.items() if "/" not in path[len(prefix) :]}
        start = int(query.get("cursor", ["0"])[0])
        part = list(entries.values())[start : start + self.hub.page]
        headers = {}
        if start + self.hub.page < len(entries):
            query["cursor"] = [str(start + self.hub.page)]
            again = "&".join(f"{key}={values[0]}" for key, values in query.items())
            headers["Link"] = f'<{self.hub.endpoint}{urlsplit(self.path).path}?{again}>; rel="next"'
        self._json(part, headers)

    def _resolve(self, path: str) -> None:
        repo, _, rest = path.strip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        found = self._repository(repo, revision)
        if found is None:
            return
        repository, commit = found
        data = repository.commits[commit].get(file)
        if data is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        digest = hashlib.sha256(data).hexdigest()
        if len(data) < LFS_FROM_BYTES:
            self._answer(200, data, {"ETag": f'"{digest}"', "X-Repo-Commit": commit})
            return
        headers = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data)), "X-Repo-Commit": commit}
        headers |= {
            "X-Xet-Hash": digest,
            "X-Xet-Refresh-Route": f"{self.hub.endpoint}/api/{repo}/xet-read-token/{commit}",
        }
        place = f"http://localhost:{self.server.server_address[1]}/cdn/{quote(repo)}/{commit}/{quote(file)}"
        self._answer(302, b"", {**headers, "Location": place})

    def _blob(self, path: str) -> None:
        for name, repository in self.hub.repositories.items():
            for commit, files in repository.commits.items():
                file = path.removeprefix(f"{name}/{commit}/")
                if path.startswith(f"{name}/{commit}/") and file in files:
                    self._bytes(self.step.body if self.step.body is not None else files[file])
                    return
        self._answer(404, b"", {})

    def _bytes(self, data: bytes) -> None:
        wanted = self.headers.get("Range") or ""
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        if not start:
            self._answer(200, data, {})
        elif start >= len(data):
            self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        else:
            self._answer(206, data[start:], {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"})


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if len(data) >= LFS_FROM_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry
