/** Ranks by steps: the large map of any phase, and where every rank is now. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { bytes, count, plural, words } from '../format.js';
import { setTitle } from '../page.js';
import { Card, Loaded, useHeld, When } from '../parts/bits.js';
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
      ranks: overview.data?.run.world_size ?? 0,
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
    { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Ranks' },
    t.table(
      { class: 'table' },
      t.thead(
        null,
        t.tr(
          null,
          t.th(null, 'Rank'),
          t.th(null, 'State'),
          t.th(null, 'Host'),
          staged ? t.th({ class: 'num' }, 'Stage') : null,
          t.th({ class: 'num' }, 'Step'),
          t.th(null, 'Phase'),
          t.th({ class: 'num' }, 'CPU'),
          t.th({ class: 'num' }, 'Memory'),
          t.th({ class: 'num' }, ended ? 'Last record' : 'Last heard'),
          t.th(null, 'End'),
        ),
      ),
      t.tbody(
        null,
        rows.map((rank) =>
          t.tr(
            { key: rank.rank, class: rank.rank === selected ? 'here' : '' },
            t.td(
              { class: 'nowrap' },
              t.a(
                { href: withQuery(runPath(run, 'ranks', String(rank.rank)), carried(query.value)) },
                `Rank ${count(rank.rank)}`,
              ),
            ),
            t.td(
              { class: 'nowrap' },
              t.span({ class: `state is-${rank.state}` }, t.span({ class: 'dot', 'aria-hidden': 'true' }), rank.state),
            ),
            t.td(
              { class: 'clip', title: rank.host },
              rank.host,
              rank.local_rank === null ? null : t.span({ class: 'faint' }, ` local ${rank.local_rank}`),
            ),
            staged ? t.td({ class: 'num' }, rank.stage === null ? '–' : count(rank.stage)) : null,
            t.td({ class: 'num' }, rank.step ? count(rank.step) : t.span({ class: 'faint' }, 'none')),
            t.td(null, rank.phase ? words(rank.phase) : t.span({ class: 'faint' }, '–')),
            t.td({ class: 'num nowrap' }, rank.cpu_seconds === null ? '–' : `${count(rank.cpu_seconds)} s`),
            t.td({ class: 'num nowrap' }, bytes(rank.rss_bytes)),
            t.td({ class: 'num nowrap' }, el(When, { ms: rank.last_seen_ms, ended })),
            t.td({ class: 'wide' }, rank.exit_text || t.span({ class: 'faint' }, '–')),
          ),
        ),
      ),
    ),
    sorted.length > rows.length
      ? t.p(
          { class: 'note padded' },
          `First ${count(rows.length)} of ${count(sorted.length)} ranks. `,
          t.button({ type: 'button', class: 'link', onClick: () => setAll(true) }, 'Show all'),
        )
      : null,
  );
}
