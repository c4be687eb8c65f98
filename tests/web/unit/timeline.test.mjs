/** The arithmetic of a step's timeline: worst wins below a pixel, nothing is lost, views keep within the step. */

import assert from 'node:assert/strict';
import test from 'node:test';
import {
  arrowsOf,
  clampView,
  columnsOf,
  firstAfter,
  flightsByCall,
  laneAt,
  laneOf,
  NOTHING,
  panView,
  planOf,
  rasterise,
  readSpot,
  readView,
  severities,
  sliceAt,
  tickText,
  timeTicks,
  writeView,
  zoomView,
} from '../../../web/app/charts/timeline-maths.js';

const KINDS = ['data', 'forward', 'backward', 'communication', 'waiting', 'other'];
const SEVERITY = severities(KINDS);
const [FORWARD, COMMUNICATION, WAITING, OTHER] = [1, 3, 4, 5];

/** Rows of [lane, kind, begin, end] as columns. */
function slices(rows, lanes = 1) {
  return columnsOf(
    {
      lane: rows.map((row) => row[0]),
      kind: rows.map((row) => row[1]),
      begin_us: rows.map((row) => row[2]),
      end_us: rows.map((row) => row[3]),
      call: rows.map(() => -1),
      microbatch: rows.map(() => -1),
    },
    lanes,
  );
}

test('each pixel of a lane is the slice that is there', () => {
  const columns = slices([[0, FORWARD, 0, 50], [0, WAITING, 50, 100]]);
  const line = new Uint8Array(10);
  assert.equal(rasterise(columns, 0, [0, 100], line, SEVERITY), 2);
  assert.deepEqual([...line], [1, 1, 1, 1, 1, 4, 4, 4, 4, 4]);
  rasterise(columns, 0, [40, 60], line, SEVERITY);
  assert.deepEqual([...line], [1, 1, 1, 1, 1, 4, 4, 4, 4, 4]);
  rasterise(columns, 0, [90, 140], line, SEVERITY);
  assert.deepEqual([...line], [4, 4, ...Array(8).fill(NOTHING)]);
});

test('below a pixel the worst wins, and one wait among thousands stays', () => {
  const rows = [];
  for (let at = 0; at < 10_000; at += 1) rows.push([0, at === 7_001 ? WAITING : at % 2 ? FORWARD : OTHER, at, at + 1]);
  const line = new Uint8Array(100);
  rasterise(slices(rows), 0, [0, 10_000], line, SEVERITY);
  assert.equal(line[70], WAITING);
  assert.equal([...line].filter((kind) => kind === WAITING).length, 1);
  assert.ok(!line.includes(NOTHING));
  const pair = slices([[0, FORWARD, 0, 999], [0, COMMUNICATION, 999, 1000], [0, WAITING, 1000, 1001], [0, FORWARD, 1001, 2000]]);
  const short = new Uint8Array(20);
  rasterise(pair, 0, [0, 2000], short, SEVERITY);
  assert.equal(short[9], COMMUNICATION);
  assert.equal(short[10], WAITING);
});

test('what is drawn is what the rows say, for any view', () => {
  let seed = 7;
  const random = (n) => {
    seed = (seed * 48271) % 2147483647;
    return seed % n;
  };
  for (let round = 0; round < 60; round += 1) {
    const rows = [];
    for (let at = 0; at < 4000; ) {
      const end = at + 1 + random(random(3) ? 30 : 300);
      if (random(4)) rows.push([0, random(KINDS.length), at, end]);
      at = end;
    }
    const columns = slices(rows);
    const view = [random(3000), 0];
    view[1] = view[0] + 20 + random(1500);
    const width = 1 + random(300);
    const line = new Uint8Array(width);
    const wide = [];
    rasterise(columns, 0, view, line, SEVERITY, wide, 10);
    const scale = width / (view[1] - view[0]);
    for (const [, kind, begin, end] of rows) {
      const [x0, x1] = [(begin - view[0]) * scale, (end - view[0]) * scale];
      if (x1 - x0 >= 3 && x0 >= 0 && x1 <= width) {
        const middle = line[Math.floor((x0 + x1) / 2)];
        assert.ok(middle === kind || SEVERITY[middle] > SEVERITY[kind]);
      }
      if (x1 - x0 < 1 && x0 >= 0 && x1 <= width)
        assert.ok(SEVERITY[line[Math.min(width - 1, Math.floor(x0))]] >= SEVERITY[kind], 'not hidden by less');
    }
    for (const i of wide) assert.ok((columns.end[i] - columns.begin[i]) * scale >= 9);
  }
});

test('a slice is found by its time, also where slices overlap', () => {
  const columns = slices([[0, 1, 0, 100], [0, 2, 10, 20], [0, 3, 30, 40], [1, 1, 5, 6]], 3);
  assert.equal(firstAfter(columns, 0, 25), 0);
  assert.equal(firstAfter(columns, 0, 100), 3);
  assert.equal(sliceAt(columns, 1, 5.5, 0), 3);
  assert.equal(sliceAt(columns, 1, 20, 5), -1);
  assert.equal(sliceAt(columns, 1, 8, 5), 3, 'within reach');
  assert.equal(sliceAt(columns, 2, 8, 50), -1, 'of a lane without slices');
  assert.deepEqual([0, 1, 2, 3].map((i) => laneOf(columns, i)), [0, 0, 0, 1]);
});

