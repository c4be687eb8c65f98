/** The verdict card and the table of findings: who, what, since when, what it costs, what to do. */

import { useState } from 'preact/hooks';
import { ask } from '../api.js';
import { costWords, count, kindWords, percent, sentence, sinceSilent, stopwatch, timeOfDay, words } from '../format.js';
import { announce, now } from '../page.js';
import { query } from '../router.js';
import { el, t } from '../tags.js';
import { carried, runPath, withQuery } from '../url.js';
import { CappedNote, Command, CopyButton, Icon, OnsetStep, Severity, Share, Table, When } from './bits.js';

/** @typedef {import('../../types/api.js').ShownFinding} Finding */
/** @typedef {import('../../types/api.js').ShownVerdict} Verdict */
/** @typedef {import('../../types/api.js').ShownAnswer} Answer */
/** @typedef {import('../../types/api.js').Coverage} Coverage */
/** @typedef {import('../../types/api.js').RunSummary} RunSummary */

/** Kinds of findings whose ranks wait for each other: the page of hangs shows them. */
export const WAITS = new Set(['hang', 'desync']);

const ANSWER_MARK = { culprit: 'critical', advice: 'info', healthy: 'ok', waiting: 'info', unknown: 'unknown' };
const KICKERS = {
  culprit: 'Culprit found',
  advice: 'No fault, advice',
  healthy: 'Nothing found',
  waiting: 'Not enough evidence yet',
  unknown: 'No verdict',
};

/** The first sentence where there is no verdict. @param {{answer: Answer, coverage: Coverage, run: string, ended: boolean}} props */
export function AnswerCard({ answer, coverage, run }) {
  return t.section(
    { class: `verdict card is-${answer.state}` },
    t.div(
      { class: 'verdicthead' },
      t.div(
        { class: 'verdictsay' },
        t.p({ class: 'kicker' }, el(Icon, { name: ANSWER_MARK[answer.state] }), KICKERS[answer.state]),
        t.h1({ id: 'verdict' }, answer.text),
        answer.detail ? t.p({ class: 'why' }, answer.detail) : null,
        el(Deciding, {
          measurements: answer.deciding,
          title: answer.state === 'advice' ? 'What to change' : undefined,
        }),
      ),
      t.div({ class: 'tools' }, el(Share, { titleId: 'verdict' })),
    ),
    el(CoverageLine, { coverage, run }),
  );
}

/** Who reports, and what was lost on the way. @param {{coverage: Coverage, run: string}} props */
export function CoverageLine({ coverage, run }) {
  const { silent, losses, refused, notes } = coverage;
  const partial =
    silent.length > 0 || losses.length > 0 || refused > 0 || notes.length > 0 || coverage.missing_batches > 0;
  return t.div(
    { class: `coverage ${partial ? 'partial' : ''}` },
    t.span({ class: 'hatchmark', 'aria-hidden': 'true' }),
    t.span(null, coverage.text),
    notes.map((note) => t.span({ key: note }, note)),
    silent.length > 0
      ? t.a(
          { href: runPath(run, 'ranks', ...(silent.length === 1 ? [String(silent[0].rank)] : [])) },
          silent.length === 1 ? `Open rank ${silent[0].rank}` : 'Open the ranks',
        )
      : null,
    losses.length > 0
      ? t.details(
          { class: 'losses' },
          t.summary(null, `${count(coverage.lost)} records lost, with reasons`),
          t.ul(
            null,
            losses.map((loss) =>
              t.li(
                { key: `${loss.host}${loss.rank}${loss.source}${loss.reason}` },
                `${loss.rank >= 0 ? `Rank ${loss.rank}` : loss.host}: ${count(loss.count)} of ${loss.source}, ${loss.reason}`,
              ),
            ),
          ),
          el(CappedNote, { capped: coverage.losses_capped, noun: 'reasons' }),
        )
      : null,
  );
}

/** The verdict: the answer in one sentence, then why, what was ruled out, what to do.
 * @param {{verdict: Verdict, coverage: Coverage, summary: RunSummary, run: string, ended: boolean, changed: () => void}} props */
