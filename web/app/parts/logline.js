/** One log line: as a row of the list, and whole in the panel. */

import { TONE } from '../charts/histogram-maths.js';
import { count, dateTime, exactTime, firstLine, plural, rankWords, words } from '../format.js';
import { query, setQuery } from '../router.js';
import { el, t } from '../tags.js';
import { LINE_FILTERS, runPath, withQuery } from '../url.js';
import { spans as ansiSpans } from './ansi.js';
import { Around } from './around.js';
import { CopyButton, Icon } from './bits.js';
import { fieldsOf, stepHref, stepWords } from './logfields.js';

/** @typedef {import('../../types/api.js').LogRow} LogRow */

const AROUND_MS = 10_000;
// A row is one line of text: boxes for its columns would take the browser twice as long to lay out.
const GAP = '  ';
const NARROW = matchMedia('(max-width: 720px)'); // where pages.css cuts times and levels
const CHARS = { level: 8, rank: 11, step: 10, logger: 17, field: 12 }; // as wide as the heads in pages.css

/** A text as a column of so many characters, cut where it is longer. @param {string} text @param {number} chars */
function column(text, chars) {
  return (text.length > chars ? `${text.slice(0, chars - 1)}…` : text).padEnd(chars) + GAP;
}

/** @param {string} text */
function coloured(text) {
  return ansiSpans(text).map((span, i) => (span.look ? t.span({ key: i, class: span.look }, span.text) : span.text));
}

/** @param {import('./ansi.js').Span} span */
function colouredSpan({ text, look }) {
  const span = document.createElement('span');
  span.className = look;
  span.textContent = text;
  return span;
}

/** Give a span of a row its text; a text that is there already is written over. @param {HTMLElement} span @param {string} text */
function write(span, text) {
  if (span.childNodes.length === 1 && span.firstChild instanceof Text) span.firstChild.data = text;
  else span.textContent = text;
}

/** @param {HTMLElement} span @param {string} title */
function say(span, title) {
  if (span.title !== title) span.title = title;
}

/** @param {HTMLElement} span @param {string} look */
function tint(span, look) {
  if (span.className !== look) span.className = look;
}

/** Who wrote it: one rank, several alike, or the node. @param {LogRow} line */
function author(line) {
  if (line.ranks.length > 1) return `${count(line.ranks.length)} ranks`;
  return line.rank >= 0 ? `rank ${line.rank}` : 'node';
}

/** The names above the columns that were chosen. @param {{columns: string[], drop: (name: string) => void}} props */
export function ColumnHeads({ columns, drop }) {
  if (columns.length === 0) return null;
  return t.div(
    { class: 'columnheads' },
    ['time', 'level', 'rank', 'step', 'logger'].map((name) => t.span({ key: name, class: `l-${name}` }, name)),
    columns.map((name) =>
      t.button(
        {
          key: `f ${name}`,
          type: 'button',
          class: 'l-field',
          title: name,
          'aria-label': `Drop the column ${name}`,
          onClick: () => drop(name),
        },
        t.span(null, name),
        el(Icon, { name: 'cross', size: 8 }),
      ),
    ),
    t.span({ class: 'l-text' }, 'message'),
  );
}

/** What stands before the message, as wide as its columns. @param {LogRow} line @param {string[]} columns @param {number} last step of the run @param {string | null} to where its step is */
function before(line, columns, last, to) {
  const fields = columns.length > 0 ? fieldsOf(line) : {};
  return [
    exactTime(line.time_ms) + GAP,
    column(line.level === 'WARNING' ? 'WARN' : line.level, CHARS.level),
    column(author(line), CHARS.rank),
    column(to ? `step ${line.step}` : stepWords(line, last), CHARS.step),
    column(line.logger || line.stream, CHARS.logger),
    ...columns.map((name) => column(fields[name] ?? '–', CHARS.field)),
  ];
}

/**
 * How rows of the list look: spans of one line of text, `columns` the fields that stand before the message. Rows
 * that are run past are one text in one colour, but for warnings and errors.
 * @param {string[]} columns @param {string} run @param {number} last step of the run @returns {import('./list.js').Look}
 */
