/** The agent itself: what it watches in each rank and why, what it lost, and what one may ask of it. */

import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, dateTime, percent, plural, rankWords } from '../format.js';
import { setTitle } from '../page.js';
import { CappedNote, Card, Icon, Problem, Skeleton, Table } from '../parts/bits.js';
import { AskPanel, CommandList } from '../parts/commands.js';
import { query } from '../router.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';

/** @typedef {import('../../types/api.js').AgentAnswer} AgentAnswer */
/** @typedef {import('../../types/api.js').Commands} Commands */
/** @typedef {import('../../types/api.js').SourceRow} SourceRow */

const OPEN_MS = 1000;

/** @param {import('../main.js').PageProps} props */
export function Page({ run, topic }) {
  const path = runPath(run, 'agent');
  const answer = /** @type {import('../api.js').Answer<AgentAnswer>} */ (
    useApi(path, { topic, on: ['ranks', 'events', 'commands'] })
  );
  const data = answer.data;
  useEffect(() => setTitle(data?.text ?? 'Agent', run), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, {
          error: answer.error,
          retry: answer.refresh,
          what: 'the agent',
        })
      : el(Skeleton, { height: 240, waitsFor: 'the agent' });
  return t.div(
    { class: 'stack' },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, data.text),
      data.alone.length > 0
        ? t.p(
            { class: 'note' },
            `${rankWords(data.alone)}: switched on alone, so collectives are not matched with those of the peers.`,
          )
        : null,
    ),
    el(Asked, { run, topic, data }),
    el(Sources, { data, path }),
    data.changes.length > 0 ? el(Changes, { data }) : null,
    el(Losses, { data }),
  );
}

/** @param {{run: string, topic: string | null, data: AgentAnswer}} props */
function Asked({ run, topic, data }) {
  const path = runPath(run, 'commands');
  const answer = /** @type {import('../api.js').Answer<Commands>} */ (
    useApi(path, {
      topic,
      on: ['commands'],
      everyMs: data.is_live ? OPEN_MS * 2 : 0,
    })
  );
  const commands = answer.data?.commands ?? [];
  return [
    data.is_live
      ? el(
          Card,
          {
            title: 'Ask the ranks',
            note: 'the collector of each node hears of it within a second or two',
          },
          el(AskPanel, {
            run,
            data,
            ranks: query.value.for ?? '',
            asked: answer.refresh,
          }),
        )
      : null,
    data.is_live || commands.length > 0
      ? el(
          Card,
          {
            title: 'Requests',
            api: path,
            note: answer.data?.capped
              ? `the newest ${count(answer.data.capped.shown)} of ${count(answer.data.capped.total)}`
              : 'newest first: who asked, and what became of it',
          },
          answer.error
            ? el(Problem, {
                error: answer.error,
                retry: answer.refresh,
                what: 'the requests',
              })
            : commands.length > 0
              ? el(CommandList, { run, commands })
              : t.p({ class: 'note padded' }, 'Nothing was asked yet.'),
        )
      : null,
  ];
}

const STATE_MARK = {
  used: 'ok',
  waits: 'info',
  skipped: 'unknown',
  off: 'unknown',
  failed: 'critical',
};
const STATE_WORD = {
  used: 'in use',
  waits: 'waits',
  skipped: 'skipped',
  off: 'switched off',
  failed: 'failed',
};

/** @param {{data: AgentAnswer, path: string}} props */
function Sources({ data, path }) {
  return el(
    Card,
    {
      title: 'What it watches',
      note: `the source of each hook, ${plural(data.num_ranks, 'rank')}`,
      tools: t.a({ href: csvHref(path) }, 'CSV'),
    },
    data.sources.length === 0
      ? t.p({ class: 'note padded' }, 'No rank has registered yet.')
      : Table({
          label: 'Sources of the agent',
          class: 'sources',
          rows: data.sources,
          keyOf: (row) => `${row.hook} ${row.source} ${row.reason}`,
          rowProps: (row) => ({ class: row.state === 'used' ? '' : 'quiet' }),
          columns: [
            { label: 'Hook', class: 'nowrap', cell: (row) => row.hook },
            { label: 'State', class: 'w-state', cell: (row) => el(SourceState, { state: row.state }) },
            { label: 'Ranks', class: 'nowrap', cell: (row) => row.ranks_text },
            {
              label: 'Source, or why not',
              class: 'wide',
              cell: (row) => (row.state === 'off' ? '' : row.reason || row.source),
            },
          ],
        }),
    el(CappedNote, { capped: data.losses_capped, noun: 'reasons' }),
  );
}

/** @param {{state: SourceRow['state']}} props */
function SourceState({ state }) {
  return t.span(
    { class: `severity is-${STATE_MARK[state]}` },
    el(Icon, { name: STATE_MARK[state] }),
    t.span(null, STATE_WORD[state]),
  );
}

/** @param {{data: AgentAnswer}} props */
function Changes({ data }) {
  return el(
    Card,
    {
      title: 'What was left out',
      note: 'above their budget, or where the server does not keep up, all ranks record one step in 2, 4, 8 … whole, the same ones',
    },
    Table({
      label: 'What was left out',
      frame: 'short',
      rows: data.changes,
      columns: [
        { label: 'When', class: 'nowrap', cell: (one) => dateTime(one.time_ms) },
        { label: 'Step', class: 'num', cell: (one) => count(one.step) },
        { label: 'Rank', class: 'num', cell: (one) => (one.rank < 0 ? 'node' : one.rank) },
        { label: 'From', cell: (one) => one.old },
        { label: 'To', cell: (one) => one.new },
        {
          label: 'Cost',
          class: 'num nowrap',
          cell: (one) => (one.overhead_ratio === null ? '–' : percent(one.overhead_ratio)),
        },
        {
          label: 'Budget',
          class: 'num nowrap',
          cell: (one) => (one.budget_ratio === null ? '–' : percent(one.budget_ratio)),
        },
        { label: 'Why', class: 'wide', cell: (one) => one.why },
      ],
    }),
    el(CappedNote, { capped: data.changes_capped, noun: 'changes' }),
  );
}

/** @param {{data: AgentAnswer}} props */
function Losses({ data }) {
  return el(
    Card,
    {
      title: 'What was lost',
      note: 'counted by reason; what is not here was kept',
    },
    data.losses.length === 0
      ? t.p({ class: 'note padded' }, 'Nothing, as far as every collector knows.')
      : Table({
          label: 'What was lost',
          frame: 'short',
          rows: data.losses,
          keyOf: (one) => `${one.host} ${one.rank} ${one.source} ${one.reason}`,
          columns: [
            { label: 'Where', class: 'nowrap', cell: (one) => (one.rank >= 0 ? `rank ${one.rank}` : one.host) },
            { label: 'What', cell: (one) => one.source },
            { label: 'Why', class: 'wide', cell: (one) => one.reason },
            { label: 'How many', class: 'num', cell: (one) => count(one.count) },
          ],
        }),
  );
}
