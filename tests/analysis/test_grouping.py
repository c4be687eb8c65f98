"""What explains what: a row for each rule with a pair it joins and pairs that it must not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from rankscope_server.diagnose import DETECTORS
from rankscope_server.findings.finding import (
    NOT_HERE,
    DetectorResult,
    DetectorStatus,
    Evidence,
    Finding,
)
from rankscope_server.findings.kinds import KINDS
from rankscope_server.verdict.grouping import RULES, Rule, group_findings
from rankscope_server.verdict.verdict import verdict_of

DETECTOR_OF = {kind.id: kind.detectors[0] for kind in KINDS}
MINUTE_MS = 60_000.0


def finding(kind: str, **values: Any) -> Finding:
    """Return a finding of a kind: critical, on rank 3, from step 100 at 1,000,000 ms on."""
    given: dict[str, Any] = {
        "detector": DETECTOR_OF[kind], "kind": kind, "severity": "critical", "attempt": 0,
        "what": f"Rank 3: {kind}", "why": "x", "next": "y", "confidence": 0.9,
        "confidence_text": "high: z", "would_be_wrong_if": "w", "policy_hash": "h",
        "ranks": (3,), "onset_step": 100, "onset_ms": 1e6, "cost_throughput_ratio": 0.2,
    }  # fmt: skip
    given |= values
    return Finding(key=f"{given['detector']}/{kind}/{given['ranks']}", **given)


def spared(one: Finding, **values: Any) -> Finding:
    return replace(one, **values)


OOM = finding("crash", what="Rank 3 was killed by SIGKILL", onset_ms=1e6 + 5)
GPU_OOM = finding("crash", evidence=(Evidence("torch.OutOfMemoryError: CUDA out of memory"),))
LATE_KILL = finding(
    "crash", what="Rank 3 was killed by SIGKILL", onset_ms=1e6 + 2 * MINUTE_MS, onset_step=100
)
GAVE_UP = finding(
    "crash", ranks=(4, 5), what="Ranks 4 and 5 were killed by SIGABRT in step 100",
    onset_ms=1e6 + MINUTE_MS,
)  # fmt: skip
ECHOES = finding("crash", ranks=(), confidence=0.3, severity="warning")
SLOW = finding("slow_compute", severity="warning")
STALLS = finding("garbage_collection", detector="stalls", severity="warning")
SLOW_DATA = finding("slow_data", detector="straggler", severity="warning")
BOUND = finding("communication_bound", severity="info", ranks=())
UNEVEN = finding("uneven_work", severity="info", ranks=(), onset_step=None)
HOT = finding("hot_shard", severity="warning", ranks=())
SOFT = finding("xid", severity="warning")
GPU_ODD = finding("gpu_outlier", severity="info")
OTHER = {"ranks": (5,)}
RECOVERED = {"state": "recovered"}

# cause, effect, then changes of the cause, or of the effect, with which it explains nothing
TABLE: list[tuple[Finding, Finding, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (finding("desync"), finding("hang", onset_ms=1e6 + 3000),
     [{"severity": "info"}], [{"onset_ms": 1e6 - 5000}, {"onset_ms": 1e6 + 2 * MINUTE_MS}]),
    (finding("desync"), finding("crash", onset_ms=1e6 + 300, **OTHER), [],
     [{"onset_ms": 1e6 + 2 * MINUTE_MS}]),
    (finding("xid"), finding("crash", onset_ms=1e6 + 2000),
     [OTHER, {"severity": "warning"}, {"onset_ms": None}], [{"onset_ms": 1e6 + 2 * MINUTE_MS}]),
    (finding("ecc"), finding("hang", onset_ms=1e6 + 2000), [OTHER], []),
    (finding("memory_growth", severity="warning", onset_ms=9e5), OOM,
     [OTHER, {"severity": "info"}, {"onset_ms": 2e6}],
     [{"what": "Rank 3 raised KeyError: 'x'"}]),
    (finding("fragmentation", severity="warning"), GPU_OOM, [OTHER, {"severity": "info"}],
     [{"evidence": ()}]),
    (finding("hang"), ECHOES, [RECOVERED], []),
    (finding("hang"), LATE_KILL, [], []),
    (finding("hang", victims=(4, 5)), GAVE_UP, [RECOVERED, {"victims": (4,)}],
     [{"onset_ms": 1e6 + 1000}, {"what": "Ranks 4 and 5 were killed by SIGSEGV"},
      {"evidence": (Evidence("Its log: terminate called after throwing an instance"),)}]),
    (finding("hang", victims=(4, 5)),
     finding("crash", ranks=(4,), onset_ms=1e6 + MINUTE_MS,
             what="Rank 4 exited with code 1 without an exception that was seen in step 100"),
     [], [{"what": "Rank 4 exited with code 1: no such file"}]),
    (finding("stopped_process"), finding("hang"), [OTHER, {"severity": "info"}, RECOVERED],
     [{"ranks": (3, 5)}, {"ranks": ()}]),
    (finding("stopped_process"), SLOW, [OTHER], [OTHER]),
    (finding("crash"), finding("hang", onset_ms=1e6 - 200, **OTHER), [{"severity": "info"}],
     [{"onset_ms": 1e6 - MINUTE_MS}]),
    (finding("crash"), finding("hang", onset_ms=1e6 - 30_000), [], []),  # it failed after a while
    (finding("crash"), finding("crash_loop"), [RECOVERED, OTHER], []),
    (finding("crash"), SOFT, [OTHER, {"onset_ms": 1e6 + 3 * MINUTE_MS}],
     [{"severity": "critical"}]),
    (finding("crash"), finding("slow_compute", severity="warning", onset_step=99), [],
     [{"onset_step": 80}]),
    (finding("hang"), finding("slow_data", detector="straggler", onset_step=100, **OTHER),
     [RECOVERED], [{"onset_step": 50}, {"onset_step": None}]),
    (finding("nan"), finding("replica_drift", onset_step=100), [{"severity": "info"}, RECOVERED],
     [{"onset_step": 50}]),
    (finding("nan"), finding("divergence", onset_step=104, ranks=()), [], [{"onset_step": 50}]),
    (finding("nan"), finding("corruption", onset_step=101), [], [{"onset_step": 50}]),
    (finding("replica_drift"), finding("nan", onset_step=150), [OTHER], [{"onset_step": 50}]),
    (finding("replica_drift"), finding("corruption", onset_step=130), [OTHER],
     [{"onset_step": 50}]),
    (finding("corrupt_batch", severity="warning"),
     finding("loss_spike", severity="info", ranks=(), onset_step=110), [],
     [{"onset_step": 300}, {"onset_step": 90}]),
    (finding("corruption"), finding("divergence", ranks=(), onset_step=160), [],
     [{"onset_step": 90}]),
    (finding("desync"), finding("replica_drift", onset_step=140, **OTHER), [],
     [{"onset_step": 60}]),
    (finding("version_drift"), finding("desync"), [OTHER, {"severity": "warning"}, {"ranks": ()}],
     [{"ranks": (3, 4)}]),
    (finding("throttle", severity="warning"), SLOW,
     [OTHER, {"severity": "info"}, RECOVERED], [{"ranks": (3, 4)}]),
    (finding("xid"), finding("thermal_or_power", severity="warning"), [OTHER], []),
    (finding("memory_growth", severity="warning"), finding("page_cache", severity="warning"),
     [OTHER], []),
    (finding("bad_shard", severity="warning"), SLOW_DATA, [OTHER], [{"kind": "slow_compute"}]),
    (finding("drift", severity="warning"), SLOW,
     [OTHER, {"kind": "version_drift"}, {"ranks": ()}], []),
    (SLOW, finding("stage_imbalance", severity="info", ranks=(3, 7)), [OTHER, RECOVERED], []),
    (STALLS, finding("slow_data", detector="straggler", severity="info"), [OTHER], []),
    (SLOW, finding("slow_link", severity="warning"), [OTHER, RECOVERED], []),
    (SLOW, finding("staleness", severity="warning"), [OTHER, RECOVERED], []),
    (HOT, finding("staleness", severity="warning"), [RECOVERED], []),
    (SLOW, BOUND, [RECOVERED, {"severity": "info"}], []),
    (finding("host_contention", severity="warning"),
     finding("low_bus_bandwidth", severity="info", ranks=()), [RECOVERED], []),
    (finding("slow_data", detector="data-loading", severity="warning", ranks=()),
     finding("gpu_underuse", severity="info"), [RECOVERED], []),
    (SLOW, GPU_ODD, [OTHER, {"severity": "info"}], []),
    (finding("xid"), finding("ecc"), [OTHER], []),
    (finding("slow_checkpoint", severity="warning"),
     finding("checkpoint_interval", severity="info", ranks=()), [{"severity": "info"}], []),
    (SLOW, finding("regression", severity="warning", ranks=()),
     [{"cost_throughput_ratio": 0.05}, RECOVERED], []),
    (SLOW, finding("slowdown", severity="warning", ranks=(), onset_step=105), [],
     [{"onset_step": 20}]),
    (finding("slow_data", detector="data-loading", severity="warning", ranks=()), UNEVEN,
     [{"severity": "info"}, {"state": "recovered"}, {"cost_throughput_ratio": 0.05}], []),
    (finding("drift", severity="warning"), finding("unequal_ranks", severity="warning"),
     [OTHER, {"severity": "info"}], [OTHER]),
    (finding("throttle", severity="warning"), finding("unequal_ranks", severity="warning"),
     [OTHER, {"severity": "info"}], [OTHER]),
    (finding("unequal_ranks", severity="warning"), BOUND, [{"severity": "info"}], []),
]  # fmt: skip


def names(row: tuple[Finding, Finding, Any, Any]) -> str:
    return f"{row[0].kind}-{row[1].kind}"


def explained(findings: list[Finding]) -> dict[str, str | None]:
    return {grouped.key: grouped.explained_by for grouped in group_findings(findings)}


@pytest.mark.parametrize("row", TABLE, ids=names)
def test_cause_explains_effect_and_only_under_its_condition(
    row: tuple[Finding, Finding, list[dict[str, Any]], list[dict[str, Any]]],
) -> None:
    cause, effect, other_causes, other_effects = row
    assert explained([effect, cause]) == {cause.key: None, effect.key: cause.key}
    for change in other_causes:
        changed = spared(cause, key="changed", **change)
        assert explained([changed, effect])[effect.key] is None, change
    for change in other_effects:
        changed = spared(effect, key="changed", **change)
        assert explained([cause, changed])["changed"] is None, change


def test_every_rule_has_a_row_and_names_what_exists() -> None:
    def first(cause: Finding, effect: Finding) -> Rule:
        return next(rule for rule in RULES if rule.explains(cause, effect))

    assert {first(row[0], row[1]) for row in TABLE} == set(RULES)
    known = {*DETECTOR_OF, *(detector.name for detector in DETECTORS)}
    assert {name for rule in RULES for name in (*rule.causes, *rule.effects)} <= known


def test_a_chain_is_folded_under_its_first_cause() -> None:
    """A GPU breaks, its rank dies, the others hang, the last steps look slow."""
    chain = [
        finding("xid"),
        finding("crash", onset_ms=1e6 + 2000),
        finding("hang", onset_ms=1e6 + 2500, **OTHER),
        finding("slow_compute", severity="warning", onset_step=100, ranks=(6,)),
        finding("gpu_underuse", severity="info", ranks=()),
    ]
    found = explained(chain)
    assert set(found.values()) == {None, chain[0].key}
    verdict = verdict_of(group_findings(chain), ())
    assert verdict is not None
    assert verdict.key == chain[0].key
    assert [one.key for one in verdict.folded] == [one.key for one in chain[1:]]
    first, *others = group_findings(chain)
    assert first.next == "y"
    assert {one.next for one in others} == {f"See the finding that explains it: {first.what}"}


def test_order_does_not_matter_and_nothing_explains_itself() -> None:
    chance = random.Random(4)
    pool = [one for row in TABLE for one in row[:2]]
    for _ in range(200):
        some = {one.key: one for one in chance.sample(pool, 8)}
        findings = list(some.values())
        found = explained(findings)
        chance.shuffle(findings)
        assert explained(findings) == found
        roots = {key for key, cause in found.items() if cause is None}
        assert roots
        assert {cause for cause in found.values() if cause is not None} <= roots


def test_a_cause_ranks_by_the_worst_that_it_explains() -> None:
    """A leak is a warning until its rank dies of it: then nothing milder comes first."""
    leak = finding("memory_growth", severity="warning", onset_ms=9e5)
    loader = finding(
        "slow_data", detector="data-loading", severity="warning", cost_throughput_ratio=0.9
    )
    verdict = verdict_of(group_findings([loader, leak, OOM]), ())
    assert verdict is not None
    assert (verdict.key, verdict.severity) == (leak.key, "critical")


def test_advice_is_never_the_culprit_of_a_fault() -> None:
    slow = spared(SLOW, severity="info")
    stale = finding("staleness", severity="warning")
    assert explained([slow, stale])[stale.key] is None


def status(name: str, reason: str, remedy: str) -> DetectorResult:
    return DetectorResult(DetectorStatus(name, "", "skipped", reason, remedy))


def test_a_doubtful_verdict_says_which_measurement_would_decide() -> None:
    results = [
        status("gpu-health", "no GPU is sampled", "install NVML"),
        status("pipeline", "no rank owns a stage", NOT_HERE),
        status("gpu-events", "no GPU is sampled", NOT_HERE),
        status("noise-scale", "needs 200 steps", "wait"),
    ]
    doubtful = verdict_of([spared(SLOW, confidence=0.6)], results)
    assert doubtful is not None
    assert doubtful.deciding == ("gpu-health: no GPU is sampled; install NVML",)
    sure = verdict_of([SLOW], results)
    assert sure is not None
    assert sure.deciding == ()
