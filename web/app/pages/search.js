/** The search over the lines of all runs: how many match, in which runs, then each with a link into its run. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { ask, csvHref, Failure, useApi } from '../api.js';
import { TONE } from '../charts/histogram-maths.js';
import { count, dateTime, exactTime, firstLine, plural, rankWords, words } from '../format.js';
import { setTitle } from '../page.js';
import { Card, Empty, Problem, Skeleton, Table } from '../parts/bits.js';
import { join } from '../parts/fold.js';
import { SearchBox } from '../parts/searchbox.js';
import { query } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').SearchAnswer} SearchAnswer */
/** @typedef {import('../../types/api.js').LogRow} LogRow */
/** @typedef {import('../../types/api.js').FoundRun} FoundRun */
/** @typedef {import('../../types/api.js').Runs} Runs */
/** @typedef {{first: SearchAnswer | null, lines: LogRow[], runs: FoundRun[], older: string | null, searchedTo: number | null, error: Failure | null, pending: boolean}} Found */

const PAGE = 100;
const MOST_READS = 8; // pages without a line before a person is asked whether to go on
const NAMED = 5;
/** @type {Found} */
const NOTHING = { first: null, lines: [], runs: [], older: null, searchedTo: null, error: null, pending: false };

export function Page() {
  const q = query.value.q?.trim() ?? '';
  const { found, more } = useSearch(q);
  const mistake = found.error?.status === 422 && found.error.detail.field === 'q';
  const sentence = sentenceOf(q, found, mistake);
  useEffect(() => setTitle(sentence, 'Search'), [sentence]);
  return t.div(
    { class: 'stack searchpage' },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, sentence),
      q && !mistake ? t.a({ class: 'button small', href: csvHref(withQuery('search', { q })) }, 'CSV') : null,
    ),
    el(SearchBox, { error: found.error, label: 'Search the lines of all runs', focused: q === '' }),
    q ? el(NamedRuns, { q }) : null,
    found.error && !mistake
      ? el(Problem, { error: found.error, retry: () => location.reload(), what: 'the lines' })
      : null,
    mistake ? el(Card, { title: 'Lines' }, el(Empty, { title: 'Mend the search above: it says where.' })) : null,
    q && !found.error ? el(Lines, { q, found, more }) : null,
    q
      ? null
      : el(
          Card,
          { title: 'Lines' },
          el(Empty, {
            title: 'Log lines, output, events, errors and findings of every run are in one search. Write a word above.',
          }),
        ),
  );
}

/** @param {string} q @returns {{found: Found, more: () => void}} */
function useSearch(q) {
  const [found, setFound] = useState(NOTHING);
  const control = useRef(new AbortController());

  /** Read on until there is a line. @param {string | null} cursor @param {AbortSignal} signal */
  async function read(cursor, signal) {
    setFound((old) => ({ ...(cursor ? old : NOTHING), pending: true }));
    try {
      let next = cursor;
      for (let reads = 0; reads < MOST_READS; reads += 1) {
        const got = await ask(withQuery('search', { q, limit: PAGE, cursor: next }), { signal });
        const page = /** @type {SearchAnswer} */ (got?.data);
        setFound((old) => ({
          first: old.first ?? page,
          lines: join(old.lines, page.lines, 'new'),
          runs: together(old.runs, page.runs),
          older: page.next_cursor,
          searchedTo: page.searched_to_ms,
          error: null,
          pending: true,
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
    if (q) read(null, control.current.signal);
    else setFound(NOTHING);
    return () => control.current.abort();
  }, [q]);
  return { found, more: () => read(found.older, control.current.signal) };
}

/** The runs of two pages, most lines first. @param {FoundRun[]} one @param {FoundRun[]} other */
function together(one, other) {
  const sums = new Map(one.map((run) => [run.run_id, run]));
  for (const run of other) {
    const known = sums.get(run.run_id);
    sums.set(run.run_id, known ? { ...run, lines: known.lines + run.lines } : run);
  }
  return [...sums.values()].sort((a, b) => b.lines - a.lines);
}

/** @param {string} q @param {Found} found @param {boolean} mistake */
function sentenceOf(q, found, mistake) {
  if (mistake) return 'The search cannot be read';
  if (!q) return 'Search all runs';
  if (!found.first) return found.error ? 'The search failed' : 'Searching all runs';
  const total = Math.max(found.first.total, found.lines.length);
  if (total === 0) return found.pending || found.older ? 'Searching further back' : 'No line of any run matches';
  const least = found.first.is_at_least ? 'At least ' : '';
  const runs = found.older
    ? `, the newest in ${plural(found.runs.length, 'run')}`
    : ` in ${plural(found.runs.length, 'run')}`;
  return `${least}${plural(total, 'line')} ${total === 1 ? 'matches' : 'match'}${runs}`;
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
  const names = new Map(found.runs.map((run) => [run.run_id, run.name]));
  return el(
    Card,
    { title, note: 'newest first; lines alike within two seconds are one' },
    found.runs.length > 0 ? el(RunsOfLines, { q, runs: found.runs }) : null,
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
                t.a({ href: runPath(line.run_id), title: line.run_id }, names.get(line.run_id) ?? line.run_id),
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

/** Where the lines are, each a way into the logs of that run. @param {{q: string, runs: FoundRun[]}} props */
function RunsOfLines({ q, runs }) {
  return t.p(
    { class: 'filterline padded' },
    runs.map((run) =>
      t.a(
        {
          key: run.run_id,
          class: 'chip',
          href: withQuery(runPath(run.run_id, 'logs'), { q }),
          title: `The logs of ${run.run_id} with this search`,
        },
        `${run.name} `,
        t.span({ class: 'faint' }, count(run.lines)),
      ),
    ),
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
