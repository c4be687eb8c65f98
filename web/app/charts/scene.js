/** The arithmetic of the map: bytes to deviations, deviations to colours, pixels to steps. Pure. */

import { deviation } from '../format.js';

/** @typedef {import('../../types/api.js').Map} RankMap */
/** @typedef {'light' | 'dark'} Theme */
/** @typedef {[number, number, number]} Rgb */

export const MISSING = 255;
const NEUTRAL = 127;
/** Within 8 % of the peers a cell is flat: the least entry level of the straggler detector. */
const DEAD_BAND = 0.08;
/** On the noisiest machine a rank that takes twice as long has colour. */
const MOST_USUAL = 1.9;
/** Half of so many columns in a row decide, too: their noise is a third of that of one cell. */
const STRETCH = 16;
const STRETCH_SHARE = 1.25 / Math.sqrt(STRETCH);
/** Ratios between which there is no colour. @typedef {readonly [number, number]} Usual */
/** For a cell, and for most of a stretch. @typedef {{cell: Usual, stretch: Usual}} Bands */

/** Deviation from the peers' median -> colour. Slow is the loud end; fast never gets as dark
 *  (light theme) or as bright (dark theme), so the sign can be read without hue.
 * @type {Record<Theme, [number, string][]>} */
const DIVERGING = {
  light: [
    [-0.5, '#6ea8de'],
    [-0.25, '#9cc4e8'],
    [-0.1, '#d3e4f3'],
    [-0.08, '#f0f2f5'],
    [0.08, '#f0f2f5'],
    [0.1, '#fbd9ab'],
    [0.25, '#f7aa54'],
    [0.5, '#d95f02'],
    [1, '#7a1e04'],
  ],
  dark: [
    [-0.5, '#2f74cf'],
    [-0.25, '#2a5590'],
    [-0.1, '#223a5a'],
    [-0.08, '#1c2128'],
    [0.08, '#1c2128'],
    [0.1, '#5c3f22'],
    [0.25, '#a8601c'],
    [0.5, '#eb8c24'],
    [1, '#ffe296'],
  ],
};

/** Durations: one hue, more is always more visible. @type {Record<Theme, [number, string][]>} */
const SEQUENTIAL = {
  light: [
    [0, '#eef2f7'],
    [0.5, '#6c9bd1'],
    [1, '#103a75'],
  ],
  dark: [
    [0, '#1a222d'],
    [0.5, '#2f6bb3'],
    [1, '#cfe3ff'],
  ],
};

/** @type {Record<Theme, {base: string, line: string}>} */
export const HATCH = { light: { base: '#e8eaee', line: '#b4bac3' }, dark: { base: '#171b20', line: '#4a525e' } };

