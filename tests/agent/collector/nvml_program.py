"""Runs the sources that ask NVML, in a process of its own: prints what they sample and tell."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rankscope.node.sources import SOURCES
from rankscope.node.sources.base import News, RankProcess, Skipped
from rankscope.node.sources.machine import Machine


def main() -> None:
    told: list[News] = []
    machine = Machine(
        report=told.append, ranks=lambda: (RankProcess(0, 5, int(os.environ["FAKE_NVML_PID"])),)
    )
    found: dict[str, Any] = {}
    for make in SOURCES:
        if make.lane != "driver":
            continue
        source = make(machine)
        try:
            source.open()
            rows = [list(source.sample()) for _ in range(3)]
        except Skipped as error:
            found[make.name] = f"skipped: {error}"
        else:
            found[make.name] = rows[-1]
    found["news"] = [[news.name, news.rank, news.fields] for news in told]
    found["index"] = machine.nvml.index_of("0000:2b:00")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
