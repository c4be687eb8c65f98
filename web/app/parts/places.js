/** Last collectives of each process group: which members began and ended what, those that lag first. */

import { standingWords } from '../charts/waits.js';
import { count, dateTime, duration, enteredWords, plural, shortPlace } from '../format.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { CappedNote, Card, Table } from './bits.js';

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
    Table({
      label,
      class: 'places',
      rows: group.rows,
      rowProps: (row) => ({ class: STILL.has(row.standing) ? '' : 'off' }),
      columns: [
        {
          label: 'State',
          class: 'nowrap',
          cell: (row) => {
            const text = standingWords(row.standing, isOver);
            return STILL.has(row.standing) ? text : t.b({ class: 'changed' }, text);
          },
        },
        {
          label: 'Ranks',
          class: 'wide',
          title: (row) => row.ranks.hosts.join(', '),
          cell: ({ ranks }) =>
            ranks.count === 1
              ? t.a({ href: runPath(run, 'ranks', String(ranks.some[0])) }, `${ranks.some[0]}`)
              : ranks.text,
        },
        { label: 'Count', class: 'num', cell: (row) => count(row.ranks.count) },
        { label: 'Nodes', class: 'num', cell: (row) => (row.ranks.num_hosts ? count(row.ranks.num_hosts) : '–') },
        {
          label: 'Entered',
          class: 'num',
          cell: ({ began }) =>
            group.most_began !== null && began !== null && began < group.most_began
              ? t.b({ class: 'changed' }, count(began))
              : count(began),
        },
        {
          label: 'Ended',
          class: 'num',
          title: (row) => (hasNoEnds(row) ? 'This backend does not report ends' : ''),
          cell: (row) => (hasNoEnds(row) ? 'unknown' : count(row.ended)),
        },
        { label: isOver ? 'Was in' : 'Is in', class: 'nowrap', cell: insideWords },
        {
          label: isOver ? 'Waited' : 'Waits',
          class: 'num nowrap',
          title: (row) => (row.since_ms === null ? '' : `since ${dateTime(row.since_ms)}`),
          cell: (row) => (row.waited_seconds === null ? '–' : duration(row.waited_seconds * 1000)),
        },
        {
          label: 'Called from',
          class: 'wide clip',
          title: (row) => row.call_site,
          cell: (row) => shortPlace(row.call_site),
        },
      ],
    }),
    el(CappedNote, { capped: group.capped, noun: 'rows' }),
  );
}

/** @param {PlaceRow} row */
function hasNoEnds(row) {
  return row.ended === null && row.began !== null;
}

/** What a member is in, or last was in. @param {PlaceRow} row */
function insideWords(row) {
  if (row.exchange) return t.code(null, row.exchange);
  if (row.open_sequence !== null)
    return t.span(null, t.code(null, row.open_operation || row.operation), ` #${count(row.open_sequence)}`);
  if (row.operation && row.began !== null && row.ended !== null && row.began > row.ended)
    return t.span(null, t.code(null, row.operation), ` #${count(row.began)}`);
  if (!row.operation) return t.span({ class: 'faint' }, enteredWords(row.exchanges));
  return t.span({ class: 'faint' }, 'last: ', t.code(null, row.operation));
}
