/** Ranks by steps: the throughput strip, the pinned lanes and the map, with one cursor over all. */

import { signal } from '@preact/signals';
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks';
import { useApi } from '../api.js';
import { count, deviation, middle, plural, sentence } from '../format.js';
import { useHeld } from '../live.js';
import { announce, theme } from '../page.js';
import { Problem, Skeleton, useWidth } from '../parts/bits.js';
import { go, query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { readArea, readCell, readRange, readRank, runPath, withQuery, writeArea, writeCell } from '../url.js';
import {
  AreaBoxes,
  areaBetween,
  areaWords,
  bandOf,
  bandWords,
  Cursor,
  ErrorMarks,
  laneOf,
  levelWords,
  moveSpot,
  noiseWords,
  placeWords,
  readSpot,
  Selection,
  useNaming,
  worstAt,
} from './cursor.js';
import { paint, tokens } from './paint.js';
import {
  bandAt,
  bandRuns,
  breaksOf,
  chosenBand,
  decodeBytes,
  isNeutral,
  LINK_PITCH,
  layout,
  MISSING,
  nearestBand,
  rankOf,
  ranksTitle,
  stepAt,
  stretches,
  usualLevel,
  usualOf,
  wantsPins,
  xOf,
  zoom,
  zText,
  zWords,
} from './scene.js';

/** @typedef {import('../../types/api.js').Map} MapData */
/** @typedef {import('../../types/api.js').Throughput} Throughput */
/** @typedef {import('../../types/api.js').Errors} Errors */
/** @typedef {import('./scene.js').Band} Band */
/** @typedef {import('./scene.js').Layout} Layout */
/** @typedef {import('./paint.js').Lanes} Lanes */
/** @typedef {import('./cursor.js').Spot} Spot */
/** @typedef {import('./cursor.js').View} View */

const BAND_CHARS = 10; // of a name beside a band, right of those of lanes
const NAME_HEIGHT = 14; // of a lane's name; below the last lane stands what the axis shows
const AXIS_GAP = 3; // between the last lane and what the axis shows
const TONES = 6; // colours of bands: a group that comes again has its own
const TAKEN_MS = 350; // after the last key that changed the selection
const WIDTH_STEP = 32; // a window that is dragged wider asks again once per so many pixels

/** How many lanes fit. Worst first each is high enough for its name, which does not follow from those beside it. @param {number} maxHeight @param {string} [order] */
function mostLanes(maxHeight, order) {
  return Math.floor(maxHeight / (order === 'worst' ? LINK_PITCH : 3));
}

/** The addresses that a map of a run reads. @param {string} run @param {{metric?: string, order?: string, width: number, maxHeight: number, steps: [number, number] | null}} wish */
export function mapPaths(run, { metric, order, width, maxHeight, steps }) {
  const pixels = Math.max(WIDTH_STEP, Math.floor(width / WIDTH_STEP) * WIDTH_STEP);
  const range = { from: steps?.[0], to: steps?.[1], width: pixels };
  return {
    map: withQuery(runPath(run, 'map'), { metric, ...range, lanes: mostLanes(maxHeight, order), order }),
    strip: withQuery(runPath(run, 'throughput'), range),
  };
}

/** @param {{run: string, topic: string | null, maxHeight: number, ranks: number, metric?: string, errors?: number, onData?: (map: MapData) => void}} props */
export function RankMap({ run, topic, maxHeight, ranks, metric, errors = 0, onData }) {
  const frame = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {HTMLDivElement | null} */ (null));
  const width = useWidth(plot);
  const steps = readRange(query.value.steps);
  const order = query.value.order;
  const paths = mapPaths(run, { metric, order, width, maxHeight, steps });
  const answer = useApi(width ? paths.map : null, { topic, on: ['steps', 'ranks', 'verdict', 'findings'] });
  const found = /** @type {import('../api.js').Answer<Errors>} */ (
    useApi(errors > 0 ? runPath(run, 'errors') : null, { topic, on: ['logs'] })
  );
  const strip = useApi(width ? paths.strip : null, { topic, on: ['steps', 'verdict'] });
  const identity = `${run} ${metric} ${order} ${query.value.steps ?? ''} ${width}`;
  const both = useMemo(
    () =>
      answer.data
        ? { map: /** @type {MapData} */ (answer.data), strip: /** @type {Throughput | null} */ (strip.data) }
        : null,
    [answer.data, strip.data],
  );
  const { shown, held } = useHeld(both, plot, identity);
  const map = shown?.map ?? null;
  useEffect(() => {
    if (map) onData?.(map);
  }, [map]);
  const lanes = useMemo(() => (map ? decodeLanes(map) : null), [map]);
  const plan = map
    ? layout({
        rows: map.rows.length,
        pins: wantsPins(map) ? map.pinned.length : 0,
        strip: true,
        maxHeight,
        breaks: breaksOf(map.rows),
      })
    : null;
  // The frame has its final size before its data, so that nothing below it jumps.
  const expected = layout({
    rows: Math.min(Math.max(1, ranks), mostLanes(maxHeight, order)),
    pins: 0,
    strip: true,
    maxHeight,
  }).height;
  const band = map ? chosenBand(map, query.value.bands) : null;
  const view = map && lanes && plan && width && map.columns > 0 ? { map, lanes, plan, width, band } : null;
  return t.div(
    { class: `rankmap ${answer.pending && answer.data ? 'again' : ''}`, ref: frame, 'data-api': paths.map },
    plan && map
      ? el(Gutter, { map, plan, lanes: /** @type {Lanes} */ (lanes), run, band })
      : t.div({ class: 'gutter' }),
    t.div(
      { class: 'plotframe' },
      t.div(
        { class: 'plot', ref: plot },
        view ? el(Plot, { run, view, strip: shown?.strip ?? null, errors: found.data?.groups ?? [] }) : null,
      ),
      !map && answer.error ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the map' }) : null,
      !map && !answer.error ? el(Skeleton, { height: expected, waitsFor: 'the map' }) : null,
      map && wantsPins(map) ? el(PinReasons, { map }) : null,
      map && map.columns === 0 ? t.p({ class: 'note padded' }, map.text) : null,
      held ? t.p({ class: 'heldnote', role: 'status' }, 'New steps are in; they show when you stop pointing.') : null,
    ),
  );
}

