"""`rankscope doctor`, forked from where PyTorch is imported: it looks at all of it, for seconds."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests import fork_server

PROGRAM = Path(__file__).parent / "agent" / "scripts" / "command.py"


def run(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it to its end, as `subprocess.run` does when it captures all that is said."""
    words = ["doctor", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        code = fork_server.server().run(PROGRAM, 0, words, output, errors=errors, environ=env)
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())
