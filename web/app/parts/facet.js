/** One facet of a search over lines. */

import { useState } from 'preact/hooks';
import { count } from '../format.js';
import { query, setQuery } from '../router.js';
import { t } from '../tags.js';

const FACET_SHOWN = 8;

/**
 * How many lines each value of one field would give; a press narrows to it.
 * @param {{name: string, values: [string | number, number][], isAtLeast: boolean, wordOf?: (value: string) => string}} props
 */
export function Facet({ name, values, isAtLeast, wordOf = String }) {
  const [all, setAll] = useState(false);
  const chosen = query.value[name];
  const word = (/** @type {string | number} */ value) =>
    name === 'rank' ? (value === -1 ? 'node' : `rank ${value}`) : wordOf(String(value)) || '(none)';
  return t.div(
    { class: 'facet' },
    t.p({ class: 'sidetitle' }, name),
    values.slice(0, all ? values.length : FACET_SHOWN).map(([value, lines]) =>
      t.button(
        {
          key: value,
          type: 'button',
          class: 'facetvalue',
          'aria-pressed': chosen === String(value),
          title: word(value),
          onClick: () => setQuery({ [name]: chosen === String(value) ? null : value, line: null }),
        },
        t.span(null, word(value)),
        t.span({ class: 'faint' }, isAtLeast ? `${count(lines)}+` : count(lines)),
      ),
    ),
    values.length > FACET_SHOWN && !all
      ? t.button({ type: 'button', class: 'link', onClick: () => setAll(true) }, `all ${values.length}`)
      : null,
  );
}
