/** Ranks by steps: the throughput strip, the pinned lanes and the map, with one cursor over all. */

import { signal } from '@preact/signals';
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks';
import { useApi } from '../api.js';
import { count, deviation, duration, percent, timeOfDay } from '../format.js';
import { announce, theme } from '../page.js';
import { Problem, Skeleton, useHeld } from '../parts/bits.js';
import { go, query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { readCell, readRange, runPath, withQuery, writeCell } from '../url.js';
import { paint, timeAt, tokens } from './paint.js';
import { bandAt, DEAD_BAND, decodeBytes, isNeutral, laneSummary, layout, MISSING, ratioOf, stepAt, wantsPins, xOf, zoom } from './scene.js';

/** @typedef {import('../../types/api.js').Map} MapData */
/** @typedef {import('../../types/api.js').Throughput} Throughput */
/** @typedef {import('./scene.js').Band} Band */
/** @typedef {import('./scene.js').Layout} Layout */
/** @typedef {import('./paint.js').Lanes} Lanes */
/** @typedef {{band: Band, step: number, x: number}} Spot */
/** @typedef {{map: MapData, lanes: Lanes, plan: Layout, width: number}} View */

const WIDTH_STEP = 32; // a window that is dragged wider asks again once per so many pixels

/** The addresses that a map of a run reads. @param {string} run @param {{metric?: string, width: number, maxHeight: number, steps: [number, number] | null}} wish */
export function mapPaths(run, { metric, width, maxHeight, steps }) {
  const pixels = Math.max(WIDTH_STEP, Math.floor(width / WIDTH_STEP) * WIDTH_STEP);
  const range = { from: steps?.[0], to: steps?.[1], width: pixels };
  return {
    map: withQuery(runPath(run, 'map'), { metric, ...range, lanes: Math.floor(maxHeight / 3) }),
    strip: withQuery(runPath(run, 'throughput'), range),
  };
}

/** @param {{run: string, topic: string | null, maxHeight: number, metric?: string, onData?: (map: MapData) => void}} props */
export function RankMap({ run, topic, maxHeight, metric, onData }) {
  const frame = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {HTMLDivElement | null} */ (null));
  const width = useWidth(plot);
  const steps = readRange(query.value.steps);
  const paths = mapPaths(run, { metric, width, maxHeight, steps });
  const answer = useApi(width ? paths.map : null, { topic, on: ['steps', 'ranks', 'verdict', 'findings'] });
  const strip = useApi(width ? paths.strip : null, { topic, on: ['steps', 'verdict'] });
  const identity = `${run} ${metric} ${query.value.steps ?? ''} ${width}`;
  const both = useMemo(() => (answer.data ? { map: /** @type {MapData} */ (answer.data), strip: /** @type {Throughput | null} */ (strip.data) } : null), [answer.data, strip.data]);
  const { shown, held } = useHeld(both, plot, identity);
  const map = shown?.map ?? null;
  useEffect(() => {
    if (map) onData?.(map);
  }, [map]);
  const lanes = useMemo(() => (map ? decodeLanes(map) : null), [map]);
  const plan = map ? layout({ rows: map.rows.length, pins: wantsPins(map) ? map.pinned.length : 0, strip: true, maxHeight }) : null;
  const view = map && lanes && plan && width && map.columns > 0 ? { map, lanes, plan, width } : null;
  return t.div(
    { class: `rankmap ${answer.pending && answer.data ? 'again' : ''}`, ref: frame },
    plan && map ? el(Gutter, { map, plan, lanes: /** @type {Lanes} */ (lanes), run }) : t.div({ class: 'gutter' }),
    t.div(
      { class: 'plotframe' },
      t.div({ class: 'plot', ref: plot }, view ? el(Plot, { run, view, strip: shown?.strip ?? null }) : null),
      !map && answer.error ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the map' }) : null,
      !map && !answer.error ? el(Skeleton, { height: 180, waitsFor: 'the map' }) : null,
      map && map.columns === 0 ? t.p({ class: 'note padded' }, map.text) : null,
      held ? t.p({ class: 'heldnote', role: 'status' }, 'New steps are in; they show when you stop pointing.') : null,
    ),
  );
}

