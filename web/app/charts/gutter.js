/** Names and bands beside the lanes of the map. */

import { deviation } from '../format.js';
import { t } from '../tags.js';
import { runPath } from '../url.js';
import { levelWords, placeWords } from './cursor.js';
import { bandRuns, LINK_PITCH, rankOf, ranksTitle } from './scene.js';
import { isNeutral, usualLevel, usualOf, zText, zWords } from './shades.js';

/** @typedef {import('../../types/api.js').Map} MapData */
/** @typedef {import('./scene.js').Band} Band */
/** @typedef {import('./scene.js').Layout} Layout */
/** @typedef {import('./paint.js').Lanes} Lanes */

const NAME_HEIGHT = 14; // of a lane's name; below the last lane stands what the axis shows
const AXIS_GAP = 3; // between the last lane and what the axis shows
const TONES = 6; // colours of bands: a group that comes again has its own

/** Names beside the lanes: all of them where they fit, else as many as do. @param {{map: MapData, plan: Layout, lanes: Lanes, run: string, band: import('../../types/api.js').MapBand | null}} props */
export function Gutter({ map, plan, lanes, run, band: beside }) {
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
          pin.max_ratio !== null && pin.max_ratio > usualOf(map).stretch[1]
            ? t.b(
                { class: 'lanepeak' },
                t.span({ class: 'lanez' }, 'max '),
                deviation(pin.max_ratio),
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
        return t.div({ key: `r${band.index}`, class: 'lanename', style, title }, t.b(null, group));
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
    t.div(
      { class: 'lanename axisname', style: { top: `${plan.bottom + AXIS_GAP}px`, height: '14px' } },
      t.span(null, ''),
      t.span({ class: 'faint' }, 'step, time of day'),
    ),
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
