/** The search box over log lines: its language, mistakes at their place, searches that are kept. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { ask, Failure, useApi } from '../api.js';
import { announce } from '../page.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { Icon } from './bits.js';
import { marked } from './querymark.js';

/** @typedef {import('../../types/api.js').SavedSearches} SavedSearches */

const SETTLE_MS = 300;

/** What the box takes: an example, and what it finds. @type {[string, string][]} */
const EXAMPLES = [
  ['nccl error', 'lines with both words, in any case; ncclRemoteError has nccl, remote and error'],
  ['"out of memory"', 'this phrase'],
  ['ckpt*', 'words that begin so; *point ends so, *oin* holds it'],
  ['loss -nan', 'without a word; -(a b), -rank:0 and the like too'],
  ['timeout OR (socket closed)', 'one or the other'],
  ['/took \\d{4,} ms/', 'a regular expression (RE2); /…/i in any case'],
  ['rank:0,4-7', 'of these ranks; rank:node of none'],
  ['level:>=warning', 'of this level and above; level:error,info'],
  ['step:400..500', 'while these steps ran; step:>400'],
  ['since:-10m', 'of the last ten minutes; until:2026-01-31T12:00'],
  ['host:node-b logger:train.*', 'of a host, a logger; * stands for any text'],
  ['stream:stderr', 'logging, warning, stdout, stderr, agent, event, error or finding'],
  ['group:tp_0', 'of the ranks of a process group; attempt:1 of one attempt'],
  ['run:ddp-* project:vision', 'of runs by id or name, of a project, where all runs are searched'],
];

/** The box itself; `focused`: it is what the page is for. @param {{error: Failure | null, label?: string, focused?: boolean}} props */
export function SearchBox({ error, label = 'Search all log lines of this run', focused = false }) {
  const field = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => {
    if (focused) field.current?.focus();
  }, []);
  const [text, setText] = useState(query.value.q ?? '');
  const [open, setOpen] = useState(/** @type {'help' | 'saved' | null} */ (null));
  useEffect(() => setText(query.value.q ?? ''), [query.value.q]);
  useEffect(() => {
    const before = query.value.q ?? '';
    if (text === before) return undefined;
    // Unless something else was searched for in the meantime: by Enter, or by a press elsewhere.
    const timer = setTimeout(() => (query.value.q ?? '') === before && search(text, true), SETTLE_MS);
    return () => clearTimeout(timer);
  }, [text]);
  const mistake = error?.status === 422 && error.detail.field === 'q' ? error.detail : null;
  const toggle = (/** @type {'help' | 'saved'} */ part) => setOpen(open === part ? null : part);
  return t.div(
    {
      class: 'logsearch',
      onKeyDown: (/** @type {KeyboardEvent} */ event) => {
        if (event.key !== 'Escape' || !open) return;
        event.stopPropagation();
        setOpen(null);
      },
    },
    t.div(
      { class: 'searchrow' },
      t.input({
        type: 'search',
        ref: field,
        class: 'wide',
        placeholder: 'Search: words, "phrases", prefix*, -not, /regex/, rank:3 level:>=warning',
        'aria-label': label,
        'aria-invalid': mistake ? 'true' : undefined,
        'aria-describedby': mistake ? 'search-mistake' : undefined,
        value: text,
        spellcheck: false,
        autocomplete: 'off',
        onInput: (event) => setText(event.currentTarget.value),
        onKeyDown: (event) => {
          if (event.key === 'Enter') search(text, false);
        },
      }),
      t.button(
        { type: 'button', class: 'button small', 'aria-expanded': open === 'help', onClick: () => toggle('help') },
        'Help',
      ),
      t.button(
        { type: 'button', class: 'button small', 'aria-expanded': open === 'saved', onClick: () => toggle('saved') },
        'Saved',
      ),
    ),
    mistake ? el(Mistake, { text: query.value.q ?? '', detail: mistake }) : null,
    open === 'help' ? el(Language, { close: () => setOpen(null) }) : null,
    open === 'saved' ? el(Saved, { text, close: () => setOpen(null) }) : null,
  );
}

