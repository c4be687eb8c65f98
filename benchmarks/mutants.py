"""Do the tests notice a defect? One is planted at a time, and the tests that should fail are run.

    python benchmarks/mutants.py                    all defects that were not tried at this tree
    python benchmarks/mutants.py --only ring-wrap   this one, again
    python benchmarks/mutants.py --check            whether each still fits; runs nothing
    python benchmarks/mutants.py --tree ../before --label before
    python benchmarks/mutants.py --always --label always    by what `make test` never leaves out

What is committed is tried, in a clone of its own. A defect is caught if a test fails with it and
passes without. Results: benchmarks/results/mutants.json, by label, as they come, so that an
interrupted run continues where it stopped. Exit codes: 0 all caught, 1 not all, 2 one does not fit.

A defect is two lines of code. `@a` in the first is any name or attribute, the same in the second;
blanks and line breaks do not count, so that it fits wherever the code moves and whatever it is
called. It must fit at exactly one place of the product's code.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
PACKAGES = ("agent", "server", "reference_trainer", "web/app")
LIMIT_S = 600.0


@dataclass(frozen=True)
class Defect:
    """One planted defect."""

    name: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]  # files or folders; of a file that is gone its folder


AGENT, COLLECTOR, ANALYSIS = "tests/agent/", "tests/agent/collector/", "tests/analysis/"
SERVER, PREFLIGHT, TRAINER = "tests/server/", "tests/preflight/", "tests/trainer/"
WEB = "tests/web/unit/"
DEFECTS = (
    # --- the agent: what a rank leaves on disk, what goes over the wire
    Defect(
        "ring-wrap", "an off-by-one in a ring",
        "return HEADER_BYTES + (number % self.num_slots) * self.slot_bytes",
        "return HEADER_BYTES + (number % (self.num_slots - 1)) * self.slot_bytes",
        (AGENT + "test_ring.py",),
    ),
    Defect(
        "ring-torn", "a slot that is overwritten while it is read counts as whole",
        "np.where((before == wanted) & (after == wanted), 1, 0)",
        "np.where(before == wanted, 1, 0)",
        (AGENT + "test_ring.py", COLLECTOR + "test_rings.py"),
    ),
    Defect(
        "journal-checksum", "a damaged frame is read",
        "len(body) < length or zlib.crc32(body) != checksum", "len(body) < length",
        (AGENT + "test_journal.py", COLLECTOR + "test_journals.py"),
    ),
    Defect(
        "journal-tear", "a frame that the disk cut short counts as written",
        "if written != len(frame):", "if written > len(frame):",
        (AGENT + "test_journal.py", COLLECTOR + "test_journals.py"),
    ),
    Defect(
        "chunk-unit", "times are packed in the wrong unit",
        "return numbers // NS_PER_UNIT if", "return numbers if", (AGENT + "test_chunk.py",),
    ),
    Defect(
        "chunk-delta", "an off-by-one where deltas are added up",
        "deltas[1:] += slopes[row, first]", "deltas += slopes[row, first]",
        (AGENT + "test_chunk.py",),
    ),
    Defect(
        "redaction-fields", "values of fields with secret names are not hidden",
        "HIDDEN if @a(name) and not @b(name, value) else redact(value)", "redact(value)",
        (AGENT + "test_redaction.py", AGENT + "test_secret_names.py"),
    ),
    Defect(
        "redaction-lines", "secrets in lines of output stay",
        "text = redact(text) self._emit(", "self._emit(",
        (AGENT + "test_lines.py", AGENT + "test_output.py", AGENT + "test_secret_texts.py"),
    ),
    Defect(
        "outbox-chunk", "the first chunk of a batch is dropped",
        "self._wall_ns(), records=[@m(body) for body in self._records], chunks=self._chunks,",
        "self._wall_ns(), records=[@m(body) for body in self._records], chunks=self._chunks[1:],",
        (COLLECTOR + "test_outbox.py", COLLECTOR + "test_upload.py"),
    ),
    Defect(
        "spool-order", "a full spool drops the newest batches",
        "[@o for @o in self._entries if (@o.path is None) is in_memory]",
        "[@o for @o in reversed(self._entries) if (@o.path is None) is in_memory]",
        (COLLECTOR + "test_outbox.py", COLLECTOR + "test_upload.py"),
    ),
    Defect(
        "clock-sign", "the offset of a clock has the wrong sign",
        "((received - sent) + (answered - came)) // 2",
        "((sent - received) + (came - answered)) // 2", (COLLECTOR + "test_clock.py",),
    ),
    Defect(
        "exit-signal", "the signal that ended a rank is given as its exit code",
        "return ExitStatus(None, status & 0x7F, source)",
        "return ExitStatus(status & 0x7F, None, source)", (COLLECTOR + "test_exits.py",),
    ),
    Defect(
        "launch-code", "the command's exit code hides the signal that ended it",
        "return code if code >= 0 else 128 - code", "return max(code, 0)",
        (AGENT + "test_launch.py",),
    ),
    Defect(
        "thinning-level", "each level of thinning records half of what it says",
        "1 << max(0, min(level, MAX_LEVEL) - 1)", "1 << max(0, min(level, MAX_LEVEL))",
        (AGENT + "test_thinning.py",),
    ),
    Defect(
        "limit-errors", "a flood of other records costs errors",
        "if level >= logging.ERROR else self._below_error",
        "if level > logging.ERROR else self._below_error", (AGENT + "test_limits.py",),
    ),
    Defect(
        "glog-level", "an error of the C++ log counts as a warning",
        '"E": logging.ERROR', '"E": logging.WARNING', (AGENT + "test_lines.py",),
    ),
    Defect(
        "host-memory", "kibibytes are reported as bytes",
        '(known["MemTotal"] - known["MemAvailable"]) << 10',
        '(known["MemTotal"] - known["MemAvailable"])', (COLLECTOR + "test_sources.py",),
    ),
    Defect(
        "data-phase", "evaluation counts as forward",
        "FORWARD if self._is_grad_enabled() else EVALUATION", "FORWARD",
        (AGENT + "steps/test_phases.py",),
    ),
    Defect(
        "flight-unit", "time-outs of a Flight Recorder dump in the wrong unit",
        "entry.timeout_ms * 1_000_000", "entry.timeout_ms * 1_000",
        (AGENT + "test_flight_dumps.py", SERVER + "test_import.py"),
    ),
    # --- the server: what is stored, and who may read it
    Defect(
        "chunk-count", "a chunk that holds more events than it says is stored",
        "if opened.count != chunk.count:", "if opened.count < chunk.count:",
        (SERVER + "test_ingest.py", SERVER + "test_store.py"),
    ),
    Defect(
        "tile-column", "an off-by-one in the tiles of steps",
        "ranks[inside] % BLOCK_RANKS, steps[inside] % BLOCK_STEPS",
        "ranks[inside] % BLOCK_RANKS, (steps[inside] - 1) % BLOCK_STEPS",
        (SERVER,),
    ),
    Defect(
        "device-unit", "seconds of a GPU are shown as milliseconds",
        "values.get(name, 0.0) * _MS_PER_S for phase, name",
        "values.get(name, 0.0) for phase, name", (SERVER + "test_device_steps.py",),
    ),
    Defect(
        "resume-point", "a browser that comes back at the oldest change gets all anew",
        "if oldest - 1 <= point <= self._number else", "if oldest < point <= self._number else",
        (SERVER,),
    ),
    Defect(
        "token-prefix", "the beginning of the token opens the server",
        "secrets.compare_digest(credential.text.encode(), self._token.encode())",
        "self._token.startswith(credential.text)",
        (SERVER + "test_security.py",),
    ),
    Defect(
        "log-cursor", "each page of log lines begins with the last line of the one before",
        "(times == time) & (ids < line_id)", "(times == time) & (ids <= line_id)",
        (SERVER + "test_logs.py",),
    ),
    Defect(
        "search-open", "lines of a block that is not full yet are not found",
        "where.append(sa.or_(block.sealed != 1, indexed))", "where.append(indexed)",
        (SERVER + "test_logs.py",),
    ),
    Defect(
        "search-facets", "a filter hides the other values that it could have",
        "others = [mask for name, mask in masks.items() if name != left_out]",
        "others = list(masks.values())", (SERVER + "test_logs.py",),
    ),
    Defect(
        "log-tail", "who follows the log loses lines where more came than one page holds",
        "last_id = hits[limit - 1].id if len(hits) >= limit else",
        "last_id = max(newest, after_id) if len(hits) >= limit else",
        (SERVER + "test_logs.py",),
    ),
    Defect(
        "metric-attempt", "of steps that a restart repeated the abandoned numbers are shown",
        ".order_by(table.name, table.rank, table.attempt, table.step)",
        ".order_by(table.name, table.rank, table.attempt.desc(), table.step)",
        (SERVER + "test_pages.py",),
    ),
    Defect(
        "exposed-ranks", "what ranks wait for a collective is added up over them",
        "exposed = value.blocked_ns / 1e6 / num_whole / ranks",
        "exposed = value.blocked_ns / 1e6 / num_whole",
        (SERVER + "test_device_steps.py",),
    ),
    Defect(
        "sample-gap", "a rate is shown over a time in which nothing was sampled",
        "found[(found < 0) | gap_after] = np.nan", "found[found < 0] = np.nan",
        (SERVER + "test_machines.py",),
    ),
    Defect(
        "attempt-first", "an attempt is said to have ended by the rank that failed last",
        ".order_by(table.c.ended_ns, table.c.rank).limit(1)",
        ".order_by(table.c.ended_ns.desc(), table.c.rank).limit(1)", (SERVER + "test_pages.py",),
    ),
    Defect(
        "finding-order", "the cheapest open finding stands first",
        "still.sort(key=lambda finding: -(finding.cost_throughput_ratio or 0.0))",
        "still.sort(key=lambda finding: finding.cost_throughput_ratio or 0.0)",
        (SERVER + "test_pages.py", SERVER + "test_analysis_loop.py"),
    ),
    Defect(
        "stuck-over", "ranks are shown as stuck after the hang is over",
        'sa.select(table.attempt, table.body).where('
        ' table.run_id == run_id, table.state != "recovered")',
        "sa.select(table.attempt, table.body).where(table.run_id == run_id)",
        (SERVER + "test_pages.py", SERVER + "test_analysis_loop.py"),
    ),
    # --- importers
    Defect(
        "nccl-tests-run", "of two runs of a benchmark the slower one counts",
        "int(words[0]), *min(good))", "int(words[0]), *max(good))",
        (ANALYSIS + "test_nccl_tests.py",),
    ),
    Defect(
        "flight-peer", "a peer's place in its group is taken for its rank",
        "return match[1], ranks[int(match[3])]", "return match[1], int(match[3])",
        (AGENT + "test_flight_dumps.py", SERVER + "test_import.py"),
    ),
    # --- commands
    Defect(
        "ask-code", "a question that only some ranks answered counts as answered",
        'return 0 if all(rank["state"] == "done"', 'return 0 if any(rank["state"] == "done"',
        (SERVER + "test_commands.py",),
    ),
    Defect(
        "import-code", "a server that refuses is reported as one that cannot be reached",
        "code = EXIT_REFUSED if answer.is_refusal else EXIT_UNREACHABLE",
        "code = EXIT_UNREACHABLE if answer.is_refusal else EXIT_REFUSED",
        (SERVER + "test_import.py", AGENT + "test_json_errors.py"),
    ),
    # --- the page
    Defect(
        "web-minutes", "minutes are ten times too few",
        "Math.round(ms / 60_000)} min", "Math.round(ms / 600_000)} min",
        (WEB + "words.test.mjs",),
    ),
    Defect(
        "web-stopwatch", "minutes go on above 60 beside the hours",
        "${two(minutes % 60)}:", "${two(minutes)}:", (WEB + "words.test.mjs",),
    ),
    Defect(
        "web-ring", "who follows a long log keeps its old lines and loses the new ones",
        "drop === 'old' ? all.slice(all.length - RING) : all.slice(0, RING)",
        "drop === 'old' ? all.slice(0, RING) : all.slice(all.length - RING)",
        (WEB + "words.test.mjs",),
    ),
    Defect(
        "web-more", "the ranks that are named count among those that are not",
        "and ${spans.length - limit} more", "and ${spans.length} more",
        (WEB + "words.test.mjs",),
    ),
    # --- the server: diagnosis
    Defect(
        "severity", "costs between 2 and 10 % are not worth a warning",
        '"warning" if cost >= policy.cost_info_ratio',
        '"warning" if cost >= policy.cost_critical_ratio',
        (ANALYSIS + "test_straggler.py", ANALYSIS + "test_data_loading.py"),
    ),
    Defect(
        "straggler-peers", "a rank counts among its own peers",
        "role == @f.roles[@w.row] for role in @f.roles) - 1",
        "role == @f.roles[@w.row] for role in @f.roles)",
        (ANALYSIS + "test_straggler.py", ANALYSIS + "test_words.py"),
    ),
    Defect(
        "special-steps", "steps that save or evaluate count in the reference",
        "work = np.where(special, np.nan, work)", "work = np.where(special, work, work)",
        (ANALYSIS + "test_straggler.py", ANALYSIS + "test_straggler_cost.py"),
    ),
    Defect(
        "hang-absent", "ranks that wait are named in place of the one that is absent",
        "absent = @s.issued < sequence", "absent = @s.issued >= sequence",
        (ANALYSIS + "test_hang.py",),
    ),
    Defect(
        "hang-exchange", "who sends and who receives are swapped",
        '"takes nothing" if is_send else "sends nothing"',
        '"sends nothing" if is_send else "takes nothing"', (ANALYSIS + "test_hang.py",),
    ),
    Defect(
        "desync-culprits", "the ranks that called what all called are the culprits",
        "culprits = tuple(sorted(rank for rank, code in row.items() if code != usual))",
        "culprits = tuple(sorted(rank for rank, code in row.items() if code == usual))",
        (ANALYSIS + "test_desync.py",),
    ),
    Defect(
        "memory-share", "ranks of a host are taken to fill a memory each of its own",
        "host_slope / trend.slope if is_host else 1.0", "1.0",
        (ANALYSIS + "test_memory_growth.py",),
    ),
    Defect(
        "memory-unit", "the time until memory runs out in the wrong unit",
        "steps * step_ms / 1e3 if step_ms else None", "steps * step_ms if step_ms else None",
        (ANALYSIS + "test_memory_growth.py",),
    ),
    Defect(
        "lost-steps", "lost steps are counted once for each rank",
        "lost_steps = max(lost_steps, lost_of_rank)", "lost_steps += lost_of_rank",
        (ANALYSIS + "test_goodput.py", ANALYSIS + "test_ledger.py"),
    ),
    Defect(
        "clock-order", "bounds of two clocks are swapped where events are ordered",
        "apart + float(self._upper[b, a]) < 0", "apart + float(self._upper[a, b]) < 0",
        (ANALYSIS + "test_clocks.py", ANALYSIS + "test_clock_of_a_rank.py"),
    ),
    Defect(
        "grouping-time", "what is over explains what still goes on",
        'return cause.state == "open" or effect.state == "recovered"', "return True",
        (ANALYSIS + "test_folding.py",),
    ),
    Defect(
        "grouping-unit", "seconds are compared with milliseconds",
        "POLICY.desync_echo_seconds * 1e3", "POLICY.desync_echo_seconds",
        (ANALYSIS + "test_folding.py", ANALYSIS + "test_root_cause.py"),
    ),
    Defect(
        "replay-peers", "a slow rank is among those that it is compared with",
        "np.setdiff1d(np.flatnonzero(self.stage == self.stage[row]), rows)",
        "np.flatnonzero(self.stage == self.stage[row])", (ANALYSIS + "test_replay.py",),
    ),
    Defect(
        "log-rank", "the local rank in torchrun's folders is taken for the global one",
        "_TORCHRUN_DIR.search(path): return @p(local_rank=int(@f[1]))",
        "_TORCHRUN_DIR.search(path): return @p(int(@f[1]))", ("tests/known_errors",),
    ),
    # --- preflight
    Defect(
        "mtu-headers", "the headers do not count in the size of a packet",
        "best = max(best, answer.size_bytes + headers)", "best = max(best, answer.size_bytes)",
        (PREFLIGHT + "test_probe.py",),
    ),
    Defect(
        "clock-direction", "who is ahead and who is behind are swapped",
        "near[end][start] = (-offset, unsure)", "near[end][start] = (offset, unsure)",
        (PREFLIGHT + "test_pairs.py", PREFLIGHT + "test_engine.py", PREFLIGHT + "test_blame.py"),
    ),
    Defect(
        "clock-severity", "a clock that breaks the launch is only a warning",
        '("fail", FAIL_MS, math.inf)', '("warn", FAIL_MS, math.inf)',
        (PREFLIGHT + "test_pairs.py", PREFLIGHT + "test_engine.py", PREFLIGHT + "test_blame.py"),
    ),
    Defect(
        "gloo-direction", "which of two nodes gloo dials is swapped",
        "ipaddress.ip_address(ours).packed > ipaddress.ip_address(theirs).packed",
        "ipaddress.ip_address(ours).packed < ipaddress.ip_address(theirs).packed",
        (PREFLIGHT + "test_pairs.py",),
    ),
    Defect(
        "port-direction", "the firewall of the caller is to be opened, not that of the called node",
        "firewall.open_path(run, (start,), end, ports, outcome)",
        "firewall.open_path(run, (end,), start, ports, outcome)", (PREFLIGHT + "test_pairs.py",),
    ),
    Defect(
        "preflight-code", "nodes that did not report are no reason for exit code 3",
        "if not is_whole or not has_answers or", "if not has_answers or",
        (PREFLIGHT + "test_engine.py", PREFLIGHT + "test_board.py"),
    ),
    Defect(
        "mesh-relay", "a node's report does not reach those that have no link to it",
        "return not is_near or now >= self._stale_at", "return False",
        (PREFLIGHT + "test_reports.py",),
    ),
    Defect(
        "pairs-symmetry", "among many nodes some pairs are tested in one direction only",
        "for way in (*distances, *(-d for d in distances))", "for way in distances",
        (PREFLIGHT + "test_schedule.py",),
    ),
    Defect(
        "port-need", "connections within a node count as connections to others",
        "_PER_PAIR * nproc * (world - nproc)", "_PER_PAIR * nproc * world",
        (PREFLIGHT + "test_checks_ports.py",),
    ),
    Defect(
        "cause-worst", "a warning that explains a failure stays a warning",
        "status = min([cause.status, *(s.status for s in symptoms)], key=_WORST_FIRST.index)",
        "status = cause.status",
        (PREFLIGHT + "test_cause.py",),
    ),
    Defect(
        "cause-warning", "a limit that is only low explains why the collective failed",
        'if rule.only_failed and cause.status != "fail":',
        'if rule.only_failed and cause.status == "ok":',
        (PREFLIGHT + "test_cause.py",),
    ),
    Defect(
        "gloo-dialer", "which node gloo dials from is swapped in the words of a one-way path",
        "start, end = paths[0] if is_dialled else paths[0][::-1]", "start, end = paths[0]",
        (PREFLIGHT + "test_pairs.py",),
    ),
    Defect(
        "report-code", "a report that could not be written leaves exit code 0",
        "return summary.exit_code or (EXIT_INCOMPLETE if errors else 0)",
        "return summary.exit_code",
        (PREFLIGHT + "test_preflight_command.py", PREFLIGHT + "report"),
    ),
    Defect(
        "gate-warnings", "a launch that was to be refused with warnings starts",
        "exit_code(summary.verdict, refuse_on, are_times",
        'exit_code(summary.verdict, "fail", are_times',
        (PREFLIGHT + "test_preflight_alive.py",),
    ),
    # --- the reference trainer
    Defect(
        "fault-length", "a fault lasts a step longer than its plan says",
        "step < self.start + self.steps", "step <= self.start + self.steps",
        (TRAINER + "test_faults.py",),
    ),
    Defect(
        "hiccup-size", "a stall lasts for one microbatch's share of it",
        "seconds = context.delay_seconds() * context.visits", "seconds = context.delay_seconds()",
        (TRAINER + "test_faults_slow.py", TRAINER + "test_faults.py"),
    ),
    Defect(
        "rate-back", "the learning rate of one update stays for all that follow",
        'group["lr"] = rate', 'group["lr"] = max(rate, group["lr"])',
        (TRAINER + "test_faults_numbers.py",),
    ),
    Defect(
        "shards", "all ranks train on the same windows",
        "own = start + self.first", "own = start", (TRAINER + "test_data.py",),
    ),
    Defect(
        "checkpoint-keep", "one checkpoint more than asked is kept",
        "[: -self._keep]", "[: -self._keep - 1]",
        (TRAINER + "test_checkpoint.py",),
    ),
    Defect(
        "checkpoint-world", "a checkpoint of another number of ranks is resumed",
        'if name == "world_size" and self._is_elastic:', 'if name == "world_size":',
        (TRAINER + "test_checkpoint.py",),
    ),
    Defect(
        "server-mean", "microbatches that others helped with count too much",
        "(loss / self.microbatches).backward()", "loss.backward()",
        (TRAINER + "test_parameter_server.py",),
    ),
)  # fmt: skip
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$|^not ok \d+ - (.+)$", re.MULTILINE)
_TOKEN = re.compile(r"@\w+|\w+|\s+|.", re.DOTALL)


class Unfit(Exception):
    """A defect fits nowhere, or at several places; the message says where."""


def pattern(old: str) -> re.Pattern[str]:
    """Return what finds a piece of code, however it is broken into lines."""
    words, named = [], set[str]()
    for token in _TOKEN.findall(old):
        if token.isspace():
            continue
        if not token.startswith("@"):
            words.append(re.escape(token))
        elif token in named:
            words.append(f"(?P={token[1:]})")
        else:
            named.add(token)
            words.append(rf"(?P<{token[1:]}>\b[A-Za-z_][\w.]*?\b)")
    return re.compile(r"\s*".join(words))


def place(tree: Path, defect: Defect) -> tuple[Path, str]:
    """Return the file of a defect, from the tree on, and its text with it. Raises Unfit."""
    wanted = pattern(defect.old)
    found = []
    for package in PACKAGES:
        for path in sorted((tree / package).rglob("*")):
            if path.suffix not in (".py", ".js") or "vendor" in path.parts:
                continue
            text = path.read_text()
            found += [(path, text, match) for match in wanted.finditer(text)]
    if len(found) != 1:
        where = ", ".join(str(path.relative_to(tree)) for path, _, _ in found) or "nowhere"
        raise Unfit(f"{defect.name} fits at {len(found)} places: {where}")
    path, text, match = found[0]
    new = re.sub(r"@(\w+)", lambda name: match[name[1]], defect.new)
    return path.relative_to(tree), text[: match.start()] + new + text[match.end() :]


def fitting(tree: Path, tests: tuple[str, ...]) -> list[str]:
    """Return the tests that are there: of a file that is gone those of that name, or its folder."""
    found = []
    for name in tests:
        path = tree / name
        again = sorted((tree / "tests").rglob(path.name)) if path.suffix else []
        found.append(path if path.exists() else again[0] if again else path.parent)
    return [str(path.relative_to(tree)) for path in found]


class Copy:
    """A clone of what is committed, and an interpreter that imports it."""

    def __init__(self, tree: Path, folder: Path, *, is_always: bool = False) -> None:
        self.root, self.is_always = folder / "main", is_always
        clone = ["git", "clone", "--quiet", "--shared", str(tree), str(self.root)]
        subprocess.run(clone, check=True)
        shared = tree.parent / "shared"
        if shared.exists():
            (folder / "shared").symlink_to(shared.resolve())
        self._bin = folder / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        own = [str(self.root / package) for package in PACKAGES[:3]]
        rest = [entry for entry in sys.path if entry.endswith("site-packages")]
        attach = next((self.root / "agent").glob("*.pth"), None)
        lines = [*own, *rest, *([attach.read_text().strip()] if attach else [])]
        (site / "mutants.pth").write_text("\n".join(lines) + "\n")
        self._copy_commands()

    def _copy_commands(self) -> None:
        for path in Path(sys.executable).parent.iterdir():
            target = self._bin / path.name
            if target.exists() or not path.is_file():
                continue
            with path.open("rb") as file:
                first = file.readline()
            if first.startswith(b"#!") and b"python" in first:
                text = path.read_text().partition("\n")[2]
                target.write_text(f"#!{self._bin / 'python'}\n{text}")
                shutil.copymode(path, target)

    def test(self, tests: list[str]) -> tuple[int, str]:
        """Run tests up to the first that fails; return pytest's exit code and that test's name.

        Tests of the page are run by node, all of a file.
        """
        command = [str(self._bin / "python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "tests.lanes", "--always"] if self.is_always else []
        if tests[0].endswith(".mjs"):
            command = ["node", "--test", "--test-reporter=tap"]
        environ = os.environ | {"PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}"}
        try:
            done = subprocess.run(
                [*command, *tests], cwd=self.root, env=environ, capture_output=True, text=True,
                errors="replace", timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 1, f"no end after {LIMIT_S:.0f} s"
        failed = _FAILED.search(done.stdout)
        return done.returncode, failed[failed.lastindex or 0] if failed else done.stdout.strip()[
            -200:
        ]


def attempt(copy: Copy, defect: Defect) -> dict[str, object]:
    """Plant one defect, run its tests, take it out again; return what became of it."""
    path, text = place(copy.root, defect)
    target = copy.root / path
    sound, tests = target.read_text(), fitting(copy.root, defect.tests)
    began = time.monotonic()
    target.write_text(text)
    try:
        code, failed = copy.test(tests)
    finally:
        target.write_text(sound)
    state = {0: "missed", 1: "caught"}.get(code, "broken")
    again = [failed] if "::" in failed else tests if tests[0].endswith(".mjs") else []
    if state == "caught" and again and copy.test(again)[0] != 0:
        state = "unsure"  # it fails without the defect too
    seconds = round(time.monotonic() - began, 1)
    return {
        "state": state, "by": failed if code else "", "file": str(path), "what": defect.what,
        "seconds": seconds,
    }  # fmt: skip


def _results() -> dict[str, dict[str, dict[str, object]]]:
    found: dict[str, dict[str, dict[str, object]]] = {}
    if RESULTS.exists():
        found = json.loads(RESULTS.read_text())
    return found


def _check(tree: Path, chosen: list[Defect]) -> list[str]:
    unfit = []
    for defect in chosen:
        try:
            path, text = place(tree, defect)
            if path.suffix == ".py":
                compile(text, str(path), "exec")
        except (Unfit, SyntaxError) as error:
            unfit.append(str(error))
    return unfit


def main() -> int:
    """Try the chosen defects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose tests are tried")
    parser.add_argument("--label", default="now", help="under which its results are kept")
    names = [defect.name for defect in DEFECTS]
    parser.add_argument("--only", action="append", choices=names, default=[])
    parser.add_argument("--check", action="store_true", help="only say whether each one fits")
    parser.add_argument("--always", action="store_true", help="by none of the long tests")
    parser.add_argument("--again", action="store_true", help="also what was tried before")
    asked = parser.parse_args()
    chosen = [defect for defect in DEFECTS if not asked.only or defect.name in asked.only]
    unfit = _check(asked.tree.resolve(), chosen)
    sys.stdout.write("".join(f"{text}\n" for text in unfit))
    if unfit or asked.check:
        sys.stdout.write(f"{len(chosen) - len(unfit)} of {len(chosen)} defects fit\n")
        return 2 if unfit else 0
    results = _results()
    mine = results.setdefault(asked.label, {})
    again = asked.again or bool(asked.only)
    with tempfile.TemporaryDirectory(prefix="rankscope-mutants.") as folder:
        copy = Copy(asked.tree.resolve(), Path(folder), is_always=asked.always)
        for defect in chosen:
            if defect.name in mine and not again:
                continue
            mine[defect.name] = found = attempt(copy, defect)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            sys.stdout.write(f"{found['state']:7} {defect.name}: {found['by']}\n")
            sys.stdout.flush()
    caught = sum(mine.get(defect.name, {}).get("state") == "caught" for defect in chosen)
    sys.stdout.write(f"{caught} of {len(chosen)} defects are caught\n")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
