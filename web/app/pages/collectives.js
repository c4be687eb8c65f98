/** Collectives by operation, group and size, the most exposed first. */

import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { setTitle } from '../page.js';
import { CappedNote, Card, Empty, LeftOutNote, Problem, Skeleton } from '../parts/bits.js';
import { CollectivesTable } from '../parts/collectives.js';
import { query } from '../router.js';
import { el, t } from '../tags.js';
import { readRange, runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Collectives} Collectives */

/** @param {import('../main.js').PageProps} props */
export function Page({ run, topic }) {
  const steps = readRange(query.value.steps);
  const path = withQuery(runPath(run, 'collectives'), { from: steps?.[0], to: steps?.[1] });
  const answer = /** @type {import('../api.js').Answer<Collectives>} */ (useApi(path, { topic, on: ['steps'] }));
  const data = answer.data;
  useEffect(() => setTitle(data?.text ?? 'Collectives', run), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the collectives' })
      : el(Skeleton, { height: 240, waitsFor: 'the collectives' });
  return t.div(
    { class: 'stack' },
    t.header({ class: 'pagehead' }, t.h1({ id: 'verdict' }, data.text || 'Collectives')),
    data.rows.length === 0
      ? t.div(
          { class: 'card padded' },
          el(
            Empty,
            { title: 'No collective was recorded.' },
            t.p(
              null,
              'A run with one rank has none. In others the hooks may be off: the rank’s page says what each hook uses.',
            ),
          ),
        )
      : el(
          Card,
          {
            title: 'By operation, group and size',
            note: 'exposed: the time of a step in which compute waited for it',
            tools: t.a({ href: csvHref(path) }, 'CSV'),
          },
          el(CollectivesTable, { data, brief: false }),
          el(CappedNote, { capped: data.capped, noun: 'kinds' }),
        ),
    el(LeftOutNote, { parts: data.left_out }),
  );
}
