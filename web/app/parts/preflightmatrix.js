/** The nodes of a preflight by nodes, with direction: reachability, round trip, bandwidth, MTU, loss. */

import { csvHref, useApi } from '../api.js';
import { figure, percent, sentence } from '../format.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { path, withQuery } from '../url.js';
import { CappedNote, Card, Loaded } from './bits.js';
import { BOUNDS, LOSSES, levelOf } from './levels.js';
import { MatrixLegend, NodeMatrix, sameNode, unmeasured } from './nodematrix.js';

/** @typedef {import('../../types/api.js').PreflightMatrix} Matrix */
/** @typedef {Matrix['metric']} Metric */

const MOST_NODES = 64; // 4,096 cells; of more the worst and a sample, and the page says so
/** @type {Record<Metric, string>} */
const TITLES = { connect: 'Reachability', mbit: 'Bandwidth', rtt: 'Round trip', mtu: 'Packet size', loss: 'Loss' };

/** @param {Metric} metric */
function levels(metric) {
  if (metric === 'connect') return [];
  if (metric === 'loss') return LOSSES.map((bound) => `${figure(bound * 100)} % or more is lost`);
  return BOUNDS.map((bound) =>
    metric === 'rtt'
      ? `more than ${figure(1 / bound)}× the shortest`
      : `below ${figure(bound * 100)} % of the ${metric === 'mtu' ? 'largest' : 'fastest'}`,
  );
}

/** @param {Metric} metric @param {number} value */
export function valueWords(metric, value) {
  if (metric === 'rtt') return `${figure(value)} ms`;
  if (metric === 'mtu') return `${figure(value)} B`;
  if (metric === 'loss') return percent(value);
  return value >= 1000 ? `${figure(value / 1000)} Gbit/s` : `${figure(value)} Mbit/s`;
}

/** @param {{id: string, topic: string}} props */
export function MatrixCard({ id, topic }) {
  const metric = query.value.metric in TITLES ? /** @type {Metric} */ (query.value.metric) : 'connect';
  const address = withQuery(path('preflight', 'runs', id, 'matrix'), { metric, most: MOST_NODES });
  const answer = /** @type {import('../api.js').Answer<Matrix>} */ (useApi(address, { topic, on: ['verdict'] }));
  return el(
    Card,
    {
      title: 'From node to node',
      note: answer.data ? sentence(answer.data.text) : '',
      tools: [
        ...Object.entries(TITLES).map(([name, title]) =>
          t.button(
            {
              key: name,
              type: 'button',
              class: 'button small',
              'aria-pressed': name === metric,
              onClick: () => setQuery({ metric: name === 'connect' ? null : name }, { replace: true }),
            },
            title,
          ),
        ),
        t.a({ key: 'csv', href: csvHref(address) }, 'CSV of what findings name'),
      ],
    },
    Loaded({ answer, height: 160, what: 'the matrix', children: (data) => el(Shown, { data }) }),
  );
}

/** @param {{data: Matrix}} props */
function Shown({ data }) {
  const { nodes, metric, values, states, flags } = data;
  if (nodes.length < 2) return t.p({ class: 'note padded' }, 'One node alone has no path to measure.');
  const known = values.flat().filter((value) => value !== null);
  const best = metric === 'rtt' ? Math.min(...known) : Math.max(0, ...known);
  const named = new Map(flags.map((flag) => [`${flag.row} ${flag.column}`, flag]));
  return [
    el(NodeMatrix, {
      key: 'm',
      label: `${TITLES[metric]} from node to node`,
      nodes,
      headOf: (row) => {
        const flag = named.get(`${row} -1`);
        return flag ? t.span({ class: 'pfnamed', title: `${flag.finding} names this node` }, nodes[row]) : nodes[row];
      },
      cell: (row, column) => {
        if (row === column) return sameNode(nodes[column]);
        const way = `${nodes[row]} to ${nodes[column]}`;
        const state = states[row][column];
        const value = metric === 'connect' ? null : values[row][column];
        const flag = named.get(`${row} ${column}`);
        if (metric === 'connect' ? !state : value === null) {
          const bad = state && state !== 'ok';
          return bad ? broken(nodes[column], way, state, flag) : unmeasured(nodes[column], way);
        }
        if (value === null && state !== 'ok') return broken(nodes[column], way, state, flag);
        const text = value === null ? 'reached' : valueWords(metric, value);
        const level = value === null ? 0 : levelOf(metric, value, best);
        return t.td(
          {
            key: nodes[column],
            class: `l-${level}${flag ? ' pfflag' : ''}`,
            title: `${way}: ${text}${flag ? `; named by ${flag.finding}` : ''}`,
          },
          text,
        );
      },
    }),
    el(
      MatrixLegend,
      { key: 'l', levels: levels(metric) },
      t.span({ key: 'b' }, t.span({ class: 'swatch pfbad', 'aria-hidden': 'true' }), ' connections failed'),
      flags.some((flag) => flag.column >= 0) && metric !== 'connect'
        ? t.span({ key: 'f' }, t.span({ class: 'swatch pfflag', 'aria-hidden': 'true' }), ' named by a finding')
        : null,
    ),
    el(CappedNote, { key: 'c', capped: data.capped, noun: 'nodes: those that findings name, and an even sample' }),
  ];
}

/** @type {Record<string, string>} */
const OUTCOMES = { drop: 'dropped', refused: 'refused', 'no-data': 'no data', 'not-us': 'another program' };

/** @param {string} key @param {string} way @param {string} state @param {{finding: string} | undefined} flag */
function broken(key, way, state, flag) {
  const text = OUTCOMES[state] ?? state;
  return t.td({ key, class: 'pfbad', title: `${way}: ${text}${flag ? `; named by ${flag.finding}` : ''}` }, text);
}
