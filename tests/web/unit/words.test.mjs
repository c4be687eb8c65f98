/** Numbers, ranges and addresses as words: unknown is a dash, and what is written can be read back. */

import assert from 'node:assert/strict';
import test from 'node:test';
import { stack } from '../../../web/app/charts/histogram-maths.js';
import { ago, bytes, change, count, deviation, duration, enteredWords, figure, firstLine, inside, isOfParts, metricTitle, middle, percent, plural, ranges, si, sinceSilent, speed, stopwatch, timeOfDay, words } from '../../../web/app/format.js';
import { fold, inFront, join, RING } from '../../../web/app/parts/fold.js';
import { spans } from '../../../web/app/parts/ansi.js';
import { stepHref, stepWords } from '../../../web/app/parts/logfields.js';
import { marked } from '../../../web/app/parts/querymark.js';
import { urgentOf } from '../../../web/app/parts/urgent.js';
import { visibleRange } from '../../../web/app/parts/range.js';
import { carried, readArea, readCell, readPath, readRange, runPath, withQuery, writeArea, writeCell } from '../../../web/app/url.js';

test('unknown is a dash, zero is zero', () => {
  for (const say of [count, figure, duration, percent, change, deviation, bytes]) assert.equal(say(null), '–');
  assert.equal(figure(0), '0');
  assert.equal(duration(0), '0 ms');
});

test('numbers keep two to three digits, their unit and a true minus', () => {
  assert.equal(figure(742.4), '742');
  assert.equal(figure(28.44), '28.4');
  assert.equal(figure(1.414), '1.41');
  assert.equal(figure(0.0003), '0.0003');
  assert.equal(duration(0.42), '420 µs');
  assert.equal(duration(8957), '8.96 s');
  assert.equal(duration(65_000), '65 s');
  assert.equal(duration(180_000), '3 min');
  assert.equal(duration(5_400_000), '90 min');
  assert.equal(duration(9_000_000), '2.5 h');
  assert.equal(duration(259_200_000), '3 d');
  assert.equal(percent(-0.291), '−29 %');
  assert.equal(change(0.45), '+45 %');
  assert.equal(deviation(1.24), '+24 %');
  assert.equal(bytes(26_214_400), '25 MiB');
  assert.equal(count(4812), '4,812');
  assert.equal(plural(1, 'rank'), '1 rank');
});

test('how long something holds is told as a clock', () => {
  assert.equal(stopwatch(42_000), '42 s');
  assert.equal(stopwatch(582_000), '9 min 42 s');
  assert.equal(stopwatch(3_850_000), '1 h 4 min');
  assert.equal(stopwatch(3_600_000_000), '1,000 h 0 min');
});

test('what was found of ranks that are all silent is of before', () => {
  const at = Date.UTC(2026, 0, 2, 3, 4, 5);
  const found = 'Rank 3 is slow';
  assert.equal(
    sinceSilent({ status: 'silent', last_seen_ms: at }, found),
    `No rank has reported since ${timeOfDay(at)}; before that: Rank 3 is slow`,
  );
  assert.equal(sinceSilent({ status: 'running', last_seen_ms: at }, found), found);
});

test('large numbers have an SI prefix, small ones are told whole', () => {
  assert.equal(si(7_871_558_374, 'FLOP/s'), '7.87 GFLOP/s');
  assert.equal(si(123_456), '123 k');
  assert.equal(si(5985), '5,985');
  assert.equal(si(0.5, 's'), '0.5 s');
  assert.equal(si(null), '–');
});

test('bytes a second have a prefix from 1,000 on', () => {
  assert.equal(speed(0), '0 B/s');
  assert.equal(speed(999), '999 B/s');
  assert.equal(speed(4450), '4.45 kB/s');
  assert.equal(speed(78_363), '78.4 kB/s');
  assert.equal(speed(2.5e9), '2.5 GB/s');
  assert.equal(speed(null), '–');
});

test('a rate says that it is of one rank', () => {
  assert.equal(metricTitle('tokens_per_second', -1), 'Tokens per second, each rank');
  assert.equal(metricTitle('model_flops_per_second', 3), 'Model FLOPs per second, this rank');
  assert.equal(metricTitle('rss_bytes', 3), 'RSS');
});

