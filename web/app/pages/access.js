/** Access: who you are here, the tokens of the server, and what was done by whom. */

import { useEffect, useState } from 'preact/hooks';
import { ask, Failure, useApi } from '../api.js';
import { bytes, count, dateTime, plural } from '../format.js';
import { announce, setTitle } from '../page.js';
import { AuditLog, projectOf } from '../parts/audit.js';
import { Ago, Card, Command, Problem, Skeleton, Table } from '../parts/bits.js';
import { go } from '../router.js';
import { el, t } from '../tags.js';
import { path, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').Session} Session */
/** @typedef {import('../../types/api.js').Tokens} Tokens */
/** @typedef {import('../../types/api.js').TokenRow} TokenRow */
/** @typedef {import('../../types/api.js').TokenMade} TokenMade */
/** @typedef {import('../../types/api.js').Sessions} Sessions */
/** @typedef {import('../../types/api.js').SessionRow} SessionRow */

/** @type {{name: TokenRow['roles'][number], text: string}[]} */
const ROLES = [
  { name: 'ingest', text: 'sends batches and preflights, reads nothing' },
  { name: 'read', text: 'sees the runs of its project' },
  { name: 'operate', text: 'also asks ranks for stacks and profiles' },
  { name: 'admin', text: 'also makes tokens' },
];

/** What a session began with. @type {Record<SessionRow['by'], string>} */
const BY = { issuer: 'single sign-on', token: 'a token', operator: 'RANKSCOPE_TOKEN' };

/** @param {unknown} error */
function words(error) {
  if (!(error instanceof Failure)) return String(error);
  return [error.detail.what, error.detail.remedy].filter(Boolean).join('. ');
}

export function Page() {
  const answer = /** @type {import('../api.js').Answer<Session>} */ (useApi('session', { everyMs: 60_000 }));
  const session = answer.data;
  const sentence = !session
    ? ''
    : !session.required
      ? 'This server is open: anyone who reaches it may do anything'
      : session.signed_in
        ? `You are ${session.name}`
        : 'You are not signed in';
  useEffect(() => setTitle(sentence || 'Access'), [sentence]);
  useEffect(() => {
    if (session?.required && !session.signed_in) go(withQuery('sign-in', { next: 'access' }), { replace: true });
  }, [session?.signed_in]);
  if (!session)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'who you are' })
      : el(Skeleton, { height: 240, waitsFor: 'who you are' });
  const isAdmin = session.roles.includes('admin');
  return t.div(
    { class: 'stack' },
    el(You, { session, sentence }),
    isAdmin ? el(TokenList, { session, changed: answer.refresh }) : null,
    isAdmin && session.required ? el(SessionList, {}) : null,
    isAdmin ? el(AuditLog, { most: 50 }) : null,
  );
}

/** @param {{session: Session, sentence: string}} props */
function You({ session, sentence }) {
  const [problem, setProblem] = useState('');
  async function signOut() {
    try {
      await ask('session', { method: 'DELETE' });
      go('sign-in');
    } catch (error) {
      setProblem(words(error));
    }
  }
  const where = session.project === '*' ? 'all projects' : `the project ${session.project}`;
  return t.header(
    { class: 'pagehead' },
    t.h1({ id: 'verdict' }, sentence),
    session.required
      ? t.p(
          null,
          `May ${session.roles.join(', ')} in ${where}`,
          session.expires_ms ? `, until ${dateTime(session.expires_ms)}` : '',
          '. ',
          t.button({ type: 'button', class: 'button small', onClick: signOut }, 'Sign out'),
        )
      : t.p(null, 'The first token shuts it: make one with the role admin for all projects, and keep it.'),
    problem ? t.p({ class: 'bad', role: 'alert' }, problem) : null,
  );
}

