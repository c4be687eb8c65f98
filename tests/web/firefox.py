"""Firefox over WebDriver BiDi, which it speaks by itself: no driver stands between.

The protocol: https://www.w3.org/TR/webdriver-bidi/
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

START_SECONDS, ANSWER_SECONDS, PAGE_SECONDS = 60.0, 60.0, 30.0
_LISTENS = re.compile(r"WebDriver BiDi listening on (ws://\S+)")
# What the policy of the page forbids is on the console for people, not on that of the protocol.
_REPORT_POLICY = """() => addEventListener('securitypolicyviolation', (event) =>
  console.error(`${event.violatedDirective} forbids ${event.blockedURI}`))"""
_SETTLED = """new Promise((done) => {
  const look = () => {
    const said = document.querySelector('#verdict')?.textContent.trim();
    if (said && !document.querySelector('.skeleton')) document.fonts.ready.then(() => done(said));
    else setTimeout(look, 50);
  };
  look();
})"""


class Firefox:
    """One window at a time, and what went wrong or out since it was opened."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._call("session.new", capabilities={})
        self._call("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self._call("script.addPreloadScript", functionDeclaration=_REPORT_POLICY)
        self._window = ""

    def open(self, address: str) -> str:
        """Open an address in a new window; return the first sentence once the page holds its data.

        Raises:
            TimeoutError: the page is not settled in time.
        """
        before, self._window = (
            self._window,
            self._call("browsingContext.create", type="tab")["context"],
        )
        if before:
            self._call("browsingContext.close", context=before)
        self.problems.clear()
        self.requests.clear()
        self._call("browsingContext.navigate", context=self._window, url=address, wait="complete")
        return str(self.evaluate(_SETTLED, PAGE_SECONDS))

    def evaluate(self, expression: str, seconds: float = ANSWER_SECONDS) -> Any:
        """Return the value of an expression in the page: a string, a number or a truth."""
        found = self._call(
            "script.evaluate", seconds, expression=expression, target={"context": self._window},
            awaitPromise=True,
        )  # fmt: skip
        if found["type"] != "success":
            raise RuntimeError(found["exceptionDetails"]["text"])
        return found["result"].get("value")

    def _call(self, method: str, seconds: float = ANSWER_SECONDS, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        deadline = time.monotonic() + seconds
        while True:
            said = json.loads(self._socket.recv(max(0.0, deadline - time.monotonic())))
            if said.get("id") == number:
                if said["type"] == "error":
                    raise RuntimeError(f"{method}: {said['error']}: {said['message']}")
                return dict(said["result"])
            self._note(said)

    def _note(self, said: dict[str, Any]) -> None:
        params = said.get("params", {})
        if said.get("method") == "network.beforeRequestSent":
            if params["context"] == self._window:
                self.requests.append(params["request"]["url"])
        elif said.get("method") == "log.entryAdded" and params["level"] in {"error", "warn"}:
            if params["source"].get("context") != self._window:
                return  # a window that was closed while it loaded
            self.problems.append(f"{params['type']} {params['level']}: {params['text']}")


@contextmanager
def firefox(program: str) -> Iterator[Firefox]:
    """Run Firefox without a screen, with a profile of its own."""
    with ExitStack() as stack:
        profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        log = Path(profile, "firefox.log")
        command = [
            program, "--headless", "--no-remote", "--remote-debugging-port", "0",
            "--profile", profile,
        ]  # fmt: skip
        with log.open("wb") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said)
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        address = _address(process, log)
        yield Firefox(stack.enter_context(connect(f"{address}/session", max_size=None, proxy=None)))


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not (found := _LISTENS.search(log.read_text(errors="replace"))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"Firefox did not start: {log.read_text(errors='replace')}")
        time.sleep(0.05)
    return found[1]