export function VerdictCard({ verdict, coverage, summary, run, ended, changed }) {
  const folded = verdict.state === 'acknowledged';
  const [open, setOpen] = useState(false);
  const full = !folded || open;
  const cost = verdict.cost_throughput_ratio;
  const silent = silentSince(summary);
  const stuckSince = verdict.kind === 'hang' && !ended && verdict.state !== 'recovered' ? verdict.onset_ms : null;
  return t.section(
    { class: `verdict card is-${verdict.severity} ${folded ? 'acknowledged' : ''}` },
    t.div(
      { class: 'verdicthead' },
      t.div(
        { class: 'verdictsay' },
        t.p(
          { class: 'kicker' },
          el(Severity, { severity: verdict.severity, text: kindWords(verdict.kind) }),
          el(Confidence, { finding: verdict, run }),
          folded ? t.span({ class: 'pill' }, 'acknowledged') : null,
        ),
        t.h1({ id: 'verdict' }, sinceSilent(summary, verdict.what)),
        t.p({ class: 'why' }, sentence(verdict.why)),
      ),
      stuckSince !== null
        ? el(StuckFor, { since: stuckSince, until: silent, step: verdict.onset_step })
        : cost === null
          ? null
          : t.div(
              { class: 'verdictcost' },
              t.p({ class: 'big' }, percent(cost)),
              t.p(null, 'of throughput lost'),
              t.p({ class: 'faint' }, costWords(verdict, ended)),
              verdict.onset_step
                ? t.p({ class: 'faint', title: timeOfDay(verdict.onset_ms) }, `since step ${count(verdict.onset_step)}`)
                : null,
            ),
    ),
    full ? el(Reasons, { finding: verdict, asOf: silent, deciding: verdict.deciding }) : null,
    t.div(
      { class: 'verdictfoot' },
      t.div({ class: 'also' }, el(Explains, { folded: verdict.folded, run }), el(CoverageLine, { coverage, run })),
      t.div(
        { class: 'buttons' },
        folded
          ? t.button(
              { type: 'button', class: 'button', onClick: () => setOpen(!open) },
              open ? 'Show less' : 'Show all',
            )
          : null,
        verdict.ranks.length > 0
          ? t.a(
              {
                class: folded ? 'button' : 'button primary',
                href: withQuery(runPath(run, 'ranks', String(verdict.ranks[0])), carried(query.value)),
              },
              `Open rank ${verdict.ranks[0]}`,
            )
          : null,
        WAITS.has(verdict.kind)
          ? t.a({ class: 'button', href: withQuery(runPath(run, 'hang'), carried(query.value)) }, 'Who waits for whom')
          : null,
        el(OnsetStep, { finding: verdict, run }),
        el(CopyButton, { text: () => report(verdict, run), label: 'Copy report', what: 'as text' }),
        el(Acknowledge, { finding: verdict, run, changed }),
        el(Share, { titleId: 'verdict' }),
      ),
    ),
  );
}

/** When the last record came of ranks that are all silent. @param {RunSummary} [run] */
export function silentSince(run) {
  return run?.status === 'silent' ? run.last_seen_ms : null;
}

/** What a finding explains, grouped under it. @param {{folded: {id: number | null, what: string}[], run: string}} props */
export function Explains({ folded, run }) {
  if (folded.length === 0) return null;
  return t.p(
    null,
    t.b(null, 'It explains '),
    folded.map((one, i) => [
      i ? '; ' : '',
      one.id === null ? one.what : t.a({ key: one.id, href: runPath(run, 'findings', String(one.id)) }, one.what),
    ]),
  );
}

/** Which measurements would settle it. @param {{measurements: string[], title?: string}} props */
function Deciding({ measurements, title = 'What would decide' }) {
  if (measurements.length === 0) return null;
  return t.div(
    { class: 'deciding' },
    t.b(null, title),
    t.ul(
      null,
      measurements.map((text) => t.li({ key: text }, sentence(text))),
    ),
  );
}

/** How sure, in words. @param {{finding: Finding}} props */
function Sure({ finding }) {
  if (finding.confidence === null) return null;
  const [, word, why] = /^(high|medium|low): (.*)$/s.exec(finding.confidence_text) ?? ['', '', finding.confidence_text];
  return t.p(
    { class: 'sure' },
    t.b(null, `${Math.round(finding.confidence * 100)} % sure${word ? `, ${word}` : ''}: `),
    sentenceEnd(why),
  );
}

