/** One step of the ranks on one clock: lanes, the critical path, arrows, and one cursor over them. */

import { signal } from '@preact/signals';
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from 'preact/hooks';
import { bytes, count, duration } from '../format.js';
import { announce, theme } from '../page.js';
import { useWidth } from '../parts/bits.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import {
  clampView,
  columnsOf,
  firstAfter,
  flightsByCall,
  LOOKS,
  laneAt,
  panView,
  planOf,
  readSpot,
  readView,
  severities,
  sliceAt,
  TARGET,
  writeView,
  zoomView,
} from './timeline-maths.js';
import { paintTimeline, timelineColours } from './timeline-paint.js';

/** @typedef {import('../../types/api.js').StepTimeline} StepTimeline */
/** @typedef {import('./timeline-maths.js').View} View */
/** @typedef {import('./timeline-paint.js').Model} Model */
/** @typedef {{lane: number, time: number, slice: number, x: number}} Spot */

const COMMIT_MS = 250; // a view that moves goes into the address once it rests
const REACH = 3; // pixels

/** @param {StepTimeline} data @returns {Model} */
export function modelOf(data) {
  const flights = columnsOf(data.flights, data.lanes.length);
  return {
    data,
    slices: columnsOf(data.slices, data.lanes.length),
    flights,
    byCall: flightsByCall(flights, data.calls.length),
    ranks: data.lanes.map((lane) => lane.rank),
    severity: severities(data.kinds),
  };
}

/** What a slice is, in words. @param {Model} model @param {number} slice */
export function sliceWords({ data, slices }, slice) {
  const kind = data.kinds[slices.kind[slice]];
  const call = slices.call[slice] >= 0 ? data.calls[slices.call[slice]] : null;
  const name = LOOKS[kind]?.[1] ?? kind;
  const more = slices.microbatch[slice] >= 0 ? `, microbatch ${slices.microbatch[slice] + 1}` : '';
  const late =
    call && call.last_rank !== null && (kind === 'waiting' || kind === 'bubble')
      ? `, rank ${call.last_rank} came last`
      : '';
  return `${name}${more}${call ? ` in ${callWords(call)}` : ''}${late}`;
}

/** @param {import('../../types/api.js').StepCall} call */
export function callWords(call) {
  const between =
    call.source !== null || call.target !== null
      ? ` from rank ${call.source ?? '?'} to rank ${call.target ?? '?'}`
      : '';
  return `${call.operation}${between}${call.size_bytes > 0 ? ` of ${bytes(call.size_bytes)}` : ''}`;
}

/** `shown` is what of the step is in view. @param {{run: string, model: Model, shown: import('@preact/signals').Signal<View>}} props */
export function Timeline({ run, model, shown }) {
  const { data } = model;
  const plot = useRef(/** @type {HTMLDivElement | null} */ (null));
  const width = useWidth(plot);
  const plan = useMemo(() => planOf(data.lanes.length), [data]);
  return t.div(
    { class: 'rankmap timeline' },
    el(Gutter, { run, data, plan }),
    t.div(
      { class: 'plotframe' },
      t.div(
        { class: 'plot', ref: plot, style: { minHeight: `${plan.height}px` } },
        width > 0 ? el(Plot, { model, plan, width, shown }) : null,
      ),
    ),
  );
}

/** @param {{run: string, data: StepTimeline, plan: import('./timeline-maths.js').Plan}} props */
function Gutter({ run, data, plan }) {
  const every = Math.max(1, Math.ceil(15 / plan.pitch));
  return t.div(
    { class: 'gutter', style: { height: `${plan.height}px` } },
    t.div(
      { class: 'lanename', style: { top: '1px', height: '14px' } },
      t.b(null, 'Critical path'),
      data.path.length > 0 ? null : t.span({ class: 'faint' }, 'not known'),
    ),
    plan.rows.map((row) => {
      const lane = data.lanes[row.lane];
      if (row.lane % every !== 0) return null;
      const stage = lane.stage === null ? '' : `stage ${lane.stage}`;
      const note = [stage, lane.why || (lane.stage === null ? lane.host : '')].filter(Boolean).join(', ');
      return t.div(
        {
          key: lane.rank,
          class: 'lanename',
          style: { top: `${row.top}px`, height: `${Math.max(14, row.height)}px` },
          title: `Rank ${lane.rank} on ${lane.host}${stage ? `, ${stage}` : ''}${lane.why ? `: ${lane.why}` : ''}`,
        },
        plan.pitch < TARGET
          ? t.span(null, `Rank ${count(lane.rank)}`)
          : t.a({ href: runPath(run, 'ranks', String(lane.rank)), class: 'quiet' }, `Rank ${count(lane.rank)}`),
        t.span({ class: 'faint' }, lane.state === 'recorded' ? note : lane.state),
      );
    }),
    t.div(
      { class: 'lanename axisname', style: { top: `${plan.bottom + 5}px`, height: '14px' } },
      t.span(null, ''),
      t.span({ class: 'faint' }, 'from its begin'),
    ),
  );
}

