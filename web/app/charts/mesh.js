/** The mesh of ranks: each in its coordinates, coloured by one of its numbers. */

import { signal } from '@preact/signals';
import { useLayoutEffect, useMemo, useRef } from 'preact/hooks';
import { bytes, count, deviation, duration, percent, si } from '../format.js';
import { announce, theme } from '../page.js';
import { useWidth } from '../parts/bits.js';
import { go, query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { readRank, runPath } from '../url.js';
import { blockNames, cornerOf, levelOf, moved, placeAt, placeOf, planMesh } from './mesh-maths.js';
import { tokens } from './paint.js';
import { HATCH, palette } from './scene.js';

/** @typedef {import('../../types/api.js').Mesh} Mesh */
/** @typedef {import('../../types/api.js').MeshValue} Value */
/** @typedef {import('./mesh-maths.js').Plan} Plan */

const MAX_HEIGHT = 460;
const NAMED_CELL = 24; // px: from there on a cell holds its rank
const EDGED_CELL = 8;
/** Within this of the peers a cell has no colour, as on the map. @type {readonly [number, number]} */
const USUAL = [1 / 1.08, 1.08];

/** A number of a rank in words. @param {Value} value @param {number | null} number */
export function numberWords(value, number) {
  if (number === null) return 'no data';
  if (value.unit === 'times') return deviation(number);
  if (value.unit === 'ratio') return percent(number);
  if (value.unit === 'ms') return duration(number);
  return value.unit === 'bytes' ? bytes(number) : si(number, value.unit);
}

/** Where a rank is. @param {Mesh} mesh @param {number} row */
export function whereWords(mesh, row) {
  const host = mesh.host[row] < 0 ? '' : ` on ${mesh.hosts[mesh.host[row]]}`;
  const at = mesh.axes.length > 1 ? mesh.axes.map((axis, i) => `${axis.name} ${mesh.at[row][i]}`).join(', ') : '';
  return `${host}${at ? `: ${at}` : ''}`;
}

/** @param {{mesh: Mesh, value: Value, run: string}} props */
export function MeshChart({ mesh, value, run }) {
  const frame = useRef(/** @type {HTMLDivElement | null} */ (null));
  const region = useRef(/** @type {HTMLDivElement | null} */ (null));
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const width = useWidth(frame);
  const spot = useMemo(() => signal(/** @type {number | null} */ (null)), []);
  const look = theme.value;
  const plan = useMemo(() => (width ? planMesh(mesh.axes, width, MAX_HEIGHT) : null), [mesh, width]);
  const places = useMemo(() => (plan ? mesh.at.map((at) => placeOf(plan, mesh.axes, at)) : []), [mesh, plan]);
  const rowAt = useMemo(() => new Map(places.map((place, row) => [`${place.row},${place.column}`, row])), [places]);
  useLayoutEffect(() => {
    if (plan && canvas.current && region.current)
      paint(canvas.current, region.current, { mesh, value, plan, places, look });
  }, [mesh, value, plan, look]);
  const selected = readRank(query.value.sel);
  const pinned = selected === null ? -1 : mesh.rank.indexOf(selected);
  const find = (/** @type {{row: number, column: number} | null} */ place) =>
    (place && rowAt.get(`${place.row},${place.column}`)) ?? null;
  function say(/** @type {number} */ row) {
    announce(
      `Rank ${mesh.rank[row]}${whereWords(mesh, row)}; ${value.title}: ${numberWords(value, value.values[row])}`,
    );
  }
  /** @type {import('preact').KeyboardEventHandler<HTMLDivElement>} */
  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !plan || places.length === 0) return;
    const here = spot.value ?? Math.max(pinned, 0);
    const to = moved(event.key, event.shiftKey, places[here], plan);
    if (to) {
      // The first key shows where the cursor is.
      spot.value = spot.value === null ? here : (find(to) ?? here);
      say(spot.value);
    } else if (event.key === ' ') setQuery({ sel: String(mesh.rank[here]) });
    else if (event.key === 'Enter' && spot.value !== null) go(runPath(run, 'ranks', String(mesh.rank[here])));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
  const at = (/** @type {PointerEvent | MouseEvent} */ event) => {
    const box = /** @type {HTMLElement} */ (region.current).getBoundingClientRect();
    return plan ? find(placeAt(plan, event.clientX - box.left, event.clientY - box.top)) : null;
  };
  return t.div(
    { class: 'meshframe scroll', ref: frame },
    plan
      ? t.div(
          {
            class: 'plotregion mesh',
            ref: region,
            role: 'application',
            tabIndex: 0,
            'aria-label': `Mesh of ${mesh.text}, coloured by ${value.title}. Arrow keys move from rank to rank, Space pins one, Enter opens it, c shows another number, t shows a table.`,
            style: { width: `${plan.width}px`, height: `${plan.height}px` },
            onPointerMove: (event) => {
              spot.value = at(event);
            },
            onPointerLeave: () => {
              spot.value = null;
            },
            onClick: (event) => {
              const row = at(event);
              setQuery({ sel: row === null ? null : String(mesh.rank[row]) });
            },
            onKeyDown: key,
            onBlur: () => {
              spot.value = null;
            },
          },
          t.canvas({
            ref: canvas,
            'aria-hidden': 'true',
            style: { width: `${plan.width}px`, height: `${plan.height}px` },
          }),
          el(Names, { mesh, plan }),
          pinned >= 0 ? t.div({ class: 'cellbox', style: boxStyle(plan, places[pinned]) }) : null,
          el(Tip, { mesh, value, plan, places, spot }),
        )
      : null,
  );
}

