/** The lines on screen: a ring of at most 50,000, older ones by cursor, newer ones by live tail. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { ask, Failure } from '../api.js';
import { follow } from '../live.js';
import { withQuery } from '../url.js';
import { fold, inFront, join, RING } from './fold.js';

/** @typedef {import('../../types/api.js').LogRow} LogRow */
/** @typedef {import('../../types/api.js').Logs} Logs */
/**
 * `searchedTo`: the time back to which a search has looked that has found nothing yet.
 * @typedef {{lines: LogRow[], total: number, fresh: number, skipped: boolean, older: string | null, searchedTo: number | null, suggestion: string | null, error: Failure | null, pending: boolean, path: string}} Held
 */

const PAGE = 100;
const MORE = 500; // where lines fold to few rows
const TAIL = 1000;
export const SCREEN = 80; // rows that fill a window
const MOST_READS = 8; // pages for that, where something was found

/**
 * @param {string} base path with the filters
 * @param {{topic: string | null, live: boolean}} options live: newer lines are added as they come
 */
export function useLogLines(base, { topic, live }) {
  const [held, setHeld] = useState(
    /** @type {Held} */ ({
      lines: [],
      total: 0,
      fresh: 0,
      skipped: false,
      older: null,
      searchedTo: null,
      suggestion: null,
      error: null,
      pending: true,
      path: '',
    }),
  );
  const lastId = useRef(0);
  const busy = useRef(false);

  useEffect(() => {
    const control = new AbortController();
    let waiting = false;
    lastId.current = 0;

    /** @param {string | null} cursor @returns {Promise<Logs>} */
    async function read(cursor) {
      const limit = cursor ? MORE : PAGE;
      const got = await ask(withQuery(base, { limit, cursor }), { signal: control.signal });
      return got?.data;
    }

    /** @param {boolean} skipped */
    async function newest(skipped) {
      setHeld((old) => ({ ...old, pending: true, searchedTo: null }));
      try {
        let page = await read(null);
        const first = page;
        lastId.current = first.last_id;
        let lines = [...page.lines].reverse();
        // Folded lines may be few: a list that does not scroll would never ask for older ones.
        for (let reads = 1; page.next_cursor && lines.length < SCREEN; reads += 1) {
          if (lines.length > 0 && reads >= MOST_READS) break;
          const searchedTo = page.searched_to_ms;
          if (lines.length === 0) setHeld((old) => ({ ...old, lines: [], searchedTo }));
          page = await read(page.next_cursor);
          lines = inFront([...page.lines].reverse(), lines);
        }
        setHeld({
          lines,
          total: first.total,
          fresh: 0,
          skipped,
          older: page.next_cursor,
          searchedTo: null,
          suggestion: first.suggestion,
          error: null,
          pending: false,
          path: base,
        });
      } catch (problem) {
        if (!control.signal.aborted && problem instanceof Failure)
          setHeld((old) => ({ ...old, error: problem, pending: false, path: base }));
      }
    }

    async function tail() {
      if (busy.current || control.signal.aborted) {
        waiting = true;
        return;
      }
      if (document.hidden) return;
      busy.current = true;
      try {
        const got = await ask(withQuery(base, { after: lastId.current, limit: TAIL }), { signal: control.signal });
        const page = /** @type {Logs} */ (got?.data);
        lastId.current = Math.max(lastId.current, page.last_id);
        if (page.is_behind) await newest(true);
        else if (page.lines.length > 0)
          setHeld((old) => ({
            ...old,
            lines: join(old.lines, fold(page.lines), 'old'),
            total: old.total + page.lines.length,
            fresh: old.fresh + page.lines.length,
            error: null,
          }));
        waiting = waiting || page.lines.length >= TAIL;
      } catch {
        // the next hint or poll asks again
      }
      busy.current = false;
      if (waiting && !control.signal.aborted) {
        waiting = false;
        setTimeout(tail, 1000);
      }
    }

    busy.current = false;
    newest(false);
    const stop =
      topic && live
        ? follow(topic, (change) => (change === null || change.changed.includes('logs')) && tail())
        : () => {};
    return () => {
      control.abort();
      stop();
    };
  }, [base, topic, live]);

  async function loadOlder() {
    const { older, path } = held;
    if (!older || busy.current || path !== base || held.lines.length >= RING) return;
    busy.current = true;
    try {
      const limit = held.lines.length < SCREEN ? MORE : PAGE;
      const got = await ask(withQuery(base, { limit, cursor: older }));
      const page = /** @type {Logs} */ (got?.data);
      setHeld((old) =>
        old.path === base
          ? { ...old, lines: inFront([...page.lines].reverse(), old.lines), older: page.next_cursor }
          : old,
      );
    } catch {
      // scrolling again asks again
    }
    busy.current = false;
  }

  return { ...held, loadOlder, seen: () => setHeld((old) => (old.fresh === 0 ? old : { ...old, fresh: 0 })) };
}
