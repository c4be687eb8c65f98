/** Joins pages of log lines into the one list that is held. Pure. */

/** @typedef {import('../../types/api.js').LogRow} LogRow */

/** How many lines the browser keeps. */
export const RING = 50_000;
const ALIKE_MS = 2000;
const SEAM = 200; // rows behind a page that are looked at

/** Fold lines alike, each soon after another, into one, as the server does for pages. Pure. @param {LogRow[]} lines */
export function fold(lines) {
  /** @type {LogRow[]} */
  const folded = [];
  /** @type {Map<string, number>} */
  const newest = new Map(); // where the last one alike is
  for (const line of lines) {
    const alike = JSON.stringify([line.run_id, line.attempt, line.message, line.level, line.logger, line.stream]);
    const at = newest.get(alike);
    const same = at === undefined ? null : folded[at];
    if (at !== undefined && same && Math.abs(line.first_ms - same.time_ms) <= ALIKE_MS) {
      const ranks = [...new Set([...same.ranks, ...line.ranks])].sort((one, other) => one - other);
      folded[at] = { ...same, count: same.count + line.count, ranks, time_ms: line.time_ms };
    } else newest.set(alike, folded.push(line) - 1);
  }
  return folded;
}

/** Put a page in front of the lines that follow it; those alike on both sides of the seam are one. Pure. @param {LogRow[]} page @param {LogRow[]} lines */
export function inFront(page, lines) {
  const seen = new Set(page.map((line) => line.id));
  const following = lines.filter((line) => !seen.has(line.id));
  const end = page.at(-1)?.time_ms ?? Number.NEGATIVE_INFINITY;
  const far = following.findIndex((line) => line.first_ms - end > ALIKE_MS);
  const seam = Math.min(far < 0 ? following.length : far, SEAM);
  return join(fold([...page, ...following.slice(0, seam)]), following.slice(seam), 'new');
}

/** Join lines without repeating one, oldest first, at most RING. Pure. @param {LogRow[]} older @param {LogRow[]} newer @param {'old' | 'new'} drop */
export function join(older, newer, drop) {
  const seen = new Set(older.map((line) => line.id));
  const all = [...older, ...newer.filter((line) => !seen.has(line.id))];
  if (all.length <= RING) return all;
  return drop === 'old' ? all.slice(all.length - RING) : all.slice(0, RING);
}
