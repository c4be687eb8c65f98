/** Entry: picks the page for the address, loads its module, and wraps it in the shell. */

import { render } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import { Failure } from './api.js';
import { setTitle } from './page.js';
import { Empty, Guard, Problem, Removed } from './parts/bits.js';
import { Shell, useRun } from './parts/shell.js';
import { go, place, query } from './router.js';
import { el, t } from './tags.js';
import { comparePath, path, runPath, searchPath, withQuery } from './url.js';

/** @typedef {import('../types/api.js').Overview} Overview */

/**
 * What every page of a run is given.
 * @typedef {{run: string, id: string, overview: import('./api.js').Answer<Overview>, topic: string | null}} PageProps
 */

/** @type {Record<string, {load: () => Promise<{Page: import('preact').ComponentType<any>}>, api: (run: string, id: string) => string}>} */
const PAGES = {
  runs: { load: () => import('./pages/runs.js'), api: () => 'runs' },
  storage: { load: () => import('./pages/storage.js'), api: () => 'storage' },
  alerts: { load: () => import('./pages/alerts.js'), api: () => 'alerts' },
  signin: { load: () => import('./pages/signin.js'), api: () => 'session' },
  compare: { load: () => import('./pages/compare.js'), api: () => comparePath(query.value) ?? 'runs' },
  fleet: { load: () => import('./pages/fleet.js'), api: () => withQuery('fleet', { weeks: query.value.weeks }) },
  preflights: { load: () => import('./pages/preflights.js'), api: () => 'preflight/runs' },
  preflight: { load: () => import('./pages/preflight.js'), api: (_, id) => path('preflight', 'runs', id) },
  search: { load: () => import('./pages/search.js'), api: () => searchPath(query.value) },
  server: { load: () => import('./pages/server.js'), api: () => 'server' },
  access: { load: () => import('./pages/access.js'), api: () => 'session' },
  overview: { load: () => import('./pages/overview.js'), api: (run) => runPath(run) },
  findings: { load: () => import('./pages/findings.js'), api: (run) => runPath(run, 'findings') },
  finding: { load: () => import('./pages/finding.js'), api: (run, id) => runPath(run, 'findings', id) },
  ranks: { load: () => import('./pages/ranks.js'), api: (run) => runPath(run, 'ranks') },
  step: {
    load: () => import('./pages/step.js'),
    api: (run, id) => (id ? runPath(run, 'steps', id) : runPath(run)),
  },
  rank: { load: () => import('./pages/rank.js'), api: (run, id) => runPath(run, 'ranks', id) },
  collectives: { load: () => import('./pages/collectives.js'), api: (run) => runPath(run, 'collectives') },
  parallelism: { load: () => import('./pages/parallelism.js'), api: (run) => runPath(run, 'parallelism') },
  cost: { load: () => import('./pages/cost.js'), api: (run) => runPath(run, 'cost') },
  resources: { load: () => import('./pages/resources.js'), api: (run) => runPath(run, 'resources') },
  hang: {
    load: () => import('./pages/hang.js'),
    api: (run) => withQuery(runPath(run, 'hang'), { attempt: query.value.attempt, ranks: query.value.ranks }),
  },
  errors: { load: () => import('./pages/errors.js'), api: (run) => runPath(run, 'errors') },
  logs: { load: () => import('./pages/logs.js'), api: (run) => runPath(run, 'logs') },
  machines: { load: () => import('./pages/machines.js'), api: (run) => runPath(run, 'machines') },
  node: { load: () => import('./pages/node.js'), api: (run) => runPath(run, 'machines') },
  environment: { load: () => import('./pages/environment.js'), api: (run) => runPath(run, 'environment') },
  agent: { load: () => import('./pages/agent.js'), api: (run) => runPath(run, 'agent') },
};

/** @type {Promise<void> | undefined} */
let styles;

/** The style sheet of the pages beyond the overview, once. */
function pageStyles() {
  styles ??= new Promise((done, fail) => {
    const link = document.createElement('link');
    link.rel = 'stylesheet';
    link.href = new URL('../pages.css', import.meta.url).href;
    link.onload = () => done();
    link.onerror = () => {
      styles = undefined;
      fail(new Error('no style sheet'));
    };
    document.head.append(link);
  });
  return styles;
}

/** Whether a run still sends: a run that is over needs no stream. @param {Overview | null} overview */
function isOver(overview) {
  return overview !== null && (overview.run.status === 'ended' || overview.run.status === 'failed');
}

function App() {
  const { name, run, id } = place.value;
  const overview = /** @type {import('./api.js').Answer<Overview>} */ (useRun(run));
  const known = PAGES[name];
  const deleted = run !== '' && overview.error?.status === 410;
  const missing = deleted || (run !== '' && overview.error?.status === 404);
  useEffect(() => {
    if (name === 'home') go('runs', { replace: true });
  }, [name]);
  return el(
    Shell,
    { run: missing ? '' : run, overview: overview.data, apiPath: known ? known.api(run, id) : 'runs' },
    missing
      ? el(NoSuchRun, { run, deleted })
      : known
        ? el(PageFor, {
            key: `${name} ${run} ${id}`,
            name,
            props: { run, id, overview, topic: run ? `run:${run}` : null },
          })
        : name === 'unknown'
          ? el(NoSuchPage, { at: id, run })
          : null,
  );
}

/** @param {{name: string, props: PageProps}} props */
function PageFor({ name, props }) {
  const [loaded, setLoaded] = useState(/** @type {{page: any} | null} */ (null));
  const [problem, setProblem] = useState(/** @type {Failure | null} */ (null));
  function load() {
    setProblem(null);
    Promise.all([PAGES[name].load(), name === 'overview' ? null : pageStyles()]).then(
      ([module]) => setLoaded({ page: module.Page }),
      () =>
        setProblem(
          new Failure(
            0,
            {
              what: 'Its program did not arrive',
              field: null,
              remedy: 'The server may have been updated: reload the page.',
              request_id: '',
              at: null,
            },
            'health',
          ),
        ),
    );
  }
  useEffect(load, [name]);
  if (problem) return el(Problem, { error: problem, retry: load, what: 'this page' });
  if (!loaded) return null;
  return el(
    Guard,
    { what: 'This page' },
    el(Removed, { page: name, overview: props.overview.data }),
    el(loaded.page, { ...props, ended: isOver(props.overview.data) }),
  );
}

/** @param {{run: string, deleted: boolean}} props */
function NoSuchRun({ run, deleted }) {
  useEffect(() => setTitle(`No run ${run}`), [run]);
  return t.div(
    { class: 'card padded' },
    t.h1(null, deleted ? `Run “${run}” was deleted` : `There is no run “${run}”`),
    el(
      Empty,
      {
        title: deleted
          ? 'What it still sends is refused. A new run needs another id.'
          : 'Its first record may not have arrived yet. This page looks again by itself.',
      },
      t.p(null, t.a({ href: 'runs', class: 'button' }, 'All runs')),
    ),
  );
}

/** @param {{at: string, run: string}} props */
function NoSuchPage({ at, run }) {
  useEffect(() => setTitle('No such page'), []);
  return t.div(
    { class: 'card padded' },
    t.h1(null, 'There is no such page'),
    el(
      Empty,
      { title: `Nothing is kept at “${at}”.` },
      t.p(
        null,
        t.a({ href: run ? runPath(run) : path('runs'), class: 'button' }, run ? 'The run’s overview' : 'All runs'),
      ),
    ),
  );
}

const place0 = document.getElementById('app');
if (place0) render(el(App, {}), place0);
