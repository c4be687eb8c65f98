/** One step: why it is slow or that it is not, in a sentence; then what every rank did when. */

import { signal } from '@preact/signals';
import { useEffect, useMemo, useRef, useState } from 'preact/hooks';
import { apiHref, csvHref, useApi } from '../api.js';
import { modelOf, Timeline } from '../charts/timeline.js';
import { LOOKS } from '../charts/timeline-maths.js';
import { count, dateTime, duration, plural } from '../format.js';
import { useKeys } from '../keys.js';
import { setTitle } from '../page.js';
import { Card, Empty, Guard, Icon, LeftOutNote, Problem, Skeleton } from '../parts/bits.js';
import { Folded } from '../parts/folded.js';
import { Lazy } from '../parts/shell.js';
import { go, query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { readCell, readRank, runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').StepTimeline} StepTimeline */
/** @typedef {import('../../types/api.js').Overview} Overview */

const RANGE = 9; // steps that the longer trace holds beside this one

/** Where a step of a run is shown; the selection of the page goes along. @param {string} run @param {number} step @param {Record<string, string | null>} [more] */
export function stepHref(run, step, more = {}) {
  const { ranks, sel } = query.value;
  const rank = readRank(sel);
  return withQuery(runPath(run, 'steps', String(step)), {
    ranks,
    sel: rank === null ? null : `${rank}@${step}`,
    ...more,
  });
}

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, id, overview, topic }) {
  const last = overview.data?.run.step ?? 0;
  const wanted = Number(id) || readCell(query.value.sel)?.step || last;
  useEffect(() => {
    if (id === '' && wanted > 0) go(stepHref(run, wanted), { replace: true });
  }, [id, wanted]);
  if (id === '') return el(NoStepYet, { run, overview: overview.data });
  return el(Step, { key: id, run, step: Number(id), overview: overview.data, topic });
}

/** @param {{run: string, overview: Overview | null}} props */
function NoStepYet({ run, overview }) {
  useEffect(() => setTitle('One step', run), []);
  if (!overview) return el(Skeleton, { height: 240, waitsFor: 'the step' });
  return t.div(
    { class: 'card padded' },
    t.h1({ id: 'verdict' }, 'No step yet'),
    el(
      Empty,
      { title: 'This page shows what every rank did in one step, once one has ended.' },
      t.a({ class: 'button', href: runPath(run) }, 'The run’s overview'),
    ),
  );
}

/** @param {{run: string, step: number, overview: Overview | null, topic: string | null}} props */
function Step({ run, step, overview, topic }) {
  const { ranks, sel } = query.value;
  const chosen = readRank(sel);
  const path = withQuery(runPath(run, 'steps', String(step)), { ranks, also: ranks ? null : chosen });
  // A step that is long over does not change; the newest ones may still be arriving.
  const isNew = overview === null || step > overview.run.step - 3;
  const answer = /** @type {import('../api.js').Answer<StepTimeline>} */ (
    useApi(path, isNew ? { topic, on: ['steps'] } : {})
  );
  const kept = useRef(/** @type {StepTimeline | null} */ (null));
  if (answer.data) kept.current = answer.data;
  const data = kept.current;
  useEffect(() => setTitle(data ? data.answer.what : `Step ${count(step)}`, run), [data]);
  const to = (/** @type {number} */ way) => {
    const next = step + way;
    if (next >= (data?.step_lo ?? 1) && next <= (data?.step_hi ?? next)) go(stepHref(run, next));
  };
  useKeys(
    [
      { keys: '[', text: 'Previous step', run: () => to(-1) },
      { keys: ']', text: 'Next step', run: () => to(1) },
      {
        keys: 'Escape',
        text: 'Unpin',
        run: () => setQuery(query.value.at ? { at: null } : { sel: null }),
      },
      { keys: 'w', text: 'Zoom in', where: 'timeline' },
      { keys: 's', text: 'Zoom out', where: 'timeline' },
      { keys: 'a', text: 'Move left', where: 'timeline' },
      { keys: 'd', text: 'Move right', where: 'timeline' },
      { keys: '0', text: 'Show the whole step', where: 'timeline' },
    ],
    [run, step, data],
  );
  if (!data) {
    if (answer.error && answer.error.status >= 400 && answer.error.status < 500)
      return el(NoStep, { run, step, overview, error: answer.error });
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: `step ${count(step)}` })
      : el(Skeleton, { height: 320, waitsFor: `step ${count(step)}` });
  }
  return t.div(
    { class: 'stack', 'data-api': path },
    el(Answer, { run, data }),
    answer.error ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'these ranks' }) : null,
    el(TimelineCard, { run, data, path }),
    data.folded.length > 0 ? el(Folded, { data }) : null,
  );
}

