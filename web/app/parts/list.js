/** A list of fixed row height of which only the visible rows exist. */

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks';
import { t } from '../tags.js';
import { visibleRange } from './range.js';

/**
 * `draw` is the same function as long as a row of the same item looks the same.
 * @param {{items: any[], row: number, keyOf: (item: any) => string | number, draw: (item: any) => import('../tags.js').Children,
 *   label: string, follow: boolean, onFollow: (at: boolean) => void, onTop: () => void, active: number, onActive: (index: number) => void, onOpen: (index: number) => void}} props
 */
export function VirtualList({ items, row, keyOf, draw, label, follow, onFollow, onTop, active, onActive, onOpen }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [view, setView] = useState({ scrollTop: 0, viewport: 600 });
  const anchor = useRef(/** @type {{key: string | number, index: number} | null} */ (null));
  const following = useRef(follow);
  following.current = follow;
  // What a row holds is made once: the same again is not compared part by part.
  const drawn = useMemo(() => new WeakMap(), [draw]);
  const contents = (/** @type {any} */ item) => {
    if (!drawn.has(item)) drawn.set(item, draw(item));
    return drawn.get(item);
  };
  const { first, last, height, shift } = visibleRange({ ...view, count: items.length, row });

  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const observer = new ResizeObserver(() => setView((old) => ({ ...old, viewport: element.clientHeight })));
    observer.observe(element);
    setView({ scrollTop: element.scrollTop, viewport: element.clientHeight });
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
  }, [items, follow]);

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
    const page = Math.max(1, Math.floor(view.viewport / row) - 1);
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
      const from = active < 0 ? Math.min(items.length - 1, Math.floor(view.scrollTop / row)) : active;
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
      'aria-activedescendant': active >= first && active < last ? `row-${active}` : undefined,
      onKeyDown: key,
      onScroll: (event) => {
        const element = event.currentTarget;
        setView({ scrollTop: element.scrollTop, viewport: element.clientHeight });
        const atEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - row;
        if (atEnd !== following.current) onFollow(atEnd);
        if (element.scrollTop < row * 20) onTop();
      },
    },
    t.div(
      { class: 'vroom', role: 'presentation', style: { height: `${height}px` } },
      t.div(
        { class: 'vrows', role: 'presentation', style: { transform: `translateY(${first * row + shift}px)` } },
        items.slice(first, last).map((item, i) => {
          const index = first + i;
          return t.div(
            {
              key: keyOf(item),
              id: `row-${index}`,
              role: 'option',
              'aria-selected': index === active,
              'aria-posinset': index + 1,
              'aria-setsize': items.length,
              class: index === active ? 'vrow active' : 'vrow',
              onClick: () => onOpen(index),
            },
            contents(item),
          );
        }),
      ),
    ),
  );
}
