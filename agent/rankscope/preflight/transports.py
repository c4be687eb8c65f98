"""The transports by which reports travel beside the mesh, made from what was asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.preflight.exchange.carrier import Carrier, CarrierError
from rankscope.preflight.exchange.discover import Discovery
from rankscope.preflight.key import RunKey
from rankscope.preflight.plan import UNNAMED, Request, UsageError
from rankscope.preflight.secret import Secret

if TYPE_CHECKING:
    from rankscope.preflight.exchange.ssh import SshCarrier


_NO_OTHERS = "--ssh: it is not known which other nodes: add --nodes or --hostfile"


@dataclass(frozen=True, kw_only=True)
class Transports:
    """What was asked for; empty: not by this transport."""

    share: str = ""  # a directory
    server: str = ""
    is_over_ssh: bool = False  # start the other agents
    is_on_lines: bool = False  # we were started over ssh: reports go by stdin and stdout
    stop: Callable[[], None] = lambda: None  # ends this agent, when the one that started it is gone

    def carriers(
        self, key: RunKey, secret: Secret, who: Discovery, request: Request
    ) -> tuple[Carrier, ...]:
        """Open them. Raises UsageError."""
        made: list[Carrier] = []
        try:
            if self.share:
                made.append(_share(self.share, key))
            if self.server:
                made.append(_server(self.server, key, who, os.environ))
            if self.is_over_ssh:
                others = [node for node in who.nodes if node != who.me]
                if not others:
                    raise UsageError(_NO_OTHERS)
                made.append(over_ssh(others, key.run_id, secret, who, request))
        except CarrierError as error:
            raise UsageError(str(error)) from error
        if self.is_on_lines:
            from rankscope.preflight.exchange.lines import LineCarrier

            made.append(LineCarrier(sys.stdin.buffer, sys.stdout.buffer, self.stop))
        return tuple(made)


def _share(directory: str, key: RunKey) -> Carrier:
    from rankscope.preflight.exchange.share import ShareCarrier

    if not os.path.isdir(directory):
        raise UsageError(f"--share: {directory} is no directory here; give one that all nodes see")
    return ShareCarrier(directory, key)


def _server(server: str, key: RunKey, who: Discovery, environ: Mapping[str, str]) -> Carrier:
    from rankscope.preflight.exchange.http import Meeting, ServerCarrier

    if key.run_id == UNNAMED:
        raise UsageError("--server: other jobs meet there too: add --run NAME, the same everywhere")
    meeting = Meeting(
        run=key.run_id,
        proof=key.derived("meeting").hex(),
        node=who.me,
        node_rank=who.node_rank,
        num_nodes=who.num_nodes,
        nodes=who.nodes,
        hello_token=key.words_for_server(),
        training_run=environ.get("RANKSCOPE_RUN_ID", ""),
    )
    return ServerCarrier(server, meeting, environ.get("RANKSCOPE_TOKEN", ""), environ)


def over_ssh(
    nodes: Sequence[str], run_id: str, secret: Secret, who: Discovery, request: Request
) -> SshCarrier:
    """Return the carrier that starts agents on `nodes`. Raises UsageError."""
    from rankscope.preflight.exchange.ssh import SshCarrier

    if not who.nodes:
        raise UsageError(_NO_OTHERS)
    if request.command:
        raise UsageError("--ssh: nodes have command lines of their own: give --nproc, --backend, "
                         "--master-port in place of the launch")  # fmt: skip
    words = (*_words(request, who), "--run", run_id)
    return SshCarrier(nodes, words, token=secret.text)


def _words(request: Request, who: Discovery) -> Iterator[str]:
    """Yield the options that the agents on the other nodes get: all that must be the same."""
    options = request.options
    if options.tier != "default":
        yield f"--{options.tier}"
    if request.is_insecure:
        yield "--insecure"
    given = {
        "--nodes": ",".join(who.nodes),
        "--wait": f"{request.wait_s:g}",
        "--timeout": f"{request.timeout_s:g}",
        "--master-addr": request.who.master_addr,
        "--master-port": str(request.who.master_port or ""),
        "--nproc": str(options.nproc),
        "--backend": options.backend,
        "--only": ",".join(options.only),
        "--skip": ",".join(options.skip),
        "--expect-gbps": f"{options.expect_gbps:g}",
        "--checkpoint-dir": options.checkpoint_dir,
        "--ckpt-gb": f"{options.checkpoint_gb:g}",
        "--script": options.script,
        "--data-dir": options.data_dir,
        "--loader-workers": str(options.num_loader_workers),
    }
    for option, value in given.items():
        if value and value != "0":
            yield from (option, value)
