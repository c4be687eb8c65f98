"""The Rankscope server: takes what agents send, stores and diagnoses it, answers people."""

from __future__ import annotations

from collections.abc import Sequence


def serve(argv: Sequence[str] | None = None) -> int:
    """Run the server until a signal; return the exit status. `argv` as of `rankscope serve`."""
    from rankscope_server.cli import serve as run  # uvicorn and FastAPI load only when needed

    return run(argv)
