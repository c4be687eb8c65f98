/** All runs together: what is live, hosts over runs, rank-hours by week, agents that are silent. */

import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, kindWords, percent, plural, words } from '../format.js';
import { setTitle } from '../page.js';
import { Ago, CappedNote, Card, Problem, Severity, Skeleton, Table } from '../parts/bits.js';
import { Causes, Projects, Weeks } from '../parts/fleetweeks.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Fleet} Fleet */
/** @typedef {import('../../types/api.js').FleetHost} Host */

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
      frame: 'short',
      rows: data.silent,
      keyOf: (one) => `${one.run_id} ${one.host}`,
      columns: [
        {
          label: 'Host',
          class: 'nowrap',
          cell: (one) => t.a({ href: runPath(one.run_id, 'nodes', one.host) }, one.host),
        },
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
            { label: 'Crashed or hung', class: 'nowrap', cell: (host) => share(host.num_failed, host.num_runs) },
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
          t.span({ class: 'faint' }, ` ${kindWords(one.kind).toLowerCase()}, `),
          t.a({ href: runPath(one.run_id, 'nodes', host.host) }, 'the node'),
        ),
      ),
    host.num_named > 3 ? t.span({ key: 'more', class: 'faint block' }, `and ${count(host.num_named - 3)} more`) : null,
  ];
}
