"""The one outbound HTTP client: limits, redirects, proxies, and errors with words for people."""

from __future__ import annotations

import contextlib
import gzip
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.address import Address, AddressError, proxy_of, read_address
from rankscope.http import Client, HttpError

PROXY = "http://proxy.example:3128"


class Handler(BaseHTTPRequestHandler):
    """Answers by the table of paths and notes what came."""

    protocol_version = "HTTP/1.1"
    answers: ClassVar[dict[str, tuple[int, dict[str, str], bytes]]] = {}
    seen: ClassVar[list[tuple[str, str, dict[str, str]]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.command, self.path, dict(self.headers.items())))
        status, headers, body = self.answers.get(self.path, (404, {}, b""))
        if status == 0:
            time.sleep(float(headers["wait"]))
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.answers, Handler.seen = {}, []
    with ThreadingHTTPServer(("0.0.0.0", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_token_stays_with_its_host(url: str) -> None:
    port = url.rpartition(":")[2]
    Handler.answers = {
        "/here": (302, {"Location": "/end"}, b""),
        "/away": (302, {"Location": f"http://127.0.0.2:{port}/end"}, b""),
        "/end": (200, {}, b"{}"),
    }
    for path, tokens in (("/here", ["Bearer t"] * 2), ("/away", ["Bearer t", ""])):
        Handler.seen.clear()
        assert Client(url, "t").request("GET", path).status == 200
        assert [headers.get("Authorization", "") for _, _, headers in Handler.seen] == tokens


def test_redirects_end_and_a_post_is_not_redirected(url: str) -> None:
    Handler.answers = {
        "/loop": (302, {"Location": "/loop"}, b""),
        "/file": (302, {"Location": "file:///etc/passwd"}, b""),
    }
    client = Client(url)
    with pytest.raises(HttpError, match="more than 5 redirects"):
        client.request("GET", "/loop")
    with pytest.raises(HttpError, match="redirected to 'file:///etc/passwd'"):
        client.request("GET", "/file")
    assert client.request("POST", "/loop", b"x").status == 302


def test_an_answer_is_limited_by_what_it_unpacks_to(url: str) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    Handler.answers = {
        "/bomb": (200, {"Content-Encoding": "gzip"}, bomb),
        "/plain": (200, {}, bytes((1 << 20) + 1)),
        "/fits": (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(1 << 20))),
        "/error": (500, {"Content-Encoding": "gzip"}, bomb),
    }
    client = Client(url)
    tracemalloc.start()
    for path in ("/bomb", "/plain"):
        with pytest.raises(HttpError, match="more than 1048576 bytes"):
            client.request("GET", path)
    assert len(client.request("GET", "/error").body) == 64 << 10
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert len(client.request("GET", "/fits").body) == 1 << 20


@pytest.mark.parametrize("damage", [b"noise", gzip.compress(b"word" * 99)[:-9], b""])
def test_damaged_gzip_is_an_error_of_http(url: str, damage: bytes) -> None:
    Handler.answers = {"/": (200, {"Content-Encoding": "gzip"}, damage)}
    if not damage:
        assert Client(url).request("GET", "/").body == b""
        return
    with pytest.raises(HttpError, match="gzip is"):
        Client(url).request("GET", "/")


def test_errors_name_the_reason_alone(url: str) -> None:
    Handler.answers = {"/slow": (0, {"wait": "0.5"}, b""), "/cut": (0, {"wait": "0"}, b"")}
    for client, path, words in (
        (Client("http://127.0.0.1:9"), "/", "[Errno 111] Connection refused"),
        (Client(url, timeout_seconds=0.1), "/slow", "timed out"),
        (Client(url), "/cut", "Remote end closed connection without response"),
    ):
        with pytest.raises(HttpError) as failure:
            client.request("GET", path)
        assert str(failure.value) == words
    with pytest.raises(HttpError, match=r"Name or service not known|name resolution"):
        Client("http://nothing.invalid", environ={}).request("GET", "/")
    with pytest.raises(HttpError, match="latin-1"):
        Client(url, "tøken€").request("GET", "/")


def test_a_token_out_of_a_file_is_sent_without_its_line_end(url: str) -> None:
    Handler.answers = {"/": (200, {}, b"{}")}
    for client, token in ((Client(url, "t\n"), ""), (Client(url), " t\r\n")):
        assert client.request("GET", "/", token=token).status == 200
    assert [headers["Authorization"] for _, _, headers in Handler.seen] == ["Bearer t"] * 2
    for bad in ("secret\nword", "secret\0word"):
        with pytest.raises(HttpError, match="control character is in the token") as failure:
            Client(url, bad).request("GET", "/")
        assert "secret" not in str(failure.value)


def test_an_answer_nested_without_end_has_no_fields(url: str) -> None:
    Handler.answers = {"/": (500, {}, b"[" * 60_000)}
    answer = Client(url).request("GET", "/")
    assert answer.fields == {}
    assert answer.why() == f"HTTP 500: {'[' * 80}"


DRIPS = (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: ")


@pytest.mark.parametrize("head", DRIPS, ids=["body", "headers"])
def test_an_answer_that_comes_byte_by_byte_is_given_up(head: bytes) -> None:
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            connection.sendall(head)
            while not ended.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        client = Client(
            f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.4,
            max_answer_bytes=1 << 16,
        )  # fmt: skip
        begun = time.monotonic()
        with pytest.raises(HttpError, match="timed out") as failure:
            client.request("GET", "/")
        assert failure.value.is_timeout
        assert time.monotonic() - begun > 1.3  # an answer of this size may take as long
        ended.set()


def test_a_large_body_may_take_longer_than_the_limit_of_one_wait() -> None:
    body, got = bytes(1 << 19), bytearray()

    def slow(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not got.endswith(body):
                got.extend(connection.recv(4096))
                time.sleep(0.005)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=slow, args=(listener,), daemon=True).start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.2)
        assert client.request("POST", "/", body).status == 200


def test_a_post_that_is_redirected_says_where_the_server_is(url: str) -> None:
    Handler.answers = {"/": (308, {"Location": "https://new.example/"}, b"<html>moved</html>")}
    assert Client(url).request("POST", "/", b"x").why() == (
        "HTTP 308: moved to https://new.example/: set RANKSCOPE_SERVER"
    )


def test_a_kept_connection_that_was_closed_is_tried_anew_once(url: str) -> None:
    Handler.answers = {"/": (200, {}, b"x"), "/cut": (0, {"wait": "0"}, b"")}
    client = Client(url)
    client.request("GET", "/")
    first = client._connection
    client.request("GET", "/")
    assert client._connection is first
    with pytest.raises(HttpError):
        client.request("POST", "/cut", b"")
    assert [path for _, path, _ in Handler.seen] == ["/", "/", "/cut", "/cut"]


def test_close_ends_a_request_that_waits(url: str) -> None:
    Handler.answers = {"/": (200, {}, b"x"), "/slow": (0, {"wait": "3"}, b"")}
    client = Client(url, timeout_seconds=30.0)
    client.request("GET", "/")
    threading.Timer(0.3, client.close).start()
    begun = time.monotonic()
    with pytest.raises(HttpError):
        client.request("GET", "/slow")
    assert time.monotonic() - begun < 2


def test_close_ends_an_answer_that_trickles(url: str) -> None:
    """Also one that ends with its connection: that has given its socket away by then."""
    has_begun = threading.Event()

    class Trickling(BaseHTTPRequestHandler):  # HTTP/1.0
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x")
                    has_begun.set()
                    time.sleep(0.01)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Trickling) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_port}", max_answer_bytes=1 << 40)
        ended = threading.Event()

        def ask() -> None:
            with contextlib.suppress(HttpError):
                client.request("GET", "/")
            ended.set()

        threading.Thread(target=ask, daemon=True).start()
        assert has_begun.wait(20)
        client.close()
        assert ended.wait(20)
        server.shutdown()


