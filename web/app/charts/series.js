/** The one wrapper around uPlot: a band of least and largest values, axes from the tokens, gaps as gaps. */

import { useEffect, useRef } from 'preact/hooks';
import uPlot from 'uplot';
import { bytes, count, percent, si, timeOfDay } from '../format.js';
import { theme } from '../page.js';
import { t } from '../tags.js';
import { tokens } from './paint.js';

const HEIGHT = 132;
const style = document.createElement('link');
style.rel = 'stylesheet';
style.href = new URL('../../vendor/uplot.css', import.meta.url).href;
document.head.append(style);

/** @param {string} unit @param {number | null | undefined} value */
function amount(unit, value) {
  if (value == null) return 'no data';
  if (unit === 'ratio') return percent(value);
  if (unit === 'bytes' || unit === 'B') return bytes(value);
  return si(value, unit);
}

/** `over` is drawn above the line and its band, in the colour of what is slow; `mark` is a place on x.
 * @typedef {{title: string, x: number[], low: (number | null)[], high: (number | null)[], line: (number | null)[] | null, unit: string, time: boolean, over?: (number | null)[], mark?: number | null, height?: number, note?: string}} SeriesProps */

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
      /** @type {any} */ ([x, high, low, line ?? high, ...(over ? [over] : [])]),
      element,
    );
    const observer = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [x, look]);
  const known = high.filter((value) => value !== null);
  const shown = over ?? line ?? high;
  const last = shown[shown.length - 1];
  const summary = `${title}: ${amount(unit, last)} now, from ${amount(unit, Math.min(.../** @type {number[]} */ (low.filter((value) => value !== null))))} to ${amount(unit, Math.max(.../** @type {number[]} */ (known)))}`;
  return t.figure(
    { class: 'series' },
    t.figcaption(null, t.b(null, title), t.span({ class: 'faint' }, props.note ?? amount(unit, last))),
    t.div({ ref: box, role: 'img', 'aria-label': known.length > 0 ? summary : `${title}: no data` }),
  );
}

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

/** @param {SeriesProps} props @param {HTMLElement} element @returns {import('uplot').Options} */
function options({ unit, time, line, over, mark, height = HEIGHT }, element) {
  const colours = tokens(element);
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
    cursor: { drag: { x: false, y: false } },
    scales: {
      x: { time: false },
      y: { range: (_, low, high) => [Math.min(0, low ?? 0), high ? high * 1.08 : 1] },
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
        size: 58,
        space: 28,
        ...(unit === 'bytes' ? { incrs: Array.from({ length: 50 }, (_, power) => 2 ** power) } : {}),
        values: (_, ticks) => ticks.map((value) => amount(unit, value)),
      },
    ],
    series: [
      {},
      { stroke: line ? 'transparent' : colours.accent, width: 1, points: { show: false } },
      { stroke: 'transparent', points: { show: false } },
      { stroke: line ? (over ? colours.fg3 : colours.accent) : 'transparent', width: 1.25, points: { show: false } },
      ...(over ? [{ stroke: colours['t-wait'], width: 1.75, points: { show: false } }] : []),
    ],
    hooks: mark == null ? {} : { draw: [(plot) => drawMark(plot, mark, colours.mark)] },
    bands: [{ series: [1, 2], fill: colours.line }],
  };
}
