/** Ranks by steps: the large map of any phase, and where every rank is now. */

import { useEffect, useRef } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { bytes, count, kindWords, plural, words } from '../format.js';
import { useHeld } from '../live.js';
import { setTitle } from '../page.js';
import { Card, Loaded, Severity, Table, When } from '../parts/bits.js';
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
export const BAD = ['silent', 'stuck', 'failed']; // the worst last
const SEVERITIES = ['info', 'warning', 'critical'];

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
          note: shown
            ? `${plural(shown.ranks.length, 'rank')}, the worst first: named by a finding, failed, stuck, silent, then the furthest behind`
            : '',
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
  const bad = data.ranks.filter((rank) => BAD.includes(rank.state));
  if (bad.length === 0) return `${plural(data.ranks.length, 'rank')}, none stuck, failed or silent`;
  return bad.length === 1
    ? `Rank ${bad[0].rank} is ${bad[0].state}`
    : `${count(bad.length)} of ${count(data.ranks.length)} ranks are stuck, failed or silent`;
}

/** What ranks have to be looked at for, the worst first. @param {RankRow[]} ranks @param {number | null | undefined} selected */
export function worstFirst(ranks, selected) {
  const grave = (/** @type {RankRow} */ rank) => [
    rank.rank === selected ? 1 : 0,
    SEVERITIES.indexOf(rank.finding_severity ?? ''),
    BAD.indexOf(rank.state),
    -rank.step,
    -rank.rank,
  ];
  return ranks
    .map((rank) => ({ rank, grave: grave(rank) }))
    .sort((a, b) => {
      const at = a.grave.findIndex((one, i) => one !== b.grave[i]);
      return at < 0 ? 0 : b.grave[at] - a.grave[at];
    })
    .map(({ rank }) => rank);
}

/** @param {{ranks: RankRow[], run: string, ended: boolean}} props */
export function RankTable({ ranks, run, ended }) {
  const selected = readRank(query.value.sel);
  const staged = ranks.some((rank) => rank.stage !== null);
  const named = ranks.some((rank) => rank.finding_id !== null);
  return Table({
    label: 'Ranks',
    rows: worstFirst(ranks, selected),
    most: SHOWN,
    noun: 'ranks',
    keyOf: (rank) => rank.rank,
    rowProps: (rank) => ({ class: rank.rank === selected ? 'here' : '' }),
    columns: [
      {
        label: 'Rank',
        class: 'nowrap',
        by: ({ rank }) => rank,
        least: true,
        cell: ({ rank }) =>
          t.a({ href: withQuery(runPath(run, 'ranks', String(rank)), carried(query.value)) }, `Rank ${count(rank)}`),
      },
      {
        label: 'State',
        class: 'nowrap',
        by: ({ state }) => BAD.indexOf(state),
        cell: ({ state }) =>
          t.span({ class: `state is-${state}` }, t.span({ class: 'dot', 'aria-hidden': 'true' }), state),
      },
      named && {
        label: 'Finding',
        class: 'nowrap',
        by: ({ finding_severity: severity }) => SEVERITIES.indexOf(severity ?? ''),
        cell: ({ finding_id: id, finding_kind: kind, finding_severity: severity }) =>
          id === null || severity === null
            ? t.span({ class: 'faint' }, '–')
            : t.a(
                { href: runPath(run, 'findings', String(id)) },
                el(Severity, { severity, text: kindWords(kind ?? '') }),
              ),
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
      staged && {
        label: 'Stage',
        class: 'num',
        by: ({ stage }) => stage,
        least: true,
        cell: ({ stage }) => (stage === null ? '–' : count(stage)),
      },
      {
        label: 'Step',
        class: 'num',
        by: ({ step }) => step,
        least: true,
        cell: ({ step }) => (step ? count(step) : t.span({ class: 'faint' }, 'none')),
      },
      { label: 'Phase', cell: ({ phase }) => (phase ? words(phase) : t.span({ class: 'faint' }, '–')) },
      {
        label: 'CPU',
        class: 'num nowrap',
        by: ({ cpu_seconds: cpu }) => cpu,
        cell: ({ cpu_seconds: cpu }) => (cpu === null ? '–' : `${count(cpu)} s`),
      },
      { label: 'Memory', class: 'num nowrap', by: (rank) => rank.rss_bytes, cell: (rank) => bytes(rank.rss_bytes) },
      {
        label: ended ? 'Last record' : 'Last heard',
        class: 'num nowrap',
        by: (rank) => rank.last_seen_ms,
        least: true,
        cell: (rank) => el(When, { ms: rank.last_seen_ms, ended }),
      },
      { label: 'End', class: 'wide', cell: (rank) => rank.exit_text || t.span({ class: 'faint' }, '–') },
    ],
  });
}
