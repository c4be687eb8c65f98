/** Last collectives of each process group: which members began and ended what, those that lag first. */

import { standingWords } from '../charts/waits.js';
import { count, dateTime, duration, plural, shortPlace } from '../format.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { CappedNote, Card } from './bits.js';

/** @typedef {import('../../types/api.js').HangAnswer} HangAnswer */
/** @typedef {import('../../types/api.js').GroupPlaces} GroupPlaces */
/** @typedef {import('../../types/api.js').PlaceRow} PlaceRow */

const STILL = new Set(['moving', 'failed', 'finished', 'waiting', 'elsewhere']);

/** Whether a member of a group is in the way of others, or not known to be well. @param {GroupPlaces} group */
function isBusy(group) {
  return group.num_waiting > 0 || group.rows.some((row) => !STILL.has(row.standing) || row.standing === 'waiting');
}

/** @param {{data: HangAnswer, run: string, csv: string}} props */
export function PlacesCard({ data, run, csv }) {
  const busy = data.groups.filter(isBusy);
  const quiet = data.groups.filter((group) => !isBusy(group));
  const shown = busy.length > 0 ? busy : quiet.slice(0, 1);
  const folded = busy.length > 0 ? quiet : quiet.slice(1);
  return el(
    Card,
    {
      title: 'Last collectives of each group',
      note: 'the last sequence that members entered, and the last that ended; equal ones are one row, those that lag first',
      tools: t.a({ href: csv }, 'CSV'),
    },
    data.groups.length === 0
      ? t.p(
          { class: 'note padded' },
          'No process group is known yet: ranks report one once init_process_group has made it.',
        )
      : null,
    shown.map((group) => el(GroupTable, { key: group.group, group, run, isOver: data.is_over })),
    folded.length > 0
      ? t.details(
          { class: 'quietgroups' },
          t.summary(
            null,
            `${plural(folded.length, busy.length > 0 ? 'group' : 'more group', busy.length > 0 ? 'groups' : 'more groups')} in which no member ${data.is_over ? 'waited' : 'waits'}`,
          ),
          folded.map((group) => el(GroupTable, { key: group.group, group, run, isOver: data.is_over })),
        )
      : null,
    el(CappedNote, { capped: data.groups_capped, noun: 'groups, those in which most wait' }),
  );
}

/** @param {{group: GroupPlaces, run: string, isOver: boolean}} props */
function GroupTable({ group, run, isOver }) {
  const wait = isOver ? 'waited' : group.num_waiting === 1 ? 'waits' : 'wait';
  const label = `Members of ${group.text}`;
  return t.section(
    { class: 'groupplaces' },
    t.h3(
      { class: 'padded' },
      group.text,
      t.span(
        { class: 'faint' },
        [
          ` group ${group.group}`,
          group.backend,
          group.num_waiting > 0 ? `${count(group.num_waiting)} of ${plural(group.num_ranks, 'member')} ${wait}` : '',
        ]
          .filter(Boolean)
          .join(', '),
      ),
    ),
    t.div(
      { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': label },
      t.table(
        { class: 'table places' },
        t.thead(
          null,
          t.tr(
            null,
            t.th(null, 'State'),
            t.th(null, 'Ranks'),
            t.th({ class: 'num' }, 'Count'),
            t.th({ class: 'num' }, 'Nodes'),
            t.th({ class: 'num' }, 'Entered'),
            t.th({ class: 'num' }, 'Ended'),
            t.th(null, isOver ? 'Was in' : 'Is in'),
            t.th({ class: 'num' }, isOver ? 'Waited' : 'Waits'),
            t.th(null, 'Called from'),
          ),
        ),
        t.tbody(
          null,
          group.rows.map((row, i) => el(Place, { key: i, row, run, isOver, most: group.most_began })),
        ),
      ),
    ),
    el(CappedNote, { capped: group.capped, noun: 'rows' }),
  );
}

/** @param {{row: PlaceRow, run: string, isOver: boolean, most: number | null}} props */
function Place({ row, run, isOver, most }) {
  const lags = most !== null && row.began !== null && row.began < most;
  const isOff = !STILL.has(row.standing);
  return t.tr(
    { class: isOff ? 'off' : '' },
    t.td(
      { class: 'nowrap' },
      isOff ? t.b({ class: 'changed' }, standingWords(row.standing, isOver)) : standingWords(row.standing, isOver),
    ),
    t.td(
      { class: 'wide', title: row.ranks.hosts.join(', ') },
      row.ranks.count === 1
        ? t.a({ href: runPath(run, 'ranks', String(row.ranks.some[0])) }, `${row.ranks.some[0]}`)
        : row.ranks.text,
    ),
    t.td({ class: 'num' }, count(row.ranks.count)),
    t.td({ class: 'num' }, row.ranks.num_hosts ? count(row.ranks.num_hosts) : '–'),
    t.td({ class: 'num' }, lags ? t.b({ class: 'changed' }, count(row.began)) : count(row.began)),
    t.td(
      { class: 'num', title: row.ended === null && row.began !== null ? 'This backend does not report ends' : '' },
      row.ended === null && row.began !== null ? 'unknown' : count(row.ended),
    ),
    t.td({ class: 'nowrap' }, insideWords(row)),
    t.td(
      { class: 'num nowrap', title: row.since_ms === null ? '' : `since ${dateTime(row.since_ms)}` },
      row.waited_seconds === null ? '–' : duration(row.waited_seconds * 1000),
    ),
    t.td({ class: 'wide clip', title: row.call_site }, shortPlace(row.call_site)),
  );
}

/** What a member is in, or last was in. @param {PlaceRow} row */
function insideWords(row) {
  if (row.exchange) return t.code(null, row.exchange);
  if (row.open_sequence !== null)
    return t.span(null, t.code(null, row.open_operation || row.operation), ` #${count(row.open_sequence)}`);
  if (row.operation && row.began !== null && row.ended !== null && row.began > row.ended)
    return t.span(null, t.code(null, row.operation), ` #${count(row.began)}`);
  if (!row.operation) return t.span({ class: 'faint' }, 'nothing yet');
  return t.span({ class: 'faint' }, 'last: ', t.code(null, row.operation));
}