/** @param {{session: Session, changed: () => void}} props */
function TokenList({ session, changed }) {
  const answer = /** @type {import('../api.js').Answer<Tokens>} */ (useApi('tokens', { everyMs: 15_000 }));
  const [made, setMade] = useState(/** @type {TokenMade | null} */ (null));
  const [problem, setProblem] = useState('');
  /** @param {() => Promise<TokenMade | null>} change */
  async function act(change) {
    setProblem('');
    try {
      setMade(await change());
      answer.refresh();
      if (!session.required) changed();
    } catch (error) {
      setProblem(words(error));
    }
  }
  /** @param {TokenRow} row */
  async function revoke(row) {
    await ask(path('tokens', row.id), { method: 'DELETE' });
    announce(`${row.name} is revoked`);
    return null;
  }
  /** @param {TokenRow} row */
  async function rotate(row) {
    const got = await ask(`${path('tokens', row.id)}/rotate`, { method: 'POST', body: {} });
    return got?.data ?? null;
  }
  const rows = answer.data?.tokens ?? [];
  return el(
    Card,
    { title: 'Tokens', api: 'tokens', note: answer.data ? plural(rows.length, 'token') : '' },
    made ? el(Made, { made, close: () => setMade(null) }) : null,
    problem ? t.p({ class: 'bad padded', role: 'alert' }, problem) : null,
    answer.error ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the tokens' }) : null,
    rows.length > 0
      ? Table({
          label: 'Tokens',
          rows,
          keyOf: (row) => row.id,
          rowProps: (row) => ({ class: row.state === 'active' ? '' : 'faint' }),
          columns: [
            {
              label: 'Name',
              class: 'wide',
              cell: (row) => [row.name, ' ', t.code({ class: 'faint' }, row.id)],
            },
            { label: 'Project', cell: projectOf },
            { label: 'Roles', cell: (row) => row.roles.join(', ') },
            { label: 'State', cell: (row) => row.state },
            { label: 'Quota', class: 'nowrap', cell: quota },
            {
              label: 'Ends',
              class: 'nowrap',
              cell: (row) => (row.expires_ms ? dateTime(row.expires_ms) : 'never'),
            },
            {
              label: 'Last used',
              class: 'nowrap',
              cell: (row) => (row.used_ms ? el(Ago, { ms: row.used_ms }) : 'never'),
            },
            {
              class: 'nowrap',
              cell: (row) =>
                row.state === 'active' &&
                el(TokenActions, { revoke: () => act(() => revoke(row)), rotate: () => act(() => rotate(row)) }),
            },
          ],
        })
      : null,
    el(NewToken, { session, act }),
  );
}

/** Who is signed in, and the end of it. */
function SessionList() {
  const answer = /** @type {import('../api.js').Answer<Sessions>} */ (useApi('sessions', { everyMs: 15_000 }));
  const [problem, setProblem] = useState('');
  /** @param {SessionRow} row */
  async function end(row) {
    setProblem('');
    try {
      await ask(path('sessions', row.id), { method: 'DELETE' });
      announce(`The session of ${row.name} has ended`);
    } catch (error) {
      setProblem(words(error));
    }
    answer.refresh();
  }
  const rows = answer.data?.sessions ?? [];
  return el(
    Card,
    { title: 'Signed in', api: 'sessions', note: answer.data ? plural(rows.length, 'session') : '' },
    problem ? t.p({ class: 'bad padded', role: 'alert' }, problem) : null,
    answer.error ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'who is signed in' }) : null,
    rows.length > 0
      ? Table({
          label: 'Sessions',
          rows,
          keyOf: (row) => row.id,
          columns: [
            { label: 'Who', class: 'wide', cell: (row) => [row.name, row.is_own ? ' (you)' : ''] },
            { label: 'By', cell: (row) => BY[row.by] },
            { label: 'Project', cell: projectOf },
            { label: 'Roles', cell: (row) => row.roles.join(', ') },
            { label: 'Since', class: 'nowrap', cell: (row) => el(Ago, { ms: row.created_ms }) },
            { label: 'Ends', class: 'nowrap', cell: (row) => dateTime(row.expires_ms) },
            {
              class: 'nowrap',
              cell: (row) =>
                !row.is_own && el(Sure, { text: 'End', sure: `End that of ${row.name}`, act: () => end(row) }),
            },
          ],
        })
      : answer.data
        ? t.p({ class: 'padded faint' }, 'No browser is signed in.')
        : null,
  );
}

/** A link that asks once more. @param {{text: string, sure: string, act: () => void}} props */
function Sure({ text, sure, act }) {
  const [asked, setAsked] = useState(false);
  return t.button(
    { type: 'button', class: 'link', onClick: () => (asked ? act() : setAsked(true)) },
    asked ? sure : text,
  );
}

