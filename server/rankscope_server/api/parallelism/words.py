"""What the page of parallelism says. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope_server.api.groups.mesh import WHOLE, Family, Layout
from rankscope_server.api.parallelism.schema import Pipeline
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.text import percent_text, ratio_text
from rankscope_server.text import plural

_TIMES = " \N{MULTIPLICATION SIGN} "


def first_sentence(
    pipeline: Pipeline | None, layout: Layout, families: Sequence[Family], world_size: int
) -> str:
    """Return the answer: what the pipeline idles and why, else how the ranks are divided."""
    if pipeline is not None:
        return pipeline_text(pipeline)
    if world_size == 1:
        return "One rank: it shares its work with no other"
    if not families:
        return "Not known: no process group has been recorded"
    text = f"No pipeline: {mesh_text(layout, world_size)}"
    return f"{text}, which form one group" if len(families) == 1 and _is_whole(layout) else text


def mesh_text(layout: Layout, world_size: int) -> str:
    """Return "1,024 ranks as pipeline 8 x data 16 x tensor 8"."""
    ranks = plural(world_size, "rank")
    if _is_whole(layout):
        return ranks
    return f"{ranks} as {_TIMES.join(f'{axis.name} {axis.size:,}' for axis in layout.axes)}"


def _is_whole(layout: Layout) -> bool:
    return len(layout.axes) == 1 and layout.axes[0].name in (WHOLE, "rank")


def pipeline_text(found: Pipeline) -> str:
    """Return what the stages idle, what is ideal, and which stage works longest."""
    places = [stage.stage for stage in found.stages]
    between = "and" if len(places) == 2 else "to"
    whose = f"Stages {places[0]} {between} {places[-1]}"
    if found.num_chunks > 1:
        whose = f"The {found.num_ranks} places of the pipeline"
    if found.idle_ratio is None:
        return f"What {whose[0].lower()}{whose[1:]} idle is not known yet"
    text = f"{whose} idle {percent_text(found.idle_ratio)} of a step, {_ideal(found)}"
    slowest = max(found.stages, key=lambda stage: stage.others_ratio or 0.0)
    ratio = slowest.others_ratio
    if ratio is None:
        return text
    if ratio < POLICY.uneven_stage_ratio:
        return f"{text}; no stage works much longer than the others{_one_rank(found)}"
    return f"{text}; stage {slowest.stage} works {ratio_text(ratio)} as long as the others"


def _one_rank(found: Pipeline) -> str:
    """Return the rank that works longer than the others of its stage, if any does."""
    longest = max(found.stages, key=lambda stage: stage.longest_ratio or 0.0)
    ratio = longest.longest_ratio
    if ratio is None or ratio < POLICY.uneven_stage_ratio:
        return ""
    return (
        f", but rank {longest.longest_rank} works {ratio_text(ratio)} as long as the median rank "
        f"of stage {longest.stage}"
    )


def _ideal(found: Pipeline) -> str:
    if found.ideal_ratio is None:
        return f"what is ideal is not known: {found.ideal_text}"
    if found.num_microbatches == 1 and found.num_chunks == 1:
        ideal = percent_text(found.ideal_ratio)
        return f"{ideal} because one works after the other with 1 microbatch"
    stages = plural(found.num_stages, "stage")
    if found.num_chunks > 1:
        stages = f"{found.num_ranks} ranks with {plural(found.num_chunks, 'stage')} each"
    count = found.num_microbatches or 0
    microbatches = f"{count:,} microbatch" + ("" if count == 1 else "es")
    return f"{percent_text(found.ideal_ratio)} is the ideal of {stages} and {microbatches}"
