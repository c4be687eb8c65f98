/** Where the reader is: one signal, fed by links, by code and by the browser's Back. */

import { computed, signal } from '@preact/signals';
import { readPath, withQuery } from './url.js';

/** @typedef {import('./url.js').Query} Query */

/** The dashboard's root, whatever prefix a proxy put before it. Fixed at load. */
export const root = new URL('./', document.baseURI).href;
// A relative <base> moves with pushState; from here on it is absolute.
document.querySelector('base')?.setAttribute('href', root);

const address = signal(location.href);

/** @type {import('@preact/signals').ReadonlySignal<import('./url.js').Place>} */
export const place = computed(() => readPath(new URL(address.value).pathname.slice(new URL(root).pathname.length)));

/** @type {import('@preact/signals').ReadonlySignal<Record<string, string>>} */
export const query = computed(() => Object.fromEntries(new URL(address.value).searchParams));

/** Go to a path relative to the root. @param {string} to @param {{replace?: boolean, keepScroll?: boolean}} [options] */
export function go(to, options = {}) {
  const url = new URL(to, root).href;
  if (url === location.href) return;
  const samePage = new URL(url).pathname === location.pathname;
  history[options.replace ? 'replaceState' : 'pushState'](null, '', url);
  address.value = url;
  if (!samePage && !options.keepScroll) scrollTo(0, 0);
}

/** Change parts of the query and stay on the page. @param {Query} changes @param {{replace?: boolean}} [options] */
export function setQuery(changes, options = {}) {
  const url = new URL(location.href);
  go(withQuery(url.origin + url.pathname, { ...query.value, ...changes }), { ...options, keepScroll: true });
}

/** Absolute address of a path, for copying. @param {string} to */
export function absolute(to) {
  return new URL(to, root).href;
}

addEventListener('popstate', () => {
  address.value = location.href;
});

document.addEventListener('click', (event) => {
  if (event.defaultPrevented || event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey)
    return;
  const link = event.target instanceof Element ? event.target.closest('a') : null;
  if (!link || link.target || link.hasAttribute('download') || !link.href.startsWith(root)) return;
  const here = link.getAttribute('href') ?? '';
  if (here.startsWith('#')) {
    // With a <base>, "#main" would leave the page.
    event.preventDefault();
    document.getElementById(here.slice(1))?.focus();
    return;
  }
  if (/^(api|static)\//.test(link.href.slice(root.length))) return;
  event.preventDefault();
  go(link.href);
});
