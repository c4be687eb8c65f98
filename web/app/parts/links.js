/** Nodes by nodes: what messages of the run and its preflight say of each way. Hatched: not measured. */

import { bytes, figure, plural, sentence } from '../format.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { CappedNote, Card } from './bits.js';
import { speed } from './kinds.js';

/** @typedef {import('../../types/api.js').Links} Links */
/** @typedef {import('../../types/api.js').LinkCell} Cell */

/** Of the fastest way; below each the next look. */
const BOUNDS = [0.8, 0.5, 0.25, 0.1];

/** @param {{links: Links}} props */
export function LinksCard({ links }) {
  const asked = query.value.links;
  const source =
    asked === 'preflight' || asked === 'messages' ? asked : links.num_messages > 0 ? 'messages' : 'preflight';
  if (links.num_messages + links.num_preflight === 0)
    // its sentence says why; all hatched says no more
    return el(Card, { title: 'Links between nodes', note: sentence(links.text) });
  const cells = source === 'messages' ? links.messages : links.preflight;
  const fastest = Math.max(0, ...cells.flat().map((cell) => cell.bytes_per_second ?? 0));
  return el(
    Card,
    {
      title: 'Links between nodes',
      note: sentence(links.text),
      tools: [
        sourceButton('messages', `Messages of the run: ${plural(links.num_messages, 'way')}`, source),
        sourceButton('preflight', `Its preflight: ${plural(links.num_preflight, 'way')}`, source),
      ],
    },
    t.div(
      { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Links between nodes' },
      t.table(
        { class: 'linkmatrix' },
        t.thead(
          null,
          t.tr(
            null,
            t.th({ scope: 'col' }, 'From, to'),
            links.nodes.map((node) => t.th({ key: node, scope: 'col', title: node }, node)),
          ),
        ),
        t.tbody(
          null,
          links.nodes.map((node, row) =>
            t.tr(
              { key: node },
              t.th({ scope: 'row', title: node }, node),
              links.nodes.map((other, column) => linkCell(cells[row][column], node, other, fastest, source)),
            ),
          ),
        ),
      ),
    ),
    t.p(
      { class: 'linklegend note padded' },
      t.span(null, t.span({ class: 'hatchmark', 'aria-hidden': 'true' }), ' not measured'),
      BOUNDS.map((bound, at) =>
        t.span(
          { key: bound },
          t.span({ class: `swatch l-${at + 1}`, 'aria-hidden': 'true' }),
          ` below ${figure(bound * 100)} % of the fastest`,
        ),
      ),
      source === 'messages'
        ? t.span(
            null,
            '≥: from the send to the end of the receive, in which waiting may be a part; the best twentieth of the largest messages',
          )
        : null,
    ),
    el(CappedNote, { capped: links.capped, noun: 'nodes, those at the slowest links' }),
  );
}

/** @param {string} name @param {string} text @param {string} source */
function sourceButton(name, text, source) {
  return t.button(
    {
      key: name,
      type: 'button',
      class: 'button small',
      'aria-pressed': source === name,
      onClick: () => setQuery({ links: name }),
    },
    text,
  );
}

/** @param {Cell} cell @param {string} from @param {string} to @param {number} fastest @param {string} source */
function linkCell(cell, from, to, fastest, source) {
  // A preflight measures from node to node: there is nothing to measure within one.
  if (from === to && source === 'preflight') return t.td({ key: to }, t.span({ class: 'sr' }, 'the same node'));
  const way = from === to ? `within ${from}` : `${from} to ${to}`;
  if (cell.bytes_per_second === null)
    return t.td(
      { key: to, class: 'unmeasured', title: `${way}: not measured` },
      t.span({ class: 'sr' }, 'not measured'),
    );
  const what =
    cell.source === 'messages'
      ? `${plural(cell.count, 'message')} of about ${bytes(cell.size_bytes)}`
      : 'measured by the preflight';
  return t.td(
    {
      key: to,
      class: `l-${linkLevel(cell.bytes_per_second / fastest)}`,
      title: `${way}: ${cell.is_at_least ? 'at least ' : ''}${speed(cell.bytes_per_second)}, ${what}`,
    },
    `${cell.is_at_least ? '≥ ' : ''}${speed(cell.bytes_per_second)}`,
  );
}

/** How far a way is below the fastest one, 0 for not much. Pure. @param {number} share */
export function linkLevel(share) {
  return BOUNDS.filter((bound) => share < bound).length;
}