/** @param {{run: string, step: number, overview: Overview | null, error: import('../api.js').Failure}} props */
function NoStep({ run, step, overview, error }) {
  const last = overview?.run.step;
  return t.div(
    { class: 'card padded' },
    t.h1(
      { id: 'verdict' },
      error.detail.field === 'ranks' ? 'There are no such ranks' : `There is no step ${count(step)}`,
    ),
    el(
      Empty,
      { title: `${error.detail.what}. ${error.detail.remedy}.` },
      error.detail.field === 'ranks'
        ? t.a({ class: 'button', href: runPath(run, 'steps', String(step)) }, 'The usual ranks')
        : last
          ? t.a({ class: 'button', href: runPath(run, 'steps', String(last)) }, `Step ${count(last)}, the newest`)
          : t.a({ class: 'button', href: runPath(run) }, 'The run’s overview'),
    ),
  );
}

/** @param {{run: string, data: StepTimeline}} props */
function Answer({ run, data }) {
  const { answer, step } = data;
  const tone = answer.is_slow ? 'is-warning' : answer.is_slow === false ? 'is-healthy' : '';
  const mark = answer.is_slow ? 'warning' : answer.is_slow === false ? 'ok' : 'unknown';
  return t.section(
    { class: `card verdict ${tone}` },
    t.div(
      { class: 'verdicthead' },
      t.div(
        { class: 'verdictsay' },
        t.p(
          { class: 'kicker' },
          t.span(
            { class: 'severity' },
            el(Icon, { name: mark }),
            answer.is_slow ? 'Slow' : answer.is_slow === false ? 'Not slow' : 'Not known',
          ),
          t.span(null, `Step ${count(step)}${data.began_ms ? `, ${dateTime(data.began_ms)}` : ''}`),
        ),
        t.h1({ id: 'verdict' }, answer.what),
      ),
    ),
    answer.evidence.length > 0
      ? t.div(
          { class: 'stepevidence' },
          t.h2({ class: 'sr' }, 'Evidence'),
          t.ul(
            null,
            answer.evidence.map((one) =>
              t.li({ key: one.text }, one.href ? t.a({ href: `${runPath(run)}/${one.href}` }, one.text) : one.text),
            ),
          ),
        )
      : null,
    t.div(
      { class: 'verdictfoot' },
      t.div(
        { class: 'also' },
        data.slowest.length > 0
          ? t.p(
              null,
              'Slowest beside it: ',
              data.slowest.map((one, i) => [
                i ? ', ' : '',
                t.a({ key: one.step, href: stepHref(run, one.step) }, `step ${count(one.step)}`),
                ` ${duration(one.step_ms)}`,
              ]),
            )
          : null,
      ),
      t.nav(
        { class: 'buttons', 'aria-label': 'Steps' },
        step > data.step_lo
          ? t.a({ class: 'button small', href: stepHref(run, step - 1) }, `Step ${count(step - 1)}`)
          : null,
        step < data.step_hi
          ? t.a({ class: 'button small', href: stepHref(run, step + 1) }, `Step ${count(step + 1)}`)
          : null,
        t.a(
          {
            class: 'button small',
            href: withQuery(runPath(run, 'ranks'), {
              steps: `${Math.max(1, step - 50)}-${step + 50}`,
              sel: answer.ranks.length > 0 ? `${answer.ranks[0]}@${step}` : query.value.sel,
            }),
          },
          'On the map',
        ),
      ),
    ),
  );
}

