/** Small parts that every page uses: marks, cards, tables, times, copy buttons, and the states of a page. */

import { Component } from 'preact';
import { useEffect, useId, useLayoutEffect, useRef, useState } from 'preact/hooks';
import { apiHref } from '../api.js';
import { ago, count, dateTime, sentence, words } from '../format.js';
import { announce, copy, now } from '../page.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';

/** @typedef {import('../tags.js').Children} Children */

/** @type {Record<string, string>} */
const PATHS = {
  critical: 'M8 1.5 14.5 8 8 14.5 1.5 8Z',
  warning: 'M8 1.8 15 14H1Z',
  info: 'M8 2.5a5.5 5.5 0 1 1 0 11 5.5 5.5 0 0 1 0-11Z',
  ok: 'm2.5 8.5 3.5 4 7.5-9',
  unknown: 'M4 8h8',
  share: 'M10.5 5 8 2.5 5.5 5M8 2.5V10M4.5 7.5H3v6h10v-6h-1.5',
  cross: 'M3.5 3.5l9 9m0-9l-9 9',
  search: 'M7 2.5a4.5 4.5 0 1 1 0 9 4.5 4.5 0 0 1 0-9Zm3.4 7.9 3.6 3.6',
};
const FILLED = new Set(['critical', 'warning']);

/** A mark; its meaning is beside it in words. @param {{name: string, size?: number}} props */
export function Icon({ name, size = 12 }) {
  const kind = FILLED.has(name) ? 'filled' : 'drawn';
  return t.svg(
    { class: `icon ${kind} is-${name}`, viewBox: '0 0 16 16', width: size, height: size, 'aria-hidden': 'true' },
    t.path({ d: PATHS[name] ?? PATHS.unknown }),
  );
}

/** Severity as shape, word and colour. @param {{severity: string, text?: string}} props */
export function Severity({ severity, text }) {
  return t.span(
    { class: `severity is-${severity}` },
    el(Icon, { name: severity }),
    t.span(null, text ?? words(severity)),
  );
}

/** A card with a heading and the menu that shares it; `api` is what it was drawn from, if not what the page is.
 * @param {{title: Children, note?: Children, tools?: Children, class?: string, id?: string, api?: string, children?: Children}} props */
export function Card(props) {
  const titleId = useId();
  return t.section(
    { class: `card ${props.class ?? ''}`, id: props.id, 'data-api': props.api },
    t.header(
      { class: 'cardhead' },
      t.h2({ id: titleId }, props.title),
      props.note ? t.p({ class: 'note' }, props.note) : null,
      t.div({ class: 'tools' }, props.tools, el(Share, { titleId })),
    ),
    props.children,
  );
}

/** The button of a panel's menu, which loads when it is first wanted. @param {{titleId: string, of?: string}} props `of`: what is shared */
export function Share({ titleId, of = '.card' }) {
  const button = useRef(/** @type {HTMLButtonElement | null} */ (null));
  const [menu, setMenu] = useState(/** @type {{made: typeof import('./share.js').ShareMenu} | null} */ (null));
  const close = () => {
    setMenu(null);
    button.current?.focus();
  };
  const open = () => import('./share.js').then((module) => setMenu({ made: module.ShareMenu }));
  return t.span(
    { class: 'sharebox' },
    t.button(
      {
        ref: button,
        type: 'button',
        class: 'iconbutton share',
        title: 'Share: link, Markdown, CSV, JSON, picture (x)',
        'aria-label': 'Share',
        'aria-describedby': titleId,
        'aria-haspopup': 'menu',
        'aria-expanded': menu !== null,
        onClick: menu ? close : open,
      },
      el(Icon, { name: 'share', size: 14 }),
    ),
    menu && button.current
      ? el(menu.made, { panel: /** @type {HTMLElement} */ (button.current.closest(of)), close })
      : null,
  );
}

/**
 * `class` is of the cells; its `num` and widths (`w-...`) are the head's too. A column with `by` can be sorted by
 * it, the largest first, with `least` the least first, and what is unknown last. Without `label` the head is empty.
 * @template Row
 * @typedef {{label?: Children, hint?: string, class?: string | ((row: Row) => string), title?: (row: Row) => string,
 *   by?: (row: Row) => number | null, least?: boolean, cell: (row: Row, index: number) => Children}} Column
 */

