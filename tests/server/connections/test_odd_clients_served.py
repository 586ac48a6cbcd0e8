"""Clients that send half a request, or no HTTP, to any port of a node of fake engines."""

import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from tests.server.node import ServedNode, served_node

PORTS = ("url", "admin_url")


def connected(node: ServedNode, port: str) -> socket.socket:
    address = urlsplit(getattr(node, port))
    assert address.hostname
    assert address.port
    return socket.create_connection((address.hostname, address.port), timeout=60)


def answer(client: socket.socket) -> bytes:
    """Return all that a server sends until it ends the connection."""
    found = b""
    while piece := client.recv(1 << 16):
        found += piece
    return found


def test_a_client_that_sends_half_a_request_does_not_keep_its_connection(tmp_path: Path) -> None:
    half = b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"
    with served_node(tmp_path, "--client-timeout", "1") as node, ExitStack() as clients:
        # All at once: each waits for the time-out.
        given = [
            (clients.enter_context(connected(node, port)), sent)
            for port in PORTS
            for sent in (b"", half)
        ]
        for client, sent in given:
            client.sendall(sent)
        for client, sent in given:
            assert answer(client)[:12] == (b"HTTP/1.1 408" if sent else b"")


def test_what_is_not_http_is_answered_and_fills_no_log(tmp_path: Path) -> None:
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    with served_node(tmp_path) as node:
        for port in PORTS:
            for sent in (
                b"\x16\x03\x01\x00\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\r\nA b\r\n",
            ):
                with connected(node, port) as client:
                    client.sendall(sent)
                    assert answer(client).startswith(b"HTTP/1.1 400")
            with connected(node, port) as client:
                client.sendall(upgrade)
                assert client.recv(12).startswith(b"HTTP/1.1 ")
        printed = "\n".join(node.stop())
    assert "Invalid HTTP" not in printed
    assert "upgrade" not in printed
