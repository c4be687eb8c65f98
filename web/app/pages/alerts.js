/** Alerts of this server: what is open, where messages go, by which rules, and what was sent. */

import { useEffect, useState } from 'preact/hooks';
import { ask, csvHref, Failure, useApi } from '../api.js';
import { count, dateTime, plural, words } from '../format.js';
import { announce, setTitle } from '../page.js';
import { Ago, CappedNote, Card, Icon, Problem, Severity, Skeleton, Table } from '../parts/bits.js';
import { ChannelForm } from '../parts/channelform.js';
import { RuleForm, ruleText } from '../parts/ruleform.js';
import { el, t } from '../tags.js';

/** @typedef {import('../../types/api.js').Alerts} Alerts */
/** @typedef {import('../../types/api.js').AlertRow} AlertRow */
/** @typedef {import('../../types/api.js').AlertStatus} AlertStatus */
/** @typedef {import('../../types/api.js').ChannelRow} ChannelRow */
/** @typedef {import('../../types/api.js').Channels} Channels */
/** @typedef {import('../../types/api.js').Deliveries} Deliveries */
/** @typedef {import('../../types/api.js').DeliveryRow} DeliveryRow */
/** @typedef {import('../../types/api.js').RuleRow} RuleRow */
/** @typedef {import('../../types/api.js').Rules} Rules */

const EVERY_MS = 5000;
const ALERTS = 'alerts?limit=50';
const DELIVERIES = 'alerts/deliveries?limit=50';

const FROM_FILE = 'From the file of the server, to be changed there · ';

/** What went wrong, in words. @param {unknown} error */
function wordsOf(error) {
  if (!(error instanceof Failure)) return String(error);
  return [error.detail.what, error.detail.remedy].filter(Boolean).join('; ');
}

export function Page() {
  const alerts = /** @type {import('../api.js').Answer<Alerts>} */ (useApi(ALERTS, { everyMs: EVERY_MS }));
  const status = /** @type {import('../api.js').Answer<AlertStatus>} */ (
    useApi('alerts/status', { everyMs: EVERY_MS })
  );
  const channels = /** @type {import('../api.js').Answer<Channels>} */ (
    useApi('alerts/channels', { everyMs: EVERY_MS })
  );
  const rules = /** @type {import('../api.js').Answer<Rules>} */ (useApi('alerts/rules', { everyMs: EVERY_MS }));
  const sent = /** @type {import('../api.js').Answer<Deliveries>} */ (useApi(DELIVERIES, { everyMs: EVERY_MS }));
  const [problem, setProblem] = useState('');
  const all = [alerts, status, channels, rules, sent];
  // who sees one project sees the alerts of its runs, and nothing of the server
  const isOfProject = Boolean(alerts.data) && [status, channels, rules, sent].every(isRefused);
  const failed = isOfProject ? null : all.find((one) => one.error && !one.data);
  const sentence = isOfProject ? openText(alerts.data) : sentenceOf(alerts.data, channels.data, status.data);
  useEffect(() => setTitle(sentence || 'Alerts'), [sentence]);
  if (failed?.error) return el(Problem, { error: failed.error, retry: failed.refresh, what: 'the alerts' });
  if (isOfProject && alerts.data)
    return t.div(
      { class: 'stack' },
      t.header(
        { class: 'pagehead' },
        t.h1({ id: 'verdict' }, sentence),
        t.p(
          { class: 'note' },
          'Of the runs of your project. Channels, rules and messages are seen by those who see all projects.',
        ),
      ),
      el(Problems, { alerts: alerts.data, act: null }),
    );
  if (!alerts.data || !status.data || !channels.data || !rules.data || !sent.data)
    return el(Skeleton, { height: 240, waitsFor: 'the alerts' });

  /** Do something, say what became of it, and look again. @param {string} method @param {string} path @param {string} done @param {object} [body] */
  async function act(method, path, done, body) {
    setProblem('');
    try {
      const made = await ask(`alerts/${path}`, { method, body });
      announce(done);
      for (const one of all) one.refresh();
      return made?.data ?? null;
    } catch (error) {
      setProblem(`Not done: ${wordsOf(error)}`);
      return null;
    }
  }

  return t.div(
    { class: 'stack' },
    t.header({ class: 'pagehead' }, t.h1({ id: 'verdict' }, sentence), el(Blindness, { status: status.data })),
    problem ? t.p({ class: 'bad padded card', role: 'alert' }, problem) : null,
    el(Problems, { alerts: alerts.data, act }),
    el(ChannelList, { channels: channels.data.channels, act }),
    el(RuleList, { rules: rules.data.rules, channels: channels.data.channels, act }),
    el(Sent, { sent: sent.data, act }),
  );
}

