"""What a rank says of its Flight Recorder to the collector of its node, in one small file."""

from __future__ import annotations

import msgspec

OF_NCCL = "dump_nccl_trace_json"  # handlers of torch's control server
OF_OTHERS = "fr_trace_json"
MODES = ("auto", "on", "off")


class FlightSetup(msgspec.Struct):
    """Which questions may be asked at the socket beside it, and when."""

    handlers: list[str] = []  # for an incident
    polled: list[str] = []  # those that may be asked all the time
    is_timed: bool = False  # entries will carry a duration, a little after they are completed
    endless: list[str] = []  # groups of which no other source tells an end


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(FlightSetup).decode


def check_mode(wanted: str) -> None:
    """Raise ValueError if the setting is none of MODES."""
    if wanted not in MODES:
        raise ValueError(f"RANKSCOPE_FLIGHT_RECORDER={wanted!r}: there are: {', '.join(MODES)}")