/** @param {MapData} map @returns {Lanes} */
function decodeLanes(map) {
  const cells = decodeBytes(map.cells);
  const missing = decodeBytes(map.missing);
  const usual = usualOf(map).stretch;
  const part = (/** @type {Uint8Array} */ all, /** @type {number} */ row) =>
    all.subarray(row * map.columns, (row + 1) * map.columns);
  return {
    rows: map.rows.map((_, row) => {
      const own = part(cells, row);
      return { cells: own, missing: part(missing, row), stretch: stretches(own, usual) };
    }),
    // Who is pinned is suspected: what of it is a little slow is shown, too.
    pins: map.pinned.map((pin) => {
      const own = decodeBytes(pin.cells);
      return { cells: own, missing: decodeBytes(pin.missing), stretch: new Uint8Array(own.length).fill(1) };
    }),
  };
}

/** Names beside the lanes: all of them where they fit, else as many as do. @param {{map: MapData, plan: Layout, lanes: Lanes, run: string, band: import('../../types/api.js').MapBand | null}} props */
function Gutter({ map, plan, lanes, run, band: beside }) {
  const rows = plan.bands.filter((band) => band.kind === 'row');
  const pitch = rows.length > 1 ? rows[1].y - rows[0].y : 20;
  const onset = map.marks.find((mark) => mark.kind === 'onset')?.step ?? map.step_lo;
  const every = Math.max(1, Math.ceil(16 / pitch));
  const groups = groupsOf(map.rows, rows);
  const named = every > 1 && groups.length > 0 ? groupNames(groups, every) : null;
  return t.div(
    { class: 'gutter', style: { height: `${plan.height}px` } },
    plan.bands.map((band) => {
      const style = { top: `${band.y}px`, height: `${Math.max(NAME_HEIGHT, band.height)}px` };
      if (band.kind === 'strip')
        return t.div(
          { key: 'strip', class: 'lanename strip', style },
          t.b(null, 'Throughput'),
          t.span({ class: 'faint' }, 'steps per second'),
        );
      if (band.kind === 'pin') {
        const pin = map.pinned[band.index];
        return t.div(
          { key: `p${band.index}`, class: 'lanename pinned', style, title: pinTitle(pin) },
          t.a({ href: runPath(run, 'ranks', String(pin.rank)), class: 'quiet strong' }, pin.label),
          t.span({ class: 'faint' }, pin.host),
          isPeak(map, pin)
            ? t.b(
                { class: 'lanepeak' },
                t.span({ class: 'lanez' }, 'max '),
                deviation(/** @type {number} */ (pin.max_ratio)),
                pin.max_z === null ? '' : t.span({ class: 'lanez' }, ` z ${zText(pin.max_z)}`),
              )
            : null,
        );
      }
      const row = map.rows[band.index];
      const room = named?.get(band.index) ? plan.bottom + AXIS_GAP : plan.bottom;
      if (every > 1 && band.y + NAME_HEIGHT > room) return null;
      if (named ? !named.has(band.index) : every > 1 && band.index % every !== 0) return null;
      const group = named?.get(band.index);
      if (group) {
        const title = `${group}: ${row.label} and on`;
        const name =
          map.order === 'node'
            ? t.a({ href: runPath(run, 'nodes', group), class: 'quiet' }, t.b(null, group))
            : t.b(null, group);
        return t.div({ key: `r${band.index}`, class: 'lanename', style, title }, name);
      }
      const usual = usualLevel(lanes.rows[band.index].cells, map, onset);
      const slow = usual !== null && map.unit === 'ratio' && usual > 127 && !isNeutral(usual, usualOf(map).stretch);
      return t.div(
        { key: `r${band.index}`, class: 'lanename', style, title: `${ranksTitle(row)}${placeWords(row)}` },
        row.ranks.length === 1 && every * pitch >= LINK_PITCH
          ? t.a({ href: runPath(run, 'ranks', String(rankOf(row))), class: 'quiet' }, row.label)
          : t.span(null, row.label),
        every === 1
          ? t.span(
              { class: 'faint' },
              usual === null
                ? 'no data'
                : slow
                  ? t.b({ class: 'lanepeak' }, levelWords(map, usual))
                  : row.label.includes(row.host)
                    ? row.group
                    : row.group || row.host,
            )
          : null,
      );
    }),
    (beside ? bandRuns(beside, rows) : []).map(({ place, name, top, bottom }) =>
      t.div({
        key: `g${top}`,
        class: `groupband tone${place % TONES}`,
        style: { top: `${top}px`, height: `${bottom - top}px` },
        title: name,
      }),
    ),
    every > 1 && beside && !named
      ? bandRuns(beside, rows)
          .filter(({ top, bottom }) => bottom - top >= NAME_HEIGHT)
          .map(({ name, top, bottom }) =>
            t.div(
              {
                key: `b${top}`,
                class: 'bandname faint',
                style: { top: `${top}px`, height: `${bottom - top}px` },
                title: name,
              },
              beside.key === 'node' && bottom - top >= LINK_PITCH
                ? t.a(
                    { href: runPath(run, 'nodes', name), class: 'quiet', 'aria-label': name },
                    middle(name, BAND_CHARS),
                  )
                : middle(name, BAND_CHARS),
            ),
          )
      : null,
    t.div(
      { class: 'lanename axisname', style: { top: `${plan.bottom + AXIS_GAP}px`, height: '32px' } },
      t.span(null, ''),
      t.span({ class: 'faint' }, 'step', t.br(null), 'time of day'),
    ),
  );
}

