/** What is asked of the ranks: the form that asks, and the list of what became of it. */

import { useState } from 'preact/hooks';
import { ask, Failure } from '../api.js';
import { bytes, count, duration, plural, rankWords } from '../format.js';
import { announce } from '../page.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { alike, requestKey } from './alike.js';
import { Ago, Icon, Table } from './bits.js';
import { readRanks } from './ranklist.js';

/** @typedef {import('../../types/api.js').AgentAnswer} AgentAnswer */
/** @typedef {import('../../types/api.js').CommandRow} CommandRow */
/** @typedef {import('../../types/api.js').CommandRank} CommandRank */
/** @typedef {{kind: CommandRow['kind'], ranks: number[], num_steps: number}} Wanted */

const MAX_STEPS = 20;

/** @param {{run: string, data: AgentAnswer, ranks: string, asked: () => void}} props */
export function AskPanel({ run, data, ranks, asked }) {
  const [text, setText] = useState(ranks);
  const [steps, setSteps] = useState('3');
  const [wanted, setWanted] = useState(/** @type {Wanted | null} */ (null));
  const [problem, setProblem] = useState('');
  const [busy, setBusy] = useState(false);

  /** Check the fields; say what is wrong in words. @param {CommandRow['kind']} kind */
  function choose(kind) {
    const chosen = readRanks(text);
    const number = Number(steps);
    setWanted(null);
    if (typeof chosen === 'string') return setProblem(chosen);
    if (kind === 'profile' && !(Number.isInteger(number) && number >= 1 && number <= MAX_STEPS))
      return setProblem(`Steps: give a whole number from 1 to ${MAX_STEPS}.`);
    setProblem('');
    const next = { kind, ranks: chosen, num_steps: number };
    if (kind === 'profile' || kind === 'agent_off') setWanted(next);
    else send(next);
  }

  /** @param {Wanted} what */
  async function send(what) {
    setBusy(true);
    setWanted(null);
    try {
      const body = {
        kind: what.kind,
        ranks: what.ranks,
        ...(what.kind === 'profile' ? { num_steps: what.num_steps } : {}),
      };
      const made = await ask(runPath(run, 'commands'), {
        method: 'POST',
        body,
      });
      announce(`Asked: ${made?.data.text ?? ''}`);
      asked();
    } catch (error) {
      const detail = error instanceof Failure ? error.detail : { what: String(error), remedy: '' };
      setProblem([`Not asked: ${detail.what}.`, detail.remedy ? `${detail.remedy}.` : ''].join(' ').trim());
    }
    setBusy(false);
  }

  /** @param {CommandRow['kind']} kind @param {string} label */
  function press(kind, label) {
    return t.button({ type: 'button', class: 'button', disabled: busy, onClick: () => choose(kind) }, label);
  }

  return t.form(
    {
      class: 'askform',
      onSubmit: (event) => event.preventDefault(),
      'aria-label': 'Ask the ranks',
    },
    t.div(
      { class: 'askrow' },
      t.label(
        { class: 'askfield' },
        t.span(null, 'Ranks'),
        t.input({
          type: 'text',
          value: text,
          placeholder: 'all',
          size: 18,
          'aria-describedby': 'askhint',
          onInput: (event) => {
            setText(event.currentTarget.value);
            setWanted(null);
          },
        }),
      ),
      t.label(
        { class: 'askfield' },
        t.span(null, 'Steps to profile'),
        t.input({
          type: 'text',
          inputMode: 'numeric',
          value: steps,
          size: 3,
          onInput: (event) => {
            setSteps(event.currentTarget.value);
            setWanted(null);
          },
        }),
      ),
      t.div(
        { class: 'buttons' },
        press('stacks', 'Take stacks'),
        press('profile', 'Profile'),
        data.off.length > 0 ? press('agent_on', 'Switch recording on') : null,
        data.off.length < data.num_ranks ? press('agent_off', 'Switch recording off') : null,
      ),
    ),
    t.p(
      { class: 'note', id: 'askhint' },
      'Ranks as in 0,3-5. Left empty: all ranks; of a profile, the first rank of each node.',
    ),
    problem ? t.p({ class: 'bad askproblem', role: 'alert' }, problem) : null,
    wanted
      ? t.div(
          { class: 'askconfirm', role: 'group', 'aria-label': 'Confirm' },
          t.p(null, question(wanted)),
          t.div(
            { class: 'buttons' },
            t.button(
              {
                type: 'button',
                class: 'button primary',
                ref: focusOnce,
                onClick: () => send(wanted),
              },
              wanted.kind === 'profile' ? 'Profile' : 'Switch off',
            ),
            t.button(
              {
                type: 'button',
                class: 'button',
                onClick: () => setWanted(null),
              },
              'Cancel',
            ),
          ),
        )
      : null,
  );
}

/** @param {HTMLButtonElement | null} button */
function focusOnce(button) {
  if (button && !button.dataset.seen) {
    button.dataset.seen = 'yes';
    button.focus();
  }
}

