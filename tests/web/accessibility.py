"""What a page violates of the rules of accessibility."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

AXE = Path(__file__).parent / "vendor" / "axe.min.js"


# In pixels: a telephone, a small and a usual window, a large screen.
WIDTHS = (420, 720, 1440, 2560)
EVERY_WIDTH = (420, 720, 1024, 1280, 1440, 1920, 2560)  # 720: 1440 at 200 % zoom
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
    """Return by how much the page is wider than a window of this width."""
    page.set_viewport_size({"width": width, "height": 900})
    # two frames: what observes its size is drawn anew in the first one
    return int(
        page.evaluate(
            """new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() =>
              setTimeout(() => done(document.documentElement.scrollWidth - innerWidth)))))"""
        )
    )


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
