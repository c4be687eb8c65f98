"""What the launch would have done: measured with torch 2.13 and gloo on three nodes.

One run per fault, default time-outs. What was read in a library's source, not seen, says so.
"""

from __future__ import annotations

from rankscope.preflight.checks.base import Run
from rankscope.preflight.checks.pairs import gloo_dials
from rankscope.preflight.model import CheckFinding

_ANY = ""
# (check, class, mode) -> sentence; an empty class or mode means all others
_SAYS: dict[tuple[str, str, str], str] = {
    ("port.master.reach", "drop", "static"): "no word for 2.5 min, the end after 15 min: timed out "
    "after 900000ms",
    ("port.master.reach", "drop", "env"): "no word for 2 min, the end after 30 min: timed out "
    "after 1800000ms",
    ("port.master.reach", "drop", "c10d"): "timed out after 60000ms on some, the last node ends "
    "after 10 min with RendezvousTimeoutError",
    ("port.master.reach", "refused", "static"): "14 min of silence, the end after 30 min",
    ("port.master.reach", "refused", "env"): "30 min of silence, then still no end",
    ("port.master.reach", "prohibited", "static"): "'No route to host' with a wrong address, the "
    "end after 16 min",
    ("port.master.reach", "no-data", _ANY): "the store accepts and stays silent: the end after 15 "
    "to 30 min",
    ("port.master.reach", _ANY, "c10d"): "no rendezvous: RendezvousTimeoutError after 10 min",
    ("port.master.reach", _ANY, _ANY): "the nodes never meet: the end after 15 to 30 min",
    ("port.master.free", _ANY, "static"): "node 0 ends after 5 s with EADDRINUSE, the others hang "
    "without output",
    ("port.master.free", _ANY, "c10d"): "nothing on any node for more than 33 min",
    ("port.master.free", _ANY, "env"): "rank 0 ends with EADDRINUSE, the others hang",
    ("port.master.identity", _ANY, "c10d"): "nothing on any node for more than 33 min",
    ("port.master.identity", _ANY, _ANY): "the others hang without output",
    ("dns.master", _ANY, "static"): "'gai error: -3' again and again on that node, the end after "
    "30 min",
    ("dns.master", _ANY, "c10d"): "'gai error: -3' again and again on that node, the end after "
    "10 min",
    ("dns.self.loopback", _ANY, _ANY): "gloo advertises a loopback address: 'Connection "
    "refused, remote=[127.0.1.1]' on one node, the others hang",
    ("net.iface.missing", _ANY, _ANY): "that node ends with 'Unable to find address for', the "
    "others after 30 min",
    ("net.iface.virtual", _ANY, _ANY): "'refused, remote=[172.17.0.1]' after 13 to 29 s on some, "
    "one node hangs",
    ("net.dup_ip", _ANY, _ANY): "store time-outs, the end after 30 min",
    ("env.rank.unique", _ANY, "static"): "15 min of silence, then assigned_ranks time-outs",
    ("env.endpoint.local", _ANY, "static"): "14 min of silence, the end after 30 min",
    ("env.endpoint.local", _ANY, "c10d"): "10 min of silence, then RendezvousTimeoutError",
    ("net.mtu.path", _ANY, _ANY): "init and a first small all_reduce pass, then 30 min of silence: "
    "Timed out waiting 1800000ms for recv",
    ("net.latency", _ANY, _ANY): "no message: with 100 ms on one pair a step took 696 ms, not 237",
    ("net.loss", _ANY, _ANY): "no message: with 2 % loss on two pairs a step took 462 ms, not 237",
    ("net.bandwidth", _ANY, _ANY): "no message: with 10 Mbit/s at one node a step took 4,568 ms, "
    "not 34",
    ("net.jitter", _ANY, _ANY): "no message: every all_reduce waits for its latest packet",
    ("net.idle", _ANY, _ANY): "the first collective after a long pause waits for its time-out",
    ("net.rp_filter", _ANY, _ANY): "works by luck: gloo dials the other way around",
    ("net.route.sym", _ANY, _ANY): "works by luck: gloo dials the other way around",
}  # fmt: skip
_LUCK = (
    "works today with gloo, which dials the other way around; fails when the order of the "
    "addresses changes, or with NCCL, which dials both ways"
)
_UPPER = (
    "works today with gloo, to which the kernel gives ports of the lower half of the range; fails "
    "with NCCL, or where many ports are taken"
)
_GLOO_SILENT = (
    "gloo init: connections are accepted and stay silent: all ranks hang until their time-out"
)
_GLOO_CLOSED = {
    "drop": "gloo init: the dialling ranks fail after 9.5 min, the dialled one hangs > 30 min",
    "prohibited": "gloo init: the dialling ranks fail after 12 s, the dialled one hangs > 30 min",
    "refused": "gloo init: the dialling ranks fail after 12 s, the dialled one hangs > 30 min",
    "no-data": _GLOO_SILENT,
}
_NCCL_CLOSED = "NCCL init: connects are retried without a word, then fail (read in its source)"


