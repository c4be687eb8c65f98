/** Addresses as values: which page a path names, and what its query selects. Pure. */

/** @typedef {{name: string, run: string, id: string}} Place */
/** @typedef {Record<string, string | number | null | undefined>} Query */

/** What travels from page to page of one run. */
export const CARRIED = ['steps', 'ranks', 'attempt', 'sel', 'area', 'order', 'bands'];

/** @type {[RegExp, string][]} */
const PLACES = [
  [/^$/, 'home'],
  [/^runs$/, 'runs'],
  [/^alerts$/, 'alerts'],
  [/^sign-in$/, 'signin'],
  [/^storage$/, 'storage'],
  [/^access$/, 'access'],
  [/^server$/, 'server'],
  [/^compare$/, 'compare'],
  [/^fleet$/, 'fleet'],
  [/^preflight$/, 'preflights'],
  [/^preflight()\/([^/]+)$/, 'preflight'],
  [/^search$/, 'search'],
  [/^runs\/([^/]+)$/, 'overview'],
  [/^runs\/([^/]+)\/findings$/, 'findings'],
  [/^runs\/([^/]+)\/findings\/([^/]+)$/, 'finding'],
  [/^runs\/([^/]+)\/ranks$/, 'ranks'],
  [/^runs\/([^/]+)\/ranks\/(\d+)$/, 'rank'],
  [/^runs\/([^/]+)\/steps$/, 'step'],
  [/^runs\/([^/]+)\/steps\/(\d+)$/, 'step'],
  [/^runs\/([^/]+)\/collectives$/, 'collectives'],
  [/^runs\/([^/]+)\/parallelism$/, 'parallelism'],
  [/^runs\/([^/]+)\/cost$/, 'cost'],
  [/^runs\/([^/]+)\/resources$/, 'resources'],
  [/^runs\/([^/]+)\/hang$/, 'hang'],
  [/^runs\/([^/]+)\/errors$/, 'errors'],
  [/^runs\/([^/]+)\/logs$/, 'logs'],
  [/^runs\/([^/]+)\/environment$/, 'environment'],
  [/^runs\/([^/]+)\/machines$/, 'machines'],
  [/^runs\/([^/]+)\/nodes\/([^/]+)$/, 'node'],
  [/^runs\/([^/]+)\/agent$/, 'agent'],
];

/** Read a path relative to the dashboard's root. @param {string} path @returns {Place} */
export function readPath(path) {
  const clean = path.replace(/^\/+|\/+$/g, '');
  for (const [pattern, name] of PLACES) {
    const found = pattern.exec(clean);
    if (found) return { name, run: decode(found[1]), id: decode(found[2]) };
  }
  return { name: 'unknown', run: decode(/^runs\/([^/]+)/.exec(clean)?.[1]), id: clean };
}

/** Write a path relative to the root. @param {string[]} parts */
export function path(...parts) {
  return parts.map(encodeURIComponent).join('/');
}

/** A path within one run. @param {string} run @param {string[]} parts */
export function runPath(run, ...parts) {
  return path('runs', run, ...parts.filter((part) => part !== ''));
}

/** Where a saved view leads in a run; null for one of every run where none is open. @param {string} address @param {string} run */
export function viewFor(address, run) {
  if (!/^runs\/\*(?=[/?]|$)/.test(address)) return address;
  return run ? address.replace('*', () => encodeURIComponent(run)) : null;
}

/** Add a query to a path; empty values are left out. @param {string} base @param {Query} query */
export function withQuery(base, query) {
  const text = Object.entries(query)
    .filter(([, value]) => value != null && value !== '')
    .map(([key, value]) => `${encodeURIComponent(key)}=${readable(String(value))}`)
    .join('&');
  return text ? `${base}${base.includes('?') ? '&' : '?'}${text}` : base;
}

/** The part of a query that goes along to another page of the run. @param {Record<string, string>} query */
export function carried(query) {
  return Object.fromEntries(CARRIED.filter((key) => query[key]).map((key) => [key, query[key]]));
}

/** "120-340" as numbers; null when it is not a range. @param {string | undefined} text @returns {[number, number] | null} */
export function readRange(text) {
  const found = /^(\d+)-(\d+)$/.exec(text ?? '');
  if (!found) return null;
  const [low, high] = [Number(found[1]), Number(found[2])];
  return low <= high ? [low, high] : [high, low];
}

/** "5@4210" or "5" as the rank that is selected. @param {string | undefined} text @returns {number | null} */
export function readRank(text) {
  const found = /^(\d+)(@\d+)?$/.exec(text ?? '');
  return found ? Number(found[1]) : null;
}

/** "5@4210" as a cell. @param {string | undefined} text @returns {{rank: number, step: number} | null} */
export function readCell(text) {
  const found = /^(\d+)@(\d+)$/.exec(text ?? '');
  return found ? { rank: Number(found[1]), step: Number(found[2]) } : null;
}

/** Ranks as the API takes them, and the first and last of some steps. @typedef {{ranks: string, first: number, last: number}} Area */

/** "8-15,40@120-180" as ranks and steps that are selected. @param {string | undefined} text @returns {Area | null} */
export function readArea(text) {
  const found = /^(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)@(\d+)-(\d+)$/.exec(text ?? '');
  if (!found) return null;
  const [first, last] = [Number(found[2]), Number(found[3])];
  return first >= 1 && first <= last ? { ranks: found[1], first, last } : null;
}

/** @param {Area} area */
export function writeArea({ ranks, first, last }) {
  return `${ranks}@${first}-${last}`;
}

/** What narrows log lines, by its name in the address and in the API; runs and projects where all are searched. */
export const LINE_FILTERS = ['run', 'project', 'rank', 'level', 'host', 'logger', 'stream'];

/** The search over all runs that a query names, as an address of the API. @param {Record<string, string>} query */
export function searchPath(query) {
  const chosen = Object.fromEntries(LINE_FILTERS.map((key) => [key, query[key]]));
  const fold = query.fold === 'no' ? 'false' : null;
  return withQuery('search', { q: query.q?.trim(), ...chosen, from_ms: query.from, to_ms: query.to, fold });
}

/** The comparison that a query names, as an address of the API; null where the later run is not named. @param {Record<string, string>} query */
export function comparePath(query) {
  if (!query.b) return null;
  const [old, now] = [readRange(query.a_steps), readRange(query.b_steps)];
  return withQuery(runPath(query.b, 'compare'), {
    before: query.a,
    before_attempt: query.a_attempt,
    before_from: old?.[0],
    before_to: old?.[1],
    attempt: query.b_attempt,
    from: now?.[0],
    to: now?.[1],
  });
}

/** @param {{rank: number, step: number}} cell */
export function writeCell(cell) {
  return `${cell.rank}@${cell.step}`;
}

/** Keep `@`, `,` and `:` as people write them. @param {string} value */
function readable(value) {
  return encodeURIComponent(value).replaceAll('%40', '@').replaceAll('%2C', ',').replaceAll('%3A', ':');
}

/** @param {string | undefined} text */
function decode(text) {
  if (!text) return '';
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
