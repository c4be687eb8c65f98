/** What is in some ranks and steps that are selected on the map: one sentence, and what it rests on. */

import { useEffect } from 'preact/hooks';
import { useApi } from '../api.js';
import { zWords } from '../charts/scene.js';
import { count, deviation, duration, plural, words } from '../format.js';
import { useKeys } from '../keys.js';
import { announce } from '../page.js';
import { go, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery, writeArea, writeCell } from '../url.js';
import { CappedNote, Loaded } from './bits.js';

/** @typedef {import('../../types/api.js').Selection} Selection */
/** @typedef {import('../../types/api.js').Shared} Shared */
/** @typedef {import('../url.js').Area} Area */

const SHOWN_PHASES = 4;
const LEAST_MS = 0.05; // of a phase: less is the same
const LEVELS = 'WARNING,ERROR,CRITICAL';

/** @param {{run: string, topic: string | null, area: Area}} props */
export function AreaPanel({ run, topic, area }) {
  const { ranks, first, last } = area;
  const path = withQuery(runPath(run, 'selection'), { ranks, from: first, to: last });
  const answer = /** @type {import('../api.js').Answer<Selection>} */ (
    useApi(path, { topic, on: ['steps', 'findings', 'verdict'] })
  );
  const text = answer.path === path ? answer.data?.text : undefined;
  useEffect(() => {
    if (text) announce(text);
  }, [text]);
  useKeys(
    [{ keys: 'z', text: 'Zoom to the selected steps', run: () => setQuery({ steps: `${first}-${last}` }) }],
    [first, last],
  );
  return t.section(
    { class: 'areapanel', 'aria-label': 'Selection', 'data-api': path },
    Loaded({
      answer,
      height: 120,
      what: 'the selection',
      children: (data) => [
        t.p({ key: 's', class: 'areatext' }, data.text),
        t.div(
          { key: 'c', class: 'areacolumns' },
          el(InCommon, { data }),
          el(Deviation, { data, run }),
          el(Findings, { data, run }),
        ),
        el(Ways, { key: 'w', data, run, area }),
      ],
    }),
  );
}

/** @param {{data: Selection}} props */
function InCommon({ data }) {
  const everyone = data.num_ranks === data.world_size;
  return t.section(
    null,
    t.h3(null, data.num_ranks === 1 ? 'What it alone has' : 'In common, and not of the others'),
    data.common.length > 0
      ? t.ul(
          { class: 'plain' },
          data.common.map((one) =>
            t.li({ key: one.kind + one.name }, t.b(null, one.text), t.span({ class: 'faint' }, ` ${others(one)}`)),
          ),
        )
      : t.p({ class: 'note' }, everyone ? 'No rank is left to compare with.' : 'Nothing that is recorded.'),
    data.not_known.length > 0
      ? [
          t.h3({ key: 'h' }, 'Not known of all'),
          t.ul(
            { key: 'l', class: 'plain' },
            data.not_known.map((one) =>
              t.li({ key: one.kind + one.name }, one.text, t.span({ class: 'faint' }, ` ${unknown(one)}`)),
            ),
          ),
        ]
      : null,
    data.notes.map((note) => t.p({ key: note, class: 'note' }, note)),
  );
}

/** @param {Shared} one */
function others(one) {
  const some = one.num_others === 0 ? 'none' : count(one.num_others);
  const not = one.num_others_unknown > 0 ? `; of ${count(one.num_others_unknown)} it is not known` : '';
  return `${some} of ${count(one.num_others_known)} others${not}`;
}

/** @param {Shared} one */
function unknown(one) {
  return `of ${count(one.num_selected)} of the selected; not recorded of ${count(one.num_unknown)}, and of ${count(one.num_others_unknown)} others`;
}

