/** The one wrapper around uPlot: a band of least and largest values, axes from the tokens, gaps as gaps. */

import { useEffect, useRef } from 'preact/hooks';
import uPlot from 'uplot';
import { bytes, count, duration, figure, percent, si, speed, timeOfDay } from '../format.js';
import { theme } from '../page.js';
import { t } from '../tags.js';
import { tokens } from './paint.js';

const HEIGHT = 132;
const FEW = 48; // values that may be dots
const style = document.createElement('link');
style.rel = 'stylesheet';
style.href = new URL('../../vendor/uplot.css', import.meta.url).href;
document.head.append(style);

/** @param {string} unit @param {number | null | undefined} value */
export function amount(unit, value) {
  if (value == null) return 'no data';
  if (unit === 'ratio') return value > 0 && value < 0.001 ? `${figure(100 * value)} %` : percent(value);
  if (unit === 'bytes' || unit === 'B') return bytes(value);
  if (unit === 'bytes/s') return speed(value);
  if (unit === '1/s') return si(value, '/s');
  if (unit === 's' && value >= 120) return duration(1000 * value);
  return si(value, unit);
}

/** `over` is drawn above the line and its band, in the colour of what is slow; `lines` are drawn over it,
 * each with a look of its own; `limits` are lines over the whole width, where they are not far beyond all values; `summary` says in words what is drawn; `mark` is a place on x; charts with the same `cursor` share it.
 * @typedef {{title: string, summary?: string, x: number[], low: (number | null)[], high: (number | null)[], line: (number | null)[] | null, unit: string, time: boolean, over?: (number | null)[], mark?: number | null, height?: number, note?: import('../tags.js').Children, lines?: (number | null)[][], limits?: {label: string, value: number}[], cursor?: import('@preact/signals').Signal<number | null>}} SeriesProps */

/** @param {SeriesProps} props */
export function Series(props) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const { title, x, low, high, line, unit, over, height = HEIGHT } = props;
  const look = theme.value;
  useEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const plot = new uPlot(
      options(props, element),
      /** @type {any} */ ([x, high, low, line ?? high, ...(over ? [over] : []), ...(props.lines ?? [])]),
      element,
    );
    const unfollow = props.cursor?.subscribe((at) => follow(plot, at)) ?? (() => {});
    const observer = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height }));
    observer.observe(element);
    return () => {
      unfollow();
      observer.disconnect();
      plot.destroy();
    };
  }, [x, look]);
  const known = high.filter((value) => value !== null);
  const shown = over ?? line ?? high;
  const last = shown[shown.length - 1];
  const summary = `${title}: ${amount(unit, last)} last, from ${amount(unit, Math.min(.../** @type {number[]} */ (low.filter((value) => value !== null))))} to ${amount(unit, Math.max(.../** @type {number[]} */ (known)))}`;
  return t.figure(
    { class: 'series' },
    t.figcaption(null, t.b(null, title), t.span({ class: 'faint' }, props.note ?? amount(unit, last))),
    t.div({ ref: box, role: 'img', 'aria-label': props.summary ?? (known.length > 0 ? summary : `${title}: no data`) }),
  );
}

/** Show where the shared cursor is. @param {uPlot} plot @param {number | null} at */
function follow(plot, at) {
  if ((plot.cursor.idx ?? null) === at) return;
  const left = at === null ? -10 : plot.valToPos(plot.data[0][at], 'x');
  plot.setCursor({ left, top: at === null ? -10 : 1 });
}

/** How the lines over a band look: none by its colour alone. @type {[string, number[]][]} */
export const LOOKS = [
  ['t-wait', []],
  ['accent', [7, 3]],
  ['fg2', [2, 3]],
  ['t-comm', [7, 3, 2, 3]],
  ['t-opt', [4, 4]],
];