/** @param {{run: string, data: StepTimeline, path: string}} props */
function TimelineCard({ run, data, path }) {
  const [table, setTable] = useState(false);
  // A signal: a frame of the timeline must not render the card.
  const view = useMemo(
    () => signal(/** @type {import('../charts/timeline-maths.js').View} */ ([0, data.length_us])),
    [data],
  );
  const model = useMemo(() => modelOf(data), [data]);
  useKeys([{ keys: 't', text: 'The timeline as a table, and back', run: () => setTable((old) => !old) }], []);
  const { ranks } = query.value;
  const last = Math.min(data.step_hi, data.step + RANGE);
  const trace = runPath(run, 'steps', String(data.step), 'trace');
  const used = new Set(data.slices.kind);
  return el(
    Card,
    {
      title: 'What every rank did',
      note: `${plural(data.lanes.length, 'rank')}, ${duration(data.length_us / 1000)} from the first begin to the last end`,
      tools: [
        query.value.t
          ? t.button(
              { key: 'z', type: 'button', class: 'link', onClick: () => setQuery({ t: null }) },
              'Show the whole step',
            )
          : null,
        t.button(
          { key: 't', type: 'button', class: 'link', onClick: () => setTable(!table), 'aria-pressed': table },
          table ? 'Timeline' : 'Table',
        ),
        t.a({ key: 'c', href: csvHref(path) }, 'CSV'),
        t.a({ key: 'p', href: apiHref(withQuery(trace, { ranks })), download: '' }, 'Trace for Perfetto'),
        last > data.step
          ? t.a(
              { key: 'r', href: apiHref(withQuery(trace, { to: last, ranks })), download: '' },
              `of steps ${count(data.step)}–${count(last)}`,
            )
          : null,
      ],
    },
    t.div(
      { class: 'steptools' },
      el(RankChoice, { data }),
      t.ul(
        { class: 'partlegend' },
        legendOf(data.kinds.filter((_, i) => used.has(i))).map(([look, titles]) =>
          t.li(
            { key: look },
            t.span({ class: look ? `swatch t-${look}` : 'hatchmark', 'aria-hidden': 'true' }),
            titles.join(' / '),
          ),
        ),
        data.flights.lane.length > 0
          ? t.li({ key: 'f' }, t.span({ class: 'swatch thin t-comm', 'aria-hidden': 'true' }), 'Operation under way')
          : null,
      ),
    ),
    t.div({ hidden: table }, el(Guard, { what: 'The timeline' }, el(Timeline, { run, model, shown: view }))),
    table
      ? el(Lazy, {
          load: () => import('../charts/timelinetable.js'),
          pick: 'TimelineTable',
          props: { run, model, view },
        })
      : null,
    query.value.at
      ? el(Lazy, { key: 'slice', load: () => import('../parts/slice.js'), pick: 'SlicePanel', props: { run, model } })
      : null,
    t.div(
      { class: 'padded stepnotes' },
      data.notes.map((text) => t.p({ key: text, class: 'note' }, text)),
      t.p({ class: data.is_clock_sure ? 'note' : 'note unsure' }, data.clock_text),
      t.p({ class: 'note' }, data.phases_text),
      el(LeftOutNote, { parts: data.left_out }),
      data.calls_capped
        ? t.p(
            { class: 'note' },
            `First ${count(data.calls_capped.shown)} of ${count(data.calls_capped.total)} operations: choose fewer ranks.`,
          )
        : null,
    ),
  );
}

/** Which ranks are shown, and the way to others. @param {{data: StepTimeline}} props */
function RankChoice({ data }) {
  const { ranks } = query.value;
  const [text, setText] = useState(ranks ?? '');
  useEffect(() => setText(ranks ?? ''), [ranks]);
  const capped = data.lanes_capped;
  const first = ranks ? null : capped;
  return t.form(
    {
      class: 'rankchoice',
      onSubmit: (event) => {
        event.preventDefault();
        setQuery({ ranks: text.trim() || null });
      },
    },
    t.label(
      null,
      'Ranks ',
      t.input({
        type: 'text',
        inputMode: 'numeric',
        value: text,
        placeholder: data.world_size > 1 ? `0-${data.world_size - 1}` : '0',
        onInput: (event) => setText(event.currentTarget.value),
      }),
    ),
    t.button({ type: 'submit', class: 'button small' }, 'Show'),
    ranks
      ? t.button({ type: 'button', class: 'link', onClick: () => setQuery({ ranks: null }) }, 'The usual ranks')
      : null,
    capped
      ? t.span(
          { class: 'note' },
          `${count(capped.shown)} of ${count(capped.total)} ranks${first ? ': who holds others up, the critical path, the worst of each node' : ' that were asked for'}. Write others as 5,64-67.`,
        )
      : null,
  );
}

/** The names of kinds by how they look: some share a colour. @param {string[]} kinds @returns {[string, string[]][]} */
function legendOf(kinds) {
  /** @type {Map<string, string[]>} */
  const found = new Map();
  for (const kind of kinds) {
    const [look, title] = LOOKS[kind];
    found.set(look, [...(found.get(look) ?? []), title]);
  }
  return [...found];
}
