/** Weeks of all runs: where the time of ranks went, what it was lost to, how busy machines were. */

import { count, figure, percent, plural } from '../format.js';
import { el, t } from '../tags.js';
import { CappedNote, Card, Table } from './bits.js';
import { hoursWords, LOOKS, shareWords } from './costmaths.js';

/** @typedef {import('../../types/api.js').Fleet} Fleet */
/** @typedef {import('../../types/api.js').FleetWeek} Week */
/** @typedef {Omit<import('../../types/api.js').FleetProject, 'project'>} Hours */

/** @type {[string, string, (hours: Hours) => number][]} */
const HOUR_PARTS = [
  ['kept', 't-fwd', (hours) => hours.kept_rank_hours],
  ['lost', 't-lost', (hours) => hours.lost_rank_hours],
  ['other', 't-other', (hours) => hours.other_rank_hours],
  ['unknown', 't-unknown', (hours) => hours.unknown_rank_hours],
];

/** @param {{data: Fleet}} props */
export function Weeks({ data }) {
  const most = Math.max(1e-9, ...data.weeks.map((week) => week.rank_hours));
  return el(
    Card,
    {
      title: 'Rank-hours by week',
      note: [
        'of the runs that began in it, from Monday, UTC',
        data.weeks.some((week) => week.num_live > 0) ? 'of runs that are live, until now' : '',
      ]
        .filter(Boolean)
        .join('; '),
      tools: HOUR_PARTS.map(([name, look]) => el(Key, { key: name, name, look })),
    },
    Table({
      label: 'Rank-hours by week',
      rows: [...data.weeks].reverse(),
      keyOf: (week) => week.begin_ms,
      columns: [
        { label: 'Week from', class: 'nowrap', cell: weekName },
        { label: 'Where they went', class: 'w-fall', cell: (week) => hoursBar(week, most) },
        ...hoursColumns(),
      ],
    }),
    el(CappedNote, { capped: data.weeks_capped, noun: 'runs of these weeks, the newest' }),
  );
}

/** @param {{name: string, look: string}} props */
function Key({ name, look }) {
  return t.span({ class: 'gridkey' }, t.span({ class: `swatch ${look}`, 'aria-hidden': 'true' }), name);
}

/** What is known of the hours of some runs, as columns. @returns {import('../parts/bits.js').Column<any>[]} */
function hoursColumns() {
  const known = (/** @type {Hours} */ hours, /** @type {string} */ text) =>
    isKnown(hours) ? text : t.span({ class: 'faint' }, hours.num_runs > 0 ? 'not known' : '–');
  return [
    { label: 'All', class: 'num nowrap', cell: (hours) => known(hours, hoursWords(hours.rank_hours)) },
    {
      label: 'Productive',
      class: 'num nowrap',
      hint: 'Computing that is kept; kept has its communication, data and evaluation, too',
      cell: (hours) => known(hours, hoursWords(hours.productive_rank_hours)),
    },
    { label: 'Lost', class: 'num nowrap', cell: (hours) => known(hours, hoursWords(hours.lost_rank_hours)) },
    {
      label: 'Lost share',
      class: 'num nowrap',
      cell: (hours) =>
        known(hours, hours.rank_hours > 0 ? shareWords(hours.lost_rank_hours / hours.rank_hours) : 'no rank-hour'),
    },
    {
      label: 'GPUs',
      class: 'w-use',
      hint: 'Share of the time in which a kernel ran, of all GPUs of the runs’ hosts, while they were sampled',
      cell: (hours) => useBar(hours.gpu_utilization_ratio, hours.num_gpu_known, hours.num_runs),
    },
    {
      label: 'Processors',
      class: 'w-use',
      hint: 'User and system time of all processors of the runs’ hosts, while they were sampled',
      cell: (hours) => useBar(hours.cpu_utilization_ratio, hours.num_cpu_known, hours.num_runs),
    },
    { label: 'Runs', class: 'num', cell: (hours) => count(hours.num_runs) },
    { label: 'Live', class: 'num', cell: (hours) => count(hours.num_live) },
    { label: 'Cost not known', class: 'num', cell: (hours) => count(hours.num_unknown) },
  ];
}

