/** Draws the map on a canvas: throughput strip, pinned lanes, lanes, axis. No element per cell. */

import { count, figure, percent, timeOfDay } from '../format.js';
import {
  AXIS_HEIGHT,
  growMarks,
  HATCH,
  MISSING,
  pack,
  palette,
  pixelColumns,
  rgb,
  stretch,
  ticks,
  usualOf,
  xOf,
} from './scene.js';

/** @typedef {import('../../types/api.js').Map} RankMap */
/** @typedef {import('../../types/api.js').Throughput} Throughput */
/** @typedef {import('./scene.js').Layout} Layout */
/** @typedef {{cells: Uint8Array, missing: Uint8Array, stretch: Uint8Array}} Lane */
/** @typedef {{rows: Lane[], pins: Lane[]}} Lanes */
/** @typedef {{map: RankMap, lanes: Lanes, strip: Throughput | null, plan: Layout, theme: 'light' | 'dark', width: number, colours: Record<string, string>}} Scene */

const HATCH_PITCH = 6;
const NEWEST_PIXELS = 72; // that "newest 1,234" takes
const LEAST_CHANGE = 0.02; // of throughput; less is noise and gets no number

const NAMES = ['fg', 'fg2', 'fg3', 'line', 'line2', 'accent', 'mark', 'surface', 't-wait'];

/** The colours that a canvas needs, as the style sheet resolves them now. @param {HTMLElement} within @param {string[]} [names] */
export function tokens(within, names = NAMES) {
  const probe = document.createElement('span');
  within.append(probe);
  /** @type {Record<string, string>} */
  const found = {};
  for (const name of names) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  found.font = getComputedStyle(within).fontFamily;
  probe.remove();
  return found;
}

