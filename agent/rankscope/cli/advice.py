"""`rankscope advice`: what to do next with a run; the commands for it run only where allowed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.parse import quote

from rankscope.address import AddressError
from rankscope.cli import EXIT_USAGE
from rankscope.cli.ask import DEFAULT_SERVER, EXIT_REFUSED, EXIT_UNREACHABLE
from rankscope.http import Client, HttpAnswer, HttpError
from rankscope.settings import SettingError, from_environment
from rankscope.terminal import one_line

_TIMEOUT_SECONDS = 30.0
_COMMAND_SECONDS = 120.0
# One name of one node: no list, no range, no option, whatever a host calls itself.
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
ANNOTATE = "annotate"
_ADAPTERS = ("slurm", "kubernetes", ANNOTATE)
_NODE_FACT = "env.NODE_NAME"
_OBJECT = re.compile(rf"[A-Za-z][A-Za-z0-9.-]{{0,251}}/{_NODE.pattern}")


class AdviceFailed(Exception):
    """There is no advice, or it is not carried out; `exit_code` says how bad it is."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Step:
    """One command, word by word: no shell reads it.

    `is_manual`: a person completes it. `is_note`: it writes the advice down and does nothing of it.
    """

    words: tuple[str, ...]
    is_manual: bool = False
    is_note: bool = False

    @property
    def text(self) -> str:
        """Return it as it can be pasted."""
        return shlex.join(self.words)


