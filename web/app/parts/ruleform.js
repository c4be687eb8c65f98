/** The form of a rule, and a rule in words. */

import { useState } from 'preact/hooks';
import { duration, money, percent, plural } from '../format.js';
import { el, t } from '../tags.js';
import { Choice, Field, FormButtons } from './fields.js';

/** @typedef {import('../../types/api.js').ChannelRow} ChannelRow */
/** @typedef {import('../../types/api.js').RuleRow} RuleRow */

const GIB = 2 ** 30;
/** @typedef {{key: string, label: string, initial: number, scale: number}} Quantity */
/** @param {string} key @param {string} label @param {number} initial @param {number} [scale] @returns {Quantity} */
const quantity = (key, label, initial, scale = 1) => ({ key, label, initial, scale });

/** What a rule may be about, with its numbers. @type {Record<string, {title: string, numbers: Quantity[]}>} */
const ABOUT = {
  finding: {
    title: 'a finding',
    numbers: [
      quantity('min_confidence', 'Least confidence, %', 0, 0.01),
      quantity('lasts_seconds', 'Lasts for seconds', 5),
    ],
  },
  stall: { title: 'a run that has stalled', numbers: [quantity('seconds', 'For seconds', 1800)] },
  silence: { title: 'silence of ranks or of a run', numbers: [quantity('seconds', 'For seconds', 120)] },
  throughput: {
    title: 'lost throughput',
    numbers: [
      quantity('share_ratio', 'From % (0: not looked at)', 10, 0.01),
      quantity('rank_hours_per_day', 'From rank-hours a day (0: not looked at)', 0),
    ],
  },
  budget: {
    title: 'what a run has spent',
    numbers: [
      quantity('money', 'From an amount of money (0: not looked at)', 100),
      quantity('rank_hours', 'From rank-hours (0: not looked at)', 0),
    ],
  },
  loss: { title: 'lost records of a run', numbers: [quantity('records', 'Records, at least', 1)] },
  lag: { title: 'this server is behind', numbers: [quantity('seconds', 'By seconds', 120)] },
  queue: { title: 'the queue of the store', numbers: [quantity('used_ratio', 'From % full', 80, 0.01)] },
  disk: {
    title: 'the disk of the store',
    numbers: [
      quantity('free_bytes', 'Below GiB free (0: not looked at)', 5, GIB),
      quantity('database_bytes', 'Database from GiB (0: not looked at)', 0, GIB),
    ],
  },
};

/** @type {Record<string, string>} */
const SEVERITIES = { critical: 'critical', warning: 'warning or worse', info: 'of any severity' };

/** A rule as a sentence. Pure. @param {RuleRow} rule @param {ChannelRow[]} channels */
export function ruleText(rule, channels) {
  const names = rule.channels.map((id) => channels.find((one) => one.id === id)?.name ?? `channel ${id}`);
  const tags = Object.entries(rule.tags).map(([key, value]) => `${key}=${value}`);
  const of = rule.project ? `of project ${rule.project}` : '';
  const about = [rule.runs, of, ...tags].filter(Boolean).join(', ');
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
      return `${either(
        when.share_ratio > 0 && `${percent(when.share_ratio)} of the throughput`,
        when.rank_hours_per_day > 0 && `${when.rank_hours_per_day} rank-hours a day`,
      )} are lost`;
    case 'loss':
      return `${plural(when.records, 'record')} or more of a run are lost or refused`;
    case 'budget':
      return `A run has spent ${either(
        when.money > 0 && money(when.money, ''),
        when.rank_hours > 0 && `${when.rank_hours} rank-hours`,
      )}`;
    case 'lag':
      return `This server is behind by ${duration(when.seconds * 1e3)}`;
    case 'queue':
      return `The queue of the store is ${percent(when.used_ratio)} full`;
    case 'disk':
      return either(
        when.free_bytes > 0 && `Less than ${(when.free_bytes / GIB).toFixed(1)} GiB of the disk are free`,
        when.database_bytes > 0 && `The database has ${(when.database_bytes / GIB).toFixed(1)} GiB or more`,
      );
  }
}

/** Whichever limits a rule has. @param {(string | false)[]} limits */
function either(...limits) {
  return limits.filter(Boolean).join(', or ') || 'No amount that it looks at';
}

/** @param {{rule: RuleRow | null, channels: ChannelRow[], save: (body: object) => void, cancel: () => void}} props */
export function RuleForm({ rule, channels, save, cancel }) {
  const when = /** @type {Record<string, any>} */ (rule?.when ?? { about: 'finding' });
  const [name, setName] = useState(rule?.name ?? '');
  const [about, setAbout] = useState(String(when.about));
  const [numbers, setNumbers] = useState(numbersOf(when));
  const [isWhole, setIsWhole] = useState(Boolean(when.is_whole_run));
  const [severity, setSeverity] = useState(String(when.min_severity ?? 'warning'));
  const [kinds, setKinds] = useState((when.kinds ?? []).join(', '));
  const [runs, setRuns] = useState(rule?.runs ?? '');
  const [project, setProject] = useState(rule?.project ?? '');
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
    const body = /** @type {Record<string, any>} */ ({ ...kept, about });
    for (const { key, scale } of known.numbers) body[key] = Number(numbers[key]) * scale;
    if (about === 'disk') for (const { key } of known.numbers) body[key] = Math.round(body[key]);
    if (about === 'silence') body.is_whole_run = isWhole;
    if (about === 'finding') Object.assign(body, { min_severity: severity, kinds: listOf(kinds) });
    const of = { runs, project, tags: tagsOf(tags) };
    save({ name, when: body, ...of, channels: to, is_enabled: rule?.is_enabled ?? true });
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
          setNumbers(numbersOf({ about: value }));
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
      known.numbers.map(({ key, label }) =>
        el(Field, {
          key,
          label,
          value: numbers[key],
          set: (value) => setNumbers({ ...numbers, [key]: value }),
          size: 7,
        }),
      ),
      about === 'silence'
        ? el(Choice, {
            label: 'Of what',
            value: isWhole ? 'run' : 'rank',
            set: (value) => setIsWhole(value === 'run'),
            choices: [
              ['rank', 'a rank, or a node'],
              ['run', 'all ranks of a run'],
            ],
          })
        : null,
      about === 'finding' ? el(Field, { label: 'Kinds, by commas', value: kinds, set: setKinds, hint: 'all' }) : null,
    ),
    t.div(
      { class: 'askrow' },
      el(Field, { label: 'Runs by name or id', value: runs, set: setRuns, hint: 'all; llama-*' }),
      el(Field, { label: 'Project', value: project, set: setProject, hint: 'all; vision*', size: 12 }),
      el(Field, { label: 'Tags', value: tags, set: setTags, hint: 'team=vision*' }),
      channels.length === 0
        ? null
        : t.fieldset(
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

/** The numbers of a rule, as they are shown. @param {Record<string, any>} when @returns {Record<string, string>} */
function numbersOf(when) {
  return Object.fromEntries(
    ABOUT[when.about].numbers.map(({ key, initial, scale }) => [
      key,
      String(when[key] === undefined ? initial : Math.round((when[key] / scale) * 1000) / 1000),
    ]),
  );
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
