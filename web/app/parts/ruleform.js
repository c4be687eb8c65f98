/** The form of a rule, and a rule in words. */

import { useState } from 'preact/hooks';
import { duration, money, percent, plural } from '../format.js';
import { el, t } from '../tags.js';
import { Choice, Field, FormButtons } from './fields.js';

/** @typedef {import('../../types/api.js').ChannelRow} ChannelRow */
/** @typedef {import('../../types/api.js').RuleRow} RuleRow */

const GIB = 2 ** 30;
/** What a rule may be about, with the one number that it has. @type {Record<string, {title: string, number: string, key: string, initial: number, scale: number}>} */
const ABOUT = {
  finding: { title: 'a finding', number: 'Least confidence, %', key: 'min_confidence', initial: 0, scale: 0.01 },
  stall: { title: 'a run that stands still', number: 'for seconds', key: 'seconds', initial: 1800, scale: 1 },
  silence: { title: 'silence of ranks or of a run', number: 'for seconds', key: 'seconds', initial: 120, scale: 1 },
  throughput: { title: 'lost throughput', number: 'from %', key: 'share_ratio', initial: 10, scale: 0.01 },
  budget: { title: 'what a run has spent', number: 'from an amount of money', key: 'money', initial: 100, scale: 1 },
  loss: { title: 'lost records of a run', number: 'so many or more', key: 'records', initial: 1, scale: 1 },
  lag: { title: 'this server is behind', number: 'by seconds', key: 'seconds', initial: 120, scale: 1 },
  queue: { title: 'the queue of the store', number: 'from % full', key: 'used_ratio', initial: 80, scale: 0.01 },
  disk: { title: 'the disk of the store', number: 'below GiB free', key: 'free_bytes', initial: 5, scale: GIB },
};

/** @type {Record<string, string>} */
const SEVERITIES = { critical: 'critical', warning: 'warning or worse', info: 'of any severity' };

/** A rule as a sentence. Pure. @param {RuleRow} rule @param {ChannelRow[]} channels */
export function ruleText(rule, channels) {
  const names = rule.channels.map((id) => channels.find((one) => one.id === id)?.name ?? `channel ${id}`);
  const tags = Object.entries(rule.tags).map(([key, value]) => `${key}=${value}`);
  const about = [rule.runs, ...tags].filter(Boolean).join(', ');
  const to = names.length > 0 ? names.join(', ') : 'every channel';
  return `${whenText(rule.when)}${about ? `, of runs ${about}` : ''}; to ${to}`;
}

/** @param {RuleRow['when']} when */
function whenText(when) {
  switch (when.about) {
    case 'finding': {
      const kinds = when.kinds.length > 0 ? ` of ${when.kinds.join(', ')}` : '';
      const sure = when.min_confidence > 0 ? `, ${percent(when.min_confidence)} sure or more` : '';
      return `Findings${kinds}, ${SEVERITIES[when.min_severity]}${sure}`;
    }
    case 'stall':
      return `A run is stuck, or ends no step for ${duration(when.seconds * 1e3)}`;
    case 'silence':
      return `Nothing of ${when.is_whole_run ? 'any rank of a run' : 'a rank'} for ${duration(when.seconds * 1e3)}`;
    case 'throughput':
      return when.share_ratio > 0
        ? `${percent(when.share_ratio)} of the throughput is lost`
        : `${when.rank_hours_per_day} rank-hours a day are lost`;
    case 'loss':
      return `${plural(when.records, 'record')} or more of a run are lost or refused`;
    case 'budget':
      return when.money > 0
        ? `A run has spent ${money(when.money, '')}`
        : `A run has spent ${when.rank_hours} rank-hours`;
    case 'lag':
      return `This server is behind by ${duration(when.seconds * 1e3)}`;
    case 'queue':
      return `The queue of the store is ${percent(when.used_ratio)} full`;
    case 'disk':
      return `Less than ${(when.free_bytes / GIB).toFixed(1)} GiB are free`;
  }
}

