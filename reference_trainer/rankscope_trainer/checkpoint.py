"""Checkpoints that are whole or absent, and from which a run goes on exactly.

    checkpoints/attempts.jsonl            one line for each start of the run
    checkpoints/step-00000050/            appears at once, under this name, when all of it is there
        checkpoint.json                   step, position in the data, and what the run looked like
        rank-0.pt  rank-1.pt  ...         weights, optimizer and random numbers of each rank

Every rank writes its own file into `step-00000050.tmp`; when all have, rank 0 renames the folder.
Replicas hold equal weights, so only rank 0 writes them; pipeline stages write one part each; a
strategy that cuts single tensors apart lets all ranks write one `sharded/` together. Another number
of ranks reads other parts of `sharded/`, or cuts the parts of all stages anew. The folder must be
one that all ranks see.

An elastic run may go on with another number of ranks. Kept then: weights, optimizer, step, and
the position in the data, so that exactly those windows come next that would have come without the
change. Steps after the checkpoint are trained again, hence no step twice that is further back
than `checkpoint_every`. Not kept: the random numbers of dropout, which belong to ranks; each rank
begins new ones, that depend on the seed, the rank and the step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankscope_trainer.checkpoint_folder import best, finished
from rankscope_trainer.errors import SettingError
from rankscope_trainer.strategies.strategy import Strategy
from rankscope_trainer.world import World

# 1 counted the position in batches of a rank, 2 knew no early stopping, 3 no loss and no names
FORMAT = 4
SHARDED = "sharded"  # folder of what the ranks write together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training has come."""

    step: int
    position: int  # windows that all ranks together have drawn
    best_validation: float | None = None  # of early stopping, as the next
    validations_in_vain: int = 0
    loss: float | None = None  # over all ranks, where one is measured for the checkpoint


