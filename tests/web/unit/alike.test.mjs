import assert from 'node:assert/strict';
import { test } from 'node:test';
import { alike, requestKey } from '../../../web/app/parts/alike.js';

function request(id, state, more = {}) {
  const ranks = [{ rank: 0, state, reason: state === 'expired' ? 'no answer came in time' : '' }];
  return { id, text: 'Stacks of rank 0', asked_by: 'finding 7', finding_id: 7, is_open: false, ranks, ...more };
}

test('groups are in the order of their first', () => {
  assert.deepEqual(
    alike([3, 1, 4, 1, 5, 9, 2, 6], (one) => String(one % 2)),
    [
      [3, 1, 1, 5, 9],
      [4, 2, 6],
    ],
  );
  assert.deepEqual(alike([], String), []);
});

test('requests that brought nothing are one, and what brought something stays alone', () => {
  const list = [
    request(9, 'expired'),
    request(8, 'done'),
    request(7, 'expired'),
    request(6, 'done'),
    request(5, 'expired', { text: 'Stacks of rank 1' }),
    request(4, 'refused'),
    request(3, 'pending', { is_open: true }),
    request(2, 'expired', { finding_id: 8 }),
  ];
  const ids = alike(list, requestKey).map((group) => group.map(({ id }) => id));
  assert.deepEqual(ids, [[9, 7], [8], [6], [5], [4], [3], [2]]);
});
