/** The menu of a panel: its link, its tables as Markdown or CSV, the API's own answer, a picture of it. */

import { useEffect, useLayoutEffect, useRef, useState } from 'preact/hooks';
import { ask } from '../api.js';
import { announce, copy } from '../page.js';
import { place, root } from '../router.js';
import { t } from '../tags.js';
import { pictureOf } from './picture.js';
import { asCsv, asGrid, asMarkdown, fileName } from './sharetext.js';

/** @typedef {{key: string, text: string, does: () => Promise<Outcome>}} Item */
/** What came of it; `text` is what the browser refused to copy. @typedef {{said: string, text?: string}} Outcome */

/** Text as it is shown: what stands below each other is apart. @param {Element} element */
function shownText(element) {
  // biome-ignore lint/performance/useDomNodeTextContent: that joins lines
  return /** @type {HTMLElement} */ (element).innerText.trim();
}

/** @param {HTMLElement} panel */
function titleOf(panel) {
  const title = panel.querySelector('h1, h2');
  return title ? shownText(title) : document.title;
}

/** @param {HTMLTableElement} table */
function gridOf(table) {
  const lines = [...table.rows].map((row) =>
    [...row.cells].map((cell) => ({ text: shownText(cell), columns: cell.colSpan, rows: cell.rowSpan })),
  );
  return asGrid(lines);
}

/** @param {HTMLElement} panel */
function tablesOf(panel) {
  return [...panel.querySelectorAll('table')].filter((table) => table.checkVisibility());
}

/** The lines of a list that are on the screen. @param {Element} list */
function linesOf(list) {
  const rows = [...list.querySelectorAll('[role=option]')];
  const texts = rows.map((row) =>
    [...row.children]
      .map((one) => one.textContent?.trim())
      .filter(Boolean)
      .join('  '),
  );
  return ['```text', ...texts.map((text) => text.replaceAll('```', '` ` `')), '```'].join('\n');
}

const SAID = '.kicker, .why, .verdictcost, .reasons h2, .reasons p, .reasons code, .deciding b, .coverage > span, li';

/** What a verdict says, in its order, with what is folded. @param {HTMLElement} panel */
function saidOf(panel) {
  if (!panel.matches('.verdict')) return [];
  const texts = [...panel.querySelectorAll(SAID)].map((one) => {
    const text = (shownText(one) || one.textContent || '').replace(/\s+/g, ' ').trim();
    if (!text) return '';
    if (one.matches('h2, b')) return `**${text}**`;
    if (one.matches('code')) return `\`\`\`sh\n${text}\n\`\`\``;
    return one.matches('li') ? `- ${text}` : text;
  });
  return texts.filter(Boolean);
}

/** What the panel shows, with where it was seen. @param {HTMLElement} panel */
function markdownOf(panel) {
  const charts = [...panel.querySelectorAll('[role=img], [role=application]')].filter((one) => one.checkVisibility());
  const tables = tablesOf(panel);
  const notes = [...panel.querySelectorAll('.note:not(.sharebox *)')].map(shownText);
  const body = [
    `**${titleOf(panel)}**`,
    ...saidOf(panel),
    ...notes,
    ...tables.map((table) => asMarkdown(gridOf(table))),
    ...[...panel.querySelectorAll('[role=listbox]')].map(linesOf),
    ...(tables.length === 0 ? charts.map((one) => `- ${one.getAttribute('aria-label')}`) : []),
    `[${document.title}](${location.href})`,
  ];
  return body.filter(Boolean).join('\n\n');
}

/** Where the server has all rows as a table. @param {HTMLElement} panel */
function twinOf(panel) {
  return panel.querySelector('a[href*="format=csv"]')?.getAttribute('href');
}

/** All rows, where the server has them; else those that are shown. @param {HTMLElement} panel */
async function csvOf(panel) {
  const twin = twinOf(panel);
  if (!twin) return tablesOf(panel).map(gridOf).map(asCsv).join('\r\n');
  const answer = await fetch(root + twin);
  if (!answer.ok) throw new Error(`The server answered ${answer.status}`);
  return answer.text();
}

/** The answer of the API that the panel was drawn from; of several each under its address. @param {HTMLElement} panel */
async function jsonOf(panel) {
  const within = panel.dataset.api ? panel : /** @type {HTMLElement | null} */ (panel.querySelector('[data-api]'));
  const around = /** @type {HTMLElement | null} */ (panel.closest('[data-api]'));
  const paths = (within ?? around)?.dataset.api?.split(' ') ?? [];
  const answers = await Promise.all(paths.map(async (path) => [path, (await ask(path))?.data]));
  return JSON.stringify(answers.length === 1 ? answers[0][1] : Object.fromEntries(answers), null, 2);
}

