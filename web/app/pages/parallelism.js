/** How the ranks share the work: what a pipeline idles, the mesh of ranks, its groups, staleness. */

import { useEffect, useState } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { MeshChart, numberWords } from '../charts/mesh.js';
import { MeshTable } from '../charts/meshtable.js';
import { count, duration, figure, percent, plural, sentence } from '../format.js';
import { useKeys } from '../keys.js';
import { announce, setTitle } from '../page.js';
import { CappedNote, Card, LeftOutNote, Problem, Severity, Skeleton, Table } from '../parts/bits.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';

/** @typedef {import('../../types/api.js').Parallelism} Parallelism */
/** @typedef {import('../../types/api.js').Mesh} Mesh */
/** @typedef {import('../../types/api.js').MeshValue} Value */
/** @typedef {import('../../types/api.js').Pipeline} Pipeline */
/** @typedef {import('../../types/api.js').Staleness} Staleness */

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, topic }) {
  const path = runPath(run, 'parallelism');
  const answer = /** @type {import('../api.js').Answer<Parallelism>} */ (
    useApi(path, { topic, on: ['ranks', 'steps', 'verdict'] })
  );
  const data = answer.data;
  useEffect(() => setTitle(data?.text ?? 'Parallelism', run), [data?.text]);
  if (!data)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'how ranks share the work' })
      : el(Skeleton, { height: 320, waitsFor: 'how ranks share the work' });
  return t.div(
    { class: `stack ${answer.error ? 'greyed' : ''}` },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, data.text),
      data.step_hi >= data.step_lo
        ? t.p(
            { class: 'faint' },
            `measured in steps ${count(data.step_lo)} to ${count(data.step_hi)} of attempt ${count(data.attempt)}`,
          )
        : t.p({ class: 'faint' }, 'no step has ended yet'),
    ),
    data.findings.length > 0
      ? t.ul(
          { class: 'plainlist bearing' },
          data.findings.map((one) =>
            t.li(
              { key: one.id },
              el(Severity, { severity: one.severity }),
              ' ',
              t.a({ href: runPath(run, 'findings', String(one.id)) }, one.what),
            ),
          ),
        )
      : null,
    data.pipeline
      ? el(PipelineCard, { found: data.pipeline, run })
      : el(Card, { title: 'Pipeline', note: sentence(`none: ${data.no_pipeline}`) }),
    el(MeshCard, { data, run, csv: csvHref(path) }),
    data.staleness ? el(StalenessCard, { found: data.staleness, run }) : null,
    el(GroupsCard, { data }),
    el(LeftOutNote, { parts: data.left_out }),
  );
}

/** @param {{found: Pipeline, run: string}} props */
function PipelineCard({ found, run }) {
  const gain = found.even_gain;
  return el(
    Card,
    {
      title: 'Pipeline',
      note: [
        found.schedule.replace(/^Schedule/, '') || 'schedule not known',
        plural(found.num_stages, 'stage'),
        found.num_chunks > 1 ? `${count(found.num_chunks)} on each of ${plural(found.num_ranks, 'place')}` : '',
        found.num_microbatches === null
          ? 'microbatches not known'
          : plural(found.num_microbatches, 'microbatch', 'microbatches'),
        found.step_ms === null ? '' : `a step takes ${duration(found.step_ms)}`,
      ]
        .filter(Boolean)
        .join(', '),
    },
    t.div(
      { class: 'bubbles' },
      bubble('Measured', found.idle_ratio, 't-wait', 'not known: self time of the stages is not'),
      bubble('Ideal', found.ideal_ratio, 't-other', found.ideal_text),
    ),
    t.p(
      { class: 'note padded' },
      found.ideal_ratio === null
        ? sentence(`no ideal: ${found.ideal_text}`)
        : `Ideal for even stages: ${found.ideal_text}. `,
      gain === null
        ? ''
        : `Even stages would save up to ${percent(gain)} of a step: what the longest works beyond the mean. Idle is all of a step that is no self time, waits for gradients included.`,
    ),
    el(StageTable, { found, run }),
  );
}

/** How much of a step is idle, as a bar. @param {string} name @param {number | null} share @param {string} look @param {string} unknown */
function bubble(name, share, look, unknown) {
  return t.div(
    { class: 'bar', key: name },
    t.span({ class: 'barlabel' }, name),
    t.span(
      { class: 'bubbletrack', 'aria-hidden': 'true' },
      share === null
        ? t.span({ class: 'hatchmark wide', title: unknown })
        : t.span({ class: `fall ${look}`, style: { width: `${Math.min(1, share) * 100}%` } }),
    ),
    t.span({ class: 'bartotal' }, share === null ? 'unknown' : `${percent(share)} idle`),
  );
}