def test_a_peer_that_is_refused_gets_no_request(url: str) -> None:
    asked: list[str] = []

    def refuse(address: str) -> None:
        asked.append(address)
        raise HttpError("not this one")

    with pytest.raises(HttpError, match="not this one"):
        Client(url.replace("127.0.0.1", "localhost"), "t", check_peer=refuse).request("GET", "/")
    assert asked == ["127.0.0.1"]
    assert Handler.seen == []


def test_the_target_of_a_redirect_is_checked_too(url: str) -> None:
    asked: list[str] = []
    Handler.answers["/"] = (302, {"Location": url.replace("127.0.0.1", "localhost") + "/b"}, b"")
    client = Client(url, check_peer=asked.append)
    assert client.request("GET", "/").status == 404
    assert len(asked) == 2


def test_a_download_of_any_size_goes_to_the_file(url: str, tmp_path: Path) -> None:
    Handler.answers = {"/trace": (200, {}, bytes(3 << 20)), "/gone": (404, {}, b"{}")}
    client = Client(url)
    assert client.download("/trace", tmp_path / "trace").status == 200
    assert (tmp_path / "trace").stat().st_size == 3 << 20
    assert client.download("/gone", tmp_path / "gone").status == 404
    assert not (tmp_path / "gone").exists()


