/** The verdict card and the table of findings: who, what, since when, what it costs, what to do. */

import { useState } from 'preact/hooks';
import { ask } from '../api.js';
import { count, percent, sentence, stopwatch, timeOfDay, words } from '../format.js';
import { announce, now } from '../page.js';
import { query } from '../router.js';
import { el, t } from '../tags.js';
import { carried, runPath, withQuery } from '../url.js';
import { Ago, Command, CopyButton, Icon, Severity } from './bits.js';

/** @typedef {import('../../types/api.js').Finding} Finding */
/** @typedef {import('../../types/api.js').Verdict} Verdict */
/** @typedef {import('../../types/api.js').Answer} Answer */
/** @typedef {import('../../types/api.js').Coverage} Coverage */

const ANSWER_MARK = { culprit: 'critical', healthy: 'ok', waiting: 'info', unknown: 'unknown' };

/** The first sentence where no verdict stands. @param {{answer: Answer, coverage: Coverage, run: string, ended: boolean}} props */
export function AnswerCard({ answer, coverage, run }) {
  return t.section(
    { class: `verdict card is-${answer.state}` },
    t.div(
      { class: 'verdicthead' },
      t.div(
        { class: 'verdictsay' },
        t.p(
          { class: 'kicker' },
          el(Icon, { name: ANSWER_MARK[answer.state] }),
          answer.state === 'healthy'
            ? 'Nothing found'
            : answer.state === 'waiting'
              ? 'Not enough evidence yet'
              : 'No verdict',
        ),
        t.h1({ id: 'verdict' }, answer.text),
        answer.detail ? t.p({ class: 'why' }, answer.detail) : null,
      ),
    ),
    el(CoverageLine, { coverage, run }),
  );
}

/** Who reports, and what was lost on the way. @param {{coverage: Coverage, run: string}} props */
export function CoverageLine({ coverage, run }) {
  const { silent, losses, refused } = coverage;
  const partial = silent.length > 0 || losses.length > 0 || refused > 0 || coverage.missing_batches > 0;
  return t.div(
    { class: `coverage ${partial ? 'partial' : ''}` },
    t.span({ class: 'hatchmark', 'aria-hidden': 'true' }),
    t.span(null, coverage.text),
    silent.length > 0
      ? t.a(
          { href: runPath(run, 'ranks', ...(silent.length === 1 ? [String(silent[0].rank)] : [])) },
          silent.length === 1 ? `Open rank ${silent[0].rank}` : 'Open the ranks',
        )
      : null,
    losses.length > 0
      ? t.details(
          { class: 'losses' },
          t.summary(null, `${count(losses.reduce((sum, loss) => sum + loss.count, 0))} records lost, with reasons`),
          t.ul(
            null,
            losses.map((loss) =>
              t.li(
                { key: `${loss.host}${loss.rank}${loss.source}${loss.reason}` },
                `${loss.rank >= 0 ? `Rank ${loss.rank}` : loss.host}: ${count(loss.count)} of ${loss.source}, ${loss.reason}`,
              ),
            ),
          ),
        )
      : null,
  );
}

/** The verdict: the answer in one sentence, then why, what was ruled out, what to do.
 * @param {{verdict: Verdict, coverage: Coverage, run: string, ended: boolean, changed: () => void}} props */