/** Base64 as bytes. @param {string} text */
export function decodeBytes(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** A ratio as a byte that is not rounded. @param {number} ratio */
function levelOf(ratio) {
  return NEUTRAL + 127 * Math.log2(ratio);
}

/** A byte as a ratio to the peers' median; null where there is no data. @param {number} level */
export function ratioOf(level) {
  return level === MISSING ? null : 2 ** ((level - NEUTRAL) / 127);
}

/** What is usual in this picture: its cells vary so much anyway. @param {RankMap} map @returns {Bands} */
export function usualOf(map) {
  const { ratio, lo, hi } = map.usual ?? { ratio: 1, lo: 1, hi: 1 };
  const around = (/** @type {number} */ share) =>
    /** @type {Usual} */ ([
      Math.max(1 / MOST_USUAL, Math.min(1 / (1 + DEAD_BAND), ratio * (lo / ratio) ** share)),
      Math.min(MOST_USUAL, Math.max(1 + DEAD_BAND, ratio * (hi / ratio) ** share)),
    ]);
  return { cell: around(1), stretch: around(STRETCH_SHARE) };
}

/** Between which deviations a cell is as usual, in words. @param {RankMap} map */
export function usualWords(map) {
  return usualOf(map).cell.map(deviation).join(' to ');
}

/** How many robust standard deviations of the noise of single steps a ratio is from its middle; null where the noise is not known. @param {RankMap} map @param {number | null} ratio */
export function robustZ({ noise }, ratio) {
  return noise?.sigma && ratio !== null && ratio > 0 ? Math.log2(ratio / noise.ratio) / noise.sigma : null;
}

/** "robust z 6.2"; nothing where it is not known. @param {number | null} z */
export function zWords(z) {
  return z === null ? '' : `robust\u00a0z\u00a0${zText(z)}`;
}

/** @param {number | null} z */
export function zText(z) {
  if (z === null) return '–';
  return Math.abs(z) < 9.95 ? (Math.round(z * 10) / 10 || 0).toFixed(1) : String(Math.round(z));
}

/** Whether a level is no more than usual. @param {number} level @param {Usual} usual */
export function isNeutral(level, usual) {
  const ratio = ratioOf(level);
  return ratio !== null && ratio >= usual[0] && ratio <= usual[1];
}

/**
 * Which columns of a lane are in a stretch of which most cells are off to one side: a rank that is a
 * little slow all the time, where one cell would say nothing.
 * @param {Uint8Array} cells @param {Usual} usual of a stretch @returns {Uint8Array} 1 or 0
 */
export function stretches(cells, usual) {
  const [low, high] = usual.map(levelOf);
  const found = new Uint8Array(cells.length);
  for (let first = 0; first < cells.length; first += STRETCH) {
    const end = Math.min(cells.length, first + STRETCH);
    let [known, slow, fast] = [0, 0, 0];
    for (let c = first; c < end; c += 1) {
      if (cells[c] === MISSING) continue;
      known += 1;
      if (cells[c] > high) slow += 1;
      else if (cells[c] < low) fast += 1;
    }
    if (known >= STRETCH / 2 && 2 * Math.max(slow, fast) > known) found.fill(1, first, end);
  }
  return found;
}

/** @param {string} hex @returns {Rgb} */
export function rgb(hex) {
  const value = Number.parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

/** Colour between stops, linear. @param {[number, string][]} stops @param {number} at @returns {Rgb} */
function between(stops, at) {
  if (at <= stops[0][0]) return rgb(stops[0][1]);
  for (let i = 1; i < stops.length; i += 1) {
    const [high, colour] = stops[i];
    if (at > high) continue;
    const [low, before] = stops[i - 1];
    const share = (at - low) / (high - low);
    const [a, b] = [rgb(before), rgb(colour)];
    return /** @type {Rgb} */ (a.map((part, k) => Math.round(part + (b[k] - part) * share)));
  }
  return rgb(stops[stops.length - 1][1]);
}

/** Pack for an ImageData seen as 32-bit numbers (little-endian). @param {Rgb} colour */
export function pack([r, g, b]) {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

/** What is unusual begins where the usual ends, with the same steps of colour from there on. @param {Theme} theme @param {Usual} usual */
function stopsOf(theme, usual) {
  const [less, more] = [usual[0] - 1 + DEAD_BAND, usual[1] - 1 - DEAD_BAND];
  return DIVERGING[theme].map(
    ([at, colour]) => /** @type {[number, string]} */ ([at + (at > 0 ? more : less), colour]),
  );
}

const LEGEND_STOPS = 24;

/** The colours of a map from the least to the largest ratio that a byte holds, as a gradient of CSS.
 * @param {Theme} theme @param {Usual} usual */
export function gradientOf(theme, usual) {
  const stops = stopsOf(theme, usual);
  const colours = Array.from({ length: LEGEND_STOPS + 1 }, (_, at) =>
    between(stops, 2 ** ((Math.round((at / LEGEND_STOPS) * 254) - NEUTRAL) / 127) - 1),
  );
  return `linear-gradient(90deg, ${colours.map((colour) => `rgb(${colour.join(' ')})`).join(', ')})`;
}

/** One packed colour per byte. @param {Theme} theme @param {'ratio' | 'ms'} unit @param {Usual} usual */
export function palette(theme, unit, usual) {
  const table = new Uint32Array(256);
  const stops = stopsOf(theme, usual);
  for (let level = 0; level < MISSING; level += 1) {
    const colour =
      unit === 'ratio' ? between(stops, 2 ** ((level - NEUTRAL) / 127) - 1) : between(SEQUENTIAL[theme], level / 254);
    table[level] = pack(colour);
  }
  table[MISSING] = pack(rgb(HATCH[theme].base));
  return table;
}

/**
 * Which column is drawn at each pixel. Bins are never finer than pixels, so this only enlarges; the
 * last, ragged bin keeps at least one pixel.
 * @param {{step_lo: number, step_hi: number, bin: number, columns: number}} map
 * @param {number} width pixels
 */
export function pixelColumns(map, width) {
  const steps = map.step_hi - map.step_lo + 1;
  const columns = new Uint32Array(width);
  for (let x = 0; x < width; x += 1) {
    columns[x] = Math.min(map.columns - 1, Math.floor(((x + 0.5) * steps) / width / map.bin));
  }
  if (width > 0) columns[width - 1] = map.columns - 1;
  return columns;
}

/**
 * One lane at pixel width. Where a resize left fewer pixels than columns, the slowest column of the
 * pixel wins until the finer answer arrives.
 * @param {Uint8Array} cells the lane's columns
 * @param {Uint32Array} columns from pixelColumns
 * @returns {Uint8Array}
 */
export function stretch(cells, columns) {
  const line = new Uint8Array(columns.length);
  for (let x = 0; x < columns.length; x += 1) {
    const last = x + 1 < columns.length ? Math.max(columns[x] + 1, columns[x + 1]) : columns[x] + 1;
    let worst = MISSING;
    for (let c = columns[x]; c < last; c += 1) {
      const level = cells[c];
      if (level !== MISSING && (worst === MISSING || level > worst)) worst = level;
    }
    line[x] = worst;
  }
  return line;
}

/**
 * Widen marks to a least width, over neutral neighbours only, never over another mark.
 * @param {Uint8Array} line @param {number} least pixels @param {Usual} usual @returns {Uint8Array}
 */
export function growMarks(line, least, usual) {
  const grown = line.slice();
  for (let x = 0; x < line.length; x += 1) {
    if (line[x] === MISSING || isNeutral(line[x], usual)) continue;
    let end = x + 1;
    while (end < line.length && line[end] !== MISSING && !isNeutral(line[end], usual)) end += 1;
    let width = end - x;
    let right = end;
    while (width < least && right < line.length && isNeutral(line[right], usual)) {
      grown[right] = line[end - 1];
      right += 1;
      width += 1;
    }
    let left = x - 1;
    while (width < least && left >= 0 && isNeutral(grown[left], usual)) {
      grown[left] = line[x];
      left -= 1;
      width += 1;
    }
    x = end - 1;
  }
  return grown;
}

/** @typedef {{kind: 'strip' | 'pin' | 'row', index: number, y: number, height: number}} Band */
/** @typedef {{bands: Band[], top: number, bottom: number, height: number, pins: boolean}} Layout */

export const STRIP_HEIGHT = 58;
export const AXIS_HEIGHT = 36;
/** So far apart, in px, names beside lanes can be links that a finger hits. */
export const LINK_PITCH = 24;
const PIN_HEIGHT = 20;
const PIN_GAP = 4;
const MOST_TITLED = 64; // ranks of a lane in a title
const GROUP_GAP = 4;
const MANY_GROUPS = 48; // of more the gaps would take much of the picture

/** All ranks of a lane where they are few, else its label. @param {import('../../types/api.js').MapRow} row */
export function ranksTitle(row) {
  return row.ranks.length > 1 && row.ranks.length <= MOST_TITLED ? `Ranks ${row.ranks.join(', ')}` : row.label;
}

/** Whom a lane stands for: the rank that deviates most, without data its first. @param {import('../../types/api.js').MapRow} row */
export function rankOf(row) {
  return row.worst_rank ?? row.ranks[0];
}

/** Ranks as the API takes them: "0-63,70". @param {number[]} ranks */
export function rankRanges(ranks) {
  /** @type {[number, number][]} */
  const parts = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = parts.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  return parts.map(([low, high]) => (low === high ? low : `${low}-${high}`)).join(',');
}

/** The first and last rank of each part of "0-63,70". @param {string} text @returns {[number, number][]} */
export function rangesOf(text) {
  return text.split(',').map((part) => {
    const [low, high = low] = part.split('-').map(Number);
    return [low, high];
  });
}

/** All ranks of a lane; a cut list continues where its ranks follow each other. @param {import('../../types/api.js').MapRow} row */
export function ranksOf(row) {
  const total = row.ranks_capped?.total ?? row.ranks.length;
  const first = row.ranks[0];
  const follow = row.label === `Ranks ${first}-${first + total - 1}`;
  return follow ? Array.from({ length: total }, (_, at) => first + at) : row.ranks;
}

/** How much of a lane is among ranks. @param {readonly number[]} ranks of the lane @param {readonly [number, number][]} ranges @returns {'all' | 'some' | 'none'} */
export function coverage(ranks, ranges) {
  const inside = ranks.filter((rank) => ranges.some(([low, high]) => rank >= low && rank <= high)).length;
  return inside === 0 ? 'none' : inside === ranks.length ? 'all' : 'some';
}

/** The columns that hold two steps and all between, as their first and last step. @param {RankMap} map @param {number} one @param {number} other @returns {[number, number]} */
export function wholeColumns(map, one, other) {
  const column = (/** @type {number} */ step) => map.step_lo + Math.floor((step - map.step_lo) / map.bin) * map.bin;
  return [column(Math.min(one, other)), Math.min(map.step_hi, column(Math.max(one, other)) + map.bin - 1)];
}

/** The lane nearest to a height, of one kind. @param {Layout} plan @param {'pin' | 'row'} kind @param {number} y @returns {Band | null} */
export function nearestBand(plan, kind, y) {
  const away = (/** @type {Band} */ band) => Math.max(band.y - y, y - band.y - band.height, 0);
  /** @type {Band | null} */
  let best = null;
  for (const band of plan.bands) if (band.kind === kind && (!best || away(band) < away(best))) best = band;
  return best;
}

/** Which groups stand beside the lanes: those that are asked for, else those that the lanes are in order of, else the nodes where most lanes are of one; null for none. @param {RankMap} map @param {string | undefined} asked */
export function chosenBand(map, asked) {
  const find = (/** @type {string} */ key) => map.bands.find((band) => band.key === key);
  if (asked === 'none') return null;
  const nodes = find('node');
  const shown = nodes && 2 * nodes.lanes.filter((place) => place >= 0).length >= nodes.lanes.length;
  return (asked && find(asked)) || find(map.order) || (shown ? nodes : null);
}

/** The name of the group of a lane; empty where its ranks are of several, or of none. @param {import('../../types/api.js').MapBand | null} band @param {{kind: string, index: number}} lane */
export function groupOfLane(band, { kind, index }) {
  const at = (kind === 'pin' ? band?.pins : band?.lanes)?.[index] ?? -1;
  return at < 0 ? '' : (band?.names[at] ?? '');
}

/** Lanes beside each other that are of one group. @param {import('../../types/api.js').MapBand} band @param {Band[]} rows
 * @returns {{place: number, name: string, top: number, bottom: number}[]} */
export function bandRuns(band, rows) {
  /** @type {{place: number, name: string, top: number, bottom: number}[]} */
  const runs = [];
  let before = -1;
  for (const [lane, { y, height }] of rows.entries()) {
    const place = band.lanes[lane];
    const last = runs.at(-1);
    if (place >= 0 && place === before && last) last.bottom = y + height;
    else if (place >= 0) runs.push({ place, name: band.names[place], top: y, bottom: y + height });
    before = place;
  }
  return runs;
}

/** Which lanes begin another group than the one above them. @param {readonly {group: string}[]} rows @returns {Set<number>} */
export function breaksOf(rows) {
  return new Set(rows.flatMap((row, index) => (index > 0 && row.group !== rows[index - 1].group ? [index] : [])));
}

/**
 * Where each lane begins, from the top of the plot. A gap stands above each lane in `breaks`.
 * @param {{rows: number, pins: number, strip: boolean, maxHeight: number, breaks?: Set<number>}} wish
 * @returns {Layout}
 */
export function layout({ rows, pins, strip, maxHeight, breaks = new Set() }) {
  /** @type {Band[]} */
  const bands = [];
  let y = 0;
  if (strip) {
    bands.push({ kind: 'strip', index: 0, y, height: STRIP_HEIGHT });
    y += STRIP_HEIGHT + 8;
  }
  for (let index = 0; index < pins; index += 1) {
    bands.push({ kind: 'pin', index, y, height: PIN_HEIGHT });
    y += PIN_HEIGHT + PIN_GAP;
  }
  if (pins > 0) y += 5;
  const top = y;
  const pitch = Math.max(3, Math.min(rows <= 8 ? 26 : LINK_PITCH, Math.floor(maxHeight / Math.max(1, rows))));
  const gap = pitch >= 10 ? 2 : pitch >= 6 ? 1 : 0;
  const apart = breaks.size > MANY_GROUPS ? 1 : GROUP_GAP;
  for (let index = 0; index < rows; index += 1) {
    if (breaks.has(index)) y += apart;
    bands.push({ kind: 'row', index, y, height: pitch - gap });
    y += pitch;
  }
  return { bands, top, bottom: y - gap, height: y - gap + AXIS_HEIGHT, pins: pins > 0 };
}

/** Pinned lanes add nothing where every rank has a tall lane of its own. @param {RankMap} map */
export function wantsPins(map) {
  return map.pinned.length > 0 && (map.rank_bin > 1 || map.rows.length > 16);
}

/** The band at a height; null between bands. @param {Layout} plan @param {number} y */
export function bandAt(plan, y) {
  return plan.bands.find((band) => y >= band.y && y < band.y + band.height + 3) ?? null;
}

/** The step under a pixel. @param {{step_lo: number, step_hi: number}} map @param {number} x @param {number} width */
export function stepAt(map, x, width) {
  const steps = map.step_hi - map.step_lo + 1;
  return Math.max(map.step_lo, Math.min(map.step_hi, map.step_lo + Math.floor((x / width) * steps)));
}

/** The left edge of a step. @param {{step_lo: number, step_hi: number}} map @param {number} step @param {number} width */
export function xOf(map, step, width) {
  return ((step - map.step_lo) / (map.step_hi - map.step_lo + 1)) * width;
}

/** Round numbers for an axis between two values, at most `most` of them. @param {number} low @param {number} high @param {number} most */
export function ticks(low, high, most) {
  const span = Math.max(1, high - low);
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? 10 * power);
  const list = [];
  for (let value = Math.ceil(low / unit) * unit; value <= high; value += unit) if (value >= 1) list.push(value);
  return list;
}

/** The range of steps after a zoom by a factor around a step, kept within the whole. Null: the whole.
 * @param {{low: number, high: number}} view @param {{low: number, high: number}} whole @param {number} centre @param {number} factor
 * @returns {[number, number] | null} */
export function zoom(view, whole, centre, factor) {
  const length = Math.max(8, Math.round((view.high - view.low + 1) * factor));
  if (length >= whole.high - whole.low + 1) return null;
  const share = (centre - view.low) / Math.max(1, view.high - view.low);
  const low = Math.max(whole.low, Math.min(whole.high - length + 1, Math.round(centre - share * length)));
  return [low, low + length - 1];
}

/** The least step bin for a width: the smallest power of two not below steps per pixel. @param {number} steps @param {number} width */
export function binFor(steps, width) {
  let bin = 1;
  while (bin * width < steps) bin *= 2;
  return bin;
}

/**
 * The level of an ordinary step of a lane since a step: its median. Null without data. A bin shows its
 * worst cell, so this never makes a slow rank look better than it is.
 * @param {Uint8Array} cells @param {RankMap} map @param {number} since
 */
export function usualLevel(cells, map, since) {
  const from = Math.max(0, Math.floor((since - map.step_lo) / map.bin));
  const known = [...cells.subarray(from)].filter((level) => level !== MISSING).sort((a, b) => a - b);
  return known.length > 0 ? known[Math.floor(known.length / 2)] : null;
}

/** What the map compares with, in words. @param {RankMap} map */
export function referenceWords(map) {
  return map.reference === 'own' ? 'its own early steps' : 'the peers’ median';
}

/** What one lane holds, for the table twin. @param {Uint8Array} cells @param {RankMap} map */
export function laneSummary(cells, map) {
  const usual = usualOf(map);
  const stretch = stretches(cells, usual.stretch);
  let worst = -1;
  let at = 0;
  let coloured = 0;
  let missing = 0;
  for (let c = 0; c < cells.length; c += 1) {
    const level = cells[c];
    if (level === MISSING) {
      missing += 1;
      continue;
    }
    if (level > worst) {
      worst = level;
      at = c;
    }
    if (level > NEUTRAL && !isNeutral(level, stretch[c] ? usual.stretch : usual.cell)) coloured += 1;
  }
  const known = cells.length - missing;
  return {
    worst: worst < 0 ? null : worst,
    step: map.step_lo + at * map.bin,
    slow: known ? coloured / known : null,
    missing: cells.length ? missing / cells.length : 0,
  };
}