/** Draw everything. @param {HTMLCanvasElement} canvas @param {Scene} scene */
export function paint(canvas, scene) {
  const ratio = devicePixelRatio || 1;
  const { width, plan } = scene;
  const context = canvas.getContext('2d');
  if (!context || width < 1) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(plan.height * ratio);
  paintLanes(context, scene, ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const strip = plan.bands.find((band) => band.kind === 'strip');
  if (strip && scene.strip) paintStrip(context, scene, scene.strip, strip.y, strip.height);
  paintMarks(context, scene);
  paintAxis(context, scene);
}

/** @param {CanvasRenderingContext2D} context @param {Scene} scene @param {number} ratio */
function paintLanes(context, { map, lanes, plan, theme, width }, ratio) {
  const pixels = Math.round(width * ratio);
  const columns = pixelColumns(map, pixels);
  const usual = usualOf(map);
  const tables = [palette(theme, map.unit, usual.cell), palette(theme, map.unit, usual.stretch)];
  const hatch = [pack(rgb(HATCH[theme].base)), pack(rgb(HATCH[theme].line))];
  const least = Math.ceil(2 * ratio);
  for (const band of plan.bands) {
    if (band.kind === 'strip') continue;
    const lane = band.kind === 'pin' ? lanes.pins[band.index] : lanes.rows[band.index];
    const line = stretch(lane.cells, columns);
    const grown = map.unit === 'ratio' ? growMarks(line, least, usual.cell) : line;
    const top = Math.round(band.y * ratio);
    const height = Math.round((band.y + band.height) * ratio) - top;
    const image = context.createImageData(pixels, height);
    fill(new Uint32Array(image.data.buffer), {
      line: grown,
      columns,
      missing: lane.missing,
      height,
      tables,
      stretch: lane.stretch,
      hatch,
      ratio,
      top,
    });
    context.putImageData(image, 0, top);
  }
}

/**
 * One lane's pixels: colour where there is data, hatch where there is none, a hatched lower edge
 * where some of it is missing.
 * @param {Uint32Array} target
 * @param {{line: Uint8Array, columns: Uint32Array, missing: Uint8Array, stretch: Uint8Array, height: number, tables: Uint32Array[], hatch: number[], ratio: number, top: number}} lane
 */
function fill(target, { line, columns, missing, stretch, height, tables, hatch, ratio, top }) {
  const pitch = Math.round(HATCH_PITCH * ratio);
  const stroke = Math.max(1, Math.round(1.5 * ratio));
  const edge = height - Math.max(1, Math.round(Math.min(height / 3, 4 * ratio)));
  const width = line.length;
  for (let x = 0; x < width; x += 1) {
    const level = line[x];
    const from = level === MISSING ? 0 : missing[columns[x]] > 0 ? edge : height;
    const colour = tables[stretch[columns[x]]][level];
    for (let y = 0; y < from; y += 1) target[y * width + x] = colour;
    for (let y = from; y < height; y += 1) target[y * width + x] = hatch[(x + y + top) % pitch < stroke ? 1 : 0];
  }
}

/** @param {CanvasRenderingContext2D} context @param {Scene} scene @param {Throughput} strip @param {number} top @param {number} height */
function paintStrip(context, scene, strip, top, height) {
  const { map, width, colours } = scene;
  const speed = strip.step_median_ms.map((ms) => (ms ? 1000 / ms : null));
  const before = strip.before_ms ? 1000 / strip.before_ms : null;
  const current = strip.now_ms ? 1000 / strip.now_ms : null;
  const changed = before && current && Math.abs(current / before - 1) >= LEAST_CHANGE && strip.onset_step;
  const most = Math.max(...speed.map((value) => value ?? 0), before ?? 0) * 1.12;
  if (!(most > 0)) return;
  const yOf = (/** @type {number} */ value) => top + height - (value / most) * (height - 6);
  context.strokeStyle = colours.line;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, top + height - 0.5);
  context.lineTo(width, top + height - 0.5);
  context.stroke();
  // The band of slowest and fastest step is drawn behind the median line.
  context.fillStyle = colours.line;
  for (let i = 0; i < strip.step.length; i += 1) {
    const [slow, fast] = [strip.step_max_ms[i], strip.step_min_ms[i]];
    if (!slow || !fast) continue;
    const y = yOf(Math.min(most, 1000 / fast));
    context.fillRect(
      xOf(map, strip.step[i], width),
      y,
      Math.max(1, (strip.bin / (map.step_hi - map.step_lo + 1)) * width),
      Math.max(1, yOf(1000 / slow) - y),
    );
  }
  context.save();
  context.globalAlpha = 0.1;
  context.fillStyle = colours.fg2;
  for (let i = 0; i < speed.length; i += 1) {
    const value = speed[i];
    if (value !== null)
      context.fillRect(
        xOf(map, strip.step[i], width),
        yOf(value),
        xOf(map, strip.step[i] + strip.bin, width) - xOf(map, strip.step[i], width),
        top + height - yOf(value),
      );
  }
  context.restore();
  context.strokeStyle = colours.fg2;
  context.lineWidth = 1.25;
  context.beginPath();
  let pen = false;
  for (let i = 0; i < speed.length; i += 1) {
    const value = speed[i];
    if (value === null) pen = false;
    else {
      const y = yOf(value);
      if (pen) context.lineTo(xOf(map, strip.step[i], width), y);
      else context.moveTo(xOf(map, strip.step[i], width), y);
      context.lineTo(xOf(map, strip.step[i] + strip.bin, width), y);
      pen = true;
    }
  }
  context.stroke();
  if (before && changed) {
    context.strokeStyle = colours.fg3;
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(0, Math.round(yOf(before)) + 0.5);
    context.lineTo(width, Math.round(yOf(before)) + 0.5);
    context.stroke();
    context.setLineDash([]);
  }
  if (current) {
    context.font = `11px ${colours.font}`;
    context.textAlign = 'right';
    if (before && changed) label(context, colours, `before ${figure(before)}`, width - 4, yOf(before) - 4, colours.fg3);
    const end = speed.filter(
      (value, i) => value !== null && Math.abs(xOf(map, strip.step[i] + strip.bin, width) - width + 45) <= 45,
    );
    const text = `${changed ? 'newest' : 'typical'} ${figure(current)}`;
    const isRoomBelow = top + height - yOf(Math.min(current, .../** @type {number[]} */ (end))) > 17;
    const above = yOf(Math.max(current, .../** @type {number[]} */ (end))) - 5;
    label(context, colours, text, width - 4, isRoomBelow ? top + height - 4 : Math.max(top + 10, above), colours.fg);
  }
}

/** Text that stays readable over a line. @param {CanvasRenderingContext2D} context @param {Record<string, string>} colours @param {string} text @param {number} x @param {number} y @param {string} colour */
function label(context, colours, text, x, y, colour) {
  context.lineWidth = 3;
  context.lineJoin = 'round';
  context.strokeStyle = colours.surface;
  context.strokeText(text, x, y);
  context.fillStyle = colour;
  context.fillText(text, x, y);
}

