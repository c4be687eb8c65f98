/** All runs together: what is live, hosts over runs, rank-hours by week, agents that are silent. */

import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, figure, kindWords, percent, plural, words } from '../format.js';
import { setTitle } from '../page.js';
import { Ago, CappedNote, Card, Problem, Severity, Skeleton, Table } from '../parts/bits.js';
import { hoursWords, LOOKS, shareWords } from '../parts/costmaths.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Fleet} Fleet */
/** @typedef {import('../../types/api.js').LiveRun} LiveRun */
/** @typedef {import('../../types/api.js').FleetHost} Host */
/** @typedef {import('../../types/api.js').FleetWeek} Week */
/** @typedef {Omit<import('../../types/api.js').FleetProject, 'project'>} Hours */

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
    el(Causes, { data }),
    el(Projects, { data }),
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
      ? Table({
          label: 'Live runs',
          rows: data.live,
          keyOf: (run) => run.run_id,
          columns: [
            { label: 'Run', class: 'wide', cell: (run) => t.a({ href: runPath(run.run_id) }, run.name) },
            { label: 'State', class: 'nowrap', title: (run) => run.status_text, cell: (run) => words(run.status) },
            {
              label: 'What is said of it',
              class: 'wide',
              cell: ({ verdict, sentence }) => [
                verdict ? el(Severity, { severity: verdict.severity, text: '' }) : null,
                verdict ? ' ' : null,
                sentence || 'nothing yet',
              ],
            },
            { label: 'Ranks', class: 'num', cell: (run) => count(run.world_size) },
            { label: 'Hosts', class: 'num', cell: (run) => (run.num_hosts > 0 ? count(run.num_hosts) : '–') },
            { label: 'Step', class: 'num', cell: (run) => count(run.step) },
            {
              label: 'Productive',
              class: 'num',
              cell: ({ run_id: id, productive_share: part }) =>
                part === null ? '–' : t.a({ href: runPath(id, 'cost') }, percent(part)),
            },
            { label: 'Heard', class: 'nowrap', cell: (run) => el(Ago, { ms: run.received_ms }) },
          ],
        })
      : null,
    el(CappedNote, { capped: data.live_capped, noun: 'live runs' }),
  );
}

