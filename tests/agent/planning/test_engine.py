"""What must hold of every plan, whatever is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.planning.errors import PlanError
from rankscope.planning.layout import ASYNCHRONOUS, FAMILIES, Layout, candidates
from rankscope.planning.machine import DEVICES, Link, Machine
from rankscope.planning.measured import link_between
from rankscope.planning.memory import memory_of, microbatches_in_flight
from rankscope.planning.model import KNOWN_MODELS, PRECISIONS, Transformer
from rankscope.planning.plan import money_of_step, outcome_of, plan_of
from rankscope.planning.rules import rules
from rankscope.planning.stages import num_alike, stages_of
from rankscope.planning.step import bubble_share, microbatches_for, step_time
from rankscope.planning.traffic import messages_of
from rankscope.planning.units import (
    Price,
    bytes_text,
    link_bytes_per_second,
    price_of,
    rate_flops,
    seconds_text,
    size_bytes,
    time_seconds,
)
from rankscope.wire.formulas import (
    bubble_fraction,
    expected_slowdown,
    ring_seconds,
    tree_seconds,
)

SMALL = Transformer(layers=12, width=64, heads=4, sequence=64, vocabulary=256)
MODEL = SMALL.model("small", PRECISIONS["bf16"])
LARGE = KNOWN_MODELS["llama2-7b"][0].model("llama2-7b", PRECISIONS["bf16"])


def machine(nodes: int = 1, devices: int = 8, **more: float | Link | None) -> Machine:
    fields = {
        "memory_bytes": 80e9, "flops": 4e14, "flops_low": 3.6e14, "flops_high": 4.4e14,
        "inside": Link(360e9, 3e-6), "between": Link(40e9, 14e-6),
    } | more  # fmt: skip
    return Machine(nodes=nodes, devices=devices, **fields)  # type: ignore[arg-type]


@given(st.integers(1, 4), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 6, 8, 24]))
def test_every_layout_uses_every_rank_and_sample(nodes: int, devices: int, batch: int) -> None:
    where = machine(nodes, devices)
    for layout in candidates(MODEL, where, batch, families=(*FAMILIES, *ASYNCHRONOUS)):
        assert layout.world_size == where.ranks, layout
        assert layout.batch == batch, layout
        stages = stages_of(MODEL, layout)
        alike = [num_alike(stage, MODEL, layout) for stage in stages]
        assert sum(alike) == layout.pipeline, layout
        layers = sum(n * stage.layers for n, stage in zip(alike, stages, strict=True))
        assert layers == MODEL.num_layers, layout
        weights = sum(n * stage.parameters for n, stage in zip(alike, stages, strict=True))
        assert weights * layout.tensor == pytest.approx(MODEL.parameters), layout
        time = step_time(MODEL, layout, where, "adamw")
        assert time is not None
        assert time.compute > 0 <= time.bubble, layout
        assert min(time.tensor, time.pipeline, time.data) >= 0, layout


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 64, 96]))
def test_a_plan_is_whole(nodes: int, batch: int) -> None:
    plan = plan_of(MODEL, machine(nodes), batch=batch, optimizer="adamw")
    named = [o.layout.family for o in plan.outcomes] + [one.family for one in plan.left_out]
    assert sorted(named) == sorted((*FAMILIES, *ASYNCHRONOUS))
    assert all(one.reason for one in plan.left_out)
    for outcome in plan.outcomes:
        assert outcome.fits
        assert outcome.low_seconds is not None
        assert outcome.seconds is not None
        assert outcome.high_seconds is not None
        assert outcome.low_seconds <= outcome.seconds * (1 + 1e-9)
        assert outcome.seconds <= outcome.high_seconds * (1 + 1e-9)


def test_what_does_not_fit_says_how_much_it_lacks() -> None:
    plan = plan_of(LARGE, machine(), batch=64, optimizer="adamw", families=("ddp",))
    assert plan.chosen is None
    assert plan.left_out[0].reason.startswith("does not fit: 131 GB of 80.0 GB")
    # 16 bytes of each weight alone
    assert 16 * LARGE.parameters > 80e9


def test_without_a_rate_memory_alone_is_known() -> None:
    plan = plan_of(LARGE, machine(flops=0.0), batch=64, optimizer="adamw")
    assert plan.chosen is not None
    assert plan.chosen.seconds is None
    assert "the rate of a device" in plan.why
    known = plan_of(LARGE, machine(), batch=64, optimizer="adamw")
    assert plan.num_fitting == known.num_fitting


def test_a_link_that_is_not_known_leaves_times_open_where_it_is_used() -> None:
    where = machine(2, 4, between=None)
    inside = Layout(family="tensor", tensor=4, microbatches=8)
    assert step_time(LARGE, inside, where, "adamw") is not None
    assert step_time(LARGE, replace(inside, data=2), where, "adamw") is None


def test_no_message_inside_of_a_cut_layer_is_quicker_than_its_host() -> None:
    layout = Layout(family="tensor", tensor=4, microbatches=8)
    where = replace(machine(1, 4), least_message_seconds=1.0)
    (sent,) = messages_of(LARGE, layout, stages_of(LARGE, layout)[0])
    slow = step_time(LARGE, layout, where, "adamw")
    assert slow is not None
    assert slow.tensor == pytest.approx(sent.count)
    apart, among = Layout(family="ddp", data=4), machine(1, 4)
    assert step_time(LARGE, apart, where, "adamw") == step_time(LARGE, apart, among, "adamw")
    quick = replace(where, least_message_seconds=1e-9)  # the link is slower
    assert step_time(LARGE, layout, quick, "adamw") == step_time(LARGE, layout, among, "adamw")


def test_what_the_host_does_for_a_layer_is_not_cut_with_it() -> None:
    where = machine(1, 4)
    slower = replace(where, host_layer_seconds=0.001)

    def added(layout: Layout) -> float:
        before, after = (step_time(LARGE, layout, one, "adamw") for one in (where, slower))
        assert before is not None
        assert after is not None
        return after.compute - before.compute

    # forward, and a backward of twice its time, of each microbatch and layer of a rank
    each = 8 * 3 * 0.001 * LARGE.num_layers
    assert added(Layout(family="tensor", tensor=4, microbatches=8)) == pytest.approx(each)
    assert added(Layout(family="ddp", data=4, microbatches=8)) == pytest.approx(each)
    whole = Layout(family="tensor", tensor=4, microbatches=8, recomputes=True)
    assert added(whole) == pytest.approx(each * 4 / 3)
    staged = Layout(family="pipeline", pipeline=4, microbatches=8, schedule="1f1b")
    assert added(staged) == pytest.approx(each / 4)


def test_zero_sends_what_its_paper_says() -> None:
    def sent(shard: int) -> float:
        layout = Layout(family="fsdp", data=64, shard=shard)
        return outcome_of(LARGE, layout, machine(8), "adamw").sent_bytes

    assert sent(1) == pytest.approx(sent(0))
    assert sent(2) == pytest.approx(sent(0))
    assert sent(3) == pytest.approx(1.5 * sent(0))  # section 7.2.2
    assert sent(0) == pytest.approx(2 * 63 / 64 * 2 * LARGE.parameters)


@given(st.integers(2, 16), st.integers(1, 64))
def test_the_bubble_is_the_formula_where_stages_are_equal(stages: int, microbatches: int) -> None:
    model = replace(
        MODEL, num_layers=stages * 4, first=replace(MODEL.first, forward_flops=0.0),
        last=replace(MODEL.last, forward_flops=0.0),
    )  # fmt: skip
    where = machine(1, stages, inside=Link(1e18, 0.0))
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
        layout = Layout(
            family="pipeline", pipeline=stages, microbatches=microbatches, schedule=schedule,
            chunks=chunks,
        )  # fmt: skip
        time = step_time(model, layout, where, "adamw")
        assert time is not None
        formula = bubble_fraction(stages, microbatches, chunks)
        assert bubble_share(time) == pytest.approx(formula, abs=1e-6)


def test_activations_in_flight() -> None:
    of = Layout(family="pipeline", pipeline=4, microbatches=16)
    assert microbatches_in_flight(replace(of, schedule="gpipe"), 0) == 16
    held = [microbatches_in_flight(replace(of, schedule="1f1b"), place) for place in range(4)]
    assert held == [4, 3, 2, 1]
    interleaved = replace(of, schedule="interleaved", chunks=2)
    assert microbatches_in_flight(interleaved, 0) == 4 * (1 + 3 / (4 * 2))


def test_buffers_of_a_pipeline_are_there_for_every_microbatch() -> None:
    layout = Layout(family="pipeline", pipeline=4, microbatches=16, schedule="1f1b")
    without = replace(layout, has_receive_buffers=False)
    of = [memory_of(LARGE, one, machine(), "adamw").buckets for one in (layout, without)]
    # the first stage, which is the fullest, gets gradients alone
    assert of == [16 * 4096 * 4096 * 2, 0.0]


@given(st.sampled_from(["ddp", "zero1", "zero2", "fsdp"]), st.sampled_from([1, 2, 4]))
def test_recomputing_saves_memory_and_costs_time(family: str, samples: int) -> None:
    layout = Layout(
        family=family, data=8, samples=samples, microbatches=4,
        shard=["ddp", "zero1", "zero2", "fsdp"].index(family),
    )  # fmt: skip
    kept, again = (
        outcome_of(LARGE, replace(layout, recomputes=recomputes), machine(), "adamw")
        for recomputes in (False, True)
    )
    assert again.memory.activations < kept.memory.activations
    assert again.time is not None
    assert kept.time is not None
    assert again.time.compute == pytest.approx(4 / 3 * kept.time.compute)


def test_faster_links_and_more_memory_never_hurt() -> None:
    slow = plan_of(LARGE, machine(8, between=Link(5e9, 14e-6)), batch=1024, optimizer="adamw")
    fast = plan_of(LARGE, machine(8), batch=1024, optimizer="adamw")
    small = plan_of(LARGE, machine(8, memory_bytes=24e9), batch=1024, optimizer="adamw")
    best = [min(o.seconds or 0.0 for o in plan.outcomes) for plan in (fast, slow, small)]
    assert best[0] <= best[1]
    assert best[0] <= best[2]
    assert small.num_fitting < fast.num_fitting


def test_rings_of_several_ranks_on_a_node_use_all_its_adapters() -> None:
    where = machine(4, 8)
    assert where.link_of(8, 1) == where.inside
    assert where.link_of(4, 8) == where.between  # one member on each node
    joined = where.link_of(32, 1)
    assert joined is not None
    assert joined.bytes_per_second == 8 * 40e9
    half = where.link_of(8, 4)  # two on each node
    assert half is not None
    assert half.bytes_per_second == 2 * 40e9


def test_servers_are_as_fast_as_their_links() -> None:
    where = machine(1, 8, inside=Link(1e9, 0.0))
    times = []
    for servers in (1, 2, 4):
        layout = Layout(family="parameter_server", data=8 - servers, servers=servers)
        time = step_time(LARGE, layout, where, "adamw")
        assert time is not None
        times.append(time.data)
    weights = 2 * LARGE.parameters / 1e9  # seconds on one link
    assert times == pytest.approx([2 * 7 * weights, 2 * 3 * weights, 2 * weights])


def test_the_first_stage_of_a_pipeline_with_messages() -> None:
    layout = Layout(family="pipeline", pipeline=4, microbatches=8, schedule="1f1b", samples=2)
    first, middle, *_, last = stages_of(LARGE, layout)
    size = 2 * 4096 * 4096 * 2
    for stage, borders in ((first, 1), (middle, 2), (last, 1)):
        (sent,) = messages_of(LARGE, layout, stage)
        assert (sent.operation, sent.count, sent.size_bytes) == ("send", 8 * borders, size)


def test_servers_keep_the_state_and_workers_none() -> None:
    layout = Layout(family="parameter_server", data=1, servers=1)
    memory = memory_of(LARGE, layout, machine(), "adamw")
    assert memory.optimizer == 12 * LARGE.parameters  # a server is the fuller one
    workers = replace(layout, data=3, servers=5)
    assert memory_of(LARGE, workers, machine(), "adamw").optimizer == 0


def test_rings_and_trees() -> None:
    assert ring_seconds("all_reduce", 8e9, 4, 1e9, 0.5) == pytest.approx(6 * 0.5 + 12)
    assert ring_seconds("all_gather", 8e9, 4, 1e9, 0.5) == pytest.approx(3 * 0.5 + 6)
    assert ring_seconds("send", 8e9, 2, 1e9, 0.5) == pytest.approx(8.5)
    assert ring_seconds("all_reduce", 8e9, 1, 1e9, 0.5) == 0
    assert tree_seconds(0, 1024, 1e9, 1.0) == 20
    assert tree_seconds(1e9, 1, 1e9, 1.0) == 0
    assert expected_slowdown(0.8, 2.0) == pytest.approx(1.8)
    assert expected_slowdown(0.5, 1.0) == 1


def test_enough_microbatches() -> None:
    for stages in (2, 4, 8):
        for chunks in (1, 2):
            number = microbatches_for(stages, 0.05, chunks)
            assert bubble_fraction(stages, number, chunks) <= 0.05 + 1e-9
            assert bubble_fraction(stages, number - 1, chunks) > 0.05


def test_money() -> None:
    plan = plan_of(MODEL, machine(), batch=64, optimizer="adamw")
    assert plan.chosen is not None
    assert plan.chosen.seconds is not None
    step = 8 * plan.chosen.seconds / 3600 * 2.5
    assert money_of_step(plan, plan.chosen, Price(2.5)) == pytest.approx(step)
    assert money_of_step(plan, plan.chosen, Price(20, is_of_node=True)) == pytest.approx(step)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (size_bytes, "80GB", 80e9), (size_bytes, "80 GiB", 80 * 2**30), (size_bytes, ".5tb", 5e11),
        (rate_flops, "400TFLOPs", 4e14), (rate_flops, "1.5 PFLOP/s", 1.5e15),
        (link_bytes_per_second, "450GB/s", 4.5e11), (link_bytes_per_second, "400Gbit/s", 5e10),
        (time_seconds, "5us", 5e-6), (time_seconds, "0.2ms", 2e-4),
        (price_of, "2.5/hour", Price(2.5)), (price_of, "2.5 EUR/hour", Price(2.5, "EUR")),
        (price_of, "$98/node-hour", Price(98, "$", is_of_node=True)), (price_of, "3", Price(3)),
    ],
)  # fmt: skip
def test_units(read: object, text: str, value: object) -> None:
    assert read(text, "field") == (value if isinstance(value, Price) else pytest.approx(value))  # type: ignore[operator]


@pytest.mark.parametrize("read", [size_bytes, rate_flops, link_bytes_per_second, time_seconds])
@given(text=st.text(max_size=12))
def test_any_text_is_a_value_or_an_error_with_a_remedy(read: object, text: str) -> None:
    refused = None
    try:
        value = read(text, "memory")  # type: ignore[operator]
    except PlanError as error:
        refused = error
    assert value > 0 if refused is None else refused.remedy.startswith("Write ")
    assert refused is None or refused.field == "memory"


@pytest.mark.parametrize("text", ["", "free", "2.5/minute", "-1/hour", "2.5 EUR USD/hour"])
def test_no_price(text: str) -> None:
    with pytest.raises(PlanError, match=r"Write 2\.5/hour"):
        price_of(text, "price")


def test_texts() -> None:
    assert bytes_text(79.44e9) == "79.4 GB"
    assert bytes_text(512) == "512 B"
    assert seconds_text(0.0844) == "84.4 ms"
    assert seconds_text(8_000) == "2.22 h"
    assert seconds_text(2e-7) == "0.2 \N{MICRO SIGN}s"


def test_every_rule_has_a_source_and_every_device_too() -> None:
    for rule in rules():
        assert rule.formula
        assert rule.example
        assert any(character.isdigit() for character in rule.source), rule.name
    for device in DEVICES.values():
        assert "data sheet" in device.source
        assert device.memory_bytes > 1e10


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({}, "no answer of a preflight"),
        ({"reports": [{"node": "a", "edges": {}}]}, "measured no pair"),
        ({"reports": [{"node": "a", "edges": {"b": {"bandwidth": {"mbit_per_s": 0}}}}]},
         "nothing arrived from a at b"),
    ],
)  # fmt: skip
def test_links_that_no_preflight_measured(answer: dict[str, object], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        link_between(answer, 8)


def test_links_of_a_preflight() -> None:
    def edge(mbit: float, rtt_ms: float) -> dict[str, object]:
        return {"bandwidth": {"mbit_per_s": mbit}, "rtt": {"median_ms": rtt_ms}}

    answer = {
        "reports": [
            {"node": "a", "edges": {"b": edge(80_000, 0.1), "c": edge(90_000, 0.2)}},
            {"node": "b", "edges": {"a": edge(40_000, 0.1)}},
        ]
    }
    link, text = link_between(answer, 4)
    assert link == Link(40_000 * 125_000 / 4, 0.1e-3)
    assert "b to a" in text


def test_numbers_of_a_model_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="heads: 5 heads do not divide width 64"):
        replace(SMALL, heads=5)
    with pytest.raises(PlanError, match="kv_heads: 3 do not divide 4"):
        replace(SMALL, kv_heads=3)
    with pytest.raises(PlanError, match="layers: 0 is too small"):
        replace(SMALL, layers=0)
    with pytest.raises(PlanError, match="strategy: 'magic' is unknown"):
        plan_of(MODEL, machine(), batch=8, optimizer="adamw", families=("magic",))
