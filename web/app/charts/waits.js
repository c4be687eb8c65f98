/** Who waits for whom: boxes of equal ranks, arrows to those that they wait for. */

import { useRef } from 'preact/hooks';
import { count, duration, plural, sentence } from '../format.js';
import { useWidth } from '../parts/bits.js';
import { el, t } from '../tags.js';
import { layOut } from './waits-maths.js';

/** @typedef {import('../../types/api.js').WaitGraphAnswer} WaitGraph */
/** @typedef {import('../../types/api.js').WaitNode} WaitNode */
/** @typedef {import('../../types/api.js').RankSet} RankSet */
/** @typedef {import('../../types/api.js').HangAnswer['graph']['nodes'][0]['standing']} Standing */

const FEW = 6; // ranks that are named one by one

/** How a rank stands, now and afterwards. @type {Record<Standing, [string, string]>} */
const STANDING = {
  missing: ['missing', 'was missing'],
  behind: ['behind', 'was behind'],
  differs: ['called something else', 'called something else'],
  left: ['left', 'left'],
  gone: ['ended', 'ended'],
  silent: ['silent', 'silent'],
  unknown: ['unknown', 'unknown'],
  waiting: ['waits', 'waited'],
  elsewhere: ['waits in another group', 'waited in another group'],
  moving: ['does not wait', 'did not wait'],
  failed: ['failed', 'failed'],
  finished: ['finished', 'finished'],
};

/** @param {Standing} standing @param {boolean} isOver */
export function standingWords(standing, isOver) {
  return STANDING[standing][isOver ? 1 : 0];
}

/** "Rank 17", "Ranks 3, 4" or "1,023 ranks". @param {RankSet} ranks */
export function rankSetWords(ranks) {
  if (ranks.count === 1) return `Rank ${count(ranks.some[0])}`;
  return ranks.count <= FEW ? `Ranks ${ranks.text}` : plural(ranks.count, 'rank');
}

/** "node-a", or on how many. @param {RankSet} ranks */
export function hostWords(ranks) {
  return ranks.num_hosts === 1 ? ranks.hosts[0] : ranks.num_hosts > 1 ? plural(ranks.num_hosts, 'node') : '';
}

/** What a box says, in full. @param {WaitNode} node @param {boolean} isOver */
export function nodeWords(node, isOver) {
  if (node.is_transfer) return sentence(node.text);
  const where = hostWords(node.ranks);
  const waited = node.waited_seconds === null ? '' : ` for ${duration(node.waited_seconds * 1000)}`;
  const parts = [where && `on ${where}`, `${standingWords(node.standing, isOver)}${waited}`, node.text];
  return sentence(`${rankSetWords(node.ranks)} ${parts.filter(Boolean).join(', ')}`);
}

/**
 * @param {{graph: WaitGraph, isOver: boolean, chosen: number[], choose: (node: WaitNode) => void}} props
 */
export function WaitsChart({ graph, isOver, chosen, choose }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const width = useWidth(box);
  const plan = layOut(graph.nodes, graph.edges, Math.max(width, 240));
  return t.div(
    { class: 'waits', ref: box, style: { height: `${plan.height + 4}px` } },
    width === 0
      ? null
      : [
          t.svg(
            { key: 'arrows', class: 'waitarrows', width, height: plan.height + 4, 'aria-hidden': 'true' },
            plan.arrows.map((arrow) =>
              t.g(
                { key: arrow.key },
                t.path({ class: 'line', d: arrow.path }),
                t.path({ class: 'head', d: arrow.head }),
              ),
            ),
          ),
          plan.boxes.map((place, i) =>
            el(WaitBox, {
              key: place.id,
              node: graph.nodes[i],
              place,
              isOver,
              isChosen: graph.nodes[i].ranks.some.slice(0, 1).some((rank) => chosen.includes(rank)),
              choose,
            }),
          ),
        ],
  );
}

/** @param {{node: WaitNode, place: import('./waits-maths.js').Box, isOver: boolean, isChosen: boolean, choose: (node: WaitNode) => void}} props */
function WaitBox({ node, place, isOver, isChosen, choose }) {
  const { x, y, width, height } = place;
  const style = { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` };
  const look = node.is_transfer ? 'is-transfer' : node.is_root ? 'is-root' : `is-${node.standing}`;
  const full = nodeWords(node, isOver);
  if (node.is_transfer)
    return t.div(
      { class: `waitbox ${look}`, style, title: full },
      t.span({ class: 'waitwho' }, t.b(null, 'No rank is missing')),
      t.span({ class: 'waitwhat' }, node.text),
    );
  const waited = node.waited_seconds === null ? '' : ` ${duration(node.waited_seconds * 1000)}`;
  return t.button(
    {
      type: 'button',
      class: `waitbox ${look}`,
      style,
      title: full,
      'aria-pressed': isChosen,
      onClick: () => choose(node),
    },
    t.span(
      { class: 'waitwho' },
      t.b(null, rankSetWords(node.ranks)),
      t.span({ class: 'pill' }, `${standingWords(node.standing, isOver)}${waited}`),
    ),
    t.span({ class: 'waitwhat' }, node.text),
    t.span(
      { class: 'waitwhere faint' },
      [node.ranks.count > FEW ? node.ranks.text : '', hostWords(node.ranks)].filter(Boolean).join(' · '),
      t.span({ class: 'sr' }, `; show the stack of rank ${node.ranks.some[0]}`),
    ),
  );
}
