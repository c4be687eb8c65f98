/** The mesh as a table: each rank with its place and all its numbers, the largest of the one shown first. */

import { count } from '../format.js';
import { Table } from '../parts/bits.js';
import { t } from '../tags.js';
import { runPath } from '../url.js';
import { numberWords } from './mesh.js';

/** @typedef {import('../../types/api.js').Mesh} Mesh */

const SHOWN = 200;

/** @param {{mesh: Mesh, shown: string, run: string}} props */
export function MeshTable({ mesh, shown, run }) {
  return Table({
    key: shown,
    label: 'The mesh as a table',
    frame: 'maptable',
    rows: mesh.rank.map((rank, row) => ({ rank, row })),
    keyOf: ({ rank }) => rank,
    sorted: mesh.values.find((value) => value.key === shown)?.title,
    most: SHOWN,
    noun: 'ranks',
    columns: [
      {
        label: 'Rank',
        class: 'nowrap',
        cell: ({ rank }) => t.a({ href: runPath(run, 'ranks', String(rank)) }, `Rank ${count(rank)}`),
      },
      {
        label: 'Host',
        class: 'clip',
        cell: ({ row }) => (mesh.host[row] < 0 ? 'not known' : mesh.hosts[mesh.host[row]]),
      },
      ...(mesh.axes.length > 1 ? mesh.axes : []).map((axis, i) => ({
        label: axis.name,
        class: 'num',
        cell: (/** @type {{row: number}} */ { row }) => count(mesh.at[row][i]),
      })),
      ...mesh.values.map((value) => ({
        label: value.title,
        class: 'num nowrap',
        by: (/** @type {{row: number}} */ { row }) => value.values[row],
        cell: (/** @type {{row: number}} */ { row }) =>
          value.values[row] === null ? t.span({ class: 'faint' }, 'no data') : numberWords(value, value.values[row]),
      })),
    ],
  });
}
