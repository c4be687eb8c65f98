/** Stacks of a hang: some ranks side by side, and those of all ranks merged. */

import { useEffect, useState } from 'preact/hooks';
import { ask, Failure, useApi } from '../api.js';
import { frameWords, IcicleChart, lookOf, placeWords } from '../charts/icicle.js';
import { foldedDepths } from '../charts/icicle-maths.js';
import { standingWords } from '../charts/waits.js';
import { count, dateTime, plural, rankWords, sentence, shortPlace, timeOfDay } from '../format.js';
import { announce } from '../page.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { CappedNote, Card, CopyButton, Table } from './bits.js';
import { readRanks } from './ranklist.js';

/** @typedef {import('../../types/api.js').HangAnswer} HangAnswer */
/** @typedef {import('../../types/api.js').RankStack} RankStack */
/** @typedef {import('../../types/api.js').Session} Session */

const MOST = 6; // stacks side by side

/** @param {{data: HangAnswer, run: string, asked: () => void}} props */
export function Beside({ data, run, asked }) {
  const shared = Math.max(0, ...data.stacks.map((one) => one.num_shared));
  const compared = data.stacks.filter((one) => one.frames.length > 0).length > 1;
  return el(
    Card,
    {
      title: 'Stacks side by side',
      note: 'of the thread that trains, outermost frame first',
      tools: t.a(
        { href: withQuery(runPath(run, 'agent'), { for: data.stacks.map((one) => one.rank).join(',') }) },
        'What was asked',
      ),
    },
    el(Choose, { data, run, asked }),
    data.stacks.length === 0
      ? t.p({ class: 'note padded' }, 'No stacks were taken: nothing looked stuck. Name ranks above to see theirs.')
      : null,
    compared
      ? t.p(
          { class: 'note padded' },
          shared > 0
            ? `The first ${plural(shared, 'frame')} are the same; below, where they part is marked.`
            : 'They have no frame in common.',
        )
      : null,
    t.div(
      { class: 'beside', style: { '--columns': String(Math.min(3, Math.max(1, data.stacks.length))) } },
      data.stacks.map((one) => el(OneStack, { key: one.rank, one, run, compared, isOver: data.is_over })),
    ),
  );
}

/** Which ranks, and a button that asks them for new stacks. @param {{data: HangAnswer, run: string, asked: () => void}} props */
function Choose({ data, run, asked }) {
  const shown = data.stacks.map((one) => one.rank).join(',');
  const session = /** @type {import('../api.js').Answer<Session>} */ (useApi(data.is_over ? null : 'session'));
  const may = session.data?.roles.includes('operate');
  const [text, setText] = useState(shown);
  const [problem, setProblem] = useState('');
  const [busy, setBusy] = useState(false);
  useEffect(() => setText(shown), [shown]);

  /** @returns {number[] | null} */
  function read() {
    const ranks = readRanks(text);
    if (typeof ranks === 'string') setProblem(ranks);
    else if (ranks.length > MOST) setProblem(`Ranks: at most ${MOST} stand side by side.`);
    else {
      setProblem('');
      return ranks;
    }
    return null;
  }

  async function send() {
    const ranks = read();
    if (!ranks) return;
    if (ranks.length === 0) return setProblem('Ranks: name those whose stacks to take.');
    setBusy(true);
    try {
      const made = await ask(runPath(run, 'commands'), { method: 'POST', body: { kind: 'stacks', ranks } });
      announce(`Asked: ${made?.data.text ?? ''}. They arrive within seconds`);
      setQuery({ ranks: ranks.join(',') });
      asked();
    } catch (error) {
      const detail = error instanceof Failure ? error.detail : { what: String(error), remedy: '' };
      setProblem([`Not asked: ${detail.what}.`, detail.remedy ? `${detail.remedy}.` : ''].join(' ').trim());
    }
    setBusy(false);
  }

  return t.form(
    {
      class: 'buttons stepsform padded',
      'aria-label': 'Ranks side by side',
      onSubmit: (event) => {
        event.preventDefault();
        const ranks = read();
        if (ranks) setQuery({ ranks: ranks.join(',') || null });
      },
    },
    t.label(
      { class: 'askfield' },
      'Ranks',
      t.input({
        type: 'text',
        size: 14,
        value: text,
        placeholder: '17,3',
        'aria-invalid': problem !== '',
        onInput: (event) => setText(event.currentTarget.value),
      }),
    ),
    t.button({ type: 'submit', class: 'button' }, 'Show'),
    may
      ? t.button({ type: 'button', class: 'button', disabled: busy, onClick: send }, 'Take their stacks now')
      : may === false
        ? t.span({ class: 'note' }, 'New stacks are taken by those whose token may operate.')
        : null,
    query.value.ranks
      ? t.button({ type: 'button', class: 'link', onClick: () => setQuery({ ranks: null }) }, 'those that say most')
      : null,
    problem ? t.p({ class: 'bad askproblem', role: 'alert' }, problem) : null,
  );
}

