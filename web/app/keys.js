/** Keyboard shortcuts: pages register theirs while they are mounted; `?` lists what holds now. */

import { signal } from '@preact/signals';
import { useEffect } from 'preact/hooks';
import { singleKeys } from './page.js';

/** `keys` as typed: "n", "g o", "Shift+ArrowLeft". `where` set: only shown in the help, handled there.
 * @typedef {{keys: string, text: string, run?: () => void, where?: string}} Binding */

/** @type {import('@preact/signals').Signal<Binding[][]>} */
const layers = signal([]);

/** All bindings that hold now, the latest page's first. */
export function bindings() {
  return [...layers.value].reverse().flat();
}

/** Hold bindings while the component is mounted. @param {Binding[]} list @param {unknown[]} depends */
export function useKeys(list, depends) {
  useEffect(() => {
    layers.value = [...layers.value, list];
    return () => {
      layers.value = layers.value.filter((layer) => layer !== list);
    };
  }, depends);
}

const SEQUENCE_MS = 1500;
let prefix = '';
/** @type {ReturnType<typeof setTimeout> | undefined} */
let forget;

/** How a key press is written in a binding. @param {KeyboardEvent} event */
export function keyName(event) {
  const held = [];
  if (event.ctrlKey || event.metaKey) held.push('Ctrl');
  if (event.shiftKey && event.key.length > 1) held.push('Shift');
  const key = event.key === ' ' ? 'Space' : event.key;
  return [...held, held.includes('Ctrl') ? key.toLowerCase() : key].join('+');
}

/** @param {EventTarget | null} target */
function isField(target) {
  return (
    target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName))
  );
}

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (event.defaultPrevented || event.isComposing || event.altKey) return;
  const key = keyName(event);
  if (isField(event.target)) {
    if (key === 'Escape') /** @type {HTMLElement} */ (event.target).blur();
    if (key !== 'Ctrl+k') return;
  }
  if (document.querySelector('dialog[open]') && key !== 'Ctrl+k') return;
  const typed = prefix ? `${prefix} ${key}` : key;
  const single = key.length === 1;
  if (single && !singleKeys.value) return;
  const all = bindings();
  const found = all.find((one) => one.run && one.keys === typed);
  clearTimeout(forget);
  prefix = '';
  if (found?.run) {
    event.preventDefault();
    found.run();
  } else if (single && all.some((one) => one.keys.startsWith(`${typed} `))) {
    prefix = typed;
    forget = setTimeout(() => {
      prefix = '';
    }, SEQUENCE_MS);
  }
}

document.addEventListener('keydown', onKey);
