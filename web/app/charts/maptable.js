/** The map's data as a real table: one row per lane, its worst step, how much of it is slow or missing. */

import { count, deviation, percent } from '../format.js';
import { Table } from '../parts/bits.js';
import { setQuery } from '../router.js';
import { t } from '../tags.js';
import { writeCell } from '../url.js';
import { levelWords, placeWords, worstOf } from './cursor.js';
import { decodeBytes, laneSummary, rankOf, ranksTitle, ratioOf, robustZ, zText } from './scene.js';

/** @typedef {import('../../types/api.js').Map} MapData */

const SHOWN = 200;

/** @param {{map: MapData, run: string}} props */
export function MapTable({ map, run }) {
  const cells = decodeBytes(map.cells);
  const lanes = map.rows.map((row, i) => ({
    row,
    ...laneSummary(cells.subarray(i * map.columns, (i + 1) * map.columns), map),
  }));
  const lastOf = (/** @type {number} */ first) => Math.min(map.step_hi, first + map.bin - 1);
  async function pin(/** @type {MapData['rows'][number]} */ row, /** @type {number} */ first) {
    const found = await worstOf(run, map.metric, { ranks: row.ranks, first, last: lastOf(first) });
    setQuery({ sel: writeCell(found ?? { rank: rankOf(row), step: first }) });
  }
  return Table({
    label: 'The map as a table',
    frame: 'maptable',
    rows: lanes,
    sorted: 'Slowest',
    most: SHOWN,
    noun: 'lanes',
    columns: [
      {
        label: 'Lane',
        cell: ({ row }) => [t.span({ title: ranksTitle(row) }, row.label), t.span({ class: 'faint' }, placeWords(row))],
      },
      {
        label: 'Slowest',
        class: 'num',
        by: (lane) => lane.worst,
        cell: ({ worst }) =>
          worst === null
            ? t.span({ class: 'faint' }, 'no data')
            : map.unit === 'ratio'
              ? deviation(ratioOf(worst))
              : levelWords(map, worst),
      },
      {
        label: 'Robust z',
        class: 'num',
        hint: 'Robust standard deviations of this run’s own noise',
        by: ({ worst }) => (worst === null || map.unit !== 'ratio' ? null : robustZ(map, ratioOf(worst))),
        cell: ({ worst }) =>
          worst === null || map.unit !== 'ratio'
            ? '–'
            : `${worst >= 254 ? '≥ ' : ''}${zText(robustZ(map, ratioOf(worst)))}`,
      },
      {
        label: 'At step',
        class: 'num',
        by: (lane) => (lane.worst === null ? null : lane.step),
        cell: (lane) =>
          lane.worst === null
            ? ''
            : t.button(
                {
                  type: 'button',
                  class: 'link',
                  onClick: () => pin(lane.row, lane.step),
                },
                map.bin > 1 ? `${count(lane.step)}–${count(lastOf(lane.step))}` : count(lane.step),
              ),
      },
      {
        label: 'Slower than usual',
        class: 'num',
        by: (lane) => lane.slow,
        cell: (lane) => (map.unit === 'ratio' ? percent(lane.slow) : '–'),
      },
      { label: 'No data', class: 'num', by: (lane) => lane.missing, cell: (lane) => percent(lane.missing) },
    ],
  });
}