/** @param {CanvasRenderingContext2D} context @param {Scene} scene */
function paintMarks(context, scene) {
  const { map, plan, width, colours, strip } = scene;
  const inView = map.marks.filter((mark) => mark.step >= map.step_lo && mark.step <= map.step_hi);
  for (const mark of inView) {
    const x = Math.round(xOf(map, mark.step, width)) + 0.5;
    const full = mark.kind === 'onset' || mark.kind === 'attempt';
    context.strokeStyle = mark.kind === 'onset' ? colours.mark : colours.fg3;
    context.lineWidth = mark.kind === 'onset' ? 1.5 : 1;
    context.setLineDash(mark.kind === 'attempt' ? [2, 2] : []);
    context.beginPath();
    context.moveTo(x, full ? 0 : plan.bottom);
    context.lineTo(x, plan.bottom + (full ? 0 : 5));
    context.stroke();
  }
  context.setLineDash([]);
  const onset = inView.find((mark) => mark.kind === 'onset');
  const stripBand = plan.bands.find((band) => band.kind === 'strip');
  if (!onset || !stripBand || !strip) return;
  const { before_ms: before, now_ms: current } = strip;
  const text =
    before && current && Math.abs(before / current - 1) >= LEAST_CHANGE
      ? `${percent(before / current - 1)} at step ${count(onset.step)}`
      : `step ${count(onset.step)}`;
  const x = xOf(map, onset.step, width);
  context.font = `600 11px ${colours.font}`;
  const long = context.measureText(text).width;
  // The corner at the right is where the newest throughput stands.
  const isFree = x + 6 + long < width - NEWEST_PIXELS;
  const right = isFree || x - 6 - long < 0;
  context.textAlign = right ? 'left' : 'right';
  const y = stripBand.y + stripBand.height - (right && !isFree ? 21 : 8);
  label(context, colours, text, right ? x + 6 : x - 6, y, colours.mark);
}

/** @param {CanvasRenderingContext2D} context @param {Scene} scene */
function paintAxis(context, scene) {
  const { map, plan, width, colours } = scene;
  const y = plan.bottom + 15;
  const onset = map.marks.find((mark) => mark.kind === 'onset' && mark.step >= map.step_lo && mark.step <= map.step_hi);
  const onsetX = onset ? xOf(map, onset.step, width) : null;
  context.textAlign = 'center';
  context.font = `11px ${colours.font}`;
  context.fillStyle = colours.fg3;
  context.strokeStyle = colours.line2;
  context.lineWidth = 1;
  const steps = [...new Set([map.step_lo, ...ticks(map.step_lo, map.step_hi, width / 130)])];
  let lastEnd = -Infinity;
  for (const step of steps) {
    const x = xOf(map, step, width);
    const text = step === map.step_lo ? `step ${count(step)}` : count(step);
    const half = context.measureText(text).width / 2;
    const centre = Math.max(half, Math.min(width - half, x));
    if (centre - half < lastEnd + 12 || (onsetX !== null && Math.abs(centre - onsetX) < half + 44)) continue;
    lastEnd = centre + half;
    context.fillText(text, centre, y);
    context.beginPath();
    context.moveTo(Math.round(x) + 0.5, plan.bottom);
    context.lineTo(Math.round(x) + 0.5, plan.bottom + 4);
    context.stroke();
    const time = timeAt(map, step);
    if (time !== null)
      context.fillText(
        timeOfDay(time).slice(0, clockDigits(map)),
        Math.max(24, Math.min(width - 24, x)),
        plan.bottom + AXIS_HEIGHT - 6,
      );
  }
  if (onset && onsetX !== null) {
    context.font = `600 11px ${colours.font}`;
    context.fillStyle = colours.fg;
    const text = `${count(onset.step)} onset`;
    const half = context.measureText(text).width / 2;
    const x = Math.max(half, Math.min(width - half, onsetX));
    context.fillText(text, x, y);
    const time = timeAt(map, onset.step);
    context.font = `11px ${colours.font}`;
    if (time !== null) context.fillText(timeOfDay(time).slice(0, clockDigits(map)), x, plan.bottom + AXIS_HEIGHT - 6);
  }
}

/** Seconds only where the view is short. @param {RankMap} map */
function clockDigits(map) {
  const known = map.time_ms.filter((time) => time !== null);
  return known.length > 1 &&
    /** @type {number} */ (known[known.length - 1]) - /** @type {number} */ (known[0]) > 3_600_000
    ? 5
    : 8;
}

/** Wall time of a step's column. @param {RankMap} map @param {number} step */
export function timeAt(map, step) {
  return map.time_ms[Math.floor((step - map.step_lo) / map.bin)] ?? null;
}
