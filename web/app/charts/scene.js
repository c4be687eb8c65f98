/** The geometry of the map: lanes and what they stand for, pixels to steps. Pure. */

/** @typedef {import('../../types/api.js').Map} RankMap */

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

/** All ranks of a lane; a cut list goes on where its ranks follow each other. @param {import('../../types/api.js').MapRow} row */
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