/** @param {{rule: RuleRow | null, channels: ChannelRow[], save: (body: object) => void, cancel: () => void}} props */
export function RuleForm({ rule, channels, save, cancel }) {
  const when = /** @type {Record<string, any>} */ (rule?.when ?? { about: 'finding' });
  const [name, setName] = useState(rule?.name ?? '');
  const [about, setAbout] = useState(String(when.about));
  const [number, setNumber] = useState(numberOf(when));
  const [severity, setSeverity] = useState(String(when.min_severity ?? 'warning'));
  const [kinds, setKinds] = useState((when.kinds ?? []).join(', '));
  const [runs, setRuns] = useState(rule?.runs ?? '');
  const [tags, setTags] = useState(
    Object.entries(rule?.tags ?? {})
      .map(([key, value]) => `${key}=${value}`)
      .join(', '),
  );
  const [to, setTo] = useState(/** @type {number[]} */ (rule?.channels ?? []));
  const known = ABOUT[about];

  /** @param {Event} event */
  function send(event) {
    event.preventDefault();
    const kept = when.about === about ? when : {};
    const body = { ...kept, about, [known.key]: Number(number) * known.scale };
    if (about === 'disk') body.free_bytes = Math.round(body.free_bytes);
    if (about === 'finding') Object.assign(body, { min_severity: severity, kinds: listOf(kinds) });
    save({ name, when: body, runs, tags: tagsOf(tags), channels: to, is_enabled: rule?.is_enabled ?? true });
  }

  return t.form(
    { class: 'askform', onSubmit: send, 'aria-label': 'Rule' },
    t.div(
      { class: 'askrow' },
      el(Field, { label: 'Name', value: name, set: setName, required: true }),
      el(Choice, {
        label: 'About',
        value: about,
        set: (value) => {
          setAbout(value);
          setNumber(String(ABOUT[value].initial));
        },
        choices: Object.entries(ABOUT).map(([key, one]) => [key, one.title]),
      }),
      about === 'finding'
        ? el(Choice, {
            label: 'Severity',
            value: severity,
            set: setSeverity,
            choices: Object.entries(SEVERITIES),
          })
        : null,
      el(Field, { label: known.number, value: number, set: setNumber, size: 7 }),
      about === 'finding' ? el(Field, { label: 'Kinds, by commas', value: kinds, set: setKinds, hint: 'all' }) : null,
    ),
    t.div(
      { class: 'askrow' },
      el(Field, { label: 'Runs by name or id', value: runs, set: setRuns, hint: 'all; llama-*' }),
      el(Field, { label: 'Tags', value: tags, set: setTags, hint: 'team=vision*' }),
      t.fieldset(
        { class: 'askfield' },
        t.legend(null, 'Channels; none means all'),
        channels.map((one) =>
          t.label(
            { key: one.id },
            t.input({
              type: 'checkbox',
              checked: to.includes(one.id),
              onChange: (event) =>
                setTo(event.currentTarget.checked ? [...to, one.id] : to.filter((id) => id !== one.id)),
            }),
            ` ${one.name}`,
          ),
        ),
      ),
      el(FormButtons, { submit: 'Save', cancel }),
    ),
  );
}

/** The one number of a rule, as it is shown. @param {Record<string, any>} when */
function numberOf(when) {
  const { key, initial, scale } = ABOUT[when.about];
  return when[key] === undefined ? String(initial) : String(Math.round((when[key] / scale) * 1000) / 1000);
}

/** @param {string} text */
function listOf(text) {
  return text.split(/[,\s]+/).filter(Boolean);
}

/** @param {string} text */
function tagsOf(text) {
  return Object.fromEntries(
    text
      .split(',')
      .map((part) => part.trim())
      .filter(Boolean)
      .map((part) => {
        const [key, ...value] = part.split('=');
        return [key.trim(), value.join('=').trim() || '*'];
      }),
  );
}
