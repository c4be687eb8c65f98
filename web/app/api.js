/** Answers of the server: fetched with an ETag, kept while they are fetched again, never a spinner over data. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { follow, heardAt, stale } from './live.js';
import { go, place, root } from './router.js';
import { withQuery } from './url.js';

/** @typedef {import('../types/api.js').ErrorBody} ErrorBody */

/**
 * What a page holds of one address.
 * @template T
 * @typedef {{data: T | null, error: Failure | null, pending: boolean, path: string | null, refresh: () => void}} Answer
 */

/** A request that did not give data, in words a person can act on. */
export class Failure extends Error {
  /** @param {number} status @param {ErrorBody} detail @param {string} path */
  constructor(status, detail, path) {
    super(detail.what);
    this.status = status;
    this.detail = detail;
    this.path = path;
  }
}

/** The address of an API path, relative to the root. @param {string} path */
export function apiHref(path) {
  return `api/v1/${path}`;
}

/** The same table as CSV. @param {string} path */
export function csvHref(path) {
  return apiHref(path + (path.includes('?') ? '&' : '?') + 'format=csv');
}

/**
 * Ask once. Returns null where the ETag still holds.
 * @param {string} path
 * @param {{etag?: string | null, method?: string, signal?: AbortSignal, body?: object}} [options]
 * @returns {Promise<{data: any, etag: string | null} | null>}
 */
export async function ask(path, options = {}) {
  const headers = /** @type {Record<string, string>} */ ({ Accept: 'application/json' });
  if (options.etag) headers['If-None-Match'] = options.etag;
  if (options.body) headers['Content-Type'] = 'application/json';
  let response;
  try {
    response = await fetch(root + apiHref(path), {
      headers,
      method: options.method ?? 'GET',
      body: options.body ? JSON.stringify(options.body) : undefined,
      signal: options.signal,
      cache: 'no-store',
    });
  } catch (problem) {
    if (!options.signal?.aborted) stale.value = true;
    throw options.signal?.aborted
      ? problem
      : new Failure(
          0,
          {
            what: 'The server does not answer',
            field: null,
            remedy: 'It is tried again by itself.',
            request_id: '',
            at: null,
          },
          path,
        );
  }
  stale.value = false;
  heardAt.value = Date.now();
  if (response.status === 304) return null;
  if (response.status === 401 && place.value.name !== 'signin')
    go(withQuery('sign-in', { next: location.href.slice(root.length) }), { replace: true });
  if (!response.ok) throw new Failure(response.status, await readError(response), path);
  return { data: await response.json(), etag: response.headers.get('ETag') };
}

/** @param {Response} response @returns {Promise<ErrorBody>} */
async function readError(response) {
  try {
    const { error } = await response.json();
    if (error?.what) return error;
  } catch {
    // not JSON: a proxy spoke, not rankscope
  }
  return {
    what: `The server answered ${response.status} ${response.statusText}`.trim(),
    field: null,
    remedy: '',
    request_id: response.headers.get('X-Request-ID') ?? '',
    at: null,
  };
}

const SETTLE_MS = 150; // hints come in bursts; one request serves them
const APART_MS = 1000; // between two requests for the same thing
const PAUSE_MAX_MS = 30_000;
const QUIET_MS = 20_000; // a hint can be lost; an ETag makes asking cheap

/**
 * The answer of a path, kept fresh while the component is mounted.
 * @template T
 * @param {string | null} path null: nothing is asked
 * @param {{topic?: string | null, on?: string[], everyMs?: number}} [options] `on`: the kinds of
 *   change that matter; empty means all of them
 * @returns {Answer<T>}
 */
export function useApi(path, options = {}) {
  const [answer, setAnswer] = useState(
    /** @type {Omit<Answer<T>, 'refresh'>} */ ({ data: null, error: null, pending: path !== null, path: null }),
  );
  const held = useRef({ etag: /** @type {string | null} */ (null), path: /** @type {string | null} */ (null) });
  const refresh = useRef(() => {});
  const { topic = null, everyMs = 0 } = options;
  const on = options.on ?? [];

  useEffect(() => {
    if (path === null) {
      setAnswer({ data: null, error: null, pending: false, path: null });
      return undefined;
    }
    const control = new AbortController();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    let failures = 0;
    let missed = false;
    let busy = false;
    let again = false;
    let hinted = false;
    let loadedAt = 0;

    async function load() {
      clearTimeout(timer);
      if (busy) {
        again = true;
        return;
      }
      busy = true;
      hinted = false;
      loadedAt = Date.now();
      setAnswer((old) => (old.pending ? old : { ...old, pending: true }));
      const etag = held.current.path === path ? held.current.etag : null;
      try {
        const got = await ask(/** @type {string} */ (path), { etag, signal: control.signal });
        failures = 0;
        if (got) held.current = { etag: got.etag, path };
        setAnswer((old) => ({ data: got ? got.data : old.data, error: null, pending: false, path }));
      } catch (problem) {
        if (control.signal.aborted) return;
        failures += 1;
        const error =
          problem instanceof Failure
            ? problem
            : new Failure(0, { what: String(problem), field: null, remedy: '', request_id: '', at: null }, path ?? '');
        setAnswer((old) => ({
          data: old.path === path || error.status === 0 ? old.data : null,
          error,
          pending: false,
          path: old.path,
        }));
      }
      busy = false;
      if (control.signal.aborted) return;
      if (failures > 0) timer = setTimeout(load, Math.min(PAUSE_MAX_MS, 1000 * 2 ** failures));
      else if (again) hint();
      else if (everyMs > 0) timer = setTimeout(hint, everyMs);
      else if (topic) timer = setTimeout(hint, QUIET_MS);
      again = false;
    }

    function hint() {
      if (document.hidden) {
        missed = true;
        return;
      }
      if (hinted) return;
      hinted = true;
      clearTimeout(timer);
      timer = setTimeout(load, Math.max(SETTLE_MS, loadedAt + APART_MS - Date.now()));
    }

    function shown() {
      if (!document.hidden && missed) {
        missed = false;
        hint();
      }
    }

    refresh.current = load;
    load();
    document.addEventListener('visibilitychange', shown);
    const stop = topic
      ? follow(topic, (change) => {
          if (change === null || on.length === 0 || change.changed.some((kind) => on.includes(kind))) hint();
        })
      : () => {};
    return () => {
      control.abort();
      clearTimeout(timer);
      document.removeEventListener('visibilitychange', shown);
      stop();
    };
  }, [path, topic, everyMs, on.join()]);

  return { ...answer, refresh: () => refresh.current() };
}