/** @param {{one: RankStack, run: string, compared: boolean, isOver: boolean}} props */
function OneStack({ one, run, compared, isOver }) {
  const shared = compared ? one.num_shared : 0;
  return t.section(
    { class: `onestack ${one.is_root ? 'is-root' : ''}`, 'aria-label': `Stack of rank ${one.rank}` },
    t.p(
      { class: 'stackhead' },
      t.b(null, t.a({ href: runPath(run, 'ranks', String(one.rank)) }, `Rank ${count(one.rank)}`)),
      one.host ? t.span({ class: 'faint' }, one.host) : null,
      t.span({ class: 'pill' }, standingWords(one.standing, isOver)),
    ),
    one.time_ms === null
      ? null
      : t.p({ class: 'note', title: one.reason }, `Taken ${isOver ? dateTime(one.time_ms) : timeOfDay(one.time_ms)}`),
    one.note ? t.p({ class: 'note unsure' }, sentence(one.note)) : null,
    shared > 0
      ? t.details(
          { class: 'sharedframes' },
          t.summary(null, `${plural(shared, 'frame')} that all of these share`),
          el(Frames, { frames: one.frames.slice(0, shared), mark: false }),
        )
      : null,
    one.frames.length > shared
      ? el(Frames, { frames: one.frames.slice(shared), mark: compared })
      : one.frames.length > 0
        ? t.p({ class: 'note' }, 'It is in the last of them.')
        : null,
    one.text
      ? t.details(
          null,
          t.summary(null, 'All of its threads'),
          t.p(
            { class: 'note' },
            'Innermost frame first. ',
            el(CopyButton, { text: one.text, what: 'the stacks', class: 'link' }),
          ),
          t.pre({ class: 'trace', tabIndex: 0 }, one.text),
        )
      : null,
  );
}

/** @param {{frames: RankStack['frames'], mark: boolean}} props */
function Frames({ frames, mark }) {
  return t.ol(
    { class: 'frames' },
    frames.map((frame, i) =>
      t.li(
        { key: i, class: mark && i === 0 ? 'parts' : '', title: `${frame.file}:${frame.line}` },
        t.code(null, frame.function),
        t.span({ class: 'faint' }, ` ${shortPlace(frame.file)}:${frame.line}`),
        mark && i === 0 ? t.span({ class: 'pill' }, 'they part here') : null,
      ),
    ),
  );
}

