/** The search over the lines of all runs: how many match and of what, then each with a link into its run. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { ask, csvHref, Failure, useApi } from '../api.js';
import { Histogram } from '../charts/histogram.js';
import { TONE } from '../charts/histogram-maths.js';
import { dateTime, exactTime, firstLine, plural, rankWords, words } from '../format.js';
import { useKeys } from '../keys.js';
import { follow } from '../live.js';
import { announce, setTitle } from '../page.js';
import { Card, Empty, Problem, Skeleton, Table } from '../parts/bits.js';
import { Facet } from '../parts/facet.js';
import { fold, join } from '../parts/fold.js';
import { Filters } from '../parts/logline.js';
import { SearchBox } from '../parts/searchbox.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { LINE_FILTERS, runPath, searchPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').SearchAnswer} SearchAnswer */
/** @typedef {import('../../types/api.js').LogRow} LogRow */
/** @typedef {import('../../types/api.js').FoundRun} FoundRun */
/** @typedef {import('../../types/api.js').Runs} Runs */
/** `counts`: the newest answer with counts. `base`: what `lines` are an answer to.
 * @typedef {{base: string, counts: SearchAnswer | null, lines: LogRow[], names: Map<string, string>, older: string | null, searchedTo: number | null, skipped: boolean, error: Failure | null, pending: boolean}} Found */

const PAGE = 100;
const TAIL = 1000;
const TAIL_MS = 1000; // between two questions for new lines
const COUNT_MS = 5000; // between two counts while lines come
const MOST_READS = 8; // pages without a line before a person is asked whether to go on
const NAMED = 5;
/** @type {Found} */
const NOTHING = {
  base: '',
  counts: null,
  lines: [],
  names: new Map(),
  older: null,
  searchedTo: null,
  skipped: false,
  error: null,
  pending: true,
};

export function Page() {
  const now = query.value;
  const q = now.q?.trim() ?? '';
  const live = now.live === 'yes' && !now.to;
  const base = searchPath(now);
  const { found, more } = useSearch(base, live, now.fold !== 'no');
  const mistake = found.error?.status === 422 && found.error.detail.field === 'q';
  const filtered = q !== '' || Boolean(now.from || now.to) || LINE_FILTERS.some((key) => now[key]);
  const sentence = sentenceOf(filtered, found, mistake);
  useEffect(() => setTitle(sentence, 'Search'), [sentence]);
  const toggle = (/** @type {'live' | 'fold'} */ name) => {
    if (name === 'fold') setQuery({ fold: now.fold === 'no' ? null : 'no' });
    else if (now.to) announce('The search ends at a time: drop it to follow new lines');
    else setQuery({ live: live ? null : 'yes' });
  };
  useKeys(
    [
      { keys: 'l', text: 'Follow new lines, or stop', run: () => toggle('live') },
      { keys: 'f', text: 'Lines alike as one, or each', run: () => toggle('fold') },
    ],
    [base, live],
  );
  return t.div(
    { class: 'stack searchpage', 'data-api': base },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, sentence),
      mistake ? null : t.a({ class: 'button small', href: csvHref(base) }, 'CSV'),
    ),
    el(SearchBox, { error: found.error, label: 'Search the lines of all runs', focused: q === '' }),
    q ? el(NamedRuns, { q }) : null,
    found.error && !mistake
      ? el(Problem, { error: found.error, retry: () => location.reload(), what: 'the lines' })
      : null,
    mistake ? el(Card, { title: 'Lines' }, el(Empty, { title: 'Mend the search above: it says where.' })) : null,
    found.error ? null : el(Results, { q, found, more, live, toggle }),
  );
}

/** @param {{q: string, found: Found, more: () => void, live: boolean, toggle: (name: 'live' | 'fold') => void}} props */
function Results({ q, found, more, live, toggle }) {
  const counts = found.counts;
  return [
    counts?.histogram
      ? el(Histogram, { key: 'h', data: counts.histogram })
      : t.div({ key: 'h', class: 'histogram blank' }),
    t.div(
      { key: 't', class: 'logtools' },
      el(Filters, { total: counts?.total ?? 0 }),
      query.value.run
        ? t.a(
            { href: withQuery(runPath(query.value.run, 'logs'), { q }) },
            `The logs of ${found.names.get(query.value.run) ?? query.value.run} with this search`,
          )
        : null,
      counts?.is_at_least
        ? t.span({ class: 'note' }, 'Counted until the page was full: numbers are those of the newest lines')
        : null,
      found.skipped
        ? t.span({ class: 'note' }, 'Newer lines came faster than they can be shown: all are stored and searchable')
        : null,
      t.div(
        { class: 'buttons', role: 'group', 'aria-label': 'How lines are shown' },
        el(Toggle, { on: live, label: 'Live', title: 'Follow new lines (l)', press: () => toggle('live') }),
        el(Toggle, {
          on: query.value.fold !== 'no',
          label: 'Fold',
          title: 'Lines alike within two seconds are one (f)',
          press: () => toggle('fold'),
        }),
      ),
    ),
    t.div({ key: 'b', class: 'logbody' }, el(Facets, { counts, names: found.names }), el(Lines, { q, found, more })),
  ];
}