def test_a_proxy_gets_the_whole_address_and_its_password(url: str) -> None:
    port = url.rpartition(":")[2]
    Handler.answers = {"http://scope.example:8787/x/api": (200, {}, b"")}
    environ = {"http_proxy": f"http://me:p%40ss@127.0.0.1:{port}"}
    client = Client("scope.example:8787/x", environ=environ)
    assert client.route == (
        f"http://scope.example:8787/x through the proxy 127.0.0.1:{port} (http_proxy)"
    )
    assert client.request("GET", "/api").status == 200
    assert Handler.seen[0][2]["Proxy-Authorization"] == "Basic bWU6cEBzcw=="
    away = Client("http://scope.example", environ={"http_proxy": "http://127.0.0.1:9"})
    with pytest.raises(HttpError, match=r"^the proxy: \[Errno 111\] Connection refused$"):
        away.request("GET", "/")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("node0:8787", "http://node0:8787"),
        ("http://node0:8787/", "http://node0:8787"),
        ("https://scope.example/x/", "https://scope.example/x"),
        ("[fd00::1]:8787", "http://[fd00::1]:8787"),
        ("HTTP://Node0", "http://node0"),
    ],
)
def test_an_address_may_leave_out_what_is_clear(text: str, url: str) -> None:
    assert read_address(text).url == url


@pytest.mark.parametrize(
    "text", ["", "ftp://x", "http://", "http://x:port", "http://x:99999", "//"]
)
def test_an_address_that_is_none_is_one_sentence_with_a_remedy(text: str) -> None:
    with pytest.raises(AddressError) as failure:
        read_address(text)
    assert str(failure.value) == (
        f"{text!r} is no address of a server: "
        "expected http://HOST:PORT in RANKSCOPE_SERVER or --server"
    )


@pytest.mark.parametrize(
    ("address", "environ", "found"),
    [
        ("http://10.1.2.3", {"HTTP_PROXY": PROXY}, "proxy.example:3128 (HTTP_PROXY)"),
        ("http://10.1.2.3", {"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, ""),
        ("http://10.1.2.3", {"HTTP_PROXY": PROXY, "no_proxy": "10.0.0.0/8"}, ""),
        ("http://10.1.2.3", {"HTTP_PROXY": PROXY, "no_proxy": "10.1.2.3"}, ""),
        ("http://11.1.2.3", {"HTTP_PROXY": PROXY, "no_proxy": "10.0.0.0/8 x/y"},
         "proxy.example:3128 (HTTP_PROXY)"),
        ("http://[fd00::1]:1", {"http_proxy": PROXY, "no_proxy": "fd00::/8"}, ""),
        ("http://127.0.0.1:1", {"http_proxy": PROXY}, ""),
        ("http://localhost", {"http_proxy": PROXY}, ""),
        ("http://[::1]", {"http_proxy": PROXY}, ""),
        ("https://x", {"https_proxy": "https://p"}, "p:3128 (https_proxy)"),
    ],
)  # fmt: skip
def test_the_proxy_on_the_way(address: str, environ: dict[str, str], found: str) -> None:
    proxy = proxy_of(read_address(address), environ)
    assert (proxy.shown if proxy is not None else "") == found


def test_an_address_is_found_again_by_its_parts() -> None:
    assert read_address("https://a:1/b") == Address("https", "a", 1, "/b")


def test_a_rank_loads_no_http_client(tmp_path: Path) -> None:
    script = (
        "import sys, rankscope, rankscope.rank.runtime\n"
        "rankscope.init()\n"
        "print({'urllib3', 'http.client', 'rankscope.http'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin", "RANKSCOPE_COLLECTOR": "0", "RANKSCOPE_SERVER": "node0:8787",
             "RANKSCOPE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.strip() == "set()"


@given(st.text("ab09[]:/.@%?# -", max_size=25) | st.text(max_size=25))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    """What is taken is read back from its own form: links and requests name one server."""
    with contextlib.suppress(AddressError):
        address = read_address(text)
        assert read_address(address.url) == address