export function rowLook(columns, run, last) {
  const names = ['time', 'level', 'rank', 'step', 'logger', ...columns.map(() => 'field'), 'text', 'more'];
  return {
    make() {
      const row = document.createElement('div');
      row.append(
        ...names.map((name) => {
          const span = document.createElement('span');
          span.className = `l-${name}`;
          return span;
        }),
      );
      return row;
    },
    fill(row, line) {
      const spans = /** @type {HTMLElement[]} */ ([...row.children]);
      const [, level, rank, step, logger] = spans;
      const [text, more] = spans.slice(-2);
      const tone = TONE[line.level] ?? 'plain';
      const to = stepHref(line, run, last);
      before(line, columns, last, to).forEach((words, i) => {
        write(spans[i], words);
      });
      tint(level, `l-level is-${tone}`);
      say(rank, line.ranks.length > 1 ? rankWords(line.ranks) : '');
      say(step, to ? 'Open this step (s)' : '');
      say(logger, line.logger.length > CHARS.logger ? line.logger : '');
      columns.forEach((name, i) => {
        say(spans[5 + i], `${name}: ${fieldsOf(line)[name] ?? 'not in this line'}`);
      });
      const [first, rest] = firstLine(line.message);
      const parts = ansiSpans(first);
      if (parts.some((part) => part.look)) text.replaceChildren(...parts.map(colouredSpan));
      else write(text, parts.map((part) => part.text).join(''));
      tint(text, `l-text is-${tone}`);
      const beside = [rest > 0 ? `+${plural(rest, 'line')}` : '', line.count > 1 ? `×${count(line.count)}` : ''];
      write(more, beside.filter(Boolean).join(', '));
      more.hidden = !more.textContent;
    },
    plain(lines) {
      if (NARROW.matches || lines.some((line) => ['crit', 'warn'].includes(TONE[line.level]))) return null;
      return lines
        .map((line) => {
          const head = before(line, columns, last, stepHref(line, run, last)).join('');
          return head + ansiSpans(firstLine(line.message)[0]).reduce((text, part) => text + part.text, '');
        })
        .join('\n');
    },
  };
}

/** The whole line, never cut. @param {{line: LogRow, run: string, last: number, close: () => void, step: (way: number) => void}} props */
export function LogPanel({ line, run, last, close, step }) {
  const to = stepHref(line, run, last);
  const rank = line.rank >= 0 ? line.rank : null;
  return t.aside(
    { class: 'logpanel card', 'aria-label': 'The whole line' },
    t.header(
      { class: 'cardhead' },
      t.h2(null, `${line.level} from ${author(line)}`),
      t.div(
        { class: 'tools' },
        t.button({ type: 'button', class: 'link', onClick: () => step(-1) }, 'Older'),
        t.button({ type: 'button', class: 'link', onClick: () => step(1) }, 'Newer'),
        t.button(
          { type: 'button', class: 'iconbutton', onClick: close, 'aria-label': 'Close the panel' },
          el(Icon, { name: 'cross' }),
        ),
      ),
    ),
    t.pre({ class: 'trace', tabIndex: 0 }, coloured(line.message)),
    t.div(
      { class: 'buttons padded' },
      el(CopyButton, { text: line.message, what: 'the message' }),
      t.button(
        {
          type: 'button',
          class: 'button',
          onClick: () =>
            setQuery({
              from: Math.round(line.time_ms - AROUND_MS),
              to: Math.round(line.time_ms + AROUND_MS),
              q: null,
              level: null,
              rank: null,
              logger: null,
              stream: null,
              host: null,
            }),
        },
        'All lines around it',
      ),
      rank === null
        ? null
        : t.a({ class: 'button', href: withQuery(runPath(run, 'ranks', String(rank)), {}) }, `Open rank ${rank}`),
      to ? t.a({ class: 'button', href: to }, `Open step ${line.step}`) : null,
      rank !== null && to
        ? t.a(
            { class: 'button', href: withQuery(runPath(run, 'ranks'), { sel: `${rank}@${line.step}` }) },
            `Step ${line.step} on the map`,
          )
        : null,
    ),
    el(Around, { key: line.id, line, run }),
    t.dl(
      { class: 'facts tall' },
      fact('Time', dateTime(line.time_ms)),
      fact('Host', line.host),
      line.ranks.length > 1 ? fact('Ranks', rankWords(line.ranks)) : null,
      line.count > 1
        ? fact('Repeated', `${line.count.toLocaleString('en-US')} times since ${exactTime(line.first_ms)}`)
        : null,
      fact('Logger', line.logger || '–'),
      fact('Stream', line.stream),
      stepWords(line, last) ? fact('Step', stepWords(line, last)) : null,
      fact('Attempt', String(line.attempt)),
      Object.entries(fieldsOf(line)).map(([name, value]) => fact(words(name), value)),
    ),
  );
}

/** The filters in force, and the way to drop each. @param {{total: number}} props */
export function Filters({ total }) {
  const now = query.value;
  const set = LINE_FILTERS.filter((key) => now[key]);
  if (now.from || now.to) set.push('time');
  if (set.length === 0) return null;
  return t.p(
    { class: 'filterline' },
    set.map((key) =>
      t.button(
        {
          key,
          type: 'button',
          class: 'chip',
          onClick: () => setQuery(key === 'time' ? { from: null, to: null, line: null } : { [key]: null }),
          'aria-label': `Drop the filter ${key}`,
        },
        key === 'time'
          ? `${now.from ? exactTime(Number(now.from)) : 'start'} – ${now.to ? exactTime(Number(now.to)) : 'the newest'}`
          : `${key} ${now[key]}`,
        el(Icon, { name: 'cross', size: 9 }),
      ),
    ),
    set.length > 1 || total === 0
      ? t.button(
          {
            type: 'button',
            class: 'link',
            onClick: () =>
              setQuery({
                ...Object.fromEntries(LINE_FILTERS.map((key) => [key, null])),
                q: null,
                from: null,
                to: null,
                line: null,
              }),
          },
          'Drop all',
        )
      : null,
  );
}

/** @param {string} name @param {string} value */
function fact(name, value) {
  return t.div({ key: name }, t.dt(null, name), t.dd(null, value));
}
