/** The arithmetic of a step's timeline: columns, what of them is seen, pixels, ticks. Pure. */

/** @typedef {import('../../types/api.js').StepTimeline} StepTimeline */
/** Microseconds since the step began. @typedef {[number, number]} View */
/**
 * Slices by lane and time; those of lane n are from `first[n]` to `first[n + 1]`. `until` is the latest
 * end of a slice and those before it in its lane.
 * @typedef {{count: number, first: Uint32Array, kind: Uint8Array, begin: Float64Array, end: Float64Array, until: Float64Array, call: Int32Array, microbatch: Int32Array}} Columns
 */
/** @typedef {{lane: number, top: number, height: number, flights: number}} Row */
/** @typedef {{rows: Row[], top: number, bottom: number, height: number, pitch: number}} Plan */

export const NOTHING = 255;
export const PATH_HEIGHT = 14;
/** The least size of what is pressed. */
export const TARGET = 24;
const AXIS_HEIGHT = 24;
const LEAST_VIEW = 20; // microseconds
/** Of slices below a pixel the one shows that is most likely wrong. */
const WORST = ['waiting', 'bubble', 'blocked', 'data', 'communication', 'unknown', 'checkpoint', 'evaluation'];

/** How a kind of slice looks on every page, and what it is called. @type {Record<string, [string, string]>} */
export const LOOKS = {
  data: ['data', 'Data wait'],
  forward: ['fwd', 'Forward'],
  backward: ['bwd', 'Backward'],
  communication: ['comm', 'Exposed communication'],
  waiting: ['wait', 'Waiting for the last rank'],
  bubble: ['wait', 'Pipeline bubble: waiting for another stage'],
  blocked: ['wait', 'Blocked on peers, on whom is not known'],
  optimizer: ['opt', 'Optimizer'],
  checkpoint: ['opt', 'Checkpoint'],
  evaluation: ['opt', 'Evaluation'],
  other: ['other', 'Other'],
  work: ['fwd', 'Self time, in which phase is not known'],
  unknown: ['', 'Not measured'],
};

/** @param {{lane: number[], begin_us: number[], end_us: number[], call: number[], kind?: number[], microbatch?: number[]}} from @param {number} lanes @returns {Columns} */
export function columnsOf(from, lanes) {
  const count = from.lane.length;
  const first = new Uint32Array(lanes + 1);
  for (const lane of from.lane) first[lane + 1] += 1;
  for (let lane = 0; lane < lanes; lane += 1) first[lane + 1] += first[lane];
  const end = Float64Array.from(from.end_us);
  const until = new Float64Array(count);
  for (let lane = 0; lane < lanes; lane += 1) {
    let latest = -Infinity;
    for (let i = first[lane]; i < first[lane + 1]; i += 1) {
      latest = Math.max(latest, end[i]);
      until[i] = latest;
    }
  }
  return {
    count,
    first,
    kind: from.kind ? Uint8Array.from(from.kind) : new Uint8Array(count),
    begin: Float64Array.from(from.begin_us),
    end,
    until,
    call: Int32Array.from(from.call),
    microbatch: from.microbatch ? Int32Array.from(from.microbatch) : new Int32Array(count).fill(-1),
  };
}

/** For each kind, how likely it is what is wrong: what is drawn over what below a pixel. Of nothing it is 0. @param {string[]} kinds */
export function severities(kinds) {
  const found = new Uint8Array(NOTHING + 1);
  kinds.forEach((kind, i) => {
    found[i] = WORST.includes(kind) ? WORST.length + 1 - WORST.indexOf(kind) : 1;
  });
  return found;
}