/** @param {{found: Pipeline, run: string}} props */
function StageTable({ found, run }) {
  const most = Math.max(...found.stages.map((stage) => stage.own_ms ?? 0), 1e-9);
  const longest = found.stages.reduce((a, b) => ((b.own_ms ?? 0) > (a.own_ms ?? 0) ? b : a), found.stages[0]);
  return Table({
    label: 'Stages of the pipeline',
    class: 'stages',
    rows: found.stages,
    keyOf: (stage) => stage.stage,
    rowProps: (stage) => ({ 'data-stage': String(stage.stage) }),
    columns: [
      {
        label: 'Stage',
        class: 'nowrap',
        cell: (stage) =>
          stage === longest && stage.own_ms !== null ? t.b(null, `Stage ${stage.stage}`) : `Stage ${stage.stage}`,
      },
      { label: 'Ranks', class: 'nowrap', cell: (stage) => stage.ranks_text },
      {
        class: 'w-fall',
        cell: (stage) =>
          stage.own_ms === null
            ? t.span({ class: 'hatchmark wide', 'aria-hidden': 'true' })
            : t.span(
                { class: 'falltrack', 'aria-hidden': 'true' },
                t.span({ class: 'fall t-fwd', style: { width: `${(stage.own_ms / most) * 100}%` } }),
              ),
      },
      {
        label: 'Self time a step',
        class: 'num nowrap',
        cell: (stage) => (stage.own_ms === null ? 'unknown' : duration(stage.own_ms)),
      },
      { label: 'Over the others', class: 'num nowrap', cell: (stage) => timesWords(stage.others_ratio) },
      { label: 'Forward a microbatch', class: 'num nowrap', cell: (stage) => duration(stage.forward_ms) },
      { label: 'Backward a microbatch', class: 'num nowrap', cell: (stage) => duration(stage.backward_ms) },
      { label: 'Idle', class: 'num nowrap', cell: (stage) => percent(stage.idle_ratio) },
      {
        label: 'Longest rank',
        class: 'nowrap',
        cell: (stage) =>
          stage.longest_rank === null
            ? t.span({ class: 'faint' }, '–')
            : [
                t.a(
                  { key: 'a', href: runPath(run, 'ranks', String(stage.longest_rank)) },
                  `Rank ${count(stage.longest_rank)}`,
                ),
                ` ${timesWords(stage.longest_ratio)} its median`,
              ],
      },
    ],
  });
}

/** "1.04×". @param {number | null} ratio */
function timesWords(ratio) {
  return ratio === null ? '–' : `${ratio.toFixed(2)}×`;
}

/** @param {{data: Parallelism, run: string, csv: string}} props */
function MeshCard({ data, run, csv }) {
  const { mesh } = data;
  const [table, setTable] = useState(false);
  const asked = query.value.metric;
  const value = mesh.values.find((one) => one.key === asked) ?? mesh.values[0];
  /** @param {string} key */
  function show(key) {
    setQuery({ metric: key === mesh.values[0].key ? null : key }, { replace: true });
  }
  function next() {
    const to = mesh.values[(mesh.values.indexOf(value) + 1) % mesh.values.length];
    show(to.key);
    announce(`Coloured by ${to.title}`);
  }
  useKeys(
    [
      { keys: 't', text: 'The mesh as a table, and back', run: () => setTable((old) => !old) },
      { keys: 'c', text: 'Colour the mesh by the next number', run: next },
    ],
    [mesh, value],
  );
  return el(
    Card,
    {
      title: `Mesh of ${mesh.text}`,
      note: `coloured by ${value.title.charAt(0).toLowerCase()}${value.title.slice(1)}: ${value.what}${ends(mesh, value)}${known(mesh, value)}`,
      tools: [
        t.select(
          {
            key: 'm',
            'aria-label': 'What colours the mesh',
            value: value.key,
            onChange: (event) => show(event.currentTarget.value),
          },
          mesh.values.map((one) => t.option({ key: one.key, value: one.key }, one.title)),
        ),
        el(Legend, { key: 'l', value }),
        t.button(
          { key: 't', type: 'button', class: 'link', onClick: () => setTable(!table), 'aria-pressed': table },
          table ? 'Mesh' : 'Table',
        ),
        t.a({ key: 'c', href: csv }, 'CSV'),
      ],
    },
    t.div({ hidden: table, class: 'padded' }, el(MeshChart, { mesh, value, run })),
    table ? el(MeshTable, { mesh, shown: value.key, run }) : null,
    el(CappedNote, { capped: mesh.ranks_capped, noun: 'ranks' }),
  );
}

