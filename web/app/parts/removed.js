/** What a page cannot show because retention removed it: an empty table would look healthy. */

import { el, t } from '../tags.js';
import { Icon } from './bits.js';

/** @typedef {import('../../types/api.js').Overview} Overview */

/** The kinds of data that a page shows. @type {Record<string, string[]>} */
const SHOWN = {
  overview: ['collectives', 'steps', 'samples', 'logs', 'events'],
  ranks: ['steps', 'events'],
  rank: ['collectives', 'events'],
  collectives: ['collectives'],
  logs: ['logs'],
  errors: ['logs'],
  machines: ['samples', 'events'],
  agent: ['events'],
};

/** @param {{page: string, overview: Overview | null}} props */
export function Removed({ page, overview }) {
  const rows = (overview?.removed ?? []).filter((row) => SHOWN[page]?.includes(row.kind));
  if (rows.length === 0) return null;
  return t.p(
    { class: 'note removed', role: 'note' },
    el(Icon, { name: 'info' }),
    ' ',
    rows.map((row) => row.text).join(' '),
  );
}
