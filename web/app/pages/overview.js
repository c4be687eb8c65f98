/** A run's overview: the verdict, three numbers, the map, where a step goes, the findings. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { RankMap } from '../charts/map.js';
import { chosenBand, gradientOf, rankRanges, referenceWords, usualOf, usualWords } from '../charts/scene.js';
import { change, count, duration, figure, plural, words } from '../format.js';
import { useKeys } from '../keys.js';
import { announce, setTitle, theme } from '../page.js';
import { Card, Guard, Loaded, Problem, Seen, Skeleton } from '../parts/bits.js';
import { AnswerCard, FindingsTable, shortAnswer, VerdictCard } from '../parts/finding.js';
import { Lazy } from '../parts/shell.js';
import { go, query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { carried, readArea, readCell, readRange, runPath, withQuery, writeArea } from '../url.js';

/** @typedef {import('../../types/api.js').Overview} Overview */
/** @typedef {import('../../types/api.js').Map} MapData */
/** @typedef {import('../../types/api.js').Budget} Budget */
/** @typedef {import('../../types/api.js').BudgetRow} BudgetRow */
/** @typedef {import('../../types/api.js').Findings} Findings */

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, overview, topic, ended }) {
  const data = overview.data;
  const findings = /** @type {import('../api.js').Answer<Findings>} */ (
    useApi(runPath(run, 'findings'), { topic, on: ['findings', 'verdict'] })
  );
  useEffect(() => {
    if (data) setTitle(shortAnswer(data), data.run.name || run);
  }, [data]);
  const open = findings.data?.open ?? [];
  useFindingKeys(
    run,
    open.map((one) => one.id),
  );
  if (!data)
    return overview.error
      ? el(Problem, { error: overview.error, retry: overview.refresh, what: 'this run' })
      : el(Skeleton, { height: 260, waitsFor: 'the verdict' });
  return t.div(
    { class: 'stack' },
    data.verdict
      ? el(VerdictCard, {
          verdict: data.verdict,
          coverage: data.coverage,
          summary: data.run,
          run,
          ended,
          changed: overview.refresh,
        })
      : el(AnswerCard, { answer: data.answer, coverage: data.coverage, run, ended }),
    data.verdict && (data.verdict.kind === 'hang' || data.verdict.kind === 'crash')
      ? el(Lazy, {
          key: 'grid',
          load: () => import('../parts/grid.js'),
          pick: 'RankGrid',
          props: { run, verdict: data.verdict, topic },
        })
      : null,
    data.numbers.length > 0 ? el(Numbers, { numbers: data.numbers.slice(0, 3) }) : null,
    el(Elsewhere, { trackers: data.trackers, tags: data.run.tags }),
    el(MapCard, { run, topic, maxHeight: 236, overview: data }),
    t.div(
      { class: 'pair' },
      el(BudgetCard, { run, topic }),
      el(Seen, {
        height: 150,
        children: () =>
          el(Lazy, {
            load: () => import('../parts/collectives.js'),
            pick: 'CollectivesCard',
            props: { run, topic, step: data.run.step },
          }),
      }),
    ),
    el(
      Card,
      {
        title: 'Findings, by cost',
        note: findings.data ? findingsNote(findings.data, ended) : '',
        tools: [
          t.a({ key: 'c', href: csvHref(runPath(run, 'findings')) }, 'CSV'),
          t.a({ key: 'a', href: withQuery(runPath(run, 'findings'), carried(query.value)) }, 'All findings'),
        ],
      },
      Loaded({
        answer: findings,
        height: 60,
        what: 'the findings',
        children: (list) =>
          list.open.length + list.recovered.length > 0
            ? el(FindingsTable, { findings: [...list.open, ...list.recovered].slice(0, 8), run, ended })
            : t.p({ class: 'note padded' }, noFindings(list)),
      }),
    ),
    el(Seen, {
      height: 60,
      children: () =>
        el(Lazy, { load: () => import('../parts/numbers.js'), pick: 'NumbersCard', props: { run, topic } }),
    }),
  );
}