/** Whether a pinned rank is slower than usual somewhere. @param {MapData} map @param {MapData['pinned'][number]} pin */
function isPeak(map, pin) {
  return pin.max_ratio !== null && pin.max_ratio > usualOf(map).stretch[1];
}

/** Why ranks are pinned whose lanes do not show it. @param {{map: MapData}} props */
function PinReasons({ map }) {
  const quiet = map.pinned.filter((pin) => !isPeak(map, pin));
  if (quiet.length === 0) return null;
  return t.ul(
    { class: 'plainlist note pinreasons' },
    quiet.map((pin) => t.li({ key: pin.rank }, t.b(null, `${pin.label} is pinned: `), sentence(pin.why))),
  );
}

/** @param {MapData['pinned'][number]} pin */
function pinTitle({ label, host, why, max_ratio: ratio, max_z: z }) {
  const most = ratio === null ? '' : `; at most ${deviation(ratio)}${z === null ? '' : `, ${zWords(z)}`}`;
  return `${label} on ${host}: ${why}${most}`;
}

/** @typedef {{name: string, first: number, lanes: number, top: number, bottom: number}} Group */

/** The groups of the lanes, from top to bottom; none where lanes are not grouped. @param {MapData['rows']} rows @param {Band[]} bands @returns {Group[]} */
function groupsOf(rows, bands) {
  /** @type {Group[]} */
  const groups = [];
  for (const [index, { group: name }] of rows.entries()) {
    const { y, height } = bands[index];
    const last = groups.at(-1);
    if (last && last.name === name) Object.assign(last, { lanes: last.lanes + 1, bottom: y + height });
    else groups.push({ name, first: index, lanes: 1, top: y, bottom: y + height });
  }
  return groups.filter((group) => group.name !== '');
}

