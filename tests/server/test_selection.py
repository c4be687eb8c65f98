"""Some ranks in some steps: how they deviate, and that nothing in common is invented."""

from __future__ import annotations

import itertools
import math
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rankscope.wire import schema
from rankscope_server.api.selection import measured
from rankscope_server.api.selection.common import Column, Member, chance, shared_of
from rankscope_server.api.selection.facts import fact_columns
from rankscope_server.api.selection.words import ranks_text
from rankscope_server.api.steps.cells import robust_z, usual_band
from rankscope_server.api.steps.schema import Usual
from tests.server.conftest import DATABASES, Sender, log_line, poster, serving, url_of
from tests.server.jobs_sent import send_job
from tests.server.runs_sent import steps
from tests.simulator.job import Fault, Job

SLOW_HOST = range(24, 32)
JOB = Job(
    data=4, tensor=8, pipeline=2, steps=200, backend="gloo", ranks_per_host=8,
    faults=tuple(Fault("slow_compute", rank=rank, start=100, size=0.45) for rank in SLOW_HOST),
)  # fmt: skip
OLD, NEW = "535.54", "550.90"
TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.fixture(scope="module", params=DATABASES)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """64 ranks on 8 hosts in 2 stages; those of one host are slow from step 100 on."""
    with serving(tmp_path_factory.mktemp("selection"), url_of(request)) as client:
        send_job(poster(client), "job", JOB)
        sender = Sender(client, "job", "more")
        facts = [
            schema.Environment(
                attempt=0, rank=rank, time_ns=1,
                facts={"driver": OLD if rank in SLOW_HOST else NEW, "pid": str(rank),
                       "hostname": JOB.host(rank)},
            )
            for rank in range(64)
        ]  # fmt: skip
        started = sender.get("/cell", rank=25, step=150)["time_ms"]
        sender.send(
            *facts,
            log_line("slow here", rank=25, level=30, time_ns=int(started * 1e6) + 1),
            log_line("slow there", rank=33, level=40, time_ns=int(started * 1e6) + 1),
            log_line("quick", rank=25, level=20, time_ns=int(started * 1e6) + 1),
            schema.ErrorRaised(attempt=0, rank=26, time_ns=5, type="ValueError", message="x",
                               step=140, traceback="", where="main"),
        )  # fmt: skip
        client.app.state.service.analysis.look_now()
        yield sender


def ask(sender: Sender, ranks: str, lo: int, hi: int) -> dict[str, Any]:
    answer: dict[str, Any] = sender.get("/selection", ranks=ranks, **{"from": lo, "to": hi})
    return answer


def texts(answer: dict[str, Any], part: str = "common") -> list[str]:
    return [one["text"] for one in answer[part]]


def test_a_slow_host_is_named_with_all_that_only_it_has(job: Sender) -> None:
    answer = ask(job, "24-31", 120, 180)
    assert 1.35 < answer["ratio"] < 1.5
    assert answer["z"] > 6
    assert (answer["reference"], answer["is_usual"]) == ("others", False)
    assert answer["phases"][0]["phase"] == "backward"
    alone = {one["text"] for one in answer["common"] if not one["num_others"]}
    assert {"on node-0003", f"with driver {OLD}"} <= alone
    assert not any("pid" in text or "hostname" in text for text in texts(answer))
    assert answer["num_lines"] == 1
    named = {finding["what"][:14]: finding["num_named"] for finding in answer["findings"]}
    assert named == {"Ranks 24 to 31": 8, "Rank 26 on nod": 1}
    assert [one["kind"] for one in answer["common"]].count("finding") == 1
    assert [(one["type"], one["num_ranks"]) for one in answer["errors"]] == [("ValueError", 1)]
    assert re.match(
        rf"Ranks 24-31, steps 120-180: 1\.4{TIMES} slower than the other ranks in the same steps "
        r"\(robust z \d+\), most of it backward: 1\d(\.\d)? ms longer",
        answer["text"],
    )
    assert (
        f"on node-0003, in the tensor group of ranks 24 to 31 and with driver {OLD}"
        in (answer["text"])
    )
    assert "1 log line at warning or worse; 1 error (ValueError)" in answer["text"]


def test_what_others_have_too_is_counted(job: Sender) -> None:
    answer = ask(job, "24-27", 120, 180)
    host = next(one for one in answer["common"] if one["kind"] == "host")
    assert (host["num_selected"], host["num_others"], host["num_others_known"]) == (4, 4, 60)
    assert "all on node-0003, as are 4 of the other 60 ranks" in answer["text"]


def test_the_steps_before_the_fault_are_as_usual(job: Sender) -> None:
    answer = ask(job, "24-31", 20, 80)
    assert answer["is_usual"] is True
    assert "as fast as the other ranks in the same steps" in answer["text"]


