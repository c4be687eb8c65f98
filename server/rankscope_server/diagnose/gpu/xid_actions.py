"""What an Xid asks for. Words of the codes: `rankscope.wire.nvidia_codes`.

Sources: NVIDIA, "Xid Errors" and its catalogue for Ampere and newer
(docs.nvidia.com/deploy/xid-errors), which give each code an immediate action. Ours are coarser:
where the catalogue asks for a workflow, the first step of it. A code that is not here is unknown.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Action: TypeAlias = Literal["ignore", "restart", "reset", "drain", "vendor", "unknown"]

_CODES: dict[Action, frozenset[int]] = {
    # corrected by the chip, or the trace of an ordinary end
    "ignore": frozenset({45, 121}),
    # the program asked for something that is not there; also contained errors: it alone dies
    "restart": frozenset({8, 11, 13, 31, 32, 43, 68, 69, 94}),
    # works again, or keeps its data right, only after a reset
    "reset": frozenset({38, 46, 48, 61, 62, 63, 92, 95, 109, 110, 119, 120, 136, 140, 143, 154,
                        158}),
    # parts or links that fail again: others should not run there
    "drain": frozenset({57, 64, 74, 79, 144, 145, 146, 147, 148, 149, 155}),
    "vendor": frozenset({56}),
}  # fmt: skip
ECHOES = frozenset({43, 45})  # channels that end because of another error
WORDS: dict[Action, str] = {
    "ignore": "nothing to do",
    "restart": "restart the program; if it returns with another program, test the GPU",
    "reset": "stop the job on this GPU and reset it (nvidia-smi --gpu-reset), then test it",
    "drain": "drain the node and test the GPU before it takes another job",
    "vendor": "report it to the vendor",
    "unknown": "look the code up in NVIDIA's Xid catalogue",
}


def action_of(code: int) -> Action:
    """Return what to do about an Xid."""
    return next((action for action, codes in _CODES.items() if code in codes), "unknown")
