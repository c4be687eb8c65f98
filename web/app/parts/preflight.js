/** What a preflight found: its states in words, findings with their repairs, checks by family. */

import { plural, sentence } from '../format.js';
import { el, t } from '../tags.js';
import { path, withQuery } from '../url.js';
import { Card, Command, CopyButton, Severity, Table } from './bits.js';

/** @typedef {import('../../types/api.js').PreflightView} View */
/** @typedef {import('../../types/api.js').PreflightFinding} Finding */
/** @typedef {import('../../types/api.js').PreflightCheck} Check */
/** @typedef {import('../../types/api.js').PreflightFix} Fix */

/** Mark, word and what several are: what was skipped or got no answer is never fine. @type {Record<string, [string, string, string]>} */
const STATES = {
  fail: ['critical', 'Fails', 'failed'],
  warn: ['warning', 'Warning', 'with a warning'],
  missing: ['unknown', 'Not reported', 'not reported'],
  unknown: ['unknown', 'No answer', 'without an answer'],
  skipped: ['unknown', 'Skipped', 'skipped'],
  part: ['unknown', 'In part', 'in part'],
  ok: ['ok', 'Passed', 'passed'],
};

/** @param {{status: string}} props */
export function State({ status }) {
  const [severity, text] = STATES[status] ?? ['unknown', status];
  return el(Severity, { severity, text });
}

/** The address of a preflight. @param {string} id @param {import('../url.js').Query} [query] */
export function preflightHref(id, query = {}) {
  return withQuery(path('preflight', id), query);
}

/** The address of the preflights of a node. @param {string} node */
export function nodeHref(node) {
  return withQuery('preflight', { node });
}

/** Whether a repair is what a person must do, and no command. @param {Fix} fix */
function isAdvice(fix) {
  return fix.command.startsWith('# ');
}

/** The commands that a node is to run, in the order of the findings. Pure.
 * @param {Finding[]} findings @param {string} node */
export function commandsOf(findings, node) {
  const fixes = findings.flatMap((one) => one.fix).filter((fix) => fix.node === '' || fix.node === node);
  return [...new Set(fixes.filter((fix) => !isAdvice(fix)).map((fix) => fix.command))];
}

/** @param {Fix} fix */
function whereWords(fix) {
  const right = { you: 'your own right', admin: 'an administrator’s right', provider: 'the provider’s right' };
  return `${fix.node ? `On ${fix.node}` : 'On each node'}, ${right[/** @type {'you'} */ (fix.owner)] ?? fix.owner}`;
}

/** @param {{findings: Finding[]}} props */
export function FindingsCard({ findings }) {
  if (findings.length === 0) return null;
  return el(
    Card,
    { title: 'Causes', note: 'one entry for each cause, worst first' },
    t.ol(
      { class: 'pflist' },
      findings.map((finding, at) => t.li({ key: `${finding.id} ${at}` }, el(OneFinding, { finding }))),
    ),
  );
}

/** @param {{finding: Finding}} props */
function OneFinding({ finding }) {
  return t.div(
    { class: 'pffinding' },
    t.h3(
      null,
      el(State, { status: finding.status }),
      t.span(null, finding.title),
      t.code({ class: 'faint' }, finding.id),
      t.span(
        {
          class: 'faint',
          title: finding.confidence === 'proven' ? 'both ends testify' : 'one of both ends is silent',
        },
        finding.confidence,
      ),
    ),
    finding.would ? t.p(null, t.b(null, 'If launched: '), sentence(finding.would)) : null,
    finding.told.length > 0
      ? t.ul(
          { class: 'plain note' },
          finding.told.map((line) => t.li({ key: line }, line)),
        )
      : null,
    finding.fix.map((fix, at) => el(Repair, { key: at, fix })),
    finding.explains.length > 0 ? t.p({ class: 'note' }, `This also explains: ${finding.explains.join('; ')}.`) : null,
    finding.wrong_if ? t.p({ class: 'note' }, `What would disprove it: ${finding.wrong_if}.`) : null,
  );
}

/** @param {{fix: Fix}} props */
function Repair({ fix }) {
  if (isAdvice(fix)) return t.p(null, t.b(null, `${whereWords(fix)}: `), sentence(fix.command.slice(2)));
  return t.div({ class: 'pffix' }, t.p({ class: 'note' }, whereWords(fix)), el(Command, { text: fix.command }));
}

/** All checks by family. @param {{checks: Check[], findings: Finding[]}} props */
export function ChecksCard({ checks, findings }) {
  const families = [...new Set(checks.map((check) => check.family))];
  return el(
    Card,
    { title: 'Checks by family', note: `${countWords(checks)}; skipped and unanswered ones are not passed` },
    families.map((family) => {
      const own = checks.filter((check) => check.family === family);
      return t.details(
        { key: family, class: 'pffamily', open: own[0].status === 'fail' || own[0].status === 'warn' },
        t.summary(
          null,
          el(State, { status: familyState(own) }),
          t.b(null, family),
          t.span({ class: 'faint' }, countWords(own)),
        ),
        el(CheckTable, { family, checks: own, findings }),
      );
    }),
  );
}