/** @param {{model: Model, plan: import('./timeline-maths.js').Plan, width: number, shown: import('@preact/signals').Signal<View>}} props */
function Plot({ model, plan, width, shown }) {
  const { data, slices } = model;
  const length = data.length_us;
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const region = useRef(/** @type {HTMLDivElement | null} */ (null));
  const view = useRef(/** @type {View} */ ([0, length]));
  const commit = useRef(/** @type {ReturnType<typeof setTimeout> | undefined} */ (undefined));
  const frame = useRef(0);
  const spot = useMemo(() => signal(/** @type {Spot | null} */ (null)), []);
  const brush = useMemo(() => signal(/** @type {[number, number] | null} */ (null)), []);
  const [fonts, setFonts] = useState(document.fonts.status === 'loaded');
  const look = theme.value;
  const pinned = readSpot(query.value.at);
  const lane = pinned ? model.ranks.indexOf(pinned.rank) : model.ranks.indexOf(selectedRank(query.value.sel));
  const slice = pinned && lane >= 0 ? sliceAt(slices, lane, pinned.time, 1) : -1;
  const call = slice >= 0 ? slices.call[slice] : -1;

  const colours = useRef({ look: '', found: /** @type {Record<string, string>} */ ({}) });
  const draw = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => {
      if (!canvas.current || !region.current) return;
      // Read once for a theme: to resolve them takes as long as a third of a frame.
      if (colours.current.look !== look) colours.current = { look, found: timelineColours(region.current) };
      paintTimeline(canvas.current, {
        model,
        plan,
        view: view.current,
        width,
        theme: look,
        colours: colours.current.found,
        pinned: call,
        lane,
      });
    });
  };
  useEffect(() => {
    document.fonts.ready.then(() => setFonts(true));
    return () => {
      cancelAnimationFrame(frame.current);
      clearTimeout(commit.current);
    };
  }, []);
  useLayoutEffect(() => {
    const asked = readView(query.value.t, length);
    if (writeView(asked, length) !== writeView(view.current, length) || view.current[1] > length) {
      view.current = asked;
      shown.value = asked;
    }
    draw();
  }, [data, query.value.t, width, look, fonts, plan, call, lane]);

  function show(/** @type {View} */ to, /** @type {boolean} */ push = false) {
    view.current = clampView(to, length);
    spot.value = spot.value && { ...spot.value, x: xOf(spot.value.time) };
    draw();
    shown.value = view.current;
    clearTimeout(commit.current);
    const write = () => setQuery({ t: writeView(view.current, length) }, { replace: !push });
    if (push) write();
    else commit.current = setTimeout(write, COMMIT_MS);
  }
  const xOf = (/** @type {number} */ time) => ((time - view.current[0]) / (view.current[1] - view.current[0])) * width;
  const timeOf = (/** @type {number} */ x) => view.current[0] + (x / width) * (view.current[1] - view.current[0]);

  function spotAt(/** @type {{clientX: number, clientY: number}} */ event) {
    const box = /** @type {HTMLElement} */ (region.current).getBoundingClientRect();
    const x = Math.max(0, Math.min(width - 1, event.clientX - box.left));
    const at = laneAt(plan, event.clientY - box.top);
    const time = timeOf(x);
    const reach = (REACH / width) * (view.current[1] - view.current[0]);
    return { lane: at, time, slice: at < 0 ? -1 : sliceAt(slices, at, time, reach), x };
  }
  function pin(/** @type {Spot | null} */ at) {
    if (!at || at.lane < 0 || at.slice < 0) return setQuery({ at: null });
    return setQuery({ at: `${model.ranks[at.lane]}:${Math.round(middleOf(at.slice))}` });
  }
  const middleOf = (/** @type {number} */ i) => (slices.begin[i] + slices.end[i]) / 2;
  function speak(/** @type {Spot} */ at) {
    spot.value = at;
    const rank = `Rank ${model.ranks[at.lane]}`;
    announce(
      at.slice < 0
        ? `${rank}: ${data.lanes[at.lane].state === 'recorded' ? 'nothing here' : data.lanes[at.lane].state}`
        : `${rank}, ${sliceWords(model, at.slice)}, ${duration((slices.end[at.slice] - slices.begin[at.slice]) / 1000)} at ${duration(slices.begin[at.slice] / 1000)}`,
    );
  }
  /** Move the cursor to a slice of a lane, and the view to it. */
  function goTo(/** @type {number} */ to, /** @type {number} */ i, /** @type {number} */ time) {
    const at = i < 0 ? time : Math.max(slices.begin[i], Math.min(time, slices.end[i]));
    if (at < view.current[0] || at > view.current[1]) {
      const half = (view.current[1] - view.current[0]) / 2;
      show([at - half, at + half]);
    }
    speak({ lane: to, time: at, slice: i, x: xOf(at) });
  }
  function start() {
    const at = Math.max(0, lane);
    const time = pinned && lane >= 0 ? pinned.time : view.current[0];
    return { lane: at, time, slice: Math.min(firstAfter(slices, at, time), slices.first[at + 1] - 1), x: xOf(time) };
  }
  /** @type {import('preact').KeyboardEventHandler<HTMLDivElement>} */
  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || data.lanes.length === 0) return;
    const at = spot.value && spot.value.lane >= 0 ? spot.value : start();
    const beside = (/** @type {number} */ to) => {
      const next = Math.max(0, Math.min(data.lanes.length - 1, to));
      goTo(next, sliceAt(slices, next, at.time, length), at.time);
    };
    const along = (/** @type {number} */ i) => {
      const [low, high] = [slices.first[at.lane], slices.first[at.lane + 1] - 1];
      if (high < low) return speak({ ...at, slice: -1 });
      const to = Math.max(low, Math.min(high, i));
      return goTo(at.lane, to, middleOf(to));
    };
    const share = event.shiftKey ? 0.5 : 0.15;
    /** @type {Record<string, () => void>} */
    const moves = {
      ArrowLeft: () => along(spot.value ? at.slice - 1 : at.slice),
      ArrowRight: () => along(spot.value ? at.slice + 1 : at.slice),
      ArrowUp: () => beside(at.lane - (event.shiftKey ? 8 : 1)),
      ArrowDown: () => beside(spot.value ? at.lane + (event.shiftKey ? 8 : 1) : at.lane),
      Home: () => along(slices.first[at.lane]),
      End: () => along(slices.first[at.lane + 1] - 1),
      w: () => show(zoomView(view.current, at.time, 0.6, length)),
      s: () => show(zoomView(view.current, at.time, 1 / 0.6, length)),
      a: () => show(panView(view.current, -share, length)),
      d: () => show(panView(view.current, share, length)),
      '+': () => show(zoomView(view.current, at.time, 0.5, length)),
      '=': () => show(zoomView(view.current, at.time, 0.5, length)),
      '-': () => show(zoomView(view.current, at.time, 2, length)),
      0: () => show([0, length]),
      ' ': () => pin(at),
      Enter: () => pin(at),
    };
    const move = moves[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!move) return;
    move();
    event.preventDefault();
    event.stopPropagation();
  }
  /** A drag zooms, with Shift it moves the view; a click pins. @type {import('preact').PointerEventHandler<HTMLDivElement>} */
  function press(event) {
    if (event.button !== 0) return;
    const from = spotAt(event);
    const begun = view.current;
    const moving = event.shiftKey;
    const surface = /** @type {HTMLElement} */ (region.current);
    surface.setPointerCapture(event.pointerId);
    const drag = (/** @type {PointerEvent} */ ev) => {
      const to = spotAt(ev);
      if (moving) {
        const by = ((from.x - to.x) / width) * (begun[1] - begun[0]);
        show([begun[0] + by, begun[1] + by]);
      } else brush.value = Math.abs(to.x - from.x) > 4 ? [Math.min(from.x, to.x), Math.max(from.x, to.x)] : null;
    };
    const release = (/** @type {PointerEvent} */ ev) => {
      surface.removeEventListener('pointermove', drag);
      surface.removeEventListener('pointerup', release);
      surface.removeEventListener('pointercancel', release);
      const range = brush.value;
      brush.value = null;
      if (ev.type === 'pointercancel' || moving) return;
      if (range) show([timeOf(range[0]), timeOf(range[1])], true);
      else pin(from);
    };
    surface.addEventListener('pointermove', drag);
    surface.addEventListener('pointerup', release);
    surface.addEventListener('pointercancel', release);
  }
  /** @type {import('preact').WheelEventHandler<HTMLDivElement>} */
  function wheel(event) {
    if (!event.ctrlKey) return;
    event.preventDefault();
    show(zoomView(view.current, spotAt(event).time, event.deltaY > 0 ? 1.25 : 0.8, length));
  }
  return t.div(
    {
      class: 'plotregion',
      ref: region,
      role: 'application',
      tabIndex: 0,
      'aria-label': `Timeline of step ${count(data.step)}, ${count(data.lanes.length)} of ${count(data.world_size)} ranks, ${duration(length / 1000)}. ${data.path_text} Arrow keys move from slice to slice and from rank to rank, w and s zoom, a and d move, 0 shows all, Space pins, t shows a table.`,
      style: { height: `${plan.height}px` },
      onPointerMove: (event) => {
        spot.value = spotAt(event);
      },
      onPointerLeave: () => {
        spot.value = null;
      },
      onPointerDown: press,
      onDblClick: () => show([0, length], true),
      onWheel: wheel,
      onKeyDown: key,
      onBlur: () => {
        spot.value = null;
      },
    },
    t.canvas({ ref: canvas, 'aria-hidden': 'true', style: { width: `${width}px`, height: `${plan.height}px` } }),
    el(Cursor, { model, plan, width, spot, brush, timeOf }),
  );
}

