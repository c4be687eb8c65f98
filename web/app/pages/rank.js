/** One rank: how it differs from its peers in a sentence, where it is in each group, its stacks, its host. */

import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { bytes, count, dateTime, duration, enteredWords, exactTime, shortPlace, words } from '../format.js';
import { setTitle } from '../page.js';
import { Card, CopyButton, Empty, Loaded, Problem, Skeleton, Table, When } from '../parts/bits.js';
import { CellPanel } from '../parts/cell.js';
import { Lazy } from '../parts/shell.js';
import { query } from '../router.js';
import { el, t } from '../tags.js';
import { carried, readCell, runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').RankDetail} RankDetail */
/** @typedef {import('../../types/api.js').Overview} Overview */

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, id, topic, overview, ended }) {
  const path = runPath(run, 'ranks', id);
  const answer = /** @type {import('../api.js').Answer<RankDetail>} */ (
    useApi(path, { topic, on: ['ranks', 'steps', 'errors'] })
  );
  const data = answer.data;
  const selected = readCell(query.value.sel);
  const sentence = data ? rankSentence(data, overview.data) : '';
  useEffect(() => setTitle(sentence || `Rank ${id}`, run), [sentence]);
  if (!data) {
    if (answer.error && answer.error.status >= 400 && answer.error.status < 500)
      return el(NoRank, { run, id, overview: overview.data, what: answer.error.detail.what });
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: `rank ${id}` })
      : el(Skeleton, { height: 240, waitsFor: `rank ${id}` });
  }
  const size = overview.data?.run.world_size ?? data.world_size ?? 0;
  return t.div(
    { class: 'stack' },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, sentence),
      t.p(
        { class: 'faint' },
        `Rank ${data.rank} on ${data.host}, process ${data.pid ?? 'unknown'}, attempt ${data.attempt}. ${ended ? 'Last record' : 'Last heard'} `,
        el(When, { ms: data.last_seen_ms, ended }),
        data.exit_text ? `. ${data.exit_text}` : '',
      ),
      t.div(
        { class: 'buttons' },
        data.rank > 0
          ? t.a(
              {
                class: 'button small',
                href: withQuery(runPath(run, 'ranks', String(data.rank - 1)), carried(query.value)),
              },
              `Rank ${data.rank - 1}`,
            )
          : null,
        data.rank + 1 < size
          ? t.a(
              {
                class: 'button small',
                href: withQuery(runPath(run, 'ranks', String(data.rank + 1)), carried(query.value)),
              },
              `Rank ${data.rank + 1}`,
            )
          : null,
        t.a({ class: 'button small', href: withQuery(runPath(run, 'ranks'), carried(query.value)) }, 'All ranks'),
        t.a({ class: 'button small', href: withQuery(runPath(run, 'logs'), { rank: data.rank }) }, 'Its logs'),
      ),
    ),
    selected && selected.rank === data.rank
      ? t.section({ class: 'card' }, el(CellPanel, { run, cell: selected }))
      : null,
    el(Card, { title: data.ended_ms ? 'At the end' : 'Now' }, el(Facts, { data })),
    el(
      Card,
      { title: 'Process groups', note: 'the last sequence this rank entered, and the last that ended' },
      el(Groups, { data }),
    ),
    data.stacks.length > 0
      ? el(
          Card,
          {
            title: 'Stacks',
            note: `innermost frame first; ${data.stacks[0].reason || 'taken'} at ${dateTime(data.stacks[0].time_ms)}`,
            tools: el(CopyButton, { text: () => data.stacks[0].text, what: 'the stacks', class: 'link' }),
          },
          t.pre({ class: 'trace', tabIndex: 0 }, data.stacks[0].text),
        )
      : null,
    el(Lazy, {
      key: id,
      load: () => import('../parts/samples.js'),
      pick: 'RankSamples',
      props: { run, rank: data.rank, host: data.host, topic },
    }),
    el(
      Card,
      {
        title: 'Last collectives',
        note: 'newest first',
        tools: t.a({ href: csvHref(withQuery(runPath(run, 'collectives', 'records'), { rank: data.rank })) }, 'CSV'),
      },
      Loaded({ answer, height: 100, what: 'the collectives', children: () => el(Records, { data }) }),
    ),
    el(
      Card,
      {
        title: 'How it is watched',
        note: 'what each hook uses, or why it is skipped',
        tools: t.a({ href: withQuery(runPath(run, 'agent'), { for: data.rank }) }, 'Take stacks, profile'),
      },
      t.dl(
        { class: 'facts tall many' },
        Object.entries(data.sources).map(([name, source]) => fact(words(name), source)),
      ),
    ),
  );
}

/** What a reader must know of this rank. @param {RankDetail} data @param {Overview | null} overview */
export function rankSentence(data, overview) {
  const verdict = overview?.verdict;
  if (verdict?.ranks.includes(data.rank)) return verdict.what;
  const what = data.finding_what;
  if (!what) return `${stateWords(data)}; no finding names it`;
  return `${stateWords(data)}: ${what}`;
}

