/** The pinned slice of a timeline in exact numbers, with its operation, and the ways on from it. */

import { callWords } from '../charts/timeline.js';
import { LOOKS, readSpot, sliceAt } from '../charts/timeline-maths.js';
import { count, duration, percent } from '../format.js';
import { query, setQuery } from '../router.js';
import { t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

const AROUND_MS = 5000;

/** @param {{run: string, model: import('../charts/timeline-paint.js').Model}} props */
export function SlicePanel({ run, model }) {
  const at = readSpot(query.value.at);
  const lane = at ? model.ranks.indexOf(at.rank) : -1;
  if (!at) return null;
  const { data, slices } = model;
  const i = lane < 0 ? -1 : sliceAt(slices, lane, at.time, 1);
  const unpin = t.button({ type: 'button', class: 'button small', onClick: () => setQuery({ at: null }) }, 'Unpin');
  if (i < 0)
    return t.div(
      { class: 'cellpanel', role: 'region', 'aria-label': 'Pinned slice' },
      t.div(
        { class: 'cellname' },
        t.b(null, `Rank ${count(at.rank)}`),
        lane < 0 ? ' is not among the ranks shown' : ': nothing is recorded there',
      ),
      t.div({ class: 'buttons' }, unpin),
    );
  const kind = data.kinds[slices.kind[i]];
  const [begin, end] = [slices.begin[i], slices.end[i]];
  const call = slices.call[i] >= 0 ? data.calls[slices.call[i]] : null;
  const began = data.began_ms;
  const room = Math.max(10, (end - begin) * 0.5);
  return t.div(
    { class: 'cellpanel', role: 'region', 'aria-label': 'Pinned slice' },
    t.div(
      { class: 'cellname' },
      t.b(null, `Rank ${count(at.rank)}: ${LOOKS[kind]?.[1] ?? kind}`),
      slices.microbatch[i] >= 0 ? `, microbatch ${count(slices.microbatch[i] + 1)}` : '',
    ),
    t.dl(
      { class: 'facts' },
      fact('Takes', duration((end - begin) / 1000)),
      fact('Begins at', duration(begin / 1000)),
      fact('Of the step', percent((end - begin) / Math.max(1, data.length_us))),
      call ? operation(call) : null,
    ),
    t.div(
      { class: 'buttons' },
      t.button(
        {
          type: 'button',
          class: 'button small',
          onClick: () => setQuery({ t: `${Math.max(0, Math.floor(begin - room))}-${Math.ceil(end + room)}` }),
        },
        'Zoom to it',
      ),
      call && call.last_rank !== null && call.last_rank !== at.rank && !model.ranks.includes(call.last_rank)
        ? t.button(
            {
              type: 'button',
              class: 'button small',
              onClick: () => setQuery({ ranks: [...model.ranks, call.last_rank].join(',') }),
            },
            `Show rank ${count(call.last_rank)}, too`,
          )
        : null,
      t.a({ class: 'button small', href: runPath(run, 'ranks', String(at.rank)) }, `Open rank ${count(at.rank)}`),
      began
        ? t.a(
            {
              class: 'button small',
              href: withQuery(runPath(run, 'logs'), {
                rank: at.rank,
                from: Math.round(began + begin / 1000 - AROUND_MS),
                to: Math.round(began + end / 1000 + AROUND_MS),
              }),
            },
            'Logs around it',
          )
        : null,
      unpin,
    ),
  );
}

/** @param {import('../../types/api.js').StepCall} call */
function operation(call) {
  const members = call.num_members === null ? 'an unknown number' : count(call.num_members);
  return [
    fact('Operation', callWords(call)),
    call.source === null ? fact('Group', call.group_text || call.group || 'not known') : null,
    fact('Sequence', call.sequence > 0 ? count(call.sequence) : 'not known'),
    fact('Recorded', `${count(call.num_recorded)} of ${members} ranks`),
    fact(
      'Came last',
      call.last_rank === null
        ? 'not known'
        : `rank ${count(call.last_rank)}${call.late_ms === null ? '' : `, ${duration(call.late_ms)} after the next`}${call.is_sure ? '' : ', within how exact times are'}`,
    ),
    fact('First to last', duration(call.skew_ms)),
    fact('Transfer', call.transfer_ms === null ? 'not known' : duration(call.transfer_ms)),
    call.usual_ms === null ? null : fact('In steps around', duration(call.usual_ms)),
  ];
}

/** @param {string} name @param {string} value */
function fact(name, value) {
  return t.div({ key: name }, t.dt(null, name), t.dd(null, value));
}
