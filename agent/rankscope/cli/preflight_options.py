"""The options of `rankscope preflight`, and what they mean to it."""

from __future__ import annotations

import argparse
import difflib
import shlex
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.preflight.plan import Request
    from rankscope.preflight.report.deliver import Wanted
    from rankscope.preflight.transports import Transports

_MOST_PORT = 65535


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe every option, in the order in which people need them."""
    parser.usage = (
        "rankscope preflight [OPTION ...] [-- COMMAND ...]\n"
        "       rankscope preflight [OPTION ...] merge FILE ..."
    )
    _who(parser.add_argument_group("who takes part").add_argument)
    _ways(parser.add_argument_group("how they meet").add_argument)
    _what(parser.add_argument_group("what is checked").add_argument)
    _launch(parser.add_argument_group("the launch, where nothing else says it").add_argument)
    _report(parser.add_argument_group("the answer").add_argument)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="-- COMMAND ... | merge FILE ...",
        help="the launch, read and not started; or reports to be evaluated",
    )


def _who(add: Callable[..., object]) -> None:
    add(
        "--nodes",
        metavar="LIST",
        help="all nodes, node 0 first: node0,node1 or node[0-7]; "
        "default: from Slurm, PBS, LSF, Flux, Kubernetes, SageMaker, or torchrun's variables",
    )
    add(
        "--node",
        metavar="NAME",
        help="which of them this machine is; default: by host name, address or node rank",
    )
    add(
        "--node-rank",
        type=_natural,
        default=-1,
        metavar="N",
        help="number of this node; default: from the launcher, else its place in --nodes",
    )
    add("--hostfile", metavar="FILE", help="the nodes, one a line, as for mpirun")
    add(
        "--wait",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="how long to wait for nodes that have not reported; default %(default)g s",
    )
    add(
        "--timeout",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="after that, end with what is known by then; default: each part has its own limit",
    )


def _ways(add: Callable[..., object]) -> None:
    add(
        "--ssh",
        action="store_true",
        help="start the others over ssh, from here, and print one "
        "answer; with --nodes or --hostfile",
    )
    add(
        "--share",
        metavar="DIR",
        help="a directory that all nodes see: reports travel by it when nothing connects",
    )
    add(
        "--server",
        metavar="URL",
        help="a rankscope server: reports travel by outbound HTTP, and the result is kept there",
    )
    add(
        "--run",
        metavar="ID",
        help="name that all nodes of this preflight share; default: "
        "$RANKSCOPE_RUN_ID, or the scheduler's job",
    )
    add(
        "--token-file",
        default="",
        metavar="FILE",
        help="the secret that all nodes share, readable by you alone; default: "
        "$RANKSCOPE_PREFLIGHT_TOKEN, or a file that is made below ~/.config",
    )
    add(
        "--insecure",
        action="store_true",
        help="no secret: anyone who reaches a node can take part and change the answer",
    )
    add(
        "--emit",
        action="store_true",
        help="use no network: print this node's report as one "
        "line of JSON, for `rankscope preflight merge`",
    )
    add("--lines", action="store_true", help=argparse.SUPPRESS)  # how --ssh starts the others


def _what(add: Callable[..., object]) -> None:
    add(
        "--quick",
        dest="tier",
        action="store_const",
        const="quick",
        default="default",
        help="facts and paths only, some 3 s: no bandwidth, no collective",
    )
    add(
        "--deep",
        dest="tier",
        action="store_const",
        const="deep",
        help="also what takes minutes: idle connections, GPUs under load, large collectives",
    )
    add(
        "--only",
        type=_list,
        default=(),
        metavar="IDS",
        help="these checks or families alone: port.ephemeral,clock",
    )
    add("--skip", type=_list, default=(), metavar="IDS", help="all but these checks or families")
    add(
        "--expect-gbps",
        type=_positive,
        default=0.0,
        metavar="G",
        help="a pair slower than G Gbit/s fails; default: only compared with each other",
    )
    add(
        "--checkpoint-dir",
        default="",
        metavar="DIR",
        help="where checkpoints go: seen and written from all nodes?",
    )
    add(
        "--ckpt-gb",
        type=_positive,
        default=0.0,
        metavar="GB",
        help="free space that the checkpoints need there",
    )
    add(
        "--script",
        default="",
        metavar="FILE",
        help="the training script: the same everywhere, "
        "and can what it imports be imported? It is not run",
    )
    add("--data-dir", default="", metavar="DIR", help="the data: the same files everywhere?")
    add(
        "--loader-workers",
        type=_natural,
        default=0,
        metavar="N",
        help="data loader workers of each rank, for limits and shared memory",
    )


def _launch(add: Callable[..., object]) -> None:
    add(
        "--nproc",
        type=_natural,
        default=0,
        metavar="N",
        help="ranks on each node; default: from the launch, else the GPUs, else 1",
    )
    add(
        "--backend",
        choices=("gloo", "nccl"),
        default="",
        help="default: nccl where there are GPUs, else gloo",
    )
    add("--master-addr", default="", metavar="HOST", help="default: $MASTER_ADDR, else node 0")
    add(
        "--master-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="default: $MASTER_PORT, else 29500",
    )


def _report(add: Callable[..., object]) -> None:
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="all checks with their reasons, and what was grouped under a cause",
    )
    add(
        "--json",
        nargs="?",
        default="",
        const="-",
        metavar="FILE",
        help="print the verdict and all reports as one JSON object on stdout, or write it to FILE",
    )
    add("--junit", default="", metavar="FILE", help="one test case per check, for build servers")
    add("--html", default="", metavar="FILE", help="one page, for people who were not there")
    add(
        "--exclude-list",
        default="",
        metavar="FILE",
        help="the bad nodes as node[1-3,7], for srun --exclude; - for stdout",
    )
    add(
        "--fail-on",
        choices=("fail", "warn"),
        default="fail",
        help="what counts as bad for exit code, JUnit and list; default %(default)s",
    )
    add("--list", action="store_true", help="show every check and end")
    add("--markdown", action="store_true", help="with --list: as a table for documents")


def request_of(arguments: argparse.Namespace) -> Request:
    """Return what was asked. Raises UsageError."""
    from rankscope.preflight.exchange.discover import Asked
    from rankscope.preflight.options import Options
    from rankscope.preflight.plan import Request, UsageError

    if arguments.emit and arguments.ssh:
        raise UsageError("--emit uses no network, and --ssh does: leave one of them out")
    nodes = read_nodes(arguments.nodes, "--nodes")
    _refuse_option_names(arguments.words)
    _refuse_loose_nodes(nodes, arguments.words)
    who = Asked(
        nodes=nodes,
        node=arguments.node or "",
        hostfile=arguments.hostfile or "",
        node_rank=arguments.node_rank,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
    )
    options = Options(
        tier=arguments.tier,
        backend=arguments.backend,
        nproc=arguments.nproc,
        num_loader_workers=arguments.loader_workers,
        expect_gbps=arguments.expect_gbps,
        checkpoint_dir=arguments.checkpoint_dir,
        checkpoint_gb=arguments.ckpt_gb,
        script=arguments.script,
        data_dir=arguments.data_dir,
        only=arguments.only,
        skip=arguments.skip,
    )
    return Request(
        who=who,
        options=options,
        run_id=arguments.run or "",
        wait_s=0.0 if arguments.emit else arguments.wait,  # no node can come without a network
        timeout_s=arguments.timeout,
        command=tuple(arguments.words),
        is_mesh=not arguments.emit,
        token_file=arguments.token_file,
        is_insecure=arguments.insecure,
    )


def _refuse_option_names(words: list[str]) -> None:
    """Refuse `preflight quick` or `preflight ports`, which would be read as a launch.

    Raises UsageError.
    """
    from rankscope.preflight.checks import FAMILIES
    from rankscope.preflight.plan import UsageError

    if len(words) != 1 or shutil.which(words[0]) is not None or Path(words[0]).exists():
        return
    option = f"--only {words[0]}" if words[0] in FAMILIES else f"--{words[0]}"
    if words[0] in (*FAMILIES, "quick", "deep", "list"):
        raise UsageError(f"{words[0]} is no program: write {option}; a launch stands behind --")


def _refuse_loose_nodes(nodes: tuple[str, ...], words: list[str]) -> None:
    """Refuse `--nodes a b c`: a shell hands over one name, and the rest as if it were a launch.

    Raises UsageError.
    """
    from rankscope.preflight.exchange.hostlist import why_no_host
    from rankscope.preflight.plan import UsageError

    if len(nodes) != 1 or not words or words[0] == "merge":
        return
    is_program = shutil.which(words[0]) is not None or Path(words[0]).exists()
    if is_program or any(why_no_host(word.strip(",")) for word in words):
        return
    names = ",".join([*nodes, *(word.strip(",") for word in words)])
    raise UsageError(
        f"--nodes: {words[0]} is no program, and stands behind the list; "
        f"write --nodes {shlex.quote(names)}"
    )


def transports_of(arguments: argparse.Namespace, stop: Callable[[], None]) -> Transports:
    """Return the ways by which reports shall travel beside the mesh."""
    from rankscope.preflight.transports import Transports

    return Transports(
        share=arguments.share or "",
        server=arguments.server or "",
        is_over_ssh=arguments.ssh,
        is_on_lines=arguments.lines,
        stop=stop,
    )


def wanted_of(arguments: argparse.Namespace) -> Wanted:
    """Return which reports are wanted. Raises UsageError if two want stdout."""
    from rankscope.preflight.plan import UsageError
    from rankscope.preflight.report.deliver import Wanted

    names = ("json", "junit", "html", "exclude_list")
    places = {name: getattr(arguments, name) for name in names}
    on_stdout = [f"--{name.replace('_', '-')}" for name in names if places[name] == "-"]
    if len(on_stdout) > 1:
        raise UsageError(f"{' and '.join(on_stdout)} both want stdout: give one of them a file")
    return Wanted(**places, fail_on=arguments.fail_on, is_verbose=arguments.verbose)


def check_names(arguments: argparse.Namespace) -> None:
    """Refuse names of checks that do not exist: a typing mistake must not switch checks off."""
    from rankscope.preflight.checks import FAMILIES
    from rankscope.preflight.plan import UsageError
    from rankscope.preflight.start import foreign_checks

    known = [*FAMILIES, *(check.id for checks in FAMILIES.values() for check in checks)]
    if arguments.only or arguments.skip:
        known += ["elsewhere", *(check.id for check in foreign_checks())]
    for option in ("only", "skip"):
        for name in getattr(arguments, option):
            if name not in known:
                raise UsageError(f"--{option}: {_no_check(name, known)}")


def _no_check(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"there is no check or family {name!r}{hint} `rankscope preflight --list` shows all"


def read_nodes(text: str | None, option: str) -> tuple[str, ...]:
    """Return the names in "node0,node1" or "node[0-7]". Raises UsageError."""
    from rankscope.preflight.exchange.hostlist import HostListError, read_list
    from rankscope.preflight.plan import UsageError

    if text is None:
        return ()
    if not text.strip(" ,;\t\r\n"):
        raise UsageError(f"{option}: no name given; write node0,node1 or node[0-7]")
    try:
        return read_list(text)
    except HostListError as error:
        raise UsageError(f"{option}: {error}; write node0,node1 or node[0-7]") from error


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _number(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
    return number


def _seconds(text: str) -> float:
    return _number(text, "number of seconds; write 30 or 0.5")


def _positive(text: str) -> float:
    return _number(text, "number; write 10 or 2.5")


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; write 0, 1, 2 ...")
    return int(text)


def _port(text: str) -> int:
    port = _natural(text)
    if not 1 <= port <= _MOST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; write 1 to {_MOST_PORT}")
    return port