class Checkpoints:
    """The checkpoints of one run in one folder."""

    def __init__(
        self,
        folder: str,
        *,
        keep: int,
        keep_best: bool = False,
        world: World,
        shape: dict[str, Any],
        is_elastic: bool = False,
    ) -> None:
        """Name the folder; `shape` is what a checkpoint must agree on to be resumed.

        The `keep` newest ones are kept, and with `keep_best` that with the least loss.
        Where `is_elastic`, the number of ranks need not be the same.
        """
        self._folder = Path(folder)
        self._keep = keep
        self._keep_best = keep_best
        self._world = world
        self._shape = {"world_size": world.world_size, **shape}
        self._is_elastic = is_elastic

    def save(
        self,
        progress: Progress,
        strategy: Strategy,
        *,
        has_weights: bool,
    ) -> None:
        """Write one checkpoint; all ranks call this after the same step."""
        final = self._folder / f"step-{progress.step:08d}"
        unfinished = final.with_suffix(".tmp")
        unfinished.mkdir(parents=True, exist_ok=True)
        random = _random_state(self._world.device)
        part: dict[str, Any] = {"random": random, "strategy": strategy.state()}
        if strategy.is_sharded:
            strategy.save(unfinished / SHARDED)
        elif has_weights:
            part["model"] = strategy.model.state_dict()
            part["optimizer"] = strategy.optimizer.state_dict()
            part["parameters"] = [name for name, _ in strategy.model.named_parameters()]
        _write(unfinished / f"rank-{self._world.rank}.pt", part)
        dist.barrier()  # every part is written
        if self._world.rank == 0:
            document = {"format": FORMAT, **dataclasses.asdict(progress), "shape": self._shape}
            (unfinished / "checkpoint.json").write_text(json.dumps(document, indent=1))
            if final.exists():
                shutil.rmtree(final)  # an older run, not resumed, came as far
            unfinished.rename(final)
            _flush_folder(self._folder)
            spared = best(self._folder) if self._keep_best else None
            for old in finished(self._folder)[: -self._keep]:
                if old != spared:
                    _remove(old)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint, 0 without any: as rank 0 sees it, for all."""
        checkpoints = finished(self._folder)
        return self._agree_on(checkpoints[-1] if checkpoints else None)

    def best_step(self) -> int:
        """Return the step with the least loss, 0 without any, and remove those after it.

        Else the newest one would be of a run that was given up.
        """
        path = best(self._folder)
        for later in finished(self._folder) if path is not None and not self._world.rank else ():
            if path is not None and later.name > path.name:
                _remove(later)
        return self._agree_on(path)

    def _agree_on(self, checkpoint: Path | None) -> int:
        step = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))
        agreed = torch.tensor(step, device=self._world.device)
        dist.broadcast(agreed, src=0)
        return int(agreed.item())

    def load(self, step: int, strategy: Strategy, *, part: int) -> Progress:
        """Put weights and optimizer (of rank `part`) and random numbers back as they were."""
        folder = self._folder / f"step-{step:08d}"
        document = json.loads((folder / "checkpoint.json").read_text())
        self._check(folder, document, strategy)
        rank, ranks_then = self._world.rank, document["shape"]["world_size"]
        is_recut = strategy.can_recut and ranks_then != self._world.world_size
        part = 0 if is_recut else part
        weights = self._read(folder, part)
        if strategy.is_sharded:
            strategy.load(folder / SHARDED)
        elif is_recut:
            strategy.recut([self._read(folder, each) for each in range(ranks_then)])
        else:
            strategy.model.load_state_dict(weights["model"])
            strategy.optimizer.load_state_dict(weights["optimizer"])
        # A rank that is new in the run takes over from the one whose weights it takes.
        own_part = rank if rank < ranks_then else part
        own = weights if own_part == part else self._read(folder, own_part)
        if not is_recut:
            strategy.load_state(own["strategy"])
        if ranks_then == self._world.world_size:
            _restore_random_state(own["random"], self._world.device)
        else:
            torch.manual_seed(hash((self._shape.get("seed", 0), rank, step)))
        return Progress(
            **{field.name: document[field.name] for field in dataclasses.fields(Progress)}
        )

    def begin_attempt(self, **facts: int) -> int:
        """Append a line about this start of the run; return how many there were before it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "attempts.jsonl").open("a+") as file:
            file.seek(0)
            before = sum(1 for _ in file)
            file.write(json.dumps({"attempt": before, **facts}) + "\n")
        return before

    def remove_unfinished(self) -> None:
        """Remove what an interrupted run left behind; nothing resumes from it."""
        for path in self._folder.glob("step-*.tmp"):
            shutil.rmtree(path)

    def _read(self, folder: Path, rank: int) -> dict[str, Any]:
        path = folder / f"rank-{rank}.pt"
        part: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return part

    def _check(self, folder: Path, document: dict[str, Any], strategy: Strategy) -> None:
        """Refuse a checkpoint of a run that was not like this one."""
        written = {"format": document["format"], **document["shape"]}
        may_differ = {"world_size"} if self._is_elastic else set()
        if strategy.can_recut and written["world_size"] != self._shape["world_size"]:
            may_differ |= strategy.checkpoint_shape().keys()  # which rank holds what
        for name, value in {"format": FORMAT, **self._shape}.items():
            if name in may_differ:
                continue
            if written.get(name) != value:
                problem = f"{folder} was written with {name} = {written.get(name)!r}, not {value!r}"
                if name == "world_size":
                    problem += f", and {self._shape['strategy']} holds what belongs to each rank"
                remedy = "Choose the same, another folder, or --no-resume"
                raise SettingError("checkpoint_dir", problem, remedy)


def _write(path: Path, part: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(part, file)
        file.flush()
        os.fsync(file.fileno())  # or a power failure could leave a complete name on lost content


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint that is whole: half removed it is not one any more."""
    leaving = checkpoint.with_suffix(".tmp")
    checkpoint.rename(leaving)
    shutil.rmtree(leaving)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
