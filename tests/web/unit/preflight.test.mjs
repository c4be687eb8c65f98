/** Preflights: their addresses, and how far a path is from the best. */

import assert from 'node:assert/strict';
import test from 'node:test';
import { levelOf, linkLevel } from '../../../web/app/parts/levels.js';
import { readPath } from '../../../web/app/url.js';

test('a preflight is a page of no run', () => {
  assert.deepEqual(readPath('preflight'), { name: 'preflights', run: '', id: '' });
  assert.deepEqual(readPath('preflight/job-1'), { name: 'preflight', run: '', id: 'job-1' });
});

test('a level grows with the distance from the best', () => {
  assert.deepEqual([1, 0.8, 0.79, 0.5, 0.3, 0.2, 0.01].map(linkLevel), [0, 0, 1, 1, 2, 3, 4]);
  assert.deepEqual([0, 0.0001, 0.02, 0.5].map((lost) => levelOf('loss', lost, 0)), [0, 1, 3, 4]);
  assert.equal(levelOf('rtt', 0.25, 0.06), 0, 'four times as long, and no longer than a busy scheduler');
  assert.equal(levelOf('rtt', 40, 0.06), 4);
  assert.equal(levelOf('mbit', 0, 0), 4, 'nothing came through anywhere');
});
