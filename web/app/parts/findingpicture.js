/** What a finding looks like: the numbers and samples that it rests on, around its onset. */

import { useState } from 'preact/hooks';
import { useApi } from '../api.js';
import { amount, LOOKS, Series } from '../charts/series.js';
import { count, sentence, timeOfDay } from '../format.js';
import { useKeys } from '../keys.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { Card, Table } from './bits.js';

/** @typedef {import('../../types/api.js').FindingPicture} Picture */
/** @typedef {import('../../types/api.js').FindingChart} Chart */

const SHOWN = 400;

/** @param {{run: string, id: string, topic: string | null}} props */
export function PictureCard({ run, id, topic }) {
  const path = runPath(run, 'findings', id, 'picture');
  const answer = /** @type {import('../api.js').Answer<Picture>} */ (useApi(path, { topic, on: ['findings'] }));
  const [table, setTable] = useState(false);
  const charts = answer.data?.charts ?? [];
  useKeys(
    charts.length > 0
      ? [{ keys: 't', text: 'The picture as a table, and back', run: () => setTable((old) => !old) }]
      : [],
    [charts.length],
  );
  if (!answer.data) return null;
  if (charts.length === 0)
    return answer.data.reason
      ? el(Card, { title: 'What it looked like', note: sentence(`no picture: ${answer.data.reason}`) })
      : null;
  return el(
    Card,
    {
      title: 'What it looked like',
      note: [
        table ? 'the picture in numbers' : 'a gap is no value',
        charts.some((chart) => chart.onset !== null) ? (table ? 'around the onset' : 'dashed: the onset') : '',
      ]
        .filter(Boolean)
        .join(', '),
      tools: t.button(
        { type: 'button', class: 'link', onClick: () => setTable(!table), 'aria-pressed': table },
        table ? 'Picture' : 'Table',
      ),
    },
    table
      ? charts.map((chart) => el(ChartTable, { key: chart.key, chart }))
      : t.div(
          { class: 'pictures' },
          charts.map((chart) => el(Drawn, { key: chart.key, chart })),
        ),
  );
}

/** @param {{chart: Chart}} props */
function Drawn({ chart }) {
  const [first, ...more] = chart.lines;
  return t.div(
    { class: 'picture' },
    el(Series, {
      title: chart.title,
      summary: sentence(chart.text),
      note: '',
      x: chart.x,
      low: chart.low ?? first.values,
      high: chart.high ?? first.values,
      line: chart.median ?? first.values,
      over: first.values,
      lines: more.map((line) => line.values),
      mark: chart.onset,
      unit: chart.unit,
      time: chart.axis === 'time',
      height: 180,
    }),
    t.p({ class: 'note' }, legend(chart)),
    t.p({ class: 'note' }, sentence(chart.text)),
  );
}

/** @param {Chart} chart */
function legend(chart) {
  return t.span(
    { class: 'picturekey' },
    chart.lines.map((line, i) =>
      t.span({ key: line.label }, el(Stroke, { look: i === 0 ? 0 : (i - 1) % LOOKS.length }), ` ${line.label}`),
    ),
    chart.others
      ? t.span(
          { key: 'others' },
          t.span({ class: 'swatch band', 'aria-hidden': 'true' }),
          ` ${chart.others}, and their median`,
        )
      : null,
  );
}

/** @param {{look: number}} props */
function Stroke({ look }) {
  const [colour, dash] = LOOKS[look];
  return t.svg(
    { width: 22, height: 8, 'aria-hidden': 'true' },
    t.path({ d: 'M0 4H22', style: { stroke: `var(--${colour})`, strokeWidth: 2, strokeDasharray: dash.join(' ') } }),
  );
}

/** The places nearest to the onset. @param {Chart} chart @returns {number[]} */
function nearest(chart) {
  const every = chart.x.map((_, i) => i);
  if (every.length <= SHOWN) return every;
  const after =
    chart.onset === null ? every.length : chart.x.findIndex((x) => x >= /** @type {number} */ (chart.onset));
  const begin = Math.max(0, Math.min(every.length - SHOWN, (after < 0 ? every.length : after) - SHOWN / 2));
  return every.slice(begin, begin + SHOWN);
}

/** @param {{chart: Chart}} props */
function ChartTable({ chart }) {
  const { unit, low, median, high } = chart;
  const rows = nearest(chart);
  const bands = /** @type {[string, (number | null)[]][]} */ (
    low && median && high
      ? [
          ['Others, least', low],
          ['Others, median', median],
          ['Others, largest', high],
        ]
      : []
  );
  const lines = chart.lines.map((line) => /** @type {const} */ ([line.label, line.values]));
  const cell = (/** @type {number | null} */ value) =>
    value === null ? t.span({ class: 'faint' }, 'no value') : amount(unit, value);
  return t.div(
    null,
    t.h3({ class: 'padded' }, chart.title),
    Table({
      label: `${chart.title} in numbers`,
      frame: 'maptable',
      rows,
      keyOf: (i) => i,
      rowProps: (i) => ({
        class: chart.onset !== null && chart.x[i] >= chart.onset && !(chart.x[i - 1] >= chart.onset) ? 'here' : '',
      }),
      columns: [
        {
          label: chart.axis === 'step' ? 'Step' : 'Time',
          class: 'nowrap',
          cell: (i) => (chart.axis === 'step' ? count(chart.x[i]) : timeOfDay(chart.x[i])),
        },
        ...[...lines, ...bands].map(([name, values]) => ({
          label: name.charAt(0).toUpperCase() + name.slice(1),
          class: 'num nowrap',
          cell: (/** @type {number} */ i) => cell(values[i]),
        })),
      ],
    }),
    rows.length < chart.x.length
      ? t.p(
          { class: 'note padded' },
          `${count(rows.length)} of ${count(chart.x.length)} places, those around the onset.`,
        )
      : null,
  );
}