/** The width of an element, now and after every resize. @param {import('preact').RefObject<HTMLElement | null>} ref */
function useWidth(ref) {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = ref.current;
    if (!element) return undefined;
    // Hidden behind its table twin it has no width; what it had is kept.
    const read = () => element.clientWidth > 0 && setWidth(Math.floor(element.clientWidth));
    const observer = new ResizeObserver(read);
    observer.observe(element);
    read();
    return () => observer.disconnect();
  }, []);
  return width;
}

/** @param {MapData} map @returns {Lanes} */
function decodeLanes(map) {
  const cells = decodeBytes(map.cells);
  const missing = decodeBytes(map.missing);
  const part = (/** @type {Uint8Array} */ all, /** @type {number} */ row) => all.subarray(row * map.columns, (row + 1) * map.columns);
  return {
    rows: map.rows.map((_, row) => ({ cells: part(cells, row), missing: part(missing, row) })),
    pins: map.pinned.map((pin) => ({ cells: decodeBytes(pin.cells), missing: decodeBytes(pin.missing) })),
  };
}

/** Names beside the lanes: all of them where they fit, else as many as do. @param {{map: MapData, plan: Layout, lanes: Lanes, run: string}} props */
function Gutter({ map, plan, lanes, run }) {
  const rows = plan.bands.filter((band) => band.kind === 'row');
  const pitch = rows.length > 1 ? rows[1].y - rows[0].y : 20;
  const every = Math.max(1, Math.ceil(16 / pitch));
  return t.div(
    { class: 'gutter', style: { height: `${plan.height}px` } },
    plan.bands.map((band) => {
      const style = { top: `${band.y}px`, height: `${Math.max(14, band.height)}px` };
      if (band.kind === 'strip') return t.div({ key: 'strip', class: 'lanename strip', style }, t.b(null, 'Throughput'), t.span({ class: 'faint' }, 'steps per second'));
      if (band.kind === 'pin') {
        const pin = map.pinned[band.index];
        return t.div({ key: `p${band.index}`, class: 'lanename', style, title: `${pin.label}: ${pin.why}` }, t.a({ href: runPath(run, 'ranks', String(pin.rank)), class: 'quiet strong' }, pin.label), t.span({ class: 'faint' }, pin.host, pin.max_ratio !== null && pin.max_ratio > 1 + DEAD_BAND ? t.b({ class: 'lanepeak' }, ` max ${deviation(pin.max_ratio)}`) : ''));
      }
      if (band.index % every !== 0 && every > 1) return null;
      const row = map.rows[band.index];
      const { worst } = laneSummary(lanes.rows[band.index].cells, map);
      const slow = worst !== null && map.unit === 'ratio' && worst > 127 && !isNeutral(worst);
      return t.div(
        { key: `r${band.index}`, class: 'lanename', style, title: row.host ? `${row.label}, ${row.host}` : row.label },
        row.rank_lo === row.rank_hi ? t.a({ href: runPath(run, 'ranks', String(row.rank_lo)), class: 'quiet' }, row.label) : t.span(null, row.label),
        every === 1 ? t.span({ class: 'faint' }, worst === null ? 'no data' : slow ? t.b({ class: 'lanepeak' }, `max ${levelWords(map, worst)}`) : row.label.includes(row.host) ? '' : row.host) : null,
      );
    }),
    t.div({ class: 'lanename axisname', style: { top: `${plan.bottom + 3}px`, height: '14px' } }, t.span(null, ''), t.span({ class: 'faint' }, 'step, time of day')),
  );
}

