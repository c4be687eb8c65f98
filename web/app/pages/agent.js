/** The agent itself: what it watches in each rank and why, what it lost, and what one may ask of it. */

import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, dateTime, percent, plural, rankWords } from '../format.js';
import { setTitle } from '../page.js';
import { CappedNote, Card, Icon, Problem, Skeleton } from '../parts/bits.js';
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
      : t.div(
          {
            class: 'scroll',
            tabIndex: 0,
            role: 'region',
            'aria-label': 'Sources of the agent',
          },
          t.table(
            { class: 'table sources' },
            t.thead(
              null,
              t.tr(
                null,
                t.th(null, 'Hook'),
                t.th(null, 'State'),
                t.th(null, 'Ranks'),
                t.th(null, 'Source, or why not'),
              ),
            ),
            t.tbody(
              null,
              data.sources.map((row) =>
                t.tr(
                  {
                    key: `${row.hook} ${row.source} ${row.reason}`,
                    class: row.state === 'used' ? '' : 'quiet',
                  },
                  t.td({ class: 'nowrap' }, row.hook),
                  t.td({ class: 'w-state' }, el(SourceState, { state: row.state })),
                  t.td({ class: 'nowrap' }, row.ranks_text),
                  t.td({ class: 'wide' }, row.state === 'off' ? '' : row.reason || row.source),
                ),
              ),
            ),
          ),
        ),
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
    t.div(
      {
        class: 'scroll short',
        tabIndex: 0,
        role: 'region',
        'aria-label': 'What was left out',
      },
      t.table(
        { class: 'table' },
        t.thead(
          null,
          t.tr(
            null,
            t.th(null, 'When'),
            t.th({ class: 'num' }, 'Step'),
            t.th({ class: 'num' }, 'Rank'),
            t.th(null, 'From'),
            t.th(null, 'To'),
            t.th({ class: 'num' }, 'Cost'),
            t.th({ class: 'num' }, 'Budget'),
            t.th(null, 'Why'),
          ),
        ),
        t.tbody(
          null,
          data.changes.map((one, i) =>
            t.tr(
              { key: i },
              t.td({ class: 'nowrap' }, dateTime(one.time_ms)),
              t.td({ class: 'num' }, count(one.step)),
              t.td({ class: 'num' }, one.rank < 0 ? 'node' : one.rank),
              t.td(null, one.old),
              t.td(null, one.new),
              t.td({ class: 'num nowrap' }, one.overhead_ratio === null ? '–' : percent(one.overhead_ratio)),
              t.td({ class: 'num nowrap' }, one.budget_ratio === null ? '–' : percent(one.budget_ratio)),
              t.td({ class: 'wide' }, one.why),
            ),
          ),
        ),
      ),
    ),
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
      : t.div(
          {
            class: 'scroll short',
            tabIndex: 0,
            role: 'region',
            'aria-label': 'What was lost',
          },
          t.table(
            { class: 'table' },
            t.thead(
              null,
              t.tr(
                null,
                t.th(null, 'Where'),
                t.th(null, 'What'),
                t.th(null, 'Why'),
                t.th({ class: 'num' }, 'How many'),
              ),
            ),
            t.tbody(
              null,
              data.losses.map((one) =>
                t.tr(
                  {
                    key: `${one.host} ${one.rank} ${one.source} ${one.reason}`,
                  },
                  t.td({ class: 'nowrap' }, one.rank >= 0 ? `rank ${one.rank}` : one.host),
                  t.td(null, one.source),
                  t.td({ class: 'wide' }, one.reason),
                  t.td({ class: 'num' }, count(one.count)),
                ),
              ),
            ),
          ),
        ),
  );
}
