/** Rows that would say the same, as one. Pure. */

/**
 * Group items by what is said of them, in the order of the first of each group.
 * @template T @param {T[]} items @param {(item: T) => string} keyOf
 */
export function alike(items, keyOf) {
  /** @type {Map<string, T[]>} */
  const groups = new Map();
  for (const one of items) {
    const key = keyOf(one);
    const group = groups.get(key);
    if (group) group.push(one);
    else groups.set(key, [one]);
  }
  return [...groups.values()];
}

/**
 * What is said of a request: those of the same that brought nothing are one, what brought something stays alone.
 * @param {import('../../types/api.js').CommandRow} one
 */
export function requestKey(one) {
  const brought = one.is_open || one.ranks.some(({ state }) => state === 'done' || state === 'running');
  const asked = [one.text, one.asked_by, one.finding_id, one.ranks.map(({ state, reason }) => [state, reason])];
  return brought ? String(one.id) : JSON.stringify(asked);
}