/** What a spot holds, in numbers. @param {View} view @param {Spot} spot */
export function readSpot({ map, lanes }, { band, step }) {
  const column = Math.min(map.columns - 1, Math.floor((step - map.step_lo) / map.bin));
  const pin = band.kind === 'pin' ? map.pinned[band.index] : null;
  const row = pin ? { label: pin.label, rank_lo: pin.rank, rank_hi: pin.rank, host: pin.host } : map.rows[band.index];
  const lane = band.kind === 'pin' ? lanes.pins[band.index] : lanes.rows[band.index];
  const level = lane.cells[column];
  const first = map.step_lo + column * map.bin;
  const last = Math.min(map.step_hi, first + map.bin - 1);
  return { row, level, missing: lane.missing[column] / 255, first, last, time: timeAt(map, step) };
}

/** A level as words: "+24 %", "at least +100 %", "no data". @param {MapData} map @param {number} level */
export function levelWords(map, level) {
  if (level === MISSING) return 'no data';
  if (map.unit === 'ms') return duration((map.value_lo ?? 0) + ((map.value_hi ?? 0) - (map.value_lo ?? 0)) * (level / 254));
  const text = deviation(ratioOf(level));
  return level >= 254 ? `${text} or more` : level <= 0 ? `${text} or less` : text;
}

