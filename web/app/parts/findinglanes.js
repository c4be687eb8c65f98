/** Lanes of a finding: what each rank or process was in, and when it stopped. */

import { sentence, timeOfDay } from '../format.js';
import { el, t } from '../tags.js';
import { Table } from './bits.js';

/** @typedef {import('../../types/api.js').FindingLanes} Lanes */

/** How a state looks, and what it is called. @type {Record<string, [string, string]>} */
const STATES = {
  ran: ['fwd', 'runs'],
  waits: ['wait', 'in a call'],
  inside: ['opt', 'elsewhere in its program'],
  stopped: ['crit', 'stopped'],
  event: ['event', 'ended, or an error'],
};

/** @param {{part: Lanes}} props */
export function DrawnLanes({ part }) {
  const span = Math.max(1, part.end_ms - part.begin_ms);
  const at = (/** @type {number} */ ms) => percentOf(ms - part.begin_ms, span);
  const used = Object.keys(STATES).filter((state) =>
    part.lanes.some((lane) => lane.spans.some((s) => s.state === state)),
  );
  return t.div(
    { class: 'picture padded' },
    t.h3(null, part.title),
    t.div(
      { class: 'picturelanes' },
      part.lanes.map((lane) =>
        t.div(
          { class: 'lanerow', key: lane.label },
          t.span({ class: 'barlabel' }, lane.is_named ? t.b(null, lane.label) : lane.label),
          t.span(
            {
              class: 'lanetrack',
              role: 'img',
              'aria-label': `${lane.label}: ${lane.spans.map((one) => `${one.text} ${until(one)}`).join(', ')}`,
            },
            lane.spans.map((one, i) =>
              t.span({
                key: i,
                class: `laneseg t-${STATES[one.state][0]}`,
                title: `${one.text}, ${until(one)}`,
                style: { left: at(one.begin_ms), width: percentOf(one.end_ms - one.begin_ms, span) },
              }),
            ),
            part.onset === null || part.onset < part.begin_ms
              ? null
              : t.span({ class: 'lanemark', style: { left: at(part.onset) } }),
          ),
        ),
      ),
      t.div(
        { class: 'lanerow axis', 'aria-hidden': 'true' },
        t.span(null),
        t.span({ class: 'laneaxis' }, t.span(null, timeOfDay(part.begin_ms)), t.span(null, timeOfDay(part.end_ms))),
      ),
    ),
    t.ul(
      { class: 'partlegend' },
      used.map((state) =>
        t.li(
          { key: state },
          t.span({ class: `swatch t-${STATES[state][0]}`, 'aria-hidden': 'true' }),
          STATES[state][1],
        ),
      ),
      t.li(null, t.span({ class: 'hatchmark', 'aria-hidden': 'true' }), 'no data, or ended'),
      part.others ? t.li(null, `beside: ${part.others}`) : null,
    ),
    t.p({ class: 'note' }, sentence(part.text)),
    el(From, { source: part.source }),
  );
}

/** @param {Lanes['lanes'][0]['spans'][0]} span */
function until(span) {
  const begin = timeOfDay(span.begin_ms);
  return span.state === 'event' ? `at ${begin}` : `from ${begin} to ${timeOfDay(span.end_ms)}`;
}

/** @param {{part: Lanes}} props */
export function LanesTable({ part }) {
  return t.div(
    null,
    t.h3({ class: 'padded' }, part.title),
    Table({
      label: `${part.title}, as a list`,
      rows: part.lanes.flatMap((lane) => lane.spans.map((span) => ({ lane: lane.label, span }))),
      keyOf: (_, i) => i,
      columns: [
        { label: 'Who', class: 'nowrap', cell: ({ lane }) => lane },
        { label: 'From', class: 'nowrap', cell: ({ span }) => timeOfDay(span.begin_ms) },
        { label: 'To', class: 'nowrap', cell: ({ span }) => (span.state === 'event' ? '' : timeOfDay(span.end_ms)) },
        { label: 'What', class: 'wide', cell: ({ span }) => span.text },
      ],
    }),
  );
}

/** Who measured it, by whose clock. @param {{source: string}} props */
export function From({ source }) {
  return t.p({ class: 'note faint' }, sentence(`source: ${source}`));
}

/** The share of a track. @param {number} value @param {number} most */
export function percentOf(value, most) {
  return `${(100 * value) / most}%`;
}
