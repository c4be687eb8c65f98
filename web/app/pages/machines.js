/** The machines: what happened to them, which sources work on each, and their samples over time. */

import { Fragment } from 'preact';
import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { dateTime, percent, ranges, rankWords, words } from '../format.js';
import { setTitle } from '../page.js';
import { alike } from '../parts/alike.js';
import { Ago, CappedNote, Card, Empty, Icon, Problem, Seen, Skeleton, Table } from '../parts/bits.js';
import { GROUPS, SampleGroup, SPANS, spanStart } from '../parts/machine.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Machines} Machines */
/** @typedef {import('../../types/api.js').Machine} Machine */
/** @typedef {import('../../types/api.js').MachineSource} MachineSource */

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, topic, ended }) {
  const path = runPath(run, 'machines');
  const answer = /** @type {import('../api.js').Answer<Machines>} */ (useApi(path, { topic, on: ['events'] }));
  const data = answer.data;
  useEffect(() => setTitle(data?.text ?? 'Machines', run), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the machines' })
      : el(Skeleton, { height: 240, waitsFor: 'the machines' });
  const chosen = data.machines.find((one) => one.host === query.value.host) ?? data.machines[0];
  return t.div(
    { class: 'stack' },
    t.header({ class: 'pagehead' }, t.h1({ id: 'verdict' }, data.text), chosen ? el(Span, {}) : null),
    data.events.length > 0 ? el(Events, { data }) : null,
    data.machines.length > 1 ? el(Choice, { run, data, chosen, path }) : null,
    chosen
      ? el(OneMachine, { key: chosen.host, run, machine: chosen, ended })
      : el(Card, { title: 'Machines' }, el(Empty, { title: 'The collector of a node sends samples once it runs.' })),
  );
}

/** How far back the charts reach: a long run has more samples than a reader wants to wait for. */
export function Span() {
  const here = query.value.span in SPANS ? query.value.span : 'hour';
  return t.nav(
    { class: 'actions', 'aria-label': 'Time shown' },
    Object.entries(SPANS).map(([name, { title }]) =>
      t.button(
        {
          key: name,
          type: 'button',
          class: 'button small',
          'aria-pressed': name === here,
          onClick: () => setQuery({ span: name === 'hour' ? null : name }, { replace: true }),
        },
        title,
      ),
    ),
  );
}

/** @param {{data: Machines}} props */
export function Events({ data }) {
  return el(
    Card,
    { title: 'What happened', note: 'newest first, as the driver, the kernel or the control group reported it' },
    Table({
      label: 'What happened',
      frame: 'short',
      rows: data.events,
      columns: [
        { label: 'When', class: 'nowrap', cell: (one) => (one.time_ms === null ? 'unknown' : dateTime(one.time_ms)) },
        { label: 'Machine', cell: (one) => one.host || 'unknown' },
        { label: 'What', class: 'wide', title: (one) => one.fields.text ?? '', cell: (one) => one.text },
        { label: 'Rank', cell: (one) => (one.rank === null ? 'none known' : rankWords([one.rank])) },
        { label: 'Reported by', cell: (one) => one.fields.seen_in ?? 'unknown' },
      ],
    }),
    el(CappedNote, { capped: data.capped, noun: 'events' }),
  );
}

/** @param {{run: string, data: Machines, chosen: Machine, path: string}} props */
function Choice({ run, data, chosen, path }) {
  return el(
    Card,
    { title: 'Machines', note: 'choose one to see its samples', tools: t.a({ href: csvHref(path) }, 'CSV') },
    Table({
      label: 'Machines',
      rows: data.machines,
      keyOf: (one) => one.host,
      columns: [
        {
          label: 'Machine',
          cell: (one) =>
            t.a(
              {
                href: withQuery(runPath(run, 'machines'), { host: one.host }),
                'aria-current': one === chosen ? 'true' : undefined,
              },
              one === chosen ? t.b(null, one.host) : one.host,
            ),
        },
        { label: 'Ranks', cell: (one) => (one.ranks.length > 0 ? rankWords(one.ranks) : 'none known') },
        { label: 'GPUs', cell: (one) => (one.gpus.length > 0 ? String(one.gpus.length) : 'none known') },
        { label: 'Slowed', cell: (one) => slowedWords(one) || 'none seen' },
        { label: 'Sources', cell: (one) => sourcesWords(one.sources) },
        { label: 'Last sample', cell: (one) => el(Ago, { ms: one.last_ms }) },
        { cell: (one) => t.a({ href: runPath(run, 'nodes', one.host), title: `The page of ${one.host}` }, 'Its page') },
      ],
    }),
  );
}

/** @param {Machine} machine */
function slowedWords(machine) {
  const slowed = machine.gpus.filter((gpu) => Object.keys(gpu.slowed).length > 0);
  return gpuWords(slowed.map((gpu) => gpu.gpu));
}

/** @param {number[]} gpus */
function gpuWords(gpus) {
  return gpus.length === 0 ? '' : `${gpus.length === 1 ? 'GPU' : 'GPUs'} ${ranges(gpus)}`;
}

/** @param {MachineSource[]} sources */
function sourcesWords(sources) {
  if (sources.length === 0) return 'not reported';
  const working = sources.filter((one) => one.state === 'works' || one.state === 'slowed').length;
  return `${working} of ${sources.length} work`;
}

/** @param {{run: string, machine: Machine, ended: boolean}} props */
export function OneMachine({ run, machine, ended }) {
  const groups = GROUPS.filter((group) => machine.kinds.includes(group.kind));
  const fromMs = spanStart(query.value.span, machine.last_ms);
  return el(
    Fragment,
    {},
    machine.gpus.length > 0 ? el(Gpus, { machine }) : null,
    groups.map((group) =>
      el(Seen, {
        key: group.title,
        height: 220,
        children: () => el(SampleGroup, { run, host: machine.host, group, fromMs, ended }),
      }),
    ),
    el(Sources, { machine }),
  );
}

/** @param {{machine: Machine}} props */
function Gpus({ machine }) {
  return el(
    Card,
    {
      title: `GPUs of ${machine.host}`,
      note: machine.driver ? `driver ${machine.driver}; slowed in the last minutes` : 'slowed in the last minutes',
    },
    Table({
      label: 'GPUs',
      rows: alike(machine.gpus, (gpu) => JSON.stringify([gpu.name, gpu.bus_id, gpu.slowed])),
      keyOf: ([gpu]) => gpu.gpu,
      columns: [
        { label: 'GPU', cell: (some) => ranges(some.map((gpu) => gpu.gpu)) },
        {
          label: 'Model',
          title: ([gpu, ...more]) => (more.length > 0 ? '' : gpu.uuid),
          cell: ([gpu]) => gpu.name || 'not reported',
        },
        { label: 'PCI', cell: ([gpu]) => t.code(null, gpu.bus_id || 'not reported') },
        {
          label: 'Slowed by',
          class: 'wide',
          cell: ([gpu]) =>
            Object.entries(gpu.slowed)
              .map(([reason, share]) => `${reason}: ${percent(share)} of the time`)
              .join('; ') || 'nothing seen',
        },
      ],
    }),
  );
}

/** @type {Record<string, string>} */
const MARKS = { works: 'ok', slowed: 'info', fails: 'warning', stuck: 'warning' };

/** @param {{machine: Machine}} props */
function Sources({ machine }) {
  return el(
    Card,
    { title: `Where the samples of ${machine.host} come from`, note: 'skipped is not healthy: it is not known' },
    machine.sources.length === 0
      ? t.p({ class: 'note padded' }, 'Its collector has not reported yet.')
      : Table({
          label: 'Sources',
          rows: machine.sources,
          keyOf: (one) => one.source,
          rowProps: (one) => ({ 'data-source': one.source }),
          columns: [
            { label: 'Source', cell: (one) => words(one.source) },
            {
              label: 'State',
              class: 'nowrap',
              cell: (one) => [el(Icon, { name: MARKS[one.state] ?? 'unknown' }), ` ${one.state}`],
            },
            { label: 'Why', class: 'wide', cell: (one) => one.reason },
          ],
        }),
  );
}