test('a duration and a time of day never look alike', () => {
  for (let ms = 0.001; ms < 1e12; ms *= 1.7) {
    for (const text of [duration(ms), stopwatch(ms), ago(0, ms)]) {
      assert.ok(!text.includes(':'), text);
      assert.match(text, /(µs|ms|s|min|h|d|ago|now)$/, text);
    }
    assert.match(timeOfDay(ms), /^\d\d:\d\d:\d\d$/);
  }
});

test('a long name is cut in its middle', () => {
  assert.equal(middle('node-a', 10), 'node-a');
  assert.equal(middle('gpu-cluster-0417', 10), 'gpu-c…0417');
  assert.equal(middle('gpu-cluster-0417', 10).length, 10);
});

test('ranks are ranges, names are words', () => {
  assert.equal(ranges([3, 0, 1, 2, 7, 9, 10]), '0–3, 7, 9, 10');
  assert.equal(ranges([0, 2, 3, 4, 6, 8], 2), '0, 2–4 and 2 more');
  assert.equal(words('slow_compute'), 'Slow compute');
  assert.equal(words('cpu'), 'CPU');
  assert.deepEqual(firstLine('a\nb\nc\n'), ['a', 2]);
  assert.equal(ago(1000, 60_000), '59 s ago');
  assert.equal(ago(1000, 4_000), '3 s ago');
});

test('addresses are read as they are written, also odd run ids', () => {
  for (const run of ['llama-70b', 'a/b c', 'über%2']) {
    assert.deepEqual(readPath(runPath(run, 'ranks', '5')), { name: 'rank', run, id: '5' });
    assert.equal(readPath(runPath(run)).run, run);
  }
  assert.equal(readPath('').name, 'home');
  assert.equal(readPath('runs/x/nothing').name, 'unknown');
  assert.deepEqual(readRange('40-10'), [10, 40]);
  assert.equal(readRange('x'), null);
  const area = { ranks: '8-15,40', first: 120, last: 180 };
  assert.deepEqual(readArea(writeArea(area)), area);
  for (const text of ['8-15', '8-15@180-120', '8,@1-2', '@1-2', '8@0-3', undefined]) assert.equal(readArea(text), null);
  assert.deepEqual(readCell(writeCell({ rank: 5, step: 4210 })), { rank: 5, step: 4210 });
  assert.equal(withQuery('runs/x', { sel: '5@42', q: '', steps: null }), 'runs/x?sel=5@42');
  assert.deepEqual(carried({ steps: '1-2', q: 'x' }), { steps: '1-2' });
});

test('a list draws only what is seen, also where the scroll range is scaled', () => {
  const small = visibleRange({ scrollTop: 2000, viewport: 600, count: 1000, row: 20 });
  assert.ok(small.first <= 100 && small.last >= 130 && small.last - small.first < 50);
  assert.equal(small.shift, 0);
  const many = 2_000_000;
  const end = visibleRange({ scrollTop: 15_000_000 - 600, viewport: 600, count: many, row: 20 });
  assert.equal(end.last, many);
  assert.equal(end.height, 15_000_000);
});

test('terminal colours become looks, other control bytes become visible', () => {
  assert.deepEqual(spans('\x1b[31mred\x1b[0m plain'), [{ text: 'red', look: 'ansi-red' }, { text: ' plain', look: '' }]);
  assert.deepEqual(spans('a\x07b\x1b[2Kc'), [{ text: 'a␇b', look: '' }, { text: 'c', look: '' }]);
});

test('errors stay visible in a histogram however few they are', () => {
  const parts = stack({ from_ms: 0, to_ms: 1, bucket_ms: 1, levels: { INFO: [100_000], ERROR: [1] } }, 0, 100_001, 44);
  assert.equal(parts[0].level, 'ERROR');
  assert.ok(parts[0].height >= 3);
});

test('lines alike, each soon after another, are one; later ones are another', () => {
  const line = (id, rank, message, time_ms = 0) => ({ id, rank, ranks: [rank], message, time_ms, first_ms: time_ms, level: 'INFO', logger: 'a', stream: 'logging', attempt: 0, count: 1 });
  const told = fold([line(1, 0, 'x'), line(2, 1, 'x', 5), line(3, 0, 'x', 9), line(4, 2, 'y'), line(5, 3, 'x', 60_000)]);
  assert.deepEqual(
    told.map((one) => [one.id, one.count, one.ranks, one.first_ms, one.time_ms]),
    [[1, 3, [0, 1], 0, 9], [4, 1, [2], 0, 0], [5, 1, [3], 60_000, 60_000]],
  );
});

