/** What is stored, what would go, and the two things a person does about it: pin a run, delete one. */

import { useEffect, useState } from 'preact/hooks';
import { ask, csvHref, Failure, useApi } from '../api.js';
import { bytes, count, plural } from '../format.js';
import { announce, setTitle } from '../page.js';
import { Ago, CappedNote, Card, Problem, Skeleton, Table } from '../parts/bits.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').StorageAnswer} StorageAnswer */
/** @typedef {import('../../types/api.js').RetentionAnswer} RetentionAnswer */
/** @typedef {import('../../types/api.js').RunSize} RunSize */
/** @typedef {import('../../types/api.js').DeletionRow} DeletionRow */

/** What a request that failed says. @param {unknown} error */
function says(error) {
  const detail = error instanceof Failure ? error.detail : { what: String(error), remedy: '' };
  return [`${detail.what}.`, detail.remedy ? `${detail.remedy}.` : ''].join(' ').trim();
}

export function Page() {
  const stored = /** @type {import('../api.js').Answer<StorageAnswer>} */ (useApi('storage', { everyMs: 10_000 }));
  const retention = /** @type {import('../api.js').Answer<RetentionAnswer>} */ (useApi('retention', { everyMs: 5000 }));
  const [wanted, setWanted] = useState('');
  const [problem, setProblem] = useState('');
  const title = stored.data?.text ?? '';
  useEffect(() => setTitle(title || 'Storage'), [title]);
  if (!stored.data)
    return stored.error
      ? el(Problem, { error: stored.error, retry: stored.refresh, what: 'what is stored' })
      : el(Skeleton, { height: 240, waitsFor: 'what is stored' });

  /** @param {string} method @param {string} path @param {string} done */
  async function act(method, path, done) {
    setProblem('');
    try {
      await ask(path, { method });
      announce(done);
    } catch (error) {
      setProblem(says(error));
    }
    stored.refresh();
    retention.refresh();
  }

  return t.div(
    { class: 'stack' },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, title),
      t.p({ class: 'faint' }, t.a({ href: 'runs' }, 'All runs'), ' ', t.a({ href: csvHref('storage') }, 'CSV')),
    ),
    problem ? t.p({ class: 'bad askproblem', role: 'alert' }, problem) : null,
    el(Kinds, { stored: stored.data }),
    retention.data
      ? el(Plan, { retention: retention.data, begin: () => act('POST', 'retention', 'Retention has begun') })
      : null,
    el(Runs, {
      stored: stored.data,
      wanted,
      choose: setWanted,
      pin: (run) =>
        act(
          run.is_pinned ? 'DELETE' : 'PUT',
          runPath(run.run_id, 'pin'),
          `${run.run_id} is ${run.is_pinned ? 'not pinned' : 'pinned'}`,
        ),
      remove: (run) => {
        setWanted('');
        act('DELETE', withQuery(runPath(run.run_id), { confirm: run.run_id }), `${run.run_id} is deleted`);
      },
    }),
    retention.data && retention.data.deletions.length > 0 ? el(Deletions, { rows: retention.data.deletions }) : null,
  );
}

/** @param {{stored: StorageAnswer}} props */
function Kinds({ stored }) {
  return el(
    Card,
    { title: 'By kind', note: `${bytes(stored.bytes)} of content, without indexes` },
    Table({
      label: 'Sizes by kind',
      rows: stored.kinds,
      keyOf: (kind) => kind.kind,
      columns: [
        { label: 'Kind', class: 'wide', cell: (kind) => kind.label },
        { label: 'Size', class: 'num', cell: (kind) => bytes(kind.bytes) },
        { label: 'Rows', class: 'num', cell: (kind) => count(kind.rows) },
        { label: 'Kept', cell: (kind) => kept(kind.keep_days, kind.keep_bytes) },
      ],
    }),
  );
}

/** @param {number} days @param {number} most */
function kept(days, most) {
  const limits = [days ? plural(days, 'day') : '', most ? `at most ${bytes(most)}` : ''].filter(Boolean);
  return limits.join(', ') || 'with its run';
}

/** What would go now. @param {{retention: RetentionAnswer, begin: () => void}} props */
function Plan({ retention, begin }) {
  const { planned, progress } = retention;
  const works = progress.state !== 'idle';
  return el(
    Card,
    {
      title: 'Retention',
      api: 'retention',
      note: works
        ? `${progress.state}${progress.run_id ? ` of ${progress.run_id}: ${count(progress.rows)} of ${count(progress.rows_to_go)} rows` : ''}`
        : retention.text,
      tools:
        planned.length > 0 && !works
          ? t.button({ type: 'button', class: 'button small', onClick: begin }, 'Remove it now')
          : null,
    },
    planned.length > 0
      ? Table({
          label: 'What would be removed',
          rows: planned,
          keyOf: (row) => `${row.run_id} ${row.kind}`,
          columns: [
            { label: 'Would go', cell: (row) => (row.kind === 'run' ? 'everything' : row.kind) },
            { label: 'Of run', class: 'wide', cell: (row) => t.a({ href: runPath(row.run_id) }, row.name) },
            { label: 'Size', class: 'num', cell: (row) => bytes(row.bytes) },
            { label: 'Rows', class: 'num', cell: (row) => count(row.rows) },
            { label: 'Because of its', cell: (row) => row.reason },
          ],
        })
      : null,
    retention.unmet.map((text) => t.p({ class: 'note padded', key: text }, text)),
    progress.failure ? t.p({ class: 'bad padded' }, `It goes on by itself: ${progress.failure}`) : null,
  );
}

