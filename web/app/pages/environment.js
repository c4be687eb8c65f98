/** The environment: only what differs between ranks, then everything they share. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, plural, ranges, rankWords } from '../format.js';
import { setTitle } from '../page.js';
import { Card, CopyButton, Problem, Severity, Skeleton, Table } from '../parts/bits.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';

/** @typedef {import('../../types/api.js').EnvironmentAnswer} EnvironmentAnswer */
/** @typedef {import('../../types/api.js').FactDifference} FactDifference */

/** @param {import('../main.js').PageProps} props */
export function Page({ run, topic }) {
  const path = runPath(run, 'environment');
  const answer = /** @type {import('../api.js').Answer<EnvironmentAnswer>} */ (
    useApi(path, { topic, on: ['environment', 'ranks'] })
  );
  const data = answer.data;
  useEffect(() => setTitle(data?.text ?? 'Environment', run), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the environment' })
      : el(Skeleton, { height: 240, waitsFor: 'the environment' });
  return t.div(
    { class: 'stack' },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, data.text),
      data.missing.length > 0 ? t.p({ class: 'bad' }, `No snapshot from ${rankWords(data.missing)}.`) : null,
    ),
    data.differences.length > 0
      ? el(
          Card,
          {
            title: 'What differs',
            note: differenceWords(data.differences),
            tools: t.a({ href: csvHref(path) }, 'CSV'),
          },
          t.div(
            { class: 'differences' },
            data.differences.map((one) => el(Difference, { key: one.fact, difference: one, total: data.ranks.length })),
          ),
        )
      : null,
    data.not_known.length > 0
      ? el(
          Card,
          { title: 'Not known on some ranks', note: 'where it is known it is the same' },
          t.div(
            { class: 'differences' },
            data.not_known.map((one) => el(Difference, { key: one.fact, difference: one, total: data.ranks.length })),
          ),
        )
      : null,
    el(Common, { data }),
  );
}

/** How many facts differ, and of how many that is a mistake. @param {FactDifference[]} differences */
function differenceWords(differences) {
  const wrong = differences.filter((one) => one.severity !== 'info').length;
  const all = plural(differences.length, 'fact');
  if (wrong === 0) return `${all}, none of which has to be alike`;
  return wrong === differences.length ? `${all} that should agree` : `${all}, ${count(wrong)} of which should agree`;
}

const VALUES_SHOWN = 4;

/** The odd ones out first, the majority last and quiet. @param {{difference: FactDifference, total: number}} props */
function Difference({ difference, total }) {
  const values = [...difference.values].sort((a, b) => a.ranks.length - b.ranks.length);
  const [all, setAll] = useState(false);
  const most = values[values.length - 1];
  const majority = values.length > 1 && most.ranks.length > values[0].ranks.length ? most : null;
  const expected = difference.severity === 'info';
  return t.div(
    { class: 'difference' },
    t.div({ class: 'difffact' }, el(Severity, { severity: difference.severity }), t.b(null, difference.fact)),
    t.ul(
      null,
      (all ? values : values.slice(0, VALUES_SHOWN)).map((one) =>
        t.li(
          { key: one.value, class: one === majority || expected ? '' : 'odd' },
          t.code(null, one.value === '' ? '(empty)' : one.value),
          t.span(
            { class: 'faint' },
            `${rankWords(one.ranks)}${total > 8 ? ` (${count(one.ranks.length)} of ${count(total)})` : ''}`,
          ),
        ),
      ),
      values.length > VALUES_SHOWN && !all
        ? t.li(
            null,
            t.button(
              { type: 'button', class: 'link', onClick: () => setAll(true) },
              `All ${count(values.length)} values`,
            ),
          )
        : null,
    ),
  );
}

/** @param {{data: EnvironmentAnswer}} props */
function Common({ data }) {
  const [text, setText] = useState(query.value.q ?? '');
  const wanted = text.toLowerCase();
  const facts = data.common.filter((one) => `${one.fact} ${one.value}`.toLowerCase().includes(wanted));
  return el(
    Card,
    {
      title: data.ranks.length === 1 ? 'Facts of its one rank' : 'Where all ranks agree',
      note: `${count(data.common.length)} facts, ${data.ranks.length > 0 ? rankWords(data.ranks) : 'no rank yet'}`,
      tools: [
        t.input({
          key: 'q',
          type: 'search',
          placeholder: 'Find a fact',
          'aria-label': 'Find a fact',
          value: text,
          onInput: (event) => setText(event.currentTarget.value),
          onChange: () => setQuery({ q: text }, { replace: true }),
        }),
        el(CopyButton, {
          key: 'c',
          text: () => facts.map((one) => `${one.fact}=${one.value}`).join('\n'),
          what: 'the facts',
          class: 'link',
        }),
      ],
    },
    facts.length > 0
      ? Table({
          /* HEAD { class: 'sr' } */
          label: 'Common facts',
          class: 'keyvalue',
          rows: facts,
          keyOf: (one) => one.fact,
          columns: [
            { label: 'Fact', cell: (one) => one.fact },
            { label: 'Value', cell: (one) => t.code(null, one.value) },
          ],
        })
      : t.p(
          { class: 'note padded' },
          data.common.length === 0
            ? 'No rank has sent a snapshot yet.'
            : `None of ${count(data.common.length)} facts holds “${text}”.`,
        ),
    data.missing.length > 0
      ? t.p({ class: 'note padded' }, `Without a snapshot: ranks ${ranges(data.missing)}.`)
      : null,
  );
}