/** A dashed line over the whole height. @param {uPlot} plot @param {number} at @param {string} colour */
function drawMark(plot, at, colour) {
  const { ctx, bbox } = plot;
  const x = Math.round(plot.valToPos(at, 'x', true)) + 0.5;
  if (x < bbox.left || x > bbox.left + bbox.width) return;
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

const FAR = 3; // times the largest value: a limit that far beyond would leave the values no height

/** Those of the limits that are drawn. @template {{value: number}} Limit @param {Limit[]} limits @param {(number | null)[][]} rows */
export function near(limits, rows) {
  const most = Math.max(0, ...rows.flatMap((row) => row.map((value) => value ?? 0)));
  return limits.filter((one) => one.value <= FAR * most);
}

/** Lines over the whole width, each with its name above it. @param {uPlot} plot @param {{label: string, value: number}[]} limits @param {Record<string, string>} colours */
function drawLimits(plot, limits, colours) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colours.fg2;
  ctx.lineWidth = devicePixelRatio;
  ctx.font = `${11 * devicePixelRatio}px ${colours.font}`;
  ctx.textAlign = 'right';
  ctx.setLineDash([8 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const { label, value } of limits) {
    const y = Math.round(plot.valToPos(value, 'y', true)) + 0.5;
    ctx.beginPath();
    ctx.moveTo(bbox.left, y);
    ctx.lineTo(bbox.left + bbox.width, y);
    ctx.stroke();
    ctx.save();
    ctx.setLineDash([]);
    ctx.lineWidth = 3 * devicePixelRatio;
    ctx.strokeStyle = colours.surface;
    ctx.strokeText(label, bbox.left + bbox.width - 4 * devicePixelRatio, y - 4 * devicePixelRatio);
    ctx.restore();
    ctx.fillText(label, bbox.left + bbox.width - 4 * devicePixelRatio, y - 4 * devicePixelRatio);
  }
  ctx.restore();
}

/** @param {SeriesProps} props @param {HTMLElement} element @returns {import('uplot').Options} */
function options(
  { x, unit, time, high: highest, line, over, mark, height = HEIGHT, lines = [], limits = [], cursor },
  element,
) {
  const shown = near(limits, [highest, over ?? [], ...lines]);
  const top = Math.max(0, ...shown.map((one) => one.value));
  // Between gaps a value may stand alone, and a line needs two.
  const dots = { show: over !== undefined && x.length <= FEW, size: 4 };
  const colours = tokens(element, ['fg2', 'fg3', 'line', 'surface', 'accent', 'mark', 't-wait', 't-comm', 't-opt']);
  const axis = {
    stroke: colours.fg3,
    grid: { stroke: colours.line, width: 1 },
    ticks: { show: false },
    font: `11px ${colours.font}`,
  };
  return {
    width: element.clientWidth,
    height,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, ...(cursor ? { points: { show: false }, y: false } : {}) },
    scales: {
      x: { time: false },
      y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 0, top) * 1.08 || 1] },
    },
    axes: [
      {
        ...axis,
        size: 24,
        space: 80,
        values: (_, ticks) => ticks.map((value) => (time ? timeOfDay(value) : count(value))),
      },
      {
        ...axis,
        // as wide as its longest number with its unit
        size: (_, values) => Math.max(58, 14 + 6.4 * Math.max(0, ...(values ?? []).map((text) => text.length))),
        space: 28,
        ...(unit === 'bytes' ? { incrs: Array.from({ length: 50 }, (_, power) => 2 ** power) } : {}),
        values: (_, ticks) => ticks.map((value) => amount(unit, value)),
      },
    ],
    series: [
      {},
      { stroke: line ? 'transparent' : colours.accent, width: 1, points: { show: false } },
      { stroke: 'transparent', points: { show: false } },
      {
        stroke: line ? (over ? colours.fg3 : colours.accent) : 'transparent',
        width: 1.25,
        points: line ? dots : { show: false },
      },
      ...(over ? [{ stroke: colours['t-wait'], width: 1.75, points: dots }] : []),
      ...lines.map((_, i) => {
        const [name, dash] = LOOKS[(over ? i + 1 : i) % LOOKS.length]; // `over` has the first
        return { stroke: colours[name], width: 1.75, dash, points: { show: false } };
      }),
    ],
    hooks: {
      draw: [
        (/** @type {uPlot} */ plot) => {
          if (mark != null) drawMark(plot, mark, colours.mark);
          drawLimits(plot, shown, colours);
        },
      ],
      ...(cursor
        ? {
            setCursor: [
              (/** @type {uPlot} */ plot) => {
                cursor.value = plot.cursor.idx ?? null;
              },
            ],
          }
        : {}),
    },
    bands: [{ series: [1, 2], fill: colours.line }],
  };
}
