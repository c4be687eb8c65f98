/** What a run cost: bars that end at what is productive, prices as people write them, what-ifs by their switches. */

import assert from 'node:assert/strict';
import test from 'node:test';
import { costWords, money } from '../../../web/app/format.js';
import { hoursWords, isTelling, readChanges, readPrice, shareWords, spotHour, spotPaysFrom, spotPaysUpTo, stepWith, waterfall } from '../../../web/app/parts/costmaths.js';
import { readPath } from '../../../web/app/url.js';

const part = (name, share) => ({ name, what: '', rank_hours: share * 8, share });

test('each loss comes off where the last one ended, and productive is what is left', () => {
  for (let seed = 1; seed < 200; seed += 1) {
    const raw = Array.from({ length: 1 + (seed % 7) }, (_, at) => ((seed * (at + 3) * 7919) % 97) + 1);
    const total = raw.reduce((sum, one) => sum + one, 0);
    const rows = waterfall(raw.map((one, at) => part(`p${at}`, one / total)));
    let right = 1;
    for (const row of rows) {
      assert.ok(Math.abs(row.from + row.part.share - right) < 1e-9);
      right = row.from;
    }
    assert.equal(rows.at(-1).part.name, 'p0');
    assert.equal(right, 0);
  }
  assert.deepEqual(waterfall([]), []);
});

test('a price is a number above 0, with a comma too, and nothing else', () => {
  assert.equal(readPrice('2.5'), 2.5);
  assert.equal(readPrice('2,5'), 2.5);
  for (const text of [undefined, '', '0', '-1', 'x', '1e12', '2.5.1']) assert.equal(readPrice(text), null);
  assert.equal(money(1234.5, 'EUR'), '1,235 EUR');
  assert.equal(money(0.5, ''), '0.50');
  assert.equal(money(0.001, 'EUR'), 'below 0.01 EUR');
});

test('switches are read from the address and answered in proportion to the recorded step', () => {
  const found = {
    step_lo: 1, step_hi: 9, num_steps: 9, step_ms: 200, replayed_ms: 100,
    changes: [{ key: 'a', label: '', assumption: '' }, { key: 'b', label: '', assumption: '' }],
    outcomes: [[[], 100], [['a'], 80], [['b'], 90], [['a', 'b'], 60]].map(([keys, step_ms]) => ({ keys, step_ms })),
  };
  assert.deepEqual(readChanges(found, 'b,c,a'), ['a', 'b']);
  assert.deepEqual(readChanges(found, undefined), []);
  assert.equal(stepWith(found, []), 200);
  assert.equal(stepWith(found, ['b', 'a']), 120);
  assert.equal(stepWith(found, ['c']), null);
});

test('a change within what the replay is off by says nothing', () => {
  const found = {
    step_lo: 1, step_hi: 9, num_steps: 9, step_ms: 100, replayed_ms: 101,
    changes: ['a', 'b', 'c'].map((key) => ({ key, label: '', assumption: '' })),
    outcomes: [[[], 101], [['a'], 80], [['b'], 100.5]].map(([keys, step_ms]) => ({ keys, step_ms })),
  };
  assert.deepEqual(['a', 'b', 'c'].map((key) => isTelling(found, key)), [true, false, true]);
});

test('a little is never nothing', () => {
  assert.equal(shareWords(0.00001), 'below 0.1 %');
  assert.equal(shareWords(0), '0 %');
  assert.equal(hoursWords(1 / 3600 / 2), '0.5 rank-s');
  assert.equal(hoursWords(1e-9), 'below 0.01 rank-s');
  assert.equal(hoursWords(0.05), '3 rank-min');
  assert.equal(hoursWords(0.09, 0.17), '0.09 rank-h');
  assert.equal(hoursWords(2.5), '2.5 rank-h');
});

test('the cost of a run is a page of it', () => {
  assert.deepEqual(readPath('runs/a/cost'), { name: 'cost', run: 'a', id: '' });
});

test('what a finding costs is a day while its run lasts, and afterwards what it did cost', () => {
  const finding = { cost_rank_hours_per_day: 48, cost_rank_hours: 2, cost_money_per_day: 96, currency: 'EUR' };
  assert.equal(costWords(finding, false), '48 rank-hours a day, 96.00 EUR');
  assert.equal(costWords(finding, true), '2 rank-hours, 4.00 EUR');
  assert.equal(costWords({ ...finding, cost_rank_hours: null }, true), '');
  assert.equal(costWords({ ...finding, cost_money_per_day: null }, false), '48 rank-hours a day');
});

test('spot pays from that distance of interruptions on at which both cost the same', () => {
  const apart = spotPaysFrom(3, 1, 600);
  assert.equal(apart, 300);
  assert.equal(1 * (1 + 600 / apart), 3, 'an hour of work costs as much on either');
  assert.equal(spotPaysFrom(3, 3, 600), null);
  assert.equal(spotPaysFrom(3, 4, 600), null);
  assert.equal(spotHour(1, 3600 / apart, 600), 3);
  assert.equal(spotPaysUpTo(3, 1, 3600 / apart), 600);
  assert.equal(spotPaysUpTo(3, 3, 1), null);
});
