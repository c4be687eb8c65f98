"""The colours that the map of ranks by steps is drawn in."""

from __future__ import annotations

from typing import Any

# Each lane's middle row of pixels, as the canvas holds it.
READ_LANES = """() => {
  const canvas = document.querySelector('.plotregion canvas');
  const box = canvas.getBoundingClientRect();
  const ratio = canvas.width / box.width;
  // A copy: reading the page's own canvas often would make the browser complain.
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const context = copy.getContext('2d', {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  return [...document.querySelectorAll('.gutter .lanename')]
    .filter((name) => /^Rank \\d+$/.test(name.querySelector('a')?.textContent ?? ''))
    .map((name) => {
      const area = name.getBoundingClientRect();
      const y = Math.round((area.top + area.height / 2 - box.top) * ratio);
      const pixels = context.getImageData(0, y, canvas.width, 1).data;
      return {rank: Number(name.querySelector('a').textContent.slice(5)), pixels: [...pixels]};
    });
}"""


def lanes(page: Any) -> dict[int, list[tuple[int, int, int]]]:
    """Return the colours of each lane's middle row, from left to right."""
    found = page.evaluate(READ_LANES)
    assert found, "no lane is drawn"
    return {
        lane["rank"]: [tuple(lane["pixels"][i : i + 3]) for i in range(0, len(lane["pixels"]), 4)]
        for lane in found
    }


def neutral_of(all_lanes: dict[int, list[tuple[int, int, int]]]) -> tuple[int, int, int]:
    """Return the commonest colour: that of work within 8 % of the peers."""
    pixels = [pixel for lane in all_lanes.values() for pixel in lane]
    return max(set(pixels), key=pixels.count)
