/** Kinds of calls: one row each, its last arrivals and where its expectation comes from below it. */

import { bytes, count, duration, percent, speed } from '../format.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { CappedNote, Table } from './bits.js';

/** @typedef {import('../../types/api.js').CommunicationRow} Row */
/** @typedef {import('../../types/api.js').LastArrival} LastArrival */

/** @param {{rows: Row[], run: string}} props */
export function KindsTable({ rows, run }) {
  const most = Math.max(1e-9, ...rows.map((row) => row.exposed_ms_per_step ?? 0));
  return Table({
    label: 'Kinds of calls',
    class: 'kinds',
    rows,
    keyOf: nameOf,
    rowProps: (row) => ({ class: isOpen(row) ? 'here' : '' }),
    more: (row) => isOpen(row) && el(More, { row, run }),
    columns: [
      { label: 'Operation', class: 'nowrap', cell: (row) => el(OpenKind, { row }) },
      {
        label: 'Over',
        class: 'clip',
        title: (row) => `group ${row.group}`,
        cell: (row) => row.group_text || `group ${row.group}`,
      },
      { label: 'Size', class: 'num nowrap', cell: classWords },
      { label: 'Calls', class: 'num', cell: (row) => count(row.count) },
      { label: 'p50', class: 'num nowrap', cell: (row) => duration(row.p50_ms) },
      { label: 'p95', class: 'num nowrap', cell: (row) => duration(row.p95_ms) },
      { label: 'p99', class: 'num nowrap', cell: (row) => duration(row.p99_ms) },
      { label: 'Algorithm', class: 'num nowrap', cell: (row) => speed(row.algbw_bytes_per_second) },
      { label: 'Bus', class: 'num nowrap', cell: (row) => t.b(null, speed(row.busbw_bytes_per_second)) },
      {
        label: 'Expected',
        class: 'num nowrap',
        title: (row) => row.expected_text,
        cell: (row) =>
          row.expected_bytes_per_second === null
            ? t.span({ class: 'faint' }, 'unknown')
            : speed(row.expected_bytes_per_second),
      },
      {
        label: 'Exposed',
        class: 'num nowrap',
        cell: (row) => [
          t.b(null, duration(row.exposed_ms_per_step)),
          t.span(
            { class: 'minitrack', 'aria-hidden': 'true' },
            t.span({ class: 't-comm', style: { width: `${((row.exposed_ms_per_step ?? 0) / most) * 100}%` } }),
          ),
        ],
      },
      { label: 'Overlapped', class: 'num nowrap', cell: (row) => duration(row.overlapped_ms_per_step) },
      {
        label: 'Spread',
        class: 'num nowrap',
        title: () => 'median and p95 of the time from the first arrival to the last',
        cell: spread,
      },
      {
        label: 'Last',
        class: 'nowrap',
        cell: ({ last: [top] }) =>
          top ? `rank ${count(top.rank)}, ${percent(top.share)}` : t.span({ class: 'faint' }, 'unknown'),
      },
    ],
  });
}

/** What names a row in the address. Pure. @param {Row} row */
export function nameOf(row) {
  return `${row.operation}@${row.group}@${row.size_lo}`;
}

/** @param {Row} row */
function isOpen(row) {
  return query.value.call === nameOf(row);
}

/** Shows what is known of a row below it, and hides it again. @param {{row: Row}} props */
function OpenKind({ row }) {
  return t.button(
    {
      type: 'button',
      class: 'link',
      'aria-expanded': isOpen(row),
      onClick: () => setQuery({ call: isOpen(row) ? null : nameOf(row) }),
    },
    t.code(null, row.operation),
  );
}

/** @param {{row: Row, run: string}} props */
function More({ row, run }) {
  const chance = row.num_ranks
    ? `; by chance each of ${count(row.num_ranks)} ranks would have ${percent(1 / row.num_ranks)}`
    : '';
  return t.div(
    { class: 'morekind' },
    t.dl(
      { class: 'facts' },
      fact(
        'Sizes',
        row.size_least === row.size_largest
          ? bytes(row.size_least)
          : `${bytes(row.size_least)} to ${bytes(row.size_largest)}`,
      ),
      fact('Ranks', row.num_ranks === null ? 'not known' : count(row.num_ranks)),
      fact('Nodes', row.num_nodes === null ? 'not known' : count(row.num_nodes)),
      fact('Not ended', count(row.open)),
      fact('Matched on all members', row.num_matched > 0 ? count(row.num_matched) : 'none'),
      fact('Bus bandwidth, best twentieth', speed(row.busbw_best_bytes_per_second)),
      fact(
        'Expected',
        row.expected_bytes_per_second === null
          ? row.expected_text
          : `${speed(row.expected_bytes_per_second)}: ${row.expected_text}`,
      ),
    ),
    row.last.length > 0
      ? t.div(
          null,
          t.h3(null, 'Who arrives last'),
          t.ul(
            null,
            row.last.map((one) =>
              t.li(
                { key: one.rank },
                t.a({ href: runPath(run, 'ranks', String(one.rank)) }, `Rank ${count(one.rank)}`),
                one.host ? ` on ${one.host}: ` : ': ',
                lastWords(one).replace(/^Rank [\d,]+ /, ''),
              ),
            ),
          ),
          t.p(
            { class: 'note' },
            `Shares are of ${count(row.num_matched)} matched calls${chance}.`,
            row.num_last_unknown > 0 ? ` Of ${count(row.num_last_unknown)} it is not known who was last.` : '',
          ),
          el(CappedNote, { capped: row.last_capped, noun: 'ranks' }),
        )
      : t.p(
          { class: 'note' },
          'Who arrives last is not known: it needs the calls of all members of a collective in which all meet.',
        ),
  );
}

/** @param {string} name @param {string} value */
function fact(name, value) {
  return t.div({ key: name }, t.dt(null, name), t.dd(null, value));
}

/** @param {LastArrival} one */
export function lastWords(one) {
  return `Rank ${count(one.rank)} is last in ${percent(one.share)} (${count(one.count)}), the first one waits up to ${duration(one.waited_ms_per_step)} of a step for it`;
}

/** The one size of all calls, or the bounds of the class. Pure. @param {Row} row */
export function classWords(row) {
  if (row.size_largest <= 0) return 'none';
  if (row.size_least === row.size_largest) return bytes(row.size_least);
  return `${bytes(row.size_lo)}–${bytes(row.size_hi)}`;
}

/** @param {Row} row */
function spread(row) {
  return row.spread_p50_ms === null ? '–' : `${duration(row.spread_p50_ms)}, ${duration(row.spread_p95_ms)}`;
}
