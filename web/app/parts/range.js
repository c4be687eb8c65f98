/** Which rows of a long list are in view. Pure. */

const EXTRA = 6; // rows beyond the edge, so that a fast wheel shows no blank
const MAX_PIXELS = 15_000_000; // browsers lose precision above; then the scroll range is scaled

/** Which rows to draw. Pure. @param {{scrollTop: number, viewport: number, count: number, row: number}} view */
export function visibleRange({ scrollTop, viewport, count, row }) {
  const full = count * row;
  const height = Math.min(full, MAX_PIXELS);
  // Where the range is scaled, the scrollbar's share of its way decides which rows are in view.
  const room = height - viewport;
  const offset = full > height && room > 0 ? (scrollTop / room) * (full - viewport) : scrollTop;
  const first = Math.max(0, Math.floor(offset / row) - EXTRA);
  const last = Math.min(count, Math.ceil((offset + viewport) / row) + EXTRA);
  return { first, last, height, shift: scrollTop - offset };
}
