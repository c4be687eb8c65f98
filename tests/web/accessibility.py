"""What a page violates of the rules of accessibility."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
_LAID_OUT_S = 5.0  # on a busy machine


RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


def violations(page: Any) -> list[str]:
    if not page.evaluate("Boolean(window.axe)"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(
        "rules => axe.run(document, {runOnly: rules}).then(result => result.violations)", RULES
    )
    return [
        f"{one['id']}: {node['html'][:160]} ({node['failureSummary'][:300]})"
        for one in found
        for node in one["nodes"][:3]
    ]


def too_wide_px(page: Any, width: int) -> int:
    """Return by how much the page stays wider than a window of this width, laid out in frames."""
    page.set_viewport_size({"width": width, "height": 900})
    deadline = time.monotonic() + _LAID_OUT_S
    while (over := page.evaluate("document.documentElement.scrollWidth - innerWidth")) > 0:
        if time.monotonic() > deadline:
            break
        page.wait_for_timeout(50)
    return int(over)


def check_width(page: Any, width: int) -> None:
    """Fail where the page is wider than a window of this width."""
    over = too_wide_px(page, width)
    assert over <= 0, f"{over} px too wide at {width}"


def check_sizes_and_themes(page: Any, widths: Sequence[int]) -> None:
    """Fail where the page is wider than a window, or not accessible in one of the themes."""
    for width in widths:
        check_width(page, width)
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        assert violations(page) == []