/** @param {string} text @param {boolean} replace */
function search(text, replace) {
  setQuery({ q: text, line: null }, { replace });
}

/** What is wrong, under the character where it is. @param {{text: string, detail: import('../../types/api.js').ErrorBody}} props */
function Mistake({ text, detail }) {
  const [before, wrong, after] = marked(text, detail.at ?? null);
  return t.div(
    { class: 'mistake', id: 'search-mistake', role: 'status' },
    t.code(null, before, t.mark(null, wrong), after),
    t.p(null, t.strong(null, detail.what), detail.remedy ? `: ${detail.remedy}` : ''),
  );
}

/** @param {{close: () => void}} props */
function Language({ close }) {
  return t.section(
    { class: 'searchpanel card', 'aria-label': 'What can be searched for' },
    el(PanelHead, { title: 'What can be searched for', close }),
    t.dl(
      { class: 'language' },
      EXAMPLES.map(([example, meaning]) =>
        t.div(
          { key: example },
          t.dt(
            null,
            t.button(
              {
                type: 'button',
                class: 'link',
                title: 'Search for it',
                onClick: () => search(example, false),
              },
              t.code(null, example),
            ),
          ),
          t.dd(null, meaning),
        ),
      ),
    ),
    t.p(
      { class: 'note padded' },
      'Searches beside each other must all match, and bind closer than OR. Messages and their fields (key=value) are searched.',
    ),
  );
}

/** Searches that are kept, for all who use this server. @param {{text: string, close: () => void}} props */
function Saved({ text, close }) {
  const answer = /** @type {import('../api.js').Answer<SavedSearches>} */ (useApi('searches'));
  const [name, setName] = useState('');
  const [failed, setFailed] = useState('');
  const searches = answer.data?.searches ?? [];

  /** @param {string} path @param {string} method @param {object} [body] @param {string} [done] */
  async function change(path, method, body, done = '') {
    try {
      await ask(path, { method, body });
      setFailed('');
      setName('');
      announce(done);
      answer.refresh();
    } catch (problem) {
      setFailed(problem instanceof Failure ? `${problem.detail.what}: ${problem.detail.remedy}` : String(problem));
    }
  }
  return t.section(
    { class: 'searchpanel card', 'aria-label': 'Saved searches' },
    el(PanelHead, { title: 'Saved searches', close }),
    searches.length === 0 && answer.data ? t.p({ class: 'note padded' }, 'None yet.') : null,
    t.ul(
      { class: 'savedlist' },
      searches.map((one) =>
        t.li(
          { key: one.id },
          t.button(
            { type: 'button', class: 'link', onClick: () => search(one.q, false) },
            t.span({ class: 'savedname' }, one.name),
            t.code(null, one.q),
          ),
          t.button(
            {
              type: 'button',
              class: 'iconbutton',
              'aria-label': `Drop the search ${one.name}`,
              onClick: () => change(`searches/${one.id}`, 'DELETE', undefined, 'Dropped'),
            },
            el(Icon, { name: 'cross' }),
          ),
        ),
      ),
    ),
    t.form(
      {
        class: 'saveform padded',
        onSubmit: (/** @type {Event} */ event) => {
          event.preventDefault();
          change('searches', 'POST', { name, q: text }, 'Saved');
        },
      },
      t.input({
        type: 'text',
        value: name,
        maxLength: 128,
        placeholder: text ? 'Name of this search' : 'Write a search first',
        'aria-label': 'Name of this search',
        disabled: !text.trim(),
        onInput: (event) => setName(event.currentTarget.value),
      }),
      t.button({ type: 'submit', class: 'button small', disabled: !text.trim() || !name.trim() }, 'Save'),
    ),
    failed ? t.p({ class: 'note padded', role: 'status' }, failed) : null,
  );
}

/** @param {{title: string, close: () => void}} props */
function PanelHead({ title, close }) {
  return t.header(
    { class: 'cardhead' },
    t.h2(null, title),
    t.div(
      { class: 'tools' },
      t.button(
        { type: 'button', class: 'iconbutton', onClick: close, 'aria-label': 'Close' },
        el(Icon, { name: 'cross' }),
      ),
    ),
  );
}
