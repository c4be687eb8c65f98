/** Sign-in: trades the token for a cookie. The token is never in an address and never stored by the page. */

import { useEffect, useState } from 'preact/hooks';
import { ask, Failure, useApi } from '../api.js';
import { setTitle } from '../page.js';
import { Command } from '../parts/bits.js';
import { go, query, root } from '../router.js';
import { el, t } from '../tags.js';
import { withQuery } from '../url.js';

/** Where to go afterwards: a path within the dashboard, never another site. @param {string | undefined} next */
function safeNext(next) {
  const to = new URL(next || 'runs', root).href;
  return to.startsWith(root) ? to : `${root}runs`;
}

/** Why an issuer's people come back without having signed in. @type {Record<string, string>} */
const REFUSED = {
  expired: 'That sign-in was over: it took longer than ten minutes, was used before, or began in another browser.',
  denied: 'The issuer refused to sign you in.',
  issuer: 'The issuer cannot be asked now. An admin finds the reason in the log of this server.',
  token: 'What the issuer sent is not valid. An admin finds the reason in the log of this server.',
  access: 'You are known, but have no access here. An admin gives it in the file of this server.',
};

/** The button of single sign-on, where there is one. @param {{next: string | undefined}} props */
function Issuer({ next }) {
  const answer = /** @type {import('../api.js').Answer<import('../../types/api.js').Session>} */ (useApi('session'));
  if (!answer.data?.has_issuer) return null;
  const to = safeNext(next).slice(root.length) || 'runs';
  return t.p(
    null,
    t.a(
      { class: 'button primary', href: `${root}api/v1/${withQuery('session/oidc', { next: to })}` },
      'Sign in with single sign-on',
    ),
  );
}

export function Page() {
  const refused = query.value.refused;
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
    t.h1({ id: 'verdict' }, 'This server asks who you are'),
    refused ? t.p({ class: 'bad', role: 'alert' }, REFUSED[refused] ?? 'You are not signed in.') : null,
    el(Issuer, { next: query.value.next }),
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
