/** Nodes by nodes: what messages of the run and its preflight say of each way. Hatched: not measured. */

import { bytes, count, figure, plural, sentence, speed } from '../format.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { CappedNote, Card, Table } from './bits.js';
import { BOUNDS, linkLevel } from './levels.js';
import { MatrixLegend, NodeMatrix, sameNode, unmeasured } from './nodematrix.js';

/** @typedef {import('../../types/api.js').Links} Links */
/** @typedef {import('../../types/api.js').LinkCell} Cell */
/** @typedef {import('../../types/api.js').LinkNode} Node */

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
    el(NodeMatrix, {
      label: 'Links between nodes',
      nodes: links.nodes,
      cell: (row, column) => linkCell(cells[row][column], links.nodes[row], links.nodes[column], fastest, source),
    }),
    el(
      MatrixLegend,
      { levels: BOUNDS.map((bound) => `below ${figure(bound * 100)} % of the fastest`) },
      source === 'messages'
        ? t.span(
            null,
            '≥: from the send to the end of the receive, in which waiting may be a part; the best twentieth of the largest messages',
          )
        : null,
    ),
    el(CappedNote, { capped: links.capped, noun: 'nodes, those at the slowest links' }),
    links.capped
      ? el(ByNode, {
          rows: source === 'messages' ? links.messages_by_node : links.preflight_by_node,
          fastest,
          capped: links.by_node_capped ?? null,
        })
      : null,
  );
}

/** All nodes, as the matrix has no room for them. @param {{rows: Node[], fastest: number, capped: import('../../types/api.js').Capped | null}} props */
function ByNode({ rows, fastest, capped }) {
  return [
    t.h3({ key: 'h', class: 'padded' }, 'Every node, by its slowest way'),
    Table({
      key: 't',
      label: 'Every node, by its slowest way',
      frame: 'tallscroll',
      rows,
      keyOf: (one) => one.node,
      columns: [
        { label: 'Node', class: 'nowrap', cell: (one) => one.node },
        { label: 'Slowest way', class: 'nowrap', cell: (one) => `${one.start} to ${one.end}` },
        {
          label: 'Speed',
          class: 'num nowrap',
          by: (one) => -one.bytes_per_second,
          cell: (one) =>
            t.span(
              { class: `linkspeed l-${linkLevel(one.bytes_per_second / fastest)}` },
              `${one.is_at_least ? '≥ ' : ''}${speed(one.bytes_per_second)}`,
            ),
        },
        {
          label: 'Median of its ways',
          class: 'num nowrap',
          by: (one) => -one.median_bytes_per_second,
          cell: (one) => speed(one.median_bytes_per_second),
        },
        {
          label: 'Ways measured',
          class: 'num nowrap',
          by: (one) => -one.num_measured,
          cell: (one) => `${count(one.num_measured)} of ${count(one.num_ways)}`,
        },
      ],
    }),
    el(CappedNote, { key: 'c', capped, noun: 'nodes' }),
  ];
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
  if (from === to && source === 'preflight') return sameNode(to);
  const way = from === to ? `within ${from}` : `${from} to ${to}`;
  if (cell.bytes_per_second === null) return unmeasured(to, way);
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