/** @param {{on: boolean, label: string, title: string, press: () => void}} props */
function Toggle({ on, label, title, press }) {
  return t.button({ type: 'button', class: 'button small', 'aria-pressed': on, title, onClick: press }, label);
}

/** @param {{counts: SearchAnswer | null, names: Map<string, string>}} props */
function Facets({ counts, names }) {
  if (!counts) return t.div({ class: 'facets' });
  const all = [...names.values()];
  /** Runs of one name are known by their ids. @param {string} id */
  const runWords = (id) => {
    const name = names.get(id) ?? id;
    return all.filter((one) => one === name).length > 1 ? id : name;
  };
  const { run, project, level, host, rank, logger, stream } = counts.facets;
  /** @type {[string, [string | number, number][]][]} */
  const groups = [
    ['run', run],
    ['project', project.length > 1 || query.value.project ? project : []],
    ['level', level],
    ['host', host],
    ['rank', rank],
    ['stream', stream],
    ['logger', logger],
  ];
  return t.nav(
    { class: 'facets', 'aria-label': 'Filters' },
    groups.map(([name, values]) =>
      values.length > 0
        ? el(Facet, {
            key: name,
            name,
            values,
            isAtLeast: counts.is_at_least,
            wordOf: name === 'run' ? runWords : String,
          })
        : null,
    ),
  );
}

/** The lines of a search, older ones when they are asked for, newer ones as they come.
 * @param {string} base @param {boolean} live @param {boolean} folded @returns {{found: Found, more: () => void}} */
function useSearch(base, live, folded) {
  const [found, setFound] = useState(NOTHING);
  const control = useRef(new AbortController());
  const lastId = useRef(0);

  /** @param {string} path @param {AbortSignal} signal @returns {Promise<SearchAnswer>} */
  async function read(path, signal) {
    return (await ask(path, { signal }))?.data;
  }

  /** Read on until there is a line. @param {string | null} cursor @param {AbortSignal} signal @param {boolean} [skipped] */
  async function readOn(cursor, signal, skipped = false) {
    setFound((old) => ({ ...(cursor || old.base === base ? old : { ...NOTHING, base }), skipped, pending: true }));
    try {
      let next = cursor;
      for (let reads = 0; reads < MOST_READS; reads += 1) {
        const page = await read(withQuery(base, { limit: PAGE, cursor: next }), signal);
        const first = next === null;
        if (first) lastId.current = page.last_id;
        setFound((old) => ({
          ...old,
          counts: first ? page : old.counts,
          lines: first ? page.lines : join(old.lines, page.lines, 'new'),
          names: named(old.names, page),
          older: page.next_cursor,
          searchedTo: page.searched_to_ms,
          error: null,
        }));
        next = page.next_cursor;
        if (!next || page.lines.length > 0) break;
      }
    } catch (problem) {
      if (!signal.aborted && problem instanceof Failure) setFound((old) => ({ ...old, error: problem }));
    }
    if (!signal.aborted) setFound((old) => ({ ...old, pending: false }));
  }

  useEffect(() => {
    control.current = new AbortController();
    readOn(null, control.current.signal);
    return () => control.current.abort();
  }, [base]);

  useEffect(() => {
    if (!live) return undefined;
    const { signal } = control.current;
    let busy = false;
    let waiting = false;
    let countedAt = Date.now();

    async function tail() {
      if (signal.aborted || document.hidden) return;
      waiting = busy;
      if (busy || lastId.current === 0) return;
      busy = true;
      try {
        const page = await read(withQuery(base, { after: lastId.current, limit: TAIL }), signal);
        lastId.current = Math.max(lastId.current, page.last_id);
        if (page.is_behind) await readOn(null, signal, true);
        else if (page.lines.length > 0) {
          const fresh = (folded ? fold(page.lines) : [...page.lines]).reverse();
          setFound((old) => ({ ...old, lines: join(fresh, old.lines, 'new'), names: named(old.names, page) }));
          waiting = waiting || page.lines.length >= TAIL;
          if (Date.now() - countedAt > COUNT_MS) {
            countedAt = Date.now();
            const counts = await read(withQuery(base, { limit: 1 }), signal);
            setFound((old) => ({ ...old, counts, names: named(old.names, counts) }));
          }
        }
      } catch {
        // the next hint or poll asks again
      }
      setTimeout(() => {
        busy = false;
        if (waiting) tail();
      }, TAIL_MS);
    }
    return follow('runs', tail);
  }, [base, live, folded]);
  return { found, more: () => readOn(found.older, control.current.signal) };
}

/** @param {Map<string, string>} names @param {SearchAnswer} page */
function named(names, page) {
  return new Map([...names, ...page.runs.map((run) => /** @type {[string, string]} */ ([run.run_id, run.name]))]);
}