/** How sure, and where to read why. @param {{finding: Finding, run: string}} props */
export function Confidence({ finding, run }) {
  if (finding.confidence === null) return null;
  return t.a(
    {
      class: 'confidence',
      href: runPath(run, 'findings', String(finding.id)),
      title: finding.confidence_text || 'How sure the detector is',
    },
    `${Math.round(finding.confidence * 100)} % sure`,
  );
}

const MOST = 150; // characters of a fact, so that four of them leave room on the screen

/** One fact, with the way to its view; a traceback folds to its last line. @param {{one: Finding['evidence'][0]}} props */
function EvidenceText({ one }) {
  const lines = one.text.trimEnd().split('\n');
  // The last line of a traceback says what failed; the first of stacks says where the thread is.
  const short = one.text.includes('Traceback') ? lines[lines.length - 1] : lines[0];
  const cut = short.length > MOST ? `${short.slice(0, MOST - 1)}…` : short;
  const line = one.link ? t.a({ href: one.link }, cut) : cut;
  if (lines.length === 1 && cut === short) return line;
  const rest = lines.length > 1 ? `${lines.length} lines` : 'The whole text';
  return t.div(null, line, t.details(null, t.summary(null, rest), t.pre({ class: 'trace', tabIndex: 0 }, one.text)));
}

/** The rest of a list, behind a press. @param {{rest: import('preact').VNode[], kind: 'ol' | 'ul', look: string}} props */
function More({ rest, kind, look }) {
  if (rest.length === 0) return null;
  return t.details({ class: 'more' }, t.summary(null, `${rest.length} more`), t[kind]({ class: look }, rest));
}

const SHOWN = 4;

/** Why, what was ruled out, what to do, how sure. `asOf` is the last record of ranks that are all silent.
 * @param {{finding: Finding, asOf?: number | null, deciding?: string[]}} props */
export function Reasons({ finding, asOf = null, deciding = [] }) {
  const evidence = finding.evidence.map((one, i) => t.li({ key: i }, el(EvidenceText, { one })));
  const ruledOut = finding.ruled_out.map((text, i) =>
    t.li({ key: i }, el(Icon, { name: 'ok' }), t.span(null, upperFirst(text))),
  );
  return t.div(
    { class: 'reasons' },
    evidence.length > 0
      ? t.div(
          null,
          t.h2(null, 'Why we think so'),
          t.ol({ class: 'evidence' }, evidence.slice(0, SHOWN)),
          el(More, { rest: evidence.slice(SHOWN), kind: 'ol', look: 'evidence' }),
        )
      : null,
    ruledOut.length > 0
      ? t.div(
          null,
          t.h2(null, asOf === null ? 'Ruled out' : `Ruled out, as of ${timeOfDay(asOf)}`),
          t.ul({ class: 'ruledout' }, ruledOut.slice(0, SHOWN)),
          el(More, { rest: ruledOut.slice(SHOWN), kind: 'ul', look: 'ruledout' }),
        )
      : null,
    t.div(
      { class: 'todo' },
      t.h2(null, 'What to do'),
      finding.next ? t.p(null, sentence(finding.next)) : null,
      finding.next_command ? el(Command, { text: finding.next_command }) : null,
      el(Sure, { finding }),
      finding.would_be_wrong_if
        ? t.p({ class: 'wrongif' }, t.b(null, 'Disproved if '), sentenceEnd(lowerFirst(finding.would_be_wrong_if)))
        : null,
      el(Deciding, { measurements: deciding }),
    ),
  );
}

/** @param {{finding: Finding, run: string, changed: () => void}} props */
export function Acknowledge({ finding, run, changed }) {
  const [note, setNote] = useState('');
  if (finding.state !== 'open') return null;
  async function send() {
    try {
      await ask(runPath(run, 'findings', String(finding.id), 'acknowledge'), { method: 'POST' });
      announce('Acknowledged');
      changed();
    } catch (problem) {
      setNote(String(problem instanceof Error ? problem.message : problem));
    }
  }
  return t.span(
    null,
    t.button(
      { type: 'button', class: 'button', onClick: send, title: 'Seen: it folds to two lines and stays listed' },
      'Acknowledge',
    ),
    note ? t.span({ class: 'note bad', role: 'status' }, ` ${note}`) : null,
  );
}

