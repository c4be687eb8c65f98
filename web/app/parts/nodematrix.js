/** A table of nodes by nodes, from the row to the column; what stands in a cell is the caller's. */

import { t } from '../tags.js';

/** @typedef {import('../tags.js').Node} Node */

/** @param {{label: string, nodes: string[], cell: (row: number, column: number) => Node, headOf?: (row: number) => import('../tags.js').Children}} props */
export function NodeMatrix({ label, nodes, cell, headOf }) {
  return t.div(
    { class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': label },
    t.table(
      { class: 'linkmatrix' },
      t.thead(
        null,
        t.tr(
          null,
          t.th({ scope: 'col' }, 'From, to'),
          nodes.map((node) => t.th({ key: node, scope: 'col', title: node }, node)),
        ),
      ),
      t.tbody(
        null,
        nodes.map((node, row) =>
          t.tr(
            { key: node },
            t.th({ scope: 'row', title: node }, headOf ? headOf(row) : node),
            nodes.map((_, column) => cell(row, column)),
          ),
        ),
      ),
    ),
  );
}

/** Nothing was measured from one node to the other. @param {string} key @param {string} way */
export function unmeasured(key, way) {
  return t.td({ key, class: 'unmeasured', title: `${way}: not measured` }, t.span({ class: 'sr' }, 'not measured'));
}

/** A node to itself: nothing is to be measured. @param {string} key */
export function sameNode(key) {
  return t.td({ key }, t.span({ class: 'sr' }, 'the same node'));
}

/** What hatched cells are, and the looks below the best. @param {{levels: string[], children?: import('../tags.js').Children}} props */
export function MatrixLegend({ levels, children }) {
  return t.p(
    { class: 'linklegend note padded' },
    t.span(null, t.span({ class: 'hatchmark', 'aria-hidden': 'true' }), ' not measured'),
    levels.map((text, at) =>
      t.span({ key: text }, t.span({ class: `swatch l-${at + 1}`, 'aria-hidden': 'true' }), ` ${text}`),
    ),
    children,
  );
}