/** The first slice of a lane that has not ended at a time. @param {Columns} columns @param {number} lane @param {number} time */
export function firstAfter(columns, lane, time) {
  let low = columns.first[lane];
  let high = columns.first[lane + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (columns.until[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** The slice of a lane under a time, or the nearest within a reach; -1 for none.
 * @param {Columns} columns @param {number} lane @param {number} time @param {number} reach */
export function sliceAt(columns, lane, time, reach) {
  let best = -1;
  let least = reach;
  for (
    let i = Math.max(columns.first[lane], firstAfter(columns, lane, time - reach));
    i < columns.first[lane + 1];
    i += 1
  ) {
    if (columns.begin[i] > time + reach) break;
    const away = Math.max(columns.begin[i] - time, time - columns.end[i], 0);
    if (away < least || (away === 0 && best < 0)) {
      best = i;
      least = away;
    }
    if (away === 0) break;
  }
  return best;
}

/**
 * One lane as one kind a pixel. Slices of a pixel and more are drawn as long as they are; of those
 * below, the worst of the pixel shows. `wide` gets the places of slices with room for a text.
 * @param {Columns} columns @param {number} lane @param {View} view @param {Uint8Array} line
 * @param {Uint8Array} severity by kind @param {number[] | null} wide @param {number} room pixels that a text needs
 * @returns {number} how many slices were looked at
 */
export function rasterise(columns, lane, view, line, severity, wide = null, room = 30) {
  line.fill(NOTHING);
  const width = line.length;
  const [low, high] = view;
  const scale = width / (high - low);
  const { begin, end, kind } = columns;
  const stop = columns.first[lane + 1];
  const start = firstAfter(columns, lane, low);
  let i = start;
  // Up to a hundred thousand times a frame: what is not needed below a pixel is not computed there.
  for (; i < stop && begin[i] < high; i += 1) {
    if (end[i] <= low) continue;
    const x0 = (begin[i] - low) * scale;
    const x1 = (end[i] - low) * scale;
    if (x1 - x0 < 1) {
      const x = x0 > 0 ? x0 | 0 : 0;
      if (severity[kind[i]] > severity[line[x]]) line[x] = kind[i];
      continue;
    }
    let from = x0 <= 0 ? 0 : Math.round(x0);
    const to = x1 >= width ? width : Math.round(x1);
    // A worse one below a pixel, just before, keeps its pixel.
    if (to - from > 1 && severity[line[from]] > severity[kind[i]]) from += 1;
    line.fill(kind[i], from, to);
    if (wide && to - from >= room) wide.push(i);
  }
  return i - start;
}

/** Where each lane stands. @param {number} lanes @returns {Plan} */
export function planOf(lanes) {
  const pitch = lanes <= 12 ? 30 : lanes <= 40 ? TARGET : lanes <= 80 ? 15 : 10;
  const flights = pitch >= TARGET ? 5 : pitch >= 15 ? 3 : 2;
  const gap = pitch >= TARGET ? 5 : pitch >= 15 ? 3 : 2;
  const top = PATH_HEIGHT + 10;
  const rows = Array.from({ length: lanes }, (_, lane) => ({
    lane,
    top: top + lane * pitch,
    height: pitch - gap - flights,
    flights,
  }));
  const bottom = top + lanes * pitch;
  return { rows, top, bottom, height: bottom + AXIS_HEIGHT, pitch };
}

/** The lane at a height; -1 above or below all. @param {Plan} plan @param {number} y */
export function laneAt(plan, y) {
  const lane = Math.floor((y - plan.top) / plan.pitch);
  return lane >= 0 && lane < plan.rows.length ? lane : -1;
}

/** @param {View} view @param {number} length @returns {View} */
export function clampView(view, length) {
  const whole = Math.max(length, LEAST_VIEW);
  const wide = Math.min(whole, Math.max(LEAST_VIEW, view[1] - view[0]));
  const low = Math.min(Math.max(0, view[0]), whole - wide);
  return [low, low + wide];
}

/** Shorter by a factor below 1, around a time that keeps its place. @param {View} view @param {number} centre @param {number} factor @param {number} length @returns {View} */
export function zoomView(view, centre, factor, length) {
  const wide = Math.min(Math.max(length, LEAST_VIEW), Math.max(LEAST_VIEW, (view[1] - view[0]) * factor));
  const share = (centre - view[0]) / (view[1] - view[0]);
  const low = centre - share * wide;
  return clampView([low, low + wide], length);
}

/** Moved by a share of its length. @param {View} view @param {number} share @param {number} length @returns {View} */
export function panView(view, share, length) {
  const by = (view[1] - view[0]) * share;
  return clampView([view[0] + by, view[1] + by], length);
}

/** "1200-5400" as a view of the step; the whole where it is none. @param {string | undefined} text @param {number} length @returns {View} */
export function readView(text, length) {
  const found = /^(\d+)-(\d+)$/.exec(text ?? '');
  const [low, high] = found ? [Number(found[1]), Number(found[2])] : [0, length];
  return high - low >= 1 ? clampView([low, high], length) : clampView([0, length], length);
}

/** A view as a URL has it; null for the whole step. @param {View} view @param {number} length */
export function writeView(view, length) {
  const [low, high] = [Math.floor(view[0]), Math.ceil(view[1])];
  return low <= 0 && high >= length ? null : `${low}-${high}`;
}

/** "5:1200" as a rank and a time. @param {string | undefined} text @returns {{rank: number, time: number} | null} */
export function readSpot(text) {
  const found = /^(\d+):(\d+)$/.exec(text ?? '');
  return found ? { rank: Number(found[1]), time: Number(found[2]) } : null;
}

/** Round times for an axis, in microseconds, at most `most`. @param {View} view @param {number} most */
export function timeTicks(view, most) {
  const rough = (view[1] - view[0]) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  const unit = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? 10 * power;
  const list = [];
  for (let at = Math.ceil(view[0] / unit) * unit; at <= view[1]; at += unit) list.push(at);
  return { list, unit };
}

/** To make one takes longer than all ticks of a frame. @type {Map<number, Intl.NumberFormat>} */
const FORMATS = new Map();

/** A time of the axis: as many digits as distinguish two ticks. @param {number} time @param {number} unit microseconds */
export function tickText(time, unit) {
  if (time === 0) return '0';
  if (unit < 1000 && time < 1000) return `${time} µs`;
  const [size, name] = unit >= 1e6 ? [1e6, 's'] : [1000, 'ms'];
  const digits = Math.max(0, Math.ceil(Math.log10(size / unit)));
  const format =
    FORMATS.get(digits) ??
    new Intl.NumberFormat('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits });
  FORMATS.set(digits, format);
  return `${format.format(time / size)} ${name}`;
}

/** The flights of each call: those of call n are `list` from `first[n]` to `first[n + 1]`.
 * @param {Columns} flights @param {number} calls */
export function flightsByCall(flights, calls) {
  const first = new Uint32Array(calls + 1);
  for (const call of flights.call) if (call >= 0) first[call + 1] += 1;
  for (let call = 0; call < calls; call += 1) first[call + 1] += first[call];
  const list = new Uint32Array(first[calls]);
  const at = first.slice();
  for (let i = 0; i < flights.count; i += 1) {
    if (flights.call[i] < 0) continue;
    list[at[flights.call[i]]] = i;
    at[flights.call[i]] += 1;
  }
  return { first, list };
}

/** The lane that a slice or flight is in. @param {Columns} columns @param {number} i */
export function laneOf(columns, i) {
  let low = 0;
  let high = columns.first.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (columns.first[middle] <= i) low = middle;
    else high = middle;
  }
  return low;
}

/**
 * Arrows of one operation: from the send to its receive, or from the last to come to the others.
 * @param {{source: number | null, target: number | null, last_rank: number | null}} call
 * @param {number[]} members its flights @param {Columns} flights @param {number[]} ranks by lane
 * @returns {{from: number, to: number, at: number, until: number}[]} lanes and times
 */
export function arrowsOf(call, members, flights, ranks) {
  const laneOfRank = (/** @type {number | null} */ rank) =>
    members.find((flight) => ranks[laneOf(flights, flight)] === rank);
  const source = laneOfRank(call.source ?? call.last_rank);
  if (source === undefined) return [];
  const from = laneOf(flights, source);
  const at = flights.begin[source];
  const targets = call.source === null ? members : members.filter((one) => ranks[laneOf(flights, one)] === call.target);
  return targets
    .filter((one) => one !== source)
    .map((one) => ({
      from,
      to: laneOf(flights, one),
      at,
      until: call.source === null ? Math.max(at, flights.begin[one]) : Math.max(at, flights.end[one]),
    }));
}