def impact_of(finding: CheckFinding, run: Run) -> str:
    """Return what the launch of this mode and backend would have done; "" if that is not known."""
    special = _SPECIAL.get(finding.id)
    if special is not None:
        return special(finding, run)
    outcome = str(finding.evidence.get("class", ""))
    for key in ((outcome, run.mode), (outcome, _ANY), (_ANY, run.mode), (_ANY, _ANY)):
        said = _SAYS.get((finding.id, *key))
        if said:
            return said
    return ""


def _absent(finding: CheckFinding, run: Run) -> str:
    """Say what the others do; a client of the store is a node's torchrun, or a rank with env://."""
    if run.mode == "c10d":
        return "the others wait 10 min, then end with RendezvousTimeoutError"
    clients = {node: run.nproc(node) if run.mode == "env" else 1 for node in run.expected}
    away = {*run.absent, *run.gone, *finding.nodes}
    joined = sum(num for node, num in clients.items() if node not in away)
    minutes = 30 if run.mode == "env" else 15
    end = f"the others wait {minutes} min, then end"
    return f"{end}: {joined}/{sum(clients.values())} clients joined" if joined else end


def _closed(finding: CheckFinding, run: Run) -> str:
    if run.backend == "nccl":
        return _NCCL_CLOSED
    used = [gloo_dials(run, start, end) for start, end in finding.edges]
    if used and not any(way is None or way for way in used):
        return _LUCK
    if finding.evidence.get("in_reach_of_gloo") is False:
        return _UPPER
    outcome = str(finding.evidence.get("class", ""))
    said = _GLOO_CLOSED.get(outcome, "gloo init: the dialling ranks fail, the dialled one hangs")
    if "ports_closed" in finding.evidence:
        return f"whenever a rank gets one of these ports, {said}"
    return said


def _intercepted(finding: CheckFinding, run: Run) -> str:
    used = [gloo_dials(run, start, end) for start, end in finding.edges]
    if run.backend == "gloo" and used and not any(way is None or way for way in used):
        return _LUCK
    return (
        "ranks connect to that program, and wait for each other until their time-out: no message "
        "names it"
    )


def _clock(finding: CheckFinding, run: Run) -> str:
    offsets = finding.evidence.get("offset_ms", {}).values()
    if finding.status != "fail" or not offsets:
        return "works; times in logs and traces of the nodes do not line up"
    left = len(run.expected) - sum(offset < -FORGOTTEN_MS for offset in offsets)
    world = f"WORLD_SIZE={sum(run.nproc(node) for node in run.expected[:left])} and exit code 0"
    is_behind = left < len(run.expected) and bool(finding.nodes)
    shrinks = f"a node more than 15 s behind is left out without a word: {world} on the others"
    if run.mode != "c10d":
        return "static and env:// tolerate it, c10d does not: there " + (
            shrinks if is_behind else "the exit barrier may block for 300 s"
        )
    if is_behind:
        return shrinks
    if not finding.nodes:
        return "a node that is behind is left out without a word: the others train without it"
    return "trains; the exit barrier may block for 300 s"


def _name(finding: CheckFinding, run: Run) -> str:
    """Say what wrong names do: the job asks for no other name than MASTER_ADDR."""
    if run.master not in {end for _, end in finding.edges}:
        return "works while the job calls its nodes by address: MASTER_ADDR is right"
    if finding.status == "warn":
        return "one warning, then the next address works, by luck"
    if finding.id == "dns.loopback":
        end = "10 min" if run.mode == "c10d" else "30 min"
        return f"that node waits for a store of its own, the end after {end}"
    return "'No route to host' with a wrong address after 8 s, the end after 16 min"


FORGOTTEN_MS = 15_000.0  # keep_alive_interval 5 s x 3 attempts, dynamic_rendezvous.py
_SPECIAL = {
    "node.absent": _absent,
    "port.ephemeral": _closed,
    "port.oneway": _closed,
    "port.intercepted": _intercepted,
    "clock.offset": _clock,
    "dns.wrong": _name,
    "dns.loopback": _name,
    "dns.family": _name,
}
