/**
 * One event stream for all tabs. A browser opens six connections per origin, so a stream per tab
 * would starve the seventh; this worker holds one and hands its events to the tabs by topic.
 *
 * From a tab: {root, topics} to follow, {ping} while it lives, {bye} when it goes.
 * To a tab: {state: 'open' | 'lost'}, {change} or {reload}.
 */

/** @typedef {{topics: string[], seen: number}} Tab */

/** @type {Map<MessagePort, Tab>} */
const tabs = new Map();
/** @type {EventSource | null} */
let source = null;
let wanted = '';
let root = '';
const FORGET_AFTER_MS = 30_000; // a tab that crashed says no goodbye

// Not a function named `onconnect`: its declaration would shadow the handler of that name.
addEventListener('connect', (/** @type {any} */ event) => {
  const port = /** @type {MessagePort} */ (event.ports[0]);
  tabs.set(port, { topics: [], seen: Date.now() });
  port.onmessage = ({ data }) => {
    const tab = tabs.get(port);
    if (data.bye) tabs.delete(port);
    else if (tab) tab.seen = Date.now();
    if (data.topics && !data.bye) {
      root = data.root;
      tabs.set(port, { topics: data.topics, seen: Date.now() });
      if (source?.readyState === EventSource.OPEN) port.postMessage({ state: 'open' });
    }
    follow();
  };
});

setInterval(() => {
  const old = Date.now() - FORGET_AFTER_MS;
  for (const [port, tab] of tabs) if (tab.seen < old) tabs.delete(port);
  follow();
}, FORGET_AFTER_MS / 2);

/** Open the stream again when the set of topics changed. */
function follow() {
  const topics = [...new Set([...tabs.values()].flatMap((tab) => tab.topics))].sort().join(',');
  if (topics === wanted) return;
  wanted = topics;
  source?.close();
  source = null;
  if (!topics) return;
  source = new EventSource(`${root}api/v1/stream?topics=${encodeURIComponent(topics)}`);
  source.onopen = () => announce({ state: 'open' });
  source.onerror = () => announce({ state: 'lost' });
  source.addEventListener('change', (event) => {
    const change = JSON.parse(event.data);
    for (const [port, tab] of tabs) if (tab.topics.includes(change.topic)) port.postMessage({ change });
  });
  source.addEventListener('reload', () => announce({ reload: true }));
}

/** @param {object} message */
function announce(message) {
  for (const port of tabs.keys()) port.postMessage(message);
}
