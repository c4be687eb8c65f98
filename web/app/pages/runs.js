/** All runs: those that need attention first, one verdict line each. Polls; it holds no stream. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, duration, percent, plural, sinceSilent, words } from '../format.js';
import { useHeld } from '../live.js';
import { now, setTitle } from '../page.js';
import { Ago, Card, Command, Empty, Icon, Problem, Severity, Skeleton, Table } from '../parts/bits.js';
import { LIVE, urgentOf } from '../parts/urgent.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').RunSummary} RunSummary */
/** @typedef {import('../../types/api.js').Runs} Runs */

const PAGE_SIZE = 50;
const STATUSES = ['running', 'stuck', 'silent', 'starting', 'ended', 'failed'];

export function Page() {
  const { q = '', status = '' } = query.value;
  const offset = Number(query.value.offset) || 0;
  const path = withQuery('runs', { q, status, limit: PAGE_SIZE, offset: offset || null });
  const answer = /** @type {import('../api.js').Answer<Runs>} */ (useApi(path, { everyMs: 5000 }));
  const list = useRef(/** @type {HTMLDivElement | null} */ (null));
  const { shown } = useHeld(answer.data, list, path);
  const [chosen, setChosen] = useState(/** @type {RunSummary[]} */ ([]));
  const urgent = urgentOf(shown?.runs ?? [], now.value);
  const filtered = q !== '' || status !== '';
  const sentence = !shown
    ? ''
    : shown.total === 0 && !filtered
      ? 'No runs yet'
      : urgent.length > 0
        ? `${plural(urgent.length, 'run')} ${urgent.length === 1 ? 'needs' : 'need'} attention`
        : filtered
          ? `${plural(shown.total, 'run')} found`
          : 'No run needs attention';
  useEffect(() => setTitle(sentence || 'Runs'), [sentence]);
  if (!shown)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the runs' })
      : el(Skeleton, { height: 240, waitsFor: 'the runs' });
  if (shown.total === 0 && !filtered) return el(NoRuns, {});
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}`, 'data-api': path, ref: list },
    t.section(
      { class: `verdict card ${urgent.length > 0 ? 'is-warning' : 'is-healthy'}` },
      t.div(
        { class: 'verdicthead' },
        t.div(
          { class: 'verdictsay' },
          t.p({ class: 'kicker' }, el(Icon, { name: urgent.length > 0 ? 'warning' : 'ok' }), 'Now'),
          t.h1({ id: 'verdict' }, sentence),
        ),
      ),
      urgent.length > 0
        ? t.ul(
            { class: 'urgent' },
            urgent.map((run) => el(Urgent, { key: run.run_id, run })),
          )
        : null,
    ),
    el(
      Card,
      {
        title: 'All runs',
        note: `${count(shown.total)}${filtered ? ' match' : ''}, newest first`,
        tools: [
          el(Filters, { key: 'f' }),
          el(CompareLink, { key: 'd', chosen }),
          t.a({ key: 'l', href: 'search' }, 'Search lines'),
          t.a({ key: 's', href: 'storage' }, 'Storage'),
          t.a({ key: 'c', href: csvHref(path) }, 'CSV'),
        ],
      },
      Table({
        label: 'All runs',
        rows: shown.runs,
        keyOf: (run) => run.run_id,
        columns: [
          { label: 'Run', class: 'wide', cell: nameOf },
          { label: 'Status', class: 'nowrap', cell: statusOf },
          { label: 'Verdict', class: 'wide', cell: verdictOf },
          { label: 'Ranks', class: 'num', cell: (run) => count(run.world_size) },
          {
            label: 'Step',
            class: 'num',
            cell: (run) => (run.step ? count(run.step) : t.span({ class: 'faint' }, 'none yet')),
          },
          { label: 'Started', class: 'num nowrap', cell: (run) => el(Ago, { ms: run.started_ms }) },
          { label: 'Length', class: 'num nowrap', cell: lengthOf },
          { label: 'Compare', cell: (run) => el(Pick, { run, chosen, choose: setChosen }) },
        ],
      }),
      shown.runs.length === 0
        ? t.p(
            { class: 'note padded' },
            'No run matches. ',
            t.button(
              { type: 'button', class: 'link', onClick: () => setQuery({ q: null, status: null, offset: null }) },
              'Show all runs',
            ),
          )
        : null,
      shown.total > PAGE_SIZE ? el(Pager, { offset, total: shown.total }) : null,
    ),
  );
}

function NoRuns() {
  return t.div(
    { class: 'card padded' },
    t.h1({ id: 'verdict' }, 'No runs yet'),
    el(
      Empty,
      { title: 'Record one now. The demo trains on four ranks of this machine, makes one of them slow, and names it:' },
      el(Command, { text: 'rankscope demo' }),
      t.p(null, 'Or watch a script of your own, without changing it:'),
      el(Command, { text: 'rankscope run -- torchrun --nproc-per-node 4 train.py' }),
    ),
  );
}

/** @param {{run: RunSummary}} props */
function Urgent({ run }) {
  const { verdict } = run;
  return t.li(
    null,
    verdict
      ? el(Severity, { severity: verdict.severity })
      : el(Severity, { severity: 'warning', text: words(run.status) }),
    t.a({ href: runPath(run.run_id), class: 'strong' }, run.name || run.run_id),
    t.span(null, verdict ? sinceSilent(run, verdict.what) : run.status_text),
    verdict?.cost_throughput_ratio
      ? t.span({ class: 'bad nowrap' }, `${percent(verdict.cost_throughput_ratio)} of throughput`)
      : null,
  );
}

/** Leads to the comparison of two chosen runs, the earlier one first. @param {{chosen: RunSummary[]}} props */
function CompareLink({ chosen }) {
  if (chosen.length < 2) return chosen.length === 1 ? t.span({ class: 'faint' }, 'Choose one more to compare') : null;
  const [a, b] = [...chosen].sort((one, other) => (one.started_ms ?? 0) - (other.started_ms ?? 0));
  return t.a({ class: 'button small', href: withQuery('compare', { a: a.run_id, b: b.run_id }) }, 'Compare the two');
}

/** @param {RunSummary} run */
function nameOf(run) {
  return [
    t.a({ href: runPath(run.run_id) }, run.name || run.run_id),
    run.name && !run.name.includes(run.run_id) ? t.code({ class: 'faint runid' }, ` ${run.run_id.slice(0, 12)}`) : null,
  ];
}

/** @param {RunSummary} run */
function statusOf(run) {
  return t.span(
    { class: `state is-${run.status}`, title: run.status_text },
    t.span({ class: 'dot', 'aria-hidden': 'true' }),
    run.status,
  );
}

/** @param {RunSummary} run */
function verdictOf(run) {
  const { verdict, answer } = run;
  if (!verdict && answer.state === 'advice')
    return t.span(
      { class: 'verdictline' },
      t.span({ class: 'severity is-info', title: 'advice' }, el(Icon, { name: 'info' })),
      t.span(null, answer.text),
    );
  if (!verdict) return t.span({ class: 'faint' }, answer.text);
  return t.span(
    { class: 'verdictline' },
    t.span(
      { class: `severity is-${verdict.severity}`, title: verdict.severity },
      el(Icon, { name: verdict.severity }),
      t.span({ class: 'sr' }, verdict.severity),
    ),
    t.span(null, sinceSilent(run, verdict.what)),
  );
}

/** @param {RunSummary} run */
function lengthOf(run) {
  const end = run.ended_ms ?? (LIVE.has(run.status) ? now.value : run.last_seen_ms);
  return run.started_ms && end ? duration(end - run.started_ms) : '–';
}

/** @param {{run: RunSummary, chosen: RunSummary[], choose: (runs: RunSummary[]) => void}} props */
function Pick({ run, chosen, choose }) {
  const isChosen = chosen.some((one) => one.run_id === run.run_id);
  return t.label(
    { class: 'pick' },
    t.input({
      type: 'checkbox',
      checked: isChosen,
      'aria-label': `Compare ${run.name || run.run_id}`,
      // a third one takes the place of the first
      onChange: () => choose(isChosen ? chosen.filter((one) => one.run_id !== run.run_id) : [...chosen, run].slice(-2)),
    }),
  );
}

function Filters() {
  const [text, setText] = useState(query.value.q ?? '');
  useEffect(() => {
    const timer = setTimeout(
      () => (text || query.value.q) && setQuery({ q: text, offset: null }, { replace: true }),
      250,
    );
    return () => clearTimeout(timer);
  }, [text]);
  return t.form(
    { class: 'filters', role: 'search', onSubmit: (event) => event.preventDefault() },
    t.input({
      type: 'search',
      placeholder: 'Name, id or host',
      'aria-label': 'Find runs by name, id or host',
      value: text,
      onInput: (event) => setText(event.currentTarget.value),
    }),
    t.select(
      {
        'aria-label': 'Status',
        value: query.value.status ?? '',
        onChange: (event) => setQuery({ status: event.currentTarget.value, offset: null }),
      },
      t.option({ value: '' }, 'any status'),
      STATUSES.map((name) => t.option({ key: name, value: name }, name)),
    ),
  );
}

/** @param {{offset: number, total: number}} props */
function Pager({ offset, total }) {
  return t.div(
    { class: 'pager' },
    t.span({ class: 'faint' }, `${count(offset + 1)}–${count(Math.min(total, offset + PAGE_SIZE))} of ${count(total)}`),
    t.button(
      {
        type: 'button',
        class: 'button small',
        disabled: offset === 0,
        onClick: () => setQuery({ offset: Math.max(0, offset - PAGE_SIZE) || null }),
      },
      'Newer',
    ),
    t.button(
      {
        type: 'button',
        class: 'button small',
        disabled: offset + PAGE_SIZE >= total,
        onClick: () => setQuery({ offset: offset + PAGE_SIZE }),
      },
      'Older',
    ),
  );
}
