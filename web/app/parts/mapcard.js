/** The map in its card: its orders, its bands, its legend, and what is selected on it. */

import { useState } from 'preact/hooks';
import { RankMap } from '../charts/map.js';
import { chosenBand, rankRanges } from '../charts/scene.js';
import { referenceWords, usualWords } from '../charts/shades.js';
import { count, duration, words } from '../format.js';
import { useKeys } from '../keys.js';
import { announce, theme } from '../page.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { carried, readArea, readCell, readRange, runPath, withQuery, writeArea } from '../url.js';
import { Card, Guard } from './bits.js';
import { Lazy } from './shell.js';

/** @typedef {import('../../types/api.js').Overview} Overview */
/** @typedef {import('../../types/api.js').Map} MapData */

/** @type {[string, string][]} */
const ORDERS = [
  ['rank', 'In order of rank'],
  ['worst', 'Worst first'],
  ['node', 'By node'],
  ['stage', 'By pipeline stage'],
];

/** @param {string} order */
function setOrder(order) {
  setQuery({ order: order === 'rank' ? null : order });
}

/** The orders of a map: those of every run, and by process groups of each kind. @param {MapData | null} map */
function ordersOf(map) {
  const groups = map?.bands.filter((band) => band.key.startsWith('group:')) ?? [];
  return [...ORDERS, ...groups.map(({ key, title }) => [key, `By ${title.toLowerCase()}`])];
}

/** @param {MapData | null} map */
function nextOrder(map) {
  const orders = ordersOf(map);
  const here = orders.findIndex(([name]) => name === (query.value.order ?? 'rank'));
  const [name, title] = orders[(here + 1) % orders.length];
  setOrder(name);
  announce(`Ranks of the map: ${title.toLowerCase()}`);
}

/** @param {MapData | null} map */
function nextBands(map) {
  const keys = [...(map?.bands.map((band) => band.key) ?? []), 'none'];
  const here = keys.indexOf((map && chosenBand(map, query.value.bands)?.key) ?? 'none');
  const key = keys[(here + 1) % keys.length];
  setQuery({ bands: key });
  announce(`Bands beside the map: ${map?.bands.find((band) => band.key === key)?.title.toLowerCase() ?? 'none'}`);
}

/** Select the ranks that the verdict names, since its onset; without one those that the map pins. @param {Overview | null} overview @param {MapData | null} map */
function selectNamed(overview, map) {
  const { ranks: named = [], onset_step: onset = null } = overview?.verdict ?? {};
  const ranks = named.length > 0 ? named : (map?.pinned.map((pin) => pin.rank) ?? []);
  const last = (named.length > 0 ? overview?.run.step : map?.step_hi) ?? 0;
  if (ranks.length === 0 || !last) return announce('No rank is named or pinned: nothing to select');
  const first = Math.min(onset ?? map?.step_lo ?? 1, last);
  setQuery({ area: writeArea({ ranks: rankRanges(ranks), first, last }) });
}