/** What was lost, by what it was lost to. @param {{data: Fleet}} props */
export function Causes({ data }) {
  const weeks = data.weeks.filter((week) => week.num_runs > 0).reverse();
  if (weeks.length === 0) return null;
  const causes = Object.keys(weeks[0].lost_by_cause);
  const most = Math.max(1e-9, ...weeks.map((week) => week.lost_rank_hours));
  return el(
    Card,
    {
      title: 'Lost rank-hours by cause',
      note: 'weeks in which a run began',
      tools: CAUSES.map(([name, look]) => el(Key, { key: name, name, look })),
    },
    Table({
      label: 'Lost rank-hours by cause',
      rows: weeks,
      keyOf: (week) => week.begin_ms,
      columns: [
        { label: 'Week from', class: 'nowrap', cell: weekName },
        {
          label: 'To what',
          class: 'w-fall',
          cell: (week) =>
            isKnown(week)
              ? track(
                  causes.map((name) => [name, LOOKS[name] ?? 't-lost', week.lost_by_cause[name]]),
                  most,
                )
              : t.span({ class: 'faint' }, 'not known'),
        },
        ...causes.map((name) => ({
          label: name.charAt(0).toUpperCase() + name.slice(1),
          class: 'num nowrap',
          cell: (/** @type {Week} */ week) => (isKnown(week) ? hoursWords(week.lost_by_cause[name]) : '–'),
        })),
      ],
    }),
  );
}

/** The looks of causes: those that one waits for, and those that one does again. */
const CAUSES = [
  ['straggling', LOOKS.straggling],
  ['waiting, bubbles', LOOKS.waiting],
  ['restarts, work done again, stuck or failing', LOOKS.restart],
];

const MOST_PROJECTS = 100;

/** The same by project, where there are several. @param {{data: Fleet}} props */
export function Projects({ data }) {
  const rows = [...data.weeks]
    .reverse()
    .flatMap((week) =>
      week.projects.map((project) => ({ ...project, begin_ms: week.begin_ms, is_over: week.is_over })),
    );
  if (new Set(rows.map((row) => row.project)).size < 2) return null;
  const most = Math.max(1e-9, ...rows.map((row) => row.rank_hours));
  return el(
    Card,
    { title: 'Rank-hours by week and project', note: 'most rank-hours first in each week' },
    Table({
      label: 'Rank-hours by week and project',
      rows,
      keyOf: (row) => `${row.begin_ms} ${row.project}`,
      most: MOST_PROJECTS,
      noun: 'weeks of projects, the newest',
      columns: [
        { label: 'Week from', class: 'nowrap', cell: weekName },
        { label: 'Project', class: 'nowrap', cell: (row) => row.project },
        { label: 'Where they went', class: 'w-fall', cell: (row) => hoursBar(row, most) },
        ...hoursColumns(),
      ],
    }),
  );
}

const day = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', year: 'numeric', timeZone: 'UTC' });

/** @param {{begin_ms: number, is_over: boolean}} week */
function weekName(week) {
  return week.is_over
    ? day.format(week.begin_ms)
    : [day.format(week.begin_ms), t.span({ key: 'n', class: 'faint' }, ', not over')];
}

/** @param {Hours} hours */
function isKnown(hours) {
  return hours.num_runs > hours.num_unknown;
}

/** @param {Hours} hours @param {number} most */
function hoursBar(hours, most) {
  if (hours.num_runs > 0 && !isKnown(hours))
    return t.span({ class: 'weektrack' }, t.span({ class: 'fall t-unknown all', title: 'not known' }));
  return track(
    HOUR_PARTS.map(([name, look, of]) => [name, look, of(hours)]),
    most,
  );
}

/** @param {[string, string, number][]} parts @param {number} most */
function track(parts, most) {
  return t.span(
    { class: 'weektrack' },
    parts.map(([name, look, hours]) =>
      hours > 0
        ? t.span({
            key: name,
            class: `fall ${look}`,
            title: `${name}: ${figure(hours)} rank-hours`,
            style: { width: `${(hours / most) * 100}%` },
          })
        : null,
    ),
  );
}

/** How busy machines were, of how many runs it is known. @param {number | null} ratio @param {number} known @param {number} runs */
function useBar(ratio, known, runs) {
  if (runs === 0) return t.span({ class: 'faint' }, '–');
  if (ratio === null)
    return t.span(
      { class: 'usebar' },
      t.span({ class: 'usetrack t-unknown', 'aria-hidden': 'true' }),
      t.span({ class: 'faint' }, 'not measured'),
    );
  return t.span(
    { class: 'usebar', title: `measured in ${count(known)} of ${plural(runs, 'run')}` },
    t.span(
      { class: 'usetrack', 'aria-hidden': 'true' },
      t.span({ class: 'fall t-fwd', style: { width: `${100 * ratio}%` } }),
    ),
    percent(ratio),
    known < runs ? t.span({ class: 'faint' }, ` of ${plural(known, 'run')}`) : null,
  );
}