/** @param {{stored: StorageAnswer, wanted: string, choose: (run: string) => void, pin: (run: RunSize) => void, remove: (run: RunSize) => void}} props */
function Runs({ stored, wanted, choose, pin, remove }) {
  const chosen = stored.runs.find((run) => run.run_id === wanted);
  return el(
    Card,
    { title: 'By run', note: 'largest first' },
    chosen ? el(Confirm, { key: chosen.run_id, run: chosen, cancel: () => choose(''), remove }) : null,
    Table({
      label: 'Sizes by run',
      rows: stored.runs,
      keyOf: (run) => run.run_id,
      columns: [
        {
          label: 'Run',
          class: 'wide',
          cell: (run) => [
            t.a({ href: runPath(run.run_id) }, run.name),
            run.name.includes(run.run_id) ? null : t.code({ class: 'faint runid' }, ` ${run.run_id}`),
          ],
        },
        {
          label: 'Status',
          class: 'nowrap',
          cell: (run) => [run.status, run.is_pinned ? 'pinned' : ''].filter(Boolean).join(', '),
        },
        { label: 'Last news', class: 'num nowrap', cell: (run) => el(Ago, { ms: run.received_ms }) },
        { label: 'Size', class: 'num', cell: (run) => bytes(run.bytes) },
        { label: 'Rows', class: 'num', cell: (run) => count(run.rows) },
        {
          label: 'What to do',
          class: 'nowrap',
          cell: (run) =>
            t.div(
              { class: 'buttons' },
              t.button(
                {
                  type: 'button',
                  class: 'button small',
                  'aria-label': `${run.is_pinned ? 'Unpin' : 'Pin'} run ${run.run_id}`,
                  onClick: () => pin(run),
                },
                run.is_pinned ? 'Unpin' : 'Pin',
              ),
              t.button(
                {
                  type: 'button',
                  class: 'button small',
                  disabled: run.is_pinned || run.is_live,
                  title: run.is_pinned ? 'Unpin it first' : run.is_live ? 'It is live' : '',
                  'aria-label': `Delete run ${run.run_id}`,
                  onClick: () => choose(run.run_id),
                },
                'Delete',
              ),
            ),
        },
      ],
    }),
    stored.capped ? el(CappedNote, { capped: stored.capped, noun: 'runs' }) : null,
  );
}

/** Names the run, and wants its id again. @param {{run: RunSize, cancel: () => void, remove: (run: RunSize) => void}} props */
function Confirm({ run, cancel, remove }) {
  const [text, setText] = useState('');
  return t.form(
    {
      class: 'askconfirm',
      'aria-label': `Delete run ${run.run_id}`,
      onSubmit: (event) => {
        event.preventDefault();
        if (text === run.run_id) remove(run);
      },
    },
    t.p(
      null,
      `Delete run “${run.run_id}” with ${bytes(run.bytes)} for good? Its findings, logs and numbers go too, and what it ` +
        'still sends is refused. This cannot be undone.',
    ),
    t.label(
      { class: 'askfield' },
      t.span(null, 'Its id, to confirm'),
      t.input({
        type: 'text',
        value: text,
        autocomplete: 'off',
        spellcheck: false,
        ref: (field) => {
          if (field && !field.dataset.seen) {
            field.dataset.seen = 'yes';
            field.focus();
          }
        },
        onInput: (event) => setText(event.currentTarget.value),
      }),
    ),
    t.div(
      { class: 'buttons' },
      t.button(
        { type: 'submit', class: text === run.run_id ? 'button primary' : 'button', disabled: text !== run.run_id },
        `Delete ${run.run_id}`,
      ),
      t.button({ type: 'button', class: 'button', onClick: cancel }, 'Cancel'),
    ),
  );
}

const WHY = { asked: 'a person', age: 'its age', size: 'the size of all runs' };

/** @param {{rows: DeletionRow[]}} props */
function Deletions({ rows }) {
  return el(
    Card,
    { title: 'Deleted', api: 'retention', note: 'what these runs still send is refused' },
    Table({
      label: 'Deleted runs',
      rows,
      keyOf: (row) => row.run_id,
      columns: [
        { label: 'Run', class: 'wide', cell: (row) => t.code(null, row.run_id) },
        { label: 'Because of', cell: (row) => WHY[row.reason] },
        { label: 'When', class: 'num nowrap', cell: (row) => el(Ago, { ms: row.asked_ms }) },
        {
          label: 'Size',
          class: 'num',
          cell: (row) => bytes(row.finished_ms === null ? row.bytes_at_start : row.bytes),
        },
        {
          label: 'State',
          class: 'nowrap',
          cell: (row) =>
            row.finished_ms === null ? `${count(row.rows)} of ${count(row.rows_at_start)} rows gone` : 'gone',
        },
      ],
    }),
  );
}
