/** Logs: the level histogram and facets over all lines, then the lines; search runs on the server. */

import { useEffect, useMemo, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { Histogram } from '../charts/histogram.js';
import { TONE } from '../charts/histogram-maths.js';
import { count, dateTime, exactTime, plural } from '../format.js';
import { useKeys } from '../keys.js';
import { announce, setTitle } from '../page.js';
import { Command, Empty, Problem, Share, Skeleton } from '../parts/bits.js';
import { Facet } from '../parts/facet.js';
import { RING } from '../parts/fold.js';
import { VirtualList } from '../parts/list.js';
import { fieldNames, readColumns, stepHref, writeColumns } from '../parts/logfields.js';
import { ColumnHeads, Filters, LogPanel, rowLook } from '../parts/logline.js';
import { SCREEN, useLogLines } from '../parts/loglines.js';
import { SearchBox } from '../parts/searchbox.js';
import { go, query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Logs} Logs */
/** @typedef {import('../../types/api.js').LogRow} LogRow */
/** @typedef {import('../../types/api.js').Errors} Errors */

const ROW = 20;
const LOOKED_AT = 500; // of the newest lines, for the fields that they have
/** @type {[string, number][]} */
const SPANS = [
  ['last minute', 60_000],
  ['last 10 minutes', 600_000],
  ['last hour', 3_600_000],
  ['last day', 86_400_000],
];

/** The API path of the filters in force. @param {string} run @param {Record<string, string>} now */
function logsPath(run, now) {
  const { q, rank, host, level, stream, logger, from, to } = now;
  return withQuery(runPath(run, 'logs'), { q, rank, host, level, stream, logger, from_ms: from, to_ms: to });
}

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, topic, overview, ended }) {
  const now = query.value;
  const base = logsPath(run, now);
  const live = !ended && !now.to;
  const summary = /** @type {import('../api.js').Answer<Logs>} */ (
    useApi(withQuery(base, { limit: 1 }), { topic: live ? topic : null, on: ['logs'] })
  );
  const errors = /** @type {import('../api.js').Answer<Errors>} */ (
    useApi(runPath(run, 'errors'), { topic: live ? topic : null, on: ['logs'] })
  );
  const held = useLogLines(base, { topic, live });
  const [following, setFollowing] = useState(true);
  const [active, setActive] = useState(-1);
  const [choosing, setChoosing] = useState(false);
  const open = held.lines.findIndex((line) => String(line.id) === now.line);
  const all = overview.data?.counts.log_lines ?? null;
  const last = overview.data?.run.step ?? 0;
  const total = summary.data?.total ?? held.total;
  const mistake = [summary.error, held.error].some((error) => error?.status === 422 && error.detail.field === 'q');
  const sentence = mistake ? 'The search cannot be read' : sentenceOf(total, all, now, summary.data);
  useEffect(() => setTitle(sentence, 'Logs', run), [sentence]);
  useEffect(() => {
    setFollowing(!now.line);
    setActive(-1);
  }, [base]);
  useEffect(() => {
    if (following) held.seen();
  }, [following, held.fresh]);
  const columns = readColumns(now.cols);
  const names = useMemo(() => fieldNames(held.lines.slice(-LOOKED_AT)), [held.lines]);
  const toggle = (/** @type {string} */ name) =>
    setQuery(
      { cols: writeColumns(columns.includes(name) ? columns.filter((one) => one !== name) : [...columns, name]) },
      { replace: true },
    );
  useEffect(() => {
    if (!choosing || !summary.data || held.pending) return; // the key may come before the lines
    setChoosing(false);
    focusColumns();
  }, [choosing, summary.data, held.pending]);
  useKeys(
    [
      { keys: 's', text: 'Open the step of the line', run: () => openStep(held.lines[active >= 0 ? active : open]) },
      { keys: 'c', text: 'Choose fields as columns', run: () => setChoosing(true) },
      { keys: 'j', text: 'Next line', where: 'in the list' },
      { keys: 'k', text: 'Previous line', where: 'in the list' },
      { keys: 'Enter', text: 'Open the whole line', where: 'in the list' },
      { keys: 'Escape', text: 'Close the line', run: () => setQuery({ line: null }) },
    ],
    [active, open, held.lines, last],
  );
  /** @param {LogRow | undefined} row */
  function openStep(row) {
    const to = row ? stepHref(row, run, last) : null;
    if (to) go(to);
    else announce(row ? 'No step is known of this line' : 'Choose a line first');
  }
  function show(/** @type {number} */ index, /** @type {Element} */ target = document.body) {
    if (target.matches('.l-step') && stepHref(held.lines[index], run, last)) return openStep(held.lines[index]);
    setActive(index);
    setFollowing(false);
    setQuery({ line: String(held.lines[index].id) }, { replace: Boolean(now.line) });
  }
  const look = useMemo(() => rowLook(columns, run, last), [columns.join(), run, last]);
  const line = open >= 0 ? held.lines[open] : null;
  return t.div(
    { class: 'logs', 'data-api': base },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, sentence),
      el(SearchBox, { error: summary.error ?? held.error }),
      el(Spans, { until: ended ? (overview.data?.run.last_seen_ms ?? null) : null }),
      t.a(
        { class: 'button small', href: withQuery('search', { q: now.q }), title: 'The same search over all runs' },
        'All runs',
      ),
      t.a({ class: 'button small', href: csvHref(base) }, 'CSV'),
      el(Share, { titleId: 'verdict', of: '.logs' }),
    ),
    summary.data?.histogram
      ? el(Histogram, { data: summary.data.histogram, errors: errors.data?.groups })
      : t.div({ class: 'histogram blank' }),
    t.div(
      { class: 'logtools' },
      el(Filters, { total }),
      summary.data?.is_at_least
        ? t.span({ class: 'note' }, 'Counted until the page was full: numbers are those of the newest lines')
        : null,
      held.older && held.lines.length >= RING
        ? t.button(
            {
              type: 'button',
              class: 'link',
              onClick: () => setQuery({ to: Math.ceil(held.lines[0].time_ms), line: null }),
            },
            `The list holds ${count(RING)} lines: show those before ${exactTime(held.lines[0].time_ms)}`,
          )
        : null,
      held.older && !held.pending && held.lines.length > 0 && held.lines.length < SCREEN
        ? t.button({ type: 'button', class: 'link', onClick: held.loadOlder }, 'Older lines')
        : null,
      held.skipped
        ? t.span({ class: 'note' }, 'Newer lines came faster than they can be shown: all are stored and searchable')
        : null,
    ),
    t.div(
      { class: line ? 'logbody withpanel' : 'logbody' },
      el(Facets, { data: summary.data, names, columns, toggle }),
      t.div(
        { class: 'loglist card' },
        held.error && !mistake
          ? el(Problem, { error: held.error, retry: () => location.reload(), what: 'the lines' })
          : null,
        mistake ? el(Empty, { title: 'Mend the search above: it says where.' }) : null,
        held.lines.length === 0 && !held.error
          ? held.pending
            ? el(Searching, { to: held.searchedTo })
            : el(NoLines, { all, now, suggestion: held.suggestion })
          : null,
        held.lines.length > 0 ? el(ColumnHeads, { columns, drop: toggle }) : null,
        held.lines.length > 0 && !mistake
          ? el(VirtualList, {
              items: held.lines,
              row: ROW,
              keyOf: (/** @type {LogRow} */ one) => one.id,
              look,
              label: 'Log lines, oldest first',
              follow: following,
              onFollow: setFollowing,
              onTop: held.loadOlder,
              active: active >= 0 ? active : open,
              onActive: setActive,
              onOpen: show,
            })
          : null,
        live && !following && held.lines.length > 0
          ? t.button(
              { type: 'button', class: 'button primary jump', onClick: () => setFollowing(true) },
              held.fresh > 0 ? `Jump to live, ${count(held.fresh)} new` : 'Jump to live',
            )
          : null,
        live
          ? t.p(
              { class: 'tailnote' },
              t.span({ class: following ? 'dot live' : 'dot', 'aria-hidden': 'true' }),
              following ? 'following' : 'paused: the list moves again at its end',
            )
          : null,
      ),
      line
        ? el(LogPanel, {
            line,
            run,
            last,
            close: () => setQuery({ line: null }),
            step: (way) => show(Math.max(0, Math.min(held.lines.length - 1, open + way))),
          })
        : null,
    ),
  );
}

