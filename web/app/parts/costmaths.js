/** A waterfall of shares, what changes would give, and both in words. Pure. */

import { figure, percent } from '../format.js';

/** @typedef {import('../../types/api.js').CostPart} Part */
/** @typedef {import('../../types/api.js').CostWhatIf} WhatIf */

/** Where each bar begins, as shares of all: the losses come off from the right, the largest first, and what is
 * left at the end is productive.
 * @param {Part[]} parts productive before all @returns {{part: Part, from: number}[]} */
export function waterfall(parts) {
  let left = 1;
  const losses = parts.slice(1).map((part) => {
    left = Math.max(0, left - part.share);
    return { part, from: left };
  });
  return [...losses, ...parts.slice(0, 1).map((part) => ({ part, from: 0 }))];
}

/** The changes that an address switches on, of those that there are. @param {WhatIf} found @param {string | undefined} text */
export function readChanges(found, text) {
  const wanted = new Set((text ?? '').split(','));
  return found.changes.map((one) => one.key).filter((key) => wanted.has(key));
}

/** The mean step with these changes, in ms: what the replay gives, in proportion to what it gives back without them.
 * @param {WhatIf} found @param {string[]} keys @returns {number | null} */
export function stepWith(found, keys) {
  const outcome = found.outcomes.find(
    (one) => one.keys.length === keys.length && keys.every((key) => one.keys.includes(key)),
  );
  if (!outcome || !(found.replayed_ms > 0)) return null;
  return (found.step_ms * outcome.step_ms) / found.replayed_ms;
}

/** Whether a change alone gives more than the replay is off by. @param {WhatIf} found @param {string} key */
export function isTelling(found, key) {
  const alone = stepWith(found, [key]);
  const error = Math.abs(found.replayed_ms / found.step_ms - 1);
  return alone === null || Math.abs(alone / found.step_ms - 1) > Math.max(error, LEAST_GAIN);
}

const LEAST_GAIN = 0.0005; // less is written as 0 %

/** A price per rank-hour as people write it; null for none. @param {string | undefined} text */
export function readPrice(text) {
  const value = Number((text ?? '').replace(',', '.'));
  return text && Number.isFinite(value) && value > 0 && value < 1e9 ? value : null;
}

/** How long interruptions must be apart, in seconds, for a spot price to pay; null where it never does.
 * An hour of work takes 1 + lost / apart hours there. @param {number} price @param {number} spot @param {number} lost seconds */
export function spotPaysFrom(price, spot, lost) {
  return spot < price ? (lost * spot) / (price - spot) : null;
}

/** What an hour of work costs as spot, with so many interruptions an hour that each take so long.
 * @param {number} spot @param {number} often an hour @param {number} lost seconds */
export function spotHour(spot, often, lost) {
  return spot * (1 + (often * lost) / SECONDS_PER_HOUR);
}

/** How long an interruption may take at most, in seconds, for a spot price to pay; null where it never does.
 * @param {number} price @param {number} spot @param {number} often an hour */
export function spotPaysUpTo(price, spot, often) {
  return spot < price ? ((price - spot) / (spot * often)) * SECONDS_PER_HOUR : null;
}

const SECONDS_PER_HOUR = 3600;

/** Rank-hours in a unit that is read: that in which `like` is read, so that two beside each other have one.
 * @param {number} hours @param {number} [like] */
export function hoursWords(hours, like = hours) {
  if (like >= 0.1 || hours === 0) return `${figure(hours)} rank-h`;
  if (like >= 0.1 / 60) return `${figure(hours * 60)} rank-min`;
  return hours * 3600 >= 0.01 ? `${figure(hours * 3600)} rank-s` : 'below 0.01 rank-s';
}

/** A share; one that is there is never 0. @param {number} share */
export function shareWords(share) {
  return share > 0 && share < 0.0005 ? 'below 0.1 %' : percent(share);
}

/** The look of a part, as on the other pages. @type {Record<string, string>} */
export const LOOKS = {
  all: 't-all',
  productive: 't-fwd',
  straggling: 't-crit',
  bubble: 't-wait',
  waiting: 't-wait',
  communication: 't-comm',
  'communication or waiting': 't-comm',
  data: 't-data',
  checkpoint: 't-opt',
  restart: 't-lost',
  'lost work': 't-lost',
  'stuck or failing': 't-lost',
  unknown: 't-unknown',
};
