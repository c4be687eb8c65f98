/** What was communicated, the most exposed first. */

import { useApi } from '../api.js';
import { count, duration, figure } from '../format.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { Card, Loaded } from './bits.js';

/** @typedef {import('../../types/api.js').Collectives} Collectives */

/** @param {{run: string, topic: string | null}} props */
export function CollectivesCard({ run, topic }) {
  const answer = /** @type {import('../api.js').Answer<Collectives>} */ (
    useApi(runPath(run, 'collectives'), { topic, on: ['steps'] })
  );
  return el(
    Card,
    {
      title: 'Collectives',
      note: 'exposed: the time of a step in which compute waited for it',
      tools: t.a({ href: runPath(run, 'collectives') }, 'All'),
    },
    Loaded({
      answer,
      height: 150,
      what: 'the collectives',
      children: (data) =>
        data.rows.length === 0
          ? t.p({ class: 'note padded' }, data.text)
          : el(CollectivesTable, { data: { ...data, rows: data.rows.slice(0, 5) }, brief: true }),
    }),
  );
}

/** @param {{data: Collectives, brief: boolean}} props */
export function CollectivesTable({ data, brief }) {
  const most = Math.max(1e-9, ...data.rows.map((row) => row.exposed_ms_per_step ?? 0));
  const size = (/** @type {number | null} */ bytes) =>
    bytes === null
      ? '–'
      : bytes >= 1 << 20
        ? `${figure(bytes / (1 << 20))} MiB`
        : bytes >= 1024
          ? `${figure(bytes / 1024)} KiB`
          : `${bytes} B`;
  return t.div(
    { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Collectives' },
    t.table(
      { class: 'table' },
      t.thead(
        null,
        t.tr(
          null,
          t.th(null, 'Operation'),
          t.th(null, 'Group'),
          t.th({ class: 'num' }, 'Size'),
          brief ? null : t.th({ class: 'num' }, 'Count'),
          t.th({ class: 'num' }, 'p50'),
          t.th({ class: 'num' }, 'p99'),
          brief ? null : t.th({ class: 'num' }, 'Longest'),
          t.th({ class: 'num' }, 'Exposed'),
          t.th({ class: 'w-bar' }, t.span({ class: 'sr' }, 'Share')),
        ),
      ),
      t.tbody(
        null,
        data.rows.map((row, i) =>
          t.tr(
            { key: i },
            t.td(null, t.code(null, row.operation)),
            t.td({ class: 'clip', title: `group ${row.group}` }, row.group_text || `group ${row.group}`),
            t.td({ class: 'num nowrap' }, size(row.size_bytes)),
            brief ? null : t.td({ class: 'num' }, count(row.count)),
            t.td({ class: 'num nowrap' }, duration(row.p50_ms)),
            t.td({ class: 'num nowrap' }, duration(row.p99_ms)),
            brief ? null : t.td({ class: 'num nowrap' }, duration(row.max_ms)),
            t.td({ class: 'num' }, t.b(null, duration(row.exposed_ms_per_step))),
            t.td(
              null,
              t.span(
                { class: 'minitrack', 'aria-hidden': 'true' },
                t.span({ class: 't-comm', style: { width: `${((row.exposed_ms_per_step ?? 0) / most) * 100}%` } }),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}
