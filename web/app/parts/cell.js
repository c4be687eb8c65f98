/** The pinned cell in exact numbers, and the ways on from it. */

import { useApi } from '../api.js';
import { dateTime, deviation, duration, percent, words } from '../format.js';
import { setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery, writeCell } from '../url.js';
import { Problem } from './bits.js';

/** @typedef {import('../../types/api.js').Cell} Cell */

const AROUND_MS = 5000;

/** @param {{run: string, cell: {rank: number, step: number}}} props */
export function CellPanel({ run, cell }) {
  const answer = /** @type {import('../api.js').Answer<Cell>} */ (useApi(withQuery(runPath(run, 'cell'), cell)));
  const data = answer.data;
  const title = `Rank ${cell.rank}, step ${cell.step.toLocaleString('en-US')}`;
  if (answer.error && !data)
    return t.div(
      { class: 'cellpanel' },
      el(Problem, { error: answer.error, retry: answer.refresh, what: title }),
      el(Unpin, {}),
    );
  const phases = Object.entries(data?.phases ?? {}).filter(([, ms]) => ms !== null && ms > 0);
  const sel = writeCell(cell);
  return t.div(
    { class: 'cellpanel', 'aria-label': 'Pinned cell', role: 'region' },
    t.div(
      { class: 'cellname' },
      t.b(null, title),
      t.span({ class: 'faint' }, data ? ` on ${data.host}${data.time_ms ? `, ${dateTime(data.time_ms)}` : ''}` : ''),
    ),
    data
      ? t.dl(
          { class: 'facts' },
          fact('Against peers', data.ratio === null ? 'no peers' : deviation(data.ratio)),
          fact('Self time', duration(data.own_work_ms)),
          fact('Peers’ median', duration(data.reference_ms)),
          fact('Step', duration(data.step_ms)),
          fact('Blocked on peers', duration(data.blocked_ms)),
          fact(
            'CPU',
            data.cpu_ms === null
              ? '–'
              : `${duration(data.cpu_ms)}${data.step_ms ? ` (${percent(data.cpu_ms / data.step_ms)})` : ''}`,
          ),
          phases.map(([name, ms]) => fact(words(name), duration(ms))),
          data.flags.length > 0 ? fact('Marks', data.flags.map(words).join(', ')) : null,
        )
      : null,
    t.div(
      { class: 'buttons' },
      t.a(
        { class: 'button small', href: withQuery(runPath(run, 'ranks', String(cell.rank)), { sel }) },
        `Open rank ${cell.rank}`,
      ),
      t.a(
        { class: 'button small', href: withQuery(runPath(run, 'steps', String(cell.step)), { sel }) },
        `Open step ${cell.step.toLocaleString('en-US')}`,
      ),
      data?.time_ms
        ? t.a(
            {
              class: 'button small',
              href: withQuery(runPath(run, 'logs'), {
                rank: cell.rank,
                from: Math.round(data.time_ms - AROUND_MS),
                to: Math.round(data.time_ms + (data.step_ms ?? 0) + AROUND_MS),
                sel,
              }),
            },
            'Logs around it',
          )
        : null,
      el(Unpin, {}),
    ),
  );
}

function Unpin() {
  return t.button({ type: 'button', class: 'button small', onClick: () => setQuery({ sel: null }) }, 'Unpin');
}

/** @param {string} name @param {string} value */
function fact(name, value) {
  return t.div({ key: name }, t.dt(null, name), t.dd(null, value));
}