test('lines alike on both sides of the seam of two pages are one, and no line counts twice', () => {
  const line = (id, rank, message, time_ms) => ({ id, rank, ranks: [rank], message, time_ms, first_ms: time_ms, level: 'INFO', logger: 'a', stream: 'logging', attempt: 0, count: 1 });
  const page = [line(1, 0, 'x', 0), line(2, 1, 'y', 5)];
  const after = [line(2, 1, 'y', 5), line(3, 2, 'y', 6), line(4, 3, 'x', 1_000), line(5, 4, 'x', 60_000)];
  assert.deepEqual(
    inFront(page, after).map((one) => [one.id, one.count, one.ranks]),
    [[1, 2, [0, 3]], [2, 2, [1, 2]], [5, 1, [4]]],
  );
  assert.deepEqual(inFront([], after), after);
});

test('a mistake in a search is marked where the server says, also behind what is no single code unit', () => {
  assert.deepEqual(marked('a levle:error', [2, 8]), ['a ', 'levle:', 'error']);
  assert.deepEqual(marked('\u{1f525} rank:x', [7, 8]), ['\u{1f525} rank:', 'x', '']);
  assert.deepEqual(marked('a OR', [4, 5]), ['a OR', '\u00a0', '']);
  assert.deepEqual(marked('a', null), ['a', '', '']);
});

test('a long log keeps the end that is read, and no line twice', () => {
  const lines = (from, to) => Array.from({ length: to - from }, (_, i) => ({ id: from + i }));
  const ends = (kept) => [kept.length, kept[0].id, kept.at(-1).id];
  assert.deepEqual(ends(join(lines(0, 5), lines(3, 8), 'old')), [8, 0, 7]);
  assert.deepEqual(ends(join(lines(0, RING), lines(RING, RING + 2), 'old')), [RING, 2, RING + 1]);
  assert.deepEqual(ends(join(lines(0, 2), lines(2, RING + 2), 'new')), [RING, 0, RING - 1]);
});

test('a line after the last step leads to no step that never began', () => {
  const line = { step: 80, rank: 2 };
  assert.equal(stepHref(line, 'job', 80), 'runs/job/steps/80?sel=2@80');
  assert.equal(stepWords(line, 80), '80');
  assert.equal(stepHref({ ...line, step: 81 }, 'job', 80), null);
  assert.equal(stepWords({ ...line, step: 81 }, 80), 'after 80');
  assert.equal(stepWords({ ...line, step: 0 }, 80), '');
});

test('a mean of norms of parts of the model is not called its norm', () => {
  const norm = { name: 'gradient_norm', rank: -1, step: [1, 2], value: [1, 1], min: [1, 1], max: [1, 1] };
  assert.equal(isOfParts(norm), false);
  assert.equal(isOfParts({ ...norm, min: [null, 0.4], max: [null, 1.6] }), true);
  assert.equal(isOfParts({ ...norm, name: 'loss', max: [2, 2] }), false);
});

test('runs that need attention are by severity, then cost, and hold those that failed within a day', () => {
  const at = 1_800_000_000_000;
  const run = (run_id, status, severity, cost, ended_ms = null) => ({
    run_id, status, ended_ms, last_seen_ms: at,
    verdict: severity && { severity, cost_throughput_ratio: cost },
  });
  const runs = [
    run('healthy', 'running', null), run('slow', 'running', 'warning', 0.1), run('slower', 'running', 'warning', 0.3),
    run('silent', 'silent', null), run('old', 'failed', 'critical', null, at - 90_000_000),
    run('crashed', 'failed', 'critical', null, at - 3_600_000), run('over', 'ended', 'critical', 0.9, at),
    run('advice', 'running', 'info', 0.5), run('stuck', 'stuck', 'critical', 1),
  ];
  assert.deepEqual(urgentOf(runs, at).map((one) => one.run_id), ['stuck', 'crashed', 'slower', 'slow', 'silent']);
});

test('a group that only sends and receives is not called idle', () => {
  assert.equal(enteredWords(7692), 'no collective, 7,692 sends and receives');
  assert.equal(enteredWords(0), 'no collective');
  assert.equal(enteredWords(null), 'no collective');
});

test('an abbreviation stays one in the middle of a sentence', () => {
  assert.equal(inside('RSS'), 'RSS');
  assert.equal(inside('IO wait'), 'IO wait');
  assert.equal(inside('Sent bytes'), 'sent bytes');
});
