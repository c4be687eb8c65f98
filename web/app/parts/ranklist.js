/** Ranks as people write them. Pure. */

const MOST = 1 << 20;
const MANY = 4096;

/**
 * "0,3-5" as numbers, an empty text as none; what is wrong as a sentence.
 * @param {string} text @returns {number[] | string}
 */
export function readRanks(text) {
  const clean = text.trim();
  if (clean === '' || clean === 'all') return [];
  /** @type {Set<number>} */
  const ranks = new Set();
  for (const part of clean.split(',').map((one) => one.trim())) {
    const found = /^(\d{1,7})(?:-(\d{1,7}))?$/.exec(part);
    if (!found) return `Ranks: “${part}” is no rank. Write 0,3-5 or leave it empty.`;
    const [low, high] = [Number(found[1]), Number(found[2] ?? found[1])];
    if (low > high) return `Ranks: “${part}” runs backwards.`;
    if (high > MOST || high - low > MANY) return `Ranks: “${part}” is too many.`;
    for (let rank = low; rank <= high; rank += 1) ranks.add(rank);
  }
  return [...ranks].sort((a, b) => a - b);
}
