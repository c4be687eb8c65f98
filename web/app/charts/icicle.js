/** Stacks merged over ranks: a row for each depth, as wide as the ranks that are in the frame. */

import { useRef } from 'preact/hooks';
import { count, plural, shortPlace } from '../format.js';
import { announce } from '../page.js';
import { useWidth } from '../parts/bits.js';
import { t } from '../tags.js';
import { fitted, foldedDepths, frameAfter } from './icicle-maths.js';

/** @typedef {import('../../types/api.js').Icicle} Icicle */
/** @typedef {import('../../types/api.js').IcicleNode} IcicleNode */

const ROW = 22;
const KEYS = new Set(['ArrowUp', 'ArrowDown', 'ArrowLeft', 'ArrowRight']);

/** "train.py:88, 91". @param {IcicleNode} node */
export function placeWords(node) {
  return `${shortPlace(node.file)}:${node.lines.join(', ')}`;
}

/** @param {IcicleNode} node @param {number} all */
export function frameWords(node, all) {
  return `${node.function} (${placeWords(node)}): ${count(node.count)} of ${plural(all, 'rank')}`;
}

/** Of ranks that others wait for, of others, or of both. @param {IcicleNode} node */
export function lookOf(node) {
  return node.num_roots === 0 ? 'others' : node.num_roots === node.count ? 'roots' : 'both';
}

/** @param {{icicle: Icicle, at: number, all: boolean, pick: (at: number) => void}} props */
export function IcicleChart({ icicle, at, all, pick }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const width = useWidth(box);
  const folded = all ? 0 : foldedDepths(icicle);
  const unit = width / Math.max(1, icicle.num_ranks);
  /** @param {KeyboardEvent} event */
  function onKey(event) {
    if (!KEYS.has(event.key)) return;
    event.preventDefault();
    const next =
      at < 0 ? icicle.nodes.findIndex((node) => node.depth >= folded) : frameAfter(icicle.nodes, at, event.key);
    if (next < 0 || icicle.nodes[next].depth < folded) return;
    pick(next);
    announce(frameWords(icicle.nodes[next], icicle.num_ranks));
  }
  const height = (icicle.num_depths - folded) * ROW;
  return t.div(
    {
      class: 'icicle',
      ref: box,
      tabIndex: 0,
      role: 'application',
      'aria-label': `Stacks of ${plural(icicle.num_ranks, 'rank')}, outermost frame at the top. Arrow keys go from frame to frame; t shows a table`,
      onKeyDown: onKey,
      style: { height: `${height}px` },
    },
    width === 0
      ? null
      : t.svg(
          { width, height, 'aria-hidden': 'true' },
          icicle.nodes.map((node, i) => {
            if (node.depth < folded) return null;
            const x = node.start * unit;
            const wide = Math.max(1, node.count * unit - 1);
            const name = fitted(node.function, wide);
            return t.g(
              {
                key: i,
                class: `frame is-${lookOf(node)} ${i === at ? 'here' : ''} ${i === icicle.parts_at ? 'parts' : ''}`,
                onClick: () => pick(i),
              },
              t.title(null, frameWords(node, icicle.num_ranks)),
              t.rect({ x: x + 0.5, y: (node.depth - folded) * ROW + 0.5, width: wide, height: ROW - 2, rx: 2 }),
              name ? t.text({ x: x + 6, y: (node.depth - folded) * ROW + 14.5 }, name) : null,
            );
          }),
        ),
  );
}
