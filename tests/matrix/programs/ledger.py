"""What a program of the matrix did, in its own words: the record must say the same.

Every entry is computed from the program's own tensors and from what torch documents or its source
says; nothing here reads what the agent wrote, and nothing imports the agent.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

P2P = ("send", "recv", "recv_any_source")
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


class Ledger:
    """The calls of one rank, family by family, written to a file as they are done."""

    def __init__(self, path: Path, rank: int, size: int, scratch: Path) -> None:
        self.rank, self.size, self.scratch = rank, size, scratch
        self._file = path.open("w", encoding="utf-8")
        self._family = ""
        self._worlds = 0
        self._sequences: dict[tuple[Any, ...], count[int]] = {}

    def begin_world(self) -> None:
        """Make the default group, over a store of its own: torch hangs on a used one."""
        self._worlds += 1
        path = self.scratch / f"store-{self._worlds}"
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(path), self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=60),
        )

    def family(self, name: str) -> None:
        """Begin a family of paths; the agent's records from now on belong to it."""
        self._family = name
        self._write({"family": name, "begin_ns": time.monotonic_ns()})

    def family_ended(self, **outcome: str) -> None:
        """End it; `outcome` holds `skipped` or `error` with the reason."""
        self._write({"family": self._family, "end_ns": time.monotonic_ns(), **outcome})

    def did(
        self,
        operation: str,
        inputs: Iterable[torch.Tensor] = (),
        outputs: Iterable[torch.Tensor] = (),
        *,
        group: Any = None,
        reduce: str = "",
        peer: int = -1,
        waited: str = "python",
        is_async: bool | None = None,
        state: str = "ended",
        from_callback: bool = False,
    ) -> None:
        """Note one operation of this rank.

        `inputs` is what this rank hands in, `outputs` what receives the result here; `peer` is
        the root or peer as a global rank; `waited` says who waited for it: python, c++,
        inside (C++ below all operators) or nobody;
        `from_callback`: a thread of the backend called, in which no line of the program stands.
        """
        group = dist.group.WORLD if group is None else group
        inputs, outputs = list(inputs), list(outputs)
        label = str(group.group_name)
        if self._worlds > 1:
            label += f"#{self._worlds}"
        p2p = operation in P2P
        key = (label, operation, peer) if p2p else (label,)
        sequence = next(self._sequences.setdefault(key, count(1)))
        tensors = [*inputs, *outputs]
        self._write(
            {
                "operation": operation,
                "group": label,
                "members": dist.get_process_group_ranks(group),
                "sequence": sequence,
                "input_bytes": sum(tensor.nbytes for tensor in inputs),
                "output_bytes": sum(tensor.nbytes for tensor in outputs),
                "num_tensors": max(len(inputs), len(outputs)),
                "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "other",
                "reduce_op": reduce,
                "peer_rank": peer,
                "is_p2p": p2p,
                "is_async": is_async,
                "state": state,
                "waited": waited,
                "from_callback": from_callback,
            }
        )

    def sent(self, tensor: torch.Tensor, peer: int, **more: Any) -> None:
        """Note a send."""
        self.did("send", [tensor], peer=peer, **more)

    def received(self, tensor: torch.Tensor, peer: int, **more: Any) -> None:
        """Note a recv; without a known peer -1."""
        operation = "recv" if peer >= 0 else "recv_any_source"
        self.did(operation, [], [tensor], peer=peer, **more)

    def attempt(
        self,
        call: Callable[[], Any],
        operation: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        **more: Any,
    ) -> bool:
        """Do what not every version of the backend can; note whether the program saw an error."""
        try:
            call()
        except RuntimeError:
            self.did(operation, inputs, outputs, state="failed", **more)
            return False
        self.did(operation, inputs, outputs, **more)
        return True

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def zeros(num_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return a tensor without storage that stands for one of so many bytes."""
    return torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device="meta")


@contextlib.contextmanager
def quiet() -> Any:
    """Silence torch's deprecation warnings for calls that are old on purpose."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
