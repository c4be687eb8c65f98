"""Prints in every way, also from C; its streams must stay what they are."""
# ruff: noqa: T201

import ctypes
import json
import logging
import os
import sys
import traceback
import warnings

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    rank = os.environ["RANK"]
    before = sys.stdout
    print(f"python {rank} says", "hello", flush=True)
    print("no line end", end="")
    print(" yet: Bearer abcdef0123")
    for percent in (0, 50, 100):
        sys.stderr.write(f"\r{percent}%|##")
    sys.stderr.write("\n")
    sys.stdout.writelines(["a\n", "b\n"])
    try:
        raise KeyError("inner")
    except KeyError:
        traceback.print_exc()
    logging.basicConfig(level=logging.INFO, format="FORMATTED %(message)s")
    logging.getLogger("app").info("logged", extra={"epoch": 3, "password": "hunter2"})
    warnings.warn("warned", stacklevel=1)
    facts = {
        "isatty": sys.stdout.isatty(), "fileno": sys.stdout.fileno(), "name": sys.stdout.name,
        "encoding": sys.stdout.encoding, "is_same": sys.stdout is before,
        "type": type(sys.stdout).__name__, "has_buffer": hasattr(sys.stdout, "buffer"),
        "line_buffering": sys.stdout.line_buffering,
    }  # fmt: skip
    print(json.dumps(facts), flush=True)
    libc = ctypes.CDLL(None)
    libc.puts(f"C {rank} says hello".encode())
    libc.fflush(None)
    if len(sys.argv) > 1:
        raise ValueError("the end")


main()
