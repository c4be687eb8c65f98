/** Hangs: who waits for whom, where each member of a group is, and in which frames of their stacks. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { nodeWords, rankSetWords, standingWords, WaitsChart } from '../charts/waits.js';
import { count, dateTime, duration, plural, sentence, timeOfDay } from '../format.js';
import { useKeys } from '../keys.js';
import { announce, setTitle } from '../page.js';
import { CappedNote, Card, Icon, Problem, Skeleton, Table } from '../parts/bits.js';
import { Beside, Merged } from '../parts/hangstacks.js';
import { PlacesCard } from '../parts/places.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').HangAnswer} HangAnswer */
/** @typedef {import('../../types/api.js').WaitNode} WaitNode */

const POLL_MS = 5_000; // of a live run: ranks say once a second where they are
/** @type {Record<HangAnswer['state'], [string, string]>} */
const KICKERS = {
  hang: ['critical', 'Hang'],
  desync: ['critical', 'Desync'],
  waiting: ['warning', 'Ranks wait, no finding'],
  over: ['ok', 'Over'],
  none: ['ok', 'No hang'],
  unknown: ['unknown', 'Unknown'],
};

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, ended }) {
  const { attempt, ranks, group } = query.value;
  const [isOver, setOver] = useState(ended);
  const path = runPath(run, 'hang');
  const answer = /** @type {import('../api.js').Answer<HangAnswer>} */ (
    useApi(withQuery(path, { attempt, ranks, group }), { everyMs: ended || isOver ? 0 : POLL_MS })
  );
  const [table, setTable] = useState(false);
  useKeys([{ keys: 't', text: 'The pictures as tables, and back', run: () => setTable((old) => !old) }], []);
  const data = answer.data;
  useEffect(() => setOver(data?.is_over ?? false), [data?.is_over]); // also a recording, which never ends
  useEffect(() => setTitle(data?.text ?? 'Hangs', run), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'who waits for whom' })
      : el(Skeleton, { height: 300, waitsFor: 'who waits for whom' });
  const show = { table, switchTable: () => setTable(!table) };
  const chosen = data.stacks.map((one) => one.rank);
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}`, 'data-api': withQuery(path, { attempt, ranks, group }) },
    el(Answer, { data, run }),
    data.graph.nodes.length > 0 ? el(WaitsCard, { data, chosen, csv: csvHref(path), ...show }) : null,
    el(PlacesCard, { data, run, csv: csvHref(withQuery(path, { attempt, group })) }),
    el(Beside, { data, run, asked: answer.refresh }),
    data.merged.num_ranks > 0 ? el(Merged, { data, run, ...show }) : null,
  );
}

/** @param {{data: HangAnswer, run: string}} props */
function Answer({ data, run }) {
  const [mark, kicker] = KICKERS[data.state];
  const severity = data.state === 'none' || data.state === 'over' ? 'healthy' : data.state;
  return t.section(
    { class: `verdict card is-${mark === 'critical' ? 'critical' : severity}` },
    t.div(
      { class: 'verdicthead' },
      t.div(
        { class: 'verdictsay' },
        t.p(
          { class: 'kicker' },
          t.span({ class: `severity is-${mark}` }, el(Icon, { name: mark }), t.span(null, kicker)),
          data.is_over ? t.span({ class: 'pill' }, 'at the end') : null,
        ),
        t.h1({ id: 'verdict' }, data.text),
        data.detail ? t.p({ class: 'why' }, sentence(data.detail)) : null,
        t.p({ class: 'note' }, momentWords(data)),
        data.notes.map((note) => t.p({ class: 'note', key: note }, sentence(note))),
      ),
    ),
    data.findings.length > 0
      ? t.div(
          { class: 'verdictfoot' },
          t.div(
            { class: 'also' },
            data.findings.length > 1 ? `${plural(data.findings.length, 'finding')} of hangs and desyncs` : null,
          ),
          t.div(
            { class: 'buttons' },
            data.findings.slice(0, 4).map((one, i) =>
              t.a(
                {
                  key: one.id,
                  class: i === 0 ? 'button primary' : 'button',
                  href: runPath(run, 'findings', String(one.id)),
                  title: one.what,
                },
                i === 0 ? 'Open the finding' : `Finding ${one.id}`,
              ),
            ),
            data.findings[0].onset_ms === null
              ? null
              : t.a(
                  {
                    class: 'button',
                    href: withQuery(runPath(run, 'logs'), {
                      from: Math.round(data.findings[0].onset_ms - 10_000),
                      to: Math.round(data.findings[0].onset_ms + 10_000),
                    }),
                  },
                  'Logs at its start',
                ),
          ),
        )
      : null,
  );
}

/** Of which moment all of this is. Pure. @param {HangAnswer} data */
export function momentWords(data) {
  if (data.last_ms === null) return 'No rank has sent a record.';
  if (data.is_over)
    return `How it was at the end of attempt ${data.attempt}; the last record is of ${dateTime(data.last_ms)}.`;
  return `As of the last record, ${timeOfDay(data.last_ms)}; looks again every ${POLL_MS / 1000} s.`;
}

/** @param {{data: HangAnswer, chosen: number[], csv: string, table: boolean, switchTable: () => void}} props */
function WaitsCard({ data, chosen, table, switchTable }) {
  const { graph, is_over: isOver } = data;
  const wait = isOver ? 'waited' : graph.num_waiting === 1 ? 'waits' : 'wait';
  /** @param {WaitNode} node */
  function choose(node) {
    const rank = node.ranks.some[0];
    const other = data.suggested.find((one) => one !== rank && !node.ranks.some.includes(one));
    setQuery({ ranks: [rank, other].filter((one) => one !== undefined).join(',') });
    announce(`Stack of rank ${rank}${other === undefined ? '' : ` beside rank ${other}`} is below`);
  }
  return el(
    Card,
    {
      title: 'Who waits for whom',
      note: `${plural(graph.num_waiting, 'rank')} ${wait}; ranks in the same place are one box`,
      tools: t.button(
        { type: 'button', class: 'button small', 'aria-pressed': table, onClick: switchTable },
        'As a table',
      ),
    },
    t.div({ class: 'padded' }, table ? el(WaitsTable, { data }) : el(WaitsChart, { graph, isOver, chosen, choose })),
    table
      ? null
      : t.p(
          { class: 'note padded waitlegend' },
          t.span(
            null,
            t.span({ class: 'swatch is-root', 'aria-hidden': 'true' }),
            ' others wait for it, it waits for none',
          ),
          t.span(null, t.span({ class: 'swatch is-waits', 'aria-hidden': 'true' }), ' waits'),
          t.span(null, 'An arrow leads from who waits to who is waited for. A press shows its stack.'),
        ),
    el(CappedNote, { capped: graph.capped, noun: 'boxes, those closest to the cause' }),
  );
}

/** @param {{data: HangAnswer}} props */
function WaitsTable({ data }) {
  const { graph, is_over: isOver } = data;
  return Table({
    label: 'Who waits for whom',
    rows: graph.nodes,
    keyOf: (node) => node.id,
    rowProps: (node) => ({ title: nodeWords(node, isOver) }),
    columns: [
      { label: 'Ranks', class: 'wide', cell: (node) => (node.is_transfer ? 'none' : node.ranks.text) },
      { label: 'Count', class: 'num', cell: (node) => (node.is_transfer ? '–' : count(node.ranks.count)) },
      { label: 'Nodes', class: 'num', cell: (node) => (node.ranks.num_hosts ? count(node.ranks.num_hosts) : '–') },
      {
        label: 'State',
        class: 'nowrap',
        cell: (node) => (node.is_transfer ? 'does not end' : standingWords(node.standing, isOver)),
      },
      { label: 'What', class: 'wide', cell: (node) => node.text },
      { label: isOver ? 'Waited for' : 'Waits for', class: 'wide', cell: (node) => targetWords(data, node) },
      {
        label: isOver ? 'Waited' : 'Since',
        class: 'num nowrap',
        cell: (node) => (node.waited_seconds === null ? '–' : duration(node.waited_seconds * 1000)),
      },
    ],
  });
}

/** @param {HangAnswer} data @param {WaitNode} node */
function targetWords({ graph }, node) {
  const targets = graph.edges.filter((edge) => edge.source === node.id).map((edge) => edge.target);
  const names = graph.nodes
    .filter((one) => targets.includes(one.id))
    .map((one) => (one.is_transfer ? 'the end of the operation' : rankSetWords(one.ranks).replace(/^R/, 'r')));
  return names.join(', ') || '–';
}