/** @param {Plan} plan @param {{row: number, column: number}} place */
function boxStyle(plan, place) {
  const { x, y } = cornerOf(plan, place);
  return { left: `${x - 2}px`, top: `${y - 2}px`, width: `${plan.cell + 4}px`, height: `${plan.cell + 4}px` };
}

/** Names of rows and blocks. @param {{mesh: Mesh, plan: Plan}} props */
function Names({ mesh, plan }) {
  const { roles, rows, columns, pitch, perLine, numBlocks } = plan;
  const down = roles.down === null ? null : mesh.axes[roles.down];
  const across = mesh.axes[roles.across];
  const lines = Math.ceil(numBlocks / perLine);
  const every = Math.max(1, Math.ceil(14 / pitch));
  const named =
    down === null
      ? []
      : Array.from({ length: lines * rows }, (_, row) => row).filter((row) => (row % rows) % every === 0);
  const blocks = blockNames(plan, mesh.axes);
  return t.div(
    { class: 'meshnames', 'aria-hidden': 'true' },
    named.map((row) =>
      t.span(
        {
          key: `r${row}`,
          class: 'meshrow',
          style: { top: `${cornerOf(plan, { row, column: 0 }).y + plan.cell / 2 - 8}px` },
        },
        `${down?.name} ${row % rows}`,
      ),
    ),
    blocks.map(({ block, text, title }) => {
      const { x, y } = cornerOf(plan, { row: Math.floor(block / perLine) * rows, column: (block % perLine) * columns });
      return t.span(
        { key: `b${block}`, class: 'meshblock', title, style: { left: `${x}px`, top: `${y - 16}px` } },
        text,
      );
    }),
    down !== null && blocks.length === 0
      ? t.span(
          { class: 'meshblock', style: { left: `${plan.left}px`, top: '0' } },
          `${across.name} 0–${across.size - 1}`,
        )
      : null,
  );
}

/** @param {{mesh: Mesh, value: Value, plan: Plan, places: {row: number, column: number}[], spot: import('@preact/signals').Signal<number | null>}} props */
function Tip({ mesh, value, plan, places, spot }) {
  const row = spot.value;
  if (row === null) return null;
  const { x, y } = cornerOf(plan, places[row]);
  const onLeft = x > plan.width - 270;
  const style = {
    top: `${Math.max(0, Math.min(plan.height - 66, y + plan.cell + 8))}px`,
    ...(onLeft ? { right: `${plan.width - x + 10}px` } : { left: `${x + plan.cell + 10}px` }),
  };
  return t.div(
    { class: 'cursor' },
    t.div({ class: 'meshhair', style: boxStyle(plan, places[row]) }),
    t.div(
      { class: 'tip', style },
      t.b(null, `Rank ${count(mesh.rank[row])}`),
      whereWords(mesh, row),
      t.br(null),
      t.b(null, numberWords(value, value.values[row])),
      t.span({ class: 'faint' }, ` ${value.title.charAt(0).toLowerCase()}${value.title.slice(1)}`),
    ),
  );
}

/** @param {HTMLCanvasElement} canvas @param {HTMLElement} within
 * @param {{mesh: Mesh, value: Value, plan: Plan, places: {row: number, column: number}[], look: 'light' | 'dark'}} scene */
function paint(canvas, within, { mesh, value, plan, places, look }) {
  const ratio = devicePixelRatio || 1;
  const context = canvas.getContext('2d');
  if (!context) return;
  canvas.width = Math.round(plan.width * ratio);
  canvas.height = Math.round(plan.height * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const colours = tokens(within, ['edge']);
  const table = palette(look, value.unit === 'times' ? 'ratio' : 'ms', USUAL);
  const { cell } = plan;
  context.font = `11px ${colours.font}`;
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  places.forEach((place, row) => {
    const { x, y } = cornerOf(plan, place);
    const number = value.values[row];
    const packed = table[levelOf(value, number)];
    const [r, g, b] = [packed & 255, (packed >> 8) & 255, (packed >> 16) & 255];
    context.fillStyle = `rgb(${r} ${g} ${b})`;
    context.fillRect(x, y, cell, cell);
    if (number === null) hatch(context, x, y, cell, look);
    if (cell >= EDGED_CELL) {
      context.strokeStyle = colours.edge;
      context.lineWidth = 0.75;
      context.strokeRect(x + 0.5, y + 0.5, cell - 1, cell - 1);
    }
    if (cell >= NAMED_CELL && number !== null && context.measureText(String(mesh.rank[row])).width < cell - 4) {
      context.fillStyle = 0.299 * r + 0.587 * g + 0.114 * b > 140 ? '#171b21' : '#ffffff';
      context.fillText(String(mesh.rank[row]), x + cell / 2, y + cell / 2 + 0.5);
    }
  });
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} size @param {'light' | 'dark'} look */
function hatch(context, x, y, size, look) {
  context.save();
  context.beginPath();
  context.rect(x, y, size, size);
  context.clip();
  context.strokeStyle = HATCH[look].line;
  context.lineWidth = 1.5;
  context.beginPath();
  for (let at = -size; at < size; at += 5) {
    context.moveTo(x + at, y + size);
    context.lineTo(x + at + size, y);
  }
  context.stroke();
  context.restore();
}
