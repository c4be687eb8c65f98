/** Ranks of a step that have no lane, by host: the band of their self time, the worst first. */

import { count, duration, plural } from '../format.js';
import { setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { CappedNote, Card, Table } from './bits.js';

/** @typedef {import('../../types/api.js').StepTimeline} StepTimeline */
/** @typedef {import('../../types/api.js').FoldedHost} FoldedHost */

/** @param {{data: StepTimeline}} props */
export function Folded({ data }) {
  const rows = data.folded;
  const ranks = data.world_size - data.lanes.length;
  const low = Math.min(...rows.flatMap((row) => row.least_ms ?? []));
  const high = Math.max(...rows.flatMap((row) => row.most_ms ?? []));
  return el(
    Card,
    {
      title: `The other ${plural(ranks, 'rank')}, by host`,
      note: 'self time in this step, from the least to the largest, and the median; that of the longest first',
    },
    Table({
      label: 'Ranks without a lane, by host',
      frame: 'tallscroll',
      rows,
      keyOf: (row) => row.host,
      columns: [
        { label: 'Host', class: 'nowrap', cell: (row) => row.host || 'not known' },
        { label: 'Ranks', class: 'num nowrap', title: (row) => row.ranks, cell: (row) => count(row.num_ranks) },
        {
          label: high >= low ? `${duration(low)} to ${duration(high)}` : 'Band',
          class: 'w-band',
          cell: (row) => el(Band, { row, low, high }),
        },
        { label: 'Least', class: 'num nowrap', cell: (row) => duration(row.least_ms) },
        { label: 'Median', class: 'num nowrap', by: (row) => row.median_ms, cell: (row) => duration(row.median_ms) },
        { label: 'Largest', class: 'num nowrap', by: (row) => row.most_ms, cell: (row) => duration(row.most_ms) },
        {
          label: 'Of',
          class: 'nowrap',
          cell: (row) => (row.worst_rank === null ? 'not known' : `rank ${count(row.worst_rank)}`),
        },
        {
          label: 'Blocked, median',
          class: 'num nowrap',
          by: (row) => row.blocked_ms,
          cell: (row) => duration(row.blocked_ms),
        },
        {
          label: 'No data',
          class: 'num nowrap',
          by: (row) => row.num_ranks - row.num_known,
          cell: (row) => (row.num_known < row.num_ranks ? plural(row.num_ranks - row.num_known, 'rank') : ''),
        },
        {
          cell: (row) =>
            t.button(
              {
                type: 'button',
                class: 'link',
                'aria-label': `Lanes of ${row.host || 'ranks without a host'}`,
                onClick: () => setQuery({ ranks: row.ranks }),
              },
              'Lanes',
            ),
        },
      ],
    }),
    el(CappedNote, { capped: data.folded_capped ?? null, noun: 'hosts' }),
  );
}

/** From the least to the largest self time, with a line at the median; the track is from `low` to `high` ms.
 * @param {{row: FoldedHost, low: number, high: number}} props */
function Band({ row, low, high }) {
  if (row.least_ms === null || row.most_ms === null || row.median_ms === null)
    return t.span({ class: 'hatchmark', title: 'no data' });
  const share = (/** @type {number} */ ms) => `${(ms / Math.max(1e-9, high - low)) * 100}%`;
  return t.span(
    { class: 'bandtrack', 'aria-hidden': 'true' },
    t.span({
      class: 'bandrange t-fwd',
      style: { left: share(row.least_ms - low), width: share(row.most_ms - row.least_ms) },
    }),
    t.span({ class: 'barlimit', style: { left: share(row.median_ms - low) } }),
  );
}
