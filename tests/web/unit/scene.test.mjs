/** The arithmetic of the map: worst wins, no data stays no data, marks keep their least size. */

import assert from 'node:assert/strict';
import test from 'node:test';
import { bandRuns, binFor, breaksOf, chosenBand, coverage, gradientOf, groupOfLane, growMarks, isNeutral, laneSummary, layout, MISSING, nearestBand, palette,
  pixelColumns, rangesOf, rankOf, rankRanges, ranksOf, ranksTitle, ratioOf, rgb, robustZ, stepAt, stretch, stretches, ticks,
  usualLevel, usualOf, usualWords, wholeColumns, xOf, zoom, zText } from '../../../web/app/charts/scene.js';

const level = (ratio) => Math.round(127 + 127 * Math.log2(ratio));
const USUAL = usualOf({ usual: null }).cell;
const unpack = (colour) => [colour & 255, (colour >> 8) & 255, (colour >> 16) & 255];

test('a byte is a ratio, and back within half a level', () => {
  for (const ratio of [0.5, 0.8, 1, 1.2, 1.9]) assert.ok(Math.abs(ratioOf(level(ratio)) / ratio - 1) < 0.003);
  assert.equal(ratioOf(MISSING), null);
});

test('within 8 % a cell is neutral, at 10 % it is not', () => {
  assert.ok(isNeutral(level(1.07), USUAL) && isNeutral(level(0.94), USUAL));
  assert.ok(!isNeutral(level(1.1), USUAL) && !isNeutral(level(0.9), USUAL) && !isNeutral(MISSING, USUAL));
});

test('on a noisy machine what is usual there has no colour, what is beyond it has', () => {
  const map = { usual: { ratio: 1, lo: 0.7, hi: 1.4 } };
  const usual = usualOf(map).cell;
  assert.equal(usualWords(map), '−30 % to +40 %');
  assert.deepEqual(usualOf({ usual: { ratio: 1, lo: 0.99, hi: 1.01 } }).cell, USUAL);
  assert.ok(usualOf({ usual: { ratio: 1, lo: 0.2, hi: 5 } }).cell[1] < 2, 'twice as long always has colour');
  assert.ok(isNeutral(level(1.38), usual) && !isNeutral(level(1.45), usual) && isNeutral(level(0.72), usual));
  for (const theme of ['light', 'dark']) {
    const table = palette(theme, 'ratio', usual);
    assert.equal(table[level(1.38)], table[level(1)]);
    assert.equal(table[level(0.72)], table[level(1)]);
    assert.notEqual(table[level(1.5)], table[level(1)]);
    const [far, plain] = [table[level(1.4 + 0.42)], palette(theme, 'ratio', USUAL)[level(1.5)]].map(unpack);
    assert.ok(Math.hypot(...far.map((part, i) => part - plain[i])) < 6, 'the same steps of colour from there on');
  }
});

test('the legend has the colours of the cells, also where what is usual moves them', () => {
  for (const usual of [USUAL, usualOf({ usual: { ratio: 1, lo: 0.7, hi: 1.4 } }).cell]) {
    const shown = gradientOf('light', usual).match(/rgb\([^)]*\)/g).map((one) => one.match(/\d+/g).map(Number));
    const table = palette('light', 'ratio', usual);
    shown.forEach((colour, at) => {
      assert.deepEqual(colour, unpack(table[Math.round((at / (shown.length - 1)) * 254)]));
    });
  }
});

test('a rank that is a little slow all the time is shown through the noise, a cell alone is not', () => {
  const { cell, stretch: of } = usualOf({ usual: { ratio: 1, lo: 0.6, hi: 1.7 } });
  const noise = [0.8, 1.2, 0.9, 1.1, 1, 1.3, 0.75, 1];
  const lane = (slow) => Uint8Array.from({ length: 48 }, (_, i) => level(noise[i % 8] * (i >= 16 && i < 32 ? slow : 1)));
  assert.deepEqual([...new Set(stretches(lane(1), of))], [0]);
  const marked = stretches(lane(1.4), of);
  assert.deepEqual([marked[15], marked[16], marked[31], marked[32]], [0, 1, 1, 0]);
  assert.ok(isNeutral(level(1.4), cell) && !isNeutral(level(1.4), of));
  assert.deepEqual([...new Set(stretches(lane(0.6), of))], [0, 1]);
  assert.deepEqual([...new Set(stretches(new Uint8Array(48).fill(MISSING), of))], [0]);
});

test('every theme: neutral is flat, +20 % is far from it, slow is never mistaken for fast', () => {
  for (const theme of ['light', 'dark']) {
    const table = palette(theme, 'ratio', USUAL);
    const neutral = unpack(table[level(1)]);
    assert.deepEqual(unpack(table[level(1.07)]), neutral);
    const distance = (a, b) => Math.hypot(...a.map((part, i) => part - b[i]));
    assert.ok(distance(unpack(table[level(1.2)]), neutral) > 40);
    const grey = (ratio) => unpack(table[level(ratio)]).reduce((sum, part, i) => sum + part * [0.3, 0.59, 0.11][i], 0);
    const away = (ratio) => Math.abs(grey(ratio) - grey(1));
    assert.ok(away(1.99) > 1.5 * away(0.51), 'the loudest grey is slow');
  }
});

