/** What to do next with a run, as controllers are given it, and the record of what was advised and done. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { ask, Failure, useApi } from '../api.js';
import { count, dateTime, duration, percent, plural, ranges, sentence, words } from '../format.js';
import { useKeys } from '../keys.js';
import { announce } from '../page.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { Card, Loaded, Table, When } from './bits.js';

/** @typedef {import('../../types/api.js').Advice} Advice */
/** @typedef {import('../../types/api.js').AdviceCost} AdviceCost */
/** @typedef {import('../../types/api.js').AdviceHistory} AdviceHistory */
/** @typedef {import('../../types/api.js').AdviceReport} AdviceReport */
/** @typedef {import('../../types/api.js').GivenAdvice} GivenAdvice */
/** @typedef {import('../../types/api.js').Session} Session */

const SHOWN = 50; // of all that was advised, the newest
const MAX_TEXT = 2000;

/** @type {[AdviceReport['outcome'], string][]} */
const OUTCOMES = [
  ['done', 'done'],
  ['refused', 'refused: it is not to be done'],
  ['failed', 'tried, and it failed'],
  ['ignored', 'left as it is'],
];

/** The advice in force, and what became of it. @param {{run: string, topic: string | null}} props */
export function AdviceCard({ run, topic }) {
  const path = runPath(run, 'advice');
  const now = /** @type {import('../api.js').Answer<Advice>} */ (useApi(path, { topic, on: ['findings', 'verdict'] }));
  const history = /** @type {import('../api.js').Answer<AdviceHistory>} */ (useApi(`${path}/history`));
  const epoch = now.data?.epoch;
  const form = useRef(/** @type {HTMLFormElement | null} */ (null));
  useEffect(() => {
    if (epoch !== undefined) history.refresh(); // what is given is recorded by the question
  }, [epoch]);
  const isOver = now.data?.is_over ?? true;
  useKeys(
    isOver
      ? []
      : [
          {
            keys: 'd',
            text: 'Report what was done about the advice',
            run: () => /** @type {HTMLElement | null | undefined} */ (form.current?.querySelector('select'))?.focus(),
          },
        ],
    [isOver],
  );
  const reported = () => {
    now.refresh();
    history.refresh();
  };
  return el(
    Card,
    {
      class: 'advicecard',
      title: 'Advice to controllers',
      note: now.data?.is_over
        ? 'as it was while the run was live'
        : 'what they would do by themselves; Rankscope does none of it',
    },
    Loaded({
      answer: now,
      height: 160,
      what: 'the advice',
      children: (advice) => [
        advice.is_over
          ? history.data
            ? el(Over, { key: 'a', advice, history: history.data })
            : null
          : [
              el(Advised, { key: 'a', advice }),
              isEmpty(advice) ? null : el(ReportForm, { key: `f ${advice.epoch}`, advice, run, reported, form }),
            ],
        history.data && (advice.is_over || !isEmpty(advice) || history.data.given.length > 1)
          ? el(Trail, { key: 'h', history: history.data, isOver: advice.is_over })
          : null,
      ],
    }),
  );
}

/** Whether there is nothing to act on, and so nothing to report. @param {Advice} advice */
function isEmpty(advice) {
  return advice.evidence.length === 0;
}

/** Nothing can be done any more: whether anything was. @param {{advice: Advice, history: AdviceHistory}} props */
function Over({ advice, history }) {
  const acts = history.given.filter((one) => one.action !== 'nothing').length;
  const done = plural(history.reports.length, 'report');
  const said =
    acts === 0
      ? 'No controller asked for advice while it was live, or there was nothing to do.'
      : `${plural(acts, 'piece', 'pieces')} of advice while it was live, ${history.reports.length === 0 ? 'and no report of what was done' : `and ${done} of what was done`}.`;
  return t.p({ class: 'note padded' }, `${sentence(advice.why)} ${said}`);
}

/** @param {{advice: Advice}} props */
function Advised({ advice }) {
  if (isEmpty(advice))
    return t.div(
      { class: 'advised' },
      t.p(null, t.b(null, advice.what)),
      t.p(
        { class: 'note' },
        `${sentence(advice.why)} Number ${count(advice.epoch)}, since ${dateTime(advice.given_ms)}.`,
      ),
    );
  return [
    t.div(
      { key: 'w', class: 'advised' },
      t.p(null, t.b(null, advice.what)),
      advice.why ? t.p({ class: 'note' }, advice.why) : null,
    ),
    t.dl(
      { key: 'f', class: 'facts tall' },
      advice.hosts.length > 0 ? fact('Hosts', advice.hosts.join(', ')) : null,
      advice.ranks.length > 0 ? fact('Ranks', ranges(advice.ranks)) : null,
      advice.then === 'restart_from_checkpoint' ? fact('Then', 'restart from the checkpoint') : null,
      fact('From step', advice.from_step === null ? 'no whole checkpoint was seen' : count(advice.from_step)),
      fact(
        'How sure',
        advice.confidence === null
          ? `not known; nothing is excluded or restarted below ${percent(advice.least_confidence)}`
          : `${percent(advice.confidence)}; nothing is excluded or restarted below ${percent(advice.least_confidence)}`,
      ),
      fact('If it is done', costWords(advice.cost_of_doing)),
      fact('If it is not', costWords(advice.cost_of_not_doing)),
      fact(
        'Evidence',
        advice.evidence.length === 0
          ? 'no finding'
          : t.ul(
              null,
              advice.evidence.map((one, at) => t.li({ key: at }, t.a({ href: one.link }, one.text))),
            ),
      ),
      fact('Advice', `number ${count(advice.epoch)}, since ${dateTime(advice.given_ms)}`),
    ),
  ];
}

