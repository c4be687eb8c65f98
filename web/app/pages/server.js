/** Rankscope itself: whether every part works, what it sees of live runs, its settings, what was done. */

import { useEffect } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { bytes, count, duration, figure, percent, plural, words } from '../format.js';
import { setTitle } from '../page.js';
import { AuditLog } from '../parts/audit.js';
import { Ago, CappedNote, Card, Icon, Problem, Skeleton, Table } from '../parts/bits.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';

/** @typedef {import('../../types/api.js').ServerAnswer} ServerAnswer */
/** @typedef {import('../../types/api.js').SeenRun} SeenRun */
/** @typedef {import('../../types/api.js').OwnFigure} OwnFigure */
/** @typedef {import('../../types/api.js').SettingsAnswer} SettingsAnswer */
/** @typedef {import('../../types/api.js').SettingValue} SettingValue */
/** @typedef {import('../../types/api.js').Session} Session */

const POLL_MS = 10_000; // each answer tries every part
const NEWEST = 10; // deeds: all are on the page of access

export function Page() {
  const answer = /** @type {import('../api.js').Answer<ServerAnswer>} */ (useApi('server', { everyMs: POLL_MS }));
  const session = /** @type {import('../api.js').Answer<Session>} */ (useApi('session'));
  const data = answer.data;
  useEffect(() => setTitle(data?.text ?? 'Server'), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'how the server is' })
      : el(Skeleton, { height: 240, waitsFor: 'how the server is' });
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}` },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict', class: data.is_well ? '' : 'bad' }, data.text),
      t.p(
        { class: 'faint' },
        `Rankscope ${data.version} `,
        t.a({ href: 'storage' }, 'Storage'),
        ' ',
        t.a({ href: 'access' }, 'Access'),
      ),
    ),
    el(KeyFigures, { figures: data.figures }),
    el(Parts, { data }),
    el(Seen, { data }),
    el(SettingList, {}),
    session.data?.roles.includes('admin') ? el(AuditLog, { most: NEWEST }) : null,
    el(Figures, { data }),
  );
}

/** The most that matters of its numbers. @type {[string, string, string][]} */
const KEY_FIGURES = [
  ['rankscope_analysis_lag_seconds', 'Stored and not looked at', 'the oldest batch that waits for a look'],
  ['rankscope_queue_delay_seconds', 'Received and not stored', 'the oldest batch in work'],
  ['rankscope_database_bytes', 'Database', ''],
  ['rankscope_disk_free_bytes', 'Free on its disk', ''],
];

/** @param {{figures: OwnFigure[]}} props */
function KeyFigures({ figures }) {
  return t.dl(
    { class: 'numbers card' },
    KEY_FIGURES.map(([name, label, hint]) => {
      const found = figures.find((one) => one.name === name);
      return t.div(
        { key: name },
        t.dt(null, label),
        t.dd(null, t.span({ class: 'figure' }, found ? withUnit(found) : 'not known')),
        t.dd({ class: 'faint' }, hint),
      );
    }),
  );
}

/** A number with the unit that its name says. @param {OwnFigure} own */
function withUnit({ name, value }) {
  if (value === null) return 'not known';
  const plain = name.replace(/_total$/, '');
  if (plain.endsWith('_bytes')) return bytes(value);
  if (plain.endsWith('_seconds')) return value === 0 ? '0 s' : duration(value * 1000);
  return Number.isInteger(value) ? count(value) : figure(value);
}

/** @param {{data: ServerAnswer}} props */
function Parts({ data }) {
  return el(
    Card,
    { title: 'Parts', api: 'ready', note: 'each tried just now, as it is used' },
    Table({
      label: 'Parts of the server',
      frame: 'short',
      rows: data.parts,
      keyOf: (one) => one.part,
      columns: [
        { label: 'Part', class: 'nowrap', cell: (one) => words(one.part) },
        {
          label: 'State',
          class: 'w-state',
          cell: (one) => mark(one.ready ? 'ok' : 'critical', one.ready ? 'works' : 'does not work'),
        },
        { label: 'Why not', class: 'wide', cell: (one) => one.reason },
      ],
    }),
  );
}

/** @param {string} name @param {string} text */
function mark(name, text) {
  return t.span({ class: `severity is-${name}` }, el(Icon, { name }), t.span(null, text));
}

/** @param {{data: ServerAnswer}} props */
function Seen({ data }) {
  return el(
    Card,
    { title: 'What it sees of live runs', note: 'how many ranks report, what was lost, what recording leaves out' },
    data.runs.length > 0
      ? Table({
          label: 'Coverage of live runs',
          rows: data.runs,
          keyOf: (run) => run.run_id,
          columns: [
            { label: 'Run', class: 'wide', cell: (run) => t.a({ href: runPath(run.run_id) }, run.name) },
            { label: 'Ranks reporting', class: 'num nowrap', cell: (run) => ofExpected(run) },
            { label: 'Records lost', class: 'num', cell: (run) => bad(run.lost) },
            { label: 'Batches missing', class: 'num', cell: (run) => bad(run.missing_batches) },
            { label: 'Refused', class: 'num', cell: (run) => bad(run.refused) },
            {
              label: 'Recorded',
              class: 'wide',
              cell: (run) =>
                t.a({ href: runPath(run.run_id, 'agent') }, run.thinning || 'everything, within the budget'),
            },
            { label: 'Overhead', class: 'num nowrap', cell: overhead },
            { label: 'Heard', class: 'nowrap', cell: (run) => el(Ago, { ms: run.received_ms }) },
          ],
        })
      : t.p({ class: 'note padded' }, 'No run is live.'),
    el(CappedNote, { capped: data.runs_capped, noun: 'live runs, the newest' }),
  );
}

/** @param {SeenRun} run */
function ofExpected(run) {
  const text = `${count(run.reporting)} of ${count(run.expected)}`;
  return run.reporting < run.expected ? t.b({ class: 'bad' }, text) : text;
}

/** @param {number} number */
function bad(number) {
  return number > 0 ? t.b({ class: 'bad' }, count(number)) : '0';
}

/** What recording took of the worst rank; one that never left anything out does not say it. @param {SeenRun} run */
function overhead({ overhead_ratio: took, budget_ratio: budget }) {
  return took === null || budget === null ? '–' : `${percent(took)} of ${percent(budget)}`;
}

const SOURCES = { default: 'default', file: 'file', environment: 'environment', flag: 'command line' };

function SettingList() {
  const answer = /** @type {import('../api.js').Answer<SettingsAnswer>} */ (useApi('settings'));
  const isAll = query.value.settings === 'all';
  return el(
    Card,
    {
      title: 'Settings',
      api: 'settings',
      note: 'a flag wins over the environment, that over the file; of a secret only whether it is set',
      tools: [
        t.a({ key: 'csv', href: csvHref('settings') }, 'CSV'),
        ' ',
        t.button(
          {
            key: 'all',
            type: 'button',
            class: 'button small',
            'aria-pressed': isAll,
            onClick: () => setQuery({ settings: isAll ? null : 'all' }, { replace: true }),
          },
          'Defaults too',
        ),
      ],
    },
    answer.error ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the settings' }) : null,
    answer.data ? settingTable(answer.data.settings, isAll) : null,
  );
}

/** @param {SettingValue[]} settings @param {boolean} isAll */
function settingTable(settings, isAll) {
  const set = settings.filter((one) => one.source !== 'default');
  const shown = isAll ? [...set, ...settings.filter((one) => one.source === 'default')] : set;
  if (shown.length === 0)
    return t.p({ class: 'note padded' }, `All ${plural(settings.length, 'setting')} have their defaults.`);
  return Table({
    label: 'Settings in force',
    rows: shown,
    keyOf: (one) => one.name,
    columns: [
      {
        label: 'Setting',
        class: 'nowrap',
        title: (one) => `${one.flag}, ${one.variable}`,
        cell: (one) => t.code(null, one.name),
      },
      { label: 'Value', cell: (one) => written(one, one.value) },
      { label: 'Default', class: 'faint', cell: (one) => written(one, one.default) },
      { label: 'From', class: 'nowrap', title: (one) => one.where, cell: (one) => SOURCES[one.source] },
      { label: 'Said by', cell: (one) => (one.where ? t.code(null, one.where) : '') },
      { label: 'What it does', class: 'wide', cell: (one) => one.text },
    ],
  });
}

/** @param {SettingValue} setting @param {SettingValue['value']} value */
function written({ name }, value) {
  if (value === '') return t.span({ class: 'faint' }, 'none');
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  return typeof value === 'number' && name.endsWith('_bytes') ? bytes(value) : String(value);
}

/** @param {{data: ServerAnswer}} props */
function Figures({ data }) {
  return el(
    Card,
    {
      title: 'Its own numbers',
      note: 'since it started; the same as for Prometheus at /metrics',
      tools: t.a({ href: csvHref('server') }, 'CSV'),
    },
    Table({
      label: 'Numbers of the server',
      rows: data.figures,
      keyOf: (one) => `${one.name} ${one.kind}`,
      columns: [
        {
          label: 'What',
          class: 'wide',
          cell: (one) => [one.text, one.kind ? t.span({ class: 'faint' }, ` ${words(one.kind)}`) : null],
        },
        { label: 'Value', class: 'num nowrap', cell: withUnit },
        {
          label: 'Metric',
          class: 'nowrap',
          cell: (one) => t.code({ class: 'faint' }, one.kind ? `${one.name}{${one.kind}}` : one.name),
        },
      ],
    }),
  );
}
