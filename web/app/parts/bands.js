/** One quantity of all ranks: a band of peers, the worst as lines, what the shared cursor reads. */

import { signal } from '@preact/signals';
import { amount, LOOKS, Series } from '../charts/series.js';
import { count, sentence, timeOfDay } from '../format.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { CappedNote, Table } from './bits.js';

/** @typedef {import('../../types/api.js').Resources} Resources */
/** @typedef {import('../../types/api.js').ResourceChart} Chart */
/** @typedef {import('../../types/api.js').PinnedLine} PinnedLine */

const SCOPES = { rank: 'ranks', gpu: 'GPUs', node: 'nodes', job: 'jobs' };

/** The slice of time that every chart of the page reads; null: the newest. @type {import('@preact/signals').Signal<number | null>} */
export const cursor = signal(null);

/** The newest slice in which a chart has a value. @param {Chart} chart */
function lastKnown(chart) {
  for (let i = chart.median.length - 1; i >= 0; i -= 1) if (chart.median[i] !== null) return i;
  return chart.median.length - 1;
}

/** What a chart says at a slice of time. Pure. @param {Chart} chart @param {number} at */
export function readingWords(chart, at) {
  const median = amount(chart.unit, chart.median[at]);
  if (chart.num === 1 || chart.scope === 'job') return median;
  if (chart.median[at] === null) return 'no data';
  const [low, high] = [amount(chart.unit, chart.low[at]), amount(chart.unit, chart.high[at])];
  return low === high ? `${median} everywhere` : `median ${median}, ${low} to ${high}`;
}

/** @param {{chart: Chart, data: Resources, run: string}} props */
export function BandChart({ chart, data, run }) {
  const isBand = chart.num > 1 && chart.scope !== 'job';
  return t.div(
    { class: 'bandchart' },
    el(Series, {
      title: chart.title,
      note: el(Reading, { chart }),
      x: data.time_ms,
      low: isBand ? chart.low : chart.median,
      high: isBand ? chart.high : chart.median,
      line: chart.median,
      lines: chart.pinned.map((line) => line.values),
      unit: chart.unit,
      time: true,
      cursor,
    }),
    t.p(
      { class: 'note', title: `Source: ${chart.source_text}` },
      sentence(chart.scope_text),
      chart.expected !== null && chart.num < chart.expected
        ? t.span({ class: 'hatchmark', role: 'img', 'aria-label': 'not of all' })
        : null,
      ` ${sentence(chart.source_text)}`,
    ),
    chart.pinned.length > 0
      ? t.ul(
          { class: 'pinnedlines' },
          chart.pinned.map((line, i) => t.li({ key: line.label }, el(Pin, { line, chart, run, look: i }))),
        )
      : null,
    el(CappedNote, { capped: chart.pinned_capped, noun: `${SCOPES[chart.scope]} that are outliers` }),
  );
}

/** @param {{chart: Chart}} props */
function Reading({ chart }) {
  return t.span({ class: 'faint' }, readingWords(chart, cursor.value ?? lastKnown(chart)));
}

/** @param {{line: PinnedLine, chart: Chart, run: string, look: number}} props */
function Pin({ line, chart, run, look }) {
  const [colour, dash] = LOOKS[look % LOOKS.length];
  const href = line.rank !== null ? runPath(run, 'ranks', String(line.rank)) : runPath(run, 'nodes', line.host);
  const at = cursor.value ?? lastKnown(chart);
  return [
    t.svg(
      { key: 's', width: 22, height: 8, 'aria-hidden': 'true' },
      t.path({ d: 'M0 4H22', style: { stroke: `var(--${colour})`, strokeWidth: 2, strokeDasharray: dash.join(' ') } }),
    ),
    t.a({ key: 'a', href }, line.label.replace(/^rank/, 'Rank')),
    t.span({ key: 'v', class: 'num' }, amount(chart.unit, line.values[at])),
    t.span({ key: 'w', class: 'faint' }, line.stands_apart ? 'outlier' : line.why === 'worst' ? 'furthest' : line.why),
  ];
}

/** The charts in numbers. @param {{charts: Chart[]}} props */
export function BandTable({ charts }) {
  return Table({
    label: 'Quantities in numbers',
    rows: charts,
    keyOf: (chart) => chart.key,
    columns: [
      { label: 'What', class: 'wide', cell: (chart) => chart.title },
      { label: 'Whose', class: 'wide', cell: (chart) => chart.scope_text },
      {
        label: 'Known of',
        class: 'num',
        cell: (chart) =>
          chart.expected === null ? count(chart.num) : `${count(chart.num)} of ${count(chart.expected)}`,
      },
      { label: 'Least', class: 'num nowrap', cell: (chart) => extreme(chart, chart.low, Math.min) },
      { label: 'Median', class: 'num nowrap', cell: (chart) => amount(chart.unit, chart.usual) },
      { label: 'Largest', class: 'num nowrap', cell: (chart) => extreme(chart, chart.high, Math.max) },
      {
        label: 'Furthest from the median',
        class: 'wide',
        cell: (chart) =>
          chart.pinned.map((line) => `${line.label} ${amount(chart.unit, line.value)}`).join(', ') || '–',
      },
    ],
  });
}

/** @param {Chart} chart @param {(number | null)[]} values @param {(...values: number[]) => number} of */
function extreme(chart, values, of) {
  const known = /** @type {number[]} */ (values.filter((value) => value !== null));
  return known.length > 0 ? amount(chart.unit, of(...known)) : '–';
}

/** Where the cursor is. @param {{data: Resources}} props */
export function Where({ data }) {
  const at = cursor.value ?? data.time_ms.length - 1;
  const step = data.step[at];
  const when = `${timeOfDay(data.time_ms[at])}${step === null || step === undefined ? '' : `, step ${count(step)}`}`;
  return t.span({ class: 'pill' }, cursor.value === null ? `newest: ${when}` : when);
}