def test_among_many_the_slow_ones_are_named(job: Sender) -> None:
    answer = ask(job, "16-39", 120, 180)
    assert answer["slow"]["ranks"] == "24-31"
    slow = f"ranks 24-31 are up to 1.4{TIMES} slower than the other ranks in the same steps"
    assert f"Ranks 16-39, steps 120-180: {slow}, the other 16 not" in answer["text"]
    half = ask(job, "20-27", 120, 180)
    assert f"ranks 24-27 are up to 1.4{TIMES} slower" in half["text"]
    most = ask(job, "23-31", 120, 180)
    assert "8 of 9 ranks" in most["text"]
    assert not any("driver" in text for text in texts(answer))


def test_of_all_ranks_nothing_is_in_common(job: Sender) -> None:
    answer = ask(job, "0-63", 120, 180)
    assert answer["common"] == []
    assert f"All 64 ranks, steps 120-180: ranks 24-31 are up to 1.4{TIMES} slower" in answer["text"]


def test_a_whole_stage_is_compared_with_the_other_and_says_so(job: Sender) -> None:
    answer = ask(job, "32-63", 120, 180)
    assert answer["reference"] == "other roles"
    assert "in pipeline stage 1" in texts(answer)
    assert "ranks of other stages in the same steps" in answer["text"]


def test_one_cell_and_ranks_that_share_no_host(job: Sender) -> None:
    cell = ask(job, "25", 150, 150)
    assert cell["text"].startswith("Rank 25 on node-0003, step 150: ")
    assert cell["worst"]["rank"] == 25
    assert not any(one["kind"] == "local_rank" for one in cell["common"])
    apart = ask(job, "3,11,19,27", 120, 180)
    assert not any(one["kind"] == "host" for one in apart["common"])
    exact = job.get("/cell", rank=25, step=150)
    assert exact["time_ms"] == cell["from_ms"]


def test_a_cell_reads_the_same_as_the_map_does(job: Sender) -> None:
    """One rank against its peers is what the map compares it with, too."""
    for rank, step in ((25, 150), (3, 40), (60, 199)):
        exact = job.get("/cell", rank=rank, step=step)["ratio"]
        assert ask(job, str(rank), step, step)["ratio"] == pytest.approx(exact, rel=1e-6)


def test_pinned_ranks_and_the_map_say_their_noise(job: Sender) -> None:
    answer = job.get("/map", lanes=16)
    usual, noise = Usual(**answer["usual"]), Usual(**answer["noise"])
    assert usual.hi == pytest.approx(usual.ratio * 2 ** (4 * usual.sigma))
    for pin in answer["pinned"]:
        assert pin["max_z"] == pytest.approx(
            math.log2(pin["max_ratio"] / noise.ratio) / noise.sigma, abs=1e-3
        )
    assert answer["pinned"]


def test_noise_is_that_of_steps_whatever_the_width(job: Sender) -> None:
    asked = [job.get("/map", lanes=16, width=width) for width in (25, 50, 1_200)]
    assert [answer["bin"] for answer in asked] == [8, 4, 1]
    assert len({answer["usual"]["sigma"] for answer in asked}) == 3
    assert len({(one["noise"]["sigma"], one["noise"]["ratio"]) for one in asked}) == 1
    pins = [{pin["rank"]: pin["max_z"] for pin in answer["pinned"]} for answer in asked]
    assert pins[0] == pins[1] == pins[2]
    levels = np.log2(1 + 0.45) / asked[0]["noise"]["sigma"]
    assert max(pins[0].values()) > 0.8 * levels


@pytest.mark.parametrize(
    ("changes", "status", "field"),
    [
        ({"ranks": "3-1"}, 422, "ranks"),
        ({"ranks": ""}, 422, "ranks"),
        ({"ranks": ",".join(map(str, range(0, 1100, 2)))}, 422, "ranks"),
        ({"ranks": "77"}, 404, "ranks"),
        ({"from": 9, "to": 5}, 422, "from"),
        ({"from": 900, "to": 950}, 404, "from"),
        ({"from": 0}, 422, "from"),
    ],
)
def test_what_cannot_be_asked(
    job: Sender, changes: dict[str, object], status: int, field: str
) -> None:
    asked = {"ranks": "0", "from": 1, "to": 5} | changes
    reply = job.client.get("/api/v1/runs/job/selection", params=asked)
    assert (reply.status_code, reply.json()["error"]["field"]) == (status, field)


def test_lines_are_those_that_the_log_page_finds(job: Sender) -> None:
    for ranks in ("25", "24-40", "0-63"):
        answer = ask(job, ranks, 100, 199)
        page = job.get("/logs", rank=answer["ranks"], min_level="WARNING", fold=False,
                       from_ms=answer["from_ms"], to_ms=answer["to_ms"])  # fmt: skip
        assert answer["num_lines"] == page["total"] > 0