/** "5@200" names a rank, too. @param {string | undefined} text */
function selectedRank(text) {
  const found = /^(\d+)(@\d+)?$/.exec(text ?? '');
  return found ? Number(found[1]) : -1;
}

/** @param {{model: Model, plan: import('./timeline-maths.js').Plan, width: number, spot: import('@preact/signals').Signal<Spot | null>, brush: import('@preact/signals').Signal<[number, number] | null>, timeOf: (x: number) => number}} props */
function Cursor({ model, plan, width, spot, brush, timeOf }) {
  const range = brush.value;
  if (range)
    return t.div(
      {
        class: 'brush',
        style: { left: `${range[0]}px`, width: `${range[1] - range[0]}px`, height: `${plan.bottom}px` },
      },
      t.span(null, duration((timeOf(range[1]) - timeOf(range[0])) / 1000)),
    );
  const at = spot.value;
  if (!at) return null;
  const { slices, data } = model;
  const row = plan.rows[at.lane];
  const lane = data.lanes[at.lane];
  const y = row ? row.top + row.height + 12 : 24;
  const side = at.x > width - 260 ? { right: `${width - at.x + 12}px` } : { left: `${at.x + 12}px` };
  return t.div(
    { class: 'cursor' },
    t.div({ class: 'crosshair', style: { left: `${at.x}px`, height: `${plan.bottom}px` } }),
    row ? t.div({ class: 'lanehair', style: { top: `${row.top}px`, height: `${row.height}px` } }) : null,
    t.div(
      { class: 'tip', style: { top: `${Math.min(y, Math.max(24, plan.height - 76))}px`, ...side } },
      row ? [t.b({ key: 'r' }, `Rank ${lane.rank}`), lane.host ? ` on ${lane.host}` : '', t.br({ key: 'b' })] : null,
      at.slice >= 0
        ? [
            t.b({ key: 'd' }, duration((slices.end[at.slice] - slices.begin[at.slice]) / 1000)),
            ` ${sliceWords(model, at.slice)}`,
            t.br({ key: 'c' }),
          ]
        : row && lane.state !== 'recorded'
          ? [lane.state, t.br({ key: 'c' })]
          : null,
      t.span({ class: 'faint' }, `at ${duration(at.time / 1000)}`),
    ),
  );
}