test('pixels enlarge columns and keep the ragged last one', () => {
  const map = { step_lo: 1, step_hi: 9, bin: 4, columns: 3 };
  const columns = pixelColumns(map, 90);
  assert.equal(columns[0], 0);
  assert.equal(columns[39], 0);
  assert.equal(columns[40], 1);
  assert.equal(columns[89], 2);
  assert.deepEqual([...new Set(columns)], [0, 1, 2]);
});

test('where a resize leaves fewer pixels than columns, the slowest wins and missing never competes', () => {
  const cells = Uint8Array.from([127, 190, MISSING, 120, 127, 127]);
  const columns = pixelColumns({ step_lo: 1, step_hi: 6, bin: 1, columns: 6 }, 3);
  const line = stretch(cells, columns);
  assert.ok([...line].includes(190));
  assert.ok(![...line].includes(MISSING));
  assert.equal(stretch(Uint8Array.from([MISSING]), Uint32Array.from([0]))[0], MISSING);
});

test('a mark grows over neutral neighbours, never over a mark or a gap', () => {
  const slow = level(1.5);
  const fast = level(0.7);
  assert.deepEqual([...growMarks(Uint8Array.from([127, slow, 127]), 2, USUAL)], [127, slow, slow]);
  assert.deepEqual([...growMarks(Uint8Array.from([127, 127, slow]), 2, USUAL)], [127, slow, slow]);
  assert.deepEqual([...growMarks(Uint8Array.from([MISSING, slow, MISSING]), 2, USUAL)], [MISSING, slow, MISSING]);
  assert.deepEqual([...growMarks(Uint8Array.from([127, slow, fast, 127]), 2, USUAL)], [127, slow, fast, 127]);
});

test('a bin is the smallest power of two that leaves no more bins than pixels', () => {
  assert.equal(binFor(100, 200), 1);
  assert.equal(binFor(201, 200), 2);
  assert.equal(binFor(10_000, 900), 16);
});

test('lanes are at least 3 px high, few ranks get tall ones', () => {
  const few = layout({ rows: 4, pins: 0, strip: true, maxHeight: 240 });
  const many = layout({ rows: 80, pins: 5, strip: true, maxHeight: 240 });
  assert.ok(few.bands.filter((band) => band.kind === 'row').every((band) => band.height >= 18));
  assert.ok(many.bands.filter((band) => band.kind === 'row').every((band) => band.height >= 3));
  assert.ok(many.bottom - many.top <= 240);
  for (let i = 1; i < many.bands.length; i += 1) assert.ok(many.bands[i].y >= many.bands[i - 1].y + many.bands[i - 1].height);
});

test('steps and pixels agree both ways', () => {
  const map = { step_lo: 101, step_hi: 400 };
  for (const step of [101, 250, 400]) assert.equal(stepAt(map, xOf(map, step, 900) + 0.01, 900), step);
  assert.equal(stepAt(map, -5, 900), 101);
  assert.equal(stepAt(map, 9999, 900), 400);
});

test('ticks are round, 1-based and not too many', () => {
  assert.deepEqual(ticks(1, 400, 8), [50, 100, 150, 200, 250, 300, 350, 400]);
  assert.ok(ticks(1, 4, 20).every((step) => step >= 1));
});

test('zooming keeps within the run and ends at the whole', () => {
  assert.deepEqual(zoom({ low: 1, high: 400 }, { low: 1, high: 400 }, 200, 0.5), [100, 299]);
  assert.equal(zoom({ low: 100, high: 299 }, { low: 1, high: 400 }, 200, 2), null);
  const [low] = zoom({ low: 1, high: 400 }, { low: 1, high: 400 }, 1, 0.5);
  assert.equal(low, 1);
});

test('a lane in words: its slowest step, how much is slow, how much is missing', () => {
  const map = { step_lo: 11, bin: 1 };
  const told = laneSummary(Uint8Array.from([127, level(1.3), level(1.6), MISSING]), map);
  assert.equal(told.worst, level(1.6));
  assert.equal(told.step, 13);
  assert.equal(told.slow, 2 / 3);
  assert.equal(told.missing, 0.25);
  assert.deepEqual(rgb('#0a0b0c'), [10, 11, 12]);
});

test('the usual level of a lane is that of its ordinary steps since the onset', () => {
  const map = { step_lo: 1, bin: 1 };
  const cells = Uint8Array.from([127, 127, 254, 127, level(1.5), level(1.5), MISSING, level(1.5)]);
  assert.equal(usualLevel(cells, map, 1), level(1.5), 'half of the steps are slow');
  assert.equal(usualLevel(cells, map, 5), level(1.5));
  assert.equal(usualLevel(Uint8Array.from([MISSING]), map, 1), null);
});

