/** Levels and colours of the map's cells: bytes to deviations, to colours, to pixels of a lane. Pure. */

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

/** How many robust standard deviations of this picture's noise a ratio is from its middle; null where the noise is not known. @param {RankMap} map @param {number | null} ratio */
export function robustZ({ usual }, ratio) {
  return usual?.sigma && ratio !== null && ratio > 0 ? Math.log2(ratio / usual.ratio) / usual.sigma : null;
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

/** One packed colour per byte. @param {Theme} theme @param {'ratio' | 'ms'} unit @param {Usual} usual */
export function palette(theme, unit, usual) {
  const table = new Uint32Array(256);
  // What is unusual begins where the usual ends, with the same steps of colour from there on.
  const [less, more] = [usual[0] - 1 + DEAD_BAND, usual[1] - 1 - DEAD_BAND];
  const stops = DIVERGING[theme].map(
    ([at, colour]) => /** @type {[number, string]} */ ([at + (at > 0 ? more : less), colour]),
  );
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
