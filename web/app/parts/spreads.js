/** How times of two sides vary: bands of the parts of a step, and of the ranks that changed most. */

import { change, duration, sentence } from '../format.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { Table } from './bits.js';
import { signed, stateWords } from './compared.js';

/** @typedef {import('../../types/api.js').Comparison} Comparison */
/** @typedef {import('../../types/api.js').CompareSpread} Spread */

const MEDIAN = 2; // of the quantiles 5, 25, 50, 75, 95

/** @param {{data: Comparison, before: string, after: string}} props */
export function Spreads({ data, before, after }) {
  return [
    t.p({ key: 's', class: 'padded' }, t.b(null, sentence(data.spread_text))),
    t.p(
      { key: 'k', class: 'note padded spreadkey' },
      t.span(null, t.span({ class: 'swatch d-before', 'aria-hidden': 'true' }), ` ${before}`),
      t.span(null, t.span({ class: 'swatch d-after', 'aria-hidden': 'true' }), ` ${after}`),
      t.span(null, 'band: 5 to 95 % of the steps; strong: 25 to 75 %; line: the median; each row from 0'),
    ),
    spreadTable('Distributions by part', 'Part', data.spreads, null),
    data.rank_spreads.length > 0
      ? spreadTable('Distributions by rank', 'Self time of', data.rank_spreads, data.after.run_id)
      : null,
  ];
}

/** @param {string} label @param {string} head @param {Spread[]} rows @param {string | null} run of whose ranks they are */
function spreadTable(label, head, rows, run) {
  return Table({
    key: label,
    label,
    frame: 'spreads',
    rows,
    keyOf: (row) => row.label,
    columns: [
      {
        label: head,
        class: 'nowrap',
        cell: (row) =>
          run && row.rank !== null
            ? t.a({ class: 'quiet', href: runPath(run, 'ranks', String(row.rank)) }, row.label)
            : row.label.charAt(0).toUpperCase() + row.label.slice(1),
      },
      { label: 'Drawn', class: 'w-spread', cell: (row) => el(Bands, { row }) },
      { label: 'Before', class: 'num nowrap', cell: (row) => words(row.before_ms) },
      { label: 'After', class: 'num nowrap', cell: (row) => words(row.after_ms) },
      {
        label: 'Median',
        class: 'num nowrap',
        cell: (row) => [
          isChange(row) ? t.b(null, signed(row.difference_ms)) : t.span({ class: 'faint' }, signed(row.difference_ms)),
          isChange(row) && row.before_ms && row.before_ms[MEDIAN] > 0 && row.difference_ms !== null
            ? t.span({ class: 'faint' }, ` ${change(row.difference_ms / row.before_ms[MEDIAN])}`)
            : null,
        ],
      },
      {
        label: 'Beyond noise?',
        class: 'nowrap',
        cell: (row) => stateWords(row.before_ms !== null && row.after_ms !== null, row.state),
      },
    ],
  });
}

/** @param {Spread} row */
function isChange(row) {
  return row.state === 'longer' || row.state === 'shorter';
}

/** "59 ms, 58.9 ms to 59.1 ms". @param {number[] | null} quantiles */
function words(quantiles) {
  if (!quantiles) return '–';
  return [
    duration(quantiles[MEDIAN]),
    t.span({ class: 'faint' }, `, ${duration(quantiles[0])} to ${duration(quantiles[quantiles.length - 1])}`),
  ];
}

/** One band above the other. @param {{row: Spread}} props */
function Bands({ row }) {
  const most = Math.max(1e-9, ...(row.before_ms ?? []), ...(row.after_ms ?? []));
  const at = (/** @type {number} */ ms) => `${(ms / most) * 100}%`;
  return t.span(
    { class: 'spreadtracks', 'aria-hidden': 'true' },
    [row.before_ms, row.after_ms].map((found, side) => {
      if (!found) return t.span({ key: side, class: 'bandtrack hatchmark' });
      const [p5, p25, p50, p75, p95] = found;
      const look = side === 0 ? 'd-before' : 'd-after';
      return t.span(
        { key: side, class: 'bandtrack' },
        t.span({ class: `bandrange outer ${look}`, style: { left: at(p5), width: at(p95 - p5) } }),
        t.span({ class: `bandrange ${look}`, style: { left: at(p25), width: at(p75 - p25) } }),
        t.span({ class: 'barlimit', style: { left: at(p50) } }),
      );
    }),
  );
}