class AdviceCommand:
    """Show what to do next with a run: exclude a host, restart, stop, wait, nothing, or not known.

    Examples:
      rankscope advice my-run                           what, why, how sure, at what cost
      rankscope advice my-run --adapter slurm           the commands for it, only printed
      rankscope advice my-run --adapter slurm --script job.sh
      rankscope advice my-run --adapter kubernetes --execute
      rankscope advice my-run --adapter annotate --object trainjob/llama --namespace team-a

    Commands are printed, not run. --execute runs those that take hosts out (scontrol, kubectl)
    where RANKSCOPE_ADVICE_EXECUTE=1 allows it, and reports to the server what became of them;
    of annotate it writes the advice onto the object, whatever it is, and reports nothing.
    A restart is always left to you. docs/advice.md shows a controller in a few lines.

    Exit codes: 0 shown, or done; 1 refused, or a command failed; 2 the server cannot be reached
    or does not know the run; 64 wrong usage. A token is taken from RANKSCOPE_TOKEN only.
    """

    name: ClassVar[str] = "advice"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Describe the options."""
        parser.add_argument("run", metavar="RUN", help="id of the run")
        parser.add_argument("--adapter", choices=_ADAPTERS, help="whose commands to print")
        parser.add_argument("--script", metavar="FILE", help="batch script, for sbatch --exclude")
        parser.add_argument(
            "--object", metavar="KIND/NAME", default="", help="what annotate writes the advice onto"
        )
        parser.add_argument("--namespace", metavar="NAME", default="", help="where it is")
        parser.add_argument("--execute", action="store_true", help="run the commands, if allowed")
        parser.add_argument(
            "--server", metavar="URL", help=f"default $RANKSCOPE_SERVER, else {DEFAULT_SERVER}"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")

    def run(self, arguments: argparse.Namespace) -> int:
        """Show it, or do it. Returns the exit code."""
        try:
            settings = from_environment(os.environ)
        except SettingError as error:
            return _refuse(str(error), EXIT_USAGE)
        if arguments.execute and not arguments.adapter:
            return _refuse("--execute needs --adapter: whose commands?", EXIT_USAGE)
        wrong = _wrong_object(arguments)
        if wrong:
            return _refuse(wrong, EXIT_USAGE)
        if arguments.execute and not settings.advice_execute:
            return _refuse(
                "--execute is switched off here; to allow it: export RANKSCOPE_ADVICE_EXECUTE=1",
                EXIT_REFUSED,
            )
        try:
            url = arguments.server or settings.server or DEFAULT_SERVER
            client = Client(url, settings.token, timeout_seconds=_TIMEOUT_SECONDS)
        except AddressError as error:
            return _refuse(str(error), EXIT_UNREACHABLE)
        with contextlib.closing(client):
            try:
                return _follow(Advising(client, arguments.run), arguments)
            except AdviceFailed as error:
                return _refuse(str(error), error.exit_code)


class Advising:
    """The advice about one run."""

    def __init__(self, client: Client, run: str) -> None:
        self._client = client
        self._run = f"/api/v1/runs/{quote(run, safe='')}"
        self._path = f"{self._run}/advice"
        self.page = f"{client.address.url}/runs/{quote(run, safe='')}"

    def ask(self) -> dict[str, Any]:
        """Return the advice of now. Raises AdviceFailed."""
        fields = self._sent("GET", self._path).fields
        if "action" not in fields:
            text = f"{self._client.address.url}: no rankscope server answers there"
            raise AdviceFailed(text, EXIT_UNREACHABLE)
        return fields

    def nodes(self) -> dict[str, str]:
        """Return the node of Kubernetes below each host, of those whose manifest asks for it.

        The pods of an indexed Job are not called as their hosts are. Raises AdviceFailed.
        """
        ranks = self._sent("GET", f"{self._run}/ranks").fields["ranks"]
        facts = self._sent("GET", f"{self._run}/environment").fields
        host_of = {row["rank"]: row["host"] for row in ranks}
        nodes: dict[str, str] = {}
        for fact in (*facts["differences"], *facts["common"]):
            for value in fact.get("values", [fact]) if fact["fact"] == _NODE_FACT else []:
                hosts = [host_of[rank] for rank in value.get("ranks", host_of) if rank in host_of]
                nodes |= dict.fromkeys(hosts, value["value"])
        return {host: node for host, node in nodes.items() if _NODE.fullmatch(node)}

    def report(self, epoch: int, outcome: str, text: str) -> None:
        """Report to the server what was done. Raises AdviceFailed."""
        who = f"rankscope advice on {socket.gethostname()}"
        body = {"epoch": epoch, "outcome": outcome, "controller": who[:128], "text": text[:2_000]}
        self._sent("POST", f"{self._path}/reports", json.dumps(body).encode())

    def _sent(self, method: str, path: str, body: bytes | None = None) -> HttpAnswer:
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            answer = self._client.request(method, path, body, headers)
        except HttpError as error:
            url = self._client.address.url
            raise AdviceFailed(f"{url} does not answer: {error}", EXIT_UNREACHABLE) from error
        if answer.status != 200:
            raise AdviceFailed(answer.why(), EXIT_UNREACHABLE)
        return answer


def _follow(advising: Advising, arguments: argparse.Namespace) -> int:
    advice = advising.ask()
    steps: list[Step] = []
    if arguments.adapter == ANNOTATE:
        steps = [annotation(advice, arguments.object, arguments.namespace, advising.page)]
    elif arguments.adapter:
        is_pod = arguments.adapter == "kubernetes" and advice["hosts"]
        nodes = advising.nodes() if is_pod else {}
        steps = steps_of(advice, arguments.adapter, arguments.script, nodes)
    if arguments.json:
        commands = [{"words": step.words, "text": step.text} for step in steps]
        shown = {**advice, "commands": commands, "executed": arguments.execute}
        code = _execute(advising, advice, steps, sys.stderr.write) if arguments.execute else 0
        print(json.dumps(shown))
        return code
    print("\n".join(lines_of(advice)))
    for step in steps:
        print(f"  {one_line(step.text)}")
    return _execute(advising, advice, steps, sys.stdout.write) if arguments.execute else 0


def lines_of(advice: dict[str, Any]) -> list[str]:
    """Return advice for a terminal."""
    sure = advice["confidence"]
    lines = [
        one_line(advice["what"]),
        f"  why: {one_line(advice['why'])}",
        f"  sure: {'not known' if sure is None else f'{sure:.0%}'}, a host is excluded from "
        f"{advice['least_confidence']:.0%} on",
        f"  doing it costs: {one_line(advice['cost_of_doing']['text'])}",
        f"  not doing it costs: {one_line(advice['cost_of_not_doing']['text'])}",
    ]
    lines += [f"  evidence: {one_line(one['text'])}" for one in advice["evidence"][:4]]
    return lines


def steps_of(
    advice: dict[str, Any],
    adapter: str,
    script: str | None = None,
    nodes: Mapping[str, str] = MappingProxyType({}),
) -> list[Step]:
    """Return the commands for advice; none where there is nothing to do.

    `nodes` are those of Kubernetes below hosts, as far as they are known. Raises AdviceFailed for a
    host that is no name of one node.
    """
    if advice["action"] == "restart_from_checkpoint" and adapter == "slurm":
        return [Step(("sbatch", "--", script or "SCRIPT"), is_manual=True)]
    if advice["action"] != "exclude_host":
        return []
    for host in advice["hosts"]:
        if not _NODE.fullmatch(host):
            raise AdviceFailed(
                f"{one_line(host)!r} is no name of one node: look at it yourself", EXIT_REFUSED
            )
    reason = one_line(f"rankscope {advice['run_id']} advice {advice['epoch']}: {advice['why']}")
    if adapter == "slurm":
        return _slurm(advice["hosts"], reason[:200], script)
    return _kubernetes(advice["hosts"], nodes)


def annotation(advice: dict[str, Any], onto: str, namespace: str, page: str) -> Step:
    """Return the command that writes advice onto an object of Kubernetes, whatever it advises.

    Annotations, as no controller uses these: conditions of a status are its own controller's.
    """
    texts = {
        "action": advice["action"], "hosts": ",".join(advice["hosts"]),
        "what": one_line(advice["what"]), "why": one_line(advice["why"]),
        "epoch": str(advice["epoch"]), "run": page,
    }  # fmt: skip
    where = (f"--namespace={namespace}",) if namespace else ()
    words = (f"rankscope/{name}={text}" for name, text in texts.items())
    command = ("kubectl", "annotate", "--overwrite", *where, "--", onto, *words)
    return Step(command, is_note=True)


def _wrong_object(arguments: argparse.Namespace) -> str:
    """Return what is wrong with the object to annotate, and what to do; empty where nothing is."""
    is_annotated = arguments.adapter == ANNOTATE
    if not is_annotated and (arguments.object or arguments.namespace):
        return "--object and --namespace are of --adapter annotate"
    if is_annotated and not _OBJECT.fullmatch(arguments.object):
        return "--adapter annotate needs --object KIND/NAME, for example trainjob/llama"
    if arguments.namespace and not _NODE.fullmatch(arguments.namespace):
        return f"--namespace {arguments.namespace!r} is no name of a namespace"
    return ""


def _slurm(hosts: list[str], reason: str, script: str | None) -> list[Step]:
    drains = [
        Step(("scontrol", "update", f"nodename={host}", "state=drain", f"reason={reason}"))
        for host in hosts
    ]
    again = ("sbatch", f"--exclude={','.join(hosts)}", "--", script or "SCRIPT")
    return [*drains, Step(again, is_manual=True)]


def _kubernetes(hosts: list[str], known: Mapping[str, str]) -> list[Step]:
    # one node holds several pods
    nodes = dict.fromkeys(known.get(host) or _node_of(host) for host in hosts)
    return [Step(("kubectl", "cordon", "--", node)) for node in nodes]


def _node_of(host: str) -> str:
    """Return the node of the pod that has this host name; a host that is no pod is a node itself.

    A pod's host name is its own name, unless it shares its node's network or is of an indexed Job,
    whose manifest has to ask for NODE_NAME. Raises AdviceFailed.
    """
    ask = Step((
        "kubectl", "get", "pods", "--all-namespaces", f"--field-selector=metadata.name={host}",
        "--output=jsonpath={.items[*].spec.nodeName}",
    ))  # fmt: skip
    said, error = _run(ask)
    nodes = sorted(set(said.split()))
    if error or not nodes:
        why = error or "no pod has this name"
        sys.stderr.write(f"rankscope advice: {host} is taken for a node ({one_line(why)})\n")
        return host
    if len(nodes) > 1 or not _NODE.fullmatch(nodes[0]):
        found = one_line(", ".join(nodes))
        raise AdviceFailed(f"pods named {host} are on {found}: look at it yourself", EXIT_REFUSED)
    return nodes[0]


def _execute(
    advising: Advising, advice: dict[str, Any], steps: list[Step], say: Callable[[str], Any]
) -> int:
    """Run the commands in order and report; the first that fails ends it."""
    todo = [step for step in steps if not step.is_manual]
    if not todo:
        say("Nothing to execute.\n")
        return 0
    if time.time() * 1e3 > advice["valid_until_ms"]:
        raise AdviceFailed("this advice is out of date, or a clock is wrong", EXIT_REFUSED)
    for step in todo:
        _, error = _run(step)
        if error and not step.is_note:
            advising.report(advice["epoch"], "failed", f"{step.text}: {error}")
        if error:
            raise AdviceFailed(f"{step.text}: {error}", EXIT_REFUSED)
        say(f"done: {step.text}\n")
    if not todo[0].is_note:
        advising.report(advice["epoch"], "done", "; ".join(step.text for step in todo))
    return 0


def _run(step: Step) -> tuple[str, str]:
    """Run a command; return what it printed and why it failed, empty where it did not."""
    try:
        done = subprocess.run(
            step.words, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False,
            stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"no end within {_COMMAND_SECONDS:.0f} s"
    except OSError as error:
        return "", f"{step.words[0]}: {error.strerror}"
    if done.returncode == 0:
        return done.stdout, ""
    said = one_line(done.stderr.strip() or done.stdout.strip())[:300]
    return "", f"exit code {done.returncode}: {said}"


def _refuse(text: str, code: int) -> int:
    sys.stderr.write(f"rankscope advice: {one_line(text)}\n")
    return code
