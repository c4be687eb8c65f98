"""What numbers of the NVIDIA driver mean: reasons for lower clocks, and Xid errors.

Sources: the constants `nvmlClocksEventReason*` of NVML, and NVIDIA's "Xid Errors" document. The
words are ours, short; a number that is not here is shown as the number.
"""

from __future__ import annotations

# bit -> words
THROTTLE_WORDS: dict[int, str] = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap (software)",
    0x008: "slowdown (hardware)",
    0x010: "sync boost",
    0x020: "thermal slowdown (software)",
    0x040: "thermal slowdown (hardware)",
    0x080: "power brake (hardware)",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability limit",
}
# what takes speed from a GPU that has work; idle and chosen clocks do not
THROTTLE_SLOWDOWNS = 0x004 | 0x008 | 0x020 | 0x040 | 0x080 | 0x200 | 0x400

XID_WORDS: dict[int, str] = {
    8: "GPU stopped processing",
    13: "graphics engine exception: mostly a fault of the program",
    31: "GPU memory page fault: mostly an illegal address of the program",
    32: "invalid or corrupted push buffer stream",
    38: "driver firmware error",
    43: "GPU stopped processing: a fault of the program",
    45: "channels removed before their end, mostly after another error or a kill",
    46: "GPU stopped processing",
    48: "uncorrectable (double bit) ECC error",
    56: "display engine error",
    57: "error programming the video memory interface",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "page retirement or row remapping recorded",
    64: "page retirement or row remapping failed",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single bit ECC errors",
    94: "contained ECC error: the program that used it dies",
    95: "uncontained ECC error: reset the GPU",
    109: "context switch timeout",
    110: "security fault",
    119: "GPU system processor does not answer",
    120: "GPU system processor error",
    121: "corrected error of the chip-to-chip link",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialisation error",
    144: "NVLink error (SAW_MVB)",
    145: "NVLink error (RLW)",
    149: "NVLink error (NETIR)",
    154: "the GPU needs a recovery action",
    155: "NVLink error (software defined)",
    158: "GPU fatal timeout",
}


def throttle_words(reasons: int) -> list[str]:
    """Return the reasons of a bit mask in words; bits without a word as a number."""
    words = [word for bit, word in THROTTLE_WORDS.items() if reasons & bit]
    rest = reasons & ~sum(THROTTLE_WORDS)
    return [*words, f"{rest:#x}"] if rest else words


def xid_words(number: int) -> str:
    """Return what an Xid means, an empty string for one that is not in the table."""
    return XID_WORDS.get(number, "")