def test_facts_that_some_did_not_send_are_never_shared(job: Sender) -> None:
    """The newest of a rank's facts count: here two slow ranks and some others send no driver."""
    silent = (24, 25, 40, 41, 42)
    job.send(*(schema.Environment(attempt=0, rank=rank, time_ns=2, facts={"pid": "1"})
               for rank in silent))  # fmt: skip
    try:
        answer = ask(job, "24-31", 120, 180)
        assert f"with driver {OLD}" not in texts(answer)
        (driver,) = [one for one in answer["not_known"] if one["name"] == "driver"]
        assert (driver["num_selected"], driver["num_unknown"]) == (6, 2)
        assert (driver["num_others"], driver["num_others_unknown"]) == (0, 3)
        assert f"with driver {OLD}" in texts(ask(job, "26-31", 120, 180))
    finally:
        job.send(*(schema.Environment(
            attempt=0, rank=rank, time_ns=3,
            facts={"driver": OLD if rank in SLOW_HOST else NEW}) for rank in silent))  # fmt: skip


# --- what is in common, against plain loops --------------------------------------------------


def column(values: list[str | None], kind: Any = "fact") -> Column:
    names = sorted({value for value in values if value is not None})
    codes = [-1 if value is None else names.index(value) for value in values]
    return Column(kind, "fact", np.array(codes), names)


def mask(ranks: list[int], height: int) -> np.ndarray[Any, Any]:
    found = np.zeros(height, bool)
    found[ranks] = True
    return found


@pytest.mark.parametrize("seed", range(40))
def test_what_is_shared_holds_of_every_selected_rank(seed: int) -> None:
    rng = random.Random(seed)
    height = rng.randint(2, 24)
    values = [rng.choice(["a", "a", "b", None]) for _ in range(height)]
    chosen = rng.sample(range(height), rng.randint(1, height))
    common, in_part = shared_of(mask(chosen, height), [column(values)], [])
    known = {values[rank] for rank in chosen} - {None}
    others = [values[rank] for rank in range(height) if rank not in chosen]
    for one in (*common, *in_part):
        assert known == {one.value}
        assert one.num_selected == sum(values[rank] == one.value for rank in chosen)
        assert one.num_unknown == sum(values[rank] is None for rank in chosen)
        assert one.num_others == others.count(one.value)
        assert one.num_others_known == sum(other is not None for other in others)
        assert one.num_others_known > one.num_others
    assert all(not one.num_unknown for one in common)
    if len(known) == 1 and others and None not in values and known.isdisjoint(others):
        assert [one.value for one in common] == list(known)


def test_chance_counts_all_choices() -> None:
    for having, selected in itertools.product(range(7), range(1, 7)):
        choices = list(itertools.combinations(range(7), selected))
        all_have = sum(max(choice) < having for choice in choices)
        assert chance(selected, having, 7) == pytest.approx(all_have / len(choices))


def test_half_of_the_ranks_on_a_host_is_no_news_for_one_but_for_eight() -> None:
    hosts = column(["a"] * 8 + ["b"] * 8 + ["c"] * 8, "host")
    assert shared_of(mask([0], 24), [hosts], []) == ([], [])
    assert shared_of(mask([0, 1], 24), [hosts], []) == ([], [])
    (one,) = shared_of(mask([0, 1, 2, 3], 24), [hosts], [])[0]
    assert (one.text, one.num_others) == ("on a", 4)


def test_whole_hosts_are_named_together_and_parts_of_them_are_not() -> None:
    hosts = column(["a"] * 4 + ["b"] * 4 + ["c"] * 8, "host")
    (both,) = shared_of(mask(list(range(8)), 16), [hosts], [])[0]
    assert both.text == "on a or b"
    assert shared_of(mask(list(range(7)), 16), [hosts], []) == ([], [])


def test_a_group_counts_only_where_it_holds_all() -> None:
    group = Member("group", "tensor group", "ranks 0 to 3", mask([0, 1, 2, 3], 12))
    (one,) = shared_of(mask([0, 1, 2], 12), [], [group])[0]
    assert (one.text, one.num_others) == ("in the tensor group of ranks 0 to 3", 1)
    assert shared_of(mask([0, 4], 12), [], [group]) == ([], [])


def test_who_is_silent_makes_a_fact_of_few_no_common_one() -> None:
    values: list[str | None] = ["a"] * 4 + ["b"] + [None] * 11
    common, in_part = shared_of(mask([0, 1, 2, 3], 16), [column(values)], [])
    assert (common, [one.num_others_unknown for one in in_part]) == ([], [11])


