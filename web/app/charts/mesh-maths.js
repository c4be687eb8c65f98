/** Where the ranks of a mesh stand in a picture, and the level of a number among those of all. Pure. */

/** @typedef {import('../../types/api.js').MeshAxis} Axis */
/** @typedef {import('../../types/api.js').MeshValue} Value */
/** Which axis runs down, which across, and which count the blocks side by side; places of `axes`.
 * @typedef {{down: number | null, across: number, blocks: number[]}} Roles */
/**
 * @typedef {{roles: Roles, cell: number, pitch: number, rows: number, columns: number, numBlocks: number,
 *   perLine: number, left: number, top: number, blockWidth: number, lineHeight: number, width: number, height: number}} Plan
 */

const MOST_CELL = 30;
const LEAST_CELL = 5;
const BLOCK_GAP = 10;
const NAMES_WIDTH = 78; // of the names of rows
const NAME_HEIGHT = 16; // of a block
const MISSING = 255;

/** Stages run down, the innermost of the others across; what is left counts blocks. @param {Axis[]} axes @returns {Roles} */
export function rolesOf(axes) {
  const last = axes.length - 1;
  if (last <= 0) return { down: null, across: 0, blocks: [] };
  const named = axes.findIndex((axis) => axis.name === 'pipeline');
  const down = Math.max(named, 0);
  const across = down === last ? last - 1 : last;
  const blocks = axes.map((_, i) => i).filter((i) => i !== down && i !== across);
  return { down, across, blocks };
}

/** Cells as large as fit into a width and a height; in a narrow space the picture is wider. @param {Axis[]} axes @param {number} width @param {number} maxHeight @returns {Plan} */
export function planMesh(axes, width, maxHeight) {
  const roles = rolesOf(axes);
  const size = axes[roles.across]?.size ?? 0;
  const numBlocks = roles.blocks.reduce((product, i) => product * axes[i].size, 1);
  const left = roles.down === null ? 0 : NAMES_WIDTH;
  const top = roles.blocks.length > 0 || roles.down !== null ? NAME_HEIGHT : 0;
  const room = Math.max(LEAST_CELL + 1, width - left);
  /** @type {Plan | null} */
  let plan = null;
  for (let cell = MOST_CELL; cell >= LEAST_CELL; cell -= 1) {
    const pitch = cell + (cell >= 12 ? 2 : 1);
    // A single axis is broken into lines; a block is not.
    const columns = roles.down === null ? Math.max(1, Math.min(size, Math.floor(room / pitch))) : size;
    const rows = roles.down === null ? Math.ceil(size / columns) : axes[roles.down].size;
    const blockWidth = columns * pitch + (numBlocks > 1 ? BLOCK_GAP : 0);
    const perLine = Math.max(1, Math.min(numBlocks, Math.floor((room + BLOCK_GAP) / blockWidth)));
    const lineHeight = top + rows * pitch + BLOCK_GAP;
    const height = Math.ceil(numBlocks / perLine) * lineHeight - BLOCK_GAP;
    const wide = left + perLine * blockWidth;
    plan = {
      roles,
      cell,
      pitch,
      rows,
      columns,
      numBlocks,
      perLine,
      left,
      top,
      blockWidth,
      lineHeight,
      width: wide,
      height,
    };
    if (height <= maxHeight && wide <= width + BLOCK_GAP) break;
  }
  return /** @type {Plan} */ (plan);
}

/** The place of a rank as a row and a column of the whole picture, and its block. @param {Plan} plan @param {Axis[]} axes @param {number[]} at */
export function placeOf(plan, axes, at) {
  const { roles, rows, columns, perLine } = plan;
  const across = at[roles.across] ?? 0;
  if (roles.down === null) return { row: Math.floor(across / columns), column: across % columns, block: 0 };
  const block = roles.blocks.reduce((index, i) => index * axes[i].size + at[i], 0);
  return {
    row: Math.floor(block / perLine) * rows + at[roles.down],
    column: (block % perLine) * columns + across,
    block,
  };
}

