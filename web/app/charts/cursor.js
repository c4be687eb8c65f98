/** The map's one cursor: what it reads, where keys lead it, what it draws over the canvas. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { ask, useApi } from '../api.js';
import { count, deviation, duration, percent, timeOfDay } from '../format.js';
import { announce } from '../page.js';
import { Icon } from '../parts/bits.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { timeAt } from './paint.js';
import {
  coverage,
  groupOfLane,
  isNeutral,
  MISSING,
  rangesOf,
  rankRanges,
  ranksOf,
  ratioOf,
  referenceWords,
  robustZ,
  usualOf,
  wholeColumns,
  xOf,
  zWords,
} from './scene.js';

/** @typedef {import('../../types/api.js').Map} MapData */
/** @typedef {import('../../types/api.js').Cell} Cell */
/** @typedef {import('../../types/api.js').ErrorGroup} ErrorGroup */
/** @typedef {import('./scene.js').Band} Band */
/** @typedef {{band: Band, step: number, x: number}} Spot */
/** @typedef {{map: MapData, lanes: import('./paint.js').Lanes, plan: import('./scene.js').Layout, width: number, band: import('../../types/api.js').MapBand | null}} View */

const REST_MS = 400; // after the last key
const NAMED = 8; // ranks of a lane in its tip
const MARKED = 64; // ranks of a kind of error
const MOST_RANGES = 512; // of ranks in an address; the API takes as many

/** Some steps of some ranks that are one cell of the map. @typedef {{ranks: number[], first: number, last: number}} Bin */

/** Where the numbers of a cell are, and of a bin of several those of the one that it has its colour from.
 * @param {string} run @param {string} metric @param {Bin} bin */
function cellPath(run, metric, { ranks, first, last }) {
  if (ranks.length === 1 && first === last) return withQuery(runPath(run, 'cell'), { rank: ranks[0], step: first });
  return withQuery(runPath(run, 'cell', 'worst'), { ranks: rankRanges(ranks), from: first, to: last, metric });
}

/** The cell that a bin has its colour from; null where there is none, or it cannot be asked for.
 * @param {string} run @param {string} metric @param {Bin} bin @returns {Promise<Cell | null>} */
export async function worstOf(run, metric, bin) {
  try {
    return (await ask(cellPath(run, metric, bin)))?.data ?? null;
  } catch {
    return null;
  }
}

/** The cell that a spot has its colour from. @param {string} run @param {View} view @param {Spot} spot */
export function worstAt(run, view, spot) {
  const { row, first, last } = readSpot(view, spot);
  return worstOf(run, view.map.metric, { ranks: row.ranks, first, last });
}

/** Says whom a bin shows, once the keys rest. @param {string} run @param {View} view
 * @param {import('@preact/signals').Signal<Spot | null>} spot */
export function useNaming(run, view, spot) {
  const timer = useRef(/** @type {ReturnType<typeof setTimeout> | undefined} */ (undefined));
  return (/** @type {Spot} */ at) => {
    clearTimeout(timer.current);
    timer.current = setTimeout(async () => {
      const found = await worstAt(run, view, at);
      if (found && spot.value === at) announce(`Worst: ${cellWords(found, true)}`);
    }, REST_MS);
  };
}

/** What a spot holds, in numbers. @param {View} view @param {Spot} spot */
export function readSpot({ map, lanes }, { band, step }) {
  const column = Math.min(map.columns - 1, Math.floor((step - map.step_lo) / map.bin));
  const pin = band.kind === 'pin' ? map.pinned[band.index] : null;
  const row = pin
    ? { label: pin.label, ranks: [pin.rank], worst_rank: pin.rank, host: pin.host, group: '', ranks_capped: null }
    : map.rows[band.index];
  const lane = band.kind === 'pin' ? lanes.pins[band.index] : lanes.rows[band.index];
  const level = lane.cells[column];
  const first = map.step_lo + column * map.bin;
  const last = Math.min(map.step_hi, first + map.bin - 1);
  const usual = usualOf(map);
  const isUsual = isNeutral(level, lane.stretch[column] ? usual.stretch : usual.cell); // as it is drawn
  return { row, level, isUsual, missing: lane.missing[column] / 255, first, last, time: timeAt(map, step) };
}

