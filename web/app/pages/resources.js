/** Memory, utilisation and numbers of training over all ranks, one cursor over all of them. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, timeOfDay } from '../format.js';
import { useKeys } from '../keys.js';
import { announce, setTitle } from '../page.js';
import { BandChart, BandTable, cursor, readingWords, Where } from '../parts/bands.js';
import { Card, Empty, LeftOutNote, Problem, Skeleton } from '../parts/bits.js';
import { SPANS, spanStart } from '../parts/machine.js';
import { readRanks } from '../parts/ranklist.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Resources} Resources */

const POLL_MS = 30_000; // an answer reads samples and numbers of all ranks
const WIDTH = 300;
const USUAL = 'quarter';
const TOPICS = /** @type {const} */ ([
  ['memory', 'Memory'],
  ['utilisation', 'Utilisation'],
  ['training', 'Numbers of training'],
]);

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, overview, ended }) {
  const span = query.value.span && query.value.span in SPANS ? query.value.span : USUAL;
  const { ranks } = query.value;
  const lastMs = overview.data?.run.last_seen_ms ?? null;
  const from = span === USUAL ? null : (spanStart(span, lastMs) ?? 0);
  const path = withQuery(runPath(run, 'resources'), { from_ms: from, ranks, width: WIDTH });
  const answer = /** @type {import('../api.js').Answer<Resources>} */ (useApi(path, { everyMs: ended ? 0 : POLL_MS }));
  const [table, setTable] = useState(false);
  const data = answer.data;
  useKeys([{ keys: 't', text: 'The charts as a table, and back', run: () => setTable((old) => !old) }], []);
  useEffect(() => setTitle(data?.text ?? 'Resources', run), [data?.text]);
  useEffect(() => {
    cursor.value = null;
  }, [path]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the resources' })
      : el(Skeleton, { height: 300, waitsFor: 'the resources' });
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}`, 'data-api': path },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, data.text),
      el(Tools, { span, table, switchTable: () => setTable(!table), csv: csvHref(path) }),
    ),
    data.charts.length === 0
      ? el(
          Card,
          { title: 'Resources' },
          el(Empty, {
            title:
              'The collector of a node sends samples once it runs; ranks send numbers of training with their steps.',
          }),
        )
      : table
        ? el(Card, { title: 'All quantities', note: 'over the time shown' }, el(BandTable, { charts: data.charts }))
        : el(Charts, { data, run }),
    data.missing.length > 0
      ? t.p(
          { class: 'note' },
          `Nothing was sent of: ${data.missing.join(', ')}. `,
          t.a({ href: runPath(run, 'machines') }, 'What is sampled where, and why not'),
        )
      : null,
    el(LeftOutNote, { parts: data.left_out }),
  );
}

/** @param {{span: string, table: boolean, switchTable: () => void, csv: string}} props */
function Tools({ span, table, switchTable, csv }) {
  const asked = query.value.ranks ?? '';
  const [text, setText] = useState(asked);
  const [problem, setProblem] = useState('');
  useEffect(() => setText(asked), [asked]);
  return t.form(
    {
      class: 'buttons stepsform',
      'aria-label': 'What is shown',
      onSubmit: (event) => {
        event.preventDefault();
        const ranks = readRanks(text);
        setProblem(typeof ranks === 'string' ? ranks : ranks.length > 4 ? 'Ranks: at most 4 are pinned.' : '');
        if (typeof ranks !== 'string' && ranks.length <= 4) setQuery({ ranks: ranks.join(',') || null });
      },
    },
    t.label(
      { class: 'askfield' },
      'Pin ranks',
      t.input({
        type: 'text',
        size: 10,
        value: text,
        placeholder: '3,17',
        onInput: (event) => setText(event.currentTarget.value),
      }),
    ),
    t.button({ type: 'submit', class: 'button' }, 'Pin'),
    Object.entries(SPANS).map(([name, { title }]) =>
      t.button(
        {
          key: name,
          type: 'button',
          class: 'button small',
          'aria-pressed': name === span,
          onClick: () => setQuery({ span: name === USUAL ? null : name }, { replace: true }),
        },
        title,
      ),
    ),
    t.button({ type: 'button', class: 'button small', 'aria-pressed': table, onClick: switchTable }, 'As a table'),
    t.a({ href: csv }, 'CSV'),
    problem ? t.p({ class: 'bad askproblem', role: 'alert' }, problem) : null,
  );
}

/** All charts in one region that keys move the cursor of. @param {{data: Resources, run: string}} props */
function Charts({ data, run }) {
  const last = data.time_ms.length - 1;
  /** @param {KeyboardEvent} event */
  function onKey(event) {
    const here = cursor.value ?? last;
    const across = event.shiftKey ? 10 : 1;
    /** @type {Record<string, number | null>} */
    const moves = { ArrowLeft: here - across, ArrowRight: here + across, Home: 0, End: last, Escape: null };
    if (!(event.key in moves)) return;
    if (event.key !== 'Escape') event.preventDefault();
    const to = moves[event.key];
    cursor.value = to === null ? null : Math.min(last, Math.max(0, to));
    if (cursor.value !== null) announce(cursorWords(data, cursor.value));
  }
  return t.div(
    {
      class: 'bands',
      tabIndex: 0,
      role: 'application',
      'aria-label': 'Charts on one axis of time. Left and right move the cursor of all of them; t shows a table',
      onKeyDown: onKey,
    },
    TOPICS.map(([topic, title]) => {
      const charts = data.charts.filter((chart) => chart.topic === topic);
      if (charts.length === 0) return null;
      return el(
        Card,
        {
          key: topic,
          title,
          note: 'line: median of the peers; band: least to largest; pinned: the worst of each slice of time',
          tools: el(Where, { data }),
        },
        t.div(
          { class: 'charts' },
          charts.map((chart) => el(BandChart, { key: chart.key, chart, data, run })),
        ),
      );
    }),
  );
}

/** What the charts that say most say at a slice of time. Pure. @param {Resources} data @param {number} at */
export function cursorWords(data, at) {
  const step = data.step[at];
  const apart = data.charts.filter((chart) => chart.pinned.some((line) => line.stands_apart));
  const shown = (apart.length > 0 ? apart : data.charts).slice(0, 2);
  const words = shown.map((chart) => `${chart.title}: ${readingWords(chart, at)}`);
  return [timeOfDay(data.time_ms[at]), step === null ? '' : `step ${count(step)}`, ...words].filter(Boolean).join('; ');
}
