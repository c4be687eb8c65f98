/** The frame of every page: header, side bar, the place for the page, and what floats above it. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { apiHref, useApi } from '../api.js';
import { ago, count, words } from '../format.js';
import { useKeys } from '../keys.js';
import { connection, heardAt, stale } from '../live.js';
import { announce, copy, now, spoken, switchTheme, theme } from '../page.js';
import { go, place, query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { carried, runPath, withQuery } from '../url.js';
import { Icon } from './bits.js';

/** @typedef {import('../../types/api.js').Overview} Overview */
/** @typedef {import('../tags.js').Children} Children */
/** @typedef {{name: string, title: string, part: string, key: string, href?: (run: string) => string, count?: (run: Overview) => number, noun?: string, tone?: (run: Overview) => string}} Entry */

/** How a number of findings looks, by the worst of them. */
const BADGE = { critical: 'crit', warning: 'warn', info: '' };

/** The pages of a run. The key follows `g`. @type {{title: string, entries: Entry[]}[]} */
export const MENU = [
  {
    title: 'Run',
    entries: [
      { name: 'overview', title: 'Overview', part: '', key: 'o' },
      {
        name: 'findings',
        title: 'Findings',
        part: 'findings',
        key: 'f',
        count: (run) => run.counts.findings_open,
        noun: 'open',
        tone: (run) => BADGE[run.counts.findings_worst ?? 'info'],
      },
    ],
  },
  {
    title: 'Where time goes',
    entries: [
      { name: 'ranks', title: 'Ranks by steps', part: 'ranks', key: 'r' },
      { name: 'step', title: 'One step', part: 'steps', key: 's' },
      { name: 'collectives', title: 'Communication', part: 'collectives', key: 'c' },
      { name: 'parallelism', title: 'Parallelism', part: 'parallelism', key: 'i' },
      { name: 'cost', title: 'Cost', part: 'cost', key: 'k' },
      { name: 'resources', title: 'Resources', part: 'resources', key: 't' },
      {
        name: 'compare',
        title: 'Compare',
        part: '',
        key: 'd',
        href: (run) => withQuery('compare', { b: run }),
      },
    ],
  },
  {
    title: 'What broke',
    entries: [
      { name: 'hang', title: 'Hangs', part: 'hang', key: 'h' },
      {
        name: 'errors',
        title: 'Errors',
        part: 'errors',
        key: 'e',
        count: (run) => run.counts.errors,
        noun: 'errors',
        tone: () => 'warn',
      },
      { name: 'logs', title: 'Logs', part: 'logs', key: 'l' },
    ],
  },
  {
    title: 'The machines',
    entries: [
      {
        name: 'preflights',
        title: 'Preflight',
        part: '',
        key: 'p',
        href: (run) => withQuery('preflight', { run }),
      },
      { name: 'machines', title: 'Machines', part: 'machines', key: 'm' },
      {
        name: 'environment',
        title: 'Environment',
        part: 'environment',
        key: 'u',
        count: (run) => run.counts.environment_differences,
        noun: 'differences',
        tone: () => 'warn',
      },
      { name: 'agent', title: 'Agent', part: 'agent', key: 'w' },
    ],
  },
];

/** Which page of the menu a place belongs to. @param {string} name */
function section(name) {
  return { rank: 'ranks', finding: 'findings', node: 'machines' }[name] ?? name;
}

/** Give up what is selected, where the page has a map, then what is pinned. */
function release() {
  if (query.value.area && document.querySelector('.areapanel')) setQuery({ area: null });
  else if (query.value.sel) setQuery({ sel: null });
}

/**
 * @param {{run: string, overview: Overview | null, apiPath: string, children?: Children}} props
 */