/** Which lanes get a name where not all do: the first of a group its name, then every so many. @param {Group[]} groups @param {number} every */
function groupNames(groups, every) {
  /** @type {Map<number, string>} */
  const names = new Map();
  let free = 0;
  for (const { name, first, lanes, top } of groups) {
    if (top < free) continue; // its band shows the name
    for (let index = 0; index === 0 || index + every <= lanes; index += every)
      names.set(first + index, index === 0 ? name : '');
    free = top + NAME_HEIGHT;
  }
  return names;
}

/** @param {{run: string, view: View, strip: Throughput | null, errors: Errors['groups']}} props */
function Plot({ run, view, strip, errors }) {
  const { map, plan, width } = view;
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const region = useRef(/** @type {HTMLDivElement | null} */ (null));
  const spot = useMemo(() => signal(/** @type {Spot | null} */ (null)), []);
  const brush = useMemo(() => signal(/** @type {import('./cursor.js').Brush | null} */ (null)), []);
  const draft = useMemo(() => signal(/** @type {import('../url.js').Area | null} */ (null)), []);
  const anchor = useRef(/** @type {{band: Band, step: number} | null} */ (null));
  const timer = useRef(/** @type {ReturnType<typeof setTimeout> | undefined} */ (undefined));
  const [fonts, setFonts] = useState(document.fonts.status === 'loaded');
  const look = theme.value;
  const asked = useRef(0);
  const nameSoon = useNaming(run, view, spot);
  const selected = readCell(query.value.sel);
  const rank = readRank(query.value.sel);
  const area = readArea(query.value.area);

  useEffect(() => {
    draft.value = null;
  }, [query.value.area]);
  useEffect(() => {
    anchor.current = null; // its lane is of the map before
  }, [map.order, map.rows.length, map.step_lo, map.bin]);
  useEffect(() => {
    document.fonts.ready.then(() => setFonts(true));
  }, []);
  useLayoutEffect(() => {
    if (canvas.current && region.current)
      paint(canvas.current, {
        map,
        lanes: view.lanes,
        strip,
        plan,
        theme: look,
        width,
        colours: tokens(region.current),
      });
  }, [map, strip, look, width, fonts, plan.height]);

  const lanesOnly = plan.bands.filter((band) => band.kind !== 'strip');
  const spotAt = (/** @type {PointerEvent | MouseEvent} */ event) => {
    const box = /** @type {HTMLElement} */ (region.current).getBoundingClientRect();
    const x = Math.max(0, Math.min(width - 1, event.clientX - box.left));
    const band = bandAt(plan, event.clientY - box.top);
    return { x, step: stepAt(map, x, width), band: band && band.kind !== 'strip' ? band : null };
  };
  const cellAt = async (/** @type {Spot} */ at) =>
    (await worstAt(run, view, at)) ?? { rank: rankOf(readSpot(view, at).row), step: at.step };
  async function pin(/** @type {Spot} */ at) {
    asked.current += 1;
    const mine = asked.current;
    const { rank, step } = await cellAt(at);
    if (mine === asked.current) setQuery({ sel: writeCell({ rank, step }) });
  }
  function move(/** @type {Spot | null} */ to, speak = false) {
    spot.value = to;
    if (!to || !speak) return;
    const read = readSpot(view, to);
    const from =
      map.unit !== 'ratio' || read.level === MISSING
        ? ''
        : map.reference === 'own'
          ? ' from its own early steps'
          : ' from median';
    announce(
      `${read.row.label}${placeWords(read.row)}${bandWords(view, to.band, read.row)}, step ${to.step}, ${levelWords(map, read.level)}${from}${noiseWords(map, read.level)}`,
    );
    if (read.level !== MISSING && (read.row.ranks.length > 1 || map.bin > 1)) nameSoon(to);
  }
  function zoomBy(/** @type {number} */ factor, /** @type {number} */ centre) {
    const whole = {
      low: 1,
      high: Math.max(map.step_hi, readRange(query.value.steps) ? Number.MAX_SAFE_INTEGER / 4 : map.step_hi),
    };
    const range = zoom({ low: map.step_lo, high: map.step_hi }, whole, centre, factor);
    setQuery({ steps: range ? `${range[0]}-${range[1]}` : null }, { replace: true });
  }
  function select(/** @type {import('../url.js').Area | string} */ chosen, replace = false) {
    if (typeof chosen === 'string') announce(chosen);
    else setQuery({ area: writeArea(chosen) }, { replace });
  }
  /** What a drag from one place to another takes: steps of the strip, ranks by steps of lanes.
   * @param {ReturnType<typeof spotAt>} from @param {ReturnType<typeof spotAt>} to @param {number} y of the pointer
   * @returns {import('./cursor.js').Brush} */
  function brushOf(from, to, y) {
    const [left, right] = [Math.min(from.x, to.x), Math.max(from.x, to.x)];
    if (!from.band) {
      const steps = `${stepAt(map, left, width)}-${stepAt(map, right, width)}`;
      const take = () => setQuery({ steps });
      return { left, width: right - left, top: 0, height: plan.bottom, text: `Zoom to steps ${steps}`, take };
    }
    const band = nearestBand(plan, from.band.kind === 'pin' ? 'pin' : 'row', y) ?? from.band;
    const chosen = areaBetween(view, { ...from, band: from.band }, { ...to, band });
    const top = Math.min(from.band.y, band.y);
    const height = Math.max(from.band.y + from.band.height, band.y + band.height) - top;
    const text = typeof chosen === 'string' ? chosen : areaWords(chosen);
    return { left, width: right - left, top, height, text, take: () => select(chosen) };
  }
  /** @type {import('preact').PointerEventHandler<HTMLDivElement>} */
  function press(event) {
    if (event.button !== 0) return;
    const from = spotAt(event);
    region.current?.setPointerCapture(event.pointerId);
    const drag = (/** @type {PointerEvent} */ ev) => {
      const to = spotAt(ev);
      const far = Math.abs(to.x - from.x) > 4 || (from.band && Math.abs(ev.clientY - event.clientY) > 4);
      const box = /** @type {HTMLElement} */ (region.current).getBoundingClientRect();
      brush.value = far ? brushOf(from, to, ev.clientY - box.top) : null;
    };
    const release = (/** @type {PointerEvent} */ ev) => {
      region.current?.removeEventListener('pointermove', drag);
      region.current?.removeEventListener('pointerup', release);
      region.current?.removeEventListener('pointercancel', release);
      const box = brush.value;
      brush.value = null;
      if (ev.type === 'pointercancel') return;
      if (box) box.take();
      else if (from.band) pin({ ...from, band: from.band });
    };
    region.current?.addEventListener('pointermove', drag);
    region.current?.addEventListener('pointerup', release);
    region.current?.addEventListener('pointercancel', release);
  }
  /** Select from where Shift was first held to a spot, once the keys rest. @param {{band: Band, step: number}} from @param {Spot} to */
  function extend(from, to) {
    anchor.current ??= from;
    if (anchor.current.band.kind !== to.band.kind) return;
    const chosen = areaBetween(view, anchor.current, to);
    if (typeof chosen === 'string') return announce(chosen);
    draft.value = chosen;
    clearTimeout(timer.current);
    timer.current = setTimeout(() => select(chosen, area !== null), TAKEN_MS);
  }
  /** @type {import('preact').KeyboardEventHandler<HTMLDivElement>} */
  function key(event) {
    // A Mac keeps Ctrl with an arrow for itself: Alt does the same.
    const far = (event.ctrlKey || event.altKey) && event.key.startsWith('Arrow');
    if (((event.ctrlKey || event.altKey) && !far) || event.metaKey || lanesOnly.length === 0) return;
    const start = selected
      ? { band: bandOf(view, selected.rank) ?? lanesOnly[0], step: selected.step }
      : { band: lanesOnly[0], step: map.step_hi };
    const at = spot.value ?? { ...start, x: 0 };
    const here = Math.max(0, laneOf(lanesOnly, at.band));
    const to = moveSpot(event.key, far, { here, step: at.step, view, lanesOnly });
    if (to) {
      const next = { band: lanesOnly[to.lane], step: to.step, x: xOf(map, to.step, width) };
      if (!event.shiftKey) anchor.current = null;
      else extend(at, next);
      move(next, !event.shiftKey);
    } else if (event.key === 'Escape' && (area || draft.value)) {
      clearTimeout(timer.current);
      anchor.current = null;
      draft.value = null;
      setQuery({ area: null });
    } else if (event.key === 'Enter' && spot.value) {
      cellAt(at).then(({ rank, step }) =>
        go(withQuery(runPath(run, 'steps', String(step)), { sel: writeCell({ rank, step }) })),
      );
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
      'aria-label': `Map of ${count(map.world_size)} ranks by steps ${count(map.step_lo)} to ${count(map.step_hi)}. ${map.text} ${errors.length > 0 ? `${plural(errors.length, 'kind')} of errors marked. ` : ''}Arrow keys move a cell, with Shift they select ranks and steps, Space pins it, Enter opens the step, plus and minus zoom, t shows a table.`,
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
    el(ErrorMarks, { view, errors }),
    rank === null ? null : el(Selection, { view, rank, step: selected?.step ?? null }),
    el(AreaBoxes, { view, area, draft }),
    el(Cursor, { view, spot, brush, run }),
  );
}
