/** Where boxes and arrows of the wait-for graph stand, and the way through merged stacks. */

import assert from 'node:assert/strict';
import test from 'node:test';
import { fitted, foldedDepths, frameAfter } from '../../../web/app/charts/icicle-maths.js';
import { layOut } from '../../../web/app/charts/waits-maths.js';

const NODES = [0, 1, 1, 2].map((depth, id) => ({ id, depth }));
const EDGES = [
  { source: 1, target: 0 },
  { source: 2, target: 0 },
  { source: 3, target: 1 },
];

/** @param {{x: number, y: number, width: number, height: number}} a @param {typeof a} b */
function meet(a, b) {
  return a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
}

test('boxes never lie on each other and stay within the width', () => {
  for (const width of [240, 380, 700, 1400, 2500]) {
    const { boxes, height } = layOut(NODES, EDGES, width);
    assert.equal(boxes.length, 4);
    for (const box of boxes) assert.ok(box.x >= 0 && box.x + box.width <= width && box.y + box.height <= height);
    for (const a of boxes) for (const b of boxes) if (a !== b) assert.ok(!meet(a, b), `${width}: ${a.id} on ${b.id}`);
  }
});

test('who is waited for stands left, or on top where it is narrow, and every wait has an arrow', () => {
  const wide = layOut(NODES, EDGES, 1400);
  assert.equal(wide.isNarrow, false);
  assert.ok(wide.boxes[0].x < wide.boxes[1].x && wide.boxes[1].x < wide.boxes[3].x);
  assert.equal(wide.boxes[1].x, wide.boxes[2].x);
  const narrow = layOut(NODES, EDGES, 380);
  assert.equal(narrow.isNarrow, true);
  for (let i = 1; i < 4; i += 1) assert.ok(narrow.boxes[i].y > narrow.boxes[i - 1].y);
  for (const plan of [wide, narrow]) {
    assert.deepEqual(
      plan.arrows.map((one) => one.key),
      ['1-0', '2-0', '3-1'],
    );
    for (const arrow of plan.arrows) assert.doesNotMatch(arrow.path + arrow.head, /NaN|undefined/);
  }
});

test('an arrow ends at the edge of who is waited for', () => {
  const { boxes, arrows } = layOut(NODES, EDGES, 1400);
  const [x, y] = /^M([\d.]+) ([\d.]+)L/.exec(arrows[0].head)?.slice(1).map(Number) ?? [];
  assert.equal(x, boxes[0].x + boxes[0].width);
  assert.equal(y, boxes[0].y + boxes[0].height / 2);
});

test('ranks that wait for their own kind, or for each other, have arrows too', () => {
  const circle = layOut(
    [
      { id: 0, depth: 0 },
      { id: 1, depth: 0 },
    ],
    [
      { source: 0, target: 1 },
      { source: 1, target: 0 },
      { source: 0, target: 0 },
    ],
    900,
  );
  assert.equal(circle.arrows.length, 3);
  for (const arrow of circle.arrows) assert.doesNotMatch(arrow.path + arrow.head, /NaN|undefined/);
});

/** main > step > (load > read | backward), over 1 and 3 ranks. */
const FRAMES = [
  { depth: 0, start: 0, count: 4 },
  { depth: 1, start: 0, count: 4 },
  { depth: 2, start: 0, count: 4 },
  { depth: 3, start: 0, count: 4 },
  { depth: 4, start: 0, count: 1 },
  { depth: 4, start: 1, count: 3 },
  { depth: 5, start: 0, count: 1 },
];

test('keys lead to the caller, inwards and aside', () => {
  assert.equal(frameAfter(FRAMES, 3, 'ArrowDown'), 4);
  assert.equal(frameAfter(FRAMES, 4, 'ArrowDown'), 6);
  assert.equal(frameAfter(FRAMES, 6, 'ArrowDown'), 6);
  assert.equal(frameAfter(FRAMES, 4, 'ArrowRight'), 5);
  assert.equal(frameAfter(FRAMES, 5, 'ArrowLeft'), 4);
  assert.equal(frameAfter(FRAMES, 5, 'ArrowUp'), 3);
  assert.equal(frameAfter(FRAMES, 0, 'ArrowUp'), 0);
});

test('outer frames that all share are folded, but for the last ones', () => {
  const of = (nodes, depths) => ({ nodes, num_depths: depths, num_ranks: 4 });
  assert.equal(foldedDepths(of(FRAMES, 6)), 1);
  assert.equal(foldedDepths(of(FRAMES.slice(0, 4), 4)), 0, 'all are alike: nothing parts');
  assert.equal(foldedDepths(of(FRAMES.slice(4, 6), 5)), 0);
});

test('names are cut to what fits, or left out', () => {
  assert.equal(fitted('backward', 200), 'backward');
  assert.equal(fitted('_engine_run_backward', 60), '_engin…');
  assert.equal(fitted('wait', 12), '');
});
