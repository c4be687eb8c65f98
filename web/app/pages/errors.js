/** Errors grouped by cause, the first in time first: the one that started it on top. */

import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { count, dateTime, plural, rankWords, sentence } from '../format.js';
import { setTitle } from '../page.js';
import { CappedNote, Card, CopyButton, Icon, Problem, Skeleton } from '../parts/bits.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Errors} Errors */
/** @typedef {import('../../types/api.js').ErrorGroup} ErrorGroup */

const ROLE = { initiating: 'Started it', cascade: 'Followed from it', unknown: 'Role not known' };
const AROUND_MS = 10_000;

/** @param {import('../main.js').PageProps} props */
export function Page({ run, topic, overview }) {
  const path = runPath(run, 'errors');
  const answer = /** @type {import('../api.js').Answer<Errors>} */ (useApi(path, { topic, on: ['errors'] }));
  const groups = answer.data?.groups ?? [];
  const root = groups.find((group) => group.role === 'initiating') ?? groups[0];
  const lines = overview.data?.counts.log_lines;
  const answerText = !answer.data
    ? ''
    : root
      ? `${root.type} on ${rankWords(root.ranks)}${root.role === 'initiating' && groups.length > 1 ? ' started it' : ''}`
      : `No errors${lines ? ` in ${plural(lines, 'log line')}` : ''}`;
  useEffect(() => setTitle(answerText || 'Errors', run), [answerText]);
  if (!answer.data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the errors' })
      : el(Skeleton, { height: 240, waitsFor: 'the errors' });
  return t.div(
    { class: 'stack' },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, answerText),
      root
        ? t.p(
            { class: 'faint' },
            `${plural(groups.length, 'cause')}, ${plural(
              groups.reduce((sum, group) => sum + group.count, 0),
              'error',
            )} `,
            t.a({ href: csvHref(path) }, 'CSV'),
          )
        : null,
    ),
    groups.length === 0
      ? t.div(
          { class: 'card padded' },
          t.p(
            { class: 'lead' },
            'No exception left a script or a thread, and no collective raised one. ',
            t.a({ href: withQuery(runPath(run, 'logs'), { level: 'ERROR' }) }, 'Log lines of level ERROR'),
          ),
        )
      : null,
    el(CappedNote, { capped: answer.data.capped, noun: 'causes' }),
    groups.map((group) => el(ErrorCard, { key: group.id, group, run, open: group === root })),
  );
}

/** @param {{group: ErrorGroup, run: string, open: boolean}} props */
function ErrorCard({ group, run, open }) {
  return el(
    Card,
    {
      class: `error is-${group.role}`,
      title: [
        el(Icon, {
          key: 'i',
          name: group.role === 'initiating' ? 'critical' : group.role === 'cascade' ? 'info' : 'warning',
        }),
        ` ${group.type}`,
      ],
      note: `${ROLE[group.role]}. ${plural(group.count, 'error')} on ${rankWords(group.ranks)}, first at ${dateTime(group.first_ms)}${group.step ? `, step ${count(group.step)}` : ''}`,
      tools: [
        t.a(
          {
            key: 'l',
            href: withQuery(runPath(run, 'logs'), {
              from: Math.round(group.first_ms - AROUND_MS),
              to: Math.round(group.first_ms + AROUND_MS),
            }),
          },
          'Logs at that time',
        ),
        group.ranks.length > 0
          ? t.a({ key: 'r', href: runPath(run, 'ranks', String(group.ranks[0])) }, `Rank ${group.ranks[0]}`)
          : null,
      ],
    },
    t.p({ class: 'errormessage' }, group.message || 'It carries no message.'),
    group.traceback
      ? t.details(
          { class: 'tracebox', open },
          t.summary(null, 'Traceback'),
          t.div(
            { class: 'tracehead' },
            el(CopyButton, { text: group.traceback, what: 'the traceback', class: 'link' }),
          ),
          t.pre({ class: 'trace', tabIndex: 0 }, group.traceback),
        )
      : null,
    t.p({ class: 'note padded' }, [group.why_role, group.why_grouped].filter(Boolean).map(sentence).join(' ')),
  );
}
