"""How much of a slowdown some operations hold.

S_t, S_w, M_W and M_S of ByteDance's straggler analysis (OSDI 2025, arXiv 2505.05713).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rankscope_server.replay.replay import Replay

Mask = NDArray[np.bool_]


def slowdown_of(replay: Replay, nodes: Mask) -> float:
    """Return the mean step over the ideal one where only these nodes keep their durations."""
    return _step_ms(replay, ~nodes) / _ideal_ms(replay)


def share_of(replay: Replay, nodes: Mask) -> float:
    """Return which share of the slowdown is gone where these nodes are ideal."""
    now = replay.mean_step_ms()
    return (now - _step_ms(replay, nodes)) / (now - _ideal_ms(replay))


def of_kind(replay: Replay, kind: str) -> Mask:
    """Return which nodes are of a kind."""
    found: Mask = replay.kind == replay.kinds.index(kind)
    return found


def of_last_stage(replay: Replay) -> Mask:
    """Return which nodes are self time of the last stage."""
    return replay.of_ranks(np.flatnonzero(replay.stage == replay.stage.max()).tolist())


def _step_ms(replay: Replay, ideal: Mask) -> float:
    return replay.mean_step_ms(np.where(ideal[:, None], replay.ideal(), replay.recorded))


def _ideal_ms(replay: Replay) -> float:
    return replay.mean_step_ms() / replay.slowdown()