/**
 * `frame` and `class` are looks of the box that scrolls and of the table; `more` is what stands below a row, over
 * all columns; `sorted` is the label of the column that rows are sorted by at first; of more rows than `most` the
 * first are shown, `noun` says of what, and a press shows all.
 * @template Row
 * @typedef {{label: string, rows: Row[], columns: (Column<Row> | false | null)[], key?: string, frame?: string, class?: string,
 *   headless?: boolean, keyOf?: (row: Row, index: number) => string | number, rowProps?: (row: Row) => RowProps,
 *   more?: (row: Row) => Children, sorted?: string, most?: number, noun?: string}} Props
 */
/** @typedef {{class?: string, title?: string} & {[data: `data-${string}`]: string | undefined}} RowProps */

/** A table whose columns are declared once. A call, not an element, so that the type of rows reaches the columns. @template Row @param {Props<Row>} props */
export function Table(props) {
  return el(/** @type {import('preact').FunctionComponent<Props<any>>} */ (Framed), props);
}

/** @param {Props<any>} props */
function Framed({ label, rows, frame, class: look, headless, most = rows.length, noun, sorted, ...props }) {
  const [sort, setSort] = useState(sorted);
  const [all, setAll] = useState(false);
  const columns = /** @type {Column<any>[]} */ (props.columns.filter(Boolean));
  const inOrder = ordered(
    rows,
    columns.find((column) => column.label === sort),
  );
  const shown = all ? inOrder : inOrder.slice(0, most);
  return t.div(
    { class: `scroll ${frame ?? ''}`, tabIndex: 0, role: 'region', 'aria-label': label },
    t.table(
      { class: `table ${look ?? ''}` },
      t.thead(
        headless ? { class: 'sr' } : null,
        t.tr(
          null,
          columns.map((column, i) => head(column, i, sort, setSort)),
        ),
      ),
      t.tbody(
        null,
        shown.flatMap((row, i) => line(row, i, columns, props)),
      ),
    ),
    rows.length > shown.length
      ? t.p(
          { class: 'note padded' },
          `First ${count(shown.length)} of ${count(rows.length)} ${noun}. `,
          t.button({ type: 'button', class: 'link', onClick: () => setAll(true) }, 'Show all'),
        )
      : null,
  );
}

/** What is unknown comes after what is known. @param {any[]} rows @param {Column<any>} [column] */
function ordered(rows, { by, least } = { cell: () => null }) {
  if (!by) return rows;
  const way = least ? 1 : -1;
  const place = (/** @type {any} */ row) => by(row) ?? way * Number.MAX_VALUE;
  return [...rows].sort((a, b) => way * (place(a) - place(b)));
}

/** @param {Column<any>} column @param {number} key @param {string | undefined} sort @param {(label?: string) => void} setSort */
function head({ label, hint, class: look, by, least }, key, sort, setSort) {
  if (label === undefined) return t.td({ key });
  const isSorted = by !== undefined && label === sort;
  return t.th(
    {
      key,
      scope: 'col',
      class: typeof look === 'string' ? look.match(/\bnum\b|\bw-\w+/g)?.join(' ') : undefined,
      title: hint,
      'aria-sort': isSorted ? (least ? 'ascending' : 'descending') : undefined,
    },
    by
      ? t.button(
          { type: 'button', class: 'sort', onClick: () => setSort(isSorted ? undefined : String(label)) },
          label,
          isSorted ? (least ? ' ▴' : ' ▾') : '',
        )
      : label,
  );
}

/** @param {any} row @param {number} index @param {Column<any>[]} columns @param {Pick<Props<any>, 'keyOf' | 'rowProps' | 'more'>} props */
function line(row, index, columns, { keyOf, rowProps, more }) {
  const key = keyOf?.(row, index) ?? index;
  const cells = columns.map(({ class: look, title, cell }, i) =>
    t.td({ key: i, class: typeof look === 'function' ? look(row) : look, title: title?.(row) }, cell(row, index)),
  );
  const below = more?.(row);
  return [
    t.tr({ key, ...rowProps?.(row) }, cells),
    below ? t.tr({ key: `${key} more`, class: 'more' }, t.td({ colSpan: columns.length }, below)) : null,
  ];
}

