/** What was communicated, the most exposed first. */

import { useApi } from '../api.js';
import { count, duration, figure, plural } from '../format.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { Card, Loaded, Table } from './bits.js';

/** @typedef {import('../../types/api.js').Collectives} Collectives */

const RECENT = 50; // steps, as the cards beside it

/** @param {{run: string, topic: string | null, step: number}} props the newest step */
export function CollectivesCard({ run, topic, step }) {
  const from = Math.max(1, step - RECENT + 1);
  const path = withQuery(runPath(run, 'collectives'), { from: step ? from : null });
  const answer = /** @type {import('../api.js').Answer<Collectives>} */ (useApi(path, { topic, on: ['steps'] }));
  return el(
    Card,
    {
      title: 'Collectives',
      api: path,
      note: `last ${plural(step ? step - from + 1 : RECENT, 'step')}; exposed: the time of a step in which compute waited for it`,
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
  return Table({
    label: 'Collectives',
    rows: data.rows,
    columns: [
      { label: 'Operation', cell: (row) => t.code(null, row.operation) },
      {
        label: 'Group',
        class: 'clip',
        title: (row) => `group ${row.group}`,
        cell: (row) => row.group_text || `group ${row.group}`,
      },
      { label: 'Size', class: 'num nowrap', cell: (row) => size(row.size_bytes) },
      !brief && { label: 'Count', class: 'num', cell: (row) => count(row.count) },
      { label: 'p50', class: 'num nowrap', cell: (row) => duration(row.p50_ms) },
      { label: 'p99', class: 'num nowrap', cell: (row) => duration(row.p99_ms) },
      !brief && { label: 'Longest', class: 'num nowrap', cell: (row) => duration(row.max_ms) },
      { label: 'Exposed', class: 'num', cell: (row) => t.b(null, duration(row.exposed_ms_per_step)) },
      {
        label: t.span({ class: 'sr' }, 'Share'),
        class: 'w-bar',
        cell: (row) =>
          t.span(
            { class: 'minitrack', 'aria-hidden': 'true' },
            t.span({ class: 't-comm', style: { width: `${((row.exposed_ms_per_step ?? 0) / most) * 100}%` } }),
          ),
      },
    ],
  });
}
