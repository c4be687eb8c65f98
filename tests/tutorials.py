"""Types a tutorial of docs/tutorials as a reader would, and compares what is printed.

    python -m tests.tutorials docs/tutorials/own_script.md    shows the whole session

A page is typed in an empty folder, which is also an empty home, in one session of bash:

- A block with a title (```python title="train.py") is saved under that name.
- A block of `sh` is typed. Its commands end with code 0, or one of them with that of its
  `# exit code N` or `# exit code N or M`.
- A block of `text` shows what the commands above it print. Each of its lines is within a line that
  they print, now or within WAIT_SECONDS: programs in the background need a while. Numbers may
  differ, but not the number of a rank; … stands for any text.
- Ports that pages use (PORTS) are replaced by free ones.

What the page leaves running is ended afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port
from tests.scenarios.conftest import processes_of

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "tutorials"
PORTS = ("8787", "29500", "9000")
WAIT_SECONDS = 180.0
BLOCK_SECONDS = 600.0
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)
_CODE = re.compile(r"# exit code (\d+(?: or \d+)*)")
_NUMBER = r"\d+(?:[.,:]\d+)*"
_SHOWN = re.compile(rf"…|(?<!\w)[Rr]anks? \d+|{_NUMBER}|[^\d…]")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text())]


def is_shown(line: str, printed: str) -> bool:
    """Return whether a line of the page is within a line that was printed."""
    pattern = ""
    for part in _SHOWN.findall(" ".join(line.split())):
        if part == "…":
            pattern += ".*"
        elif part[0].isdigit():
            pattern += _NUMBER
        else:
            pattern += re.escape(part) + (r"(?!\d)" if part[-1].isdigit() else "")
    lines = (" ".join(one.split()) for one in _COLOUR.sub("", printed).splitlines())
    return any(re.search(pattern, one) for one in lines)


class Session:
    """A session of bash in which a page is typed."""

    def __init__(self, folder: Path, variables: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._home = folder / "home"
        self._home.mkdir()
        self._ports = {port: str(free_port()) for port in PORTS}
        self._log = folder / "session"
        self._typed = 0
        with self._log.open("wb") as log:
            self._bash = subprocess.Popen(
                ["bash", "--norc"], cwd=self._home, env=self._environment() | (variables or {}),
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
            )  # fmt: skip
        self._send("set -m")  # jobs are as in a terminal

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in ("LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
        }
        return kept | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self._home), "XDG_RUNTIME_DIR": str(self._folder), "COLUMNS": "120",
            "RANKSCOPE_SERVER_PORT": self._ports["8787"],
        }  # fmt: skip

    def type_page(self, page: Path) -> None:
        """Type all blocks; AssertionError where one is not as the page says."""
        began = 0
        for block in blocks(page):
            text = self._with_ports(block.text)
            if block.title:
                (self._home / block.title).write_text(text)
            elif block.language == "sh":
                began = self._log.stat().st_size
                self._type(text)
            elif block.language == "text":
                self._await(text, began)

    def printed(self, began: int = 0) -> str:
        """Return what was printed from a place of the session on."""
        with self._log.open("rb") as log:
            log.seek(began)
            return log.read().decode(errors="replace")

    def close(self) -> None:
        """End bash and all that was started in it."""
        self._bash.kill()
        self._bash.communicate()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 15
            while found := processes_of(self._folder):
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                if time.monotonic() > deadline:
                    break
                time.sleep(0.5)

    def _with_ports(self, text: str) -> str:
        for port, free in self._ports.items():
            text = re.sub(rf"\b{port}\b", free, text)
        return text

    def _send(self, line: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{line}\n")
        self._bash.stdin.flush()

    def _type(self, commands: str) -> None:
        self._typed += 1
        typed = self._folder / f"typed{self._typed}.sh"
        done = self._folder / f"done{self._typed}"
        typed.write_text(commands)
        self._send(f"failed=0; trap 'failed=$?' ERR; . {typed} </dev/null; trap - ERR")
        self._send(f"echo $failed > {done}.new; mv {done}.new {done}")
        deadline = time.monotonic() + BLOCK_SECONDS
        while not done.exists():
            assert time.monotonic() < deadline, f"does not end:\n{commands}\n{self.printed()}"
            time.sleep(0.05)
        expected = _CODE.search(commands)
        codes = expected[1].split(" or ") if expected else ["0"]
        assert done.read_text().strip() in codes, f"{commands}\n{self.printed()}"

    def _await(self, shown: str, began: int) -> None:
        missing = [line for line in shown.splitlines() if line.strip()]
        deadline = time.monotonic() + WAIT_SECONDS
        while missing := [line for line in missing if not is_shown(line, self.printed(began))]:
            assert time.monotonic() < deadline, f"not printed: {missing}\n{self.printed()}"
            time.sleep(0.2)


def main() -> int:
    """Type the pages that are named and show the sessions."""
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory(prefix="tutorial-") as folder:
            began = time.monotonic()
            session = Session(Path(folder))
            try:
                session.type_page(Path(name))
            finally:
                seconds = time.monotonic() - began
                sys.stdout.write(f"{session.printed()}{name}: {seconds:.0f} s\n")
                session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
