/** The two sides of a comparison: which run, attempt and steps each is, and how to choose others. */

import { useEffect, useState } from 'preact/hooks';
import { useApi } from '../api.js';
import { count, plural } from '../format.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { readRange, runPath } from '../url.js';
import { Ago } from './bits.js';

/** @typedef {import('../../types/api.js').Comparison} Comparison */
/** @typedef {import('../../types/api.js').CompareSide} Side */
/** @typedef {import('../../types/api.js').Runs} Runs */

/** Both sides, and what of them is compared. @param {{data: Comparison | null}} props */
export function Sides({ data }) {
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

/** Whether files were changed since the commit. @param {string} [dirty] */
export function dirtyWords(dirty) {
  if (!dirty || ['no', '0', 'false'].includes(dirty)) return '';
  return dirty === 'unknown' ? ', whether files changed is not known' : ', changed files';
}

/** @param {Record<string, string>} code */
function codeWords(code) {
  const commit = code['code.commit'];
  const dirty = dirtyWords(code['code.dirty']);
  return commit ? commit.slice(0, 12) + dirty : code['code.hash'] || 'not known';
}

/** @param {string} name @param {string} value */
function fact(name, value) {
  return t.div({ key: name }, t.dt(null, name), t.dd(null, value));
}