/** `n` and `N` walk through the findings. @param {string} run @param {number[]} ids @param {number} [at] */
export function useFindingKeys(run, ids, at) {
  const step = (/** @type {number} */ way) => {
    if (ids.length === 0) return;
    const here = at === undefined ? (way > 0 ? -1 : ids.length) : ids.indexOf(at);
    const next = ids[(here + way + ids.length) % ids.length];
    go(withQuery(runPath(run, 'findings', String(next)), carried(query.value)));
  };
  useKeys(
    [
      { keys: 'n', text: 'Next finding', run: () => step(1) },
      { keys: 'N', text: 'Previous finding', run: () => step(-1) },
    ],
    [run, ids.join(), at],
  );
}

/** @param {Findings} list @param {boolean} ended the run */
function findingsNote(list, ended) {
  return [
    `${count(list.open.length)} ${ended ? 'at the end' : 'open'}`,
    `${count(list.recovered.length)} recovered`,
  ].join(', ');
}

/** Never an empty page: what looked, and over how many steps. @param {Findings} list */
export function noFindings(list) {
  const ran = list.detectors.filter((one) => one.state !== 'skipped').length;
  if (ran === 0)
    return list.steps > 0
      ? `No findings yet: no detector has looked at these ${count(list.steps)} steps`
      : 'No findings yet: no step has been seen';
  const skipped = list.detectors.length - ran;
  return `No findings in ${count(list.steps)} steps. ${plural(ran, 'detector')} ran, ${count(skipped)} ${skipped === 1 ? 'was' : 'were'} skipped`;
}

/** @param {{numbers: import('../../types/api.js').Number[]}} props */
function Numbers({ numbers }) {
  return t.dl(
    { class: 'numbers card' },
    numbers.map((one) =>
      t.div(
        { key: one.key },
        t.dt(null, one.label),
        t.dd(
          null,
          t.span(
            { class: 'figure' },
            one.value === null ? 'not known' : one.unit === 'ratio' ? figure(one.value * 100) : figure(one.value),
          ),
          ' ',
          t.span({ class: 'unit' }, one.value === null ? '' : one.unit === 'ratio' ? '%' : one.unit),
        ),
        t.dd(
          { class: 'faint' },
          one.change_ratio !== null && Math.abs(one.change_ratio) >= 0.005
            ? t.b({ class: one.change_ratio > 0 ? 'bad' : undefined }, change(one.change_ratio), ' ')
            : null,
          one.reference_text,
        ),
      ),
    ),
  );
}

/** Where else the run is: its runs in trackers, and its labels; nothing where it has none. @param {{trackers: import('../../types/api.js').TrackerRun[], tags: {[name: string]: string}}} props */
function Elsewhere({ trackers, tags }) {
  const labels = Object.entries(tags);
  if (trackers.length + labels.length === 0) return null;
  return t.ul(
    { class: 'elsewhere', 'aria-label': 'Trackers and labels' },
    trackers.map((one) => t.li({ key: one.tracker }, `${one.title} `, el(TrackerName, { one }))),
    labels.map(([name, value]) =>
      t.li({ key: `tag ${name}` }, value ? `${name} ` : '', el(Outside, { address: value, text: value || name })),
    ),
  );
}

/** @param {{one: import('../../types/api.js').TrackerRun}} props */
function TrackerName({ one }) {
  const name = [one.project, one.name || one.run].filter(Boolean).join(' / ');
  return one.page
    ? el(Outside, { address: one.page, text: name })
    : t.span({ title: [one.run, one.store].filter(Boolean).join(' in ') }, name, one.store ? ` in ${one.store}` : '');
}