export function Shell({ run, overview, apiPath, children }) {
  const [floating, setFloating] = useState(/** @type {'none' | 'palette' | 'help' | 'views'} */ ('none'));
  const inRun = run !== '';
  useKeys(
    [
      { keys: 'Ctrl+k', text: 'Go to anything', run: () => setFloating('palette') },
      { keys: '/', text: 'Search on this page', run: () => searchHere(() => setFloating('palette')) },
      { keys: '?', text: 'Keys of this page', run: () => setFloating('help') },
      { keys: 'v', text: 'Views that are saved: this one, open, delete', run: () => setFloating('views') },
      { keys: 'y', text: 'Copy the link of this view', run: copyLink },
      { keys: 'x', text: 'Share the panel in focus, or the first: Markdown, CSV, JSON, picture', run: sharePanel },
      { keys: 'Escape', text: 'Unpin, close, leave a field', run: release },
      ...(inRun
        ? MENU.flatMap((group) => group.entries).map((entry) => ({
            keys: `g ${entry.key}`,
            text: `Go to ${entry.title.toLowerCase()}`,
            run: () => go(menuHref(run, entry)),
          }))
        : []),
      { keys: 'g a', text: 'Go to all runs', run: () => go('runs') },
      { keys: 'g n', text: 'Go to alerts', run: () => go('alerts') },
      { keys: 'g v', text: 'Go to the fleet: hosts over runs', run: () => go('fleet') },
      { keys: 'g x', text: 'Go to the server: its health and settings', run: () => go('server') },
      ...(inRun ? [] : [{ keys: 'g p', text: 'Go to preflights', run: () => go('preflight') }]),
      { keys: 'g /', text: 'Search all runs', run: () => go(withQuery('search', { q: query.value.q })) },
    ],
    [run],
  );
  return t.div(
    { class: inRun ? 'shell' : 'shell bare' },
    t.a({ class: 'skip', href: '#main' }, 'Skip to the answer'),
    el(Header, {
      run,
      overview,
      apiPath,
      openPalette: () => setFloating('palette'),
      openHelp: () => setFloating('help'),
      openViews: () => setFloating('views'),
    }),
    inRun ? el(Sidebar, { run, overview }) : null,
    t.main({ id: 'main', tabIndex: -1, class: 'page', 'data-api': apiPath }, children),
    t.div({ class: 'sr', role: 'status', 'aria-live': 'polite' }, spoken.value),
    floating === 'palette'
      ? el(Lazy, {
          load: () => import('./palette.js'),
          pick: 'Palette',
          props: { run, overview, close: () => setFloating('none') },
        })
      : null,
    floating === 'views'
      ? el(Lazy, { load: () => import('./views.js'), pick: 'Views', props: { run, close: () => setFloating('none') } })
      : null,
    floating === 'help'
      ? el(Lazy, { load: () => import('./help.js'), pick: 'Help', props: { close: () => setFloating('none') } })
      : null,
  );
}

async function copyLink() {
  announce((await copy(location.href)) ? 'Link copied' : `The browser refused to copy. The link is ${location.href}`);
}

/** Open the menu of the panel that has the focus, else of the first. */
function sharePanel() {
  const panel = document.activeElement?.closest('.card:has(.share)') ?? document.querySelector('main');
  /** @type {HTMLElement | null | undefined} */ (panel?.querySelector('.share'))?.click();
}

/** Focus the page's own search field, else open the palette. @param {() => void} otherwise */
function searchHere(otherwise) {
  const field = document.querySelector('main input[type=search]');
  if (field instanceof HTMLInputElement) {
    field.focus();
    field.select();
  } else otherwise();
}

/** @param {string} run @param {Entry} entry */
export function menuHref(run, entry) {
  return entry.href?.(run) ?? withQuery(runPath(run, entry.part), carried(query.value));
}

/** A component that loads when it is first shown. @param {{load: () => Promise<any>, pick: string, props: any}} props */
export function Lazy({ load, pick, props }) {
  const [component, setComponent] = useState(/** @type {{made: any} | null} */ (null));
  useEffect(() => {
    let wanted = true;
    load().then((module) => wanted && setComponent({ made: module[pick] }));
    return () => {
      wanted = false;
    };
  }, []);
  return component ? el(component.made, props) : null;
}