/** @typedef {(method: string, path: string, done: string, body?: object) => Promise<any>} Act */

/** @param {import('../api.js').Answer<any>} answer */
function isRefused(answer) {
  return answer.error instanceof Failure && answer.error.status === 403;
}

/** @param {Alerts | null} alerts */
function openText(alerts) {
  if (!alerts) return '';
  return alerts.num_open === 0 ? 'No alert is open' : `${plural(alerts.num_open, 'alert')} open`;
}

/** The first sentence. Pure. @param {Alerts | null} alerts @param {Channels | null} channels @param {AlertStatus | null} status */
function sentenceOf(alerts, channels, status) {
  if (!alerts || !channels || !status) return '';
  const open = openText(alerts);
  if (channels.channels.every((one) => !one.is_enabled)) return `${open}, and no channel: nothing is sent`;
  const lost = status.num_given_up > 0 ? `; ${plural(status.num_given_up, 'message')} given up` : '';
  return open + lost;
}

/** What alerting itself lacks. @param {{status: AlertStatus}} props */
function Blindness({ status }) {
  const { deadman } = status;
  const dead = !deadman.is_set
    ? 'No dead-man switch: if this server goes down, no message says so. Set RANKSCOPE_SERVER_DEADMAN_URL.'
    : deadman.problem
      ? `The dead-man switch is held back: ${deadman.problem}.`
      : ['Dead-man switch: asked ', el(Ago, { ms: deadman.asked_ms }), '.'];
  return [
    status.problem ? t.p({ class: 'bad', key: 'p' }, `The rules are not looked at: ${status.problem}.`) : null,
    t.p({ class: deadman.problem ? 'bad' : 'note', key: 'd' }, dead),
    status.public_url
      ? null
      : t.p({ class: 'note', key: 'u' }, 'Messages hold paths in place of links: set --public-url to have links.'),
  ];
}

/** @param {{alerts: Alerts, act: Act | null}} props */
function Problems({ alerts, act }) {
  return el(
    Card,
    {
      title: 'Alerts',
      api: ALERTS,
      note: 'open ones first; one problem is one alert',
      tools: t.a({ href: csvHref(ALERTS) }, 'CSV'),
    },
    alerts.alerts.length === 0 ? t.p({ class: 'note padded' }, 'No rule has found anything yet.') : null,
    t.ul(
      { class: 'alertlist' },
      alerts.alerts.map((one) =>
        t.li(
          { key: one.id, class: one.state === 'open' ? '' : 'quiet' },
          one.state === 'open'
            ? el(Severity, { severity: one.severity })
            : t.span(
                { class: 'severity' },
                el(Icon, { name: one.state === 'recovered' ? 'ok' : 'unknown' }),
                one.state,
              ),
          t.div(
            null,
            t.a({ href: one.path, class: 'strong' }, one.what),
            one.state === 'open' ? [t.p({ key: 'y' }, one.why), t.p({ key: 'n' }, `Next: ${one.next}`)] : null,
            t.p(
              { class: 'note' },
              `${one.rule_name}${one.run_name || one.run_id ? ` · ${one.run_name || one.run_id}` : ''} · since `,
              el(Ago, { ms: one.opened_ms }),
              one.end_reason ? ` · ${one.end_reason}` : '',
              ` · ${messagesText(one)}`,
            ),
          ),
          one.state === 'open' && act
            ? t.button(
                {
                  type: 'button',
                  class: 'button small',
                  title: 'Says so to its channels, and is quiet until the problem is over and comes again',
                  onClick: () => act('POST', `${one.id}/close`, 'Closed'),
                },
                'Close',
              )
            : null,
        ),
      ),
    ),
    el(CappedNote, { capped: alerts.capped, noun: 'alerts' }),
  );
}

