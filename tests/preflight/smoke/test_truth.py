"""Where this process listens, read from /proc."""

from __future__ import annotations

import socket

import pytest

from rankscope.preflight.collective.truth import _interface_of, listening, readable


@pytest.mark.parametrize(
    ("shown", "address"),
    [
        ("0100007F", "127.0.0.1"),
        ("0101007F", "127.0.1.1"),
        ("0200A8C0", "192.168.0.2"),
        ("00000000000000000000000001000000", "::1"),
        ("B80D01200000000000000000010000AC", "2001:db8::ac00:1"),
    ],
)
def test_addresses_as_the_kernel_shows_them(shown: str, address: str) -> None:
    assert readable(shown) == address


def test_only_own_listening_sockets_count() -> None:
    before = listening()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
    ):
        new = {inode: where for inode, where in listening().items() if inode not in before}
    assert list(new.values()) == ["127.0.0.1"]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1"])
def test_all_of_loopback_is_one_interface(address: str) -> None:
    assert _interface_of(address).startswith("lo")
