/** Fields of log lines, and marks over their histogram. */

import assert from 'node:assert/strict';
import test from 'node:test';
import { marksOf } from '../../../web/app/charts/histogram-maths.js';
import { fieldNames, fieldsOf, readColumns, writeColumns } from '../../../web/app/parts/logfields.js';

const line = (message, fields = {}) => ({ message, fields });

test('fields are those of the record, then those of a message that is a JSON object', () => {
  assert.deepEqual(fieldsOf(line('{"a": 1, "b": {"c": [1, 2], "d": null}, "e": "x"}', { a: 'own' })), {
    a: 'own',
    'b.c': '[1,2]',
    'b.d': 'null',
    e: 'x',
  });
  for (const text of ['{not json', '[1]', '"text"', 'plain', '{}']) assert.deepEqual(fieldsOf(line(text)), {});
  const many = Object.fromEntries(Array.from({ length: 500 }, (_, i) => [`f${i}`, i]));
  assert.equal(Object.keys(fieldsOf(line(JSON.stringify(many)))).length, 64);
  assert.deepEqual(fieldNames([line('{"b": 1}'), line('{"a": 1, "b": 2}')]), [
    ['b', 2],
    ['a', 1],
  ]);
});

test('columns are read as they were written', () => {
  for (const names of [['loss'], ['a', 'b.c'], ['with, comma', 'x'], []])
    assert.deepEqual(readColumns(writeColumns(names) ?? undefined), names);
  assert.deepEqual(readColumns(undefined), []);
});

test('errors that are close to each other share a mark, and none is outside', () => {
  const span = { from_ms: 0, to_ms: 1000 };
  const groups = [500, 100, 110, 2000, -1].map((first_ms) => ({ first_ms }));
  const marks = marksOf(groups, span, 100, 24);
  assert.deepEqual(
    marks.map(({ x, groups: found }) => [x, found.map((one) => one.first_ms)]),
    [
      [10, [100, 110]],
      [50, [500]],
    ],
  );
});
