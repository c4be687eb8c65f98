"""Which samples ranks draw, and in which order: the same on all ranks, the same in each epoch.

Ranks that share the layers or the sequence of one model should see the same samples: only those
are compared that DistributedDataParallel keeps as replicas. That batches are the same rests on
their checksums; that nothing but the batch is the same on losses and gradients before reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding, Severity, ran, skipped
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.text import percent_text
from rankscope_server.observe.data_passes import DataPass

Sameness: TypeAlias = Literal["same", "other", "unknown"]
_KNOWN_SAMPLER = "DistributedSampler"
_GIVE_ONE = (
    "Give the loader `sampler=DistributedSampler(dataset)` in place of `shuffle=True`, and call "
    "its `set_epoch(epoch)` at each epoch; Accelerate, Lightning and the Hugging Face Trainer do "
    "both where they prepare the loader"
)
_MEND_IT = (
    "See which `num_replicas` and `rank` the sampler is given: they are those of the job, not of "
    "one process"
)


@dataclass(frozen=True, slots=True)
class SharedData:
    """Ranks that should each draw their own samples and draw the same; what else is the same."""

    ranks: tuple[int, ...]
    loader: int | None  # None: known by losses and gradients alone
    batches: int
    sampler: str
    losses: Sameness
    gradients: Sameness
    is_all_data: bool  # the job's, not one loader of several


class Sampling:
    """Finds replicas that train on the same samples, and epochs in the same order."""

    name: ClassVar[str] = "sampling"
    finds: ClassVar[str] = (
        "Replicas that train on the same samples; samplers whose epoch is never set"
    )
    needs: ClassVar[str] = (
        "a `DataLoader` of torch and DistributedDataParallel; of other batches losses and "
        "gradients before the reduction"
    )
    silent: ClassVar[str] = (
        "batches of zeros, or one batch for ever; ranks that are no replicas; a pass that began "
        "again within four steps"
    )

    def look(self, window: Window) -> DetectorResult:
        """Return what is wrong with the samples that ranks draw."""
        shared = shared_data_of(window)
        orders = list(_same_orders(window))
        passes = window.facts.passes.by_loader
        has_norms = bool(window.facts.numbers.steps("gradient_norm_local"))
        if not passes and not has_norms:
            return skipped(
                self, "no first batches of a data loader and no gradients before reduction are "
                "known", "train with a DataLoader of torch, under DistributedDataParallel",
            )  # fmt: skip
        found = [_same_samples(window, one) for one in shared]
        checked = () if found else ("samples: not the same on all ranks, as far as was seen",)
        return ran(self, [*found, *orders], checked)


def shared_data_of(window: Window) -> list[SharedData]:
    """Return the ranks that draw the same samples, by loader; by their gradients if by none."""
    loaders = window.facts.passes.by_loader
    found: list[SharedData] = []
    num_other = 0  # loaders whose batches are known and differ between ranks
    for loader, numbers in loaders.items():
        whole = [one for ranks in numbers.values() for one in _whole_groups(ranks)]
        alike = [len({one.batches for one in group.values()}) == 1 for group in whole]
        if not whole:
            continue
        if not all(alike):
            num_other += 1
            continue
        ranks = tuple(sorted(whole[0]))
        first = whole[0][ranks[0]]
        found.append(
            SharedData(
                ranks, loader, sum(len(next(iter(group.values())).batches) for group in whole),
                first.sampler, *_rest_of(window, ranks), is_all_data=True,
            )
        )  # fmt: skip
    if found and num_other:
        return [_one_of_several(one) for one in found]
    return found or ([] if num_other else _by_gradients(window))


def _whole_groups(ranks: Mapping[int, DataPass]) -> Iterator[dict[int, DataPass]]:
    """Yield the replicas of one pass whose batches are all known, and not all one and the same."""
    groups: dict[str, dict[int, DataPass]] = {}
    for rank, one in ranks.items():
        if one.group_size > 1 and one.is_distinct:
            groups.setdefault(one.group, {})[rank] = one
    for group in groups.values():
        if len(group) == next(iter(group.values())).group_size:
            yield group


def _one_of_several(shared: SharedData) -> SharedData:
    return SharedData(
        shared.ranks, shared.loader, shared.batches, shared.sampler, shared.losses,
        shared.gradients, is_all_data=False,
    )  # fmt: skip


def _rest_of(window: Window, ranks: Sequence[int]) -> tuple[Sameness, Sameness]:
    policy = window.policy
    return (
        sameness(window, "loss", ranks, policy.same_loss_steps),
        sameness(window, "gradient_norm_local", ranks, policy.same_norm_steps),
    )


def _by_gradients(window: Window) -> list[SharedData]:
    """Return all ranks of the job where their losses and own gradients are the same."""
    ranks = tuple(range(window.world_size))
    if len(ranks) < 2 or _rest_of(window, ranks) != ("same", "same"):
        return []
    return [SharedData(ranks, None, 0, "", "same", "same", is_all_data=True)]


def sameness(window: Window, name: str, ranks: Sequence[int], least: int) -> Sameness:
    """Return whether a number is the same to the last bit on ranks, in `least` steps or more."""
    numbers = window.facts.numbers
    if not set(ranks) <= set(numbers.row_of):
        return "unknown"
    rows = [numbers.row_of[rank] for rank in ranks]
    steps = sorted({*numbers.head(name), *numbers.steps(name)})
    values = numbers.matrix(name, steps)[rows]
    values = values[:, ~np.isnan(values).any(axis=0)]
    if values.shape[1] < least:
        return "unknown"
    if (values != values[0]).any():
        return "other"
    # what never changes says nothing of the samples
    return "same" if len(np.unique(values[0])) >= least and (values != 0).all() else "unknown"


def _same_samples(window: Window, shared: SharedData) -> Finding:
    size = len(shared.ranks)
    cost = 1 - 1 / size if shared.is_all_data else None
    is_sure = "same" in (shared.losses, shared.gradients)
    is_meant = not is_sure and "other" in (shared.losses, shared.gradients)
    severity: Severity = severity_of_cost(cost or 0.0, window.policy)
    if is_meant:
        severity, cost = "info", None
    elif not shared.is_all_data:
        severity = "warning"
    is_whole = size == window.world_size
    who = f"{size} replicas" if not is_whole else "Both ranks" if size == 2 else f"All {size} ranks"
    facts = []
    if shared.loader is not None:
        facts.append(f"the first batches of their loader are the same ({shared.batches} compared)")
    facts += [
        f"{name} the same to the last bit in every step that was compared"
        for name, word in (("their losses are", shared.losses),
                           ("their gradients before reduction are", shared.gradients))
        if word == "same"
    ]  # fmt: skip
    why = "; ".join(facts) + (
        "; their losses or gradients differ, as with dropout of their own, or with parts of a "
        "sequence" if is_meant else ""
    )  # fmt: skip
    saved = "" if cost is None else f": {percent_text(cost)} of their work adds nothing"
    return window.finding(
        "same_samples",
        "samples" if shared.loader is None else f"samples {shared.loader}",
        severity=severity,
        onset_step=1 if window.time_ms(1) is not None else None,
        cost=cost,
        what=f"{who} train on the same samples{saved}",
        why=why[0].upper() + why[1:],
        next=_MEND_IT if shared.sampler == _KNOWN_SAMPLER else _GIVE_ONE,
        confidence=(
            (0.95 if shared.loader is not None else 0.9) if is_sure else 0.5 if is_meant else 0.85,
            "samples, losses and gradients say the same" if is_sure and shared.loader is not None
            else "losses and gradients say the same" if is_sure
            else "losses differ" if is_meant else "losses are not known",
        ),
        evidence=(f"Sampler: {shared.sampler}",) * bool(shared.sampler),
        ruled_out=("Ranks that share layers of one model: they are replicas, as "
                   "DistributedDataParallel keeps them",),
        disproof="The ranks are meant to see the same samples, as where they share each sequence",
    )  # fmt: skip


def _same_orders(window: Window) -> Iterator[Finding]:
    """Yield a finding for each loader whose sampler began its newest passes in the same epoch."""
    for loader, numbers in window.facts.passes.by_loader.items():
        first: tuple[int, DataPass, DataPass] | None = None
        for number in sorted(numbers, reverse=True):
            now, before = numbers[number], numbers.get(number - 1, {})
            pairs = [(before[rank], now[rank]) for rank in sorted(set(now) & set(before))]
            if not pairs or not all(_is_repeated(*pair, window) for pair in pairs):
                break
            first = number, *pairs[0]
        if first is not None:
            yield _same_order(window, loader, *first)


def _is_repeated(first: DataPass, later: DataPass, window: Window) -> bool:
    if not (later.shuffles and later.epoch and later.epoch == first.epoch):
        return False
    if later.step - first.step < window.policy.pass_min_steps:
        return False
    if later.sampler == _KNOWN_SAMPLER:  # it shuffles by seed and epoch alone
        return True
    return later.is_distinct and later.batches == first.batches


def _same_order(
    window: Window, loader: int, number: int, first: DataPass, later: DataPass
) -> Finding:
    epoch = later.epoch.partition(" ")[0]
    is_seen = later.is_distinct and later.batches == first.batches
    return window.finding(
        "same_order",
        f"order {loader}",
        onset_step=later.step,
        what=f"Every epoch has its samples in the same order: the sampler is still in epoch "
        f"{epoch} in pass {number} over the data",
        why=f"{later.sampler} shuffles by its seed and its epoch, and `set_epoch` was not called "
        f"between two passes" + ("; their first batches are the same" if is_seen else ""),
        next="Call `loader.sampler.set_epoch(epoch)` before each loop over the loader",
        confidence=(
            0.95 if is_seen else 0.9,
            "the batches repeat, too" if is_seen else "the sampler's own epoch",
        ),
        evidence=(f"Pass {number} began in step {later.step:,}, the one before in step "
                  f"{first.step:,}, both in epoch {epoch}",),
        disproof="The order is meant to be the same in each epoch, as to compare runs",
    )  # fmt: skip
