/** What a run would take otherwise: changes that are chosen together, or each that makes sense, with bands and reasons. */

import { useEffect, useState } from 'preact/hooks';
import { apiHref, csvHref, useApi } from '../api.js';
import { bytes, change, count, duration, figure, percent, plural, sentence, speed } from '../format.js';
import { useKeys } from '../keys.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { Card, Problem, Skeleton, Table } from './bits.js';
import { Choice, Field } from './fields.js';

/** @typedef {import('../../types/api.js').WhatIf} WhatIf */
/** @typedef {import('../../types/api.js').WhatIfAnswer} Answer */
/** @typedef {import('../../types/api.js').WhatIfInput} Input */

const STRATEGIES = [
  ['', 'as it is'],
  ['ddp', 'DDP'],
  ['zero1', 'ZeRO-1'],
  ['zero2', 'ZeRO-2'],
  ['fsdp', 'FSDP'],
];
/** Query parameter, label, example, width. @type {[string, string, string, number][]} */
const FIELDS = [
  ['add_nodes', 'Nodes more', '2', 4],
  ['ranks_per_node', 'Ranks of a node', '8', 4],
  ['link_times', 'Links × faster', '2', 4],
  ['microbatches', 'Microbatches', '8', 4],
  ['bucket_mib', 'Bucket, MiB', '25', 4],
  ['without', 'Without slow ranks', '3,17', 6],
];
/** @type {[string, string, string, number][]} */
const SAID = [
  ['layers', 'Layers of the model', '32', 4],
  ['between', 'Link between nodes', '25GB/s', 8],
];
const CHANGES = ['strategy', ...FIELDS.map(([name]) => name), 'equal'];
const ALL = [...CHANGES, ...SAID.map(([name]) => name)];
const BY = { planner: 'planner', replay: 'replay', both: 'both', '': '' };

/** What the address asks for. @returns {Record<string, string>} */
function asked() {
  const given = ALL.map((name) => [name, query.value[name]]).filter(([, value]) => value);
  return Object.fromEntries(given);
}

/** @param {{run: string, topic: string | null}} props */
export function Otherwise({ run, topic }) {
  const wanted = asked();
  const path = withQuery(runPath(run, 'what-if'), wanted);
  const answer = /** @type {import('../api.js').Answer<WhatIf>} */ (useApi(path, { topic, on: ['verdict', 'run'] }));
  useKeys(
    [
      {
        keys: 'f',
        text: 'Choose what would be otherwise',
        run: () => /** @type {HTMLElement | null} */ (document.querySelector('.otherwise select'))?.focus(),
      },
    ],
    [],
  );
  const data = answer.data;
  const isAsked = CHANGES.some((name) => wanted[name]);
  return el(
    Card,
    {
      title: 'If it were laid out otherwise',
      note: data?.num_steps
        ? `${data.now.text}; ${plural(data.num_steps, 'step')} of ${count(data.step_lo)}–${count(data.step_hi)}, ${duration(data.now.step_ms)} each`
        : 'the planner, calibrated by what was measured of this run',
      tools: t.a({ href: csvHref(path) }, 'CSV'),
      api: apiHref(path),
    },
    el(ChangesForm, { key: JSON.stringify(wanted), wanted }),
    answer.error
      ? answer.error.status === 422
        ? t.p(
            { class: 'padded otherwise-text', role: 'alert' },
            t.b(null, sentence(answer.error.message)),
            ` ${sentence(answer.error.detail.remedy)}`,
          )
        : el(Problem, { error: answer.error, retry: answer.refresh, what: 'these answers' })
      : data
        ? el(Answers, { data, isAsked })
        : el(Skeleton, { height: 200, waitsFor: 'what it would take' }),
  );
}

/** @param {{wanted: Record<string, string>}} props */
function ChangesForm({ wanted }) {
  const [values, setValues] = useState(wanted);
  useEffect(() => setValues(wanted), [JSON.stringify(wanted)]);
  /** @param {string} name */
  const set = (name) => (/** @type {string} */ value) => setValues({ ...values, [name]: value.trim() });
  return t.form(
    {
      class: 'otherwise padded',
      'aria-label': 'What would be otherwise',
      onSubmit: (event) => {
        event.preventDefault();
        setQuery(Object.fromEntries(ALL.map((name) => [name, values[name] || null])), { replace: true });
      },
    },
    el(Choice, { label: 'Strategy', value: values.strategy ?? '', set: set('strategy'), choices: STRATEGIES }),
    [...FIELDS, ...SAID].map(([name, label, hint, size]) =>
      el(Field, { key: name, label, value: values[name] ?? '', set: set(name), hint, size }),
    ),
    t.div(
      { class: 'buttons' },
      t.button({ type: 'submit', class: 'button primary' }, 'Work it out'),
      Object.keys(wanted).length > 0
        ? t.button(
            {
              type: 'button',
              class: 'link',
              onClick: () => setQuery(Object.fromEntries(ALL.map((name) => [name, null])), { replace: true }),
            },
            'as it is',
          )
        : null,
    ),
  );
}

