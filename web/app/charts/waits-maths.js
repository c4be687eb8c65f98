/** Where the boxes and arrows of the wait-for graph stand. Pure. */

/** @typedef {import('../../types/api.js').WaitNode} WaitNode */
/** @typedef {import('../../types/api.js').WaitEdge} WaitEdge */
/** @typedef {{id: number, x: number, y: number, width: number, height: number}} Box */
/** @typedef {{key: string, path: string, head: string, source: number, target: number}} Arrow */

export const BOX_HEIGHT = 102;
const GAP_Y = 14;
const GAP_X = 64; // room for an arrow
const LEAST = 190;
const MOST = 320;
const INDENT = 22;

/**
 * Ranks that others wait for stand left, those that wait right of them; in a narrow space they stand
 * below, further in. Arrows lead from who waits to who is waited for.
 * @param {WaitNode[]} nodes @param {WaitEdge[]} edges @param {number} width
 * @returns {{boxes: Box[], arrows: Arrow[], height: number, isNarrow: boolean}}
 */
export function layOut(nodes, edges, width) {
  const columns = Math.max(1, ...nodes.map((node) => node.depth + 1));
  const fits = Math.floor((width - (columns - 1) * GAP_X) / columns);
  const isNarrow = fits < LEAST;
  const boxes = isNarrow ? stacked(nodes, width) : sideBySide(nodes, Math.min(MOST, fits));
  const byId = new Map(boxes.map((box) => [box.id, box]));
  const arrows = edges.flatMap(({ source, target }) => {
    const [from, to] = [byId.get(source), byId.get(target)];
    if (!from || !to) return [];
    const [path, head] = isNarrow ? elbow(from, to) : curve(from, to);
    return [{ key: `${source}-${target}`, source, target, path, head }];
  });
  const height = Math.max(0, ...boxes.map((box) => box.y + box.height));
  return { boxes, arrows, height, isNarrow };
}

/** @param {WaitNode[]} nodes @param {number} width @returns {Box[]} */
function sideBySide(nodes, width) {
  /** @type {Map<number, number>} */
  const taken = new Map();
  const rows = Math.max(1, ...[...counts(nodes).values()]);
  return nodes.map((node) => {
    const row = taken.get(node.depth) ?? 0;
    taken.set(node.depth, row + 1);
    const spare = (rows - (counts(nodes).get(node.depth) ?? 0)) * (BOX_HEIGHT + GAP_Y);
    const y = Math.round(Math.min(spare / 2, 2 * (BOX_HEIGHT + GAP_Y))) + row * (BOX_HEIGHT + GAP_Y);
    return { id: node.id, x: node.depth * (width + GAP_X), y, width, height: BOX_HEIGHT };
  });
}

/** @param {WaitNode[]} nodes */
function counts(nodes) {
  /** @type {Map<number, number>} */
  const found = new Map();
  for (const node of nodes) found.set(node.depth, (found.get(node.depth) ?? 0) + 1);
  return found;
}

/** @param {WaitNode[]} nodes @param {number} width @returns {Box[]} */
function stacked(nodes, width) {
  return nodes.map((node, row) => {
    const x = INDENT * Math.min(node.depth, 4);
    return { id: node.id, x, y: row * (BOX_HEIGHT + GAP_Y), width: Math.max(120, width - x), height: BOX_HEIGHT };
  });
}

const HEAD = 8;

/** A triangle whose tip is at a place; `x`, `y`: from where the arrow comes. @param {number} tipX @param {number} tipY @param {number} x @param {number} y */
function headAt(tipX, tipY, x, y) {
  const [backX, backY] = [tipX + x * HEAD, tipY + y * HEAD];
  const half = HEAD / 2;
  return `M${tipX} ${tipY}L${backX + y * half} ${backY + x * half}L${backX - y * half} ${backY - x * half}Z`;
}

/** Ranks that wait for others of their own kind. @param {Box} box @returns {[string, string]} */
function loop(box) {
  const [x, y] = [box.x + box.width / 2, box.y + box.height];
  return [`M${x - 20} ${y}c0 12 40 12 40 ${HEAD / 2}`, headAt(x + 20, y, 0, 1)];
}

/** Of boxes that stand beside each other. @param {Box} from @param {Box} to @returns {[string, string]} */
function curve(from, to) {
  if (from.id === to.id) return loop(from);
  if (from.x === to.x) return vertical(from, to, from.x + 30);
  const isLeft = to.x < from.x;
  const way = isLeft ? 1 : -1; // from where the arrow comes
  const [startX, startY] = [isLeft ? from.x : from.x + from.width, from.y + from.height / 2];
  const [tipX, tipY] = [isLeft ? to.x + to.width : to.x, to.y + to.height / 2];
  const endX = tipX + way * HEAD;
  const bend = (endX - startX) / 2;
  const path = `M${startX} ${startY}C${startX + bend} ${startY} ${endX - bend} ${tipY} ${endX} ${tipY}`;
  return [path, headAt(tipX, tipY, way, 0)];
}

/** Of boxes that stand below each other, each further in. @param {Box} from @param {Box} to @returns {[string, string]} */
function elbow(from, to) {
  if (from.id === to.id) return loop(from);
  const x = to.x + INDENT / 2;
  if (x >= from.x) return vertical(from, to, Math.max(from.x, to.x) + 30);
  const way = to.y < from.y ? 1 : -1;
  const tip = way > 0 ? to.y + to.height : to.y;
  return [`M${from.x} ${from.y + from.height / 2}H${x}V${tip + way * HEAD}`, headAt(x, tip, 0, way)];
}

/** A straight way up or down. @param {Box} from @param {Box} to @param {number} x @returns {[string, string]} */
function vertical(from, to, x) {
  const way = to.y < from.y ? 1 : -1;
  const [start, tip] = way > 0 ? [from.y, to.y + to.height] : [from.y + from.height, to.y];
  return [`M${x} ${start}V${tip + way * HEAD}`, headAt(x, tip, 0, way)];
}
