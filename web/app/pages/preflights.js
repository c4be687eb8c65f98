/** Preflights: what the newest one says, all that are kept, and the history of a node. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, dateTime, plural } from '../format.js';
import { setTitle } from '../page.js';
import { Ago, CappedNote, Card, Command, Empty, Problem, Skeleton, Table } from '../parts/bits.js';
import { Field } from '../parts/fields.js';
import { nodeHref, preflightHref, State } from '../parts/preflight.js';
import { NewPreflight } from '../parts/preflightcall.js';
import { query, root, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { path, runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Preflights} Preflights */
/** @typedef {import('../../types/api.js').PreflightView} View */
/** @typedef {import('../../types/api.js').NodeHistory} History */

const PAGE = 50;

export function Page() {
  const { run = '', node = '', offset = '0' } = query.value;
  const skip = /^\d{1,9}$/.test(offset) ? Number(offset) : 0;
  const listPath = withQuery('preflight/runs', { run, limit: PAGE, offset: skip || null });
  const answer = /** @type {import('../api.js').Answer<Preflights>} */ (useApi(listPath, { topic: 'preflights' }));
  const list = answer.data;
  const newest = skip === 0 ? (list?.preflights[0]?.id ?? '') : '';
  const one = /** @type {import('../api.js').Answer<View>} */ (
    useApi(newest ? path('preflight', 'runs', newest) : null, { topic: newest ? `preflight:${newest}` : null })
  );
  const text = !list
    ? ''
    : list.total === 0
      ? noneWords(run)
      : newest
        ? (one.data?.text ?? '')
        : `Preflights from number ${count(skip + 1)} on`;
  useEffect(() => setTitle(text || 'Preflight', run), [text, run]);
  if (!list)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the preflights' })
      : el(Skeleton, { height: 240, waitsFor: 'the preflights' });
  if (newest && !one.data && !one.error) return el(Skeleton, { height: 240, waitsFor: 'the newest preflight' });
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}` },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, text || 'Preflights'),
      newest && one.data
        ? t.p(
            { class: 'faint' },
            `The newest of ${plural(list.total, 'preflight')}${run ? ' of this run' : ''}, `,
            el(Ago, { ms: one.data.summary.created_ms }),
            ', on ',
            plural(one.data.summary.num_nodes, 'node'),
            '. ',
            t.a({ href: preflightHref(newest) }, 'Why'),
          )
        : null,
      run
        ? t.p(null, t.a({ href: runPath(run) }, `Run ${run}`), ' · ', t.a({ href: 'preflight' }, 'All preflights'))
        : null,
    ),
    node ? el(NodeCard, { key: node, node }) : null,
    list.total === 0 ? el(Nothing, { run }) : el(List, { list, path: listPath, skip }),
    el(NodeForm, {}),
    el(NewPreflight, { run }),
  );
}

/** @param {string} run */
function noneWords(run) {
  return run ? 'No preflight of this run is kept here' : 'No preflight is kept here';
}

/** @param {{run: string}} props */
function Nothing({ run }) {
  const server = root.replace(/\/$/, '');
  return t.div(
    { class: 'card padded' },
    el(
      Empty,
      { title: 'It says before the launch why a job would fail, hang or crawl. On each node:' },
      el(Command, {
        text: run
          ? `RANKSCOPE_SERVER=${server} rankscope run --preflight -- torchrun ...`
          : `rankscope preflight --server ${server} --nodes node0,node1`,
      }),
    ),
  );
}

/** @param {{list: Preflights, path: string, skip: number}} props */
function List({ list, path: address, skip }) {
  const last = skip + list.preflights.length;
  return el(
    Card,
    {
      title: 'Preflights',
      api: address,
      note: `${count(skip + 1)}–${count(last)} of ${count(list.total)}, newest first; the newest 1,000 are kept`,
      tools: [
        skip > 0
          ? t.button(
              {
                key: 'n',
                type: 'button',
                class: 'button small',
                onClick: () => setQuery({ offset: skip - PAGE || null }),
              },
              'Newer',
            )
          : null,
        last < list.total
          ? t.button(
              { key: 'o', type: 'button', class: 'button small', onClick: () => setQuery({ offset: skip + PAGE }) },
              'Older',
            )
          : null,
        t.a({ key: 'c', href: csvHref(address) }, 'CSV'),
      ],
    },
    Table({
      label: 'Preflights',
      rows: list.preflights,
      keyOf: (one) => one.id,
      columns: [
        { label: 'Answer', class: 'w-sev nowrap', cell: (one) => el(State, { status: one.status }) },
        { label: 'When', class: 'nowrap', cell: (one) => el(Ago, { ms: one.created_ms }) },
        { label: 'Preflight', class: 'wide', cell: (one) => t.a({ href: preflightHref(one.id) }, one.id) },
        { label: 'Nodes', class: 'num', cell: (one) => count(one.num_nodes) },
        {
          label: 'Failures',
          class: 'num',
          cell: (one) => (one.status === 'unknown' && one.finished_ms === null ? '–' : count(one.num_failures)),
        },
        {
          label: 'Warnings',
          class: 'num',
          cell: (one) => (one.status === 'unknown' && one.finished_ms === null ? '–' : count(one.num_warnings)),
        },
        {
          label: 'Before run',
          class: 'wide',
          cell: (one) => (one.run_id ? t.a({ href: runPath(one.run_id) }, one.run_id) : 'none named'),
        },
      ],
    }),
  );
}

function NodeForm() {
  const [name, setName] = useState(query.value.node ?? '');
  return el(
    Card,
    { title: 'History of a node', note: 'by its name in preflights, or its host name' },
    t.form(
      {
        class: 'askform',
        'aria-label': 'History of a node',
        onSubmit: (event) => {
          event.preventDefault();
          setQuery({ node: name.trim() || null });
        },
      },
      t.div(
        { class: 'askrow' },
        el(Field, { label: 'Node', value: name, set: setName, hint: 'node0', required: true }),
        t.button({ type: 'submit', class: 'button' }, 'Show'),
      ),
    ),
  );
}

/** @param {{node: string}} props */
function NodeCard({ node }) {
  const answer = /** @type {import('../api.js').Answer<History>} */ (
    useApi(path('preflight', 'nodes', node), { topic: 'preflights' })
  );
  if (!answer.data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: `the history of ${node}` })
      : el(Skeleton, { height: 120, waitsFor: `the history of ${node}` });
  const rows = answer.data.preflights;
  const bad = rows.filter((row) => row.status === 'fail').length;
  return el(
    Card,
    {
      title: `${node} over its preflights`,
      api: path('preflight', 'nodes', node),
      note:
        rows.length === 0
          ? `no preflight that is kept had a node or host ${node}`
          : `a failure named it in ${count(bad)} of ${count(rows.length)}; newest first`,
      tools: t.button({ type: 'button', class: 'link', onClick: () => setQuery({ node: null }) }, 'Close'),
    },
    rows.length === 0
      ? null
      : [
          t.ol(
            { key: 's', class: 'pfstrip', 'aria-label': `States of ${node}, the newest last` },
            [...rows].reverse().map((row) => {
              const text = `${dateTime(row.created_ms)}: ${row.findings.join(', ') || (row.status === 'ok' ? 'nothing named it' : 'not evaluated')}`;
              return t.li(
                { key: row.id },
                t.a({ href: preflightHref(row.id), class: `is-${row.status}`, title: text, 'aria-label': text }),
              );
            }),
          ),
          Table({
            key: 't',
            label: `Preflights of ${node}`,
            frame: 'short',
            rows,
            keyOf: (row) => `${row.id} ${row.node}`,
            columns: [
              { label: 'State', class: 'nowrap', cell: (row) => el(State, { status: row.status }) },
              { label: 'When', class: 'nowrap', cell: (row) => el(Ago, { ms: row.created_ms }) },
              { label: 'Preflight', cell: (row) => t.a({ href: preflightHref(row.id) }, row.id) },
              {
                label: 'Host',
                cell: (row) =>
                  t.a({ class: 'quiet', href: nodeHref(row.host || row.node) }, row.host || 'not reported'),
              },
              {
                label: 'Named by',
                class: 'wide',
                cell: (row) => row.findings.join(', ') || (row.status === 'ok' ? 'nothing' : 'not known'),
              },
            ],
          }),
          el(CappedNote, { key: 'c', capped: answer.data.capped, noun: 'preflights, the newest' }),
        ],
  );
}
