/** Numbers of two sides beside each other: parts of a step, rates, distributions of times. */

import { change, count, duration, si } from '../format.js';
import { el, t } from '../tags.js';
import { Table } from './bits.js';

/** @typedef {import('../../types/api.js').CompareRow} Row */
/** @typedef {import('../../types/api.js').CompareRate} Rate */
/** @typedef {import('../../types/api.js').CompareTimes} TimesData */

/** One colour per part, as on every page. @type {Record<string, string>} */
const LOOKS = {
  data: 'data',
  forward: 'fwd',
  backward: 'bwd',
  communication: 'comm',
  waiting: 'wait',
  optimizer: 'opt',
  checkpoint: 'opt',
  other: 'other',
};

/** @param {{step: Row, parts: Row[], before: string, after: string}} props */
export function DifferenceTable({ step, parts, before, after }) {
  const rows = [step, ...parts.filter((row) => row.before_p95_ms !== 0 || row.after_p95_ms !== 0)];
  const most = Math.max(1e-9, ...rows.map((row) => Math.abs(row.difference_ms ?? 0)));
  return t.div(
    { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Parts of a step' },
    t.table(
      { class: 'table' },
      t.thead(
        null,
        t.tr(
          null,
          t.th({ rowSpan: 2 }, 'Part'),
          t.th({ colSpan: 2, class: 'num' }, t.span({ class: 'clip sidename', title: before }, before)),
          t.th({ colSpan: 2, class: 'num' }, t.span({ class: 'clip sidename', title: after }, after)),
          t.th({ rowSpan: 2, class: 'num' }, 'Change'),
          t.th({ rowSpan: 2 }, t.span({ class: 'sr' }, 'Drawn')),
          t.th({ rowSpan: 2 }, 'Beyond noise?'),
          t.th({ rowSpan: 2, class: 'num' }, 'Blocks differ by'),
        ),
        t.tr(
          null,
          [0, 1].map((side) => [
            t.th({ key: `m${side}`, class: 'num' }, 'median'),
            t.th({ key: `p${side}`, class: 'num' }, 'p95'),
          ]),
        ),
      ),
      t.tbody(
        null,
        rows.map((row) => el(PartRow, { key: row.part, row, most })),
      ),
    ),
  );
}

/** @param {{row: Row, most: number}} props */
function PartRow({ row, most }) {
  const look = LOOKS[row.part];
  const name = row.label.charAt(0).toUpperCase() + row.label.slice(1);
  const difference = row.difference_ms;
  const counts = row.state === 'longer' || row.state === 'shorter';
  return t.tr(
    { class: look ? '' : 'total' },
    t.td(
      { class: 'nowrap' },
      look ? t.span({ class: `swatch t-${look} beforename`, 'aria-hidden': 'true' }) : null,
      look ? name : t.b(null, 'The step'),
    ),
    t.td({ class: 'num nowrap' }, duration(row.before_median_ms)),
    t.td({ class: 'num nowrap faint' }, duration(row.before_p95_ms)),
    t.td({ class: 'num nowrap' }, duration(row.after_median_ms)),
    t.td({ class: 'num nowrap faint' }, duration(row.after_p95_ms)),
    t.td(
      { class: 'num nowrap' },
      counts ? t.b(null, signed(difference)) : t.span({ class: 'faint' }, signed(difference)),
      row.ratio !== null && counts ? t.span({ class: 'faint' }, ` ${change(row.ratio - 1)}`) : null,
    ),
    t.td(null, difference === null ? null : el(Bar, { share: difference / most, counts })),
    t.td({ class: 'nowrap' }, stateWords(row.before_median_ms !== null && row.after_median_ms !== null, row.state)),
    t.td({ class: 'num nowrap faint' }, row.low_ms === null ? '–' : `${signed(row.low_ms)} to ${signed(row.high_ms)}`),
  );
}

/** To the right of the middle what became longer. @param {{share: number, counts: boolean}} props */
function Bar({ share, counts }) {
  const width = `${Math.min(1, Math.abs(share)) * 50}%`;
  return t.span(
    { class: 'changetrack', 'aria-hidden': 'true' },
    t.span({
      class: counts ? (share > 0 ? 'longer' : 'shorter') : 'within',
      style: share > 0 ? { left: '50%', width } : { right: '50%', width },
    }),
  );
}

/** A difference with its sign. @param {number | null} ms */
export function signed(ms) {
  return ms === null ? '–' : (ms > 0 ? '+' : '') + duration(ms);
}

/** Whether a difference counts. Pure. @param {boolean} isKnown of both sides @param {Row['state']} state */
export function stateWords(isKnown, state) {
  if (!isKnown) return 'not known of both';
  if (state === 'unknown') return 'not known: too few steps';
  return state === 'same' ? 'no difference beyond noise' : state;
}

/** @param {{rates: Rate[], before: string, after: string}} props */
export function RateTable({ rates, before, after }) {
  return Table({
    label: 'How much is done',
    rows: rates,
    keyOf: (one) => one.name,
    columns: [
      { label: 'What', cell: (one) => one.label + (one.unit === '1/s' ? ' in a second' : '') },
      {
        label: t.span({ class: 'clip sidename', title: before }, before),
        class: 'num nowrap',
        cell: (one) => si(one.before),
      },
      {
        label: t.span({ class: 'clip sidename', title: after }, after),
        class: 'num nowrap',
        cell: (one) => si(one.after),
      },
      { label: 'Change', class: 'num nowrap', cell: (one) => (one.ratio === null ? '–' : change(one.ratio - 1)) },
    ],
  });
}

const HALF = 60; // pixels of the tallest bar

/** Two distributions back to back over one axis of time. @param {{times: TimesData, before: string, after: string}} props */
export function Times({ times, before, after }) {
  const { edges_ms: edges } = times;
  const totals = [times.before, times.after].map((counts, side) =>
    Math.max(
      1,
      counts.reduce((sum, one) => sum + one, side === 0 ? times.before_beyond : times.after_beyond),
    ),
  );
  const shares = [times.before, times.after].map((counts, side) => counts.map((one) => one / totals[side]));
  const most = Math.max(1e-9, ...shares.flat());
  const [low, high] = [edges[0], edges[edges.length - 1]];
  return t.figure(
    { class: 'times padded' },
    el(TimesNames, { name: before, side: 'before', beyond: times.before_beyond, edge: high }),
    t.svg(
      {
        viewBox: `0 0 ${edges.length - 1} ${2 * HALF + 2}`,
        preserveAspectRatio: 'none',
        role: 'img',
        'aria-label': timesWords(times, before, after),
      },
      shares.map((counts, side) =>
        counts.map((share, at) => {
          if (share === 0) return null;
          const height = Math.max(1.5, (share / most) * HALF);
          return t.rect({
            key: `${side} ${at}`,
            class: side === 0 ? 'd-before' : 'd-after',
            x: at + 0.06,
            y: side === 0 ? HALF - height : HALF + 2,
            width: 0.88,
            height,
          });
        }),
      ),
      t.line({ class: 'd-axis', x1: 0, x2: edges.length - 1, y1: HALF + 1, y2: HALF + 1 }),
    ),
    el(TimesNames, { name: after, side: 'after', beyond: times.after_beyond, edge: high }),
    t.div(
      { class: 'histaxis', 'aria-hidden': 'true' },
      [0, 0.25, 0.5, 0.75, 1].map((share) => t.span({ key: share }, duration(low + share * (high - low)))),
    ),
  );
}

/** @param {{name: string, side: string, beyond: number, edge: number}} props */
function TimesNames({ name, side, beyond, edge }) {
  return t.figcaption(
    { class: 'timesname' },
    t.span(null, t.span({ class: `swatch d-${side}`, 'aria-hidden': 'true' }), ` ${name}`),
    beyond > 0 ? t.span({ class: 'faint' }, `${count(beyond)} beyond ${duration(edge)}`) : null,
  );
}

/** Where most steps are of each side. Pure. @param {TimesData} times @param {string} before @param {string} after */
export function timesWords(times, before, after) {
  const middles = [times.before, times.after].map((counts) => {
    const at = counts.indexOf(Math.max(...counts));
    return `${duration(times.edges_ms[at])} to ${duration(times.edges_ms[at + 1])}`;
  });
  return `Times of steps: most of ${before} take ${middles[0]}, most of ${after} ${middles[1]}`;
}
