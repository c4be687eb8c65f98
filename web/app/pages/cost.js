/** What a run cost: where the time of all ranks went, in rank-hours and money, and what changes would give. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { change, count, duration, figure, money, percent, plural, sentence } from '../format.js';
import { setTitle } from '../page.js';
import { Card, Empty, Problem, Skeleton, Table } from '../parts/bits.js';
import {
  hoursWords,
  isTelling,
  LOOKS,
  readChanges,
  readPrice,
  shareWords,
  spotHour,
  spotPaysFrom,
  spotPaysUpTo,
  stepWith,
  waterfall,
} from '../parts/costmaths.js';
import { Field } from '../parts/fields.js';
import { Otherwise } from '../parts/whatif.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';

/** @typedef {import('../../types/api.js').RunCost} Cost */
/** @typedef {import('../../types/api.js').CostWhatIf} WhatIf */
/** @typedef {{value: number, currency: string} | null} Price */

const STEPS = 1000; // in which the answer is given
const MS_PER_HOUR = 3_600_000;

/** @param {import('../main.js').PageProps} props */
export function Page({ run, topic }) {
  const path = runPath(run, 'cost');
  const answer = /** @type {import('../api.js').Answer<Cost>} */ (useApi(path, { topic, on: ['verdict', 'run'] }));
  const data = answer.data;
  useEffect(() => setTitle(data?.text ?? 'Cost', run), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the cost' })
      : el(Skeleton, { height: 240, waitsFor: 'the cost' });
  const price = priceOf(data);
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}` },
    t.header({ class: 'pagehead' }, t.h1({ id: 'verdict' }, data.text), el(PriceForm, { data })),
    data.parts.length > 0
      ? [el(Waterfall, { key: 'w', data, path, price }), el(Changes, { key: 'c', run, data, price })]
      : t.div(
          { class: 'card padded' },
          el(
            Empty,
            { title: 'The server works it out every 10 s while a run goes on, and once more when it ends.' },
            t.p(null, t.a({ class: 'button', href: runPath(run) }, 'The run’s overview')),
          ),
        ),
    el(Otherwise, { key: 'o', run, topic }),
  );
}

/** The price in the address, else that of the server's list. @param {Cost} data @returns {Price} */
function priceOf(data) {
  const value = readPrice(query.value.price);
  if (value !== null) return { value, currency: query.value.currency ?? '' };
  return data.price_per_rank_hour === null ? null : { value: data.price_per_rank_hour, currency: data.currency };
}

/** The spot price in the address, else that of the server's list, which belongs to its other price. @param {Cost} data */
function spotOf(data) {
  return readPrice(query.value.spot) ?? (query.value.price ? null : data.spot_per_rank_hour);
}

/** Whether a spot price pays, in words; nothing without both prices. @param {Cost} data @param {Price} price */
function spotWords(data, price) {
  const spot = spotOf(data);
  if (spot === null || price === null) return [];
  const amount = money(spot, price.currency);
  const often = data.interruptions_per_hour;
  const lost = data.restart_seconds;
  if (spot >= price.value) return [`Spot at ${amount} never pays: it is no cheaper`];
  const rate = often ? `${figure(often)} interruptions of its hosts an hour, by the price list` : '';
  if (lost === null) {
    const why = 'this run was never restarted, so what an interruption takes is not known';
    if (!often) return [`Whether spot at ${amount} pays is not known: ${why}`];
    const most = duration((spotPaysUpTo(price.value, spot, often) ?? 0) * 1e3);
    return [`Spot at ${amount} pays where an interruption takes less than ${most} (${rate}); ${why}`];
  }
  const apart = duration((spotPaysFrom(price.value, spot, lost) ?? 0) * 1e3);
  const breakEven = `it pays while interruptions are ${apart} or more apart; in this run each took ${duration(lost * 1e3)}`;
  if (!often) return [`Spot at ${amount}: ${breakEven}`];
  const hour = spotHour(spot, often, lost);
  return [
    `Spot at ${amount} ${hour < price.value ? 'pays' : 'does not pay'}: with ${rate}, an hour’s work of a rank costs ${money(hour, price.currency)} in place of ${money(price.value, price.currency)}; ${breakEven}`,
  ];
}

/** @param {{data: Cost}} props */
function PriceForm({ data }) {
  const [price, setPrice] = useState(query.value.price ?? '');
  const [currency, setCurrency] = useState(query.value.currency ?? '');
  const [spot, setSpot] = useState(query.value.spot ?? '');
  useEffect(() => {
    setPrice(query.value.price ?? '');
    setCurrency(query.value.currency ?? '');
    setSpot(query.value.spot ?? '');
  }, [query.value.price, query.value.currency, query.value.spot]);
  const [wrongPrice, wrongSpot] = [price, spot].map((text) => text !== '' && readPrice(text) === null);
  const wrong = wrongPrice || wrongSpot;
  return t.form(
    {
      class: 'buttons stepsform',
      'aria-label': 'Price',
      onSubmit: (event) => {
        event.preventDefault();
        if (!wrong)
          setQuery(
            { price: price || null, currency: price ? currency || null : null, spot: spot || null },
            { replace: true },
          );
      },
    },
    t.label(
      { class: 'askfield' },
      'Price of a rank-hour',
      t.input({
        type: 'text',
        inputMode: 'decimal',
        size: 8,
        value: price,
        'aria-invalid': wrongPrice,
        title: 'A number, as in 2.50',
        placeholder: data.price_per_rank_hour === null ? 'none set' : figure(data.price_per_rank_hour),
        onInput: (event) => setPrice(event.currentTarget.value.trim()),
      }),
    ),
    el(Field, { label: 'Currency', value: currency, set: setCurrency, hint: 'EUR', size: 6 }),
    el(Field, {
      label: 'Spot price',
      value: spot,
      set: setSpot,
      hint: data.spot_per_rank_hour === null ? 'none' : figure(data.spot_per_rank_hour),
      size: 8,
    }),
    t.button({ type: 'submit', class: 'button', disabled: wrong }, 'Show'),
    query.value.price
      ? t.button(
          {
            type: 'button',
            class: 'link',
            onClick: () => setQuery({ price: null, currency: null }, { replace: true }),
          },
          'no price',
        )
      : null,
  );
}

/** @param {{data: Cost, path: string, price: Price}} props */
function Waterfall({ data, path, price }) {
  const total = data.rank_hours ?? 0;
  const all = { name: 'all', what: 'the whole time of all ranks', share: 1, rank_hours: total };
  const rows = [{ part: all, from: 0 }, ...waterfall(data.parts)];
  return el(
    Card,
    {
      title: 'Where the ranks’ time went',
      note: `${hoursWords(total)} of ${plural(data.num_ranks, 'rank')}${price ? `, ${money(total * price.value, price.currency)}` : ''}; what is in no part is shown as unknown`,
      tools: t.a({ href: csvHref(path) }, 'CSV'),
    },
    Table({
      label: 'Where the time went',
      class: 'waterfall',
      rows,
      keyOf: ({ part }) => part.name,
      rowProps: ({ part }) => ({ 'data-part': part.name }),
      columns: [
        {
          label: 'Part',
          class: 'nowrap',
          cell: ({ part: { name } }) => (name === 'all' || name === 'productive' ? t.b(null, name) : name),
        },
        {
          class: 'w-fall',
          cell: ({ part, from }) =>
            t.span(
              { class: 'falltrack', 'aria-hidden': 'true' },
              t.span({
                class: `fall ${LOOKS[part.name] ?? 't-other'}`,
                style: { marginLeft: `${from * 100}%`, width: `${part.share * 100}%` },
              }),
            ),
        },
        { label: 'Share', class: 'num nowrap', cell: ({ part }) => shareWords(part.share) },
        { label: 'Time', class: 'num nowrap', cell: ({ part }) => hoursWords(part.rank_hours) },
        price && {
          label: 'Money',
          class: 'num nowrap',
          cell: ({ part }) => money(part.rank_hours * price.value, price.currency),
        },
        { label: 'What it is', class: 'wide faint', cell: ({ part }) => part.what },
      ],
    }),
    t.ul(
      { class: 'plainlist note' },
      [
        ...data.notes,
        ...spotWords(data, price),
        `In steps that are kept, whatever ranks did there: ${percent(data.ettr)} (effective training time ratio)`,
      ].map((text) => t.li({ key: text }, sentence(text))),
    ),
  );
}

/** @param {{run: string, data: Cost, price: Price}} props */
function Changes({ run, data, price }) {
  const found = data.what_if;
  if (!found)
    return el(Card, {
      title: 'What would change it',
      note: sentence(`no replay of the steps: ${data.no_what_if || 'nothing was recorded of operations'}`),
    });
  const chosen = readChanges(found, query.value.if);
  const shown = found.changes.filter((one) => chosen.includes(one.key) || isTelling(found, one.key));
  const left = found.changes.length - shown.length;
  /** @param {string} key @param {boolean} on */
  function turn(key, on) {
    const keys = on ? [...chosen, key] : chosen.filter((one) => one !== key);
    setQuery({ if: keys.join(',') || null }, { replace: true });
  }
  return el(
    Card,
    {
      title: 'What would change it',
      note: `the newest ${plural(found.num_steps, 'recorded step')}, ${count(found.step_lo)}–${count(found.step_hi)}, run again; the replay gives back their recorded time within ${percent(Math.abs(found.replayed_ms / found.step_ms - 1))}`,
    },
    t.div(
      { class: 'switches' },
      shown.map((one) => {
        const alone = stepWith(found, [one.key]);
        return t.label(
          { key: one.key, class: 'switch' },
          t.input({
            type: 'checkbox',
            role: 'switch',
            checked: chosen.includes(one.key),
            'aria-describedby': `assumed-${one.key}`,
            onChange: (event) => turn(one.key, event.currentTarget.checked),
          }),
          t.span(
            null,
            t.b(null, one.label),
            alone === null ? null : ` ${change(alone / found.step_ms - 1)} of the step`,
            t.span({ class: 'note block', id: `assumed-${one.key}` }, `Assumed: ${sentence(one.assumption)}`),
          ),
        );
      }),
    ),
    left > 0
      ? t.p({ class: 'note padded' }, `${plural(left, 'change')} would give no more than the replay is off by.`)
      : null,
    el(Result, { data, found, chosen, price }),
    data.slow_ranks.length > 0 && !found.changes.some((one) => one.key === 'as-peers')
      ? t.p(
          { class: 'note padded' },
          'No finding calls a rank slow in these steps, or it has no peer that does the same: a run without its slowness cannot be replayed.',
        )
      : null,
    t.p(
      { class: 'note padded' },
      'Other layouts, links, bucket sizes and microbatches are below. Checkpoint distances, and what else would give 3 % or more, are ',
      t.a({ href: runPath(run, 'findings') }, 'findings'),
      '.',
    ),
  );
}

/** @param {{data: Cost, found: WhatIf, chosen: string[], price: Price}} props */
function Result({ data, found, chosen, price }) {
  const then = stepWith(found, chosen);
  const hours = (/** @type {number} */ ms) => (ms * STEPS * data.num_ranks) / MS_PER_HOUR;
  const cost = (/** @type {number} */ ms) =>
    `${hoursWords(hours(ms), hours(found.step_ms))}${price ? ` (${money(hours(ms) * price.value, price.currency)})` : ''}`;
  const now = `A step takes ${duration(found.step_ms)} on average: ${count(STEPS)} steps cost ${cost(found.step_ms)}`;
  return t.p(
    { class: 'padded result', role: 'status' },
    chosen.length === 0 || then === null
      ? `${now}. Switch something on to see what it would give.`
      : [
          t.b({ key: 'b' }, `A step would take ${duration(then)} in place of ${duration(found.step_ms)}`),
          ` (${change(then / found.step_ms - 1)}): ${count(STEPS)} steps would cost ${cost(then)} in place of ${cost(found.step_ms)}.`,
        ],
  );
}
