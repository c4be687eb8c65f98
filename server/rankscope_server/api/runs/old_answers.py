"""A first sentence that rests on old data: where this server is behind, health is not known.

What a look of the analysis says stands until the next one. Where that does not come, as ranks send
more than is taken, or the analysis does not work, "Healthy" is of then and not of now.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from rankscope_server.alerts.evaluate import STALE_SECONDS
from rankscope_server.api.runs.schema import ShortAnswer
from rankscope_server.store.deletion import OVER

_Answer = TypeVar("_Answer", bound=ShortAnswer)


def as_of_now(answer: _Answer, status: str, behind_seconds: float) -> _Answer:
    """Return an answer about a run of that status as this server can give it now."""
    is_old = behind_seconds > STALE_SECONDS and status not in OVER
    if not is_old or answer.state not in ("healthy", "advice"):
        return answer
    text = f"No verdict: Rankscope is behind by {behind_seconds:.0f} s; before: {answer.text}"
    return msgspec.structs.replace(answer, state="unknown", text=text)
