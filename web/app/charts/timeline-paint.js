/** Draws a step's timeline: each lane as one line of pixels that the canvas stretches; no element per slice. */

import { duration } from '../format.js';
import { tokens } from './paint.js';
import { HATCH, pack } from './scene.js';
import { arrowsOf, LOOKS, NOTHING, PATH_HEIGHT, rasterise, tickText, timeTicks } from './timeline-maths.js';

/** @typedef {import('../../types/api.js').StepTimeline} StepTimeline */
/** @typedef {import('./timeline-maths.js').Columns} Columns */
/** @typedef {import('./timeline-maths.js').Plan} Plan */
/** @typedef {import('./timeline-maths.js').View} View */
/** @typedef {{data: StepTimeline, slices: Columns, flights: Columns, byCall: {first: Uint32Array, list: Uint32Array}, ranks: number[], severity: Uint8Array}} Model */
/** @typedef {{model: Model, plan: Plan, view: View, width: number, theme: 'light' | 'dark', colours: Record<string, string>, pinned: number, lane: number}} Scene */

const NAMES = ['fg', 'fg2', 'fg3', 'line', 'line2', 'accent', 'mark', 'surface', 'crit-line'];
const PARTS = ['data', 'fwd', 'bwd', 'comm', 'wait', 'opt', 'other'];
const DARK_TEXT = new Set(['data', 'wait', 'opt']);
const MOST_ARROWS = 400;
const MOST_TEXTS = 600;
const LEAST_PATH = 0.75; // pixels
const TICK_PIXELS = 6.2; // of a digit of the axis at most: to measure each text takes as long as to draw it

/** The colours of this theme. @param {HTMLElement} within */
export function timelineColours(within) {
  return tokens(within, [...NAMES, ...PARTS.map((part) => `t-${part}`)]);
}

/** "rgb(1, 2, 3)" as the canvas packs it. @param {string} colour */
function packed(colour) {
  const parts = (colour.match(/[\d.]+/g) ?? ['0', '0', '0']).map(Number);
  return pack([parts[0], parts[1], parts[2]]);
}

/** Two lines of pixels for each lane: its slices, and below those of all lanes what is in flight. `lines` has their
 * kinds. Kept, as a new one in each frame is a third of the work.
 * @typedef {{canvas: OffscreenCanvas, context: OffscreenCanvasRenderingContext2D, image: ImageData, pixels: Uint32Array, kinds: Uint8Array, lines: Uint8Array[]}} Strip */
/** @type {Strip | null} */
let kept = null;

/** @param {number} wide @param {number} lanes @returns {Strip} */
function stripOf(wide, lanes) {
  if (kept?.canvas.width === wide && kept.canvas.height === 2 * lanes) return kept;
  const canvas = new OffscreenCanvas(wide, 2 * lanes);
  const context = /** @type {OffscreenCanvasRenderingContext2D} */ (canvas.getContext('2d', { alpha: false }));
  const image = context.createImageData(wide, 2 * lanes);
  const kinds = new Uint8Array(wide * 2 * lanes);
  const lines = Array.from({ length: 2 * lanes }, (_, at) => kinds.subarray(at * wide, (at + 1) * wide));
  kept = { canvas, context, image, pixels: new Uint32Array(image.data.buffer), kinds, lines };
  return kept;
}