/** Who has most and who has least of a number, where they differ. @param {Mesh} mesh @param {Value} value */
function ends(mesh, value) {
  const places = [...value.values.keys()].filter((at) => value.values[at] !== null);
  const of = (/** @type {number} */ at) => Number(value.values[at]);
  places.sort((one, other) => of(other) - of(one));
  const [most, least] = [places[0], places[places.length - 1]];
  if (places.length < 2 || of(most) === of(least)) return '';
  const words = (/** @type {number} */ at) => `rank ${count(mesh.rank[at])}, ${numberWords(value, of(at))}`;
  return `; most: ${words(most)}; least: ${words(least)}`;
}

/** Of how many ranks a number is known, where not of all. @param {Mesh} mesh @param {Value} value */
function known(mesh, value) {
  return value.num_known < mesh.rank.length
    ? `; known of ${count(value.num_known)} of ${plural(mesh.rank.length, 'rank')}`
    : '';
}

/** @param {{value: Value}} props */
function Legend({ value }) {
  const isTimes = value.unit === 'times';
  return t.span(
    { class: 'legend' },
    t.span(null, isTimes ? '−50 %, faster' : numberWords(value, value.lo)),
    t.span({ class: isTimes ? 'rampbar' : 'rampbar sequential', 'aria-hidden': 'true' }),
    t.span(null, isTimes ? '+100 %, slower' : numberWords(value, value.hi)),
    t.span({ class: 'hatchmark', 'aria-hidden': 'true' }),
    t.span(null, 'no data'),
  );
}

/** @param {{found: Staleness, run: string}} props */
function StalenessCard({ found, run }) {
  return el(
    Card,
    { title: 'Staleness', note: sentence(found.text) },
    Table({
      label: 'Staleness by rank',
      rows: found.ranks,
      keyOf: (one) => one.rank,
      columns: [
        {
          label: 'Rank',
          cell: (one) => t.a({ href: runPath(run, 'ranks', String(one.rank)) }, `Rank ${count(one.rank)}`),
        },
        { label: 'Gradients', class: 'num', cell: (one) => count(one.num_gradients) },
        { label: 'Half at most', class: 'num', cell: (one) => plural(one.p50, 'version') },
        { label: '95 % at most', class: 'num', cell: (one) => plural(one.p95, 'version') },
        { label: 'Oldest', class: 'num', cell: (one) => plural(one.most, 'version') },
        { label: 'Mean', class: 'num', cell: (one) => figure(one.mean) },
        { label: 'Other weights in backward', class: 'num', cell: (one) => count(one.num_mismatched) },
      ],
    }),
  );
}

/** @param {{data: Parallelism}} props */
function GroupsCard({ data }) {
  return el(
    Card,
    {
      title: 'Groups',
      note:
        data.families.length === 0
          ? 'No process group of two ranks or more is known: ranks report one once init_process_group has made it.'
          : 'process groups by kind; those that span the mesh are its axes',
    },
    data.families.length === 0
      ? null
      : Table({
          label: 'Process groups by kind',
          rows: data.families,
          keyOf: (family) => `${family.name} ${family.size} ${family.text}`,
          columns: [
            { label: 'Kind', class: 'nowrap', cell: (family) => family.name },
            { label: 'Groups', class: 'wide', cell: (family) => family.text },
            { label: 'Axis', cell: (family) => (family.is_axis ? 'yes' : 'no') },
            { label: 'Backend', class: 'nowrap', cell: (family) => family.backend || '–' },
            {
              label: 'Called',
              class: 'clip',
              title: (family) => family.descriptions.join(', '),
              cell: (family) => family.descriptions.join(', ') || '–',
            },
            {
              label: 'Calls of ranks',
              class: 'num',
              cell: (family) => (family.num_calls > 0 ? count(family.num_calls) : 'none recorded'),
            },
            { label: 'Of the blocked time', class: 'num', cell: (family) => percent(family.blocked_ratio) },
          ],
        }),
    el(CappedNote, { capped: data.families_capped, noun: 'kinds of groups' }),
  );
}