/** A level as words: "+24 %", "at least +100 %", "no data". @param {MapData} map @param {number} level */
export function levelWords(map, level) {
  if (level === MISSING) return 'no data';
  if (map.unit === 'ms')
    return duration((map.value_lo ?? 0) + ((map.value_hi ?? 0) - (map.value_lo ?? 0)) * (level / 254));
  const text = deviation(ratioOf(level));
  return level >= 254 ? `${text} or more` : level <= 0 ? `${text} or less` : text;
}

/** The same against the noise of this run: ", robust z 6.2". @param {MapData} map @param {number} level */
export function noiseWords(map, level) {
  const words = map.unit === 'ratio' ? zWords(robustZ(map, ratioOf(level))) : '';
  return words && `, ${words}${level >= 254 ? ' or more' : ''}`;
}

/** Where a lane is: its group and its host, each where the label does not say it. @param {import('../../types/api.js').MapRow} row */
export function placeWords(row) {
  const host = row.host && !row.label.includes(row.host) ? ` on ${row.host}` : '';
  return row.group && row.group !== row.host ? `, ${row.group}${host}` : host;
}

/** Its group in the bands beside the lanes, where nothing else says it. @param {View} view @param {Band} lane @param {import('../../types/api.js').MapRow} row */
export function bandWords({ band }, lane, row) {
  const name = groupOfLane(band, lane);
  if (!band || !name || name === row.host || name === row.group) return '';
  return `, ${band.key.startsWith('group:') ? `${band.title.toLowerCase()} of ${name.toLowerCase()}` : name}`;
}

/** The ranks of a lane in the order that they have there, as many as a tip holds. @param {import('../../types/api.js').MapRow} row */
function ranksWords(row) {
  const total = row.ranks_capped?.total ?? row.ranks.length;
  const shown = row.ranks.slice(0, NAMED).join(', ');
  return `${count(total)} ranks: ${shown}${total > NAMED ? ` and ${count(total - NAMED)} more` : ''}`;
}

/** Where a key leads; far: 50 steps, or to another node or group. @param {string} key @param {boolean} far
 * @param {{here: number, step: number, view: View, lanesOnly: Band[]}} from @returns {{lane: number, step: number} | null} */
export function moveSpot(key, far, { here, step, view: { map, band: beside }, lanesOnly }) {
  const across = far ? 50 : map.bin;
  const hostOf = (/** @type {number} */ lane) => {
    const band = lanesOnly[lane];
    if (band.kind === 'pin') return `pin ${band.index}`;
    return groupOfLane(beside, band) || map.rows[band.index].group || map.rows[band.index].host;
  };
  const nextLane = (/** @type {1 | -1} */ way) => {
    let lane = here + way;
    if (far) while (lanesOnly[lane] && hostOf(lane) === hostOf(here)) lane += way;
    return lane;
  };
  const page = Math.max(1, Math.floor(lanesOnly.length / 4));
  /** @type {Record<string, [number, number]>} */
  const moves = {
    ArrowLeft: [here, step - across],
    ArrowRight: [here, step + across],
    ArrowUp: [key === 'ArrowUp' ? nextLane(-1) : here, step],
    ArrowDown: [key === 'ArrowDown' ? nextLane(1) : here, step],
    Home: [here, map.step_lo],
    End: [here, map.step_hi],
    PageUp: [here - page, step],
    PageDown: [here + page, step],
  };
  const to = moves[key];
  if (!to) return null;
  return {
    lane: Math.max(0, Math.min(lanesOnly.length - 1, to[0])),
    step: Math.max(map.step_lo, Math.min(map.step_hi, to[1])),
  };
}

/** The lane that shows a rank: its own pinned lane first. @param {View} view @param {number} rank */
export function bandOf({ map, plan }, rank) {
  const pinned = plan.bands.find((band) => band.kind === 'pin' && map.pinned[band.index].rank === rank);
  return pinned ?? plan.bands.find((band) => band.kind === 'row' && map.rows[band.index].ranks.includes(rank)) ?? null;
}

/** Marks of errors on the lanes of their ranks, in the step in which each rank met its first of a kind.
 * @param {{view: View, errors: ErrorGroup[]}} props */
