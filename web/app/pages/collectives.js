/** Communication: what steps wait for, how fast calls are, who arrives last, the links between nodes. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, duration, plural, sentence } from '../format.js';
import { setTitle } from '../page.js';
import { CappedNote, Card, Empty, LeftOutNote, Loaded, Problem, Skeleton } from '../parts/bits.js';
import { CollectivesTable } from '../parts/collectives.js';
import { KindsTable, lastWords } from '../parts/kinds.js';
import { LinksCard } from '../parts/links.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { readRange, runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Communication} Communication */
/** @typedef {import('../../types/api.js').Collectives} Collectives */
/** @typedef {import('../../types/api.js').LastArrival} LastArrival */

const POLL_MS = 15_000; // of a live run: an answer reads single calls

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, topic, ended }) {
  const steps = readRange(query.value.steps);
  const range = { from: steps?.[0], to: steps?.[1], attempt: query.value.attempt };
  const path = withQuery(runPath(run, 'communication'), range);
  const answer = /** @type {import('../api.js').Answer<Communication>} */ (
    useApi(path, { everyMs: ended ? 0 : POLL_MS })
  );
  const data = answer.data;
  useEffect(() => setTitle(data?.text ?? 'Communication', run), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the communication' })
      : el(Skeleton, { height: 240, waitsFor: 'the communication' });
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}`, 'data-api': path },
    t.header({ class: 'pagehead' }, t.h1({ id: 'verdict' }, data.text || 'Communication'), el(Steps, { data })),
    data.rows.length === 0 ? el(Nothing, {}) : el(Kinds, { data, path, run }),
    data.last.length > 0 ? el(LastCard, { data, run }) : null,
    data.rows.length > 0 ? el(LinksCard, { links: data.links }) : null,
    el(WholeAttempt, { run, topic, range }),
  );
}

function Nothing() {
  return t.div(
    { class: 'card padded' },
    el(
      Empty,
      { title: 'No call was recorded in these steps.' },
      t.p(
        null,
        'A run with one rank has none. In others the hooks may be off: the rank’s page says what each hook uses.',
      ),
    ),
  );
}

/** Which steps, and others. @param {{data: Communication}} props */
function Steps({ data }) {
  const asked = query.value.steps ?? '';
  const [text, setText] = useState(asked);
  useEffect(() => setText(asked), [asked]);
  const wrong = text !== '' && readRange(text) === null;
  return t.form(
    {
      class: 'buttons stepsform',
      onSubmit: (event) => {
        event.preventDefault();
        if (!wrong) setQuery({ steps: text || null });
      },
    },
    t.label(
      { class: 'askfield' },
      asked ? 'Steps' : `Steps: the newest ${count(Math.max(0, data.step_hi - data.step_lo + 1))}`,
      t.input({
        type: 'text',
        size: 13,
        value: text,
        placeholder: `${data.step_lo}-${data.step_hi}`,
        'aria-invalid': wrong,
        title: 'Two numbers, as in 100-200',
        onInput: (event) => setText(event.currentTarget.value.trim()),
      }),
    ),
    t.button({ type: 'submit', class: 'button', disabled: wrong }, 'Show'),
    asked ? t.button({ type: 'button', class: 'link', onClick: () => setQuery({ steps: null }) }, 'the newest') : null,
  );
}

/** @param {{data: Communication, path: string, run: string}} props */
function Kinds({ data, path, run }) {
  const { op = '', group = '' } = query.value;
  const rows = data.rows.filter((row) => (!op || row.operation === op) && (!group || row.group === group));
  const names = [...new Set(data.rows.map((row) => row.operation))].sort();
  const groups = new Map(data.rows.map((row) => [row.group, row.group_text || `group ${row.group}`]));
  return el(
    Card,
    {
      title: 'By group, operation and size',
      note: `${plural(data.count, 'call')} of all ranks in steps ${count(data.step_lo)}–${count(data.step_hi)}`,
      tools: [
        names.length > 1
          ? choice(
              'op',
              'Operation',
              op,
              names.map((name) => [name, name]),
            )
          : null,
        groups.size > 1 ? choice('group', 'Group', group, [...groups]) : null,
        t.a({ key: 'c', href: csvHref(path) }, 'CSV'),
      ],
    },
    rows.length > 0
      ? el(KindsTable, { rows, run })
      : t.p(
          { class: 'note padded' },
          'No call of these steps is of this kind. ',
          t.button({ type: 'button', class: 'link', onClick: () => setQuery({ op: null, group: null }) }, 'Show all'),
        ),
    el(CappedNote, { capped: data.capped, noun: 'kinds' }),
    t.ul(
      { class: 'plainlist note' },
      [
        ...data.notes,
        'Exposed: the time of a step in which the main thread waits for these calls; overlapped: the other time in which one of them is in flight; both are means over the ranks of the group',
        'Algorithm bandwidth: bytes over the time of the member that waited least; bus bandwidth: times 2(n−1)/n of all_reduce, (n−1)/n of all_gather, reduce_scatter and all_to_all (performance notes of nccl-tests)',
      ].map((text) => t.li({ key: text }, sentence(text))),
    ),
    el(LeftOutNote, { parts: data.left_out }),
  );
}

/** @param {string} key @param {string} title @param {string} value @param {[string, string][]} options */
function choice(key, title, value, options) {
  return t.select(
    {
      key,
      'aria-label': title,
      value,
      onChange: (event) => setQuery({ [key]: event.currentTarget.value || null }),
    },
    t.option({ value: '' }, `any ${title.toLowerCase()}`),
    options.map(([name, text]) => t.option({ key: name, value: name }, text)),
  );
}

/** @param {{data: Communication, run: string}} props */
function LastCard({ data, run }) {
  const most = Math.max(1e-9, ...data.last.map((one) => one.waited_ms_per_step));
  return el(
    Card,
    {
      title: 'Who arrives last',
      note: 'in collectives of which every member is known; bars: the longest wait of the first to arrive in a step, a mean over the steps',
    },
    t.div(
      { class: 'budget' },
      data.last.map((one) =>
        t.div(
          { class: 'bar', key: one.rank },
          t.span(
            { class: 'barlabel', title: one.host },
            t.a({ class: 'quiet', href: runPath(run, 'ranks', String(one.rank)) }, `Rank ${count(one.rank)}`),
            one.host ? t.span({ class: 'faint' }, ` ${one.host}`) : null,
          ),
          t.span(
            { class: 'bartrack', role: 'img', 'aria-label': lastWords(one) },
            t.span({
              class: 'seg t-wait',
              title: lastWords(one),
              style: { width: `${(one.waited_ms_per_step / most) * 100}%` },
            }),
          ),
          t.span({ class: 'bartotal' }, duration(one.waited_ms_per_step)),
        ),
      ),
    ),
    t.p({ class: 'note padded' }, `${data.last.map(lastWords).slice(0, 3).join('; ')}.`),
    el(CappedNote, { capped: data.last_capped, noun: 'ranks that were last at least once' }),
  );
}

/** The sums that the server keeps of all calls, by exact size.
 * @param {{run: string, topic: string | null, range: import('../url.js').Query}} props */
function WholeAttempt({ run, topic, range }) {
  const path = withQuery(runPath(run, 'collectives'), range);
  const answer = /** @type {import('../api.js').Answer<Collectives>} */ (useApi(path, { topic, on: ['steps'] }));
  return el(
    Card,
    {
      title: range.from === undefined ? 'All calls of the attempt' : 'All calls of these steps',
      note: 'by exact size; percentiles of the sums are up to 9 % high',
      tools: t.a({ href: csvHref(path) }, 'CSV'),
    },
    Loaded({
      answer,
      height: 120,
      what: 'the sums',
      children: (data) => [
        t.p({ key: 't', class: 'note padded' }, data.text),
        data.rows.length > 0 ? el(CollectivesTable, { key: 'r', data, brief: false }) : null,
        el(CappedNote, { key: 'c', capped: data.capped, noun: 'kinds' }),
        el(LeftOutNote, { key: 'l', parts: data.left_out }),
      ],
    }),
  );
}
