"""Who is in the group: agreed on through a store that is no rank's, as ranks die, stop and come.

    epoch 1   ranks 0 1 2 3     step 1 ... 41   step 42: rank 2 dies, the others vote "abort"
    epoch 2   ranks 0 1   3     step 42 ... 60  a new rank 2 waits: "train, then regroup"
    epoch 3   ranks 0 1 2 3     step 61 ...

Two things are decided, each by one `compare_set` of the store, so that all ranks read the same,
whichever dies in between:

- **The members of an epoch.** Each candidate enters itself. Once all members of the epoch before
  are there or known to be gone, or one of them has waited long enough, any of them closes the list.
  Who came too late asks to be let in at the next boundary of a step, as a new process does.
- **What becomes of a step.** Each member votes when its gradients are reduced, before any weight
  changes. The last vote decides to train; one that failed, or waited too long for others, decides
  to abort. So a step is trained by all members or by none, and taking it back is to drop gradients.

That is the idea of torchft (https://github.com/meta-pytorch/torchft), whose quorum is kept by a
server of its own, with heartbeats; here the launcher says at once which of its processes ended.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # public

Decision: TypeAlias = Literal["train", "train, then regroup", "abort"]
_PAUSE_SECONDS = 0.02
_KEPT_STEPS = 2  # a slow reader is behind by less: it has voted for the step in between


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One process, and how far it is."""

    id: str  # of the process: never used again
    rank: int  # its place in the job, which another process may take later
    step: int  # the last one that it trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epoch:
    """Who trains together until the next change."""

    number: int
    members: tuple[Member, ...]  # in order of rank
    lost: dict[int, str]  # places that are vacant, and who had them
    requests: int = 0  # to be let in, that came before it

    @property
    def ids(self) -> set[str]:
        """The processes."""
        return {member.id for member in self.members}

    @property
    def ranks(self) -> list[int]:
        """The places, in the order of the group."""
        return [member.rank for member in self.members]

    @property
    def source(self) -> int:
        """Where in the group the first one is that is as far as any."""
        steps = [member.step for member in self.members]
        return steps.index(max(steps))

    @property
    def is_untrained(self) -> bool:
        """Whether none has trained a step, or taken one over: what there is, a checkpoint holds."""
        return not any(member.step for member in self.members)

    @property
    def is_level(self) -> bool:
        """Whether all are equally far, so that none needs the weights of another."""
        return len({member.step for member in self.members}) == 1

    def encode(self) -> str:
        """Return it as text for the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Epoch:
        """Read what `encode` wrote."""
        fields = json.loads(text)
        return cls(
            number=fields["number"],
            members=tuple(Member(**member) for member in fields["members"]),
            lost={int(rank): process for rank, process in fields["lost"].items()},
            requests=fields["requests"],
        )


class LeftOutError(RuntimeError):
    """The others train on without this process for good."""


class Places:
    """The places of a job, as one of its processes sees them."""

    def __init__(
        self,
        store: Store,
        process: str,
        *,
        num_places: int,
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience_seconds`: how long members wait for each other before they decide without."""
        self._store = store
        self.process = process
        self._num_places = num_places
        self._patience_seconds = patience_seconds
        self._clock = clock
        self.epoch = Epoch(number=0, members=(), lost={})  # the newest that is known

    # --- places --------------------------------------------------------------------------

    def take(self, rank: int) -> None:
        """Take the place that the launcher gave, before the first epoch. Raises LeftOutError."""
        owner = self._store.compare_set(f"owner/{rank}", "", self.process).decode()
        if owner != self.process:
            raise LeftOutError(f"another process has the place of rank {rank}")

    def take_vacant(self) -> int | None:
        """Take the first place that the newest epoch has lost; None without any."""
        self._catch_up()
        for rank, process in sorted(self.epoch.lost.items()):
            owner = self._store.compare_set(f"owner/{rank}", process, self.process).decode()
            if owner == self.process:
                return rank
        return None

    def is_gone(self, process: str) -> bool:
        """Return whether a process is known to have ended."""
        return bool(self._store.check([f"gone/{process}"]))

    @staticmethod
    def say_gone(store: Store, process: str) -> None:
        """Let all know that a process has ended: its launcher calls this."""
        store.set(f"gone/{process}", "")

    @property
    def is_over(self) -> bool:
        """Whether the members have trained the last step."""
        return bool(self._store.check(["over"]))

    def say_over(self) -> None:
        """Let those that wait for a place know that the last step is trained."""
        self._store.set("over", "")

    # --- epochs --------------------------------------------------------------------------

    def form(self, rank: int, step: int) -> Epoch | None:
        """Return the next epoch that this process is a member of; None if training is over.

        Raises LeftOutError where this process is to leave, or another has taken its place.
        """
        own = Member(id=self.process, rank=rank, step=step)
        self._catch_up()
        is_member = self.process in self.epoch.ids or not self.epoch.number
        while True:
            if self.is_gone(self.process):
                raise LeftOutError(f"rank {rank} is left out")
            if self._store.get(f"owner/{rank}").decode() != self.process:
                raise LeftOutError(f"another process has taken the place of rank {rank}")
            self._enter(own, self.epoch.number + 1, asks=not is_member)
            if not self._until_closed(is_member):
                return None
            if self.process in self.epoch.ids:
                return self.epoch
            is_member = False

    def _catch_up(self) -> bool:
        """Read the newest epoch; return whether it is newer than the one that was known."""
        before = self.epoch.number
        while self._store.check([key := f"epoch/{self.epoch.number + 1}"]):
            self.epoch = Epoch.decode(self._store.get(key))
        return self.epoch.number > before

    def _enter(self, own: Member, number: int, *, asks: bool) -> None:
        """Become a candidate, and only then ask the members to make room."""
        place = self._store.add(f"candidates/{number}", 1)
        self._store.set(f"candidate/{number}/{place}", json.dumps(dataclasses.asdict(own)))
        if asks:
            self._store.add("requests", 1)

    def _until_closed(self, is_member: bool) -> bool:
        """Wait for the next epoch, and close its list where that is due; False: it is over."""
        deadline = self._clock() + self._patience_seconds if is_member else float("inf")
        before = self.epoch
        expected = before.ids
        while not self._catch_up():
            if self.is_over and not is_member:
                return False
            requests = self._store.add("requests", 0)
            present = self._candidates(before.number + 1)
            missing = [i for i in expected - {one.id for one in present} if not self.is_gone(i)]
            if before.number == 0:
                missing += [""] * (self._num_places - len(present))
            is_due = not missing or self._clock() > deadline
            if present and is_due:
                self._close(before, present, requests)
            else:
                time.sleep(_PAUSE_SECONDS)
        return True

    def _candidates(self, number: int) -> list[Member]:
        """Return who has entered for an epoch and has the place that it wants."""
        keys = [
            f"candidate/{number}/{place}"
            for place in range(1, self._store.add(f"candidates/{number}", 0) + 1)
        ]
        entered = [
            Member(**json.loads(self._store.get(key))) for key in keys if self._store.check([key])
        ]
        return [
            one for one in {one.id: one for one in entered}.values()
            if self._store.get(f"owner/{one.rank}").decode() == one.id and not self.is_gone(one.id)
        ]  # fmt: skip

    def _close(self, before: Epoch, present: Iterable[Member], requests: int) -> None:
        members = tuple(sorted(present, key=lambda member: member.rank))
        lost = before.lost | {member.rank: member.id for member in before.members}
        taken = {member.rank for member in members}
        epoch = Epoch(
            number=before.number + 1,
            members=members,
            lost={rank: process for rank, process in lost.items() if rank not in taken},
            requests=requests,
        )
        self._store.compare_set(f"epoch/{epoch.number}", "", epoch.encode())

    # --- steps ---------------------------------------------------------------------------

    def vote(self, step: int) -> Decision:
        """Say that this process could take its update of a step; return what all do."""
        number = self.epoch.number
        key = f"decision/{number}/{step}"
        if self._store.add(f"votes/{number}/{step}", 1) == len(self.epoch.members):
            is_asked = self._store.add("requests", 0) > self.epoch.requests
            self._decide(key, "train, then regroup" if is_asked else "train")
            for name in ("votes", "decision"):
                self._store.delete_key(f"{name}/{number}/{step - _KEPT_STEPS}")
        try:
            self._store.wait([key], datetime.timedelta(seconds=self._patience_seconds))
        except DistStoreError:
            self._decide(key, "abort")
        decision: Decision = self._store.get(key).decode()  # type: ignore[assignment]
        return decision

    def abort(self, step: int) -> bool:
        """Say that a step failed here; return whether all take it back, as they had not decided."""
        number = self.epoch.number
        self._store.set(f"broken/{number}", "")
        return self._decide(f"decision/{number}/{step}", "abort") == "abort"

    def is_broken(self, number: int) -> bool:
        """Return whether a member of an epoch has given it up."""
        return bool(self._store.check([f"broken/{number}"]))

    def leave_out(self, rank: int) -> None:
        """Have the members meet again after the step in progress, without one of them."""
        for member in self.epoch.members:
            if member.rank == rank:
                self.say_gone(self._store, member.id)
        self._store.add("requests", 1)

    def _decide(self, key: str, decision: Decision) -> str:
        return self._store.compare_set(key, "", decision).decode()