/** How long ago, with the absolute time in the tooltip. @param {{ms: number | null | undefined}} props */
export function Ago({ ms }) {
  if (ms == null) return t.span({ class: 'faint' }, 'unknown');
  return t.time({ dateTime: new Date(ms).toISOString(), title: dateTime(ms) }, ago(ms, now.value));
}

/** The time of an event: relative while the run is live, absolute once it has ended. @param {{ms: number | null | undefined, ended: boolean}} props */
export function When({ ms, ended }) {
  if (!ended || ms == null) return el(Ago, { ms });
  return t.time({ dateTime: new Date(ms).toISOString() }, dateTime(ms));
}

/** To the step at which a finding began; of a hang and a crash it never ended.
 * @param {{finding: {onset_step: number | null, cost_throughput_ratio: number | null, ranks: number[]}, run: string}} props */
export function OnsetStep({ finding, run }) {
  const { onset_step: step, ranks } = finding;
  if (!step || finding.cost_throughput_ratio === null) return null;
  const sel = ranks.length > 0 ? `${ranks[0]}@${step}` : null;
  const href = withQuery(runPath(run, 'steps', String(step)), { sel });
  return t.a({ class: 'button', href }, `Open step ${count(step)}`);
}

/** Copies and says so only when it did. @param {{text: string | (() => string), label?: string, what?: string, class?: string}} props */
export function CopyButton({ text, label = 'Copy', what = 'text', class: look = 'button' }) {
  const [state, setState] = useState(/** @type {'idle' | 'done' | 'manual'} */ ('idle'));
  const content = typeof text === 'function' ? text : () => text;
  useEffect(() => {
    if (state !== 'done') return undefined;
    const timer = setTimeout(() => setState('idle'), 2000);
    return () => clearTimeout(timer);
  }, [state]);
  async function press() {
    const done = await copy(content());
    setState(done ? 'done' : 'manual');
    announce(done ? 'Copied' : 'The browser refused to copy: select the text and press Ctrl C');
  }
  if (state === 'manual') {
    return t.input({
      class: 'manualcopy',
      readOnly: true,
      value: content(),
      'aria-label': `${what}: press Ctrl C to copy`,
      ref: (field) => field?.select(),
      onBlur: () => setState('idle'),
    });
  }
  return t.button(
    { type: 'button', class: `${look} copy`, onClick: press, 'aria-label': `${label} ${what}` },
    state === 'done' ? 'Copied' : label,
  );
}

/** A command in mono with its copy button. @param {{text: string}} props */
export function Command({ text }) {
  return t.div({ class: 'command' }, t.code(null, text), el(CopyButton, { text, what: 'command', class: 'link' }));
}

/** Grey blocks of the final size; after 2 s a line says what is awaited. @param {{height: number, waitsFor: string}} props */
export function Skeleton({ height, waitsFor }) {
  const [slow, setSlow] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setSlow(true), 2000);
    return () => clearTimeout(timer);
  }, []);
  return t.div(
    { class: 'skeleton', style: { minHeight: `${height}px` } },
    slow ? t.p({ class: 'note' }, `Waiting for ${waitsFor}`) : null,
  );
}

/** A part that could not load. The rest of the page works. @param {{error: import('../api.js').Failure, retry: () => void, what: string}} props */
export function Problem({ error, retry, what }) {
  const { detail } = error;
  return t.div(
    { class: 'problem', role: 'status' },
    t.p({ class: 'lead' }, `Could not load ${what}. ${sentence(detail.what)}`),
    detail.remedy ? t.p(null, sentence(detail.remedy)) : null,
    t.p(
      { class: 'note' },
      t.button({ type: 'button', class: 'link', onClick: retry }, 'Try again'),
      t.a({ href: apiHref(error.path) }, 'Raw answer'),
      detail.request_id ? t.span(null, 'Request ', t.code(null, detail.request_id)) : null,
    ),
  );
}

/** Keeps a bug of one part within that part: the rest of the page works.
 * @extends {Component<{what: string, children?: Children}, {failed: string}>} */
export class Guard extends Component {
  state = { failed: '' };

  /** @param {unknown} error */
  componentDidCatch(error) {
    this.setState({ failed: String(error) });
    reportError(error);
  }