/** @param {{run: string, overview: Overview | null, apiPath: string, openPalette: () => void, openHelp: () => void, openViews: () => void}} props */
function Header({ run, overview, apiPath, openPalette, openHelp, openViews }) {
  const summary = overview?.run;
  return t.header(
    { class: 'top' },
    t.a(
      { class: 'brand', href: 'runs' },
      t.svg(
        { class: 'logo', viewBox: '0 0 16 16', width: 16, height: 16, 'aria-hidden': 'true' },
        t.path({ class: 'l1', d: 'M1 4h9' }),
        t.path({ class: 'l2', d: 'M1 8h14' }),
        t.path({ class: 'l3', d: 'M1 12h7' }),
      ),
      'rankscope',
    ),
    t.nav(
      { class: 'crumbs', 'aria-label': 'Breadcrumb' },
      run
        ? [
            t.a({ href: 'runs', key: 'runs' }, 'Runs'),
            t.span({ class: 'faint', 'aria-hidden': 'true', key: 's' }, '/'),
            t.a({ class: 'runname', href: runPath(run), key: 'run', title: run }, summary?.name || run),
            summary?.name && summary.name !== run ? t.code({ class: 'runid faint', key: 'id' }, run) : null,
          ]
        : null,
    ),
    el(Status, { overview }),
    t.div(
      { class: 'actions' },
      t.button(
        { type: 'button', class: 'searchbox', onClick: openPalette },
        el(Icon, { name: 'search' }),
        t.span({ class: 'long' }, 'Search ranks, steps, errors'),
        t.kbd(null, 'Ctrl K'),
      ),
      t.button({ type: 'button', class: 'button small', onClick: openViews }, 'Views'),
      t.a({ class: 'button small', href: 'alerts' }, 'Alerts'),
      run ? null : t.a({ class: 'button small', href: 'fleet' }, 'Fleet'),
      run ? null : t.a({ class: 'button small', href: 'preflight' }, 'Preflight'),
      run ? null : t.a({ class: 'button small', href: 'access' }, 'Access'),
      run ? null : t.a({ class: 'button small', href: 'server' }, 'Server'),
      t.a(
        { class: 'button small', href: apiHref(apiPath), title: `The data of this page: ${apiHref(apiPath)}` },
        'JSON',
      ),
      t.button(
        {
          type: 'button',
          class: 'button small',
          onClick: switchTheme,
          'aria-label': `Switch to the ${theme.value === 'dark' ? 'light' : 'dark'} theme`,
        },
        theme.value === 'dark' ? 'Light' : 'Dark',
      ),
      t.button({ type: 'button', class: 'button small', onClick: openHelp, 'aria-label': 'Keys of this page' }, '?'),
    ),
  );
}

/** How the run is, and how fresh this page is. @param {{overview: Overview | null}} props */
function Status({ overview }) {
  const summary = overview?.run;
  const away = stale.value;
  const over = summary ? summary.status === 'ended' || summary.status === 'failed' : false;
  const alive = summary?.status === 'running' || summary?.status === 'starting' || summary?.status === 'stuck';
  const state = away ? 'stale' : over ? 'over' : connection.value;
  const look = state === 'live' && !alive ? 'quiet' : state;
  const freshness = away
    ? `stale, last data ${ago(heardAt.value, now.value)}`
    : !alive
      ? ''
      : connection.value === 'live'
        ? 'live'
        : connection.value === 'polling'
          ? 'polling'
          : '';
  if (!summary && !away) return t.div({ class: 'status' });
  const text = [summary ? words(summary.status) : '', freshness].filter(Boolean).join(', ');
  return t.div(
    { class: `status is-${summary?.status ?? 'none'}`, 'data-freshness': state },
    t.span({ class: `dot ${look}`, 'aria-hidden': 'true' }),
    t.span({ class: 'statustext', title: summary?.status_text ?? '' }, text),
    summary?.step ? t.span({ class: 'faint' }, `step ${count(summary.step)}`) : null,
  );
}

/** @param {{run: string, overview: Overview | null}} props */
function Sidebar({ run, overview }) {
  const here = section(place.value.name);
  const bar = useRef(/** @type {HTMLDivElement | null} */ (null));
  useEffect(() => {
    const link = /** @type {HTMLElement | null | undefined} */ (bar.current?.querySelector('.here'));
    // where the menu is a row that scrolls, the page that is open is in its middle
    if (bar.current && link)
      bar.current.scrollLeft = link.offsetLeft + (link.offsetWidth - bar.current.clientWidth) / 2;
  }, [here]);
  return t.nav(
    { class: 'side', 'aria-label': 'Pages of this run' },
    t.div(
      { class: 'sidestick', ref: bar },
      MENU.map((group) =>
        t.div(
          { class: 'sidegroup', key: group.title },
          t.p({ class: 'sidetitle' }, group.title),
          group.entries.map((entry) => {
            const number = overview && entry.count ? entry.count(overview) : 0;
            return t.a(
              {
                key: entry.name,
                href: menuHref(run, entry),
                class: here === entry.name ? 'sidelink here' : 'sidelink',
                'aria-current': here === entry.name ? 'page' : undefined,
              },
              t.span(null, entry.title),
              number > 0
                ? t.span(
                    {
                      class: `badge ${overview && entry.tone ? entry.tone(overview) : ''}`,
                      title: `${count(number)} ${entry.noun}`,
                    },
                    count(number),
                    t.span({ class: 'sr' }, ` ${entry.noun}`),
                  )
                : null,
            );
          }),
        ),
      ),
    ),
  );
}

/** The run that every page of it needs: status, counts, verdict. @param {string} run */
export function useRun(run) {
  return useApi(run ? runPath(run) : null, { topic: run ? `run:${run}` : null });
}