/** @param {{data: HangAnswer, run: string, table: boolean, switchTable: () => void}} props */
export function Merged({ data, run, table, switchTable }) {
  const icicle = data.merged;
  const [picked, setPicked] = useState(/** @type {string | null} */ (null));
  const all = query.value.frames === 'all';
  const folded = foldedDepths(icicle);
  const at = icicle.nodes.findIndex((node) => keyOf(node) === picked);
  const times = [timeOfDay(icicle.oldest_ms), timeOfDay(icicle.newest_ms)];
  const taken = times[0] === times[1] ? times[0] : times.join(' to ');
  return el(
    Card,
    {
      title: 'Stacks merged over ranks',
      note: `${plural(icicle.num_ranks, 'rank')}, the newest of each, taken ${taken}; as wide as the ranks in a frame`,
      tools: [
        folded > 0 && !table
          ? t.button(
              {
                key: 'f',
                type: 'button',
                class: 'button small',
                'aria-pressed': all,
                onClick: () => setQuery({ frames: all ? null : 'all' }),
              },
              `With ${plural(folded, 'outer frame')}`,
            )
          : null,
        t.button(
          { key: 't', type: 'button', class: 'button small', 'aria-pressed': table, onClick: switchTable },
          'As a table',
        ),
      ],
    },
    icicle.text ? t.p({ class: 'padded parting' }, sentence(icicle.text)) : null,
    t.div(
      { class: 'padded' },
      table
        ? el(FrameTable, { icicle })
        : el(IcicleChart, { icicle, at, all, pick: (place) => setPicked(keyOf(icicle.nodes[place])) }),
    ),
    table || !icicle.nodes.some((node) => node.num_roots > 0)
      ? null
      : t.p(
          { class: 'note padded waitlegend' },
          t.span(null, t.span({ class: 'swatch is-root', 'aria-hidden': 'true' }), ' ranks that others wait for'),
          t.span(null, t.span({ class: 'swatch is-both', 'aria-hidden': 'true' }), ' both'),
          t.span(null, t.span({ class: 'swatch is-waiting', 'aria-hidden': 'true' }), ' the others'),
          icicle.parts_at >= 0 ? t.span(null, 'Thick edge: the innermost frame that all share.') : null,
        ),
    at >= 0 && !table ? el(Picked, { icicle, at, run }) : null,
    el(CappedNote, { capped: icicle.capped, noun: 'ranks with stacks' }),
    el(CappedNote, { capped: icicle.nodes_capped, noun: 'frames, those of most ranks' }),
  );
}

/** What names a frame over polls. @param {import('../charts/icicle.js').IcicleNode} node */
function keyOf(node) {
  return `${node.depth} ${node.start} ${node.function}`;
}

/** @param {{icicle: import('../charts/icicle.js').Icicle, at: number, run: string}} props */
function Picked({ icicle, at, run }) {
  const node = icicle.nodes[at];
  const some = node.ranks.some.slice(0, 2);
  return t.div(
    { class: 'pickedframe padded', role: 'region', 'aria-label': 'Chosen frame' },
    t.p(null, t.code(null, node.function), t.span({ class: 'faint' }, ` ${node.file}:${node.lines.join(', ')}`)),
    t.p(
      { class: 'note' },
      `${count(node.count)} of ${plural(icicle.num_ranks, 'rank')}: ${node.ranks.text}. `,
      t.button(
        { type: 'button', class: 'link', onClick: () => setQuery({ ranks: some.join(',') }) },
        `Show ${rankWords(some)} side by side`,
      ),
      ' ',
      t.a({ href: runPath(run, 'ranks', String(node.ranks.some[0])) }, `Open rank ${node.ranks.some[0]}`),
    ),
  );
}

/** @param {{icicle: import('../charts/icicle.js').Icicle}} props */
function FrameTable({ icicle }) {
  const order = icicle.nodes
    .map((node, i) => ({ node, i }))
    .sort((a, b) => a.node.start - b.node.start || a.node.depth - b.node.depth);
  const look = { roots: 'waited for', both: 'both', others: 'others' };
  return Table({
    label: 'Frames of all ranks',
    frame: 'tallscroll',
    rows: order,
    rowProps: ({ node }) => ({ title: frameWords(node, icicle.num_ranks) }),
    columns: [
      { label: 'Depth', class: 'num', cell: ({ node }) => node.depth + 1 },
      {
        label: 'Frame',
        class: 'nowrap',
        cell: ({ node, i }) => [
          t.code(null, node.function),
          i === icicle.parts_at ? t.b(null, ' all share it, then they part') : null,
        ],
      },
      { label: 'Place', class: 'nowrap', cell: ({ node }) => placeWords(node) },
      { label: 'Ranks', class: 'num', cell: ({ node }) => count(node.count) },
      { label: 'Which', class: 'wide', cell: ({ node }) => node.ranks.text },
      { label: 'Of', class: 'nowrap', cell: ({ node }) => look[lookOf(node)] },
    ],
  });
}
