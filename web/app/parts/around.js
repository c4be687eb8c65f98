/** The lines around one: what its rank said before and after, or all ranks at that time. */

import { useState } from 'preact/hooks';
import { useApi } from '../api.js';
import { exactTime, firstLine } from '../format.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { Problem, Skeleton } from './bits.js';

/** @typedef {import('../../types/api.js').LogContext} LogContext */
/** @typedef {import('../../types/api.js').LogRow} LogRow */

const LINES = 10;

/** @param {{line: LogRow, run: string}} props */
export function Around({ line, run }) {
  const [whose, setWhose] = useState(/** @type {'rank' | 'all' | null} */ (null));
  const path = withQuery(runPath(run, 'logs', String(line.id), 'context'), {
    lines: LINES,
    everyone: whose === 'all' ? 'true' : null,
  });
  const answer = /** @type {import('../api.js').Answer<LogContext>} */ (useApi(whose ? path : null));
  const choice = (/** @type {'rank' | 'all'} */ value, /** @type {string} */ text) =>
    t.button(
      {
        type: 'button',
        class: 'button small',
        'aria-pressed': whose === value,
        onClick: () => setWhose(whose === value ? null : value),
      },
      text,
    );
  return t.section(
    { class: 'around', 'aria-label': 'Lines around it' },
    t.div(
      { class: 'buttons padded' },
      t.span({ class: 'note' }, 'Around it:'),
      choice('rank', line.rank >= 0 ? `on rank ${line.rank}` : 'on this node'),
      choice('all', 'on all ranks'),
    ),
    whose && answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the lines around it' })
      : null,
    whose && !answer.data && !answer.error ? el(Skeleton, { height: 80, waitsFor: 'the lines around it' }) : null,
    whose && answer.data && answer.path === path
      ? t.ol(
          { class: 'aroundlist' },
          answer.data.lines.map((one) =>
            t.li(
              { key: one.id, 'aria-current': one.id === line.id ? 'true' : undefined, title: one.message },
              t.time(null, exactTime(one.time_ms)),
              whose === 'all'
                ? t.span({ class: 'l-rank' }, one.rank >= 0 ? `rank ${one.rank}` : one.host || 'node')
                : null,
              t.span({ class: 'aroundtext' }, firstLine(one.message)[0]),
            ),
          ),
        )
      : null,
  );
}