# --- numbers --------------------------------------------------------------------------------


def test_the_robust_z_is_in_standard_deviations_of_the_log() -> None:
    usual = Usual(ratio=1.1, lo=1.0, hi=1.21, sigma=0.05)
    assert robust_z(1.1, usual) == 0
    assert robust_z(1.1 * 2**0.15, usual) == pytest.approx(3, abs=1e-3)
    assert robust_z(1.5, None) is None
    assert robust_z(1.5, Usual(ratio=1.0, lo=1.0, hi=1.0, sigma=0.0)) is None
    assert usual_band(None, 5) == (1 / 1.08, 1.08)
    wide = Usual(ratio=1.0, lo=0.6, hi=1.7, sigma=0.2)
    assert usual_band(wide, 1) == pytest.approx((0.6, 1.7))
    assert usual_band(wide, 16) == pytest.approx((0.6**0.3125, 1.7**0.3125))
    assert usual_band(wide, 900) == usual_band(wide, 16)


def test_ranks_are_written_short() -> None:
    assert ranks_text(mask([5], 9)) == "rank 5"
    assert ranks_text(mask([0, 1, 2], 9)) == "ranks 0-2"
    assert ranks_text(mask(list(range(0, 20, 2)), 20)) == "ranks 0, 2, 4 and 7 more"
    assert ranks_text(mask([0, 1], 2)) == "all 2 ranks"


def test_of_many_ranks_every_selected_one_is_read() -> None:
    height = 8_192
    roles = np.zeros(height, np.int64)
    everyone = measured.sample_of(np.ones(height, bool), roles, 1, 10_000, is_whole=True)
    assert len(everyone.ranks) == height
    assert (everyone.spans[0][0], everyone.spans[-1][1]) == (1, 10_000)
    few = measured.sample_of(mask([8_000], height), roles, 1, 10_000, is_whole=True)
    assert 8_000 in few.ranks
    cells = len(few.ranks) * sum(hi - lo + 1 for lo, hi in few.spans)
    assert cells <= measured.MAX_CELLS
    assert len(few.ranks) >= 1_024


def test_facts_are_counted_anew_when_a_rank_sends_others(sender: Sender) -> None:
    def columns() -> list[Column]:
        with sender.client.app.state.service.read() as connection:
            return fact_columns(connection, "run", 0, 3)[0]

    sender.send(*(schema.Environment(attempt=0, rank=rank, time_ns=1, facts={"driver": "1"})
                  for rank in range(3)))  # fmt: skip
    assert columns() == []
    sender.send(schema.Environment(attempt=0, rank=2, time_ns=2, facts={"driver": "2"}))
    (driver,) = columns()
    assert [driver.values[code] for code in driver.codes] == ["1", "1", "2"]


def test_what_sent_nothing_is_not_known(sender: Sender) -> None:
    def asked() -> Any:
        return sender.client.get("/api/v1/runs/run/selection?ranks=2-3&from=5&to=9")

    assert asked().status_code == 404
    sender.send(
        schema.RunStarted(attempt=0, rank=-1, time_ns=1, name="r", command=[], world_size=5)
    )
    assert (asked().status_code, asked().json()["error"]["field"]) == (404, "from")
    sender.send(chunks=[steps(rank, 50.0, 10**18, 20) for rank in (0, 1)])
    answer = asked().json()
    assert answer["text"] == (
        "Ranks 2-3, steps 5-9: no self time is known here; nothing recorded is in common that the "
        "others have not; no finding."
    )
    empty = ("ratio", "z", "is_usual", "self_ms", "slow", "worst", "num_lines", "from_ms")
    assert [answer[name] for name in empty] == [None] * len(empty)
    assert answer["notes"] == [
        "No process group is recorded.", "No rank sent its environment.",
    ]  # fmt: skip
    assert (answer["hosts"], answer["common"]) == ([], [])


def test_a_large_run_is_answered_in_time(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """2,048 ranks on 256 hosts: the one slow host is named."""
    big = Job(
        data=32, tensor=8, pipeline=8, steps=40, backend="gloo",
        faults=tuple(Fault("slow_compute", rank=r, start=10, size=0.5) for r in range(808, 816)),
    )  # fmt: skip
    with serving(tmp_path_factory.mktemp("big"), "") as client:
        send_job(poster(client), "big", big)
        sender = Sender(client, "big")
        ask(sender, "0", 1, 1)
        least = math.inf
        for _ in range(3):
            begin = time.process_time()
            answer = ask(sender, "808-815", 15, 39)
            least = min(least, time.process_time() - begin)
        assert "all on node-0101" in answer["text"]
        assert 1.4 < answer["ratio"] < 1.6
        assert least < 0.25