/** A link out of here, where a text is an address. @param {{address: string, text: string}} props */
function Outside({ address, text }) {
  return /^https?:\/\//.test(address)
    ? t.a({ href: address, rel: 'noreferrer' }, text)
    : t.span({ class: 'pill' }, text);
}

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
          load: () => import('../parts/area.js'),
          pick: 'AreaPanel',
          props: { run, topic, area },
        })
      : null,
    selected
      ? el(Lazy, {
          key: 'cell',
          load: () => import('../parts/cell.js'),
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
          t.span({
            key: 'b',
            class: 'rampbar',
            style: { background: gradientOf(dark, usualOf(map).cell) },
            'aria-hidden': 'true',
          }),
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

/** One colour per part on every page. @type {Record<string, [string, string]>} */
const PARTS = {
  data: ['data', 'Data'],
  forward: ['fwd', 'Forward'],
  backward: ['bwd', 'Backward'],
  communication: ['comm', 'Exposed communication'],
  exposed_communication: ['comm', 'Exposed communication'],
  blocked: ['wait', 'Blocked on peers'],
  waiting: ['wait', 'Waiting for the slowest'],
  wait: ['wait', 'Waiting for the slowest'],
  optimizer: ['opt', 'Optimizer'],
  checkpoint: ['opt', 'Checkpoint'],
  evaluation: ['opt', 'Evaluation'],
  other: ['other', 'Other'],
};

/** Colour and name of a part of a step. @param {string} part @returns {[string, string]} */
export function look(part) {
  return PARTS[part] ?? ['other', part];
}

const BUDGET_SHOWN = 5;

/** @param {{run: string, topic: string | null}} props */
export function BudgetCard({ run, topic }) {
  const answer = /** @type {import('../api.js').Answer<Budget>} */ (
    useApi(runPath(run, 'budget'), { topic, on: ['steps', 'verdict'] })
  );
  const data = answer.data;
  const [all, setAll] = useState(false);
  const most = Math.max(1e-9, ...(data?.rows.map((row) => row.total_ms) ?? []));
  const used = data ? data.parts.filter((part) => data.rows.some((row) => row.parts[part] > 0)) : [];
  return el(
    Card,
    { title: 'Where a step goes', note: data && data.rows.length > 0 ? data.text : '' },
    Loaded({
      answer,
      height: 150,
      what: 'the step budget',
      children: (budget) =>
        budget.rows.length === 0
          ? t.p({ class: 'note padded' }, budget.text || 'No finished step yet.')
          : t.div(
              { class: 'budget' },
              (all ? budget.rows : budget.rows.slice(0, BUDGET_SHOWN)).map((row) =>
                el(BudgetBar, { key: row.label, row, parts: used, most, run }),
              ),
              budget.rows.length > BUDGET_SHOWN
                ? t.button(
                    { type: 'button', class: 'link more', onClick: () => setAll(!all) },
                    all ? 'Show fewer' : `Show ${budget.rows.length - BUDGET_SHOWN} more, from most self time to least`,
                  )
                : null,
              t.ul(
                { class: 'partlegend' },
                used.map((part) =>
                  t.li(
                    { key: part },
                    t.span({ class: `swatch t-${look(part)[0]}`, 'aria-hidden': 'true' }),
                    look(part)[1],
                  ),
                ),
              ),
            ),
    }),
  );
}

/** @param {{row: BudgetRow, parts: string[], most: number, run: string}} props */
function BudgetBar({ row, parts, most, run }) {
  const shown = parts
    .filter((part) => row.parts[part] > 0)
    .map((part) => `${look(part)[1]} ${duration(row.parts[part])}`);
  return t.div(
    { class: 'bar' },
    t.span(
      { class: 'barlabel' },
      row.rank === null ? row.label : t.a({ class: 'quiet', href: runPath(run, 'ranks', String(row.rank)) }, row.label),
    ),
    t.span(
      { class: 'bartrack', role: 'img', 'aria-label': `${row.label}: ${shown.join(', ')}` },
      parts.map((part) => {
        const share = (row.parts[part] ?? 0) / most;
        if (!(share > 0)) return null;
        return t.span(
          {
            key: part,
            class: `seg t-${look(part)[0]}`,
            title: `${look(part)[1]}: ${duration(row.parts[part])}`,
            style: { width: `${share * 100}%` },
          },
          share > 0.1 ? figure(row.parts[part]) : '',
        );
      }),
    ),
    t.span({ class: 'bartotal' }, duration(row.total_ms)),
  );
}