/** What the reader agrees to. @param {Wanted} wanted */
function question(wanted) {
  const who = wanted.ranks.length > 0 ? rankWords(wanted.ranks) : null;
  if (wanted.kind === 'profile')
    return (
      `Profile ${plural(wanted.num_steps, 'step')} on ${who ?? 'the first rank of each node'}? ` +
      'These steps get slower, and every rank that waits for them too.'
    );
  return (
    `Switch recording off in ${who ?? 'all ranks'}? Training goes on. Until it is switched on again no ` +
    'collectives, steps or logs are recorded, and a hang is not found.' +
    (who ? ' Once on again, these ranks cannot be matched with their peers: better ask all ranks at once.' : '')
  );
}

const MARK = {
  pending: 'info',
  sent: 'info',
  running: 'info',
  done: 'ok',
  refused: 'warning',
  expired: 'unknown',
};
const WORD = {
  pending: 'waits for its node',
  sent: 'sent to its node',
  running: 'under way',
  done: 'done',
  refused: 'refused',
  expired: 'expired',
};

/** @param {{run: string, commands: CommandRow[]}} props */
export function CommandList({ run, commands }) {
  return t.ul(
    { class: 'commands' },
    alike(commands, requestKey).map(([one, ...earlier]) =>
      t.li(
        { key: one.id, class: 'asked' },
        t.div(
          { class: 'askedhead' },
          t.b(null, one.text),
          t.span(
            { class: 'faint' },
            'asked by ',
            who(run, one),
            ', ',
            el(Ago, { ms: one.created_ms }),
            earlier.length > 0
              ? [`; ${count(earlier.length + 1)} times since `, el(Ago, { ms: earlier[earlier.length - 1].created_ms })]
              : null,
          ),
          one.is_open ? t.span({ class: 'pill' }, 'open') : null,
        ),
        t.ul(
          { class: 'askedranks' },
          alike(one.ranks, outcomeKey).map((group) => el(Outcome, { key: group[0].rank, run, command: one, group })),
        ),
      ),
    ),
  );
}

/** @param {string} run @param {CommandRow} one */
function who(run, one) {
  if (one.finding_id === null) return one.asked_by === 'user' ? 'a person' : one.asked_by;
  return t.a({ href: runPath(run, 'findings', String(one.finding_id)) }, `finding ${one.finding_id}`);
}

/** Ranks to which the same happened are one line, unless each has something to show. @param {CommandRank} one */
function outcomeKey(one) {
  return `${one.state} ${one.reason} ${one.trace || one.operators.length > 0 ? one.rank : ''}`;
}

/** @param {{run: string, command: CommandRow, group: CommandRank[]}} props */
function Outcome({ run, command, group }) {
  const [first] = group;
  return t.li(
    null,
    t.div(
      { class: 'outcome' },
      t.span(
        { class: `severity is-${MARK[first.state]}` },
        el(Icon, { name: MARK[first.state] }),
        t.span(null, WORD[first.state]),
      ),
      t.span({ class: 'nowrap' }, rankWords(group.map((one) => one.rank))),
      first.reason ? t.span({ class: 'faint' }, first.reason) : null,
      command.kind === 'stacks' && first.state === 'done'
        ? group.slice(0, 8).map((one) =>
            t.a(
              {
                key: one.rank,
                href: runPath(run, 'ranks', String(one.rank)),
              },
              `Stacks of rank ${one.rank}`,
            ),
          )
        : null,
      first.trace
        ? t.a({ class: 'button small', href: first.trace, download: '' }, `Trace, ${bytes(first.trace_bytes)}`)
        : first.trace_bytes
          ? t.span({ class: 'faint' }, 'the trace gave way to newer ones')
          : null,
    ),
    first.operators.length > 0 ? el(Operators, { operators: first.operators, rank: first.rank }) : null,
  );
}

/** @param {{operators: CommandRank['operators'], rank: number}} props */
function Operators({ operators, rank }) {
  return t.details(
    { class: 'operators' },
    t.summary(null, 'What took most time'),
    Table({
      label: `Operators of rank ${rank}`,
      frame: 'short',
      rows: operators,
      keyOf: (one) => `${one.category} ${one.name}`,
      columns: [
        { label: 'Name', class: 'wide', cell: (one) => t.code(null, one.name) },
        { label: 'Kind', class: 'nowrap', cell: (one) => one.category.replaceAll('_', ' ') },
        { label: 'Calls', class: 'num', cell: (one) => count(one.count) },
        { label: 'Total', class: 'num nowrap', cell: (one) => duration(one.total_ms) },
        {
          label: 'Own',
          hint: 'Without what it called',
          class: 'num nowrap',
          cell: (one) => (one.self_ms === null ? '–' : duration(one.self_ms)),
        },
      ],
    }),
    t.p({ class: 'note' }, 'Open the trace in ui.perfetto.dev or chrome://tracing.'),
  );
}