/** @param {RankDetail} data */
function stateWords(data) {
  const name = `Rank ${count(data.rank)}`;
  if (data.state === 'failed') return `${name} failed${data.end_detail ? `: ${data.end_detail}` : ''}`;
  if (data.state === 'silent')
    return data.step ? `${name} is silent since step ${count(data.step)}` : `${name} is silent, no step was seen`;
  if (data.state === 'stuck')
    return `${name} is stuck${data.phase ? ` in ${data.phase}` : ''} at step ${count(data.step)}`;
  if (data.state === 'ended')
    return data.step ? `${name} ended after step ${count(data.step)}` : `${name} ended, no step was seen`;
  return data.step ? `${name} runs, step ${count(data.step)}` : `${name} is registered, no step yet`;
}

/** @param {{run: string, id: string, overview: Overview | null, what: string}} props */
function NoRank({ run, id, overview, what }) {
  const size = overview?.run.world_size;
  return t.div(
    { class: 'card padded' },
    t.h1(null, `There is no rank ${id}`),
    el(
      Empty,
      { title: size ? `This run has ranks 0 to ${size - 1}.` : what },
      t.a({ class: 'button', href: runPath(run, 'ranks') }, 'All ranks'),
    ),
  );
}

/** @param {{data: RankDetail}} props */
function Facts({ data }) {
  return t.dl(
    { class: 'facts wide' },
    fact('State', words(data.state)),
    fact('Step', data.step ? count(data.step) : 'none yet'),
    fact('Phase', data.phase ? words(data.phase) : '–'),
    fact('In it since', data.phase_since_ms ? dateTime(data.phase_since_ms) : '–'),
    fact('Local rank', data.local_rank === null ? '–' : `${data.local_rank} of ${data.local_world_size ?? '?'}`),
    fact('Backend', data.backend || '–'),
    data.stage === null
      ? null
      : fact('Pipeline', `stage ${data.stage} of ${data.num_stages ?? '?'}, ${data.schedule || 'schedule unknown'}`),
    fact('CPU time', data.cpu_seconds === null ? '–' : `${count(data.cpu_seconds)} s`),
    fact('Memory', bytes(data.rss_bytes)),
    fact('Registered', dateTime(data.registered_ms)),
  );
}

/** @param {{data: RankDetail}} props */
function Groups({ data }) {
  if (data.groups.length === 0) return t.p({ class: 'note padded' }, 'It has not entered a process group yet.');
  return Table({
    label: 'Process groups',
    rows: data.groups,
    keyOf: (group) => group.group,
    columns: [
      {
        label: 'Group',
        class: 'clip',
        title: (group) => `${group.group} ${group.description} ${group.backend}`,
        cell: (group) => [group.description || group.group, t.span({ class: 'faint' }, ` ${group.backend}`)],
      },
      { label: 'Ranks', class: 'num', cell: (group) => count(group.ranks.length) },
      { label: 'Entered', class: 'num', cell: (group) => count(group.issued) },
      {
        label: 'Ended',
        class: 'num',
        cell: (group) =>
          group.issued !== null && group.ended !== null && group.issued > group.ended
            ? t.b({ class: 'changed' }, count(group.ended))
            : count(group.ended),
      },
      {
        label: 'Last entered',
        class: 'wide',
        cell: (group) => [
          group.operation ? t.code(null, group.operation) : t.span({ class: 'faint' }, enteredWords(group.exchanges)),
          group.call_site ? t.span({ class: 'faint' }, ` ${shortPlace(group.call_site)}`) : null,
        ],
      },
    ],
  });
}

/** @param {{data: RankDetail}} props */
function Records({ data }) {
  if (data.collectives.length === 0) return t.p({ class: 'note padded' }, 'None recorded yet.');
  // where nothing reports ends, that a call came back is all that can be known
  const endless = new Set(data.groups.filter((group) => group.ended === null).map((group) => group.group));
  return Table({
    label: 'Last collectives',
    frame: 'short',
    rows: data.collectives,
    columns: [
      { label: 'Step', class: 'num', cell: (row) => count(row.step) },
      { label: 'Sequence', class: 'num', cell: (row) => count(row.sequence) },
      {
        label: 'Operation',
        class: 'nowrap',
        cell: (row) => [
          t.code(null, row.operation),
          row.peer_rank === null ? null : t.span({ class: 'faint' }, ` rank ${row.peer_rank}`),
        ],
      },
      { label: 'Size', class: 'num nowrap', cell: (row) => bytes(row.size_bytes) },
      { label: 'Entered', class: 'num nowrap', cell: (row) => exactTime(row.arrived_ms) },
      {
        label: 'Took',
        class: 'num nowrap',
        cell: (row) => [
          duration(row.duration_ms),
          row.end_is_upper_bound
            ? t.span({ class: 'faint', title: 'The end was seen late: this is the most it took' }, ' at most')
            : null,
        ],
      },
      {
        label: 'On device',
        hint: 'Time at work on the GPU, as CUDA measured it',
        class: 'num nowrap',
        cell: (row) => duration(row.device_ms),
      },
      { label: 'Blocked', class: 'num nowrap', cell: (row) => duration(row.blocked_ms) },
      {
        label: 'State',
        cell: (row) =>
          row.state === 'ended' || (row.state === 'returned' && endless.has(row.group))
            ? row.state
            : t.b({ class: 'changed' }, row.state),
      },
      {
        label: 'Called from',
        class: 'wide clip',
        title: (row) => row.call_site,
        cell: (row) => shortPlace(row.call_site),
      },
    ],
  });
}

/** @param {string} name @param {string} value */
function fact(name, value) {
  return t.div({ key: name }, t.dt(null, name), t.dd(null, value));
}
