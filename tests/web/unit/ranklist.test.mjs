/** Ranks as people write them, and what is wrong with them in words. */

import assert from 'node:assert/strict';
import test from 'node:test';
import { readRanks } from '../../../web/app/parts/ranklist.js';

test('ranks are read as people write them', () => {
  assert.deepEqual(readRanks(''), []);
  assert.deepEqual(readRanks(' all '), []);
  assert.deepEqual(readRanks('3, 0-2,2'), [0, 1, 2, 3]);
});

test('what is no rank is told in words', () => {
  for (const text of ['x', '1,', '1-2-3', '-1', '5-3', '0-999999', '1.5'])
    assert.match(String(readRanks(text)), /^Ranks: “.*” (is no rank|runs backwards|is too many)/);
});