/** @param {{data: Selection, run: string}} props */
function Deviation({ data, run }) {
  const phases = data.phases.filter(({ self_ms: self, others_ms: theirs }) => Math.max(self, theirs) >= LEAST_MS);
  const worst = data.worst;
  return t.section(
    null,
    t.h3(null, 'Self time'),
    t.dl(
      { class: 'facts' },
      data.ratio === null
        ? fact('Against others', 'not known')
        : fact(
            'Against others',
            [deviation(data.ratio), zWords(data.z)].filter(Boolean).join(', '),
            data.reference_text,
          ),
      fact(
        'Median',
        `${duration(data.self_ms)}${data.others_ms === null ? '' : `, others ${duration(data.others_ms)}`}`,
      ),
      data.before_ratio === null ? null : fact('Against the steps before', deviation(data.before_ratio)),
      worst
        ? t.div(
            { key: 'worst' },
            t.dt(null, 'Worst cell'),
            t.dd(
              null,
              t.a(
                {
                  href: withQuery(runPath(run, 'steps', String(worst.step)), {
                    sel: writeCell(worst),
                  }),
                },
                `rank ${worst.rank}, step ${count(worst.step)}`,
              ),
              ` ${deviation(worst.ratio)}`,
            ),
          )
        : null,
      phases
        .slice(0, SHOWN_PHASES)
        .map(({ phase, self_ms: self, others_ms: theirs }) =>
          fact(words(phase), `${duration(self)}, others ${duration(theirs)}`),
        ),
    ),
  );
}

/** @param {{data: Selection, run: string}} props */
function Findings({ data, run }) {
  if (data.findings.length + data.errors.length === 0) return null;
  return t.section(
    null,
    t.h3(null, 'Findings and errors'),
    t.ul(
      { class: 'plain' },
      data.findings.map((one) =>
        t.li(
          { key: one.id },
          t.a({ href: runPath(run, 'findings', String(one.id)) }, one.what),
          t.span(
            { class: 'faint' },
            ` names ${count(one.num_named)} of the selected${one.state === 'recovered' ? ', recovered' : ''}`,
          ),
        ),
      ),
      data.errors.map((one) =>
        t.li(
          { key: one.type + one.message },
          t.a({ href: runPath(run, 'errors') }, one.type),
          t.span({ class: 'faint' }, ` ${count(one.count)} of ${plural(one.num_ranks, 'rank')}: ${one.message}`),
        ),
      ),
    ),
    el(CappedNote, { capped: data.findings_capped, noun: 'findings' }),
    el(CappedNote, { capped: data.errors_capped, noun: 'kinds of errors' }),
  );
}

/** @param {{data: Selection, run: string, area: Area}} props */
function Ways({ data, run, area }) {
  const slow = data.slow && data.slow.count < data.num_ranks ? data.slow : null;
  const log = (/** @type {string | null} */ level) =>
    withQuery(runPath(run, 'logs'), {
      rank: data.ranks,
      level,
      from: Math.floor(data.from_ms ?? 0),
      to: Math.ceil(data.to_ms ?? 0),
    });
  const isTimed = data.from_ms !== null;
  useKeys(
    isTimed ? [{ keys: 'l', text: 'Log lines of the selection, at warning or worse', run: () => go(log(LEVELS)) }] : [],
    [log(LEVELS), isTimed],
  );
  return t.div(
    { class: 'buttons' },
    t.button(
      {
        type: 'button',
        class: 'button small',
        onClick: () => setQuery({ steps: `${data.step_lo}-${data.step_hi}` }),
      },
      'Zoom to these steps ',
      t.kbd(null, 'z'),
    ),
    slow
      ? t.button(
          {
            type: 'button',
            class: 'button small',
            onClick: () => setQuery({ area: writeArea({ ...area, ranks: slow.ranks }) }),
          },
          `Only the slow ${slow.count === 1 ? 'rank' : plural(slow.count, 'rank')}`,
        )
      : null,
    isTimed
      ? [
          t.a({ key: 'l', class: 'button small', href: log(null) }, 'Logs'),
          data.num_lines
            ? t.a(
                { key: 'w', class: 'button small', href: log(LEVELS) },
                `${data.lines_are_at_least ? 'At least ' : ''}${plural(data.num_lines, 'warning or worse', 'warnings or worse')} `,
                t.kbd(null, 'l'),
              )
            : null,
        ]
      : null,
    data.worst
      ? t.a(
          {
            class: 'button small',
            href: withQuery(runPath(run, 'steps', String(data.worst.step)), { sel: writeCell(data.worst) }),
          },
          `Open step ${count(data.worst.step)}`,
        )
      : null,
    data.num_ranks === 1
      ? t.a({ class: 'button small', href: runPath(run, 'ranks', data.ranks) }, `Open rank ${data.ranks}`)
      : null,
    t.button(
      { type: 'button', class: 'button small', onClick: () => setQuery({ area: null }) },
      'Clear ',
      t.kbd(null, 'Esc'),
    ),
  );
}

/** @param {string} name @param {string} value @param {string} [title] */
function fact(name, value, title) {
  return t.div({ key: name, title }, t.dt(null, name), t.dd(null, value));
}