/** @param {{data: WhatIf, isAsked: boolean}} props */
function Answers({ data, isAsked }) {
  const known = data.answers.filter((one) => one.step_ms !== null);
  const unknown = data.answers.filter((one) => one.step_ms === null);
  const now = data.now.step_ms;
  return [
    t.p({ key: 's', class: 'padded otherwise-text', role: 'status' }, t.b(null, sentence(data.text))),
    known.length > 0
      ? Table({
          label: 'What changes would give',
          rows: known,
          keyOf: (one) => one.key,
          rowProps: (one) => ({ 'data-change': one.key }),
          columns: [
            {
              label: 'Change',
              cell: (one) =>
                isAsked
                  ? one.label
                  : t.button({ type: 'button', class: 'link', onClick: () => choose(one) }, one.label),
            },
            { label: 'Step', class: 'num nowrap', cell: (one) => duration(one.step_ms) },
            {
              label: 'Within',
              class: 'num nowrap',
              cell: (one) => `${duration(one.step_low_ms)} – ${duration(one.step_high_ms)}`,
            },
            {
              label: 'of now',
              class: 'num nowrap',
              cell: (one) => (now ? moved(Number(one.step_ms) / now) : ''),
            },
            { label: 'Throughput', class: 'num nowrap', cell: (one) => moved(one.throughput_ratio ?? 1) },
            {
              label: 'Memory of a rank',
              class: 'num nowrap',
              cell: (one) =>
                one.memory_bytes === null
                  ? t.span({ class: 'faint', title: one.no_memory }, 'not known')
                  : memory(one, data),
            },
            { label: 'By', class: 'nowrap faint', cell: (one) => BY[one.by] },
          ],
        })
      : null,
    isAsked ? known.map((one) => el(Reasons, { key: `r${one.key}`, one })) : null,
    unknown.length > 0
      ? t.ul(
          { key: 'u', class: 'plainlist note padded', 'aria-label': 'Not known' },
          unknown.map((one) => t.li({ key: one.key }, t.b(null, one.label), `: not known. ${sentence(one.why_not)}`)),
        )
      : null,
    el(Rests, { key: 'i', data }),
  ];
}

/** A ratio to now as a change; what rounds to none is none. @param {number} ratio */
function moved(ratio) {
  return change(Math.abs(ratio - 1) < 0.0005 ? 0 : ratio - 1);
}

/** Ask for one of the answers by itself. @param {Answer} one */
function choose(one) {
  const wanted = Object.fromEntries(new URLSearchParams(one.key));
  setQuery(Object.fromEntries(CHANGES.map((name) => [name, wanted[name] ?? null])), { replace: true });
}

/** @param {Answer} one @param {WhatIf} data */
function memory(one, data) {
  const before = data.now.memory_bytes;
  const same = before === null || one.memory_bytes === null || Math.abs(one.memory_bytes / before - 1) < 0.0005;
  return same
    ? bytes(one.memory_bytes)
    : `${bytes(one.memory_bytes)} (${change(Number(one.memory_bytes) / Number(before) - 1)})`;
}

/** @param {{one: Answer}} props */
function Reasons({ one }) {
  const parts = Object.entries(one.parts).filter(([, ms]) => Math.abs(ms) >= 0.0005);
  return t.ul(
    { class: 'plainlist note padded', 'aria-label': 'What it rests on' },
    parts.length > 0
      ? t.li({ key: 'p' }, `A step: ${parts.map(([name, ms]) => `${name} ${duration(ms)}`).join(', ')}.`)
      : null,
    one.no_memory ? t.li({ key: 'm' }, `Memory is not known: ${sentence(one.no_memory)}`) : null,
    one.assumptions.map((text) => t.li({ key: text }, `Assumed: ${sentence(text)}`)),
    one.band ? t.li({ key: 'b' }, `Band: ${sentence(one.band)}`) : null,
  );
}

/** @param {{data: WhatIf}} props */
function Rests({ data }) {
  return t.details(
    { class: 'padded' },
    t.summary(null, 'What was measured, and from where'),
    Table({
      label: 'What was measured',
      rows: data.inputs,
      keyOf: (row) => row.name,
      columns: [
        { label: 'What', cell: (row) => row.label },
        { label: 'Value', class: 'num nowrap', cell: value },
        { label: 'From', class: 'faint', cell: (row) => row.source },
      ],
    }),
    data.factors.length > 0
      ? t.p(
          { class: 'note' },
          `Calibrated, so that the planner’s step of now is the measured one: ${data.factors
            .map((one) => `${one.what} ${one.name.endsWith('_ms') ? duration(one.value) : percent(one.value)}`)
            .join('; ')}.`,
        )
      : null,
  );
}

/** @param {Input} row */
function value(row) {
  if (row.value === null) return 'not known';
  if (typeof row.value === 'string') return row.value;
  if (row.unit === 'ms') return duration(row.value);
  if (row.unit === 'bytes') return bytes(row.value);
  if (row.unit === 'bytes/s') return speed(row.value);
  return row.value >= 1000 ? count(row.value) : figure(row.value);
}
