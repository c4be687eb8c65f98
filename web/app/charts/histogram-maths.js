/** How tall each level is in one slice of time. Pure. */

/** @typedef {import('../../types/api.js').LogHistogram} LogHistogram */

/** How each level counts. @type {Record<string, string>} */
export const TONE = {
  CRITICAL: 'crit',
  ERROR: 'crit',
  WARNING: 'warn',
  INFO: 'plain',
  DEBUG: 'quiet',
  NOTSET: 'quiet',
};
const ORDER = Object.keys(TONE);

/** Heights of one slice, from the bottom. Pure. @param {LogHistogram} data @param {number} slice @param {number} most @param {number} room pixels */
export function stack(data, slice, most, room) {
  const levels = [
    ...ORDER.filter((level) => data.levels[level]),
    ...Object.keys(data.levels).filter((level) => !ORDER.includes(level)),
  ];
  return levels
    .map((level) => ({ level, lines: data.levels[level][slice] ?? 0 }))
    .filter((part) => part.lines > 0)
    .map((part) => ({
      ...part,
      height: Math.max(TONE[part.level] === 'crit' || TONE[part.level] === 'warn' ? 3 : 1, (part.lines / most) * room),
    }));
}
