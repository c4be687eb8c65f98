/** Which frames of merged stacks are drawn, and the way from one to the next by keys. Pure. */

/** @typedef {import('../../types/api.js').IcicleNode} IcicleNode */
/** @typedef {import('../../types/api.js').Icicle} Icicle */

const KEPT = 2; // frames that all share, above the one where they part

/** How many outer frames are folded: those that all share but for the last ones. @param {Icicle} icicle */
export function foldedDepths(icicle) {
  let shared = 0;
  for (let depth = 0; depth < icicle.num_depths; depth += 1) {
    const here = icicle.nodes.filter((node) => node.depth === depth);
    if (here.length !== 1 || here[0].count < icicle.num_ranks) break;
    shared = depth + 1;
  }
  const folded = Math.max(0, shared - 1 - KEPT);
  return shared === icicle.num_depths ? 0 : folded;
}

/**
 * The frame that a key leads to: up to the caller, down to what most ranks are in, left and right to
 * the next of the same depth. The same frame where there is none.
 * @param {IcicleNode[]} nodes @param {number} at @param {string} key @returns {number}
 */
export function frameAfter(nodes, at, key) {
  const here = nodes[at];
  if (!here) return 0;
  const end = here.start + here.count;
  const isInside = (/** @type {IcicleNode} */ one) => one.start >= here.start && one.start < end;
  if (key === 'ArrowUp') {
    const above = nodes.findIndex(
      (one) => one.depth === here.depth - 1 && one.start <= here.start && here.start < one.start + one.count,
    );
    return above < 0 ? at : above;
  }
  if (key === 'ArrowDown') {
    const below = nodes.findIndex((one) => one.depth === here.depth + 1 && isInside(one));
    return below < 0 ? at : below;
  }
  const row = nodes.map((one, i) => ({ one, i })).filter(({ one }) => one.depth === here.depth);
  row.sort((a, b) => a.one.start - b.one.start);
  const place = row.findIndex(({ i }) => i === at);
  const next = row[place + (key === 'ArrowRight' ? 1 : -1)];
  return next ? next.i : at;
}

/** A name that fits, else cut, else nothing. @param {string} name @param {number} width in pixels */
export function fitted(name, width) {
  const most = Math.floor((width - 10) / 6.6);
  if (most < 3) return '';
  return name.length <= most ? name : `${name.slice(0, most - 1)}…`;
}
