"""What the server asks of a rank, and what became of it: two files in the rank's directory.

The collector writes `requests`, the rank `answers`; both are replaced whole.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rankscope.wire.schema import Command

REQUESTS = "requests"
ANSWERS = "answers"
MAX_BYTES = 1 << 20  # of either file


class RankAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one command in this rank."""

    state: Literal["running", "done", "refused"]
    reason: str = ""
    file: str = ""  # of a trace, within the rank's directory


class Answers(msgspec.Struct, omit_defaults=True):
    """The file `answers`."""

    is_recording: bool = True
    answers: dict[int, RankAnswer] = {}


decode_requests = msgspec.json.Decoder(list[Command]).decode
decode_answers = msgspec.json.Decoder(Answers).decode
encode = msgspec.json.Encoder().encode
