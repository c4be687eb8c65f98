/** Lines per level over time. Errors stand at the bottom and never shrink below two pixels. */

import { useRef, useState } from 'preact/hooks';
import { count, dateTime, plural, rankWords, timeOfDay } from '../format.js';
import { Icon, useWidth } from '../parts/bits.js';
import { setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { marksOf, stack, TONE } from './histogram-maths.js';

/** @typedef {import('../../types/api.js').LogHistogram} LogHistogram */
/** @typedef {import('../../types/api.js').ErrorGroup} ErrorGroup */

const HEIGHT = 44;

const MARK = 24; // pixels: a target that can be met
const AROUND_MS = 10_000;
const DAY_MS = 86_400_000;

/** What a mark stands for. @param {ErrorGroup[]} groups */
function markWords(groups) {
  const [first] = groups;
  const more = groups.length > 1 ? ` and ${plural(groups.length - 1, 'other kind')} of error` : '';
  return `${timeOfDay(first.first_ms)}: ${first.type} on ${rankWords(first.ranks)}${more}`;
}

/** Where each kind of error began; a press shows the lines around it. @param {{data: LogHistogram, errors: ErrorGroup[], width: number}} props */
function ErrorMarks({ data, errors, width }) {
  const marks = marksOf(errors, data, width, MARK);
  if (marks.length === 0) return null;
  return t.ul(
    { class: 'errormarks', 'aria-label': 'Errors' },
    marks.map(({ x, groups }) => {
      const at = groups[0].first_ms;
      const text = markWords(groups);
      return t.li(
        { key: at, style: { left: `${Math.max(0, Math.min(width - MARK, x - MARK / 2))}px` } },
        t.button(
          {
            type: 'button',
            class: 'iconbutton',
            title: text,
            'aria-label': text,
            onClick: () => setQuery({ from: Math.round(at - AROUND_MS), to: Math.round(at + AROUND_MS), line: null }),
          },
          el(Icon, { name: groups.some((one) => one.role === 'initiating') ? 'critical' : 'warning', size: 11 }),
        ),
      );
    }),
  );
}

/** @param {{data: LogHistogram, errors?: ErrorGroup[]}} props */
export function Histogram({ data, errors = [] }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const width = useWidth(box);
  const [drag, setDrag] = useState(/** @type {[number, number] | null} */ (null));
  const slices = Math.max(0, ...Object.values(data.levels).map((counts) => counts.length));
  const totals = Array.from({ length: slices }, (_, i) =>
    Object.values(data.levels).reduce((sum, counts) => sum + (counts[i] ?? 0), 0),
  );
  const most = Math.max(1, ...totals);
  const shareAt = (/** @type {PointerEvent} */ event) => {
    const area = /** @type {HTMLElement} */ (box.current).getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - area.left) / area.width));
  };
  const timeAt = (/** @type {number} */ share) => data.from_ms + share * (data.to_ms - data.from_ms);
  // Beyond a day the time of day alone would not say when.
  const timeWords = data.to_ms - data.from_ms > DAY_MS ? dateTime : timeOfDay;
  const counts = Object.entries(data.levels).map(
    ([level, counts]) => `${count(counts.reduce((a, b) => a + b, 0))} ${level}`,
  );
  return t.div(
    { class: 'histogram' },
    el(ErrorMarks, { data, errors, width }),
    t.div(
      {
        class: 'histbars',
        ref: box,
        role: 'img',
        'aria-label': `Lines from ${timeWords(data.from_ms)} to ${timeWords(data.to_ms)}: ${counts.join(', ') || 'none'}`,
        onPointerDown: (event) => {
          event.currentTarget.setPointerCapture(event.pointerId);
          const at = shareAt(event);
          setDrag([at, at]);
        },
        onPointerMove: (event) => drag && setDrag([drag[0], shareAt(event)]),
        onPointerUp: () => {
          if (drag && Math.abs(drag[0] - drag[1]) > 0.005)
            setQuery({
              from: Math.floor(timeAt(Math.min(...drag))),
              to: Math.ceil(timeAt(Math.max(...drag))),
              line: null,
            });
          setDrag(null);
        },
        onPointerCancel: () => setDrag(null),
      },
      t.svg(
        { viewBox: `0 0 ${Math.max(1, slices)} ${HEIGHT}`, preserveAspectRatio: 'none', 'aria-hidden': 'true' },
        totals.map((_, i) => {
          let y = HEIGHT;
          return stack(data, i, most, HEIGHT).map((part) => {
            const height = Math.min(part.height, y);
            y -= height;
            return t.rect({
              key: `${i}${part.level}`,
              class: `h-${TONE[part.level] ?? 'plain'}`,
              x: i + 0.08,
              y,
              width: 0.84,
              height,
            });
          });
        }),
      ),
      drag
        ? t.div({
            class: 'brush',
            style: {
              left: `${Math.min(...drag) * 100}%`,
              width: `${Math.abs(drag[0] - drag[1]) * 100}%`,
              height: '100%',
            },
          })
        : null,
    ),
    t.div(
      { class: 'histaxis', 'aria-hidden': 'true' },
      [0, 0.25, 0.5, 0.75, 1].map((share) => t.span({ key: share }, timeWords(timeAt(share)))),
    ),
  );
}