export function ErrorMarks({ view, errors }) {
  const { map, width } = view;
  const marks = errors
    .filter(({ step }) => step >= map.step_lo && step <= map.step_hi)
    .flatMap((group) => group.ranks.slice(0, MARKED).map((rank) => ({ group, rank, band: bandOf(view, rank) })));
  return marks.map(({ group, rank, band }) =>
    band
      ? t.span(
          {
            key: `${group.id} ${rank}`,
            class: 'errormark',
            'data-rank': String(rank),
            'data-step': String(group.step),
            'aria-hidden': 'true',
            title: `${group.type} on rank ${rank}, step ${count(group.step)}: ${group.message}`,
            style: { left: `${xOf(map, group.step, width)}px`, top: `${band.y + band.height / 2}px` },
          },
          el(Icon, { name: group.role === 'initiating' ? 'critical' : 'warning', size: 11 }),
        )
      : null,
  );
}

/** A box around the pinned cell, or around the lane where only a rank is selected. @param {{view: View, rank: number, step: number | null}} props */
export function Selection({ view, rank, step }) {
  const { map, width } = view;
  const band = bandOf(view, rank);
  if (!band) return null;
  if (step === null)
    return t.div({
      class: 'cellbox',
      style: { left: '-2px', top: `${band.y - 2}px`, width: `${width + 4}px`, height: `${band.height + 4}px` },
    });
  if (step < map.step_lo || step > map.step_hi) return null;
  const first = map.step_lo + Math.floor((step - map.step_lo) / map.bin) * map.bin;
  const left = xOf(map, first, width);
  const wide = Math.max(6, xOf(map, first + map.bin, width) - left);
  return t.div({
    class: 'cellbox',
    style: { left: `${left - 2}px`, top: `${band.y - 2}px`, width: `${wide + 4}px`, height: `${band.height + 4}px` },
  });
}

/** Which of some lanes a band is; a plan that was made anew has other bands. @param {Band[]} lanes @param {Band} band */
export function laneOf(lanes, band) {
  return lanes.findIndex(({ kind, index }) => kind === band.kind && index === band.index);
}

/** The ranks and steps between two spots; a sentence where their address would be too long.
 * @param {View} view @param {{band: Band, step: number}} from @param {{band: Band, step: number}} to @returns {import('../url.js').Area | string} */
export function areaBetween({ map, plan }, from, to) {
  const lanes = plan.bands.filter((band) => band.kind === from.band.kind);
  const ends = [laneOf(lanes, from.band), laneOf(lanes, to.band)].sort((a, b) => a - b);
  const ranks = lanes
    .slice(ends[0], ends[1] + 1)
    .flatMap(({ kind, index }) => (kind === 'pin' ? [map.pinned[index].rank] : ranksOf(map.rows[index])));
  const [first, last] = wholeColumns(map, from.step, to.step);
  const text = rankRanges(ranks);
  if (text.split(',').length > MOST_RANGES) return 'Too many ranks that do not follow each other: select fewer lanes.';
  return { ranks: text, first, last };
}

/** "ranks 8-15, steps 120–180". @param {import('../url.js').Area} area */
export function areaWords({ ranks, first, last }) {
  const parts = ranks.split(',');
  const shown = parts.length > 4 ? `${parts.slice(0, 3).join(', ')} and more` : parts.join(', ');
  const steps = first === last ? `step ${count(first)}` : `steps ${count(first)}–${count(last)}`;
  return `${/^\d+$/.test(ranks) ? 'rank' : 'ranks'} ${shown}, ${steps}`;
}

/** Boxes around the lanes whose ranks are selected, over the selected steps. @param {{view: View, area: import('../url.js').Area | null, draft: import('@preact/signals').Signal<import('../url.js').Area | null>}} props */
export function AreaBoxes({ view: { map, plan, width }, area, draft }) {
  const shown = draft.value ?? area;
  if (!shown || shown.first > map.step_hi || shown.last < map.step_lo) return null;
  const ranges = rangesOf(shown.ranks);
  const left = xOf(map, Math.max(map.step_lo, shown.first), width);
  const wide = Math.max(4, xOf(map, Math.min(map.step_hi, shown.last) + 1, width) - left);
  /** @type {{top: number, bottom: number, part: boolean}[]} */
  const boxes = [];
  let joins = false;
  for (const { kind, index, y, height } of plan.bands) {
    const own = kind === 'strip' ? null : kind === 'pin' ? [map.pinned[index].rank] : ranksOf(map.rows[index]);
    const how = own ? coverage(own, ranges) : 'none';
    const last = boxes.at(-1);
    if (how === 'none') joins = false;
    else if (joins && last && last.part === (how === 'some') && kind === 'row') last.bottom = y + height;
    else {
      boxes.push({ top: y, bottom: y + height, part: how === 'some' });
      joins = kind === 'row';
    }
  }
  return boxes.map(({ top, bottom, part }) =>
    t.div({
      key: top,
      class: part ? 'areabox part' : 'areabox',
      // Around the lanes: a thin one would be hidden by its own box.
      style: { left: `${left - 2}px`, top: `${top - 2}px`, width: `${wide + 4}px`, height: `${bottom - top + 4}px` },
    }),
  );
}

