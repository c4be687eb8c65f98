/** A list of fixed row height of which only the visible rows exist. */

import { useEffect, useLayoutEffect, useRef } from 'preact/hooks';
import { t } from '../tags.js';
import { visibleRange } from './range.js';

/**
 * How rows are made: an empty one, and one filled with an item, which may have held another before.
 * @typedef {{make: () => HTMLElement, fill: (row: HTMLElement, item: any) => void}} Look
 */

const REST_MS = 100;

/** The rows that exist. Those that leave at one edge come in at the other, filled anew: to make them, or to
 * compare all of them, takes most of a frame. */
class Rows {
  /** @param {HTMLElement} frame @param {Look} look */
  constructor(frame, look) {
    this.frame = frame;
    this.look = look;
    /** @type {Map<any, HTMLElement>} */
    this.of = new Map();
    frame.replaceChildren();
  }

  /** Show these items in their order. @param {any[]} items @param {number} first the index of the first @param {number} active @param {number} count of all items */
  show(items, first, active, count) {
    const leaving = new Set(/** @type {Iterable<HTMLElement>} */ (/** @type {unknown} */ (this.frame.children)));
    const before = this.of;
    for (const item of items) leaving.delete(/** @type {HTMLElement} */ (before.get(item)));
    this.of = new Map();
    let next = /** @type {HTMLElement | null} */ (this.frame.firstElementChild);
    items.forEach((item, i) => {
      let row = before.get(item);
      if (row) while (next && next !== row && leaving.has(next)) next = after(next);
      else {
        row = next && leaving.has(next) ? next : (leaving.values().next().value ?? this.look.make());
        leaving.delete(row);
        this.look.fill(row, item);
      }
      if (row === next) next = after(next);
      else this.frame.insertBefore(row, next);
      this.of.set(item, row);
      number(row, first + i, first + i === active, count);
    });
    for (const row of leaving) row.remove();
  }
}

/** @param {HTMLElement} row */
function after(row) {
  return /** @type {HTMLElement | null} */ (row.nextElementSibling);
}

/** Which of the items a row is; what is so already is not written again. @param {HTMLElement} row @param {number} index @param {boolean} isActive @param {number} count */
function number(row, index, isActive, count) {
  if (row.dataset.index !== String(index)) {
    row.dataset.index = String(index);
    row.id = `row-${index}`;
    row.setAttribute('aria-posinset', String(index + 1));
  }
  if (row.getAttribute('aria-setsize') !== String(count)) row.setAttribute('aria-setsize', String(count));
  if (row.getAttribute('aria-selected') !== String(isActive)) {
    row.setAttribute('role', 'option');
    row.setAttribute('aria-selected', String(isActive));
    row.className = isActive ? 'vrow active' : 'vrow';
  }
}

/**
 * `look` is the same object as long as a row of the same item looks the same.
 * @param {{items: any[], row: number, keyOf: (item: any) => string | number, look: Look,
 *   label: string, follow: boolean, onFollow: (at: boolean) => void, onTop: () => void, active: number, onActive: (index: number) => void, onOpen: (index: number, target?: Element) => void}} props
 */
export function VirtualList({ items, row, keyOf, look, label, follow, onFollow, onTop, active, onActive, onOpen }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const frame = useRef(/** @type {HTMLDivElement | null} */ (null));
  const rows = useRef(/** @type {Rows | null} */ (null));
  const view = useRef({ scrollTop: 0, viewport: 600 });
  const anchor = useRef(/** @type {{key: string | number, index: number} | null} */ (null));
  const resting = useRef(0);
  const following = useRef(follow);
  following.current = follow;
  const { height } = visibleRange({ ...view.current, count: items.length, row });

  function draw() {
    if (!box.current || !frame.current) return;
    if (rows.current?.look !== look) rows.current = new Rows(frame.current, look);
    const { first, last, shift } = visibleRange({ ...view.current, count: items.length, row });
    frame.current.style.transform = `translateY(${first * row + shift}px)`;
    rows.current.show(items.slice(first, last), first, active, items.length);
    if (active >= first && active < last) box.current.setAttribute('aria-activedescendant', `row-${active}`);
    else box.current.removeAttribute('aria-activedescendant');
  }
  /** Rows that move under the pointer are not looked up in each frame: they take it again at rest. */
  function pass() {
    if (!frame.current) return;
    clearTimeout(resting.current);
    frame.current.style.pointerEvents = 'none';
    resting.current = setTimeout(() => frame.current?.style.removeProperty('pointer-events'), REST_MS);
  }
  const redraw = useRef(draw);
  redraw.current = draw;

  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const observer = new ResizeObserver(() => {
      view.current.viewport = element.clientHeight;
      redraw.current();
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  // Lines put in front of what is read push the scroll position along with it. The first lines may
  // become part of those in front of them: the last one says by how much all moved.
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    const before = anchor.current;
    if (following.current) element.scrollTop = element.scrollHeight;
    else if (before) {
      const at = items.findLastIndex((item) => keyOf(item) === before.key);
      if (at >= 0) element.scrollTop += (at - before.index) * row;
    }
    anchor.current = items.length > 0 ? { key: keyOf(items[items.length - 1]), index: items.length - 1 } : null;
    view.current = { scrollTop: element.scrollTop, viewport: element.clientHeight };
  }, [items, follow]);

  useLayoutEffect(draw, [items, look, active, follow]);

  useEffect(() => {
    const element = box.current;
    if (!element || active < 0) return;
    const top = active * row;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (top + row > element.scrollTop + element.clientHeight) element.scrollTop = top + row - element.clientHeight;
  }, [active]);

  /** @param {KeyboardEvent} event */
  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(view.current.viewport / row) - 1);
    /** @type {Record<string, number>} */
    const moves = {
      ArrowDown: 1,
      j: 1,
      ArrowUp: -1,
      k: -1,
      PageDown: page,
      PageUp: -page,
      Home: -items.length,
      End: items.length,
    };
    if (event.key in moves) {
      const from = active < 0 ? Math.min(items.length - 1, Math.floor(view.current.scrollTop / row)) : active;
      onActive(Math.max(0, Math.min(items.length - 1, from + moves[event.key])));
    } else if (event.key === 'Enter' && active >= 0) onOpen(active);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  return t.div(
    {
      class: 'vlist',
      ref: box,
      tabIndex: 0,
      role: 'listbox',
      'aria-label': label,
      onKeyDown: key,
      onClick: (event) => {
        const target = /** @type {Element} */ (event.target);
        const chosen = /** @type {HTMLElement | null} */ (target.closest('.vrow'));
        if (chosen) onOpen(Number(chosen.dataset.index), target);
      },
      onScroll: (event) => {
        const { scrollTop } = event.currentTarget;
        view.current.scrollTop = scrollTop;
        pass();
        draw();
        const atEnd = scrollTop + view.current.viewport >= height - row;
        if (atEnd !== following.current) onFollow(atEnd);
        if (scrollTop < row * 20) onTop();
      },
    },
    t.div(
      { class: 'vroom', role: 'presentation', style: { height: `${height}px` } },
      t.div({ class: 'vrows', role: 'presentation', ref: frame }),
    ),
  );
}
