/** The mesh as a table: each rank with its place and all its numbers, the largest of the one shown first. */

import { useState } from 'preact/hooks';
import { count } from '../format.js';
import { t } from '../tags.js';
import { runPath } from '../url.js';
import { numberWords } from './mesh.js';

/** @typedef {import('../../types/api.js').Mesh} Mesh */

const SHOWN = 200;

/** @param {{mesh: Mesh, shown: string, run: string}} props */
export function MeshTable({ mesh, shown, run }) {
  const [sort, setSort] = useState(shown);
  const by = mesh.values.find((value) => value.key === sort);
  const rows = mesh.rank.map((_, row) => row);
  if (by) rows.sort((a, b) => (by.values[b] ?? -Infinity) - (by.values[a] ?? -Infinity) || a - b);
  /** @param {string} key @param {string} title @param {boolean} isNumber */
  const head = (key, title, isNumber) =>
    t.th(
      { key, class: isNumber ? 'num' : '', 'aria-sort': sort === key && isNumber ? 'descending' : undefined },
      t.button(
        { type: 'button', class: 'sort', onClick: () => setSort(key) },
        title,
        sort === key && isNumber ? ' ▾' : '',
      ),
    );
  return t.div(
    null,
    t.div(
      { class: 'scroll maptable', tabIndex: 0, role: 'region', 'aria-label': 'The mesh as a table' },
      t.table(
        { class: 'table' },
        t.thead(
          null,
          t.tr(
            null,
            head('rank', 'Rank', false),
            t.th(null, 'Host'),
            mesh.axes.length > 1 ? mesh.axes.map((axis) => t.th({ key: axis.name, class: 'num' }, axis.name)) : null,
            mesh.values.map((value) => head(value.key, value.title, true)),
          ),
        ),
        t.tbody(
          null,
          rows.slice(0, SHOWN).map((row) =>
            t.tr(
              { key: mesh.rank[row] },
              t.td(
                { class: 'nowrap' },
                t.a({ href: runPath(run, 'ranks', String(mesh.rank[row])) }, `Rank ${count(mesh.rank[row])}`),
              ),
              t.td({ class: 'clip' }, mesh.host[row] < 0 ? 'not known' : mesh.hosts[mesh.host[row]]),
              mesh.axes.length > 1
                ? mesh.at[row].map((place, i) => t.td({ key: mesh.axes[i].name, class: 'num' }, count(place)))
                : null,
              mesh.values.map((value) =>
                t.td(
                  { key: value.key, class: 'num nowrap' },
                  value.values[row] === null
                    ? t.span({ class: 'faint' }, 'no data')
                    : numberWords(value, value.values[row]),
                ),
              ),
            ),
          ),
        ),
      ),
    ),
    rows.length > SHOWN ? t.p({ class: 'note padded' }, `First ${SHOWN} of ${count(rows.length)} ranks.`) : null,
  );
}