/** @param {{made: TokenMade, close: () => void}} props */
function Made({ made, close }) {
  return t.div(
    { class: 'padded', role: 'status' },
    t.p(null, 'This is the only time that it is shown. Copy it now:'),
    el(Command, { text: made.token }),
    t.button({ type: 'button', class: 'link', onClick: close }, 'I have it'),
  );
}

/** What a token may send. @param {TokenRow} row */
function quota(row) {
  const rates = [
    row.bytes_per_second ? `${bytes(row.bytes_per_second)}/s` : '',
    row.events_per_second ? `${count(row.events_per_second)} events/s` : '',
  ];
  return rates.filter(Boolean).join(', ') || 'none';
}

/** @param {{revoke: () => void, rotate: () => void}} props */
function TokenActions({ revoke, rotate }) {
  return [
    t.button({ key: 'r', type: 'button', class: 'link', onClick: rotate }, 'Rotate'),
    ' ',
    el(Sure, { key: 'x', text: 'Revoke', sure: 'Revoke now', act: revoke }),
  ];
}

/** @param {{session: Session, act: (change: () => Promise<TokenMade | null>) => void}} props */
function NewToken({ session, act }) {
  const isFirst = !session.required;
  const [name, setName] = useState('');
  const [project, setProject] = useState(isFirst || session.project === '*' ? '*' : (session.project ?? ''));
  const [roles, setRoles] = useState(/** @type {string[]} */ (isFirst ? ['admin'] : ['read']));
  const [days, setDays] = useState('');
  const [rates, setRates] = useState({ bytes: '', events: '' });
  /** @param {Event} event */
  function send(event) {
    event.preventDefault();
    const body = {
      name,
      project,
      roles,
      ...(days ? { expires_days: Number(days) } : {}),
      bytes_per_second: Math.round(Number(rates.bytes) * 2 ** 20),
      events_per_second: Number(rates.events),
    };
    act(async () => {
      const got = await ask('tokens', { method: 'POST', body });
      setName('');
      return got?.data ?? null;
    });
  }
  /** @param {string} role @param {boolean} chosen */
  function choose(role, chosen) {
    setRoles(chosen ? [...roles, role] : roles.filter((one) => one !== role));
  }
  return t.form(
    { class: 'newtoken padded', onSubmit: send, 'aria-label': 'New token' },
    t.label(
      null,
      t.span(null, 'Name'),
      t.input({
        type: 'text',
        required: true,
        maxLength: 64,
        value: name,
        onInput: (event) => setName(event.currentTarget.value),
      }),
    ),
    t.label(
      null,
      t.span(null, 'Project (* for all)'),
      t.input({
        type: 'text',
        required: true,
        maxLength: 64,
        value: project,
        disabled: session.project !== '*',
        onInput: (event) => setProject(event.currentTarget.value),
      }),
    ),
    t.label(
      null,
      t.span(null, 'Ends after days'),
      t.input({
        type: 'text',
        inputMode: 'numeric',
        pattern: '[0-9]{1,4}',
        title: 'A whole number of days',
        placeholder: 'never',
        value: days,
        onInput: (event) => setDays(event.currentTarget.value),
      }),
    ),
    el(Quota, { label: 'At most MiB/s', value: rates.bytes, set: (bytes) => setRates({ ...rates, bytes }) }),
    el(Quota, { label: 'At most events/s', value: rates.events, set: (events) => setRates({ ...rates, events }) }),
    t.fieldset(
      null,
      t.legend(null, 'Roles'),
      ROLES.map((role) =>
        t.label(
          { key: role.name, class: 'rolebox' },
          t.input({
            type: 'checkbox',
            checked: roles.includes(role.name),
            onChange: (event) => choose(role.name, event.currentTarget.checked),
          }),
          t.span(null, t.b(null, role.name), ` ${role.text}`),
        ),
      ),
    ),
    t.button({ type: 'submit', class: 'button primary', disabled: roles.length === 0 }, 'Make token'),
  );
}

/** What a token may send. @param {{label: string, value: string, set: (value: string) => void}} props */
function Quota({ label, value, set }) {
  return t.label(
    null,
    t.span(null, label),
    t.input({
      type: 'text',
      inputMode: 'numeric',
      pattern: '[0-9]{1,9}',
      title: 'A whole number',
      placeholder: 'no limit',
      value,
      onInput: (event) => set(event.currentTarget.value),
    }),
  );
}
