/** The form of a channel. What is left empty of a known channel's secrets stays as it is. */

import { useState } from 'preact/hooks';
import { el, t } from '../tags.js';
import { Choice, Field, FormButtons } from './fields.js';

/** @typedef {import('../../types/api.js').ChannelRow} ChannelRow */
/** @typedef {{name: string, label: string, type?: 'text' | 'password', hint?: string, secret?: boolean, size?: number}} Part */

/** @type {Record<string, Part[]>} */
const PARTS = {
  webhook: [
    { name: 'url', label: 'Address', secret: true, size: 40, hint: 'address of your receiver' },
    { name: 'signing_key', label: 'Signing key, 16 characters or more', secret: true, type: 'password' },
  ],
  slack: [{ name: 'url', label: 'Address', secret: true, size: 40, hint: 'hooks.slack.com/services/…' }],
  pagerduty: [
    { name: 'routing_key', label: 'Routing key', secret: true, type: 'password' },
    { name: 'url', label: 'Address', size: 36, hint: 'events.pagerduty.com/v2/enqueue' },
  ],
  otlp: [
    { name: 'url', label: 'Address', size: 36, hint: 'collector:4318, of OTLP over HTTP' },
    { name: 'headers', label: 'Headers, Name=value by commas', secret: true, type: 'password', size: 28 },
  ],
  email: [
    { name: 'recipients', label: 'Recipients, by commas', size: 32 },
    { name: 'sender', label: 'Sender' },
    { name: 'host', label: 'Mail server' },
    { name: 'port', label: 'Port', size: 5, hint: '587' },
    { name: 'user', label: 'User' },
    { name: 'password', label: 'Password', secret: true, type: 'password' },
  ],
};
const KINDS = [
  ['webhook', 'Webhook'],
  ['slack', 'Slack or the like'],
  ['email', 'Mail'],
  ['pagerduty', 'PagerDuty or the like'],
  ['otlp', 'Logs of OpenTelemetry'],
];

/** @param {{channel: ChannelRow | null, save: (body: object) => void, cancel: () => void}} props */
export function ChannelForm({ channel, save, cancel }) {
  const [name, setName] = useState(channel?.name ?? '');
  const [kind, setKind] = useState(/** @type {string} */ (channel?.kind ?? 'webhook'));
  const [values, setValues] = useState(() => shownValues(channel));
  const [security, setSecurity] = useState(String(channel?.target.security ?? 'starttls'));
  const [enabled, setEnabled] = useState(channel?.is_enabled === false ? 'off' : 'on');
  const [start, setStart] = useState(channel?.quiet?.start ?? '');
  const [end, setEnd] = useState(channel?.quiet?.end ?? '');
  const [zone, setZone] = useState(channel?.quiet?.zone ?? Intl.DateTimeFormat().resolvedOptions().timeZone);

  /** @param {Event} event */
  function send(event) {
    event.preventDefault();
    const quiet = start || end ? { ...channel?.quiet, start, end, zone } : null;
    save({ name, is_enabled: enabled === 'on', quiet, target: targetOf(kind, values, security) });
  }

  return t.form(
    { class: 'askform', onSubmit: send, 'aria-label': 'Channel' },
    t.div(
      { class: 'askrow' },
      el(Field, { label: 'Name', value: name, set: setName, required: true }),
      channel ? null : el(Choice, { label: 'Kind', value: kind, set: setKind, choices: KINDS }),
      PARTS[kind].map((part) =>
        el(Field, {
          key: part.name,
          label: part.label,
          type: part.type,
          size: part.size,
          hint: channel && part.secret && channel.target[part.name] ? 'set; empty keeps it' : part.hint,
          value: values[part.name] ?? '',
          set: (/** @type {string} */ value) => setValues({ ...values, [part.name]: value }),
        }),
      ),
      kind === 'email'
        ? el(Choice, {
            label: 'Encryption',
            value: security,
            set: setSecurity,
            choices: [
              ['starttls', 'STARTTLS'],
              ['tls', 'TLS from the start'],
              ['none', 'none'],
            ],
          })
        : null,
    ),
    t.div(
      { class: 'askrow' },
      el(Field, { label: 'Quiet from', value: start, set: setStart, size: 6, hint: '22:00' }),
      el(Field, { label: 'to', value: end, set: setEnd, size: 6, hint: '07:00' }),
      el(Field, { label: 'Time zone', value: zone, set: setZone, size: 18 }),
      el(Choice, {
        label: 'It is',
        value: enabled,
        set: setEnabled,
        choices: [
          ['on', 'on'],
          ['off', 'off'],
        ],
      }),
      el(FormButtons, { submit: 'Save', cancel }),
    ),
    t.p(
      { class: 'note' },
      'In quiet hours only critical messages are sent; what is over by their end is not sent at all.',
    ),
  );
}

/** What a form begins with: of a secret nothing. @param {ChannelRow | null} channel @returns {Record<string, string>} */
function shownValues(channel) {
  if (!channel) return {};
  return Object.fromEntries(
    PARTS[channel.kind].map((part) => {
      const value = channel.target[part.name];
      return [part.name, part.secret ? '' : Array.isArray(value) ? value.join(', ') : String(value ?? '')];
    }),
  );
}

/** @param {string} kind @param {Record<string, string>} values @param {string} security */
function targetOf(kind, values, security) {
  /** @type {Record<string, unknown>} */
  const target = { kind };
  for (const { name } of PARTS[kind]) if (values[name]) target[name] = values[name].trim();
  if (kind !== 'email') return target;
  target.security = security;
  target.port = Number(values.port || 587);
  target.recipients = (values.recipients ?? '').split(/[,\s]+/).filter(Boolean);
  return target;
}
