"""One question to one server, with a time limit."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

#: The state of a large cluster is about a megabyte.
MAX_ANSWER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a cluster can take a job, and why it is thought so, in one line."""

    is_up: bool
    reason: str


class NotToldError(Exception):
    """The server did not tell its state; ``probe`` is what follows from that alone."""

    def __init__(self, *, is_up: bool, reason: str) -> None:
        super().__init__(reason)
        self.probe = Probe(is_up, reason)


def connect(host_port: str, seconds: float) -> Probe:
    """Say whether somebody listens there."""
    host, _, port = host_port.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError as error:
        raise _unreachable(host_port, error) from error
    return Probe(True, f"{host_port} accepts connections")


def read(url: str, path: str, seconds: float) -> bytes:
    """Return what a server answers to GET.

    Who answers but does not let us read (no credentials are sent, its certificate is of a private authority) counts as
    up: the next submission will tell. Redirects are not followed: they lead to a login page or to another cluster.
    """
    try:
        status, body = _get(url + path, seconds)
    except ssl.SSLCertVerificationError as error:
        raise NotToldError(is_up=True, reason=f"{url} answers, with a certificate that is not trusted here") from error
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from error
    if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        raise NotToldError(is_up=True, reason=f"{url} answers, but does not tell its state to us ({status})")
    if status != http.HTTPStatus.OK:
        raise NotToldError(is_up=False, reason=f"{url}{path} answers {status}")
    return body


def read_json(url: str, path: str, seconds: float) -> dict[str, Any]:
    """Return the object that a server answers with; whoever answers something else is not the one that was meant."""
    body = read(url, path, seconds)
    try:
        told = json.loads(body)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise NotToldError(is_up=False, reason=f"{url}{path} does not answer with a state; is it the right URL?")
    return told


def _get(url: str, seconds: float) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection_class = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connection_class(parts.netloc, timeout=seconds)
    try:
        connection.request("GET", parts.path, headers={"Accept": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(MAX_ANSWER_BYTES)
    finally:
        connection.close()


def _unreachable(where: str, error: Exception) -> NotToldError:
    told = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return NotToldError(is_up=False, reason=f"{where} cannot be reached: {told}")