/** @param {AlertRow} one */
function messagesText(one) {
  const parts = [plural(one.num_sent, 'message') + ' sent'];
  if (one.num_waiting) parts.push(`${count(one.num_waiting)} waiting`);
  if (one.num_given_up) parts.push(`${count(one.num_given_up)} given up`);
  return parts.join(', ');
}

/** @param {{channels: ChannelRow[], act: Act}} props */
function ChannelList({ channels, act }) {
  const [form, setForm] = useState(/** @type {ChannelRow | 'new' | null} */ (null));
  /** @param {object} body */
  async function save(body) {
    const path = form === 'new' || form === null ? 'channels' : `channels/${form.id}`;
    if (await act(form === 'new' ? 'POST' : 'PUT', path, 'Channel saved', body)) setForm(null);
  }
  return el(
    Card,
    {
      title: 'Channels',
      api: 'alerts/channels',
      note: 'where messages go; secrets can be set, never read',
      tools: t.button({ type: 'button', class: 'button small', onClick: () => setForm('new') }, 'Add a channel'),
    },
    form
      ? el(ChannelForm, {
          key: form === 'new' ? 0 : form.id,
          channel: form === 'new' ? null : form,
          save,
          cancel: () => setForm(null),
        })
      : null,
    channels.length === 0 && !form ? t.p({ class: 'note padded' }, 'No channel yet: nothing is sent.') : null,
    t.ul(
      { class: 'alertlist' },
      channels.map((one) =>
        t.li(
          { key: one.id, class: one.is_enabled ? '' : 'quiet' },
          el(State, { state: one.is_enabled ? (one.last_state ?? 'none') : 'off' }),
          t.div(
            null,
            t.span({ class: 'strong' }, one.name),
            t.p(
              { class: 'note' },
              one.is_from_file ? FROM_FILE : '',
              `${words(one.kind)} · ${one.place}`,
              one.quiet ? ` · quiet ${one.quiet.start} to ${one.quiet.end} ${one.quiet.zone}` : '',
            ),
            one.last_note ? t.p({ class: 'bad' }, one.last_note) : null,
          ),
          t.div(
            { class: 'buttons' },
            t.button({ type: 'button', class: 'button small', onClick: () => tryIt(one) }, 'Send a test'),
            one.is_from_file
              ? null
              : [
                  t.button({ key: 'c', type: 'button', class: 'button small', onClick: () => setForm(one) }, 'Change'),
                  el(DeleteButton, {
                    key: 'd',
                    what: one.name,
                    confirm: () => act('DELETE', `channels/${one.id}`, 'Deleted'),
                  }),
                ],
          ),
        ),
      ),
    ),
  );
  /** @param {ChannelRow} one */
  async function tryIt(one) {
    const sent = /** @type {DeliveryRow | null} */ (await act('POST', `channels/${one.id}/test`, 'Test sent'));
    if (sent) announce(sent.state === 'sent' ? 'The test arrived' : `The test did not arrive: ${sent.note}`);
  }
}

