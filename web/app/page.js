/** The document around the pages: theme, title, the clock, spoken announcements, the clipboard. */

import { effect, signal } from '@preact/signals';

const THEME_KEY = 'rankscope.theme';
const KEYS_KEY = 'rankscope.keys';

/** Storage can be refused by the browser; then the choice lasts as long as the page. @param {string} key */
function remembered(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

/** @param {string} key @param {string | null} value */
function remember(key, value) {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, value);
  } catch {
    // see remembered()
  }
}

const systemDark = matchMedia('(prefers-color-scheme: dark)');
const chosen = signal(remembered(THEME_KEY));
const onPaper = matchMedia('print');
const printing = signal(onPaper.matches);
onPaper.addEventListener('change', () => {
  printing.value = onPaper.matches;
});

/** The theme on screen. @type {import('@preact/signals').Signal<'light' | 'dark'>} */
export const theme = signal('light');

effect(() => {
  const forced = chosen.value === 'light' || chosen.value === 'dark' ? chosen.value : null;
  if (forced) document.documentElement.dataset.theme = forced;
  else delete document.documentElement.dataset.theme;
  // Canvases are drawn anew: paper is light, as the style sheet has it.
  theme.value = printing.value ? 'light' : (forced ?? (systemDark.matches ? 'dark' : 'light'));
});
systemDark.addEventListener('change', () => {
  if (!chosen.value && !printing.value) theme.value = systemDark.matches ? 'dark' : 'light';
});
addEventListener('storage', (event) => {
  if (event.key === THEME_KEY) chosen.value = event.newValue;
});

/** Switch between light and dark, and keep it. */
export function switchTheme() {
  const next = theme.value === 'dark' ? 'light' : 'dark';
  const system = systemDark.matches ? 'dark' : 'light';
  chosen.value = next === system ? null : next;
  remember(THEME_KEY, chosen.value);
}

/** Whether single keys act as shortcuts; some readers need them off. */
export const singleKeys = signal(remembered(KEYS_KEY) !== 'off');

/** @param {boolean} on */
export function setSingleKeys(on) {
  singleKeys.value = on;
  remember(KEYS_KEY, on ? null : 'off');
}

/** The time, once a second while the page is visible. */
export const now = signal(Date.now());
setInterval(() => {
  if (!document.hidden) now.value = Date.now();
}, 1000);

/** Name the document by its answer. @param {string[]} parts most telling first */
export function setTitle(...parts) {
  document.title = [...parts.filter(Boolean), 'rankscope'].join(' · ');
}

/** What the polite live region says. */
export const spoken = signal('');
let spokenAt = 0;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let speaking;

/** Say a sentence to screen readers, at most two a second; the last one wins. @param {string} text */
export function announce(text) {
  clearTimeout(speaking);
  const wait = Math.max(0, spokenAt + 500 - Date.now());
  speaking = setTimeout(() => {
    spokenAt = Date.now();
    spoken.value = text;
  }, wait);
}

/** Copy a text; true only if it is in the clipboard. @param {string} text @returns {Promise<boolean>} */
export async function copy(text) {
  if (navigator.clipboard && isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // refused: try the old way
    }
  }
  // Plain HTTP has no clipboard API: select a text field and ask the browser to copy it.
  const field = document.createElement('textarea');
  field.value = text;
  field.className = 'copyfield';
  field.setAttribute('aria-hidden', 'true');
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  let done = false;
  try {
    done = document.execCommand('copy');
  } catch {
    done = false;
  }
  field.remove();
  if (focused instanceof HTMLElement) focused.focus();
  return done;
}
