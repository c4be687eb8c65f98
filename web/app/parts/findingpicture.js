/** What a finding looks like: the numbers and samples that it rests on, around its onset. */

import { useState } from 'preact/hooks';
import { useApi } from '../api.js';
import { amount, LOOKS, near, Series } from '../charts/series.js';
import { count, sentence, timeOfDay } from '../format.js';
import { useKeys } from '../keys.js';
import { look } from '../pages/overview.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { Card, Table } from './bits.js';
import { shareWords } from './costmaths.js';
import { DrawnLanes, From, LanesTable, percentOf } from './findinglanes.js';

/** @typedef {import('../../types/api.js').FindingPicture} Picture */
/** @typedef {import('../../types/api.js').FindingChart} Chart */
/** @typedef {import('../../types/api.js').FindingBars} Bars */
/** @typedef {import('../../types/api.js').FindingTable} Facts */

const SHOWN = 400;
const TITLE = 'What it looked like';

/** @param {{run: string, id: string, topic: string | null}} props */
export function PictureCard({ run, id, topic }) {
  const path = runPath(run, 'findings', id, 'picture');
  const answer = /** @type {import('../api.js').Answer<Picture>} */ (useApi(path, { topic, on: ['findings'] }));
  const [table, setTable] = useState(false);
  const { charts = [], bars = [], lanes = [], tables = [], notes = [] } = answer.data ?? {};
  const isDrawn = charts.length + bars.length + lanes.length > 0;
  useKeys(
    isDrawn ? [{ keys: 't', text: 'The picture as a table, and back', run: () => setTable((old) => !old) }] : [],
    [isDrawn],
  );
  if (!answer.data) return null;
  if (!isDrawn && tables.length === 0)
    return el(Card, { title: TITLE, note: sentence(`no picture: ${answer.data.reason}`), api: path });
  const onset = [...charts, ...lanes].some((part) => part.onset !== null);
  return el(
    Card,
    {
      title: TITLE,
      api: path,
      note: [
        isDrawn ? (table ? 'the picture in numbers' : 'a gap is no value') : '',
        isDrawn && onset ? (table ? 'around the onset' : 'dashed: the onset') : '',
      ]
        .filter(Boolean)
        .join(', '),
      tools: isDrawn
        ? t.button(
            { type: 'button', class: 'link', onClick: () => setTable(!table), 'aria-pressed': table },
            table ? 'Picture' : 'Table',
          )
        : null,
    },
    lanes.map((part) => (table ? el(LanesTable, { key: part.key, part }) : el(DrawnLanes, { key: part.key, part }))),
    charts.length === 0
      ? null
      : table
        ? charts.map((chart) => el(ChartTable, { key: chart.key, chart }))
        : t.div(
            { class: 'pictures' },
            charts.map((chart) => el(Drawn, { key: chart.key, chart })),
          ),
    bars.map((part) => (table ? el(BarsTable, { key: part.key, part }) : el(DrawnBars, { key: part.key, part }))),
    tables.map((part) => el(FactsTable, { key: part.key, part })),
    notes.map((note) => t.p({ class: 'note padded', key: note }, sentence(note))),
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
      limits: chart.limits,
      mark: chart.onset,
      unit: chart.unit,
      time: chart.axis === 'time',
      height: 180,
    }),
    t.p({ class: 'note' }, legend(chart)),
    t.p({ class: 'note' }, sentence(chart.text)),
    el(From, { source: chart.source }),
  );
}