export function VerdictCard({ verdict, coverage, run, ended, changed }) {
  const folded = verdict.state === 'acknowledged';
  const [open, setOpen] = useState(false);
  const full = !folded || open;
  const cost = verdict.cost_throughput_ratio;
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
        t.h1({ id: 'verdict' }, verdict.what),
        t.p({ class: 'why' }, sentence(verdict.why)),
      ),
      stuckSince !== null
        ? el(StuckFor, { since: stuckSince, step: verdict.onset_step })
        : cost === null
          ? null
          : t.div(
              { class: 'verdictcost' },
              t.p({ class: 'big' }, percent(cost)),
              t.p(null, 'of throughput lost'),
              verdict.cost_rank_hours_per_day
                ? t.p({ class: 'faint' }, `${count(verdict.cost_rank_hours_per_day)} rank-hours a day`)
                : null,
              verdict.onset_step
                ? t.p({ class: 'faint', title: timeOfDay(verdict.onset_ms) }, `since step ${count(verdict.onset_step)}`)
                : null,
            ),
    ),
    full ? el(Reasons, { finding: verdict, run }) : null,
    t.div(
      { class: 'verdictfoot' },
      t.div(
        { class: 'also' },
        verdict.folded.length > 0
          ? t.p(
              null,
              'Also found: ',
              verdict.folded.map((one, i) => [
                i ? ', ' : '',
                one.id === null
                  ? one.what
                  : t.a({ key: one.id, href: runPath(run, 'findings', String(one.id)) }, one.what),
              ]),
            )
          : null,
        el(CoverageLine, { coverage, run }),
      ),
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
        el(CopyButton, { text: () => report(verdict, run), label: 'Copy report', what: 'as text' }),
        el(Acknowledge, { finding: verdict, run, changed }),
      ),
    ),
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

/** One fact, with the way to its view; a traceback folds to its last line. @param {{one: Finding['evidence'][0]}} props */
function EvidenceText({ one }) {
  const lines = one.text.trimEnd().split('\n');
  // The last line of a traceback says what failed; the first of stacks says where it stands.
  const short = one.text.includes('Traceback') ? lines[lines.length - 1] : lines[0];
  const line = one.link ? t.a({ href: one.link }, short) : short;
  return lines.length === 1
    ? line
    : t.div(
        null,
        line,
        t.details(null, t.summary(null, `${lines.length} lines`), t.pre({ class: 'trace', tabIndex: 0 }, one.text)),
      );
}

/** @param {{finding: Finding, run: string, hidden: number}} props */
function More({ finding, run, hidden }) {
  return hidden > 0
    ? t.p({ class: 'note' }, t.a({ href: runPath(run, 'findings', String(finding.id)) }, `${hidden} more`))
    : null;
}

const SHOWN = 4;

