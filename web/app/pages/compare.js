/** Two runs, attempts or ranges of steps beside each other: what changed, then the evidence. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, kindWords, plural, sentence } from '../format.js';
import { setTitle } from '../page.js';
import { Ago, CappedNote, Card, LeftOutNote, Problem, Severity, Skeleton } from '../parts/bits.js';
import { DifferenceTable, RateTable, Times } from '../parts/compared.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { comparePath, readRange, runPath } from '../url.js';

/** @typedef {import('../../types/api.js').Comparison} Comparison */
/** @typedef {import('../../types/api.js').CompareSide} Side */
/** @typedef {import('../../types/api.js').Runs} Runs */

const POLL_MS = 15_000; // of live runs: an answer reads many steps

export function Page() {
  const path = comparePath(query.value);
  const answer = /** @type {import('../api.js').Answer<Comparison>} */ (useApi(path, { everyMs: POLL_MS }));
  const data = path === answer.path || answer.data ? answer.data : null;
  useEffect(() => setTitle(data?.text ?? 'Compare'), [data?.text]);
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
            data.not_comparable.map((text) => t.li({ key: text }, sentence(text))),
          ),
        )
      : null,
    el(LeftOutNote, { parts: data.left_out }),
    data.before ? el(Evidence, { data, path }) : null,
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
    el(Drift, { key: 'drift', data }),
    el(Findings, { key: 'findings', data }),
  ];
}

/** Both sides, and what of them is compared. @param {{data: Comparison | null}} props */
function Sides({ data }) {
  const runs = /** @type {import('../api.js').Answer<Runs>} */ (useApi('runs?limit=50'));
  const { a = '', b = '' } = query.value;
  return t.section(
    { class: 'card sides', 'aria-label': 'What is compared' },
    el(Chosen, { key: `a${a}${data?.before?.run_id}`, name: 'a', title: 'Before', side: data?.before ?? null, id: a }),
    t.button(
      {
        type: 'button',
        class: 'button small swap',
        disabled: !data?.before,
        onClick: () => data?.before && swap(data.before.run_id, data.after.run_id),
      },
      'Swap',
    ),
    el(Chosen, { key: `b${b}`, name: 'b', title: 'After', side: data?.after ?? null, id: b }),
    t.datalist(
      { id: 'runs-to-compare' },
      (runs.data?.runs ?? []).map((run) =>
        t.option({ key: run.run_id, value: run.run_id }, `${run.name}, ${run.status}, ${plural(run.step, 'step')}`),
      ),
    ),
  );
}

/** @param {string} before @param {string} after the runs as they are shown, also one that was not named */
function swap(before, after) {
  const { a_attempt, b_attempt, a_steps, b_steps } = query.value;
  setQuery({
    a: after,
    b: before,
    a_attempt: b_attempt ?? null,
    b_attempt: a_attempt ?? null,
    a_steps: b_steps ?? null,
    b_steps: a_steps ?? null,
  });
}

/** One side: which run, attempt and steps. @param {{name: 'a' | 'b', title: string, side: Side | null, id: string}} props */
function Chosen({ name, title, side, id }) {
  const [run, setRun] = useState(side?.run_id ?? id);
  const asked = query.value[`${name}_steps`] ?? '';
  const [steps, setSteps] = useState(asked);
  useEffect(() => setSteps(asked), [asked]);
  const wrong = steps !== '' && readRange(steps) === null;
  return t.form(
    {
      class: 'side-chosen',
      'aria-label': title,
      onSubmit: (event) => {
        event.preventDefault();
        if (wrong) return;
        const other = run === (side?.run_id ?? id) ? {} : { [`${name}_attempt`]: null };
        setQuery({ [name]: run.trim() || null, [`${name}_steps`]: steps || null, ...other });
      },
    },
    t.p({ class: 'kicker' }, title),
    side
      ? t.p(
          null,
          t.a({ href: runPath(side.run_id), class: 'strong' }, side.name),
          t.span({ class: 'faint' }, ` ${side.status}, started `),
          el(Ago, { ms: side.started_ms }),
        )
      : null,
    t.div(
      { class: 'askrow' },
      t.label(
        { class: 'askfield wide' },
        'Run',
        t.input({
          type: 'text',
          list: 'runs-to-compare',
          value: run,
          placeholder: 'id of a run',
          onInput: (event) => setRun(event.currentTarget.value),
        }),
      ),
      side && side.attempts.length > 1
        ? t.label(
            { class: 'askfield' },
            'Attempt',
            t.select(
              {
                value: String(side.attempt),
                onChange: (event) => setQuery({ [`${name}_attempt`]: event.currentTarget.value }),
              },
              side.attempts.map((one) => t.option({ key: one, value: String(one) }, String(one))),
            ),
          )
        : null,
      t.label(
        { class: 'askfield' },
        'Steps',
        t.input({
          type: 'text',
          size: 12,
          value: steps,
          placeholder: side && side.num_steps > 0 ? `${side.step_lo}-${side.step_hi}` : 'all',
          'aria-invalid': wrong,
          onInput: (event) => setSteps(event.currentTarget.value.trim()),
        }),
      ),
      t.button({ type: 'submit', class: 'button', disabled: wrong }, 'Compare'),
    ),
    wrong ? t.p({ class: 'bad' }, 'Steps are two numbers, as in 100-200.') : null,
    side ? el(Facts, { name, side }) : null,
  );
}

