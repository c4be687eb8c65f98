/** Who is where in a hang or a crash: one column per node, one cell per rank. */

import { useApi } from '../api.js';
import { count, plural, words } from '../format.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { Card, Icon } from './bits.js';

/** @typedef {import('../../types/api.js').ShownVerdict} Verdict */
/** @typedef {import('../../types/api.js').Ranks} Ranks */
/** @typedef {import('../../types/api.js').RankRow} RankRow */
/** @typedef {'culprit' | 'victim' | 'failed' | 'silent' | 'ended' | 'other'} Role */

const MOST = 512; // focusable cells; more ranks are read in the table
/** @type {Record<Role, string>} */
const MARKS = { culprit: 'critical', victim: 'info', failed: 'cross', silent: '', ended: 'ok', other: '' };

/** What a role is called. @param {string} kind @returns {Record<Role, string>} */
function names(kind) {
  const crash = kind === 'crash';
  return {
    culprit: crash ? 'Failed first' : 'Never arrived',
    victim: crash ? 'Failed after it' : 'Waiting for it',
    failed: 'Failed',
    silent: 'Silent',
    ended: 'Ended',
    other: 'Elsewhere',
  };
}

/** @param {RankRow} rank @param {Verdict} verdict @returns {Role} */
export function roleOf(rank, verdict) {
  if (verdict.ranks.includes(rank.rank)) return 'culprit';
  if (verdict.victims.includes(rank.rank)) return 'victim';
  if (rank.state === 'failed' || rank.state === 'silent' || rank.state === 'ended') return rank.state;
  return 'other';
}

/** @param {{run: string, verdict: Verdict, topic: string | null}} props */
export function RankGrid({ run, verdict, topic }) {
  const answer = /** @type {import('../api.js').Answer<Ranks>} */ (
    useApi(runPath(run, 'ranks'), { topic, on: ['ranks'] })
  );
  const ranks = answer.data?.ranks ?? [];
  if (ranks.length === 0 || ranks.length > MOST) return null;
  const labels = names(verdict.kind);
  /** @type {Map<string, RankRow[]>} */
  const nodes = new Map();
  for (const rank of ranks) nodes.set(rank.host, [...(nodes.get(rank.host) ?? []), rank]);
  const roles = /** @type {Role[]} */ (Object.keys(labels))
    .map((role) => ({ role, ranks: ranks.filter((rank) => roleOf(rank, verdict) === role) }))
    .filter((one) => one.ranks.length > 0);
  return el(
    Card,
    {
      title: 'Who is where',
      api: runPath(run, 'ranks'),
      note: `${verdict.group ? `group ${verdict.group}, ` : ''}${plural(ranks.length, 'rank')}; one column per node`,
      tools: roles.map(({ role, ranks: members }) =>
        t.span(
          { key: role, class: 'gridkey' },
          t.span(
            { class: `gridcell is-${role}`, 'aria-hidden': 'true' },
            MARKS[role] ? el(Icon, { name: MARKS[role], size: 10 }) : null,
          ),
          labels[role],
          t.b(null, ` ${count(members.length)}`),
        ),
      ),
    },
    t.div(
      { class: 'rankgrid scroll', tabIndex: 0, role: 'region', 'aria-label': 'Ranks by node' },
      [...nodes].map(([host, members]) =>
        t.div(
          { key: host, class: 'gridnode' },
          members.map((rank) => {
            const role = roleOf(rank, verdict);
            const text = `Rank ${rank.rank} on ${host}: ${labels[role].toLowerCase()}, step ${count(rank.step)}${rank.phase ? `, ${words(rank.phase).toLowerCase()}` : ''}`;
            return t.a(
              {
                key: rank.rank,
                class: `gridcell is-${role}`,
                href: runPath(run, 'ranks', String(rank.rank)),
                title: text,
                'aria-label': text,
              },
              MARKS[role] ? el(Icon, { name: MARKS[role], size: 11 }) : null,
              t.span(null, String(rank.rank)),
            );
          }),
          t.span({ class: 'gridname', title: host }, host),
        ),
      ),
    ),
  );
}