/** The worst of a family, whose checks come worst first; "part" where some passed and others did not run. Pure.
 * @param {Check[]} checks */
export function familyState(checks) {
  const passed = checks.some((check) => check.status === 'ok');
  return checks[0].status === 'skipped' && passed ? 'part' : checks[0].status;
}

/** "1 failed, 2 skipped, 9 passed". Pure. @param {Check[]} checks */
export function countWords(checks) {
  return Object.entries(STATES)
    .map(([status, [, , words]]) => ({ number: checks.filter((one) => one.status === status).length, words }))
    .filter(({ number }) => number > 0)
    .map(({ number, words }) => `${number} ${words}`)
    .join(', ');
}

/** @param {{family: string, checks: Check[], findings: Finding[]}} props */
function CheckTable({ family, checks, findings }) {
  return Table({
    label: `Checks: ${family}`,
    rows: checks,
    keyOf: (check) => check.id,
    rowProps: (check) => ({ 'data-status': check.status }),
    columns: [
      { label: 'State', class: 'nowrap w-sev', cell: (check) => el(State, { status: check.status }) },
      {
        label: 'Check',
        class: 'wide',
        cell: (check) => [t.code(null, check.id), ' ', t.span({ class: 'faint' }, check.what)],
      },
      { label: 'What it found', class: 'wide', cell: (check) => foundWords(check, findings) },
    ],
  });
}

/** @param {Check} check @param {Finding[]} findings */
function foundWords(check, findings) {
  const own = findings.filter((one) => one.id === check.id).map((one) => one.title);
  if (own.length > 0) return own.join('; ');
  if (check.reason) return check.reason;
  if (check.status === 'ok') return 'nothing to complain about';
  const cause = findings.find((one) => one.explains.some((line) => line.startsWith(`${check.id}:`)));
  return cause ? `explained by ${cause.id}` : 'no reason was given';
}

/** @param {string[]} repairs @param {string} node */
function repairOf(repairs, node) {
  if (repairs.length === 0) return t.span({ class: 'faint' }, 'no command');
  const label = `Copy ${plural(repairs.length, 'command')}`;
  return el(CopyButton, { text: repairs.join('\n'), label, what: `for ${node}`, class: 'link' });
}

/** @param {string} command @param {string} node */
function repeatOf(command, node) {
  if (!command) return t.span({ class: 'faint' }, 'a name is missing');
  const text = command.includes('--nodes') ? `${command} --node ${node}` : command;
  return el(CopyButton, { text, label: 'Copy command', what: `that repeats it on ${node}`, class: 'link' });
}

/** What each node is to run, ready to paste. @param {{view: View}} props */
export function NodesCard({ view }) {
  const { nodes, findings, command, capped } = view;
  return el(
    Card,
    {
      title: 'Nodes',
      note: [
        plural(capped?.total ?? nodes.length, 'node'),
        capped ? `the worst ${capped.shown} of them are shown` : '',
        view.coverage,
      ]
        .filter(Boolean)
        .join('; '),
    },
    Table({
      label: 'Nodes',
      rows: nodes,
      keyOf: (node) => node.node,
      columns: [
        { label: 'State', class: 'nowrap', cell: (node) => el(State, { status: node.status }) },
        {
          label: 'Node',
          class: 'nowrap',
          cell: (node) => [
            t.a({ href: nodeHref(node.node), title: 'its preflights' }, node.node),
            node.node_rank === null ? null : t.span({ class: 'faint' }, ` rank ${node.node_rank}`),
          ],
        },
        { label: 'Host', class: 'clip', title: (node) => node.host, cell: (node) => node.host || 'not reported' },
        {
          label: 'Address',
          class: 'clip',
          title: (node) => node.addresses.join(', '),
          cell: (node) => node.observed || node.addresses[0] || 'not reported',
        },
        {
          label: 'Named by',
          class: 'wide',
          cell: (node) => node.findings.join(', ') || (node.status === 'ok' ? 'nothing' : 'not known'),
        },
        { label: 'Repair it', class: 'nowrap', cell: (node) => repairOf(commandsOf(findings, node.node), node.node) },
        { label: 'Repeat the preflight', class: 'nowrap', cell: (node) => repeatOf(command, node.node) },
      ],
    }),
    command
      ? t.div(
          { class: 'padded' },
          t.p({ class: 'note' }, 'To repeat it, on each node:'),
          el(Command, { text: command }),
        )
      : null,
  );
}
