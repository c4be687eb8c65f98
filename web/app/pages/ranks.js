/** Ranks by steps: the large map of any phase, and where every rank is now. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { bytes, count, plural, words } from '../format.js';
import { useHeld } from '../live.js';
import { setTitle } from '../page.js';
import { Card, Loaded, Table, When } from '../parts/bits.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { carried, readRank, runPath, withQuery } from '../url.js';
import { MapCard } from './overview.js';

/** @typedef {import('../../types/api.js').Ranks} Ranks */
/** @typedef {import('../../types/api.js').RankRow} RankRow */

/** What the map can show. @type {[string, string][]} */
const METRICS = [
  ['own_work', 'Self time'],
  ['step', 'Whole step'],
  ['data', 'Data'],
  ['forward', 'Forward'],
  ['backward', 'Backward'],
  ['optimizer', 'Optimizer'],
  ['blocked', 'Blocked on peers'],
];
const SHOWN = 200;
const BAD = new Set(['stuck', 'failed', 'silent']);

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, topic, overview, ended }) {
  const path = runPath(run, 'ranks');
  const answer = /** @type {import('../api.js').Answer<Ranks>} */ (useApi(path, { topic, on: ['ranks', 'steps'] }));
  const list = useRef(/** @type {HTMLDivElement | null} */ (null));
  const { shown } = useHeld(answer.data, list, path);
  const metric = query.value.metric || 'own_work';
  const sentence = overview.data?.verdict?.ranks.length ? overview.data.verdict.what : ranksSentence(shown);
  useEffect(() => setTitle(sentence || 'Ranks', run), [sentence]);
  return t.div(
    { class: 'stack' },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, sentence || 'Ranks by steps'),
      overview.data ? t.p({ class: 'faint' }, overview.data.coverage.text) : null,
    ),
    el(MapCard, {
      run,
      topic,
      maxHeight: 480,
      overview: overview.data,
      metric,
      tools: t.select(
        {
          key: 'm',
          'aria-label': 'What the map shows',
          value: metric,
          onChange: (event) =>
            setQuery({ metric: event.currentTarget.value === 'own_work' ? null : event.currentTarget.value }),
        },
        METRICS.map(([name, title]) => t.option({ key: name, value: name }, title)),
      ),
    }),
    t.div(
      { ref: list },
      el(
        Card,
        {
          title: ended ? 'Where every rank was' : 'Where every rank is',
          note: shown ? plural(shown.ranks.length, 'rank') : '',
          tools: t.a({ href: csvHref(path) }, 'CSV'),
        },
        Loaded({
          answer: { ...answer, data: shown },
          height: 160,
          what: 'the ranks',
          children: (data) => el(RankTable, { ranks: data.ranks, run, ended }),
        }),
      ),
    ),
  );
}

/** @param {Ranks | null} data */
export function ranksSentence(data) {
  if (!data) return '';
  if (data.ranks.length === 0) return 'No rank has registered yet';
  const bad = data.ranks.filter((rank) => BAD.has(rank.state));
  if (bad.length === 0) return `${plural(data.ranks.length, 'rank')}, none stuck, failed or silent`;
  return bad.length === 1
    ? `Rank ${bad[0].rank} is ${bad[0].state}`
    : `${count(bad.length)} of ${count(data.ranks.length)} ranks are stuck, failed or silent`;
}

/** @param {{ranks: RankRow[], run: string, ended: boolean}} props */
function RankTable({ ranks, run, ended }) {
  const [all, setAll] = useState(false);
  const selected = readRank(query.value.sel);
  const attention = (/** @type {RankRow} */ rank) => (rank.rank === selected ? -1 : BAD.has(rank.state) ? 0 : 1);
  const sorted = [...ranks].sort((a, b) => attention(a) - attention(b) || a.rank - b.rank);
  const rows = all ? sorted : sorted.slice(0, SHOWN);
  const staged = ranks.some((rank) => rank.stage !== null);
  return t.div(
    null,
    Table({
      label: 'Ranks',
      rows,
      keyOf: (rank) => rank.rank,
      rowProps: (rank) => ({ class: rank.rank === selected ? 'here' : '' }),
      columns: [
        {
          label: 'Rank',
          class: 'nowrap',
          cell: ({ rank }) =>
            t.a({ href: withQuery(runPath(run, 'ranks', String(rank)), carried(query.value)) }, `Rank ${count(rank)}`),
        },
        {
          label: 'State',
          class: 'nowrap',
          cell: ({ state }) =>
            t.span({ class: `state is-${state}` }, t.span({ class: 'dot', 'aria-hidden': 'true' }), state),
        },
        {
          label: 'Host',
          class: 'clip',
          title: (rank) => rank.host,
          cell: (rank) => [
            rank.host,
            rank.local_rank === null ? null : t.span({ class: 'faint' }, ` local ${rank.local_rank}`),
          ],
        },
        staged && { label: 'Stage', class: 'num', cell: ({ stage }) => (stage === null ? '–' : count(stage)) },
        {
          label: 'Step',
          class: 'num',
          cell: ({ step }) => (step ? count(step) : t.span({ class: 'faint' }, 'none')),
        },
        { label: 'Phase', cell: ({ phase }) => (phase ? words(phase) : t.span({ class: 'faint' }, '–')) },
        {
          label: 'CPU',
          class: 'num nowrap',
          cell: ({ cpu_seconds: cpu }) => (cpu === null ? '–' : `${count(cpu)} s`),
        },
        { label: 'Memory', class: 'num nowrap', cell: (rank) => bytes(rank.rss_bytes) },
        {
          label: ended ? 'Last record' : 'Last heard',
          class: 'num nowrap',
          cell: (rank) => el(When, { ms: rank.last_seen_ms, ended }),
        },
        { label: 'End', class: 'wide', cell: (rank) => rank.exit_text || t.span({ class: 'faint' }, '–') },
      ],
    }),
    sorted.length > rows.length
      ? t.p(
          { class: 'note padded' },
          `First ${count(rows.length)} of ${count(sorted.length)} ranks. `,
          t.button({ type: 'button', class: 'link', onClick: () => setAll(true) }, 'Show all'),
        )
      : null,
  );
}
