/** Kinds of calls: one row each, its last arrivals and where its expectation comes from below it. */

import { bytes, count, duration, percent, si } from '../format.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { CappedNote } from './bits.js';

/** @typedef {import('../../types/api.js').CommunicationRow} Row */
/** @typedef {import('../../types/api.js').LastArrival} LastArrival */

const COLUMNS = 13;

/** @param {{rows: Row[], run: string}} props */
export function KindsTable({ rows, run }) {
  const most = Math.max(1e-9, ...rows.map((row) => row.exposed_ms_per_step ?? 0));
  return t.div(
    { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Kinds of calls' },
    t.table(
      { class: 'table kinds' },
      t.thead(
        null,
        t.tr(
          null,
          t.th(null, 'Operation'),
          t.th(null, 'Over'),
          t.th({ class: 'num' }, 'Size'),
          t.th({ class: 'num' }, 'Calls'),
          t.th({ class: 'num' }, 'p50'),
          t.th({ class: 'num' }, 'p95'),
          t.th({ class: 'num' }, 'p99'),
          t.th({ class: 'num' }, 'Algorithm'),
          t.th({ class: 'num' }, 'Bus'),
          t.th({ class: 'num' }, 'Expected'),
          t.th({ class: 'num' }, 'Exposed'),
          t.th({ class: 'num' }, 'Overlapped'),
          t.th({ class: 'num' }, 'Spread'),
          t.th(null, 'Last'),
        ),
      ),
      t.tbody(
        null,
        rows.map((row) => el(KindRow, { key: nameOf(row), row, run, most })),
      ),
    ),
  );
}

/** What names a row in the address. Pure. @param {Row} row */
export function nameOf(row) {
  return `${row.operation}@${row.group}@${row.size_lo}`;
}

/** @param {{row: Row, run: string, most: number}} props */
function KindRow({ row, run, most }) {
  const open = query.value.call === nameOf(row);
  const top = row.last[0];
  return [
    t.tr(
      { key: 'row', class: open ? 'here' : '' },
      t.td(
        { class: 'nowrap' },
        t.button(
          {
            type: 'button',
            class: 'link',
            'aria-expanded': open,
            onClick: () => setQuery({ call: open ? null : nameOf(row) }),
          },
          t.code(null, row.operation),
        ),
      ),
      t.td({ class: 'clip', title: `group ${row.group}` }, row.group_text || `group ${row.group}`),
      t.td({ class: 'num nowrap' }, classWords(row)),
      t.td({ class: 'num' }, count(row.count)),
      t.td({ class: 'num nowrap' }, duration(row.p50_ms)),
      t.td({ class: 'num nowrap' }, duration(row.p95_ms)),
      t.td({ class: 'num nowrap' }, duration(row.p99_ms)),
      t.td({ class: 'num nowrap' }, speed(row.algbw_bytes_per_second)),
      t.td({ class: 'num nowrap' }, t.b(null, speed(row.busbw_bytes_per_second))),
      t.td(
        { class: 'num nowrap', title: row.expected_text },
        row.expected_bytes_per_second === null
          ? t.span({ class: 'faint' }, 'unknown')
          : speed(row.expected_bytes_per_second),
      ),
      t.td(
        { class: 'num nowrap' },
        t.b(null, duration(row.exposed_ms_per_step)),
        t.span(
          { class: 'minitrack', 'aria-hidden': 'true' },
          t.span({ class: 't-comm', style: { width: `${((row.exposed_ms_per_step ?? 0) / most) * 100}%` } }),
        ),
      ),
      t.td({ class: 'num nowrap' }, duration(row.overlapped_ms_per_step)),
      t.td(
        { class: 'num nowrap', title: 'median and p95 of the time from the first arrival to the last' },
        spread(row),
      ),
      t.td(
        { class: 'nowrap' },
        top ? `rank ${count(top.rank)}, ${percent(top.share)}` : t.span({ class: 'faint' }, 'unknown'),
      ),
    ),
    open ? t.tr({ key: 'more', class: 'more' }, t.td({ colSpan: COLUMNS + 1 }, el(More, { row, run }))) : null,
  ];
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

/** @param {number | null} perSecond */
export function speed(perSecond) {
  if (perSecond === null) return '–';
  return perSecond < 1e5 ? `${si(perSecond / 1e3)} kB/s` : si(perSecond, 'B/s');
}

/** @param {Row} row */
function spread(row) {
  return row.spread_p50_ms === null ? '–' : `${duration(row.spread_p50_ms)}, ${duration(row.spread_p95_ms)}`;
}