  render() {
    if (!this.state.failed) return this.props.children;
    return t.div(
      { class: 'problem', role: 'status' },
      t.p({ class: 'lead' }, `${this.props.what} could not be drawn. This is a bug of the dashboard.`),
      t.p({ class: 'note' }, t.code(null, this.state.failed)),
    );
  }
}

/** Nothing here, and what would fill it. @param {{title: string, children?: Children}} props */
export function Empty({ title, children }) {
  return t.div({ class: 'empty' }, t.p({ class: 'lead' }, title), children);
}

/**
 * Show an answer in whichever state it is. The previous picture stays while a new one loads.
 * @template T
 * @param {{answer: import('../api.js').Answer<T>, height: number, what: string, children: (data: T) => Children}} props
 */
export function Loaded({ answer, height, what, children }) {
  const { data, error, pending } = answer;
  if (data === null) {
    if (error) return el(Problem, { error, retry: answer.refresh, what });
    return el(Skeleton, { height, waitsFor: what });
  }
  return t.div({ class: pending ? 'loaded again' : 'loaded', 'data-api': answer.path ?? undefined }, children(data));
}

/** Mounts its children once they come near the screen. @param {{height: number, children: () => Children}} props */
export function Seen({ height, children }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    if (!box.current || seen) return undefined;
    const observer = new IntersectionObserver((entries) => entries.some((one) => one.isIntersecting) && setSeen(true), {
      rootMargin: '0px',
    });
    observer.observe(box.current);
    return () => observer.disconnect();
  }, [seen]);
  return seen
    ? children()
    : t.div(
        { ref: box, class: 'card', style: { minHeight: `${height}px` } },
        t.p({ class: 'note padded onpaper' }, 'Not loaded: scroll to the end of the page, then print.'),
      );
}

/** A list that was cut says so. @param {{capped: import('../../types/api.js').Capped | null | undefined, noun: string}} props */
export function CappedNote({ capped, noun }) {
  if (!capped) return null;
  return t.p(
    { class: 'note' },
    `First ${capped.shown.toLocaleString('en-US')} of ${capped.total.toLocaleString('en-US')} ${noun}.`,
  );
}

/**
 * What an answer does not count.
 * @param {{parts: import('../../types/api.js').LeftOut[] | undefined}} props
 */
export function LeftOutNote({ parts }) {
  if (!parts?.length) return null;
  const texts = parts.map((one) =>
    one.count === null ? one.what : `${one.count.toLocaleString('en-US')} ${one.what}`,
  );
  return t.p({ class: 'note' }, `Not counted: ${texts.join('; ')}.`);
}

/** The kinds of data that each page shows. @type {Record<string, string[]>} */
const SHOWN = {
  overview: ['collectives', 'steps', 'samples', 'logs', 'events', 'numbers'],
  ranks: ['steps', 'events'],
  step: ['steps', 'collectives'],
  rank: ['collectives', 'events'],
  collectives: ['collectives'],
  parallelism: ['steps', 'numbers'],
  resources: ['samples', 'numbers'],
  hang: ['events'],
  logs: ['logs'],
  errors: ['logs'],
  machines: ['samples', 'events'],
  agent: ['events'],
};

/**
 * What a page cannot show because retention removed it: an empty table would look healthy.
 * @param {{page: string, overview: import('../../types/api.js').Overview | null}} props
 */
export function Removed({ page, overview }) {
  const rows = (overview?.removed ?? []).filter((row) => SHOWN[page]?.includes(row.kind));
  if (rows.length === 0) return null;
  return t.p(
    { class: 'note removed', role: 'note' },
    el(Icon, { name: 'info' }),
    ' ',
    rows.map((row) => row.text).join(' '),
  );
}

/** The width of an element, now and after every resize. @param {import('preact').RefObject<HTMLElement | null>} ref */
export function useWidth(ref) {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = ref.current;
    if (!element) return undefined;
    // Hidden behind its table twin it has no width; what it had is kept.
    const read = () => element.clientWidth > 0 && setWidth(Math.floor(element.clientWidth));
    const observer = new ResizeObserver(read);
    observer.observe(element);
    read();
    return () => observer.disconnect();
  }, []);
  return width;
}