/** @param {{rules: RuleRow[], channels: ChannelRow[], act: Act}} props */
function RuleList({ rules, channels, act }) {
  const [form, setForm] = useState(/** @type {RuleRow | 'new' | null} */ (null));
  /** @param {object} body */
  async function save(body) {
    const path = form === 'new' || form === null ? 'rules' : `rules/${form.id}`;
    if (await act(form === 'new' ? 'POST' : 'PUT', path, 'Rule saved', body)) setForm(null);
  }
  return el(
    Card,
    {
      title: 'Rules',
      api: 'alerts/rules',
      note: 'what is worth a message',
      tools: t.button({ type: 'button', class: 'button small', onClick: () => setForm('new') }, 'Add a rule'),
    },
    form
      ? el(RuleForm, {
          key: form === 'new' ? 0 : form.id,
          rule: form === 'new' ? null : form,
          channels,
          save,
          cancel: () => setForm(null),
        })
      : null,
    rules.length === 0 && !form ? t.p({ class: 'note padded' }, 'No rule: nothing opens an alert.') : null,
    t.ul(
      { class: 'alertlist' },
      rules.map((one) =>
        t.li(
          { key: one.id, class: one.is_enabled ? '' : 'quiet' },
          el(State, { state: one.is_enabled ? 'on' : 'off' }),
          t.div(
            null,
            t.span({ class: 'strong' }, one.name),
            t.p({ class: 'note' }, one.is_from_file ? FROM_FILE : '', ruleText(one, channels)),
            one.never ? t.p({ class: 'note' }, one.never) : null,
          ),
          one.is_from_file
            ? null
            : t.div(
                { class: 'buttons' },
                t.button(
                  {
                    type: 'button',
                    class: 'button small',
                    onClick: () => {
                      const { id, is_from_file: _, never: __, ...body } = one;
                      act('PUT', `rules/${id}`, 'Rule changed', { ...body, is_enabled: !one.is_enabled });
                    },
                  },
                  one.is_enabled ? 'Switch off' : 'Switch on',
                ),
                t.button({ type: 'button', class: 'button small', onClick: () => setForm(one) }, 'Change'),
                el(DeleteButton, { what: one.name, confirm: () => act('DELETE', `rules/${one.id}`, 'Deleted') }),
              ),
        ),
      ),
    ),
  );
}

/** @type {Record<string, [string, string]>} a mark and its word */
const STATES = {
  none: ['unknown', 'nothing sent yet'],
  off: ['unknown', 'off'],
  on: ['ok', 'on'],
  pending: ['info', 'waits'],
  sent: ['ok', 'arrived'],
  given_up: ['critical', 'given up'],
  dropped: ['warning', 'dropped'],
  skipped: ['unknown', 'skipped'],
};

/** @param {{state: string}} props */
function State({ state }) {
  const [mark, word] = STATES[state] ?? STATES.none;
  return t.span({ class: `severity is-${mark}` }, el(Icon, { name: mark }), t.span(null, word));
}

/** Asks once more before it deletes. @param {{what: string, confirm: () => void}} props */
function DeleteButton({ what, confirm }) {
  const [sure, setSure] = useState(false);
  return t.button(
    {
      type: 'button',
      class: 'button small',
      'aria-label': sure ? `Really delete ${what}` : `Delete ${what}`,
      onClick: () => (sure ? confirm() : setSure(true)),
      onBlur: () => setSure(false),
    },
    sure ? 'Really?' : 'Delete',
  );
}

/** @param {{sent: Deliveries, act: Act}} props */
function Sent({ sent, act }) {
  return el(
    Card,
    {
      title: 'Messages',
      api: DELIVERIES,
      note: 'newest first; what fails is tried again for a day',
      tools: t.a({ href: csvHref(DELIVERIES) }, 'CSV'),
    },
    sent.deliveries.length === 0 ? t.p({ class: 'note padded' }, 'Nothing was sent yet.') : null,
    sent.deliveries.length === 0
      ? null
      : Table({
          label: 'Messages',
          rows: sent.deliveries,
          keyOf: (one) => one.id,
          columns: [
            { label: 'When', class: 'nowrap', cell: (one) => dateTime(one.created_ms) },
            { label: 'Channel', class: 'nowrap', cell: (one) => one.channel_name },
            { label: 'State', class: 'nowrap', cell: (one) => el(State, { state: one.state }) },
            { label: 'Attempts', class: 'num', cell: (one) => count(one.attempts) },
            {
              label: 'Message',
              class: 'wide',
              cell: (one) => [
                one.what,
                one.note ? t.p({ class: one.state === 'given_up' ? 'bad' : 'note' }, one.note) : null,
                one.state === 'given_up' || one.state === 'dropped'
                  ? t.button(
                      {
                        type: 'button',
                        class: 'link',
                        onClick: () => act('POST', `deliveries/${one.id}/send`, 'Sent again'),
                      },
                      'Send again',
                    )
                  : null,
              ],
            },
          ],
        }),
    el(CappedNote, { capped: sent.capped, noun: 'messages' }),
  );
}