/** @param {Chart} chart */
function legend(chart) {
  return t.span(
    { class: 'picturekey' },
    chart.lines.map((line, i) => t.span({ key: line.label }, el(Stroke, { look: i % LOOKS.length }), ` ${line.label}`)),
    chart.others
      ? t.span(
          { key: 'others' },
          t.span({ class: 'swatch band', 'aria-hidden': 'true' }),
          ` ${chart.others}, and their median`,
        )
      : null,
    chart.limits
      .filter((one) => !near([one], [chart.high ?? [], ...chart.lines.map((line) => line.values)]).length)
      .map((one) => t.span({ key: one.label }, `beyond the picture: ${one.label}, ${amount(chart.unit, one.value)}`)),
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

/** An amount; what is more than nothing is never 0. @param {string} unit @param {number | null} value */
function least(unit, value) {
  return unit === 'ratio' && value !== null ? shareWords(value) : amount(unit, value);
}

/** @param {Bars} part @param {string} name @param {boolean} isNamed @param {string} label of the bar @returns {[string, string]} */
function partLook(part, name, isNamed, label) {
  if (part.parts.length > 1) return look(name);
  return [label === 'unknown' ? 'unknown' : isNamed ? 'wait' : 'fwd', name];
}

/** @param {(number | null)[]} values */
function sum(values) {
  return values.reduce((/** @type {number} */ total, value) => total + (value ?? 0), 0);
}

/** @param {{part: Bars}} props */
function DrawnBars({ part }) {
  const totals = part.bars.map((bar) => sum(bar.values));
  const most = Math.max(1e-9, ...totals, ...part.limits.map((one) => one.value));
  return t.div(
    { class: 'picture padded' },
    t.h3(null, part.title),
    t.div(
      { class: 'budget picturebars' },
      part.bars.map((bar, i) => {
        const words = bar.values.map(
          (value, k) => `${partLook(part, part.parts[k], false, bar.label)[1]} ${amount(part.unit, value)}`,
        );
        const total = bar.values.every((value) => value === null) ? null : totals[i];
        return t.div(
          { class: 'bar', key: bar.label },
          t.span({ class: 'barlabel' }, bar.is_named ? t.b(null, bar.label) : bar.label),
          t.span(
            { class: 'bartrack', role: 'img', 'aria-label': `${bar.label}: ${words.join(', ')}` },
            total === null ? t.span({ class: 'seg t-unknown', style: { width: '100%' } }) : null,
            bar.values.map((value, k) =>
              value
                ? t.span({
                    key: part.parts[k],
                    class: `seg t-${partLook(part, part.parts[k], bar.is_named, bar.label)[0]}`,
                    title: words[k],
                    style: { width: percentOf(value, most) },
                  })
                : null,
            ),
            part.limits.map((one) =>
              t.span({ key: one.label, class: 'barlimit', style: { left: percentOf(one.value, most) } }),
            ),
          ),
          t.span({ class: 'bartotal' }, least(part.unit, total)),
        );
      }),
      t.ul(
        { class: 'partlegend' },
        part.parts.length > 1
          ? part.parts.map((name) =>
              t.li({ key: name }, t.span({ class: `swatch t-${look(name)[0]}`, 'aria-hidden': 'true' }), look(name)[1]),
            )
          : null,
        part.limits.map((one) =>
          t.li(
            { key: one.label },
            t.span({ class: 'barlimit', 'aria-hidden': 'true' }),
            `${one.label}: ${amount(part.unit, one.value)}`,
          ),
        ),
      ),
    ),
    t.p({ class: 'note' }, sentence(part.text)),
    el(From, { source: part.source }),
  );
}

/** @param {{part: Bars}} props */
function BarsTable({ part }) {
  return t.div(
    null,
    t.h3({ class: 'padded' }, part.title),
    Table({
      label: `${part.title} in numbers`,
      rows: part.bars,
      keyOf: (bar) => bar.label,
      columns: [
        { label: '', cell: (bar) => bar.label },
        ...part.parts.map((name, k) => ({
          label: part.parts.length > 1 ? look(name)[1] : name.charAt(0).toUpperCase() + name.slice(1),
          class: 'num nowrap',
          cell: (/** @type {Bars['bars'][0]} */ bar) => least(part.unit, bar.values[k]),
        })),
      ],
    }),
  );
}

/** @param {{part: Facts}} props */
function FactsTable({ part }) {
  return t.div(
    { class: 'picture' },
    t.h3({ class: 'padded' }, part.title),
    Table({
      label: part.title,
      rows: part.rows,
      keyOf: (_, i) => i,
      columns: part.columns.map((label, k) => ({
        label,
        class: k === 0 ? 'nowrap' : '',
        cell: (/** @type {string[]} */ row) => row[k],
      })),
    }),
    t.div({ class: 'padded' }, t.p({ class: 'note' }, sentence(part.text)), el(From, { source: part.source })),
  );
}
