/** What is taken along of a page: tables as text, names of files, addresses of views. */

import assert from 'node:assert/strict';
import test from 'node:test';
import { asCsv, asGrid, asMarkdown, fileName } from '../../../web/app/parts/sharetext.js';
import { viewFor } from '../../../web/app/url.js';

test('a cell of Markdown is one line and ends no cell', () => {
  assert.equal(asMarkdown([['a', 'b'], ['x|y', 'two\nlines']]), '| a | b |\n| --- | --- |\n| x\\|y | two lines |');
});

test('a cell of CSV is quoted where it must be, and none is a formula', () => {
  const lines = asCsv([['plain', 'with, comma', 'say "so"', 'two\nlines']]);
  assert.equal(lines, 'plain,"with, comma","say ""so""","two\nlines"\r\n');
  const dangerous = ['=1+1', '@cmd', '+1+cmd', '-cmd', '\tx'];
  assert.equal(asCsv([dangerous]), `${dangerous.map((text) => `'${text}`).join(',')}\r\n`);
  assert.equal(asCsv([['+35 %', '-1.5', '−5 %', '+2 ms']]), '+35 %,-1.5,−5 %,+2 ms\r\n');
});

test('a cell over several columns and rows counts in each of them', () => {
  const cell = (text, columns = 1, rows = 1) => ({ text, columns, rows });
  const grid = asGrid([[cell('Part', 1, 2), cell('before', 2)], [cell('median'), cell('p95')], [cell('step'), cell('1'), cell('2')]]);
  assert.deepEqual(grid, [['Part', 'before', 'before'], ['Part', 'median', 'p95'], ['step', '1', '2']]);
});

test('a file has the run and the panel in its name, and nothing that a folder or a shell takes amiss', () => {
  assert.equal(fileName('demo', 'Where a step goes', 'csv'), 'demo-where-a-step-goes.csv');
  assert.equal(fileName('', 'Läufe: $(rm -rf) ../x', 'png'), 'rankscope-läufe-rm-rf-..-x.png');
  assert.equal(fileName('../..', 'a', 'json'), 'a.json');
});

test('a view of every run is one of the run that is open', () => {
  assert.equal(viewFor('runs/*/logs?q=a*', 'my run'), 'runs/my%20run/logs?q=a*');
  assert.equal(viewFor('runs/*', 'x'), 'runs/x');
  assert.equal(viewFor('runs/*?order=worst', ''), null);
  assert.equal(viewFor('runs/slow/ranks', ''), 'runs/slow/ranks');
  assert.equal(viewFor('search?q=*', ''), 'search?q=*');
});
