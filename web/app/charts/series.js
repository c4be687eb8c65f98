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

/** @typedef {{title: string, x: number[], low: (number | null)[], high: (number | null)[], line: (number | null)[] | null, unit: string, time: boolean}} SeriesProps */

/** @param {SeriesProps} props */
export function Series(props) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const { title, x, low, high, line, unit } = props;
  const look = theme.value;
  useEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const plot = new uPlot(options(props, element), /** @type {any} */ ([x, high, low, line ?? high]), element);
    const observer = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
  }, [x, look]);
  const known = high.filter((value) => value !== null);
  const last = line ? line[line.length - 1] : high[high.length - 1];
  const summary = `${title}: ${amount(unit, last)} now, from ${amount(unit, Math.min(.../** @type {number[]} */ (low.filter((value) => value !== null))))} to ${amount(unit, Math.max(.../** @type {number[]} */ (known)))}`;
  return t.figure(
    { class: 'series' },
    t.figcaption(null, t.b(null, title), t.span({ class: 'faint' }, amount(unit, last))),
    t.div({ ref: box, role: 'img', 'aria-label': known.length > 0 ? summary : `${title}: no data` }),
  );
}

/** @param {SeriesProps} props @param {HTMLElement} element @returns {import('uplot').Options} */
function options({ unit, time, line }, element) {
  const colours = tokens(element);
  const axis = {
    stroke: colours.fg3,
    grid: { stroke: colours.line, width: 1 },
    ticks: { show: false },
    font: `11px ${colours.font}`,
  };
  return {
    width: element.clientWidth,
    height: HEIGHT,
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
      { stroke: line ? colours.accent : 'transparent', width: 1.25, points: { show: false } },
    ],
    bands: [{ series: [1, 2], fill: colours.line }],
  };
}