/** Whether anything was reported as wrong, or how much a search found. @param {number} total @param {number | null} all @param {Record<string, string>} now @param {Logs | null} data */
function sentenceOf(total, all, now, data) {
  const isAtLeast = data?.is_at_least ?? false;
  const filtered = ['q', 'rank', 'level', 'host', 'logger', 'stream', 'from', 'to'].some((key) => now[key]);
  if (!filtered) {
    if (all === 0 || (all === null && total === 0)) return 'No log lines yet';
    const lines = plural(total, 'log line');
    return data && !isAtLeast ? `${gravityWords(data.facets.level)} in ${lines}` : lines;
  }
  const least = isAtLeast ? 'at least ' : '';
  const said =
    all === null
      ? `${least}${plural(total, 'line')} match`
      : `${least}${count(total)} of ${plural(Math.max(all, total), 'line')} ${total === 1 ? 'matches' : 'match'}`;
  return said[0].toUpperCase() + said.slice(1);
}

/** @param {[string, number][]} levels */
function gravityWords(levels) {
  const of = (/** @type {string} */ tone) =>
    levels.reduce((sum, [level, lines]) => sum + ((TONE[level] ?? 'plain') === tone ? lines : 0), 0);
  const grave = [
    of('crit') > 0 ? plural(of('crit'), 'error') : '',
    of('warn') > 0 ? plural(of('warn'), 'warning') : '',
  ];
  return grave.filter(Boolean).join(' and ') || 'No error or warning';
}

