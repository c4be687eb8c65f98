/** What a person starts from a page: a new preflight, and calls of the server to nodes of one under way. */

import { useState } from 'preact/hooks';
import { ask, Failure, useApi } from '../api.js';
import { count, dateTime, duration, plural } from '../format.js';
import { announce } from '../page.js';
import { el, t } from '../tags.js';
import { path } from '../url.js';
import { Card, Command, Table } from './bits.js';
import { Choice, Field } from './fields.js';
import { preflightHref, State } from './preflight.js';

/** @typedef {import('../../types/api.js').PreflightView} View */
/** @typedef {import('../../types/api.js').PreflightInvitation} Invitation */
/** @typedef {import('../../types/api.js').Dialled} Dialled */
/** @typedef {import('../../types/api.js').Session} Session */
/** @typedef {{node: string, port: number, said: Dialled | null, problem: string}} Call */

const FIRST = 'first';
const ALL = 'all';

/** The ports that a choice means. Pure. @param {number[]} ports @param {string} which */
export function portsOf(ports, which) {
  if (which === ALL) return ports;
  return which === FIRST ? ports.slice(0, 1) : ports.filter((port) => String(port) === which);
}

/** @param {View} view @param {string} name */
function declared(view, name) {
  return view.nodes.find((node) => node.node === name)?.ports ?? [];
}

/** @param {unknown} error */
function says(error) {
  return error instanceof Failure ? [error.detail.what, error.detail.remedy].filter(Boolean).join('; ') : String(error);
}

/** Whether who is signed in may do this; null until it is known. @param {Session['roles'][number]} role */
function useRole(role) {
  const session = /** @type {import('../api.js').Answer<Session>} */ (useApi('session')).data;
  return session === null ? null : session.roles.includes(role);
}

/** Names or a number of nodes, as `{nodes}` or `{num_nodes}`; null for neither. Pure. @param {string} text */
export function readNodes(text) {
  const parts = text.split(/[\s,]+/).filter(Boolean);
  if (parts.length === 0) return null;
  if (parts.length === 1 && /^\d+$/.test(parts[0])) {
    const number = Number(parts[0]);
    return number >= 1 && number <= 4096 ? { num_nodes: number } : null;
  }
  const known = parts.every((name) => /^[A-Za-z0-9][A-Za-z0-9._:-]{0,252}$/.test(name));
  return known && parts.length <= 4096 ? { nodes: parts } : null;
}

/** @param {{run: string}} props */
export function NewPreflight({ run }) {
  const may = useRole('ingest');
  const [text, setText] = useState('');
  const [made, setMade] = useState(/** @type {Invitation | null} */ (null));
  const [problem, setProblem] = useState('');
  if (may === null) return null;
  const wanted = readNodes(text);
  /** @param {Event} event */
  async function start(event) {
    event.preventDefault();
    setProblem(wanted ? '' : 'Names of letters, digits, dots and dashes, or a number up to 4,096');
    if (!wanted) return;
    try {
      const got = await ask('preflight/runs', { method: 'POST', body: { ...wanted, run_id: run } });
      setMade(got?.data ?? null);
      announce('The preflight waits for its nodes');
    } catch (error) {
      setProblem(says(error));
    }
  }
  return el(
    Card,
    {
      title: 'Start a preflight over this server',
      note: 'for nodes that reach this server, and perhaps not each other; it loads nothing and starts no job',
    },
    may
      ? t.form(
          { class: 'askform', onSubmit: start, 'aria-label': 'Start a preflight' },
          t.div(
            { class: 'askrow' },
            el(Field, {
              label: 'Nodes: their names, or how many',
              value: text,
              set: setText,
              hint: 'node0, node1, node2',
              size: 30,
              required: true,
            }),
            t.button({ type: 'submit', class: 'button primary' }, 'Make the command'),
          ),
          problem ? t.p({ class: 'bad', role: 'alert' }, problem) : null,
        )
      : t.p(
          { class: 'note padded' },
          'This wants a token with the role ingest. Or type on each node: ',
          t.code(null, 'rankscope preflight --nodes node0,node1'),
        ),
    made ? el(Invited, { made }) : null,
  );
}

