/** How far a way between two nodes is from the best one, as a look. Pure. */

/** Shares of the best way; below each the next look. */
export const BOUNDS = [0.8, 0.5, 0.25, 0.1];

/** Shares of packets that are lost; from each on the next look. */
export const LOSSES = [0.0001, 0.001, 0.01, 0.1];

const LEAST_RTT_MS = 0.2; // a round trip that is longer by less is scheduling and no path

/** How far a way is below the best one, 0 for not much. @param {number} share */
export function linkLevel(share) {
  return BOUNDS.filter((bound) => share < bound).length;
}

/** How far a value is from the best of its kind, 0 for as usual.
 * @param {import('../../types/api.js').PreflightMatrix['metric']} metric @param {number} value @param {number} best */
export function levelOf(metric, value, best) {
  if (metric === 'loss') return LOSSES.filter((bound) => value >= bound).length;
  if (metric === 'rtt') return value - best < LEAST_RTT_MS ? 0 : linkLevel(best / value);
  return best > 0 ? linkLevel(value / best) : 4;
}
