"""Predictions beside what papers publish of real models: weights, memory, FLOPs, throughput."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from rankscope.planning.layout import Layout
from rankscope.planning.machine import (
    BETWEEN_LATENCY_SECONDS,
    DEVICES,
    INSIDE_LATENCY_SECONDS,
    LINK_SHARE,
    PEAK_SHARE,
    Link,
    Machine,
)
from rankscope.planning.memory import states_bytes
from rankscope.planning.model import KNOWN_MODELS, PRECISIONS, Model, Transformer
from rankscope.planning.plan import outcome_of
from rankscope.planning.stages import stages_of

BF16, FP16 = PRECISIONS["bf16"], PRECISIONS["fp16"]
GB = 1e9

# Rajbhandari et al. 2020, arXiv 1910.02054, table 1: GB of model states on each device with
# ZeRO-1, 2 and 3, by weights and data-parallel ranks.
ZERO = {
    (7.5e9, 1): (120, 120, 120), (7.5e9, 4): (52.5, 41.3, 30), (7.5e9, 16): (35.6, 21.6, 7.5),
    (7.5e9, 64): (31.4, 16.6, 1.88), (7.5e9, 256): (30.4, 15.4, 0.47),
    (7.5e9, 1024): (30.1, 15.1, 0.12),
    (128e9, 1): (2048, 2048, 2048), (128e9, 4): (896, 704, 512), (128e9, 16): (608, 368, 128),
    (128e9, 64): (536, 284, 32), (128e9, 256): (518, 263, 8), (128e9, 1024): (513, 257, 2),
    (1e12, 1): (16000, 16000, 16000), (1e12, 4): (7000, 5500, 4000),
    (1e12, 16): (4750, 2875, 1000), (1e12, 64): (4187, 2218, 250),
    (1e12, 256): (4046, 2054, 62.5), (1e12, 1024): (4011, 2013, 15.6),
}  # fmt: skip

# Narayanan et al. 2021, arXiv 2104.04473, table 1: billions of weights, heads, width, layers,
# tensor and pipeline ranks, GPUs, batch, TFLOPs of a GPU. Sequence 2048, vocabulary 51,200, A100s
# of 80 GB, 8 in a node with NVSwitch, and 8 HDR InfiniBand cards of 200 Gbit/s; with recomputation.
MEGATRON = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
# Korthikanti et al. 2022, arXiv 2205.05198, table 3: heads, width, layers; sequence 2048, 8 tensor
# ranks. Figure 7: what sequence parallelism and selective recomputation together leave of the
# memory that tensor parallelism alone needs, about a fifth, and full recomputation about a tenth.
KORTHIKANTI = {
    "22B": (64, 6144, 48), "175B": (96, 12288, 96), "530B": (128, 20480, 105),
    "1T": (160, 25600, 128),
}  # fmt: skip
# Weights as published with the models; Llama 3: arXiv 2407.21783, Llama 2: its checkpoints,
# GPT-3: arXiv 2005.14165, table 2.1; GPT-2: its largest checkpoint.
WEIGHTS = {
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-405b": 405_853_388_800, "gpt2-1.5b": 1_557_611_200,
}  # fmt: skip


def megatron(heads: int, width: int, layers: int) -> Model:
    return Transformer(
        layers=layers, width=width, heads=heads, sequence=2048, vocabulary=51_200, dropout=0.1,
        has_biases=True, has_positions=True, is_tied=True, stores_scores=True,
    ).model("megatron", FP16)  # fmt: skip


@pytest.mark.parametrize(("parameters", "ranks"), ZERO)
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_model_states_are_those_of_the_zero_paper(
    parameters: float, ranks: int, shard: int
) -> None:
    model = megatron(32, 4096, 36)
    layout = Layout(family="ddp", data=ranks, shard=shard)
    published = ZERO[parameters, ranks][shard - 1]
    said = sum(states_bytes(model, layout, "adamw", parameters)) / GB
    assert said == pytest.approx(published, rel=0.005, abs=0.005)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_those_of_the_checkpoints(name: str) -> None:
    model = KNOWN_MODELS[name][0].model(name, BF16)
    assert model.parameters == WEIGHTS[name]


@pytest.mark.parametrize("row", MEGATRON, ids=lambda row: f"{row[0]}B")
def test_weights_and_flops_are_those_of_megatron(row: tuple[float, ...]) -> None:
    billions, heads, width, layers, _, _, _, batch, _ = map(float, row)
    model = megatron(int(heads), int(width), int(layers))
    assert model.parameters / 1e9 == pytest.approx(billions, abs=0.06)
    # equation 3 there: 96 B s l h^2 (1 + s / 6h + V / 16 l h), of forward, backward and forward
    flops = 96 * batch * 2048 * layers * width**2
    flops *= 1 + 2048 / (6 * width) + 51_200 / (16 * layers * width)
    # the paper counts the last projection three times, not a fourth time with recomputation
    assert 4 * model.forward_flops * batch == pytest.approx(flops, rel=0.02)


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_activations_are_those_of_korthikanti(name: str) -> None:
    heads, width, layers = KORTHIKANTI[name]
    model = megatron(heads, width, layers)
    stream, tensor = 2048 * width, 8
    scores = 5 * heads * 2048 / width
    table = {  # table 2 there, of one layer and one sample
        (False, False, True): stream * (34 + scores),
        (True, False, True): stream * (10 + 24 / tensor + scores / tensor),
        (True, True, True): stream * (34 + scores) / tensor,
        (True, True, False): stream * 34 / tensor,
    }
    for (is_cut, is_sequence, has_scores), published in table.items():
        layout = Layout(
            family="tensor", tensor=tensor if is_cut else 1, sequence_parallel=is_sequence
        )
        own = model if has_scores else _without_scores(heads, width, layers)
        first = stages_of(own, replace(layout, pipeline=layers))[1]
        assert (first.layers, first.is_first, first.is_last) == (1, False, False)
        assert first.saved_bytes == pytest.approx(published)
    recomputed = stages_of(model, Layout(family="pipeline", pipeline=layers, recomputes=True))[1]
    assert recomputed.kept_bytes == 2 * stream
    left = table[True, True, False] / table[True, False, True]
    assert 0.15 < left < 0.21
    assert 0.07 < 2 * stream / table[True, False, True] < 0.1


def _without_scores(heads: int, width: int, layers: int) -> Model:
    return Transformer(
        layers=layers, width=width, heads=heads, sequence=2048, vocabulary=51_200, dropout=0.1,
    ).model("selective", FP16)  # fmt: skip


def test_throughput_is_near_that_of_megatron() -> None:
    errors = [throughput(*row) / row[-1] - 1 for row in MEGATRON]
    assert statistics.median(map(abs, errors)) <= 0.10
    assert max(map(abs, errors)) <= 0.25


def throughput(
    _billions: float, heads: int, width: int, layers: int, tensor: int, pipeline: int, gpus: int,
    batch: int, _published: float,
) -> float:  # fmt: skip
    """Return TFLOPs of a GPU in the best microbatch size that fits, counted as in the paper."""
    model, device = megatron(heads, width, layers), DEVICES["a100"]
    machine = Machine(
        nodes=gpus // 8, devices=8, memory_bytes=device.memory_bytes,
        flops=device.peak_flops["fp16"] * PEAK_SHARE,
        memory_bytes_per_second=device.memory_bytes_per_second,
        inside=Link(device.inside_bytes_per_second * LINK_SHARE, INSIDE_LATENCY_SECONDS),
        between=Link(25e9 * LINK_SHARE, BETWEEN_LATENCY_SECONDS),
    )  # fmt: skip
    data = gpus // tensor // pipeline
    times = []
    chunks = max(n for n in (1, 2, 3, 4) if layers % (pipeline * n) == 0) if pipeline > 1 else 1
    for samples in (1, 2, 4, 8, 16):
        if batch // data % samples:
            continue
        layout = Layout(
            family="tensor+pipeline+data", data=data, tensor=tensor, pipeline=pipeline,
            samples=samples, microbatches=batch // data // samples, recomputes=True,
            schedule="interleaved", chunks=chunks,  # section 5.1
            has_receive_buffers=False,
        )  # fmt: skip
        outcome = outcome_of(model, layout, machine, "adamw", is_whole=False)
        if outcome.fits and outcome.seconds:
            times.append(outcome.seconds)
    return 4 * model.forward_flops * batch / min(times) / gpus / 1e12
