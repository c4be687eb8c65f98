"""Floods its log, says odd things, and fails where nobody can catch it."""

# ruff: noqa: PLE1206, T201

import gc
import logging
import sys

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
logger = logging.getLogger("app")


class Unspeakable:
    def __str__(self):
        raise LookupError("cannot be said")


class Dies:
    def __del__(self):
        raise OSError("in a finalizer")


logging.raiseExceptions = False
for _ in range(5):
    logger.info("not formatted %s", Unspeakable())
    logger.info("too few %s %s", 1)
for number in range(13_345):
    logger.info("flood %d", number)
logger.error("an error in the flood, password=hunter2")
logger.info("fields", extra={"epoch": 3, "tags": ["a", {"b": 2}], "tensor": object(), "token": "x"})
print("x" * 300_000)
Dies()
gc.collect()