/** @param {{made: Invitation}} props */
function Invited({ made }) {
  return t.div(
    { class: 'padded stack', role: 'status' },
    t.p(null, 'On each node, in the environment of the job:'),
    el(Command, { text: made.command }),
    t.p(
      { class: 'note' },
      `The token opens this preflight alone, until ${dateTime(made.expires_ms)}, and is shown this once. `,
      t.a({ href: preflightHref(made.id) }, 'Follow it'),
    ),
  );
}

/** Calls of the server, one after the other: of what a node declared, and nothing else. @param {{view: View}} props */
export function CallCard({ view }) {
  const may = useRole('operate');
  const nodes = view.nodes.filter((node) => node.ports.length > 0);
  const [chosen, setChosen] = useState('');
  const [which, setWhich] = useState(FIRST);
  const [calls, setCalls] = useState(/** @type {Call[]} */ ([]));
  const [busy, setBusy] = useState(false);
  if (may === null) return null;
  const note = 'by its name, at its own address, on ports that its agent declared: the server is no port scanner';
  const why = !view.is_under_way
    ? 'The server calls nodes only while their agents listen: until their preflight ends.'
    : !may
      ? 'This wants a token with the role operate.'
      : nodes.length === 0
        ? 'No node has said yet on which ports it listens.'
        : '';
  if (why)
    return el(
      Card,
      { title: 'Call a node from the server', note },
      t.p({ class: 'note padded' }, why),
      calls.length > 0 ? el(Calls, { calls }) : null,
    );
  const wanted = nodes
    .filter((node) => !chosen || node.node === chosen)
    .flatMap((node) => portsOf(node.ports, chosen ? which : FIRST).map((port) => ({ node: node.node, port })));
  /** @param {Event} event */
  async function start(event) {
    event.preventDefault();
    setBusy(true);
    setCalls([]);
    /** @type {Call[]} */
    const done = [];
    for (const { node, port } of wanted) {
      try {
        const got = await ask(`${path('preflight', 'runs', view.summary.id)}/check`, {
          method: 'POST',
          body: { node, port },
        });
        done.push({ node, port, said: got?.data ?? null, problem: '' });
      } catch (error) {
        done.push({ node, port, said: null, problem: says(error) });
      }
      setCalls([...done]);
      if (done[done.length - 1].problem) break; // a limit, or the preflight has ended: more would say the same
    }
    setBusy(false);
    announce(`${plural(done.length, 'call')} ended`);
  }
  return el(
    Card,
    { title: 'Call a node from the server', note },
    t.form(
      { class: 'askform', onSubmit: start, 'aria-label': 'Call a node' },
      t.div(
        { class: 'askrow' },
        el(Choice, {
          label: 'Node',
          value: chosen,
          set: (node) => {
            setChosen(node);
            setWhich(FIRST);
          },
          choices: [['', `all ${count(nodes.length)}`], ...nodes.map((node) => [node.node, node.node])],
        }),
        el(Choice, {
          label: 'Port',
          value: chosen ? which : FIRST,
          set: setWhich,
          choices: [
            [FIRST, 'the first that it declared'],
            ...(chosen ? declared(view, chosen) : []).map((port) => [String(port), String(port)]),
            ...(chosen ? [[ALL, 'all that it declared']] : []),
          ],
        }),
        t.button({ type: 'submit', class: 'button primary', disabled: busy }, `Make ${plural(wanted.length, 'call')}`),
      ),
    ),
    calls.length > 0 ? el(Calls, { calls }) : null,
  );
}

/** @param {{calls: Call[]}} props */
function Calls({ calls }) {
  return Table({
    label: 'Calls of the server',
    rows: calls,
    keyOf: (call) => `${call.node} ${call.port}`,
    columns: [
      {
        label: 'Outcome',
        class: 'nowrap',
        cell: (call) => el(State, { status: call.said?.outcome === 'ok' ? 'ok' : call.said ? 'fail' : 'unknown' }),
      },
      { label: 'Node', cell: (call) => call.node },
      {
        label: 'Address and port',
        class: 'nowrap',
        cell: (call) => t.code(null, `${call.said?.address || '–'}:${call.port}`),
      },
      { label: 'Took', class: 'nowrap', cell: (call) => (call.said ? duration(call.said.elapsed_ms) : '–') },
      {
        label: 'What it means',
        class: 'wide',
        cell: (call) => (call.said ? `${call.said.outcome}: ${call.said.why}` : call.problem),
      },
    ],
  });
}
