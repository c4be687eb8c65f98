/** All runs together: what is live, hosts over runs, rank-hours by week, agents that are silent. */

import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, figure, kindWords, percent, plural, words } from '../format.js';
import { setTitle } from '../page.js';
import { Ago, CappedNote, Card, Problem, Severity, Skeleton } from '../parts/bits.js';
import { hoursWords } from '../parts/costmaths.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Fleet} Fleet */
/** @typedef {import('../../types/api.js').LiveRun} LiveRun */
/** @typedef {import('../../types/api.js').FleetHost} Host */
/** @typedef {import('../../types/api.js').FleetWeek} Week */

const POLL_MS = 30_000; // an answer reads the ranks of 200 runs
const WEEKS = [4, 8, 13, 26];

export function Page() {
  const path = withQuery('fleet', { weeks: query.value.weeks });
  const answer = /** @type {import('../api.js').Answer<Fleet>} */ (useApi(path, { everyMs: POLL_MS }));
  const data = answer.data;
  useEffect(() => setTitle(data?.text ?? 'Fleet'), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the fleet' })
      : el(Skeleton, { height: 240, waitsFor: 'the fleet' });
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}` },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, data.text),
      t.nav(
        { class: 'actions', 'aria-label': 'Weeks looked at' },
        WEEKS.map((weeks) =>
          t.button(
            {
              key: weeks,
              type: 'button',
              class: 'button small',
              'aria-pressed': weeks === data.weeks.length,
              onClick: () => setQuery({ weeks: weeks === 8 ? null : weeks }, { replace: true }),
            },
            plural(weeks, 'week'),
          ),
        ),
      ),
    ),
    el(Live, { data }),
    data.silent.length > 0 ? el(Silent, { data }) : null,
    el(Hosts, { data, path }),
    el(Weeks, { data }),
  );
}

/** @param {string} label @param {string[]} heads those that begin with # are of numbers @param {import('../tags.js').Children} rows */
function table(label, heads, rows) {
  return t.div(
    { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': label },
    t.table(
      { class: 'table' },
      t.thead(
        null,
        t.tr(
          null,
          heads.map((head) =>
            head.startsWith('#') ? t.th({ key: head, class: 'num' }, head.slice(1)) : t.th({ key: head }, head),
          ),
        ),
      ),
      t.tbody(null, rows),
    ),
  );
}

/** @param {{data: Fleet}} props */
function Live({ data }) {
  const quiet = data.num_quiet
    ? `${plural(data.num_quiet, 'run')} never ended, and nothing came of ${data.num_quiet === 1 ? 'it' : 'them'} for a day`
    : '';
  return el(
    Card,
    {
      title: 'Live now',
      note: [data.live.length > 0 ? 'those that need attention first' : 'no run sends anything', quiet]
        .filter(Boolean)
        .join('; '),
      tools: t.a({ href: 'runs' }, 'All runs'),
    },
    data.live.length > 0
      ? table(
          'Live runs',
          ['Run', 'State', 'What is said of it', '#Ranks', '#Hosts', '#Step', '#Productive', 'Heard'],
          data.live.map((run) => el(LiveRow, { key: run.run_id, run })),
        )
      : null,
    el(CappedNote, { capped: data.live_capped, noun: 'live runs' }),
  );
}

/** @param {{run: LiveRun}} props */
function LiveRow({ run }) {
  return t.tr(
    null,
    t.td({ class: 'wide' }, t.a({ href: runPath(run.run_id) }, run.name)),
    t.td({ class: 'nowrap', title: run.status_text }, words(run.status)),
    t.td(
      { class: 'wide' },
      run.verdict ? el(Severity, { severity: run.verdict.severity, text: '' }) : null,
      run.verdict ? ' ' : null,
      run.sentence || 'nothing yet',
    ),
    t.td({ class: 'num' }, count(run.world_size)),
    t.td({ class: 'num' }, run.num_hosts > 0 ? count(run.num_hosts) : '–'),
    t.td({ class: 'num' }, count(run.step)),
    t.td(
      { class: 'num' },
      run.productive_share === null ? '–' : t.a({ href: runPath(run.run_id, 'cost') }, percent(run.productive_share)),
    ),
    t.td({ class: 'nowrap' }, el(Ago, { ms: run.received_ms })),
  );
}

/** @param {{data: Fleet}} props */
function Silent({ data }) {
  return el(
    Card,
    { title: 'Silent agents', note: 'ranks of live runs that have not ended and send nothing' },
    table(
      'Silent agents',
      ['Host', 'Run', '#Silent ranks', 'Last heard'],
      data.silent.map((one) =>
        t.tr(
          { key: `${one.run_id} ${one.host}` },
          t.td({ class: 'nowrap' }, one.host),
          t.td({ class: 'wide' }, t.a({ href: runPath(one.run_id) }, one.run_id)),
          t.td({ class: 'num' }, `${count(one.num_silent)} of ${count(one.num_ranks)}`),
          t.td({ class: 'nowrap' }, el(Ago, { ms: one.received_ms })),
        ),
      ),
    ),
    el(CappedNote, { capped: data.silent_capped, noun: 'hosts, those that are silent longest' }),
  );
}

/** @param {{data: Fleet, path: string}} props */
function Hosts({ data, path }) {
  return el(
    Card,
    {
      title: 'Hosts over runs',
      note: 'findings of weight that name a host beside others; a run on one host alone says nothing of the host',
      tools: t.a({ href: csvHref(path) }, 'CSV'),
    },
    data.hosts.length > 0
      ? table(
          'Hosts over runs',
          ['Host', 'Slow', 'Crashed first', '#Runs', '#Alone', 'Named in', 'Newest run'],
          data.hosts.map((host) => el(HostRow, { key: host.host, host })),
        )
      : t.p({ class: 'note padded' }, 'No run of these weeks has named its hosts.'),
    el(CappedNote, { capped: data.hosts_capped, noun: 'hosts, those that were named most often' }),
    el(CappedNote, { capped: data.runs_capped, noun: 'runs of these weeks, the newest, by which hosts are compared' }),
  );
}

/** @param {number} bad @param {number} runs */
function share(bad, runs) {
  if (runs === 0) return t.span({ class: 'faint' }, 'not known');
  const text = `${count(bad)} of ${count(runs)}`;
  return bad > 0 ? t.b({ class: 'bad' }, text) : t.span({ class: 'faint' }, text);
}

/** @param {{host: Host}} props */
function HostRow({ host }) {
  return t.tr(
    { 'data-host': host.host },
    t.td(
      { class: 'nowrap' },
      t.a({ href: withQuery('preflight', { node: host.host }), title: 'its preflights' }, host.host),
    ),
    t.td({ class: 'nowrap' }, share(host.num_slow, host.num_runs)),
    t.td({ class: 'nowrap' }, share(host.num_failed, host.num_runs)),
    t.td({ class: 'num' }, count(host.num_runs)),
    t.td({ class: 'num' }, count(host.num_alone)),
    t.td(
      { class: 'wide' },
      host.named.length === 0
        ? t.span({ class: 'faint' }, host.num_runs > 0 ? 'nothing' : 'nothing to compare it with')
        : [
            ...host.named
              .slice(0, 3)
              .map((one) =>
                t.span(
                  { key: one.finding, class: 'block' },
                  t.a({ href: runPath(one.run_id, 'findings', String(one.finding)), title: one.what }, one.name),
                  t.span({ class: 'faint' }, ` ${kindWords(one.kind).toLowerCase()}`),
                ),
              ),
            host.num_named > 3
              ? t.span({ key: 'more', class: 'faint block' }, `and ${count(host.num_named - 3)} more`)
              : null,
          ],
    ),
    t.td({ class: 'nowrap' }, el(Ago, { ms: host.last_ms })),
  );
}

/** @type {[string, string, (week: Week) => number][]} */
const WEEK_PARTS = [
  ['kept', 't-fwd', (week) => week.kept_rank_hours],
  ['lost', 't-lost', (week) => week.lost_rank_hours],
  ['other', 't-other', (week) => week.other_rank_hours],
  ['unknown', 't-unknown', (week) => week.unknown_rank_hours],
];

/** @param {{data: Fleet}} props */
function Weeks({ data }) {
  const most = Math.max(1e-9, ...data.weeks.map((week) => week.rank_hours));
  return el(
    Card,
    {
      title: 'Rank-hours by week',
      note: 'of the runs that began in it, from Monday, UTC; lost: straggling, waiting, restarts, work done again, stuck or failing',
      tools: WEEK_PARTS.map(([name, look]) =>
        t.span({ key: name, class: 'gridkey' }, t.span({ class: `swatch ${look}`, 'aria-hidden': 'true' }), name),
      ),
    },
    table(
      'Rank-hours by week',
      ['Week from', 'Where they went', '#All', '#Lost', '#Lost share', '#Runs', '#Not known'],
      [...data.weeks].reverse().map((week) => el(WeekRow, { key: week.begin_ms, week, most })),
    ),
    el(CappedNote, { capped: data.weeks_capped, noun: 'runs of these weeks, the newest' }),
  );
}

const day = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', year: 'numeric', timeZone: 'UTC' });

/** @param {{week: Week, most: number}} props */
function WeekRow({ week, most }) {
  const isKnown = week.num_runs > week.num_unknown;
  return t.tr(
    null,
    t.td({ class: 'nowrap' }, day.format(week.begin_ms)),
    t.td(
      { class: 'w-fall' },
      t.span(
        { class: 'weektrack' },
        WEEK_PARTS.map(([name, look, of]) =>
          of(week) > 0
            ? t.span({
                key: name,
                class: `fall ${look}`,
                title: `${name}: ${figure(of(week))} rank-hours`,
                style: { width: `${(of(week) / most) * 100}%` },
              })
            : null,
        ),
      ),
    ),
    t.td({ class: 'num nowrap' }, isKnown ? hoursWords(week.rank_hours) : '–'),
    t.td({ class: 'num nowrap' }, isKnown ? hoursWords(week.lost_rank_hours) : '–'),
    t.td(
      { class: 'num nowrap' },
      isKnown && week.rank_hours > 0 ? percent(week.lost_rank_hours / week.rank_hours) : '–',
    ),
    t.td({ class: 'num' }, count(week.num_runs)),
    t.td({ class: 'num' }, count(week.num_unknown)),
  );
}