test('a view keeps within the step, however it is moved', () => {
  assert.deepEqual(clampView([-50, 50], 1000), [0, 100]);
  assert.deepEqual(clampView([950, 1050], 1000), [900, 1000]);
  assert.deepEqual(clampView([0, 5000], 1000), [0, 1000]);
  const near = zoomView([0, 1000], 250, 0.5, 1000);
  assert.deepEqual(near, [125, 625]);
  assert.equal((250 - near[0]) / 500, 0.25, 'the time under the cursor keeps its place');
  assert.deepEqual(zoomView([400, 410], 405, 0.001, 1000), [395, 415], 'not below 20 µs');
  assert.deepEqual(zoomView([100, 200], 150, 1000, 1000), [0, 1000]);
  assert.deepEqual(panView([100, 200], 0.5, 1000), [150, 250]);
  assert.deepEqual(panView([900, 1000], 0.5, 1000), [900, 1000]);
});

test('an address holds the view and the slice, and says nothing of the whole', () => {
  assert.equal(writeView([0, 1000], 1000), null);
  assert.equal(writeView([100.4, 250.2], 1000), '100-251');
  assert.deepEqual(readView('100-251', 1000), [100, 251]);
  assert.deepEqual(readView(undefined, 1000), [0, 1000]);
  assert.deepEqual(readView('900-400', 1000), [0, 1000], 'what is none is the whole');
  assert.deepEqual(readView('nonsense', 1000), [0, 1000]);
  assert.deepEqual(readSpot('5:1200'), { rank: 5, time: 1200 });
  assert.equal(readSpot('5'), null);
});

test('the axis has round times, and texts that distinguish them', () => {
  const { list, unit } = timeTicks([0, 120_000], 8);
  assert.deepEqual(list.slice(0, 3), [0, 20_000, 40_000]);
  assert.deepEqual(list.map((at) => tickText(at, unit)).slice(0, 3), ['0', '20 ms', '40 ms']);
  for (const view of [[0, 130], [5_000, 5_040], [123_456, 123_999], [0, 3_600_000_000]]) {
    const ticks = timeTicks(view, 9);
    assert.ok(ticks.list.length > 1 && ticks.list.length <= 10);
    const texts = ticks.list.map((at) => tickText(at, ticks.unit));
    assert.equal(new Set(texts).size, texts.length, texts.join());
  }
});

test('lanes get thinner as there are more of them, and a pointer finds each', () => {
  for (const lanes of [1, 8, 32, 64, 256]) {
    const plan = planOf(lanes);
    for (const row of plan.rows) assert.equal(laneAt(plan, row.top + row.height / 2), row.lane);
    assert.equal(laneAt(plan, plan.top - 3), -1);
    assert.equal(laneAt(plan, plan.bottom + 3), -1);
  }
  assert.ok(planOf(256).pitch < planOf(8).pitch);
});

test('arrows lead from a send to its receive, and from the last to come to all others', () => {
  const flights = columnsOf({ lane: [0, 1, 2], begin_us: [10, 40, 20], end_us: [50, 50, 50], call: [0, 0, 0] }, 3);
  const { first, list } = flightsByCall(flights, 1);
  const members = Array.from(list.subarray(first[0], first[1]));
  assert.deepEqual(members, [0, 1, 2]);
  const ranks = [7, 8, 9];
  const collective = arrowsOf({ source: null, target: null, last_rank: 8 }, members, flights, ranks);
  assert.deepEqual(collective, [
    { from: 1, to: 0, at: 40, until: 40 },
    { from: 1, to: 2, at: 40, until: 40 },
  ]);
  const send = arrowsOf({ source: 7, target: 9, last_rank: 9 }, members, flights, ranks);
  assert.deepEqual(send, [{ from: 0, to: 2, at: 10, until: 50 }]);
  assert.deepEqual(arrowsOf({ source: null, target: null, last_rank: null }, members, flights, ranks), []);
});

test('100,000 slices on 64 lanes cost little', () => {
  const rows = [];
  for (let lane = 0; lane < 64; lane += 1)
    for (let i = 0; i < 1563; i += 1) rows.push([lane, (lane + i) % KINDS.length, i * 100, i * 100 + 100]);
  const columns = slices(rows, 64);
  const line = new Uint8Array(1440);
  const begin = process.cpuUsage();
  for (let frame = 0; frame < 40; frame += 1)
    for (let lane = 0; lane < 64; lane += 1) rasterise(columns, lane, [frame * 100, 156_300], line, SEVERITY, [], 30);
  const spent = process.cpuUsage(begin);
  const perFrame = (spent.user + spent.system) / 1000 / 40;
  assert.ok(perFrame < 8, `${perFrame.toFixed(2)} ms of CPU a frame`);
});
