"""What a cluster is, found out before anything is sent to it: whether it answers, to whom, and with which versions."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
import shlex
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
import requests
from ray.job_submission import JobSubmissionClient

from raydp.errors import InvalidValue, RaydpError

_SECONDS = 10.0  # that a cluster may take for one small answer


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A cluster that answered.

    Attributes:
        address: of its jobs API, as ``http://HOST:PORT``.
        client: Ray's own, with the token set.
        ray_version, python_version: of the cluster.
        interpreter: the Python that its workers run under; None if the cluster does not say.
    """

    address: str
    client: JobSubmissionClient = field(repr=False)
    ray_version: str
    python_version: str
    interpreter: str | None

    def require_same_versions(self) -> None:
        """Refuse a cluster whose Ray or Python is another one: what is written here would not run there.

        Raises:
            InvalidValue: the first two numbers of one of the versions differ; both are named.
        """
        for name, there, here in (
            ("Ray", self.ray_version, ray.__version__),
            ("Python", self.python_version, platform.python_version()),
        ):
            if there.split(".")[:2] != here.split(".")[:2]:
                raise InvalidValue(
                    "address",
                    self.address,
                    f"must be a cluster of this machine's {name}: it runs {name} {there}, this machine {here}",
                    f"Install {name} {there} here, or start the cluster with {name} {here}. Nothing was packed.",
                )


def connect(address: str) -> Connection:
    """The cluster at the address.

    Args:
        address: of the jobs API, which is the dashboard's: ``http://HOST:8265``, or ``HOST:8265``.

    Raises:
        InvalidValue: the address is of another kind, does not answer, or is no Ray cluster; or the token is missing or
            wrong.
    """
    url = _url(address)
    headers = {}
    if _ask(url, "/api/authentication_mode", {}).get("authentication_mode") == "token":
        token = _token()
        if token is None:
            raise InvalidValue(
                "token", None, f"must be given: {url} asks for one", "Set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
            )
        _warn_if_readable(url)
        headers = {"Authorization": f"Bearer {token}"}
    try:
        metadata = _ask(url, "/api/v0/cluster_metadata", headers)["data"]
        ray_version, python_version = str(metadata["rayVersion"]), str(metadata["pythonVersion"])
    except (KeyError, TypeError) as error:
        raise _no_cluster(url, "it does not state its versions") from error
    for module in ("dashboard_sdk", "job.sdk"):  # what is sent, and how a log ended, is said by raydp
        logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)
    try:
        client = JobSubmissionClient(url, headers=dict(headers))
    except (RuntimeError, ConnectionError, requests.RequestException) as error:
        raise _no_cluster(url, str(error)) from error
    return Connection(
        address=url,
        client=client,
        ray_version=ray_version,
        python_version=python_version,
        interpreter=_interpreter(url, headers),
    )


def _url(address: str) -> str:
    full = address if "://" in address else f"http://{address}"
    parts = urlsplit(full)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # a port that is no number
        known = False
    if not known:
        raise InvalidValue(
            "address",
            address,
            "must be that of the cluster's jobs API, http://HOST:PORT",
            "Jobs are sent to the dashboard's port, by default 8265: http://HEAD:8265.",
        )
    return full.rstrip("/")


def _ask(url: str, path: str, headers: dict[str, str]) -> dict[str, Any]:
    """The JSON object that the cluster answers. Raises InvalidValue for everything else."""
    try:
        answer = requests.get(url + path, headers=headers, timeout=_SECONDS)
    except requests.RequestException as error:
        raise InvalidValue(
            "address",
            url,
            f"does not answer ({type(error).__name__})",
            "Check that the cluster runs with its dashboard, and that a tunnel to it is open: "
            "ssh -L 8265:localhost:8265 HEAD.",
        ) from error
    if answer.status_code in (401, 403):
        raise InvalidValue(
            "token",
            "(not shown)",
            f"is not the one of the cluster at {url}",
            "Set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the cluster's token; `ray get-auth-token` prints it there.",
        )
    try:
        found = answer.json()
    except ValueError as error:
        raise _no_cluster(url, f"{path} answers {answer.status_code}") from error
    if not isinstance(found, dict):
        raise _no_cluster(url, f"{path} answers {answer.status_code}")
    return found


def _no_cluster(url: str, why: str) -> InvalidValue:
    return InvalidValue(
        "address", url, f"must be the jobs API of a Ray cluster ({why})", "Give the dashboard's address, port 8265."
    )


def _token() -> str | None:
    """The token that Ray itself would take, in Ray's order: environment, named file, ~/.ray/auth_token."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return file.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        if named:
            raise InvalidValue(
                "RAY_AUTH_TOKEN_PATH", named, "must name a file that exists", "Write the token into it."
            ) from None
        return None
    except OSError as error:
        raise RaydpError(f"the token in {file} cannot be read ({error.strerror}). Set RAY_AUTH_TOKEN.") from error


def _warn_if_readable(url: str) -> None:
    """Say so where the token would pass a network in clear text."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = host == "localhost"
    if parts.scheme == "http" and not here:
        warnings.warn(
            f"the token travels to {host} in clear text: use https, or a tunnel (ssh -L 8265:localhost:8265 {host})",
            stacklevel=3,
        )


def _interpreter(url: str, headers: dict[str, str]) -> str | None:
    """The Python of the head's workers, from the command line of its raylet; None before the head has reported it."""
    summary = _ask(url, "/nodes?view=summary", headers).get("data", {}).get("summary", [])
    for node in summary:
        if not node.get("raylet", {}).get("isHeadNode"):
            continue
        for argument in node.get("cmdline") or ():
            if argument.startswith("--python_worker_command="):
                return shlex.split(argument.partition("=")[2])[0]
    return None