/** @param {{data: Fleet}} props */
function Silent({ data }) {
  return el(
    Card,
    { title: 'Silent agents', note: 'ranks of live runs that have not ended and send nothing' },
    Table({
      label: 'Silent agents',
      rows: data.silent,
      keyOf: (one) => `${one.run_id} ${one.host}`,
      columns: [
        { label: 'Host', class: 'nowrap', cell: (one) => one.host },
        { label: 'Run', class: 'wide', cell: (one) => t.a({ href: runPath(one.run_id) }, one.run_id) },
        {
          label: 'Silent ranks',
          class: 'num',
          cell: (one) => `${count(one.num_silent)} of ${count(one.num_ranks)}`,
        },
        { label: 'Last heard', class: 'nowrap', cell: (one) => el(Ago, { ms: one.received_ms }) },
      ],
    }),
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
      ? Table({
          label: 'Hosts over runs',
          rows: data.hosts,
          keyOf: (host) => host.host,
          rowProps: (host) => ({ 'data-host': host.host }),
          columns: [
            {
              label: 'Host',
              class: 'nowrap',
              cell: ({ host }) => t.a({ href: withQuery('preflight', { node: host }), title: 'its preflights' }, host),
            },
            { label: 'Slow', class: 'nowrap', cell: (host) => share(host.num_slow, host.num_runs) },
            { label: 'Crashed first', class: 'nowrap', cell: (host) => share(host.num_failed, host.num_runs) },
            { label: 'Runs', class: 'num', cell: (host) => count(host.num_runs) },
            { label: 'Alone', class: 'num', cell: (host) => count(host.num_alone) },
            { label: 'Named in', class: 'wide', cell: namedIn },
            { label: 'Newest run', class: 'nowrap', cell: (host) => el(Ago, { ms: host.last_ms }) },
          ],
        })
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

/** The newest findings that name a host. @param {Host} host */
function namedIn(host) {
  if (host.named.length === 0)
    return t.span({ class: 'faint' }, host.num_runs > 0 ? 'nothing' : 'nothing to compare it with');
  return [
    ...host.named
      .slice(0, 3)
      .map((one) =>
        t.span(
          { key: one.finding, class: 'block' },
          t.a({ href: runPath(one.run_id, 'findings', String(one.finding)), title: one.what }, one.name),
          t.span({ class: 'faint' }, ` ${kindWords(one.kind).toLowerCase()}`),
        ),
      ),
    host.num_named > 3 ? t.span({ key: 'more', class: 'faint block' }, `and ${count(host.num_named - 3)} more`) : null,
  ];
}

/** @type {[string, string, (hours: Hours) => number][]} */
const HOUR_PARTS = [
  ['kept', 't-fwd', (hours) => hours.kept_rank_hours],
  ['lost', 't-lost', (hours) => hours.lost_rank_hours],
  ['other', 't-other', (hours) => hours.other_rank_hours],
  ['unknown', 't-unknown', (hours) => hours.unknown_rank_hours],
];

/** @param {{data: Fleet}} props */
function Weeks({ data }) {
  const most = Math.max(1e-9, ...data.weeks.map((week) => week.rank_hours));
  return el(
    Card,
    {
      title: 'Rank-hours by week',
      note: [
        'of the runs that began in it, from Monday, UTC',
        data.weeks.some((week) => week.num_live > 0) ? 'of runs that are live, until now' : '',
      ]
        .filter(Boolean)
        .join('; '),
      tools: HOUR_PARTS.map(([name, look]) => el(Key, { key: name, name, look })),
    },
    Table({
      label: 'Rank-hours by week',
      rows: [...data.weeks].reverse(),
      keyOf: (week) => week.begin_ms,
      columns: [
        { label: 'Week from', class: 'nowrap', cell: weekName },
        { label: 'Where they went', class: 'w-fall', cell: (week) => hoursBar(week, most) },
        ...hoursColumns(),
      ],
    }),
    el(CappedNote, { capped: data.weeks_capped, noun: 'runs of these weeks, the newest' }),
  );
}

/** @param {{name: string, look: string}} props */
function Key({ name, look }) {
  return t.span({ class: 'gridkey' }, t.span({ class: `swatch ${look}`, 'aria-hidden': 'true' }), name);
}

/** What is known of the hours of some runs, as columns. @returns {import('../parts/bits.js').Column<any>[]} */
function hoursColumns() {
  const known = (/** @type {Hours} */ hours, /** @type {string} */ text) =>
    isKnown(hours) ? text : t.span({ class: 'faint' }, hours.num_runs > 0 ? 'not known' : '–');
  return [
    { label: 'All', class: 'num nowrap', cell: (hours) => known(hours, hoursWords(hours.rank_hours)) },
    {
      label: 'Productive',
      class: 'num nowrap',
      hint: 'Computing that is kept; kept has its communication, data and evaluation, too',
      cell: (hours) => known(hours, hoursWords(hours.productive_rank_hours)),
    },
    { label: 'Lost', class: 'num nowrap', cell: (hours) => known(hours, hoursWords(hours.lost_rank_hours)) },
    {
      label: 'Lost share',
      class: 'num nowrap',
      cell: (hours) =>
        known(hours, hours.rank_hours > 0 ? shareWords(hours.lost_rank_hours / hours.rank_hours) : 'no rank-hour'),
    },
    {
      label: 'GPUs',
      class: 'w-use',
      hint: 'Share of the time in which a kernel ran, of all GPUs of the runs’ hosts, while they were sampled',
      cell: (hours) => useBar(hours.gpu_utilization_ratio, hours.num_gpu_known, hours.num_runs),
    },
    {
      label: 'Processors',
      class: 'w-use',
      hint: 'User and system time of all processors of the runs’ hosts, while they were sampled',
      cell: (hours) => useBar(hours.cpu_utilization_ratio, hours.num_cpu_known, hours.num_runs),
    },
    { label: 'Runs', class: 'num', cell: (hours) => count(hours.num_runs) },
    { label: 'Live', class: 'num', cell: (hours) => count(hours.num_live) },
    { label: 'Cost not known', class: 'num', cell: (hours) => count(hours.num_unknown) },
  ];
}

/** What was lost, by what it was lost to. @param {{data: Fleet}} props */
function Causes({ data }) {
  const weeks = data.weeks.filter((week) => week.num_runs > 0).reverse();
  if (weeks.length === 0) return null;
  const causes = Object.keys(weeks[0].lost_by_cause);
  const most = Math.max(1e-9, ...weeks.map((week) => week.lost_rank_hours));
  return el(
    Card,
    {
      title: 'Lost rank-hours by cause',
      note: 'weeks in which a run began',
      tools: CAUSES.map(([name, look]) => el(Key, { key: name, name, look })),
    },
    Table({
      label: 'Lost rank-hours by cause',
      rows: weeks,
      keyOf: (week) => week.begin_ms,
      columns: [
        { label: 'Week from', class: 'nowrap', cell: weekName },
        {
          label: 'To what',
          class: 'w-fall',
          cell: (week) =>
            isKnown(week)
              ? track(
                  causes.map((name) => [name, LOOKS[name] ?? 't-lost', week.lost_by_cause[name]]),
                  most,
                )
              : t.span({ class: 'faint' }, 'not known'),
        },
        ...causes.map((name) => ({
          label: name.charAt(0).toUpperCase() + name.slice(1),
          class: 'num nowrap',
          cell: (/** @type {Week} */ week) => (isKnown(week) ? hoursWords(week.lost_by_cause[name]) : '–'),
        })),
      ],
    }),
  );
}

/** The looks of causes: those that one waits for, and those that one does again. */
const CAUSES = [
  ['straggling', LOOKS.straggling],
  ['waiting, bubbles', LOOKS.waiting],
  ['restarts, work done again, stuck or failing', LOOKS.restart],
];

const MOST_PROJECTS = 100;

/** The same by project, where there are several. @param {{data: Fleet}} props */
function Projects({ data }) {
  const rows = [...data.weeks]
    .reverse()
    .flatMap((week) =>
      week.projects.map((project) => ({ ...project, begin_ms: week.begin_ms, is_over: week.is_over })),
    );
  if (new Set(rows.map((row) => row.project)).size < 2) return null;
  const most = Math.max(1e-9, ...rows.map((row) => row.rank_hours));
  return el(
    Card,
    { title: 'Rank-hours by week and project', note: 'most rank-hours first in each week' },
    Table({
      label: 'Rank-hours by week and project',
      rows,
      keyOf: (row) => `${row.begin_ms} ${row.project}`,
      most: MOST_PROJECTS,
      noun: 'weeks of projects, the newest',
      columns: [
        { label: 'Week from', class: 'nowrap', cell: weekName },
        { label: 'Project', class: 'nowrap', cell: (row) => row.project },
        { label: 'Where they went', class: 'w-fall', cell: (row) => hoursBar(row, most) },
        ...hoursColumns(),
      ],
    }),
  );
}

const day = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', year: 'numeric', timeZone: 'UTC' });

/** @param {{begin_ms: number, is_over: boolean}} week */
function weekName(week) {
  return week.is_over
    ? day.format(week.begin_ms)
    : [day.format(week.begin_ms), t.span({ key: 'n', class: 'faint' }, ', not over')];
}

/** @param {Hours} hours */
function isKnown(hours) {
  return hours.num_runs > hours.num_unknown;
}

/** @param {Hours} hours @param {number} most */
function hoursBar(hours, most) {
  if (hours.num_runs > 0 && !isKnown(hours))
    return t.span({ class: 'weektrack' }, t.span({ class: 'fall t-unknown all', title: 'not known' }));
  return track(
    HOUR_PARTS.map(([name, look, of]) => [name, look, of(hours)]),
    most,
  );
}

/** @param {[string, string, number][]} parts @param {number} most */
function track(parts, most) {
  return t.span(
    { class: 'weektrack' },
    parts.map(([name, look, hours]) =>
      hours > 0
        ? t.span({
            key: name,
            class: `fall ${look}`,
            title: `${name}: ${figure(hours)} rank-hours`,
            style: { width: `${(hours / most) * 100}%` },
          })
        : null,
    ),
  );
}

/** How busy machines were, of how many runs it is known. @param {number | null} ratio @param {number} known @param {number} runs */
function useBar(ratio, known, runs) {
  if (runs === 0) return t.span({ class: 'faint' }, '–');
  if (ratio === null)
    return t.span(
      { class: 'usebar' },
      t.span({ class: 'usetrack t-unknown', 'aria-hidden': 'true' }),
      t.span({ class: 'faint' }, 'not measured'),
    );
  return t.span(
    { class: 'usebar', title: `measured in ${count(known)} of ${plural(runs, 'run')}` },
    t.span(
      { class: 'usetrack', 'aria-hidden': 'true' },
      t.span({ class: 'fall t-fwd', style: { width: `${100 * ratio}%` } }),
    ),
    percent(ratio),
    known < runs ? t.span({ class: 'faint' }, ` of ${plural(known, 'run')}`) : null,
  );
}
