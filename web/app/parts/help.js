/** The keys of this page, and the switch that turns single keys off. */

import { useEffect, useRef } from 'preact/hooks';
import { bindings } from '../keys.js';
import { setSingleKeys, singleKeys } from '../page.js';
import { el, t } from '../tags.js';
import { Icon } from './bits.js';

/** What the map answers to while it has the focus. @type {[string, string][]} */
const MAP_KEYS = [
  ['arrows', 'One cell'],
  ['Ctrl+arrows', '50 steps, one node (on a Mac Alt)'],
  ['Shift arrows', 'Select ranks and steps'],
  ['Esc', 'Give up the selection'],
  ['Home End', 'First, last step'],
  ['Space', 'Pin or unpin the cell'],
  ['Enter', 'Open the rank'],
  ['+ - 0', 'Zoom in, out, reset'],
];

/** @param {{close: () => void}} props */
export function Help({ close }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => dialog.current?.showModal(), []);
  const seen = new Set();
  const list = bindings().filter((one) => !seen.has(one.keys) && seen.add(one.keys));
  const hasMap = document.querySelector('.rankmap') !== null;
  return t.dialog(
    {
      class: 'float help',
      ref: dialog,
      onClose: close,
      'aria-labelledby': 'help-title',
      onClick: (event) => event.target === dialog.current && dialog.current?.close(),
    },
    t.header(
      { class: 'cardhead' },
      t.h2({ id: 'help-title' }, 'Keys of this page'),
      t.div(
        { class: 'tools' },
        t.button(
          { type: 'button', class: 'iconbutton', onClick: () => dialog.current?.close(), 'aria-label': 'Close' },
          el(Icon, { name: 'cross' }),
        ),
      ),
    ),
    t.dl(
      { class: 'keys' },
      list.map((one) => row(one.keys, one.where ? `${one.text}, ${one.where}` : one.text)),
    ),
    hasMap
      ? [
          t.h3({ key: 'h' }, 'While the map has the focus'),
          t.dl(
            { class: 'keys', key: 'k' },
            MAP_KEYS.map(([keys, text]) => row(keys, text)),
          ),
        ]
      : null,
    t.label(
      { class: 'check' },
      t.input({
        type: 'checkbox',
        checked: singleKeys.value,
        onChange: (event) => setSingleKeys(event.currentTarget.checked),
      }),
      'Single keys are shortcuts',
    ),
  );
}

/** @param {string} keys @param {string} text */
function row(keys, text) {
  return t.div(
    { key: keys },
    t.dt(
      null,
      keys
        .split(keys.startsWith('Ctrl') ? '+' : ' ')
        .map((key, i) => t.kbd({ key: i }, key === 'Escape' ? 'Esc' : key)),
    ),
    t.dd(null, text),
  );
}