/** @param {string} what @param {string | Promise<string>} made @returns {Promise<Outcome>} */
async function copied(what, made) {
  const text = await made;
  return (await copy(text)) ? { said: `${what} copied` } : { said: 'The browser refused to copy: press Ctrl C', text };
}

/** @param {HTMLElement} panel @param {string} ending @param {Promise<Blob>} made @returns {Promise<Outcome>} */
async function saved(panel, ending, made) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(await made);
  link.download = fileName(place.value.run, titleOf(panel), ending);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  return { said: `Saved as ${link.download}` };
}

/** @param {HTMLElement} panel @returns {Item[]} */
function itemsOf(panel) {
  const file = (/** @type {Promise<string>} */ text, /** @type {string} */ type) =>
    text.then((one) => new Blob([one], { type }));
  const isTable = tablesOf(panel).length > 0 || twinOf(panel) !== undefined;
  /** @type {(Item | false)[]} */
  const items = [
    { key: 'l', text: 'Copy link', does: () => copied('Link', location.href) },
    { key: 'm', text: 'Copy as Markdown', does: () => copied('Markdown', markdownOf(panel)) },
    isTable && { key: 'c', text: 'Copy as CSV', does: () => copied('CSV', csvOf(panel)) },
    { key: 'j', text: 'Copy as JSON', does: () => copied('JSON', jsonOf(panel)) },
    isTable && { key: 'C', text: 'Save as CSV', does: () => saved(panel, 'csv', file(csvOf(panel), 'text/csv')) },
    { key: 'J', text: 'Save as JSON', does: () => saved(panel, 'json', file(jsonOf(panel), 'application/json')) },
    { key: 'p', text: 'Save as picture', does: () => saved(panel, 'png', pictureOf(panel)) },
  ];
  return items.filter((item) => item !== false);
}

/** @param {{panel: HTMLElement, close: () => void}} props */
export function ShareMenu({ panel, close }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [at, setAt] = useState(0);
  const [outcome, setOutcome] = useState(/** @type {Outcome} */ ({ said: '' }));
  const items = itemsOf(panel);
  useLayoutEffect(() => {
    /** @type {HTMLElement | undefined} */ (box.current?.querySelectorAll('[role=menuitem]')[at])?.focus();
  }, [at]);
  useEffect(() => {
    const away = (/** @type {PointerEvent} */ event) => {
      if (!box.current?.parentElement?.contains(/** @type {Node} */ (event.target))) close();
    };
    document.addEventListener('pointerdown', away);
    return () => document.removeEventListener('pointerdown', away);
  }, []);
  /** @param {Item} item */
  async function pick(item) {
    setOutcome({ said: '' });
    const found = await item.does().catch((problem) => ({ said: `${item.text}: ${problem.message ?? problem}` }));
    setOutcome(found);
    announce(found.said);
  }
  /** @param {KeyboardEvent} event */
  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    /** @type {Record<string, number>} */
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1 + items.length, Home: 0, End: items.length - 1 };
    const item = items.find((one) => one.key === event.key);
    event.stopPropagation();
    if (event.key === 'Tab') return close();
    if (event.key === 'Escape') close();
    else if (event.key in moves) setAt(moves[event.key] % items.length);
    else if (item) pick(item);
    else return;
    event.preventDefault();
  }
  return t.div(
    { class: 'sharemenu', ref: box, onKeyDown: key },
    t.div(
      { role: 'menu', 'aria-label': `Share ${titleOf(panel)}` },
      items.map((item, i) =>
        t.button(
          {
            key: item.key,
            type: 'button',
            role: 'menuitem',
            tabIndex: i === at ? 0 : -1,
            'aria-keyshortcuts': item.key,
            onClick: () => pick(item),
          },
          item.text,
          t.kbd({ 'aria-hidden': 'true' }, item.key),
        ),
      ),
    ),
    outcome.said ? t.p({ class: 'note' }, outcome.said) : null,
    outcome.text === undefined
      ? null
      : t.textarea({
          readOnly: true,
          rows: 3,
          value: outcome.text,
          'aria-label': 'Press Ctrl C to copy',
          ref: (field) => field?.select(),
        }),
  );
}
