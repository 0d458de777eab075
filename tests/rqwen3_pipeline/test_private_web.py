"""The UI on a private socket: where it listens, who may come in, and that it answers there."""

import os
import signal
import socket
import stat
import subprocess
import time

import pytest

from model.errors import ConfigError, EnvironmentProblem
from rqwen3_pipeline import up
from rqwen3_pipeline.settings import RunRoot, Settings
from rqwen3_pipeline.up import private_socket
from tests.rqwen3_pipeline.site import Site

LONGEST_SOCKET_PATH = 107
PATIENCE_S = 150.0


def test_socket_lies_in_a_folder_of_the_users_own_with_a_path_that_a_socket_can_have(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    deep = tmp_path.joinpath(*["a rather long folder name"] * 8)
    listen = private_socket(RunRoot(deep))
    assert stat.S_IMODE(listen.parent.stat().st_mode) == 0o700
    assert len(str(listen)) < LONGEST_SOCKET_PATH
    assert private_socket(RunRoot(tmp_path)) != listen


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_socket_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "runtime").mkdir()
    os.chown(tmp_path / "runtime", 12345, 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    with pytest.raises(EnvironmentProblem, match="another user"):
        private_socket(RunRoot(tmp_path))


def test_port_where_runs_are_slurm_jobs_is_refused_with_the_way_to_the_private_socket(tmp_path):
    with pytest.raises(ConfigError, match=r"everyone .* could open that port. Leave it out .* a socket of your own"):
        up.serve(Settings(launcher="slurm", home=tmp_path / "home"), 3000)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("launcher", "port", "public", "private"),
    [("slurm", None, False, True), ("slurm", 39517, True, False), ("local", 39517, False, False)],
)
def test_ui_is_private_where_runs_are_slurm_jobs_unless_the_user_opens_it(
    tmp_path, monkeypatch, launcher, port, public, private
):
    served = []
    monkeypatch.setattr(up, "_serve", lambda settings, port, private, held: served.append(private) or 0)
    assert up.serve(Settings(launcher=launcher, home=tmp_path), port, public) == 0
    assert served == [private]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_up_with_slurm_answers_on_the_socket_alone_and_takes_it_away(tmp_path):
    site = Site(tmp_path)
    site.profile.write_text('[run]\nname = "tiny"\n')
    environment = {**os.environ, "RQWEN3_LAUNCHER": "slurm", "XDG_RUNTIME_DIR": str(tmp_path)}
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path)
    listen = private_socket(RunRoot(site.home))
    server = subprocess.Popen(site.command("up"), stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert "version" in ask(listen, server)
    finally:
        server.send_signal(signal.SIGTERM)
        said, _ = server.communicate(timeout=PATIENCE_S)
    assert f"{listen}" in said
    assert "ssh -N -L" in said
    assert not listen.exists()


def ask(listen, server):
    """GraphQL's answer over the socket, once it is there."""
    body = '{"query": "{version}"}'
    head = "POST /graphql HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert server.poll() is None, "rqwen3 up has ended"
        assert time.monotonic() < deadline, "it did not answer in time"
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            try:
                client.connect(str(listen))
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                return b"".join(iter(lambda: client.recv(65536), b"")).decode()
            except OSError:
                time.sleep(0.5)
