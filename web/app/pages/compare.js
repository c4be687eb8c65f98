/** Two runs, attempts or ranges of steps beside each other: what changed, then the evidence. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, kindWords, plural, sentence } from '../format.js';
import { setTitle } from '../page.js';
import { alike } from '../parts/alike.js';
import { CappedNote, Card, LeftOutNote, Problem, Severity, Skeleton, Table } from '../parts/bits.js';
import { DifferenceTable, RateTable, Times } from '../parts/compared.js';
import { Lazy } from '../parts/shell.js';
import { Sides } from '../parts/sides.js';
import { Spreads } from '../parts/spreads.js';
import { query } from '../router.js';
import { el, t } from '../tags.js';
import { comparePath, runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Comparison} Comparison */

const POLL_MS = 15_000; // of live runs: an answer reads many steps
const OVER = new Set(['ended', 'failed']);
const MOST_CHOICES = 8;
const MOST_NAMES = 6;

export function Page() {
  const path = comparePath(query.value);
  const [live, setLive] = useState(false);
  const answer = /** @type {import('../api.js').Answer<Comparison>} */ (useApi(path, { everyMs: live ? POLL_MS : 0 }));
  const data = path === answer.path || answer.data ? answer.data : null;
  useEffect(() => setTitle(data?.text ?? 'Compare'), [data?.text]);
  const goesOn = data !== null && [data.before, data.after].some((side) => side && !OVER.has(side.status));
  useEffect(() => setLive(goesOn), [goesOn]);
  if (path === null)
    return t.div(
      { class: 'stack' },
      t.header({ class: 'pagehead' }, t.h1({ id: 'verdict' }, 'Choose two runs to compare')),
      el(Sides, { data: null }),
    );
  if (!data)
    return answer.error
      ? t.div(
          { class: 'stack' },
          el(Problem, { error: answer.error, retry: answer.refresh, what: 'the comparison' }),
          el(Sides, { data: null }),
        )
      : el(Skeleton, { height: 240, waitsFor: 'the comparison' });
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}` },
    t.header({ class: 'pagehead' }, t.h1({ id: 'verdict' }, data.text)),
    el(Sides, { data }),
    data.not_comparable.length > 0
      ? el(
          Card,
          { title: 'What cannot be compared, or only with care' },
          t.ul(
            { class: 'plainlist' },
            data.not_comparable.map((text) => t.li({ key: text }, `${text}.`)),
          ),
        )
      : null,
    el(LeftOutNote, { parts: data.left_out }),
    data.before ? el(Evidence, { data, path }) : el(Choices, { after: data.after }),
  );
}

/** What the run may be compared with, as no run before it has its name. @param {{after: Comparison['after']}} props */
function Choices({ after }) {
  const runs = /** @type {import('../api.js').Answer<import('../../types/api.js').Runs>} */ (useApi('runs?limit=50'));
  const others = (runs.data?.runs ?? []).filter((run) => run.run_id !== after.run_id).slice(0, MOST_CHOICES);
  if (others.length === 0) return null;
  return el(
    Card,
    { title: 'Compare with' },
    t.ul(
      { class: 'plainlist' },
      others.map((run) =>
        t.li(
          { key: run.run_id },
          t.a({ href: withQuery('compare', { a: run.run_id, b: after.run_id }) }, run.name),
          t.span({ class: 'faint' }, ` ${run.run_id}, ${run.status}, ${plural(run.step, 'step')}`),
        ),
      ),
    ),
  );
}

/** @param {{data: Comparison, path: string}} props */
function Evidence({ data, path }) {
  const [before, after] = [data.before?.label ?? '', data.after.label];
  return [
    data.step && (data.step.before_median_ms !== null || data.step.after_median_ms !== null)
      ? el(
          Card,
          {
            key: 'parts',
            title: 'Where the time of a step goes',
            note: 'its parts: those of the rank that worked longest in each step, for which the others wait',
            tools: t.a({ href: csvHref(path) }, 'CSV'),
          },
          el(DifferenceTable, { step: data.step, parts: data.parts, before, after }),
          t.p({ class: 'note padded' }, sentence(data.noise_text)),
        )
      : null,
    t.div(
      { class: 'pair', key: 'pair' },
      data.times ? el(Card, { title: 'Times of the steps' }, el(Times, { times: data.times, before, after })) : null,
      data.rates.some((one) => one.before !== null || one.after !== null)
        ? el(
            Card,
            { title: 'How much is done', note: 'steps of all the time compared, pauses between steps left out' },
            el(RateTable, { rates: data.rates, before, after }),
          )
        : null,
    ),
    data.spreads.length > 0
      ? el(
          Card,
          { key: 'spreads', title: 'How times vary', note: 'step by step, and rank by rank' },
          el(Spreads, { data, before, after }),
        )
      : null,
    data.course
      ? el(
          Card,
          { key: 'course', title: 'Step by step', note: 'both from their first step on' },
          el(Lazy, {
            key: `${before} ${after} ${data.before?.step_lo} ${data.after.step_lo}`,
            load: () => import('../parts/course.js'),
            pick: 'Course',
            props: { course: data.course, before, after },
          }),
        )
      : null,
    el(Drift, { key: 'drift', data }),
    el(Findings, { key: 'findings', data }),
  ];
}

const SIDE_WORDS = { node: 'node', option: 'option of the command' };

/** What differs around the steps. @param {{data: Comparison}} props */
function Drift({ data }) {
  const { facts, num_common_facts: common, unknown_facts: unknown } = data;
  return el(
    Card,
    {
      title: 'What differs around them',
      note: `${plural(facts.length, 'difference')}, ${plural(common, 'fact')} alike`,
    },
    facts.length === 0
      ? t.p(
          { class: 'note padded' },
          common > 0 ? 'No fact that both sent differs.' : 'Nothing is known of both: no difference can be said.',
        )
      : Table({
          label: 'What differs',
          rows: alike(facts, (one) => (one.kind === 'node' ? `node ${one.after.length}` : `${one.kind} ${one.fact}`)),
          keyOf: ([one]) => `${one.kind} ${one.fact}`,
          columns: [
            { label: 'Weight', class: 'w-sev', cell: ([one]) => el(Severity, { severity: one.severity }) },
            {
              label: 'What',
              class: 'wide',
              cell: ([one, ...more]) => [
                t.b(null, more.length > 0 ? plural(more.length + 1, 'node') : one.fact.replace(/^env\./, '')),
                more.length > 0
                  ? t.span({ class: 'faint' }, ` ${names([one, ...more].map(({ fact }) => fact))}`)
                  : t.span({ class: 'faint' }, ` ${SIDE_WORDS[/** @type {'node'} */ (one.kind)] ?? one.kind}`),
              ],
            },
            { label: `Before: ${data.before?.label}`, class: 'wide', cell: ([one]) => values(one.before, one.kind) },
            { label: `After: ${data.after.label}`, class: 'wide', cell: ([one]) => values(one.after, one.kind) },
          ],
        }),
    el(CappedNote, { capped: data.facts_capped, noun: 'differences' }),
    unknown.length > 0
      ? t.details(
          { class: 'padded' },
          t.summary(
            null,
            `${plural(data.unknown_capped?.total ?? unknown.length, 'fact')} that one side alone sent: no difference is known`,
          ),
          t.p({ class: 'note' }, unknown.join(', ')),
          el(CappedNote, { capped: data.unknown_capped, noun: 'facts' }),
        )
      : null,
  );
}

/** @param {string[]} list @param {string} kind */
function values(list, kind) {
  if (list.length === 0) return t.span({ class: 'faint' }, kind === 'node' ? 'not there' : 'not given');
  if (kind === 'node') return 'there';
  return list.map((one, at) => [at > 0 ? ', ' : '', t.code({ key: one }, one)]);
}

/** @param {{data: Comparison}} props */
function Findings({ data }) {
  const { findings } = data;
  return el(
    Card,
    { title: 'Findings', note: 'of the steps compared; the same: of one kind, on the same ranks' },
    findings.length === 0
      ? t.p({ class: 'note padded' }, 'No finding holds in the steps compared of either.')
      : Table({
          label: 'Findings of both',
          rows: alike(
            findings,
            (one) => `${one.kind} ${one.severity} ${one.before_id === null} ${one.after_id === null}`,
          ),
          keyOf: ([one]) => `${one.kind} ${one.before_id} ${one.after_id}`,
          columns: [
            { label: 'Severity', class: 'w-sev', cell: ([one]) => el(Severity, { severity: one.severity }) },
            {
              label: 'What',
              class: 'wide',
              cell: ([one, ...more]) => [
                t.b(null, kindWords(one.kind)),
                ' ',
                t.span({ class: 'faint' }, one.what, more.length > 0 ? ` and ${count(more.length)} more` : ''),
              ],
            },
            {
              label: 'Before',
              class: 'nowrap',
              cell: (some) => found(some.map((one) => [one.before_run, one.before_id])),
            },
            {
              label: 'After',
              class: 'nowrap',
              cell: (some) => found(some.map((one) => [one.after_run, one.after_id])),
            },
          ],
        }),
    el(CappedNote, { capped: data.findings_capped, noun: 'findings' }),
  );
}

/** The first of some findings of one side; the others are on its page of findings. @param {[string, number | null][]} some */
function found([[run, id], ...more]) {
  if (id === null) return t.span({ class: 'faint' }, 'none');
  return [
    t.a({ href: runPath(run, 'findings', String(id)) }, `finding ${id}`),
    more.length > 0 ? [', ', t.a({ href: runPath(run, 'findings') }, `${count(more.length)} more`)] : null,
  ];
}

/** @param {string[]} list */
function names(list) {
  const shown = list.slice(0, MOST_NAMES).join(', ');
  return list.length > MOST_NAMES ? `${shown} and ${count(list.length - MOST_NAMES)} more` : shown;
}
