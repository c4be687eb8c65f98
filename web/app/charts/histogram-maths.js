/** How tall each level is in one slice of time. Pure. */

/** @typedef {import('../../types/api.js').LogHistogram} LogHistogram */
/** @typedef {import('../../types/api.js').ErrorGroup} ErrorGroup */

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

/** Errors where each kind of them began, those that are closer than `apart` together as one mark. Pure.
 * @param {ErrorGroup[]} groups @param {{from_ms: number, to_ms: number}} span @param {number} width @param {number} apart pixels
 * @returns {{x: number, groups: ErrorGroup[]}[]} */
export function marksOf(groups, { from_ms: from, to_ms: to }, width, apart) {
  /** @type {{x: number, groups: ErrorGroup[]}[]} */
  const marks = [];
  const within = groups.filter((one) => one.first_ms >= from && one.first_ms <= to);
  for (const group of within.sort((a, b) => a.first_ms - b.first_ms)) {
    const x = ((group.first_ms - from) / Math.max(1, to - from)) * width;
    const last = marks[marks.length - 1];
    if (last && x - last.x < apart) last.groups.push(group);
    else marks.push({ x, groups: [group] });
  }
  return marks;
}