/** A finding as text to paste. @param {Finding} finding @param {string} run */
export function report(finding, run) {
  return [
    `${finding.what} (${finding.severity}, run ${run})`,
    finding.why,
    finding.cost_throughput_ratio === null ? '' : `Costs ${percent(finding.cost_throughput_ratio)} of throughput`,
    ...finding.evidence.map((one) => `- ${one.text}`),
    ...finding.ruled_out.map((text) => `- ruled out: ${text}`),
    finding.next ? `Next: ${finding.next}` : '',
    finding.next_command ? `  ${finding.next_command}` : '',
    finding.confidence === null ? '' : `${Math.round(finding.confidence * 100)} % sure, ${finding.confidence_text}`,
    finding.would_be_wrong_if ? `Disproved if: ${finding.would_be_wrong_if}` : '',
    location.href,
  ]
    .filter(Boolean)
    .join('\n');
}

/** @param {string} text */
function sentenceEnd(text) {
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

/** @param {string} text */
function upperFirst(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** @param {string} text */
function lowerFirst(text) {
  return /^[A-Z][a-z]/.test(text) ? text.charAt(0).toLowerCase() + text.slice(1) : text;
}

/** When a finding holds, in steps. @param {Finding} finding @param {boolean} ended the run */
export function spanWords(finding, ended) {
  if (!finding.onset_step) return timeOfDay(finding.onset_ms);
  const since = `step ${count(finding.onset_step)}`;
  if (finding.ended_step) return `steps ${count(finding.onset_step)}–${count(finding.ended_step)}`;
  return finding.state === 'recovered' ? `from ${since}` : `${since} – ${ended ? 'end' : 'now'}`;
}

/** Findings as rows, victims grouped under their culprit. @param {{findings: Finding[], run: string, ended: boolean}} props */
export function FindingsTable({ findings, run, ended }) {
  const culprits = findings.filter(
    (one) => one.explained_by === null || !findings.some((other) => other.id === one.explained_by),
  );
  const victims = (/** @type {Finding} */ culprit) =>
    findings.filter((one) => one.explained_by === culprit.id && one !== culprit);
  return Table({
    label: 'Findings',
    rows: culprits.flatMap((one) => [
      { finding: one, isVictim: false },
      ...victims(one).map((victim) => ({ finding: victim, isVictim: true })),
    ]),
    keyOf: ({ finding }) => finding.id,
    rowProps: ({ isVictim }) => ({ class: isVictim ? 'victim' : '' }),
    columns: [
      { label: 'Severity', class: 'w-sev', cell: ({ finding }) => el(Severity, { severity: finding.severity }) },
      {
        label: 'Finding',
        class: 'wide',
        cell: ({ finding, isVictim }) => [
          isVictim ? t.span({ class: 'faint' }, 'because of it: ') : null,
          t.a({ href: runPath(run, 'findings', String(finding.id)) }, finding.what),
        ],
      },
      { label: 'When', class: 'nowrap w-when', cell: ({ finding }) => spanWords(finding, ended) },
      {
        label: 'State',
        class: 'nowrap w-state',
        cell: ({ finding }) => (ended && finding.state === 'open' ? 'At the end' : words(finding.state)),
      },
      {
        label: 'Throughput lost',
        class: 'num w-state',
        cell: ({ finding: { cost_throughput_ratio: cost } }) =>
          cost === null ? t.span({ class: 'faint' }, 'not known') : percent(cost),
      },
      {
        label: 'Updated',
        class: 'num nowrap w-state',
        cell: ({ finding }) => el(When, { ms: finding.updated_ms, ended }),
      },
    ],
  });
}

/** The document's title for what was found. @param {import('../../types/api.js').Overview} overview */
export function shortAnswer({ run, verdict, answer }) {
  const text = verdict ? sinceSilent(run, verdict.what) : answer.text;
  return text.length > 70 ? `${text.slice(0, 68)}…` : text;
}

/** A stopwatch that runs while nothing moves, up to `until` where nothing is heard any more.
 * @param {{since: number, until: number | null, step: number | null}} props */
function StuckFor({ since, until, step }) {
  return t.div(
    { class: 'verdictcost' },
    t.p({ class: 'big' }, stopwatch((until ?? now.value) - since)),
    t.p(null, until === null ? 'stuck' : 'stuck, up to the last record'),
    t.p({ class: 'faint' }, `since ${timeOfDay(since)}${step ? `, step ${count(step)}` : ''}`),
  );
}