/** The left upper corner of a place. @param {Plan} plan @param {{row: number, column: number}} place */
export function cornerOf(plan, { row, column }) {
  const { columns, rows, pitch, left, top, blockWidth, lineHeight } = plan;
  return {
    x: left + Math.floor(column / columns) * blockWidth + (column % columns) * pitch,
    y: Math.floor(row / rows) * lineHeight + top + (row % rows) * pitch,
  };
}

/** The place under a point; null between blocks. @param {Plan} plan @param {number} x @param {number} y */
export function placeAt(plan, x, y) {
  const { columns, rows, pitch, left, top, blockWidth, lineHeight, perLine } = plan;
  const line = Math.floor(y / lineHeight);
  const inside = Math.floor((y - line * lineHeight - top) / pitch);
  const block = Math.floor((x - left) / blockWidth);
  const column = Math.floor((x - left - block * blockWidth) / pitch);
  if (x < left || y < 0 || inside < 0 || inside >= rows || column < 0 || column >= columns || block >= perLine)
    return null;
  return { row: line * rows + inside, column: block * columns + column };
}

/** Where a key leads from a place; null for other keys. @param {string} key @param {boolean} shift @param {{row: number, column: number}} from @param {Plan} plan */
export function moved(key, shift, { row, column }, plan) {
  const { columns, rows, perLine, numBlocks } = plan;
  const lastRow = Math.ceil(numBlocks / perLine) * rows - 1;
  const lastColumn = perLine * columns - 1;
  const [down, across] = shift ? [rows, columns] : [1, 1];
  /** @type {Record<string, [number, number]>} */
  const moves = {
    ArrowLeft: [row, column - across],
    ArrowRight: [row, column + across],
    ArrowUp: [row - down, column],
    ArrowDown: [row + down, column],
    Home: [row, 0],
    End: [row, lastColumn],
    PageUp: [row - rows, column],
    PageDown: [row + rows, column],
  };
  const to = moves[key];
  if (!to) return null;
  return { row: Math.max(0, Math.min(lastRow, to[0])), column: Math.max(0, Math.min(lastColumn, to[1])) };
}

/** The level of a number on its scale, as the map has it: 0-254, 255 without one. @param {Value} value @param {number | null} number */
export function levelOf(value, number) {
  if (number === null) return MISSING;
  if (value.unit === 'times')
    return Math.max(0, Math.min(254, Math.round(127 + 127 * Math.log2(Math.max(number, 1e-6)))));
  const [low, high] = [value.lo ?? 0, value.hi ?? 0];
  return high > low ? Math.max(0, Math.min(254, Math.round((254 * (number - low)) / (high - low)))) : 127;
}

/** Names of the blocks that have room for theirs: every so many. @param {Plan} plan @param {Axis[]} axes @returns {{block: number, text: string, title: string}[]} */
export function blockNames(plan, axes) {
  const { roles, numBlocks, blockWidth } = plan;
  const axis = roles.blocks.length > 0 ? axes[roles.blocks[roles.blocks.length - 1]] : null;
  if (axis === null) return [];
  const full = blockWidth - BLOCK_GAP >= 7 * (axis.name.length + 3);
  const every = full ? 1 : Math.max(1, Math.ceil(22 / blockWidth));
  const names = [];
  for (let block = 0; block < numBlocks; block += 1) {
    let rest = block;
    /** @type {string[]} */
    const parts = [];
    for (const i of [...roles.blocks].reverse()) {
      parts.unshift(`${axes[i].name} ${rest % axes[i].size}`);
      rest = Math.floor(rest / axes[i].size);
    }
    const number = block % axis.size;
    if ((block % plan.perLine) % every === 0)
      names.push({ block, text: full ? `${axis.name} ${number}` : String(number), title: parts.join(', ') });
  }
  return names;
}
