"""A real server of the desk, and what one person could do to shut out the others."""

import http.client
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from conftest import write
from jobs import children_of, is_alive, serving, wait_until
from models import save_tiny_model

pytest.importorskip("fastapi")

from histocoder.desk.web.connections import HEAD_SECONDS, MAX_LOCAL_CONNECTIONS
from histocoder.desk.web.users import FREE_ATTEMPTS, Attempts, Users

CODED = ("occ1,lang,hisco_1,prob_1,conf", "baker,en,77610,0.6,0.6", "smith,en,95410,0.5,0.5")


class Server:
    """A desk's server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], address: str, workspace: Path) -> None:
        self.process = process
        self.port = urlsplit(address).port
        self.workspace = workspace
        self.token = (workspace / "token").read_text()

    def ask(self, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
        """Return status and text of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Authorization": f"Bearer {self.token}"} | headers
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def json(self, path: str, **body: Any) -> tuple[int, Any]:
        sent = {"Content-Type": "application/json"}
        status, text = self.ask(path, json.dumps(body), **sent) if body else self.ask(path)
        return status, json.loads(text)

    def sign_in(self, password: str) -> int:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        return self.ask("/sign-in", urlencode({"name": "Anna", "password": password}), **form)[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model = save_tiny_model(folder / "model")
    coded = write(folder / "coded.csv", *CODED)
    with serving(model, "--port", 0, "--data", coded) as (process, address):
        yield Server(process, address, model / "desk")


def test_wrong_passwords_keep_nobody_waiting(server: Server):
    Users(server.workspace / "users.json", server.token).add("Anna", "password of Anna")
    with ThreadPoolExecutor(90) as pool:
        attempts = [pool.submit(server.sign_in, "wrong") for _ in range(90)]
        begun = time.monotonic()
        assert server.ask("/api/about")[0] == 200
        waited = time.monotonic() - begun
        statuses = [attempt.result() for attempt in attempts]
    # 90 passwords in turn take 18 seconds and more
    assert waited < 10
    assert {*statuses} == {
        401,
        429,
    }
    assert statuses.count(401) <= FREE_ATTEMPTS + 1
    assert server.sign_in("password of Anna") == 429
    wait_until(lambda: server.sign_in("password of Anna") == 303)


def test_attempts_of_others_do_not_count(monkeypatch: pytest.MonkeyPatch):
    attempts = Attempts()
    for _ in range(FREE_ATTEMPTS + 3):
        attempts.add_wrong("Anna", "10.0.0.1")
    assert 7 < attempts.seconds_to_wait("Anna", "10.0.0.1") <= 8
    assert (
        attempts.seconds_to_wait("Anna", "10.0.0.2")
        == attempts.seconds_to_wait("Bo", "10.0.0.1")
        == 0
    )
    attempts.forget("Anna", "10.0.0.1")
    assert attempts.seconds_to_wait("Anna", "10.0.0.1") == 0
    monkeypatch.setattr("histocoder.desk.web.users.MAX_REMEMBERED", 3)
    for number in range(10):
        for _ in range(FREE_ATTEMPTS):
            attempts.add_wrong(f"name {number}", "10.0.0.1")
    assert (
        attempts.seconds_to_wait("name 9", "10.0.0.1")
        > 0
        == attempts.seconds_to_wait("name 0", "10.0.0.1")
    )


@pytest.mark.slow
def test_half_open_connections_shut_nobody_out(server: Server):
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(150)
        ]
        for number, connection in enumerate(silent):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127" if number % 2 else b"")
        assert server.ask("/api/about")[0] == 200
        many = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(300)
        ]
        many[-1].settimeout(HEAD_SECONDS / 2)
        # one too many, at once
        assert len(silent) + len(many) > MAX_LOCAL_CONNECTIONS
        assert is_closed(many[-1])
        for connection in silent[:2]:
            connection.settimeout(3 * HEAD_SECONDS)
            assert is_closed(connection)
    assert server.ask("/api/about")[0] == 200


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_only_their_owner_reads_a_workspace(server: Server):
    assert server.ask("/api/files?name=a.csv", "occ1\nfarmer\n")[0] == 201
    assert server.ask("/api/improve", "")[0] == 200
    files = [path for path in server.workspace.rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (server.workspace, *files))


def test_work_goes_on_when_the_disk_has_room_again(server: Server):
    def limit_files(size: int) -> None:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    cards = [one["card"] for one in server.json("/api/review/1/cards")[1]]
    file = json.loads(server.ask("/api/files?name=a.csv", "occ1\nfarmer\n")[1])["id"]
    limit_files(1)
    for path, body in (
        (f"/api/review/cards/{cards[0]['id']}", {"version": 0, "codes": ["61110"]}),
        (f"/api/files/{file}/code", {"input_col": "occ1"}),
    ):
        status, answer = server.json(path, **body)
        assert status in (422, 507) and str(server.workspace) not in str(answer), answer
    assert server.json(f"/api/files/{file}")[1]["state"] == "new"
    limit_files(resource.RLIM_INFINITY)
    assert server.json(f"/api/review/cards/{cards[0]['id']}", version=0, codes=["61110"])[0] == 200
    assert server.json(f"/api/files/{file}/code", input_col="occ1")[0] == 200
    wait_until(lambda: server.json(f"/api/files/{file}")[1]["state"] == "done")


@pytest.mark.slow
def test_training_ends_with_a_killed_server(tmp_path: Path):
    flags = ("--port", 0, "--workspace", tmp_path / "desk")
    with serving(None, *flags) as (process, address):
        server = Server(process, address, tmp_path / "desk")
        file = json.loads(server.ask("/api/titles", "")[1])["id"]
        options = {
            "input_col": "occ1",
            "target_cols": ["hisco_1"],
            "language_col": "lang",
            "titles": "none",
        }
        model = server.json(f"/api/files/{file}/train", **options)[1]["id"]
        wait_until((tmp_path / "desk" / "models" / model / ".lock").exists)
        (trainer,) = children_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not is_alive(trainer))
        assert not (
            tmp_path / "desk" / "models" / model / ".lock"
        ).exists()  # it has saved, and let go of its run
