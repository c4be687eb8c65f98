/** A step's timeline as tables: what each rank did in sum, and the slices that are in view. */

import { count, duration } from '../format.js';
import { Table } from '../parts/bits.js';
import { setQuery } from '../router.js';
import { t } from '../tags.js';
import { runPath } from '../url.js';
import { sliceWords } from './timeline.js';
import { firstAfter } from './timeline-maths.js';

/** @typedef {import('../../types/api.js').Lane} Lane */

const SHOWN = 300;
/** @type {[keyof Lane, string][]} */
const SUMS = [
  ['self_ms', 'Self time'],
  ['peers_ms', 'Peers’ median'],
  ['data_ms', 'Data wait'],
  ['waiting_ms', 'Waiting'],
  ['communication_ms', 'Exposed communication'],
  ['clock_ahead_ms', 'Clock ahead'],
  ['clock_band_ms', 'Known within'],
];

/** @param {{run: string, model: import('./timeline-paint.js').Model, view: import('@preact/signals').Signal<import('./timeline-maths.js').View>}} props */
export function TimelineTable({ run, model, view }) {
  const { data, slices } = model;
  const [low, high] = view.value;
  /** @type {{lane: number, i: number}[]} */
  const rows = [];
  let total = 0;
  for (let lane = 0; lane < data.lanes.length; lane += 1)
    for (let i = firstAfter(slices, lane, low); i < slices.first[lane + 1] && slices.begin[i] < high; i += 1) {
      total += 1;
      if (rows.length < SHOWN) rows.push({ lane, i });
    }
  return t.div(
    null,
    Table({
      label: 'Ranks of the step',
      frame: 'maptable',
      rows: data.lanes,
      keyOf: (lane) => lane.rank,
      columns: [
        {
          label: 'Rank',
          class: 'nowrap',
          cell: (lane) => [
            t.a({ href: runPath(run, 'ranks', String(lane.rank)) }, `Rank ${count(lane.rank)}`),
            t.span({ class: 'faint' }, ` ${lane.state === 'recorded' ? lane.host : lane.state}`),
          ],
        },
        ...SUMS.map(([key, label]) => ({
          label,
          class: 'num nowrap',
          by: (/** @type {Lane} */ lane) => /** @type {number | null} */ (lane[key]),
          cell: (/** @type {Lane} */ lane) => duration(/** @type {number | null} */ (lane[key])),
        })),
      ],
    }),
    Table({
      label: 'Slices in view',
      frame: 'maptable',
      rows,
      columns: [
        { label: 'Rank', class: 'nowrap', cell: ({ lane }) => `Rank ${count(model.ranks[lane])}` },
        {
          label: 'Begins at',
          class: 'num nowrap',
          cell: ({ lane, i }) =>
            t.button(
              {
                type: 'button',
                class: 'link',
                onClick: () =>
                  setQuery({ at: `${model.ranks[lane]}:${Math.round((slices.begin[i] + slices.end[i]) / 2)}` }),
              },
              duration(slices.begin[i] / 1000),
            ),
        },
        {
          label: 'Takes',
          class: 'num nowrap',
          cell: ({ i }) => duration((slices.end[i] - slices.begin[i]) / 1000),
        },
        { label: 'What', class: 'wide', cell: ({ i }) => sliceWords(model, i) },
      ],
    }),
    total > rows.length
      ? t.p(
          { class: 'note padded' },
          `First ${count(rows.length)} of ${count(total)} slices in view; zoom in for the others.`,
        )
      : null,
  );
}