/** What is dragged: a box, and what it takes. @typedef {{left: number, width: number, top: number, height: number, text: string, take: () => void}} Brush */

/** @param {{view: View, spot: import('@preact/signals').Signal<Spot | null>, brush: import('@preact/signals').Signal<Brush | null>, run: string}} props */
export function Cursor({ view, spot, brush, run }) {
  const { map, plan, width } = view;
  const box = brush.value;
  if (box) {
    const style = { left: `${box.left}px`, width: `${box.width}px`, top: `${box.top}px`, height: `${box.height}px` };
    const said = { left: `${Math.max(0, Math.min(box.left, width - 190))}px`, top: `${box.top + box.height + 3}px` };
    return [
      t.div({ key: 'box', class: 'brush', style }),
      t.span({ key: 'text', class: 'brushtext', style: said }, box.text),
    ];
  }
  const at = spot.value;
  if (!at) return null;
  const read = readSpot(view, at);
  const x = xOf(map, at.step, width);
  const onLeft = x > width - 250;
  const style = {
    top: `${Math.max(0, Math.min(plan.height - 84, at.band.y + at.band.height + 8))}px`,
    ...(onLeft ? { right: `${width - x + 12}px` } : { left: `${x + 12}px` }),
  };
  return t.div(
    { class: 'cursor' },
    t.div({ class: 'crosshair', style: { left: `${x}px`, height: `${plan.bottom}px` } }),
    t.div({ class: 'lanehair', style: { top: `${at.band.y}px`, height: `${at.band.height}px` } }),
    t.div(
      { class: 'tip', style },
      t.b(null, read.row.label),
      placeWords(read.row),
      bandWords(view, at.band, read.row),
      t.br(null),
      map.bin > 1 ? `steps ${count(read.first)}–${count(read.last)}, worst of them` : `step ${count(read.first)}`,
      read.time ? `, ${timeOfDay(read.time)}` : '',
      t.br(null),
      t.b(null, levelWords(map, read.level)),
      map.unit === 'ratio' && read.level !== MISSING
        ? ` from ${referenceWords(map)}${noiseWords(map, read.level)}${read.isUsual ? ', as usual here' : ''}`
        : '',
      read.missing > 0 && read.level !== MISSING
        ? t.span({ class: 'faint' }, `, ${percent(read.missing)} without data`)
        : '',
      read.row.ranks.length > 1 ? t.span({ class: 'exact' }, ranksWords(read.row)) : null,
      read.level === MISSING
        ? null
        : el(Exact, {
            path: cellPath(run, map.metric, { ranks: read.row.ranks, first: read.first, last: read.last }),
            named: read.row.ranks.length > 1 || read.first !== read.last,
          }),
    ),
  );
}

/** Exact numbers, asked for once the pointer rests; of a bin with the rank and step that it shows.
 * @param {{path: string, named: boolean}} props */
function Exact({ path, named }) {
  const [rested, setRested] = useState('');
  useEffect(() => {
    const timer = setTimeout(() => setRested(path), 180);
    return () => clearTimeout(timer);
  }, [path]);
  const answer = useApi(rested === path ? path : null);
  const cell = /** @type {Cell | null} */ (answer.path === path ? answer.data : null);
  return t.span({ class: 'exact' }, cell ? cellWords(cell, named) : ' ');
}

/** A cell in numbers. @param {Cell} cell @param {boolean} named with its rank and step */
function cellWords(cell, named) {
  const who = named ? `rank ${cell.rank}, step ${count(cell.step)}: ` : '';
  if (cell.own_work_ms === null) return who ? `${who}no self time` : ' ';
  const peers = cell.reference_ms === null ? '' : `, peers ${duration(cell.reference_ms)}`;
  return `${who}${duration(cell.own_work_ms)} of self time${peers}`;
}