/** @param {{run: string, view: View, strip: Throughput | null}} props */
function Plot({ run, view, strip }) {
  const { map, plan, width } = view;
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const region = useRef(/** @type {HTMLDivElement | null} */ (null));
  const spot = useMemo(() => signal(/** @type {Spot | null} */ (null)), []);
  const brush = useMemo(() => signal(/** @type {[number, number] | null} */ (null)), []);
  const [fonts, setFonts] = useState(document.fonts.status === 'loaded');
  const look = theme.value;
  const selected = readCell(query.value.sel);

  useEffect(() => {
    document.fonts.ready.then(() => setFonts(true));
  }, []);
  useLayoutEffect(() => {
    if (canvas.current && region.current) paint(canvas.current, { map, lanes: view.lanes, strip, plan, theme: look, width, colours: tokens(region.current) });
  }, [map, strip, look, width, fonts, plan.height]);

  const lanesOnly = plan.bands.filter((band) => band.kind !== 'strip');
  const spotAt = (/** @type {PointerEvent | MouseEvent} */ event) => {
    const box = /** @type {HTMLElement} */ (region.current).getBoundingClientRect();
    const x = Math.max(0, Math.min(width - 1, event.clientX - box.left));
    const band = bandAt(plan, event.clientY - box.top);
    return { x, step: stepAt(map, x, width), band: band && band.kind !== 'strip' ? band : null };
  };
  function pin(/** @type {Spot | null} */ at) {
    if (!at) return setQuery({ sel: null });
    const read = readSpot(view, at);
    return setQuery({ sel: writeCell({ rank: read.row.rank_lo, step: at.step }) });
  }
  function move(/** @type {Spot | null} */ to, speak = false) {
    spot.value = to;
    if (!to || !speak) return;
    const read = readSpot(view, to);
    announce(`${read.row.label}${read.row.host ? ` on ${read.row.host}` : ''}, step ${to.step}, ${levelWords(map, read.level)}${map.unit === 'ratio' && read.level !== MISSING ? ' from median' : ''}`);
  }
  function zoomBy(/** @type {number} */ factor, /** @type {number} */ centre) {
    const whole = { low: 1, high: Math.max(map.step_hi, readRange(query.value.steps) ? Number.MAX_SAFE_INTEGER / 4 : map.step_hi) };
    const range = zoom({ low: map.step_lo, high: map.step_hi }, whole, centre, factor);
    setQuery({ steps: range ? `${range[0]}-${range[1]}` : null }, { replace: true });
  }
  /** @type {import('preact').PointerEventHandler<HTMLDivElement>} */
  function press(event) {
    if (event.button !== 0) return;
    const from = spotAt(event);
    region.current?.setPointerCapture(event.pointerId);
    const drag = (/** @type {PointerEvent} */ ev) => {
      const to = spotAt(ev);
      brush.value = Math.abs(to.x - from.x) > 4 ? [Math.min(from.x, to.x), Math.max(from.x, to.x)] : null;
    };
    const release = (/** @type {PointerEvent} */ ev) => {
      region.current?.removeEventListener('pointermove', drag);
      region.current?.removeEventListener('pointerup', release);
      region.current?.removeEventListener('pointercancel', release);
      const range = brush.value;
      brush.value = null;
      if (ev.type === 'pointercancel') return;
      if (range) setQuery({ steps: `${stepAt(map, range[0], width)}-${stepAt(map, range[1], width)}` });
      else if (from.band) pin({ ...from, band: from.band });
    };
    region.current?.addEventListener('pointermove', drag);
    region.current?.addEventListener('pointerup', release);
    region.current?.addEventListener('pointercancel', release);
  }
  /** @type {import('preact').KeyboardEventHandler<HTMLDivElement>} */
  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || lanesOnly.length === 0) return;
    const start = selected ? { band: bandOf(view, selected.rank) ?? lanesOnly[0], step: selected.step } : { band: lanesOnly[0], step: map.step_hi };
    const at = spot.value ?? { ...start, x: 0 };
    const here = Math.max(0, lanesOnly.indexOf(at.band));
    const to = moveSpot(event.key, event.shiftKey, { here, step: at.step, map, lanesOnly });
    if (to) {
      move({ band: lanesOnly[to.lane], step: to.step, x: xOf(map, to.step, width) }, true);
    } else if (event.key === 'Enter' && spot.value) {
      const read = readSpot(view, at);
      go(withQuery(runPath(run, 'ranks', String(read.row.rank_lo)), { ...query.value, sel: writeCell({ rank: read.row.rank_lo, step: at.step }) }));
    } else if (event.key === ' ') {
      pin(at);
    } else if (event.key === '+' || event.key === '=') zoomBy(0.5, at.step);
    else if (event.key === '-') zoomBy(2, at.step);
    else if (event.key === '0') setQuery({ steps: null });
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
  return t.div(
    {
      class: 'plotregion',
      ref: region,
      role: 'application',
      tabIndex: 0,
      'aria-label': `Map of ${count(map.world_size)} ranks by steps ${count(map.step_lo)} to ${count(map.step_hi)}. ${map.text} Arrow keys move a cell, Space pins it, Enter opens the rank, plus and minus zoom, t shows a table.`,
      style: { height: `${plan.height}px` },
      onPointerMove: (event) => {
        const to = spotAt(event);
        move(to.band ? { ...to, band: to.band } : null);
      },
      onPointerLeave: () => move(null),
      onPointerDown: press,
      onDblClick: () => setQuery({ steps: null, sel: null }),
      onKeyDown: key,
      onBlur: () => move(null),
    },
    t.canvas({ ref: canvas, 'aria-hidden': 'true', style: { width: `${width}px`, height: `${plan.height}px` } }),
    selected ? el(Selection, { view, cell: selected }) : null,
    el(Cursor, { view, spot, brush, run }),
  );
}

/** Where a key leads. @param {string} key @param {boolean} shift
 * @param {{here: number, step: number, map: MapData, lanesOnly: Band[]}} from @returns {{lane: number, step: number} | null} */
