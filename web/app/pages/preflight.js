/** One preflight: may this be launched, the causes, paths, nodes, what changed since the last good one. */

import { useEffect } from 'preact/hooks';
import { useApi } from '../api.js';
import { count, dateTime, duration, plural, sentence } from '../format.js';
import { setTitle } from '../page.js';
import { Ago, CappedNote, Card, Loaded, Problem, Skeleton, Table } from '../parts/bits.js';
import { ChecksCard, FindingsCard, NodesCard, nodeHref, preflightHref, State } from '../parts/preflight.js';
import { CallCard } from '../parts/preflightcall.js';
import { MatrixCard } from '../parts/preflightmatrix.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { path, runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').PreflightView} View */
/** @typedef {import('../../types/api.js').Preflights} Preflights */
/** @typedef {import('../../types/api.js').PreflightComparison} Comparison */
/** @typedef {import('../../types/api.js').PreflightSummary} Summary */

/** @param {import('../main.js').PageProps} props */
export function Page({ id }) {
  const topic = `preflight:${id}`;
  const answer = /** @type {import('../api.js').Answer<View>} */ (
    useApi(path('preflight', 'runs', id), { topic, on: ['reports', 'verdict'] })
  );
  const view = answer.data;
  useEffect(() => setTitle(view?.text ?? 'Preflight'), [view?.text]);
  if (!view)
    return answer.error
      ? t.div(
          { class: 'stack' },
          t.header({ class: 'pagehead' }, t.h1({ id: 'verdict' }, `No preflight ${id} can be shown`)),
          el(Problem, { error: answer.error, retry: answer.refresh, what: 'the preflight' }),
          t.p(null, t.a({ class: 'button', href: 'preflight' }, 'All preflights')),
        )
      : el(Skeleton, { height: 240, waitsFor: 'the preflight' });
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}` },
    t.header({ class: 'pagehead' }, t.h1({ id: 'verdict' }, view.text), el(Facts, { view })),
    view.waiting_for.length > 0
      ? t.p({ class: 'note', role: 'status' }, `Waiting for ${namesWords(view.waiting_for)}.`)
      : null,
    el(FindingsCard, { findings: view.findings }),
    el(MatrixCard, { id, topic }),
    el(Changes, { view }),
    el(NodesCard, { view }),
    view.checks.length > 0 ? el(ChecksCard, { checks: view.checks, findings: view.findings }) : null,
    el(CallCard, { view }),
  );
}

/** @param {string[]} names */
function namesWords(names) {
  return names.length <= 5 ? names.join(', ') : `${names.slice(0, 5).join(', ')} and ${count(names.length - 5)} more`;
}

/** @param {{view: View}} props */
function Facts({ view }) {
  const { summary } = view;
  const took = summary.finished_ms === null ? null : summary.finished_ms - summary.created_ms;
  return t.p(
    { class: 'faint' },
    el(Ago, { ms: summary.created_ms }),
    ` on ${plural(summary.num_nodes, 'node')}`,
    took !== null && took > 0 && summary.coordinated === 'server' ? `, took ${duration(took)}` : '',
    summary.coordinated === 'server' ? ', over this server' : ', sent when it had ended',
    summary.run_id ? [', before ', t.a({ key: 'r', href: runPath(summary.run_id) }, `run ${summary.run_id}`)] : null,
    '. ',
    t.a({ href: 'preflight' }, 'All preflights'),
  );
}

/** What differs from an earlier one: the last good one, unless another is asked for. @param {{view: View}} props */
function Changes({ view }) {
  const { id } = view.summary;
  const before = query.value.before ?? view.last_good?.id ?? '';
  const listed = /** @type {import('../api.js').Answer<Preflights>} */ (useApi('preflight/runs?limit=50'));
  const address = before ? withQuery(`${path('preflight', 'runs', id)}/compare`, { before }) : null;
  const answer = /** @type {import('../api.js').Answer<Comparison>} */ (useApi(address));
  const others = (listed.data?.preflights ?? []).filter((one) => one.id !== id);
  const isDefault = before === view.last_good?.id;
  return el(
    Card,
    {
      api: address ?? undefined,
      title: isDefault ? 'What changed since the last good one' : 'What changed',
      note: before
        ? answer.data
          ? sentence(answer.data.text)
          : ''
        : 'no earlier preflight of these nodes that let a launch go is kept',
      tools:
        others.length > 0
          ? t.select(
              {
                'aria-label': 'Compare with',
                value: before,
                onChange: (event) => setQuery({ before: event.currentTarget.value || null }, { replace: true }),
              },
              before && !others.some((one) => one.id === before) ? t.option({ value: before }, before) : null,
              before ? null : t.option({ value: '' }, 'compare with'),
              others.map((one) => t.option({ key: one.id, value: one.id }, optionWords(one))),
            )
          : null,
    },
    before ? Loaded({ answer, height: 100, what: 'the comparison', children: (data) => el(Changed, { data }) }) : null,
  );
}

/** @param {Summary} one */
function optionWords(one) {
  return `${dateTime(one.created_ms)}, ${plural(one.num_nodes, 'node')}, ${one.status}`;
}

/** @param {{data: Comparison}} props */
function Changed({ data }) {
  const { pairs, nodes_new: come, nodes_gone: gone } = data;
  const nothing = data.new.length + data.gone.length + pairs.length + come.length + gone.length === 0;
  return [
    t.p(
      { key: 'b', class: 'note padded' },
      'Compared with ',
      t.a({ href: preflightHref(data.before.id) }, `the one of ${dateTime(data.before.created_ms)}`),
      nothing ? ': nothing differs that both measured.' : '.',
    ),
    data.new.length + data.gone.length > 0
      ? t.ul(
          { key: 'f', class: 'plainlist' },
          data.new.map((one) =>
            t.li(
              { key: `n${one.id}${one.title}` },
              t.b(null, 'New: '),
              el(State, { status: one.status }),
              ` ${one.title}`,
            ),
          ),
          data.gone.map((one) => t.li({ key: `g${one.id}${one.title}` }, t.b(null, 'Gone: '), one.title)),
        )
      : null,
    come.length > 0 ? t.p({ key: 'c', class: 'note padded' }, `Nodes that were not there: ${namesWords(come)}.`) : null,
    gone.length > 0 ? t.p({ key: 'g', class: 'note padded' }, `Nodes that are gone: ${namesWords(gone)}.`) : null,
    pairs.length > 0 ? el(Pairs, { key: 'p', pairs }) : null,
    el(CappedNote, { key: 'cap', capped: data.capped, noun: 'paths that differ, the worse ones first' }),
  ];
}

/** @type {Record<string, string>} */
const METRICS = { connect: 'reachability', rtt: 'round trip', mbit: 'bandwidth', mtu: 'packet size', loss: 'loss' };

/** @param {{pairs: Comparison['pairs']}} props */
function Pairs({ pairs }) {
  return Table({
    label: 'Paths that differ',
    frame: 'short',
    rows: pairs,
    keyOf: (one) => `${one.start} ${one.end} ${one.metric}`,
    columns: [
      { label: 'From', cell: (one) => t.a({ class: 'quiet', href: nodeHref(one.start) }, one.start) },
      { label: 'To', cell: (one) => t.a({ class: 'quiet', href: nodeHref(one.end) }, one.end) },
      { label: 'What', cell: (one) => METRICS[one.metric] },
      { label: 'Before', class: 'nowrap', cell: (one) => one.before },
      { label: 'Now', class: 'nowrap', cell: (one) => one.after },
      { cell: (one) => (one.is_worse ? t.b({ class: 'bad' }, 'worse') : 'better') },
    ],
  });
}