/** The map in its card, with its legend and its table twin. @param {{run: string, topic: string | null, maxHeight: number, overview: Overview | null, metric?: string, tools?: import('../tags.js').Children}} props */
export function MapCard({ run, topic, maxHeight, overview, metric, tools }) {
  const [map, setMap] = useState(/** @type {MapData | null} */ (null));
  const [table, setTable] = useState(false);
  const range = readRange(query.value.steps);
  const selected = readCell(query.value.sel);
  const area = readArea(query.value.area);
  const ranks = overview?.run.world_size ?? 0;
  const errors = overview?.counts.errors;
  useKeys(
    [
      { keys: 'b', text: 'Select the slow ranks: what they have in common', run: () => selectNamed(overview, map) },
      { keys: 't', text: 'The map as a table, and back', run: () => setTable((old) => !old) },
      {
        keys: 'o',
        text: 'Order of the map’s ranks: worst first, by node, stage, group, rank',
        run: () => nextOrder(map),
      },
      { keys: 'B', text: 'Bands beside the map: node, stage, process groups', run: () => nextBands(map) },
    ],
    [overview, map],
  );
  const ratio = map === null || map.unit === 'ratio';
  return el(
    Card,
    {
      class: 'mapcard',
      title: ratio
        ? `${metricWords(map?.metric)} against ${map ? referenceWords(map) : 'the peers’ median'}`
        : metricWords(map?.metric),
      note: map ? map.text : '',
      tools: [
        tools,
        t.select(
          {
            key: 'o',
            'aria-label': 'Order of the map’s ranks',
            value: query.value.order ?? 'rank',
            onChange: (event) => setOrder(event.currentTarget.value),
          },
          ordersOf(map).map(([name, title]) => t.option({ key: name, value: name }, title)),
        ),
        map && map.bands.length > 1
          ? t.select(
              {
                key: 'b',
                'aria-label': 'Bands beside the map',
                value: chosenBand(map, query.value.bands)?.key ?? 'none',
                onChange: (event) => setQuery({ bands: event.currentTarget.value }),
              },
              map.bands.map(({ key, title }) => t.option({ key, value: key }, `Bands: ${title.toLowerCase()}`)),
              t.option({ key: 'none', value: 'none' }, 'No bands'),
            )
          : null,
        range
          ? t.button(
              { key: 'z', type: 'button', class: 'link', onClick: () => setQuery({ steps: null }) },
              `Steps ${count(range[0])}–${count(range[1])}: show all`,
            )
          : null,
        el(Legend, { key: 'l', map }),
        t.button(
          { key: 't', type: 'button', class: 'link', onClick: () => setTable(!table), 'aria-pressed': table },
          table ? 'Map' : 'Table',
        ),
        maxHeight < 400
          ? t.a({ key: 'e', href: withQuery(runPath(run, 'ranks'), carried(query.value)) }, 'Explore')
          : null,
      ],
    },
    t.div(
      { hidden: table },
      el(Guard, { what: 'The map' }, el(RankMap, { run, topic, maxHeight, ranks, metric, errors, onData: setMap })),
    ),
    table && map
      ? el(Lazy, { load: () => import('../charts/maptable.js'), pick: 'MapTable', props: { map, run } })
      : null,
    area
      ? el(Lazy, {
          key: 'area',
          load: () => import('./area.js'),
          pick: 'AreaPanel',
          props: { run, topic, area },
        })
      : null,
    selected
      ? el(Lazy, {
          key: 'cell',
          load: () => import('./cell.js'),
          pick: 'CellPanel',
          props: { run, cell: selected },
        })
      : null,
  );
}

/** @param {string | undefined} metric */
function metricWords(metric) {
  return metric && metric !== 'own_work' ? words(metric) : 'Self time';
}

const USUAL_TITLE =
  'Cells of this run vary so much anyway: four robust standard deviations, and at least 8 %. Less has colour where most of 16 in a row are off.';

/** @param {{map: MapData | null}} props */
function Legend({ map }) {
  if (!map) return null;
  const dark = theme.value;
  return t.span(
    { class: 'legend', 'data-theme': dark },
    map.unit === 'ratio'
      ? [
          t.span({ key: 'a' }, '−50 %, faster'),
          t.span({ key: 'b', class: 'rampbar', 'aria-hidden': 'true' }),
          t.span({ key: 'c' }, '+100 %, slower'),
          t.span({ key: 'd', title: USUAL_TITLE }, `usual: ${usualWords(map)}`),
        ]
      : [
          t.span({ key: 'a' }, duration(map.value_lo)),
          t.span({ key: 'b', class: 'rampbar sequential', 'aria-hidden': 'true' }),
          t.span({ key: 'c' }, duration(map.value_hi)),
        ],
    t.span({ class: 'hatchmark', 'aria-hidden': 'true' }),
    t.span(null, 'no data'),
  );
}
