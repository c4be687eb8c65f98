/** Fields of forms: a label, what it takes, and what it says. */

import { t } from '../tags.js';

/** @param {{label: string, value: string, set: (value: string) => void, type?: 'text' | 'password', hint?: string, size?: number, required?: boolean}} props */
export function Field({ label, value, set, type = 'text', hint, size = 24, required }) {
  /** @type {{value: string, size: number, required?: boolean, placeholder?: string, onInput: (event: any) => void}} */
  const rest = { value, size, required, placeholder: hint, onInput: (event) => set(event.currentTarget.value) };
  return t.label(
    { class: 'askfield' },
    t.span(null, label),
    type === 'password'
      ? t.input({ ...rest, type: 'password', autocomplete: 'new-password' })
      : t.input({ ...rest, type: 'text', autocomplete: 'off' }),
  );
}

/** @param {{label: string, value: string, set: (value: string) => void, choices: string[][]}} props */
export function Choice({ label, value, set, choices }) {
  return t.label(
    { class: 'askfield' },
    t.span(null, label),
    t.select(
      { value, onChange: (event) => set(event.currentTarget.value) },
      choices.map(([key, text]) => t.option({ key, value: key }, text)),
    ),
  );
}

/** @param {{submit: string, cancel: () => void}} props */
export function FormButtons({ submit, cancel }) {
  return t.div(
    { class: 'buttons' },
    t.button({ type: 'submit', class: 'button primary' }, submit),
    t.button({ type: 'button', class: 'button', onClick: cancel }, 'Cancel'),
  );
}
