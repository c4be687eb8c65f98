/**
 * What changed on the server, as hints. One stream shared by all tabs through a worker; without a
 * SharedWorker one stream in the visible tab; without any event in 5 s, polling every 5 s.
 */

import { signal } from '@preact/signals';
import { useEffect, useRef, useState } from 'preact/hooks';
import { root } from './router.js';

/** @typedef {import('../types/api.js').Change} Change */
/** @typedef {(change: Change | null) => void} Listener  null: anything may have changed */

const GIVE_UP_MS = 5000;
const POLL_MS = 5000;
const PING_MS = 10_000;

/** How fresh the page is kept. @type {import('@preact/signals').Signal<'off' | 'connecting' | 'live' | 'polling'>} */
export const connection = signal('off');

/** When the server last answered anything, on this machine's clock. */
export const heardAt = signal(Date.now());
/** Whether the last request failed; the header then says how old the data is. */
export const stale = signal(false);

/** @type {Map<string, Set<Listener>>} */
const listeners = new Map();
/** @type {{port: MessagePort} | null} */
let worker = null;
/** @type {EventSource | null} */
let own = null;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let giveUp;
/** @type {ReturnType<typeof setInterval> | undefined} */
let polling;

/** Follow a topic, for example "run:x". Returns the way to stop. @param {string} topic @param {Listener} listener */
export function follow(topic, listener) {
  const known = listeners.get(topic) ?? new Set();
  listeners.set(topic, known.add(listener));
  connect();
  return () => {
    known.delete(listener);
    if (known.size === 0) listeners.delete(topic);
    // Pages follow the same topic one after the other: do not tear the stream down in between.
    setTimeout(connect, 50);
  };
}

let connectedTo = '';

function connect() {
  const topics = [...listeners.keys()].sort();
  if (topics.join() === connectedTo) return;
  connectedTo = topics.join();
  if (topics.length === 0) {
    connection.value = 'off';
    stopPolling();
  } else if (connection.value === 'off') {
    connection.value = 'connecting';
  }
  clearTimeout(giveUp);
  if (topics.length > 0) giveUp = setTimeout(startPolling, GIVE_UP_MS);
  if ('SharedWorker' in window) viaWorker(topics);
  else viaOwnStream(topics);
}

/** @param {string[]} topics */
function viaWorker(topics) {
  if (!worker) {
    const shared = new SharedWorker(new URL('./stream_worker.js', import.meta.url), 'rankscope-stream');
    worker = shared;
    shared.port.onmessage = ({ data }) => receive(data);
    shared.onerror = startPolling;
    setInterval(() => shared.port.postMessage({ ping: true }), PING_MS);
    addEventListener('pagehide', () => shared.port.postMessage({ bye: true }));
    addEventListener('pageshow', (event) => {
      if (!event.persisted) return;
      shared.port.postMessage({ root, topics: [...listeners.keys()] });
      tellAll(null);
    });
  }
  worker.port.postMessage({ root, topics });
}

/** @param {string[]} topics */
function viaOwnStream(topics) {
  own?.close();
  own = null;
  if (topics.length === 0 || document.hidden) return;
  own = new EventSource(`${root}api/v1/stream?topics=${encodeURIComponent(topics.join(','))}`);
  own.onopen = () => receive({ state: 'open' });
  own.onerror = () => receive({ state: 'lost' });
  own.addEventListener('change', (event) => receive({ change: JSON.parse(event.data) }));
  own.addEventListener('reload', () => receive({ reload: true }));
}

/** @param {{state?: string, change?: Change, reload?: boolean}} message */
function receive(message) {
  if (message.state === 'lost') {
    clearTimeout(giveUp);
    giveUp = setTimeout(startPolling, GIVE_UP_MS);
    return;
  }
  clearTimeout(giveUp);
  heardAt.value = Date.now();
  const wasAway = polling !== undefined;
  stopPolling();
  connection.value = 'live';
  if (message.change) {
    for (const listener of listeners.get(message.change.topic) ?? []) listener(message.change);
  } else if (message.reload || wasAway) {
    tellAll(null);
  }
}

function startPolling() {
  if (listeners.size === 0 || polling !== undefined) return;
  connection.value = 'polling';
  polling = setInterval(() => tellAll(null), POLL_MS);
  tellAll(null);
}

function stopPolling() {
  clearInterval(polling);
  polling = undefined;
}

/** @param {Change | null} change */
function tellAll(change) {
  for (const group of listeners.values()) for (const listener of group) listener(change);
}

document.addEventListener('visibilitychange', () => {
  if (!worker) viaOwnStream([...listeners.keys()]);
  if (!document.hidden) tellAll(null);
});

const HOLD_MS = 10_000;

/**
 * Hold a value back while the reader points or types inside the element, so that a live change never
 * moves what they point at. After 10 s without a move it lets go.
 * @template T
 * @param {T} value
 * @param {import('preact').RefObject<HTMLElement | null>} ref
 * @param {string} identity a change of this is the reader's own doing and shows at once
 * @returns {{shown: T, held: boolean}}
 */
export function useHeld(value, ref, identity) {
  const shown = useRef({ value, identity });
  const touched = useRef(0);
  const [, again] = useState(0);
  const element = ref.current;
  useEffect(() => {
    if (!element) return undefined;
    const touch = () => {
      touched.current = Date.now();
    };
    const leave = () => {
      touched.current = 0;
      again((n) => n + 1);
    };
    element.addEventListener('pointermove', touch);
    element.addEventListener('keydown', touch);
    element.addEventListener('pointerleave', leave);
    return () => {
      element.removeEventListener('pointermove', touch);
      element.removeEventListener('keydown', touch);
      element.removeEventListener('pointerleave', leave);
    };
  }, [element]);
  const busy = Date.now() - touched.current < HOLD_MS;
  const hold = busy && shown.current.identity === identity && shown.current.value !== null && value !== null;
  if (!hold) shown.current = { value, identity };
  const held = hold && shown.current.value !== value;
  useEffect(() => {
    if (!held) return undefined;
    const timer = setTimeout(() => again((n) => n + 1), HOLD_MS);
    return () => clearTimeout(timer);
  }, [held, value]);
  return { shown: shown.current.value, held };
}