/** Draw everything. Returns how many slices were looked at. @param {HTMLCanvasElement} canvas @param {Scene} scene */
export function paintTimeline(canvas, scene) {
  const ratio = devicePixelRatio || 1;
  const { width, plan } = scene;
  // Opaque: what is blended with nothing takes twice as long to put on the screen.
  const context = canvas.getContext('2d', { alpha: false });
  if (!context || width < 1) return 0;
  const [wide, high] = [Math.round(width * ratio), Math.round(plan.height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
  }
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = scene.colours.surface;
  context.fillRect(0, 0, wide, high);
  /** @type {number[]} */
  const texts = [];
  const seen = paintLanes(context, scene, wide, ratio, texts);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  paintGaps(context, scene);
  paintTexts(context, scene, texts);
  paintPath(context, scene);
  paintArrows(context, scene);
  paintAxis(context, scene);
  return seen;
}

/** @param {CanvasRenderingContext2D} context @param {Scene} scene @param {number} wide @param {number} ratio @param {number[]} texts */
function paintLanes(context, { model, plan, view, colours }, wide, ratio, texts) {
  const { slices, flights, data } = model;
  const lanes = plan.rows.length;
  if (lanes === 0) return 0;
  const { canvas: strip, context: off, image, pixels, kinds, lines } = stripOf(wide, lanes);
  const table = new Uint32Array(256).fill(packed(colours.surface));
  data.kinds.forEach((kind, i) => {
    if (LOOKS[kind]?.[0]) table[i] = packed(colours[`t-${LOOKS[kind][0]}`]);
  });
  const inFlight = new Uint32Array(256).fill(packed(colours['t-comm']));
  inFlight[NOTHING] = table[NOTHING];
  const room = 26 * ratio;
  let seen = 0;
  for (const row of plan.rows) {
    const wideOnes = row.height >= 12 && texts.length < MOST_TEXTS ? texts : null;
    seen += rasterise(slices, row.lane, view, lines[row.lane], model.severity, wideOnes, room);
    seen += rasterise(flights, row.lane, view, lines[lanes + row.lane], model.severity);
  }
  const half = lanes * wide;
  for (let at = 0; at < half; at += 1) pixels[at] = table[kinds[at]];
  for (let at = half; at < 2 * half; at += 1) pixels[at] = inFlight[kinds[at]];
  off.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  for (const row of plan.rows) {
    const [top, middle, bottom] = [row.top, row.top + row.height, row.top + row.height + row.flights].map((y) =>
      Math.round(y * ratio),
    );
    context.drawImage(strip, 0, row.lane, wide, 1, 0, top, wide, middle - top);
    context.drawImage(strip, 0, lanes + row.lane, wide, 1, 0, middle + 1, wide, Math.max(1, bottom - middle - 1));
  }
  return seen;
}

/** Hatch where nothing is known, a line on which each lane stands, and edges between slices.
 * @param {CanvasRenderingContext2D} context @param {Scene} scene */
function paintGaps(context, { model, plan, view, width, theme, colours, lane }) {
  const { data, slices } = model;
  const scale = width / (view[1] - view[0]);
  const unknown = data.kinds.indexOf('unknown');
  context.lineWidth = 1;
  for (const row of plan.rows) {
    if (data.lanes[row.lane].state === 'no data') hatch(context, theme, 0, row.top, width, row.height);
    for (
      let i = slices.first[row.lane];
      i < slices.first[row.lane + 1] && data.lanes[row.lane].state === 'not measured';
      i += 1
    ) {
      if (slices.kind[i] !== unknown) continue;
      const left = Math.max(0, (slices.begin[i] - view[0]) * scale);
      hatch(context, theme, left, row.top, Math.min(width, (slices.end[i] - view[0]) * scale) - left, row.height);
    }
    context.fillStyle = row.lane === lane ? colours.accent : colours.line;
    context.fillRect(0, row.top + row.height + row.flights + 0.5, width, 1);
  }
}

/** @param {CanvasRenderingContext2D} context @param {'light' | 'dark'} theme @param {number} x @param {number} y @param {number} width @param {number} height */
function hatch(context, theme, x, y, width, height) {
  if (width <= 0) return;
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.fillStyle = HATCH[theme].base;
  context.fillRect(x, y, width, height);
  context.strokeStyle = HATCH[theme].line;
  context.lineWidth = 1.5;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 6) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

/** The text of a slice: a microbatch, or how long it is. @param {CanvasRenderingContext2D} context @param {Scene} scene @param {number[]} texts */
function paintTexts(context, { model, plan, view, width, colours, theme }, texts) {
  const { slices, data } = model;
  const scale = width / (view[1] - view[0]);
  context.textAlign = 'left';
  context.textBaseline = 'middle';
  context.font = `11px ${colours.font}`;
  let lane = 0;
  for (const i of texts) {
    while (slices.first[lane + 1] <= i) lane += 1;
    const row = plan.rows[lane];
    const kind = data.kinds[slices.kind[i]];
    const look = LOOKS[kind]?.[0] ?? '';
    if (!look) continue;
    const left = Math.max(0, (slices.begin[i] - view[0]) * scale);
    const right = Math.min(width, (slices.end[i] - view[0]) * scale);
    // An edge, so that two of a kind are two.
    context.fillStyle = colours.surface;
    context.fillRect(Math.round(right) - 0.5, row.top, 1, row.height);
    const long = duration((slices.end[i] - slices.begin[i]) / 1000);
    const name = slices.microbatch[i] >= 0 ? String(slices.microbatch[i] + 1) : '';
    const whole = name ? `${name}  ${long}` : long;
    const fits = (/** @type {string} */ text) => text !== '' && right - left > 6.2 * text.length + 6;
    const text = fits(whole) ? whole : fits(name) ? name : '';
    if (!text) continue;
    const light = look === 'other' || look === 'comm' ? theme === 'dark' : !DARK_TEXT.has(look);
    context.fillStyle = look === 'comm' ? (light ? '#0c0f13' : '#fff') : light ? '#fff' : '#0c0f13';
    context.fillText(text, left + 4, row.top + row.height / 2 + 0.5);
  }
  context.textBaseline = 'alphabetic';
}

/** The critical path: a band of its own, and a line along the lanes that it leads through.
 * @param {CanvasRenderingContext2D} context @param {Scene} scene */
function paintPath(context, { model, plan, view, width, colours }) {
  const { data, ranks } = model;
  const scale = width / (view[1] - view[0]);
  const laneOf = new Map(ranks.map((rank, lane) => [rank, lane]));
  context.font = `600 11px ${colours.font}`;
  context.textBaseline = 'middle';
  let before = { lane: -1, x: 0 };
  let last = -Infinity;
  for (const part of data.path) {
    const left = Math.max(0, (part.begin_us - view[0]) * scale);
    const right = Math.min(width, (part.end_us - view[0]) * scale);
    if (right < 0 || left > width || right <= left) {
      before = { lane: laneOf.get(part.rank) ?? -1, x: right };
      continue;
    }
    if (right - Math.max(left, last) < LEAST_PATH) continue; // what is before and after it shows
    context.fillStyle = part.call >= 0 ? colours['t-comm'] : colours.fg2;
    context.globalAlpha = part.is_sure ? 1 : 0.55;
    const from = Math.max(left, last);
    context.fillRect(from, 2, Math.max(1, right - from - (right - from > 3 ? 1 : 0)), PATH_HEIGHT - 2);
    last = right;
    context.globalAlpha = 1;
    const text = `rank ${part.rank}`;
    if (part.call < 0 && right - left > 6.6 * text.length + 8) {
      context.fillStyle = colours.surface;
      context.textAlign = 'left';
      context.fillText(text, left + 4, 2 + (PATH_HEIGHT - 2) / 2 + 0.5);
    }
    const lane = laneOf.get(part.rank) ?? -1;
    const row = plan.rows[lane];
    if (!row) {
      before = { lane: -1, x: right };
      continue;
    }
    context.fillStyle = colours.fg;
    context.fillRect(left, row.top - 2, right - left, 2);
    if (before.lane >= 0 && before.lane !== lane) {
      const other = plan.rows[before.lane];
      const [high, low] = other.top < row.top ? [other.top - 2, row.top] : [row.top - 2, other.top];
      if (!part.is_sure) context.globalAlpha = 0.5;
      context.fillRect(Math.round(left) - 0.75, high, 1.5, low - high);
      context.globalAlpha = 1;
    }
    before = { lane, x: right };
  }
  context.textBaseline = 'alphabetic';
}

/** Arrows of exchanges that are in view, and of the operation that is pinned.
 * @param {CanvasRenderingContext2D} context @param {Scene} scene */
function paintArrows(context, { model, plan, view, width, colours, pinned }) {
  const { data, flights, byCall, ranks } = model;
  const scale = width / (view[1] - view[0]);
  let drawn = 0;
  for (let call = 0; call < data.calls.length; call += 1) {
    const is = data.calls[call];
    if (call !== pinned && (is.source === null || plan.rows.length > 40 || drawn > MOST_ARROWS)) continue;
    const members = Array.from(byCall.list.subarray(byCall.first[call], byCall.first[call + 1]));
    if (members.length < 2) continue;
    for (const arrow of arrowsOf(is, members, flights, ranks)) {
      const [x0, x1] = [arrow.at, arrow.until].map((time) => (time - view[0]) * scale);
      if (x1 < 0 || x0 > width) continue;
      drawn += 1;
      const [a, b] = [plan.rows[arrow.from], plan.rows[arrow.to]];
      const down = b.top > a.top;
      const y0 = a.top + (down ? a.height : 0);
      const y1 = b.top + (down ? 0 : b.height);
      context.strokeStyle = call === pinned ? colours.accent : colours.fg3;
      context.fillStyle = context.strokeStyle;
      context.lineWidth = call === pinned ? 2 : 1;
      context.beginPath();
      context.moveTo(x0, y0);
      context.lineTo(x1, y1);
      context.stroke();
      head(context, x0, y0, x1, y1);
    }
  }
}

/** @param {CanvasRenderingContext2D} context @param {number} x0 @param {number} y0 @param {number} x1 @param {number} y1 */
function head(context, x0, y0, x1, y1) {
  const angle = Math.atan2(y1 - y0, x1 - x0);
  context.beginPath();
  context.moveTo(x1, y1);
  for (const turn of [0.45, -0.45]) context.lineTo(x1 - 6 * Math.cos(angle + turn), y1 - 6 * Math.sin(angle + turn));
  context.fill();
}

/** @param {CanvasRenderingContext2D} context @param {Scene} scene */
function paintAxis(context, { plan, view, width, colours }) {
  const { list, unit } = timeTicks(view, width / 110);
  context.font = `11px ${colours.font}`;
  context.textAlign = 'center';
  context.fillStyle = colours.fg3;
  context.strokeStyle = colours.line2;
  context.lineWidth = 1;
  let end = -Infinity;
  for (const time of list) {
    const x = ((time - view[0]) / (view[1] - view[0])) * width;
    const text = tickText(time, unit);
    const half = (TICK_PIXELS * text.length) / 2;
    const centre = Math.max(half, Math.min(width - half, x));
    context.beginPath();
    context.moveTo(Math.round(x) + 0.5, plan.bottom);
    context.lineTo(Math.round(x) + 0.5, plan.bottom + 4);
    context.stroke();
    if (centre - half < end + 10) continue;
    end = centre + half;
    context.fillText(text, centre, plan.bottom + 16);
  }
}