function moveSpot(key, shift, { here, step, map, lanesOnly }) {
  const across = shift ? 50 : map.bin;
  const hostOf = (/** @type {number} */ lane) => {
    const band = lanesOnly[lane];
    return band.kind === 'pin' ? `pin ${band.index}` : map.rows[band.index].host;
  };
  const nextLane = (/** @type {1 | -1} */ way) => {
    let lane = here + way;
    if (shift) while (lanesOnly[lane] && hostOf(lane) === hostOf(here)) lane += way;
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
  return { lane: Math.max(0, Math.min(lanesOnly.length - 1, to[0])), step: Math.max(map.step_lo, Math.min(map.step_hi, to[1])) };
}

/** The lane that shows a rank: its own pinned lane first. @param {View} view @param {number} rank */
function bandOf({ map, plan }, rank) {
  const pinned = plan.bands.find((band) => band.kind === 'pin' && map.pinned[band.index].rank === rank);
  return pinned ?? plan.bands.find((band) => band.kind === 'row' && map.rows[band.index].rank_lo <= rank && rank <= map.rows[band.index].rank_hi) ?? null;
}

/** @param {{view: View, cell: {rank: number, step: number}}} props */
function Selection({ view, cell }) {
  const { map, width } = view;
  const band = bandOf(view, cell.rank);
  if (!band || cell.step < map.step_lo || cell.step > map.step_hi) return null;
  const first = map.step_lo + Math.floor((cell.step - map.step_lo) / map.bin) * map.bin;
  const left = xOf(map, first, width);
  const wide = Math.max(6, xOf(map, first + map.bin, width) - left);
  return t.div({ class: 'cellbox', style: { left: `${left - 2}px`, top: `${band.y - 2}px`, width: `${wide + 4}px`, height: `${band.height + 4}px` } });
}

/** @param {{view: View, run: string, spot: import('@preact/signals').Signal<Spot | null>, brush: import('@preact/signals').Signal<[number, number] | null>}} props */
function Cursor({ view, spot, brush, run }) {
  const { map, plan, width } = view;
  const range = brush.value;
  if (range) {
    return t.div({ class: 'brush', style: { left: `${range[0]}px`, width: `${range[1] - range[0]}px`, height: `${plan.bottom}px` } }, t.span(null, `steps ${count(stepAt(map, range[0], width))}–${count(stepAt(map, range[1], width))}`));
  }
  const at = spot.value;
  if (!at) return null;
  const read = readSpot(view, at);
  const x = xOf(map, at.step, width);
  const onLeft = x > width - 250;
  const style = { top: `${Math.max(0, Math.min(plan.height - 84, at.band.y + at.band.height + 8))}px`, ...(onLeft ? { right: `${width - x + 12}px` } : { left: `${x + 12}px` }) };
  return t.div(
    { class: 'cursor' },
    t.div({ class: 'crosshair', style: { left: `${x}px`, height: `${plan.bottom}px` } }),
    t.div({ class: 'lanehair', style: { top: `${at.band.y}px`, height: `${at.band.height}px` } }),
    t.div(
      { class: 'tip', style },
      t.b(null, read.row.label),
      read.row.host && !read.row.label.includes(read.row.host) ? ` on ${read.row.host}` : '',
      t.br(null),
      map.bin > 1 ? `steps ${count(read.first)}–${count(read.last)}, worst of them` : `step ${count(read.first)}`,
      read.time ? `, ${timeOfDay(read.time)}` : '',
      t.br(null),
      t.b(null, levelWords(map, read.level)),
      map.unit === 'ratio' && read.level !== MISSING ? ' from the peers’ median' : '',
      read.missing > 0 && read.level !== MISSING ? t.span({ class: 'faint' }, `, ${percent(read.missing)} without data`) : '',
      map.bin === 1 && read.row.rank_lo === read.row.rank_hi ? el(Exact, { run, rank: read.row.rank_lo, step: read.first }) : null,
    ),
  );
}

/** Exact numbers, asked for once the pointer rests. @param {{run: string, rank: number, step: number}} props */
function Exact({ run, rank, step }) {
  const [rested, setRested] = useState('');
  const here = `${rank}@${step}`;
  useEffect(() => {
    const timer = setTimeout(() => setRested(here), 180);
    return () => clearTimeout(timer);
  }, [here]);
  const answer = useApi(rested === here ? withQuery(runPath(run, 'cell'), { rank, step }) : null);
  const cell = /** @type {import('../../types/api.js').Cell | null} */ (answer.data);
  const known = cell && cell.rank === rank && cell.step === step && cell.own_work_ms !== null;
  return t.span({ class: 'exact' }, known ? `${duration(cell.own_work_ms)} of own work${cell.reference_ms === null ? '' : `, peers ${duration(cell.reference_ms)}`}` : ' ');
}
