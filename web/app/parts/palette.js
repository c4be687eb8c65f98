/** Go to anything by name: pages, ranks, steps, findings, runs, or a text in the logs. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { useApi } from '../api.js';
import { count } from '../format.js';
import { go, query } from '../router.js';
import { t } from '../tags.js';
import { carried, runPath, viewFor, withQuery } from '../url.js';
import { MENU } from './shell.js';

/** @typedef {import('../../types/api.js').Overview} Overview */
/** @typedef {import('../../types/api.js').Runs} Runs */
/** @typedef {import('../../types/api.js').Findings} Findings */
/** @typedef {import('../../types/api.js').SavedViews} SavedViews */
/** @typedef {{text: string, note: string, to: string}} Item */

const SHOWN = 12;

/** What a text could mean, best first. Pure.
 * @param {string} text @param {{run: string, world: number, lastStep: number, hosts: string[], runs: Runs['runs'], findings: Findings['open'], views?: SavedViews['views'], keep: Record<string, string>}} known
 * @returns {Item[]} */
export function suggest(text, { run, world, lastStep, hosts, runs, findings, views = [], keep }) {
  const wanted = text.trim().toLowerCase();
  /** @type {Item[]} */
  const items = [];
  if (run) {
    const number = /^(?:(rank|step|r|s)\s*)?(\d+)$/.exec(wanted);
    if (number) {
      const value = Number(number[2]);
      const kind = number[1]?.[0];
      if (kind !== 's' && value < world)
        items.push({
          text: `Rank ${value}`,
          note: 'its page',
          to: withQuery(runPath(run, 'ranks', String(value)), keep),
        });
      if (kind !== 'r' && value >= 1 && value <= lastStep)
        items.push({
          text: `Step ${count(value)}`,
          note: 'what every rank did',
          to: withQuery(runPath(run, 'steps', String(value)), { ranks: keep.ranks }),
        });
      if (kind !== 'r' && value >= 1 && value <= lastStep)
        items.push({
          text: `Steps around ${count(value)}`,
          note: 'on the map',
          to: withQuery(runPath(run, 'ranks'), { ...keep, steps: `${Math.max(1, value - 50)}-${value + 50}` }),
        });
    }
    for (const host of hosts)
      if (wanted && host.toLowerCase().includes(wanted))
        items.push(
          { text: host, note: 'its ranks, findings and samples', to: runPath(run, 'nodes', host) },
          { text: host, note: 'its log lines', to: withQuery(runPath(run, 'logs'), { host }) },
        );
    for (const entry of MENU.flatMap((group) => group.entries))
      if (entry.title.toLowerCase().includes(wanted))
        items.push({
          text: entry.title,
          note: 'page',
          to: entry.href?.(run) ?? withQuery(runPath(run, entry.part), keep),
        });
    for (const one of findings)
      if (one.what.toLowerCase().includes(wanted))
        items.push({ text: one.what, note: 'finding', to: runPath(run, 'findings', String(one.id)) });
  }
  for (const one of views) {
    const to = viewFor(one.address, run);
    if (to !== null && wanted && one.name.toLowerCase().includes(wanted))
      items.push({ text: one.name, note: 'saved view', to });
  }
  for (const one of runs)
    if (`${one.name} ${one.run_id}`.toLowerCase().includes(wanted) && one.run_id !== run)
      items.push({ text: one.name || one.run_id, note: `run, ${one.status}`, to: runPath(one.run_id) });
  if (run && wanted)
    items.push({
      text: `Search the logs for “${text.trim()}”`,
      note: 'log lines',
      to: withQuery(runPath(run, 'logs'), { q: text.trim() }),
    });
  if (wanted)
    items.push({
      text: `Search all runs for “${text.trim()}”`,
      note: 'log lines',
      to: withQuery('search', { q: text.trim() }),
    });
  items.push({ text: 'All runs', note: 'page', to: 'runs' });
  items.push({ text: 'Storage', note: 'page', to: 'storage' });
  items.push({ text: 'Fleet', note: 'page', to: 'fleet' });
  items.push({ text: 'Preflights', note: 'page', to: 'preflight' });
  items.push({ text: 'Alerts', note: 'page', to: 'alerts' });
  items.push({ text: 'Access', note: 'page', to: 'access' });
  items.push({ text: 'Server', note: 'page', to: 'server' });
  return items.slice(0, SHOWN);
}

/** @param {{run: string, overview: Overview | null, close: () => void}} props */
export function Palette({ run, overview, close }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [text, setText] = useState('');
  const [at, setAt] = useState(0);
  const runs = /** @type {import('../api.js').Answer<Runs>} */ (useApi('runs?limit=50'));
  const findings = /** @type {import('../api.js').Answer<Findings>} */ (useApi(run ? runPath(run, 'findings') : null));
  const views = /** @type {import('../api.js').Answer<SavedViews>} */ (useApi('views'));
  useEffect(() => dialog.current?.showModal(), []);
  const summary = overview?.run;
  const items = suggest(text, {
    run,
    world: summary?.world_size ?? 0,
    lastStep: summary?.step ?? 0,
    hosts: summary?.hosts ?? [],
    runs: runs.data?.runs ?? [],
    findings: findings.data ? [...findings.data.open, ...findings.data.recovered] : [],
    views: views.data?.views,
    keep: carried(query.value),
  });
  const here = Math.min(at, items.length - 1);
  function pick(/** @type {Item} */ item) {
    dialog.current?.close();
    go(item.to);
  }
  return t.dialog(
    {
      class: 'float palette',
      ref: dialog,
      onClose: close,
      'aria-label': 'Go to anything',
      onClick: (event) => event.target === dialog.current && dialog.current?.close(),
    },
    t.input({
      type: 'text',
      role: 'combobox',
      autoFocus: true,
      placeholder: 'rank 5, step 4210, a host, an error text, a page',
      'aria-label': 'Go to',
      'aria-expanded': true,
      'aria-controls': 'palette-list',
      'aria-activedescendant': items.length > 0 ? `palette-${here}` : undefined,
      value: text,
      onInput: (event) => {
        setText(event.currentTarget.value);
        setAt(0);
      },
      onKeyDown: (event) => {
        const way = event.key === 'ArrowDown' ? 1 : event.key === 'ArrowUp' ? -1 : 0;
        if (way !== 0) setAt((here + way + items.length) % items.length);
        else if (event.key === 'Enter' && items[here]) pick(items[here]);
        else return;
        event.preventDefault();
      },
    }),
    t.ul(
      { id: 'palette-list', role: 'listbox', 'aria-label': 'Suggestions' },
      items.map((item, i) =>
        t.li(
          {
            key: `${item.to} ${item.text}`,
            id: `palette-${i}`,
            role: 'option',
            'aria-selected': i === here,
            class: i === here ? 'here' : '',
            onClick: () => pick(item),
            onPointerMove: () => setAt(i),
          },
          t.span(null, item.text),
          t.span({ class: 'faint' }, item.note),
        ),
      ),
    ),
  );
}
