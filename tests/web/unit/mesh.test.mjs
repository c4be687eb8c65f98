/** Where the ranks of a mesh stand, and where keys lead. */

import assert from 'node:assert/strict';
import test from 'node:test';
import { blockNames, cornerOf, levelOf, moved, placeAt, placeOf, planMesh, rolesOf } from '../../../web/app/charts/mesh-maths.js';

/** @param {Record<string, number>} sizes */
function axesOf(sizes) {
  return Object.entries(sizes).map(([name, size]) => ({ name, size, family: 0 }));
}

/** @param {{size: number}[]} axes @returns {number[][]} */
function everyPlace(axes) {
  return axes.reduce((found, { size }) => found.flatMap((at) => Array.from({ length: size }, (_, i) => [...at, i])), [[]]);
}

const MESHES = [
  { 'all ranks': 1 },
  { 'all ranks': 1024 },
  { data: 2, tensor: 2 },
  { pipeline: 8, data: 16, tensor: 8 },
  { data: 128, tensor: 8 },
  { data: 4, pipeline: 4 },
  { pipeline: 2, data: 2, context: 3, tensor: 2 },
];

test('every rank has a cell of its own, which a pointer finds again', () => {
  for (const sizes of MESHES)
    for (const width of [360, 1100, 2200]) {
      const axes = axesOf(sizes);
      const plan = planMesh(axes, width, 460);
      const seen = new Set();
      for (const at of everyPlace(axes)) {
        const place = placeOf(plan, axes, at);
        const { x, y } = cornerOf(plan, place);
        assert.ok(x >= plan.left && y >= 0 && x + plan.cell <= plan.width + 10 && y + plan.cell <= plan.height);
        const back = placeAt(plan, x + plan.cell / 2, y + plan.cell / 2);
        assert.deepEqual(back, { row: place.row, column: place.column });
        seen.add(`${place.row},${place.column}`);
      }
      assert.equal(seen.size, everyPlace(axes).length);
    }
});

test('stages run down, the innermost axis across', () => {
  assert.deepEqual(rolesOf(axesOf({ pipeline: 8, data: 16, tensor: 8 })), { down: 0, across: 2, blocks: [1] });
  assert.deepEqual(rolesOf(axesOf({ data: 4, pipeline: 4 })), { down: 1, across: 0, blocks: [] });
  assert.deepEqual(rolesOf(axesOf({ data: 4, tensor: 4 })), { down: 0, across: 1, blocks: [] });
  assert.deepEqual(rolesOf(axesOf({ 'all ranks': 8 })), { down: null, across: 0, blocks: [] });
});

test('keys stay in the picture, and reach each rank', () => {
  const plan = planMesh(axesOf({ pipeline: 4, data: 8, tensor: 4 }), 1100, 460);
  const last = { row: Math.ceil(plan.numBlocks / plan.perLine) * plan.rows - 1, column: plan.perLine * plan.columns - 1 };
  assert.deepEqual(moved('ArrowLeft', false, { row: 0, column: 0 }, plan), { row: 0, column: 0 });
  assert.deepEqual(moved('ArrowRight', true, { row: 1, column: 1 }, plan), { row: 1, column: 1 + plan.columns });
  assert.deepEqual(moved('End', false, { row: 2, column: 0 }, plan), { row: 2, column: last.column });
  assert.deepEqual(moved('PageDown', false, last, plan), last);
  assert.equal(moved('x', false, last, plan), null);
});

test('a number that is not known has no level, and equal ones the middle', () => {
  const value = { unit: 'ms', lo: 0, hi: 10 };
  assert.equal(levelOf(value, null), 255);
  assert.equal(levelOf(value, 10), 254);
  assert.equal(levelOf({ unit: '', lo: 3, hi: 3 }, 3), 127);
  assert.equal(levelOf({ unit: 'times', lo: null, hi: null }, 1), 127);
  assert.equal(levelOf({ unit: 'times', lo: null, hi: null }, 4), 254);
});

test('names of blocks do not lie on each other', () => {
  for (const sizes of [{ pipeline: 8, data: 128, tensor: 1 }, { pipeline: 8, data: 16, tensor: 8 }, { pipeline: 2, data: 512, tensor: 2 }]) {
    const axes = axesOf(sizes);
    const plan = planMesh(axes, 1100, 460);
    const names = blockNames(plan, axes);
    assert.ok(names.length > 0);
    names.slice(1).forEach(({ block }, i) => {
      const before = names[i];
      if (Math.floor(before.block / plan.perLine) !== Math.floor(block / plan.perLine)) return;
      assert.ok((block - before.block) * plan.blockWidth >= 6 * before.text.length, `${before.text} and its next`);
    });
  }
});