/** @param {AdviceCost} cost */
function costWords(cost) {
  const parts = [
    cost.throughput_ratio === null ? null : `${percent(cost.throughput_ratio)} of the throughput`,
    cost.rank_hours_per_day === null ? null : `${count(Math.round(cost.rank_hours_per_day))} rank-hours a day`,
    cost.lost_steps === null ? null : plural(cost.lost_steps, 'step'),
    cost.lost_seconds === null ? null : duration(cost.lost_seconds * 1000),
  ].filter(Boolean);
  if (cost.text) return cost.text;
  return parts.length > 0 ? parts.join(', ') : 'not known';
}

/** Who acted on this advice, and how it ended.
 * @param {{advice: Advice, run: string, reported: () => void, form: import('preact').RefObject<HTMLFormElement | null>}} props */
function ReportForm({ advice, run, reported, form }) {
  const session = /** @type {import('../api.js').Answer<Session>} */ (useApi('session')).data;
  const [outcome, setOutcome] = useState(/** @type {AdviceReport['outcome']} */ ('done'));
  const [who, setWho] = useState('');
  const [text, setText] = useState('');
  const [problem, setProblem] = useState('');
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    if (session?.name) setWho((old) => old || session.name);
  }, [session]);
  if (session?.required && !session.roles.includes('operate')) return null;

  /** @param {Event} event */
  async function send(event) {
    event.preventDefault();
    setBusy(true);
    try {
      const body = { epoch: advice.epoch, outcome, controller: who.trim(), text: text.trim() };
      await ask(runPath(run, 'advice', 'reports'), { method: 'POST', body });
      setProblem('');
      setText('');
      announce('Reported');
      reported();
    } catch (error) {
      const detail = error instanceof Failure ? error.detail : { what: String(error), remedy: '' };
      setProblem([`Not reported: ${detail.what}.`, detail.remedy ? `${detail.remedy}.` : ''].join(' ').trim());
    }
    setBusy(false);
  }

  return t.form(
    { class: 'askform', ref: form, onSubmit: send, 'aria-label': 'Report what was done' },
    t.div(
      { class: 'askrow' },
      t.label(
        { class: 'askfield' },
        t.span(null, 'What was done'),
        t.select(
          {
            value: outcome,
            onChange: (event) => setOutcome(/** @type {AdviceReport['outcome']} */ (event.currentTarget.value)),
          },
          OUTCOMES.map(([value, label]) => t.option({ key: value, value }, label)),
        ),
      ),
      t.label(
        { class: 'askfield' },
        t.span(null, 'By'),
        t.input({
          type: 'text',
          value: who,
          maxLength: 128,
          required: true,
          onInput: (event) => setWho(event.currentTarget.value),
        }),
      ),
      t.label(
        { class: 'askfield wide' },
        t.span(null, 'Note'),
        t.input({
          type: 'text',
          value: text,
          maxLength: MAX_TEXT,
          onInput: (event) => setText(event.currentTarget.value),
        }),
      ),
      t.button({ type: 'submit', class: 'button', disabled: busy || !who.trim() }, 'Report'),
    ),
    problem ? t.p({ class: 'note', role: 'status' }, problem) : null,
  );
}

/** What was advised, and who did what about it, the newest first. That nothing is to be done is no row of a run that is over.
 * @param {{history: AdviceHistory, isOver: boolean}} props */
function Trail({ history, isOver }) {
  const rows = history.given
    .map((given) => ({ given, reports: history.reports.filter((one) => one.epoch === given.epoch) }))
    .filter(({ given, reports }) => !isOver || given.action !== 'nothing' || reports.length > 0);
  if (rows.length === 0) return null;
  return Table({
    label: 'What was advised and done',
    rows,
    most: SHOWN,
    noun: 'pieces of advice',
    keyOf: (row) => row.given.epoch,
    columns: [
      { label: 'Advice', class: 'number', cell: (row) => count(row.given.epoch) },
      {
        label: 'Given',
        class: 'nowrap',
        title: (row) => dateTime(row.given.given_ms),
        cell: (row) => el(When, { ms: row.given.given_ms, ended: isOver }),
      },
      { label: 'What', title: (row) => row.given.why, cell: (row) => row.given.what },
      {
        label: 'What was done',
        cell: (row) =>
          row.reports.length === 0
            ? t.span({ class: 'faint' }, row.given.action === 'nothing' ? 'nothing to do' : 'nothing reported')
            : row.reports.map((one) =>
                t.div(
                  { key: one.time_ms, title: dateTime(one.time_ms) },
                  t.b(null, words(one.outcome)),
                  ` by ${one.controller}, `,
                  el(When, { ms: one.time_ms, ended: isOver }),
                  one.text ? `: ${one.text}` : '',
                ),
              ),
      },
    ],
  });
}

/** @param {string} name @param {import('../tags.js').Children} value */
function fact(name, value) {
  return t.div({ key: name }, t.dt(null, name), t.dd(null, value));
}
