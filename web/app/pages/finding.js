/** One finding: the claim, how sure, what would make it wrong, the evidence, its history. */

import { useEffect } from 'preact/hooks';
import { useApi } from '../api.js';
import { costWords, count, dateTime, kindWords, percent, ranges, sentence, words } from '../format.js';
import { setTitle } from '../page.js';
import {
  CappedNote,
  Card,
  CopyButton,
  Empty,
  OnsetStep,
  Problem,
  Severity,
  Share,
  Skeleton,
  When,
} from '../parts/bits.js';
import { Acknowledge, Explains, Reasons, report, silentSince, spanWords, WAITS } from '../parts/finding.js';
import { Lazy } from '../parts/shell.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { useFindingKeys } from './overview.js';

/** @typedef {import('../../types/api.js').FindingDetail} FindingDetail */
/** @typedef {import('../../types/api.js').Findings} Findings */

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, id, topic, overview, ended }) {
  const answer = /** @type {import('../api.js').Answer<FindingDetail>} */ (
    useApi(runPath(run, 'findings', id), { topic, on: ['findings', 'verdict', 'stacks', 'commands'] })
  );
  const all = /** @type {import('../api.js').Answer<Findings>} */ (
    useApi(runPath(run, 'findings'), { topic, on: ['findings'] })
  );
  const finding = answer.data;
  useFindingKeys(run, all.data?.open.map((one) => one.id) ?? [], Number(id));
  useEffect(() => setTitle(finding?.what ?? 'Finding', run), [finding?.what]);
  if (!finding) {
    if (answer.error?.status === 404)
      return t.div(
        { class: 'card padded' },
        t.h1(null, `There is no finding ${id}`),
        el(
          Empty,
          { title: answer.error.detail.what },
          t.a({ class: 'button', href: runPath(run, 'findings') }, 'The run’s findings'),
        ),
      );
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'this finding' })
      : el(Skeleton, { height: 300, waitsFor: 'the finding' });
  }
  const others = all.data ? [...all.data.open, ...all.data.recovered] : [];
  const culprit = others.find((one) => one.id === finding.explained_by);
  const folded = others.filter((one) => one.explained_by === finding.id);
  return t.div(
    { class: 'stack' },
    t.section(
      { class: `verdict card is-${finding.severity}` },
      t.div(
        { class: 'verdicthead' },
        t.div(
          { class: 'verdictsay' },
          t.p(
            { class: 'kicker' },
            el(Severity, { severity: finding.severity, text: kindWords(finding.kind) }),
            t.span({ class: 'pill' }, ended && finding.state === 'open' ? 'at the end' : finding.state),
          ),
          t.h1({ id: 'verdict' }, finding.what),
          t.p({ class: 'why' }, sentence(finding.why)),
          culprit
            ? t.p(null, 'Explained by ', t.a({ href: runPath(run, 'findings', String(culprit.id)) }, culprit.what), '.')
            : null,
        ),
        finding.cost_throughput_ratio === null
          ? null
          : t.div(
              { class: 'verdictcost' },
              t.p({ class: 'big' }, percent(finding.cost_throughput_ratio)),
              t.p(null, 'of throughput lost'),
              t.p({ class: 'faint' }, costWords(finding, ended)),
            ),
      ),
      el(Reasons, { finding, asOf: silentSince(overview.data?.run) }),
      t.div(
        { class: 'verdictfoot' },
        t.div({ class: 'also' }, el(Explains, { folded, run })),
        t.div(
          { class: 'buttons' },
          finding.ranks.length > 0
            ? t.a(
                { class: 'button', href: runPath(run, 'ranks', String(finding.ranks[0])) },
                `Open rank ${finding.ranks[0]}`,
              )
            : null,
          finding.onset_step
            ? t.a(
                {
                  class: 'button',
                  href: withQuery(runPath(run, 'ranks'), {
                    sel: finding.ranks.length > 0 ? `${finding.ranks[0]}@${finding.onset_step}` : null,
                  }),
                },
                'Show on the map',
              )
            : null,
          WAITS.has(finding.kind)
            ? t.a(
                { class: 'button', href: withQuery(runPath(run, 'hang'), { attempt: finding.attempt }) },
                'Who waits for whom',
              )
            : null,
          el(OnsetStep, { finding, run }),
          finding.onset_ms
            ? t.a(
                {
                  class: 'button',
                  href: withQuery(runPath(run, 'logs'), {
                    from: Math.round(finding.onset_ms - 10_000),
                    to: Math.round(finding.onset_ms + 10_000),
                  }),
                },
                'Logs at its start',
              )
            : null,
          el(CompareLink, { finding, run, lastStep: overview.data?.run.step ?? 0 }),
          el(CopyButton, { text: () => report(finding, run), label: 'Copy report', what: 'as text' }),
          el(Acknowledge, { finding, run, changed: answer.refresh }),
          el(Share, { titleId: 'verdict' }),
        ),
      ),
    ),
    el(Lazy, {
      key: 'picture',
      load: () => import('../parts/findingpicture.js'),
      pick: 'PictureCard',
      props: { run, id, topic },
    }),
    finding.kind === 'hang' ? el(Stacks, { finding, run }) : null,
    el(
      Card,
      { title: 'Facts' },
      t.dl(
        { class: 'facts wide' },
        fact('When', spanWords(finding, ended)),
        fact('Started', finding.onset_ms ? dateTime(finding.onset_ms) : '–'),
        fact('Ranks', finding.ranks.length > 0 ? ranges(finding.ranks) : 'none named'),
        fact('Hosts', finding.hosts.join(', ') || '–'),
        fact('Group', finding.group ?? '–'),
        fact('Attempt', count(finding.attempt)),
        fact('Cost', costWords(finding, ended) || 'not known'),
        fact('Confidence', sureWords(finding.confidence)),
        fact('Detector', finding.detector),
        fact('Policy', finding.policy_hash || '–'),
      ),
    ),
    el(
      Card,
      { title: 'History' },
      t.ol(
        { class: 'history' },
        finding.history.map((one, i) =>
          t.li(
            { key: i },
            t.span({ class: 'faint nowrap' }, el(When, { ms: one.time_ms, ended })),
            t.b(null, words(one.event)),
            t.span(null, one.text),
          ),
        ),
      ),
    ),
  );
}

