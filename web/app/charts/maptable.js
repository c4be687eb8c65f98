/** The map's data as a real table: one row per lane, its worst step, how much of it is slow or missing. */

import { useState } from 'preact/hooks';
import { count, deviation, percent } from '../format.js';
import { setQuery } from '../router.js';
import { t } from '../tags.js';
import { levelWords, placeWords } from './cursor.js';
import { decodeBytes, laneSummary, rankOf, ranksTitle, ratioOf } from './scene.js';

/** @typedef {import('../../types/api.js').Map} MapData */

const SHOWN = 200;
/** @type {[string, string][]} */
const COLUMNS = [
  ['label', 'Lane'],
  ['worst', 'Slowest'],
  ['step', 'At step'],
  ['slow', 'Slower than usual'],
  ['missing', 'No data'],
];

/** @param {{map: MapData, run: string}} props */
export function MapTable({ map }) {
  const [sort, setSort] = useState('worst');
  const cells = decodeBytes(map.cells);
  const lanes = map.rows.map((row, i) => ({
    row,
    place: i,
    ...laneSummary(cells.subarray(i * map.columns, (i + 1) * map.columns), map),
  }));
  const by = (/** @type {any} */ lane) => (sort === 'label' ? -lane.place : (lane[sort] ?? -1));
  const sorted = [...lanes].sort((a, b) => by(b) - by(a));
  return t.div(
    { class: 'scroll maptable', tabIndex: 0, role: 'region', 'aria-label': 'The map as a table' },
    t.table(
      { class: 'table' },
      t.thead(
        null,
        t.tr(
          null,
          COLUMNS.map(([key, title]) =>
            t.th(
              { key, class: key === 'label' ? '' : 'num', 'aria-sort': sort === key ? 'descending' : undefined },
              t.button({ type: 'button', class: 'sort', onClick: () => setSort(key) }, title, sort === key ? ' ▾' : ''),
            ),
          ),
        ),
      ),
      t.tbody(
        null,
        sorted.slice(0, SHOWN).map((lane) =>
          t.tr(
            { key: lane.place },
            t.td(
              null,
              t.span({ title: ranksTitle(lane.row) }, lane.row.label),
              t.span({ class: 'faint' }, placeWords(lane.row)),
            ),
            t.td(
              { class: 'num' },
              lane.worst === null
                ? t.span({ class: 'faint' }, 'no data')
                : map.unit === 'ratio'
                  ? deviation(ratioOf(lane.worst))
                  : levelWords(map, lane.worst),
            ),
            t.td(
              { class: 'num' },
              lane.worst === null
                ? ''
                : t.button(
                    {
                      type: 'button',
                      class: 'link',
                      onClick: () => setQuery({ sel: `${rankOf(lane.row)}@${lane.step}` }),
                    },
                    count(lane.step),
                  ),
            ),
            t.td({ class: 'num' }, map.unit === 'ratio' ? percent(lane.slow) : '–'),
            t.td({ class: 'num' }, percent(lane.missing)),
          ),
        ),
      ),
    ),
    sorted.length > SHOWN ? t.p({ class: 'note padded' }, `First ${SHOWN} of ${count(sorted.length)} lanes.`) : null,
  );
}
