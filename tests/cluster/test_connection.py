"""What is refused about a cluster before anything is packed, against a server that answers as a cluster would."""

from __future__ import annotations

import json
import platform
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray

from raydp import cluster
from raydp.errors import InvalidValue

TOKEN = "the-right-token"


class FakeCluster:
    """Answers the questions that are asked before a job is sent, and counts what is sent."""

    def __init__(
        self, *, mode: str = "disabled", ray_version: str = ray.__version__, python: str | None = None
    ) -> None:
        self.mode, self.python = mode, python or platform.python_version()
        self.ray_version = ray_version
        self.sent: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path != "/api/authentication_mode" and fake.mode == "token":
                    given = self.headers.get("Authorization")
                    if given != f"Bearer {TOKEN}":
                        return self._answer(401 if given is None else 403, b"Unauthorized")
                answer = fake.answer(self.path)
                return (
                    self._answer(404, b"<html>") if answer is None else self._answer(200, json.dumps(answer).encode())
                )

            def do_PUT(self) -> None:
                fake.sent.append(self.path)
                self._answer(500, b"")

            do_POST = do_PUT

            def _answer(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> Any:
        return {
            "/api/authentication_mode": {"authentication_mode": self.mode},
            "/api/v0/cluster_metadata": {"data": {"rayVersion": self.ray_version, "pythonVersion": self.python}},
            "/api/version": {"version": "4", "ray_version": self.ray_version, "ray_commit": ""},
            "/nodes?view=summary": {"data": {"summary": []}},
            "/api/jobs/": [],
        }.get(path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def fakes() -> Iterator[Any]:
    made: list[FakeCluster] = []

    def make(**options: Any) -> FakeCluster:
        made.append(FakeCluster(**options))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "search.py"
    path.write_text("search = None\n")
    return path


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("options, name", [({"ray_version": "2.9.3"}, "Ray"), ({"python": "3.8.10"}, "Python")])
def test_another_version_is_named_before_anything_is_packed(
    fakes: Any, file: Path, options: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fakes(**options)
    monkeypatch.setattr("raydp.cluster.package.choose", lambda *a, **k: pytest.fail("packed"))
    with pytest.raises(InvalidValue, match=f"it runs {name} {next(iter(options.values()))}.*this machine") as caught:
        cluster.submit(file, name="x", address=fake.address)
    assert "Nothing was packed" in str(caught.value)
    assert not fake.sent


def test_an_address_that_does_not_answer_or_is_something_else(fakes: Any, file: Path) -> None:
    with pytest.raises(InvalidValue, match=r"address.*does not answer.*ssh -L"):
        cluster.jobs("http://127.0.0.1:9")
    for wrong in ("ray://host:10001", "http://", "http://host:port", "ftp://host:1"):
        with pytest.raises(InvalidValue, match="jobs API"):
            cluster.jobs(wrong)
    fake = fakes()
    fake.answer = lambda path: None  # a web server that is no Ray
    with pytest.raises(InvalidValue, match="must be the jobs API of a Ray cluster"):
        cluster.submit(file, name="x", address=fake.address)


def test_the_token_is_asked_for_taken_and_never_shown(
    fakes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = fakes(mode="token")
    with pytest.raises(InvalidValue, match=r"token.*must be given.*RAY_AUTH_TOKEN"):
        cluster.jobs(fake.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-wrong-secret")
    with pytest.raises(InvalidValue, match="is not the one of the cluster") as caught:
        cluster.jobs(fake.address)
    assert "a-wrong-secret" not in str(caught.value)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert cluster.jobs(fake.address) == []
    assert TOKEN not in repr(cluster.connect(fake.address))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    named = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(named))
    with pytest.raises(InvalidValue, match="must name a file that exists"):
        cluster.jobs(fake.address)
    named.write_text(TOKEN + "\n")
    assert cluster.jobs(fake.address) == []


def test_a_job_that_does_not_exist_suggests_near_ids(fakes: Any) -> None:
    fake = fakes()
    details = {
        "type": "SUBMISSION",
        "submission_id": "raydp-quick-cb975914-1",
        "entrypoint": "exec python -m raydp",
        "status": "RUNNING",
        "metadata": {
            "raydp_job": "raydp-quick-cb975914",
            "raydp_attempt": "1",
            "raydp_file": "quick.py",
            "raydp_storage": "/runs/quick",
            "raydp_content": "00",
        },
    }
    other = {"type": "SUBMISSION", "submission_id": "somebody-elses", "entrypoint": "true", "status": "RUNNING"}
    answer = fake.answer
    fake.answer = lambda path: [details, other] if path == "/api/jobs/" else answer(path)
    assert [job.id for job in cluster.jobs(fake.address)] == ["raydp-quick-cb975914"]
    assert cluster.find("raydp-quick-cb975914-1", fake.address).storage == "/runs/quick"
    for wrong in ("raydp-quick-cb97591", "somebody-elses"):
        with pytest.raises(KeyError, match=r"job = .* does not exist.*raydp-quick-cb975914"):
            cluster.stop(wrong, fake.address)


def test_what_is_wrong_with_the_submission_itself(fakes: Any, file: Path, tmp_path: Path) -> None:
    fake = fakes()
    with pytest.raises(InvalidValue, match="--python"):  # this head has not said yet
        cluster.submit(file, name="x", address=fake.address)
    with pytest.raises(InvalidValue, match="--storage"):
        cluster.submit(file, name="x", address=fake.address, storage="runs/x", python="/usr/bin/python3")
    with pytest.raises(InvalidValue, match="FILE"):
        cluster.submit(file, name="x", address=fake.address, working_dir=tmp_path / "elsewhere")
    assert not fake.sent
