/** Sign-in: trades the token for a cookie. The token is never in an address and never stored by the page. */

import { useEffect, useState } from 'preact/hooks';
import { ask, Failure } from '../api.js';
import { setTitle } from '../page.js';
import { Command } from '../parts/bits.js';
import { go, query, root } from '../router.js';
import { el, t } from '../tags.js';

/** Where to go afterwards: a path within the dashboard, never another site. @param {string | undefined} next */
function safeNext(next) {
  const to = new URL(next || 'runs', root).href;
  return to.startsWith(root) ? to : `${root}runs`;
}

export function Page() {
  const [token, setToken] = useState('');
  const [problem, setProblem] = useState('');
  useEffect(() => setTitle('Sign in'), []);
  /** @param {Event} event */
  async function send(event) {
    event.preventDefault();
    try {
      await ask('session', { method: 'POST', body: { token } });
      go(safeNext(query.value.next), { replace: true });
    } catch (failure) {
      setProblem(failure instanceof Failure ? failure.detail.what : String(failure));
    }
  }
  return t.section(
    { class: 'card padded' },
    t.h1({ id: 'verdict' }, 'This server asks for a token'),
    t.form(
      { class: 'signin', onSubmit: send },
      t.label({ for: 'token' }, 'Token'),
      t.input({
        id: 'token',
        type: 'password',
        required: true,
        autocomplete: 'current-password',
        value: token,
        onInput: (event) => setToken(event.currentTarget.value),
      }),
      t.button({ type: 'submit', class: 'button primary' }, 'Sign in'),
    ),
    problem ? t.p({ class: 'bad', role: 'alert' }, problem) : null,
    t.p({ class: 'note' }, 'An admin makes one for you, on the page Access or on the machine of the server:'),
    el(Command, { text: 'rankscope token create NAME --role read --project PROJECT' }),
  );
}