/** To what there was before: an earlier run, or the steps before it began.
 * @param {{finding: FindingDetail, run: string, lastStep: number}} props */
function CompareLink({ finding, run, lastStep }) {
  const onset = finding.onset_step ?? 0;
  const last = finding.ended_step ?? lastStep;
  if (finding.kind === 'regression')
    return t.a({ class: 'button', href: withQuery('compare', { b: run }) }, 'Compare with the run before');
  if (onset < 2 || last < onset) return null;
  const side = { a: run, b: run, a_attempt: finding.attempt, b_attempt: finding.attempt };
  const steps = { a_steps: `1-${onset - 1}`, b_steps: `${onset}-${last}` };
  return t.a({ class: 'button', href: withQuery('compare', { ...side, ...steps }) }, 'Compare before and since');
}

/** What the ranks it names did at the time, as Python saw it. @param {{finding: FindingDetail, run: string}} props */
function Stacks({ finding, run }) {
  /** @type {Map<string, FindingDetail['stacks']>} */
  const alike = new Map();
  for (const one of finding.stacks) {
    const key = `${one.rank} ${one.text}`;
    alike.set(key, [...(alike.get(key) ?? []), one]);
  }
  return el(
    Card,
    {
      title: 'Stacks of the ranks it names',
      note: finding.commands.some((one) => one.is_open) ? 'asked for, on their way' : 'innermost frame first',
      tools: t.a({ href: withQuery(runPath(run, 'agent'), { for: finding.ranks.join(',') }) }, 'Take more'),
    },
    finding.stacks.length === 0
      ? t.p({ class: 'note padded' }, finding.commands.length > 0 ? 'None has arrived yet.' : 'None was taken.')
      : [...alike.values()].map(([one, ...more]) =>
          t.div(
            { class: 'stackof', key: `${one.rank} ${one.time_ms}` },
            t.p(
              { class: 'note' },
              t.a({ href: runPath(run, 'ranks', String(one.rank)) }, `Rank ${one.rank}`),
              `, ${one.reason || 'taken'}, ${dateTime(one.time_ms)}`,
              more.length > 0 ? `; the same ${count(more.length + 1)} times` : '',
            ),
            t.pre({ class: 'trace', tabIndex: 0 }, one.text),
          ),
        ),
    el(CappedNote, { capped: finding.stacks_capped, noun: 'stacks' }),
  );
}

/** What a share of certainty means. @param {number | null} confidence */
function sureWords(confidence) {
  if (confidence === null) return 'not stated';
  const share = Math.round(confidence * 100);
  if (confidence >= 0.85) return `${share} %: high, a second signal agrees`;
  return confidence >= 0.6 ? `${share} %: medium, one signal says so` : `${share} %: low, a hint`;
}

/** @param {string} name @param {string} value */
function fact(name, value) {
  return t.div({ key: name }, t.dt(null, name), t.dd(null, value));
}
