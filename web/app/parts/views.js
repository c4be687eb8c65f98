/** Views that are kept under a name, for all who use this server: of one run, or of every run. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { ask, Failure, useApi } from '../api.js';
import { announce } from '../page.js';
import { root } from '../router.js';
import { el, t } from '../tags.js';
import { viewFor } from '../url.js';
import { Icon } from './bits.js';

/** @typedef {import('../../types/api.js').SavedViews} SavedViews */
/** @typedef {import('../../types/api.js').SavedView} SavedView */

/** The address of what is on the screen, from the root; of every run with `*` as its run. @param {boolean} everyRun */
function here(everyRun) {
  const address = location.href.slice(root.length).replace(/#.*/, '');
  return everyRun ? address.replace(/^runs\/[^/?]+/, 'runs/*') : address;
}

/** @param {{run: string, close: () => void}} props */
export function Views({ run, close }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const answer = /** @type {import('../api.js').Answer<SavedViews>} */ (useApi('views'));
  const [failed, setFailed] = useState('');
  useEffect(() => dialog.current?.showModal(), []);
  /** @param {string} path @param {string} method @param {object | undefined} body @param {string} done */
  async function change(path, method, body, done) {
    try {
      await ask(path, { method, body });
      setFailed('');
      announce(done);
      answer.refresh();
    } catch (problem) {
      setFailed(problem instanceof Failure ? `${problem.detail.what}: ${problem.detail.remedy}` : String(problem));
    }
  }
  return t.dialog(
    {
      class: 'float views',
      ref: dialog,
      onClose: close,
      'aria-labelledby': 'views-title',
      onClick: (event) => event.target === dialog.current && dialog.current?.close(),
    },
    t.header(
      { class: 'cardhead' },
      t.h2({ id: 'views-title' }, 'Saved views'),
      t.div(
        { class: 'tools' },
        t.button(
          { type: 'button', class: 'iconbutton', onClick: () => dialog.current?.close(), 'aria-label': 'Close' },
          el(Icon, { name: 'cross' }),
        ),
      ),
    ),
    el(SaveForm, { run, save: (body) => change('views', 'POST', body, `Saved as ${body.name}`) }),
    failed ? t.p({ class: 'note bad padded', role: 'alert' }, failed) : null,
    answer.data?.views.length === 0 ? t.p({ class: 'note padded' }, 'None is saved yet.') : null,
    t.ul(
      { class: 'savedlist' },
      answer.data?.views.map((view) =>
        el(Line, {
          key: view.id,
          view,
          run,
          leave: () => dialog.current?.close(),
          drop: () => change(`views/${view.id}`, 'DELETE', undefined, `${view.name} is deleted`),
        }),
      ),
    ),
  );
}

/** @param {{run: string, save: (body: {name: string, address: string}) => void}} props */
function SaveForm({ run, save }) {
  const [name, setName] = useState('');
  const [everyRun, setEveryRun] = useState(false);
  return t.form(
    {
      class: 'saveform padded',
      'aria-label': 'Save this view',
      onSubmit: (event) => {
        event.preventDefault();
        if (name.trim()) save({ name, address: here(everyRun) });
        setName('');
      },
    },
    t.input({
      type: 'text',
      autoFocus: true,
      value: name,
      maxLength: 128,
      placeholder: 'Name of what is on the screen',
      'aria-label': 'Name of this view',
      onInput: (event) => setName(event.currentTarget.value),
    }),
    run
      ? t.label(
          null,
          t.input({
            type: 'checkbox',
            checked: everyRun,
            onChange: (event) => setEveryRun(event.currentTarget.checked),
          }),
          'for every run',
        )
      : null,
    t.button({ type: 'submit', class: 'button small', disabled: !name.trim() }, 'Save'),
  );
}

/** @param {{view: SavedView, run: string, leave: () => void, drop: () => void}} props */
function Line({ view, run, leave, drop }) {
  const to = viewFor(view.address, run);
  const text = [t.span({ key: 'n', class: 'savedname' }, view.name), t.code({ key: 'a' }, view.address)];
  return t.li(
    null,
    to === null
      ? t.span({ class: 'faint', title: 'Open a run first: it is a view of every run' }, text)
      : t.a({ href: to, onClick: leave }, text),
    t.button(
      { type: 'button', class: 'iconbutton', 'aria-label': `Delete the view ${view.name}`, onClick: drop },
      el(Icon, { name: 'cross' }),
    ),
  );
}