/** Why, what was ruled out, what to do. @param {{finding: Finding, run: string, all?: boolean}} props */
export function Reasons({ finding, run, all = false }) {
  const most = all ? Number.MAX_SAFE_INTEGER : SHOWN;
  return t.div(
    { class: 'reasons' },
    finding.evidence.length > 0
      ? t.div(
          null,
          t.h2(null, 'Why we think so'),
          t.ol(
            { class: 'evidence' },
            finding.evidence.slice(0, most).map((one, i) => t.li({ key: i }, el(EvidenceText, { one }))),
          ),
          el(More, { finding, run, hidden: finding.evidence.length - most }),
        )
      : null,
    finding.ruled_out.length > 0
      ? t.div(
          null,
          t.h2(null, 'Ruled out'),
          t.ul(
            { class: 'ruledout' },
            finding.ruled_out
              .slice(0, most)
              .map((text, i) => t.li({ key: i }, el(Icon, { name: 'ok' }), t.span(null, upperFirst(text)))),
          ),
          el(More, { finding, run, hidden: finding.ruled_out.length - most }),
        )
      : null,
    t.div(
      null,
      t.h2(null, 'What to do'),
      finding.next ? t.p(null, sentence(finding.next)) : null,
      finding.next_command ? el(Command, { text: finding.next_command }) : null,
      finding.would_be_wrong_if
        ? t.p({ class: 'wrongif' }, t.b(null, 'Wrong if '), sentenceEnd(lowerFirst(finding.would_be_wrong_if)))
        : null,
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
    ...finding.evidence.map((one) => `- ${one.text}`),
    ...finding.ruled_out.map((text) => `- ruled out: ${text}`),
    finding.next ? `Next: ${finding.next}` : '',
    finding.next_command ? `  ${finding.next_command}` : '',
    location.href,
  ]
    .filter(Boolean)
    .join('\n');
}

/** @param {string} kind */
export function kindWords(kind) {
  /** @type {Record<string, string>} */
  const known = {
    slow_compute: 'Straggler: slow compute',
    slow_data: 'Straggler: slow data',
    garbage_collection: 'Straggler: garbage collection',
    host_contention: 'Straggler: other work on its processors',
    thermal_or_power: 'Straggler: GPU held down by heat or power',
    page_cache: 'Straggler: data not in memory',
    sequence_imbalance: 'More tokens than its peers',
    slow_communication: 'Slow communication',
    slow_link: 'Slow link, adapter, host or switch',
    hang: 'Hang',
    crash: 'Crash',
    nan: 'NaN or infinity',
    xid: 'Xid error',
    ecc: 'Memory errors of a GPU',
    gpu_underuse: 'GPUs with little to do',
  };
  return known[kind] ?? words(kind);
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

/** When a finding holds, in steps. @param {Finding} finding */
export function spanWords(finding) {
  if (!finding.onset_step) return finding.onset_ms ? timeOfDay(finding.onset_ms) : '';
  const since = `step ${count(finding.onset_step)}`;
  if (finding.ended_step) return `steps ${count(finding.onset_step)}–${count(finding.ended_step)}`;
  return finding.state === 'recovered' ? `from ${since}` : `${since} – now`;
}

/** Findings as rows, victims folded under their culprit. @param {{findings: Finding[], run: string}} props */
export function FindingsTable({ findings, run }) {
  const culprits = findings.filter(
    (one) => one.explained_by === null || !findings.some((other) => other.id === one.explained_by),
  );
  const victims = (/** @type {Finding} */ culprit) =>
    findings.filter((one) => one.explained_by === culprit.id && one !== culprit);
  return t.div(
    { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Findings' },
    t.table(
      { class: 'table' },
      t.thead(
        null,
        t.tr(
          null,
          t.th({ class: 'w-sev' }, 'Severity'),
          t.th(null, 'Finding'),
          t.th({ class: 'w-when' }, 'When'),
          t.th({ class: 'w-state' }, 'State'),
          t.th({ class: 'num w-state' }, 'Throughput lost'),
          t.th({ class: 'num w-state' }, 'Updated'),
        ),
      ),
      t.tbody(
        null,
        culprits.flatMap((one) => [
          el(FindingRow, { key: one.id, finding: one, run, victim: false }),
          ...victims(one).map((victim) => el(FindingRow, { key: victim.id, finding: victim, run, victim: true })),
        ]),
      ),
    ),
  );
}

/** @param {{finding: Finding, run: string, victim: boolean}} props */
function FindingRow({ finding, run, victim }) {
  return t.tr(
    { class: victim ? 'victim' : '' },
    t.td(null, el(Severity, { severity: finding.severity })),
    t.td(
      { class: 'wide' },
      victim ? t.span({ class: 'faint' }, 'because of it: ') : null,
      t.a({ href: runPath(run, 'findings', String(finding.id)) }, finding.what),
    ),
    t.td({ class: 'nowrap' }, spanWords(finding)),
    t.td(null, words(finding.state)),
    t.td(
      { class: 'num' },
      finding.cost_throughput_ratio === null
        ? t.span({ class: 'faint' }, 'not known')
        : percent(finding.cost_throughput_ratio),
    ),
    t.td({ class: 'num nowrap' }, el(Ago, { ms: finding.updated_ms })),
  );
}

/** The document's title for a verdict. @param {Verdict | null} verdict @param {Answer} answer */
export function shortAnswer(verdict, answer) {
  const text = verdict ? verdict.what : answer.text;
  return text.length > 70 ? `${text.slice(0, 68)}…` : text;
}

/** A clock that counts while nothing moves. @param {{since: number, step: number | null}} props */
function StuckFor({ since, step }) {
  return t.div(
    { class: 'verdictcost' },
    t.p({ class: 'big' }, stopwatch(now.value - since)),
    t.p(null, now.value - since < 3_600_000 ? 'minutes stuck' : 'hours stuck'),
    t.p({ class: 'faint' }, `since ${timeOfDay(since)}${step ? `, step ${count(step)}` : ''}`),
  );
}
