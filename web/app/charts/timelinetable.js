/** A step's timeline as tables: what each rank did in sum, and the slices that are in view. */

import { useState } from 'preact/hooks';
import { count, duration } from '../format.js';
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
  const [sort, setSort] = useState(/** @type {keyof Lane} */ ('rank'));
  const { data, slices } = model;
  const [low, high] = view.value;
  const value = (/** @type {Lane} */ lane) => (sort === 'rank' ? -lane.rank : Number(lane[sort] ?? -1));
  const lanes = sort === 'rank' ? data.lanes : [...data.lanes].sort((a, b) => value(b) - value(a));
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
    t.div(
      { class: 'scroll maptable', tabIndex: 0, role: 'region', 'aria-label': 'Ranks of the step' },
      t.table(
        { class: 'table' },
        t.thead(
          null,
          t.tr(
            null,
            /** @type {[keyof Lane, string][]} */ ([['rank', 'Rank'], ...SUMS]).map(([key, title]) =>
              t.th(
                {
                  key,
                  class: key === 'rank' ? '' : 'num',
                  'aria-sort': sort === key && key !== 'rank' ? 'descending' : undefined,
                },
                t.button(
                  { type: 'button', class: 'sort', onClick: () => setSort(key) },
                  title,
                  sort === key && key !== 'rank' ? ' ▾' : '',
                ),
              ),
            ),
          ),
        ),
        t.tbody(
          null,
          lanes.map((lane) =>
            t.tr(
              { key: lane.rank },
              t.td(
                { class: 'nowrap' },
                t.a({ href: runPath(run, 'ranks', String(lane.rank)) }, `Rank ${count(lane.rank)}`),
                t.span({ class: 'faint' }, ` ${lane.state === 'recorded' ? lane.host : lane.state}`),
              ),
              SUMS.map(([key]) =>
                t.td({ key, class: 'num nowrap' }, duration(/** @type {number | null} */ (lane[key]))),
              ),
            ),
          ),
        ),
      ),
    ),
    t.div(
      { class: 'scroll maptable', tabIndex: 0, role: 'region', 'aria-label': 'Slices in view' },
      t.table(
        { class: 'table' },
        t.thead(
          null,
          t.tr(
            null,
            t.th(null, 'Rank'),
            t.th({ class: 'num' }, 'Begins at'),
            t.th({ class: 'num' }, 'Takes'),
            t.th(null, 'What'),
          ),
        ),
        t.tbody(
          null,
          rows.map(({ lane, i }) =>
            t.tr(
              { key: i },
              t.td({ class: 'nowrap' }, `Rank ${count(model.ranks[lane])}`),
              t.td(
                { class: 'num nowrap' },
                t.button(
                  {
                    type: 'button',
                    class: 'link',
                    onClick: () =>
                      setQuery({ at: `${model.ranks[lane]}:${Math.round((slices.begin[i] + slices.end[i]) / 2)}` }),
                  },
                  duration(slices.begin[i] / 1000),
                ),
              ),
              t.td({ class: 'num nowrap' }, duration((slices.end[i] - slices.begin[i]) / 1000)),
              t.td({ class: 'wide' }, sliceWords(model, i)),
            ),
          ),
        ),
      ),
    ),
    total > rows.length
      ? t.p(
          { class: 'note padded' },
          `First ${count(rows.length)} of ${count(total)} slices in view; zoom in for the others.`,
        )
      : null,
  );
}