test('lanes of another group begin after a gap, and none is lost', () => {
  const rows = ['a', 'a', 'b', 'c', 'c'].map((group) => ({ group }));
  const breaks = breaksOf(rows);
  assert.deepEqual([...breaks], [2, 3]);
  assert.equal(breaksOf([{ group: '' }, { group: '' }]).size, 0);
  const wish = { rows: 5, pins: 0, strip: false, maxHeight: 100 };
  const [plain, grouped] = [layout(wish), layout({ ...wish, breaks })];
  assert.deepEqual(grouped.bands.map((band, i) => band.y - plain.bands[i].y), [0, 0, 4, 8, 8]);
  assert.equal(grouped.height - plain.height, 8);
  assert.deepEqual(grouped.bands.map((band) => band.index), [0, 1, 2, 3, 4]);
});

test('a lane of few ranks names all of them, one of many has its label', () => {
  const row = { label: 'Ranks 5, 1 and 1 more', ranks: [5, 1, 9] };
  assert.equal(ranksTitle(row), 'Ranks 5, 1, 9');
  assert.equal(ranksTitle({ label: 'Ranks 0-99', ranks: Array.from({ length: 100 }, (_, i) => i) }), 'Ranks 0-99');
  assert.equal(rankOf({ ranks: [5, 1, 9], worst_rank: 9 }), 9);
  assert.equal(rankOf({ ranks: [5, 1, 9], worst_rank: null }), 5);
  assert.equal(ranksTitle({ label: 'Rank 3', ranks: [3] }), 'Rank 3');
});

test('ranks are asked for by their ranges', () => {
  assert.equal(rankRanges([7, 0, 1, 2, 9, 8]), '0-2,7-9');
  assert.equal(rankRanges([5]), '5');
});

test('a selection takes whole columns and the lanes that hold its ranks', () => {
  const map = { step_lo: 101, step_hi: 200, bin: 8 };
  assert.deepEqual(wholeColumns(map, 130, 110), [109, 132]);
  assert.deepEqual(wholeColumns(map, 199, 199), [197, 200]);
  assert.deepEqual(rangesOf('3,8-15'), [[3, 3], [8, 15]]);
  assert.equal(coverage([8, 9], [[8, 15]]), 'all');
  assert.equal(coverage([7, 8], [[8, 15]]), 'some');
  assert.equal(coverage([7], [[8, 15]]), 'none');
  const plan = layout({ rows: 4, pins: 2, strip: true, maxHeight: 100 });
  const last = plan.bands.at(-1);
  assert.equal(nearestBand(plan, 'row', 9_999), last);
  assert.deepEqual([nearestBand(plan, 'row', 0).index, nearestBand(plan, 'pin', 9_999).index], [0, 1]);
});

test('a lane whose list is cut holds all ranks that follow each other', () => {
  const cut = { ranks: [0, 1, 2], ranks_capped: { shown: 3, total: 5 }, label: 'Ranks 0-4' };
  assert.deepEqual(ranksOf(cut), [0, 1, 2, 3, 4]);
  assert.deepEqual(ranksOf({ ...cut, label: 'Ranks 0, 1 and 3 more' }), [0, 1, 2]);
  assert.deepEqual(ranksOf({ ranks: [7], ranks_capped: null, label: 'Rank 7' }), [7]);
});

test('bands are those that are asked for, or of the order, or the nodes where most lanes are of one', () => {
  const band = (key, lanes) => ({ key, title: key, names: ['a', 'b'], lanes, pins: [1] });
  const map = { order: 'rank', bands: [band('node', [0, 0, 1]), band('stage', [-1, -1, 0])] };
  assert.equal(chosenBand(map, undefined).key, 'node');
  assert.equal(chosenBand(map, 'stage').key, 'stage');
  assert.equal(chosenBand(map, 'none'), null);
  assert.equal(chosenBand({ ...map, order: 'stage' }, 'group:gone').key, 'stage');
  assert.equal(chosenBand({ ...map, bands: [band('node', [-1, -1, 0])] }, undefined), null);
  const rows = [0, 10, 20].map((y) => ({ kind: 'row', index: y / 10, y, height: 8 }));
  assert.deepEqual(bandRuns(map.bands[0], rows), [
    { place: 0, name: 'a', top: 0, bottom: 18 },
    { place: 1, name: 'b', top: 20, bottom: 28 },
  ]);
  assert.deepEqual(bandRuns(map.bands[1], rows), [{ place: 0, name: 'a', top: 20, bottom: 28 }]);
  assert.equal(groupOfLane(map.bands[1], rows[0]), '');
  assert.equal(groupOfLane(map.bands[0], { kind: 'pin', index: 0 }), 'b');
});

test('the robust z is in standard deviations of the log of a ratio', () => {
  const map = { noise: { ratio: 1.1, lo: 1, hi: 1.2, sigma: 0.05 } };
  assert.equal(robustZ(map, 1.1), 0);
  assert.ok(Math.abs(robustZ(map, 1.1 * 2 ** 0.15) - 3) < 1e-9);
  assert.deepEqual([robustZ(map, null), robustZ({ noise: null }, 2)], [null, null]);
  assert.deepEqual([zText(-0.01), zText(3.14), zText(31.4), zText(null)], ['0.0', '3.1', '31', '–']);
});
