/** One node: what names it, its ranks, what happened on it, and its samples. */

import { useEffect } from 'preact/hooks';
import { useApi } from '../api.js';
import { count, plural } from '../format.js';
import { setTitle } from '../page.js';
import { Card, Empty, Loaded, Problem, Skeleton } from '../parts/bits.js';
import { FindingsTable } from '../parts/finding.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { Events, OneMachine, Span } from './machines.js';
import { BAD, RankTable } from './ranks.js';

/** @typedef {import('../../types/api.js').Ranks} Ranks */
/** @typedef {import('../../types/api.js').RankRow} RankRow */
/** @typedef {import('../../types/api.js').Findings} Findings */
/** @typedef {import('../../types/api.js').ShownFinding} ShownFinding */
/** @typedef {import('../../types/api.js').Machines} Machines */

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, id: host, topic, overview, ended }) {
  const all = /** @type {import('../api.js').Answer<Ranks>} */ (
    useApi(runPath(run, 'ranks'), { topic, on: ['ranks', 'steps'] })
  );
  const found = /** @type {import('../api.js').Answer<Findings>} */ (
    useApi(runPath(run, 'findings'), { topic, on: ['findings', 'verdict'] })
  );
  const sampled = /** @type {import('../api.js').Answer<Machines>} */ (
    useApi(runPath(run, 'machines'), { topic, on: ['events'] })
  );
  const ranks = all.data?.ranks.filter((one) => one.host === host);
  const findings = (found.data?.open ?? []).filter((one) => one.hosts.includes(host));
  const machine = sampled.data?.machines.find((one) => one.host === host);
  const events = sampled.data?.events.filter((one) => one.host === host) ?? [];
  const verdict = overview.data?.verdict;
  const first = findings.find((one) => one.id === verdict?.id) ?? findings[0];
  const sentence = ranks && found.data ? nodeSentence(host, ranks, first, ended) : '';
  useEffect(() => setTitle(sentence || host, run), [sentence]);
  const failed = [all, found, sampled].find((one) => one.error && !one.data);
  if (failed?.error) return el(Problem, { error: failed.error, retry: failed.refresh, what: host });
  if (!ranks || !found.data || !sampled.data) return el(Skeleton, { height: 240, waitsFor: host });
  if (ranks.length === 0 && !machine) return el(NoNode, { run, host });
  return t.div(
    { class: 'stack' },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, sentence),
      t.p({ class: 'faint' }, `${host}, ${plural(ranks.length, 'rank')} of ${count(all.data?.ranks.length ?? 0)}`),
      machine ? el(Span, {}) : null,
      t.div(
        { class: 'buttons' },
        t.a({ class: 'button small', href: withQuery(runPath(run, 'logs'), { host }) }, 'Its logs'),
        t.a({ class: 'button small', href: withQuery('preflight', { node: host }) }, 'Its preflights'),
        t.a({ class: 'button small', href: runPath(run, 'machines') }, 'All machines'),
      ),
    ),
    findings.length > 0
      ? el(Card, { title: 'Findings that name it' }, el(FindingsTable, { findings, run, ended }))
      : null,
    el(
      Card,
      { title: ended ? 'Where its ranks were' : 'Where its ranks are', note: 'the worst first' },
      Loaded({
        answer: all,
        height: 160,
        what: 'its ranks',
        children: () => el(RankTable, { ranks, run, ended }),
      }),
    ),
    events.length > 0
      ? el(Events, { data: { .../** @type {Machines} */ (sampled.data), events, capped: null } })
      : null,
    machine
      ? el(OneMachine, { key: host, run, machine, ended })
      : el(Card, { title: 'Samples' }, el(Empty, { title: 'The collector of this node has sent no samples.' })),
  );
}

/** What a reader must know of this node. @param {string} host @param {RankRow[]} ranks @param {ShownFinding | undefined} finding @param {boolean} ended */
export function nodeSentence(host, ranks, finding, ended) {
  if (finding) return finding.what;
  const bad = ranks.filter((one) => BAD.includes(one.state));
  const how =
    ranks.length === 0
      ? 'no rank is known of it'
      : bad.length > 0
        ? `${count(bad.length)} of ${plural(ranks.length, 'rank')} ${bad.length === 1 ? 'is' : 'are'} stuck, failed or silent`
        : `${plural(ranks.length, 'rank')}, none ${ended ? 'failed or fell silent' : 'stuck, failed or silent'}`;
  return `${host}: ${how}; no finding names it`;
}

/** @param {{run: string, host: string}} props */
function NoNode({ run, host }) {
  return t.div(
    { class: 'card padded' },
    t.h1({ id: 'verdict' }, `There is no node ${host} in this run`),
    el(
      Empty,
      { title: 'No rank and no collector of it has sent anything.' },
      t.a({ class: 'button', href: runPath(run, 'machines') }, 'All machines'),
    ),
  );
}