/** @param {boolean} filtered @param {Found} found @param {boolean} mistake */
function sentenceOf(filtered, found, mistake) {
  if (mistake) return 'The search cannot be read';
  if (!filtered) return 'Search all runs';
  if (!found.counts) return found.error ? 'The search failed' : 'Searching all runs';
  const total = Math.max(found.counts.total, found.lines.length);
  if (total === 0) return found.pending || found.older ? 'Searching further back' : 'No line of any run matches';
  const least = found.counts.is_at_least ? 'At least ' : '';
  // Of runs the facet shows as many as it may; those of a chosen run show what others would give.
  const runs = query.value.run ? 1 : found.counts.facets.run.length;
  return `${least}${plural(total, 'line')} ${total === 1 ? 'matches' : 'match'} in ${plural(runs, 'run')}`;
}

/** Runs that are called so: the search over lines does not look at names. @param {{q: string}} props */
function NamedRuns({ q }) {
  const answer = /** @type {import('../api.js').Answer<Runs>} */ (useApi(withQuery('runs', { q, limit: NAMED })));
  const runs = answer.data;
  if (!runs || runs.total === 0) return null;
  return t.p(
    { class: 'note' },
    `${plural(runs.total, 'run')} with this in name, command, tags or hosts: `,
    runs.runs.map((run, i) => [
      i > 0 ? ', ' : '',
      t.a({ key: run.run_id, href: runPath(run.run_id), title: run.run_id }, run.name),
      ` (${words(run.status)})`,
    ]),
    runs.total > runs.runs.length
      ? [', ', t.a({ key: 'all', href: withQuery('runs', { q }) }, `all ${runs.total}`)]
      : '.',
  );
}

/** @param {{q: string, found: Found, more: () => void}} props */
function Lines({ q, found, more }) {
  const title = 'Lines';
  if (found.lines.length === 0 && found.pending)
    return found.searchedTo === null
      ? el(Skeleton, { height: 240, waitsFor: 'the lines' })
      : el(
          Card,
          { title },
          el(Empty, { title: `Nothing since ${dateTime(found.searchedTo)}. Searching further back …` }),
        );
  return el(
    Card,
    {
      title,
      note: query.value.fold === 'no' ? 'newest first' : 'newest first; lines alike within two seconds are one',
    },
    found.lines.length > 0
      ? Table({
          label: 'Lines that match',
          class: 'foundlines',
          rows: found.lines,
          keyOf: (line) => `${line.run_id} ${line.id}`,
          columns: [
            {
              label: 'Time',
              class: 'nowrap',
              title: (line) => dateTime(line.time_ms),
              cell: (line) => (isToday(line.time_ms) ? exactTime(line.time_ms) : dateTime(line.time_ms)),
            },
            {
              label: 'Run',
              class: 'nowrap',
              cell: (line) =>
                t.a({ href: runPath(line.run_id), title: line.run_id }, found.names.get(line.run_id) ?? line.run_id),
            },
            { label: 'Rank', class: 'nowrap', title: (line) => rankWords(line.ranks), cell: whoWords },
            { label: 'Level', class: (line) => `l-level is-${toneOf(line)}`, cell: (line) => line.level },
            { label: 'Message', class: (line) => `l-text is-${toneOf(line)}`, cell: (line) => messageOf(line, q) },
          ],
        })
      : el(Empty, {
          title: found.older
            ? 'Nothing yet: older lines were not searched.'
            : 'Nothing. Fewer words, or word* find more.',
        }),
    found.older
      ? t.p(
          { class: 'note padded' },
          t.button({ type: 'button', class: 'button small', disabled: found.pending, onClick: more }, 'Older lines'),
          found.searchedTo === null ? '' : ` searched back to ${dateTime(found.searchedTo)}`,
        )
      : null,
  );
}

/** @param {number} ms */
function isToday(ms) {
  return new Date(ms).toDateString() === new Date().toDateString();
}

/** @param {LogRow} line */
function toneOf(line) {
  return TONE[line.level] ?? 'plain';
}

/** @param {LogRow} line */
function whoWords(line) {
  if (line.ranks.length > 1) return plural(line.ranks.length, 'rank');
  return line.rank >= 0 ? `rank ${line.rank}` : 'node';
}

/** The first line, which leads to it in its run. @param {LogRow} line @param {string} q */
function messageOf(line, q) {
  const [first, more] = firstLine(line.message);
  // The logs begin with the newest line: up to this one, it is that.
  const there = withQuery(runPath(line.run_id, 'logs'), { q, to: Math.ceil(line.time_ms) + 1, line: line.id });
  return [
    t.a({ href: there, title: 'This line in its run' }, first || '(empty)'),
    more > 0 ? t.span({ class: 'l-more' }, ` +${plural(more, 'line')}`) : null,
    line.count > 1 ? t.span({ class: 'l-more' }, ` ×${line.count}`) : null,
  ];
}