/** The last minutes of a run: up to now, or to its end where it is over. @param {{until: number | null}} props */
function Spans({ until }) {
  return t.select(
    {
      'aria-label': 'Time span',
      value: '',
      onChange: (event) =>
        setQuery({
          from: event.currentTarget.value ? Math.floor(until ?? Date.now()) - Number(event.currentTarget.value) : null,
          to: null,
          line: null,
        }),
    },
    t.option({ value: '' }, query.value.from || query.value.to ? 'time as chosen' : 'all time'),
    SPANS.map(([title, ms]) => t.option({ key: title, value: String(ms) }, title)),
  );
}

/** To the first of the fields that can be columns. */
function focusColumns() {
  const first = document.querySelector('.facet.fields button');
  if (first instanceof HTMLElement) first.focus();
  else announce('These lines have no fields');
}

/** How many lines each value would give, and the fields that can be columns.
 * @param {{data: Logs | null, names: [string, number][], columns: string[], toggle: (name: string) => void}} props */
function Facets({ data, names, columns, toggle }) {
  if (!data) return t.div({ class: 'facets' });
  /** @type {[string, [string | number, number][]][]} */
  const groups = [
    ['level', data.facets.level],
    ['rank', data.facets.rank],
    ['stream', data.facets.stream],
    ['logger', data.facets.logger],
    ['host', data.facets.host],
  ];
  return t.nav(
    { class: 'facets', 'aria-label': 'Filters' },
    groups.map(([name, values]) =>
      values.length > 0 ? el(Facet, { key: name, name, values, isAtLeast: data.is_at_least }) : null,
    ),
    names.length + columns.length > 0 ? el(Fields, { names, columns, toggle }) : null,
  );
}

/** @param {{names: [string, number][], columns: string[], toggle: (name: string) => void}} props */
function Fields({ names, columns, toggle }) {
  const gone = columns.filter((name) => !names.some(([one]) => one === name));
  return t.div(
    { class: 'facet fields', role: 'group', 'aria-label': 'Fields as columns' },
    t.p({ class: 'sidetitle' }, 'Fields as columns'),
    [...gone.map((name) => /** @type {[string, number]} */ ([name, 0])), ...names].map(([name, lines]) =>
      t.button(
        {
          key: name,
          type: 'button',
          class: 'facetvalue',
          'aria-pressed': columns.includes(name),
          title: `${name}: in ${plural(lines, 'line')} of the newest ${LOOKED_AT}`,
          onClick: () => toggle(name),
        },
        t.span(null, name),
        t.span({ class: 'faint' }, count(lines)),
      ),
    ),
  );
}

/** How far back the search is, while it has found nothing. @param {{to: number | null}} props */
function Searching({ to }) {
  if (to === null) return el(Skeleton, { height: 300, waitsFor: 'the lines' });
  return el(Empty, { title: `Nothing since ${dateTime(to)}. Searching further back …` });
}

/** @param {{all: number | null, now: Record<string, string>, suggestion: string | null}} props */
function NoLines({ all, now, suggestion }) {
  const filtered = ['q', 'rank', 'level', 'host', 'logger', 'stream', 'from', 'to'].some((key) => now[key]);
  if (filtered)
    return el(
      Empty,
      { title: all === null ? 'No line matches.' : `0 of ${plural(all, 'line')} match.` },
      suggestion
        ? t.p(
            null,
            'No such word. Within words: ',
            t.button(
              { type: 'button', class: 'link', onClick: () => setQuery({ q: suggestion }) },
              t.code(null, suggestion),
            ),
          )
        : t.p(null, 'Drop a filter above to widen it.'),
    );
  return el(
    Empty,
    { title: 'No log lines yet. Everything that the logging module gets is recorded by itself; to send your own:' },
    el(Command, { text: 'logging.getLogger().addHandler(rankscope.LoggingHandler())' }),
  );
}
