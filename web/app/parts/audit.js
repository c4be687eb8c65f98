/** What was done by whom, newest first: the audit log. */

import { useState } from 'preact/hooks';
import { useApi } from '../api.js';
import { count } from '../format.js';
import { el, t } from '../tags.js';
import { withQuery } from '../url.js';
import { Ago, Card, Problem, Table } from './bits.js';

/** @typedef {import('../../types/api.js').Audit} Audit */

/** @param {{project: string}} row */
export function projectOf({ project }) {
  return project === '*' ? 'all' : project;
}

/** @param {{most: number}} props `most`: rows at a time */
export function AuditLog({ most }) {
  const [before, setBefore] = useState(/** @type {number | null} */ (null));
  const address = withQuery('audit', { before, limit: most });
  const answer = /** @type {import('../api.js').Answer<Audit>} */ (
    useApi(address, { everyMs: before === null ? 15_000 : 0 })
  );
  const rows = answer.data?.rows ?? [];
  const older = answer.data?.before ?? null;
  return el(
    Card,
    { title: 'What was done', api: address, note: 'newest first' },
    answer.error ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the audit log' }) : null,
    rows.length === 0
      ? t.p({ class: 'note padded' }, 'Nothing is written down yet.')
      : Table({
          label: 'What was done',
          rows,
          keyOf: (row) => row.id,
          columns: [
            { label: 'When', class: 'nowrap', cell: (row) => el(Ago, { ms: row.time_ms }) },
            { label: 'Who', class: 'wide', cell: (row) => row.who },
            {
              label: 'What',
              class: 'nowrap',
              cell: (row) => (row.count > 1 ? `${row.action} ×${count(row.count)}` : row.action),
            },
            { label: 'Of what', class: 'wide', cell: (row) => [row.target, row.detail].filter(Boolean).join(': ') },
            { label: 'Project', cell: projectOf },
            { label: 'From', class: 'nowrap', cell: (row) => row.address || 'this machine' },
          ],
        }),
    older !== null || before !== null
      ? t.div(
          { class: 'pager' },
          before !== null
            ? t.button({ type: 'button', class: 'button small', onClick: () => setBefore(null) }, 'Newest')
            : null,
          older !== null
            ? t.button({ type: 'button', class: 'button small', onClick: () => setBefore(older) }, 'Older')
            : null,
        )
      : null,
  );
}