/** What of a run is compared, and the ways to other parts of it. @param {{name: 'a' | 'b', side: Side}} props */
function Facts({ name, side }) {
  const asked = query.value[`${name}_steps`];
  const inside = side.onset_step !== null && side.onset_step > side.first_step && side.onset_step <= side.last_step;
  return t.div(
    null,
    t.dl(
      { class: 'facts' },
      fact('Steps compared', side.num_steps > 0 ? stepWords(side) : 'none'),
      fact('Ranks', side.world_size === null ? 'not known' : count(side.world_size)),
      fact('Nodes', side.num_nodes === null ? 'not known' : count(side.num_nodes)),
      fact('Code', codeWords(side.code)),
    ),
    inside || asked
      ? t.p(
          { class: 'note ways' },
          inside
            ? [
                `Its verdict holds since step ${count(side.onset_step)}: `,
                way(name, `${side.first_step}-${Number(side.onset_step) - 1}`, 'steps before'),
                way(name, `${side.onset_step}-${side.last_step}`, 'steps since'),
                t.button(
                  {
                    key: 'both',
                    type: 'button',
                    class: 'link',
                    onClick: () =>
                      setQuery({
                        a: side.run_id,
                        b: side.run_id,
                        a_attempt: String(side.attempt),
                        b_attempt: String(side.attempt),
                        a_steps: `${side.first_step}-${Number(side.onset_step) - 1}`,
                        b_steps: `${side.onset_step}-${side.last_step}`,
                      }),
                  },
                  'compare the two',
                ),
              ]
            : null,
          asked
            ? t.button(
                { type: 'button', class: 'link', onClick: () => setQuery({ [`${name}_steps`]: null }) },
                'usual steps',
              )
            : null,
        )
      : null,
  );
}

/** @param {'a' | 'b'} name @param {string} steps @param {string} text */
function way(name, steps, text) {
  return t.button(
    { key: steps, type: 'button', class: 'link', onClick: () => setQuery({ [`${name}_steps`]: steps }) },
    text,
  );
}

/** @param {Side} side */
function stepWords(side) {
  const range = `${count(side.step_lo)}–${count(side.step_hi)}`;
  const all = side.step_hi - side.step_lo + 1;
  return side.num_steps < all ? `${range}, ${count(side.num_steps)} of them recorded` : range;
}

/** @param {Record<string, string>} code */
function codeWords(code) {
  const commit = code['code.commit'];
  const dirty = code['code.dirty'] && !['no', '0', 'false'].includes(code['code.dirty']) ? ', changed files' : '';
  return commit ? commit.slice(0, 12) + dirty : code['code.hash'] || 'not known';
}

/** @param {string} name @param {string} value */
function fact(name, value) {
  return t.div({ key: name }, t.dt(null, name), t.dd(null, value));
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
      : t.div(
          { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'What differs' },
          t.table(
            { class: 'table' },
            t.thead(
              null,
              t.tr(
                null,
                t.th({ class: 'w-sev' }, 'Weight'),
                t.th(null, 'What'),
                t.th(null, `Before: ${data.before?.label}`),
                t.th(null, `After: ${data.after.label}`),
              ),
            ),
            t.tbody(
              null,
              facts.map((one) =>
                t.tr(
                  { key: `${one.kind} ${one.fact}` },
                  t.td(null, el(Severity, { severity: one.severity })),
                  t.td(
                    { class: 'wide' },
                    t.b(null, one.kind === 'node' ? one.fact : one.fact.replace(/^env\./, '')),
                    t.span({ class: 'faint' }, ` ${SIDE_WORDS[/** @type {'node'} */ (one.kind)] ?? one.kind}`),
                  ),
                  t.td({ class: 'wide' }, values(one.before, one.kind)),
                  t.td({ class: 'wide' }, values(one.after, one.kind)),
                ),
              ),
            ),
          ),
        ),
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
      : t.div(
          { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Findings of both' },
          t.table(
            { class: 'table' },
            t.thead(
              null,
              t.tr(
                null,
                t.th({ class: 'w-sev' }, 'Severity'),
                t.th(null, 'What'),
                t.th(null, 'Before'),
                t.th(null, 'After'),
              ),
            ),
            t.tbody(
              null,
              findings.map((one, at) =>
                t.tr(
                  { key: at },
                  t.td(null, el(Severity, { severity: one.severity })),
                  t.td({ class: 'wide' }, t.b(null, kindWords(one.kind)), ' ', t.span({ class: 'faint' }, one.what)),
                  t.td({ class: 'nowrap' }, found(one.before_run, one.before_id)),
                  t.td({ class: 'nowrap' }, found(one.after_run, one.after_id)),
                ),
              ),
            ),
          ),
        ),
    el(CappedNote, { capped: data.findings_capped, noun: 'findings' }),
  );
}

/** @param {string} run @param {number | null} id */
function found(run, id) {
  return id === null
    ? t.span({ class: 'faint' }, 'none')
    : t.a({ href: runPath(run, 'findings', String(id)) }, `finding ${id}`);
}
