/** A list of fixed row height of which only the visible rows exist. */

import { useEffect, useLayoutEffect, useRef } from 'preact/hooks';
import { t } from '../tags.js';
import { visibleRange } from './range.js';

/**
 * How rows are made: an empty one; one filled with an item, which may have held another before; and the text of
 * items that a scroll runs past, a line for each, or null where one of them must be seen even so.
 * @typedef {{make: () => HTMLElement, fill: (row: HTMLElement, item: any) => void, plain: (items: any[]) => string | null}} Look
 */
/** @typedef {{element: HTMLElement, item: any, index: number, isActive: boolean}} Row */
/**
 * `from`: the index of its first row, below 0 where it begins before the list; `rows`: all; `shown`: those that the
 * list has; `plain`: its items where it is one text.
 * @typedef {{element: HTMLElement, from: number, rows: Row[], shown: Row[], plain: any[] | null}} Block
 */

const REST_MS = 100;
const BLOCK = 8; // rows: fewer blocks cost less, and more rows are filled in vain
const PASSING_ROWS = 3; // in one frame: 3,600 px a second are not read

/** The rows that exist, in blocks that have a place of their own. A block that leaves at one edge comes in at the
 * other, filled anew: to make rows, to move them in the document or to lay out all of them takes most of a frame. */
class Rows {
  /** @param {HTMLElement} frame @param {Look} look @param {number} height of a row, px */
  constructor(frame, look, height) {
    this.frame = frame;
    this.look = look;
    this.height = height;
    /** @type {Map<number, Block>} by the index of the first row */
    this.blocks = new Map();
    this.origin = 0;
    this.active = -1;
    this.count = 0;
    frame.replaceChildren();
  }

  /** Items came, or went, in front of those that are shown. @param {number} by */
  moved(by) {
    if (by === 0) return;
    this.origin = (((this.origin + by) % BLOCK) + BLOCK) % BLOCK;
    const blocks = [...this.blocks.values()];
    for (const block of blocks) this.place(block, block.from + by);
    this.blocks = new Map(blocks.map((block) => [block.from, block]));
  }

  /** Show the items of a range. @param {any[]} items all of them @param {number} first @param {number} last not in it @param {number} active @param {boolean} isPassing while they scroll */
  show(items, first, last, active, isPassing) {
    this.count = items.length;
    this.active = active;
    const begin = Math.floor((first - this.origin) / BLOCK) * BLOCK + this.origin;
    const free = [...this.blocks.values()].filter((block) => block.from < begin || block.from >= last);
    for (const block of free) this.blocks.delete(block.from);
    for (let from = begin; from < last; from += BLOCK) {
      const known = this.blocks.get(from);
      const block = known ?? free.pop() ?? this.make();
      if (!known) this.place(block, from);
      this.blocks.set(from, block);
      const held = items.slice(Math.max(0, from), from + BLOCK);
      const isNear = active >= from && active < from + BLOCK;
      this.fill(block, held, isPassing && !isNear && (!known || block.plain !== null));
    }
    for (const block of free) block.element.remove();
    if (!isPassing) this.rest();
  }

  /** What was run past has rows again, which stand in the document by their number and in their order. */
  rest() {
    const blocks = [...this.blocks.values()].sort((a, b) => a.from - b.from);
    blocks.forEach((block, at) => {
      if (block.plain) this.fill(block, block.plain, false);
      const there = this.frame.children[at] ?? null;
      if (there !== block.element) this.frame.insertBefore(block.element, there);
      for (const row of block.shown) number(row, this.count);
    });
  }

  /** @returns {Block} */
  make() {
    const element = document.createElement('div');
    element.className = 'vblock';
    element.setAttribute('role', 'presentation');
    const rows = Array.from({ length: BLOCK }, () => {
      const row = this.look.make();
      row.className = 'vrow';
      row.setAttribute('role', 'option');
      row.setAttribute('aria-selected', 'false');
      return { element: row, item: undefined, index: -1, isActive: false };
    });
    this.frame.append(element);
    return { element, from: 0, rows, shown: [], plain: null };
  }

  /** @param {Block} block @param {number} from */
  place(block, from) {
    block.from = from;
    block.element.style.transform = `translateY(${Math.max(0, from) * this.height}px)`;
    block.rows.forEach((row, at) => {
      row.index = from + at;
    });
  }

  /** @param {Block} block @param {any[]} items that it has in the list @param {boolean} mayBePlain */
  fill(block, items, mayBePlain) {
    if (block.plain && mayBePlain && block.plain.every((item, at) => item === items[at])) return;
    const text = mayBePlain ? this.look.plain(items) : null;
    if (text !== null) {
      const [node] = block.element.childNodes;
      if (block.plain) /** @type {Text} */ (node).data = text;
      else block.element.replaceChildren(text);
      block.plain = items;
      block.shown = [];
      return;
    }
    block.plain = null;
    const first = Math.max(0, -block.from);
    const shown = block.rows.slice(first, first + items.length);
    shown.forEach((row, at) => {
      if (row.item !== items[at]) this.look.fill(row.element, items[at]);
      row.item = items[at];
      activate(row, row.index === this.active);
    });
    if (block.shown.length !== shown.length || block.shown[0] !== shown[0])
      block.element.replaceChildren(...shown.map((row) => row.element));
    block.shown = shown;
  }
}

/** What is so already is not written again. @param {Row} row @param {number} count of all items */
function number({ element, index }, count) {
  if (element.getAttribute('aria-setsize') !== String(count)) element.setAttribute('aria-setsize', String(count));
  if (element.dataset.index === String(index)) return;
  element.dataset.index = String(index);
  element.id = `row-${index}`;
  element.setAttribute('aria-posinset', String(index + 1));
}

/** @param {Row} row @param {boolean} isActive */
function activate(row, isActive) {
  if (row.isActive === isActive) return;
  row.isActive = isActive;
  row.element.setAttribute('aria-selected', String(isActive));
  row.element.classList.toggle('active', isActive);
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
  const scrolled = useRef(0); // when, ms; 0 at rest
  const isPassing = useRef(false); // faster than one reads
  const following = useRef(follow);
  following.current = follow;
  const { height } = visibleRange({ ...view.current, count: items.length, row });

  function draw() {
    if (!box.current || !frame.current) return;
    if (rows.current?.look !== look) rows.current = new Rows(frame.current, look, row);
    const { first, last, shift } = visibleRange({ ...view.current, count: items.length, row });
    frame.current.style.transform = shift ? `translateY(${shift}px)` : '';
    rows.current.show(items, first, last, active, isPassing.current);
    if (active >= first && active < last) box.current.setAttribute('aria-activedescendant', `row-${active}`);
    else box.current.removeAttribute('aria-activedescendant');
  }
  /** @param {number} by px */
  function pass(by) {
    isPassing.current = Math.abs(by) > PASSING_ROWS * row;
    if (scrolled.current === 0) {
      // Rows that move under the pointer are not looked up in each frame: they take it again at rest.
      if (frame.current) frame.current.style.pointerEvents = 'none';
      setTimeout(rest, REST_MS);
    }
    scrolled.current = performance.now();
  }
  function rest() {
    const left = scrolled.current + REST_MS - performance.now();
    if (left > 0) {
      setTimeout(rest, left);
      return;
    }
    scrolled.current = 0;
    isPassing.current = false;
    frame.current?.style.removeProperty('pointer-events');
    rows.current?.rest();
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
    const at = before ? items.findLastIndex((item) => keyOf(item) === before.key) : -1;
    const by = before && at >= 0 ? at - before.index : 0;
    rows.current?.moved(by);
    if (following.current) element.scrollTop = element.scrollHeight;
    else element.scrollTop += by * row;
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
        pass(scrollTop - view.current.scrollTop);
        view.current.scrollTop = scrollTop;
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
