/** Numbers, times and lists of ranks as words. Pure; unknown is a dash, never zero. */

export const UNKNOWN = '–';
const MINUS = '−';

const grouped = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });

/** A whole number with thousands. @param {number | null | undefined} value */
export function count(value) {
  return value == null ? UNKNOWN : signed(grouped.format(value));
}

/** Two to three significant digits, with a true minus sign. @param {number | null | undefined} value */
export function figure(value) {
  if (value == null || !Number.isFinite(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 100) return signed(grouped.format(value));
  if (size > 0 && size < 0.01)
    return signed(size < 1e-4 ? value.toExponential(1).replace('.0e', 'e') : String(Number(value.toPrecision(2))));
  return signed(value.toFixed(size >= 10 ? 1 : size >= 1 || size === 0 ? 2 : 3).replace(/\.?0+$/, '') || '0');
}

/** An amount of money: two decimals, from 1,000 on none. @param {number} value @param {string} currency */
export function money(value, currency) {
  if (value > 0 && value < 0.005) return `below 0.01 ${currency}`.trimEnd();
  const digits = Math.abs(value) >= 1000 ? 0 : 2;
  const text = value.toLocaleString('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return currency ? `${text} ${currency}` : text;
}

/** What a finding costs a day, or of an ended run what it did cost: rank-hours and, where the server has a price, money.
 * Empty where that is not known.
 * @param {{cost_rank_hours_per_day: number | null, cost_rank_hours: number | null, cost_money_per_day: number | null, currency: string}} finding
 * @param {boolean} ended the run */
export function costWords(finding, ended) {
  const perDay = finding.cost_rank_hours_per_day;
  const hours = ended ? finding.cost_rank_hours : perDay;
  if (!perDay || hours === null) return '';
  const text = `${figure(hours)} rank-hours${ended ? '' : ' a day'}`;
  const amount = finding.cost_money_per_day;
  return amount === null ? text : `${text}, ${money((amount * hours) / perDay, finding.currency)}`;
}

/** @type {[number, string][]} */
const PREFIXES = [
  [1e15, 'P'],
  [1e12, 'T'],
  [1e9, 'G'],
  [1e6, 'M'],
  [1e3, 'k'],
];

/** A number with its unit, from 100,000 on with an SI prefix: "7.87 G/s". @param {number | null | undefined} value @param {string} [unit] */
export function si(value, unit = '') {
  if (value == null || !Number.isFinite(value)) return UNKNOWN;
  const size = Math.abs(value);
  const [power, prefix] = (size >= 1e5 && PREFIXES.find(([least]) => size >= least)) || [1, ''];
  return `${figure(value / power)} ${prefix}${unit}`.trimEnd();
}

/** Bytes a second, with an SI prefix as links have it: "78.4 kB/s". @param {number | null | undefined} perSecond */
export function speed(perSecond) {
  if (perSecond == null) return UNKNOWN;
  return perSecond >= 1e3 && perSecond < 1e5 ? `${figure(perSecond / 1e3)} kB/s` : si(perSecond, 'B/s');
}

/** A duration given in milliseconds. @param {number | null | undefined} ms @returns {string} */
export function duration(ms) {
  if (ms == null || !Number.isFinite(ms)) return UNKNOWN;
  const size = Math.abs(ms);
  if (size < 0.0005) return '0 ms';
  if (size < 1) return `${figure(ms * 1000)} µs`;
  if (size < 4000) return `${figure(ms)} ms`;
  if (size < 120_000) return `${figure(ms / 1000)} s`;
  if (size < 7_200_000) return `${Math.round(ms / 60_000)} min`;
  if (size < 172_800_000) return `${figure(ms / 3_600_000)} h`;
  return `${figure(ms / 86_400_000)} d`;
}

/** A share of 0-1 as percent. @param {number | null | undefined} ratio */
export function percent(ratio) {
  if (ratio == null || !Number.isFinite(ratio)) return UNKNOWN;
  const value = ratio * 100;
  const size = Math.abs(value);
  const digits = size !== 0 && size < 9.95 ? 1 : 0;
  return `${signed(value.toFixed(digits).replace(/\.0$/, ''))} %`;
}

/** A change against a reference, with its sign. @param {number | null | undefined} ratio */
export function change(ratio) {
  if (ratio == null || !Number.isFinite(ratio)) return UNKNOWN;
  return (ratio > 0 ? '+' : '') + percent(ratio);
}

/** A ratio against peers as a change: 1.24 is "+24 %". @param {number | null | undefined} ratio */
export function deviation(ratio) {
  return ratio == null ? UNKNOWN : change(ratio - 1);
}

const SIZES = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

/** Bytes in powers of 1,024. @param {number | null | undefined} bytes @returns {string} */
export function bytes(bytes) {
  if (bytes == null) return UNKNOWN;
  let value = bytes;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < SIZES.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${figure(value)} ${SIZES[unit]}`;
}

/** "3 min ago". @param {number | null | undefined} ms @param {number} now @returns {string} */
export function ago(ms, now) {
  if (ms == null) return UNKNOWN;
  const past = Math.max(0, now - ms);
  if (past < 2000) return 'just now';
  return `${past < 120_000 ? `${Math.round(past / 1000)} s` : duration(past)} ago`;
}

const clock = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const date = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', year: 'numeric' });

/** Time of day. @param {number | null | undefined} ms */
export function timeOfDay(ms) {
  return ms == null ? UNKNOWN : clock.format(ms);
}

let clockSecond = Number.NaN;
let clockText = '';

/** Time of day to the millisecond, as logs show it. @param {number} ms */
export function exactTime(ms) {
  const second = Math.floor(ms / 1000);
  // Of a thousand lines a second each has one: a formatter of Intl takes ten times as long.
  if (second !== clockSecond) clockText = new Date(ms).toTimeString().slice(0, 8);
  clockSecond = second;
  return `${clockText}.${String(Math.floor(ms) - second * 1000).padStart(3, '0')}`;
}

/** Date and time. @param {number | null | undefined} ms */
export function dateTime(ms) {
  return ms == null ? UNKNOWN : `${date.format(ms)}, ${clock.format(ms)}`;
}

/** Ranks as ranges: [0, 1, 2, 5] is "0–2, 5". @param {number[]} ranks @param {number} [limit] */
export function ranges(ranks, limit = 12) {
  const sorted = [...new Set(ranks)].sort((a, b) => a - b);
  /** @type {[number, number][]} */
  const spans = [];
  for (const rank of sorted) {
    const last = spans[spans.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  const words = spans.slice(0, limit).map(([a, b]) => (a === b ? `${a}` : b === a + 1 ? `${a}, ${b}` : `${a}–${b}`));
  return words.join(', ') + (spans.length > limit ? ` and ${spans.length - limit} more` : '');
}

/** Cut in its middle where it is longer: names of hosts differ at their ends. @param {string} name @param {number} chars */
export function middle(name, chars) {
  if (name.length <= chars) return name;
  const last = Math.floor((chars - 1) / 2);
  return `${name.slice(0, chars - 1 - last)}…${name.slice(-last)}`;
}

/** "rank 5" or "ranks 0–2, 5". @param {number[]} ranks */
export function rankWords(ranks) {
  return ranks.length === 0 ? '' : `${ranks.length === 1 ? 'rank' : 'ranks'} ${ranges(ranks)}`;
}

/** A clause as a sentence: a capital first, a full stop last. @param {string} text */
export function sentence(text) {
  if (!text) return '';
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?:]$/.test(text) ? '' : '.');
}

/** How long something holds, to the second: "9 min 42 s", "1 h 4 min". Without colons, which a time of day has. @param {number} ms */
export function stopwatch(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${seconds} s`;
  return minutes < 60 ? `${minutes} min ${seconds % 60} s` : `${count(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

/** What was found out about a run, after that nothing of it is heard any more.
 * @param {{status: string, last_seen_ms: number | null}} run @param {string} text */
export function sinceSilent(run, text) {
  return run.status === 'silent' && run.last_seen_ms !== null
    ? `No rank has reported since ${timeOfDay(run.last_seen_ms)}; before that: ${text}`
    : text;
}

/** A place in the code without the folders that all of them share. @param {string} place */
export function shortPlace(place) {
  return place.replace(/(?:[^\s/]*\/)+([^\s/]+\/[^\s/]+)/g, '$1');
}

/** A count and its noun. @param {number} n @param {string} noun @param {string} [many] */
export function plural(n, noun, many = `${noun}s`) {
  return `${count(n)} ${n === 1 ? noun : many}`;
}

/** What a rank entered of a group of which it entered no collective. @param {number | null} exchanges sends and receives */
export function enteredWords(exchanges) {
  return exchanges ? `no collective, ${plural(exchanges, 'send or receive', 'sends and receives')}` : 'no collective';
}

/** An identifier as words: "slow_compute" is "Slow compute". @param {string} name */
export function words(name) {
  const text = name
    .replaceAll(/[_-]+/g, ' ')
    .replaceAll(/\b(cpu|gpu|io|sm|nccl|ecc|os|nic|tcp|rss)\b/gi, (word) => word.toUpperCase())
    .replace('iowait', 'IO wait');
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A name in the middle of a sentence; an abbreviation stays one. @param {string} name */
export function inside(name) {
  return /^[A-Z][a-z]/.test(name) ? name.charAt(0).toLowerCase() + name.slice(1) : name;
}

/** A number's name, and whose it is where that of the job would be another. @param {string} name @param {number} rank */
export function metricTitle(name, rank) {
  const title = words(name.replace(/_(bytes|ratio)$/, '')).replace(' flops ', ' FLOPs ');
  return name.endsWith('_per_second') ? `${title}, ${rank < 0 ? 'each rank' : 'this rank'}` : title;
}

/** Whether ranks have gradients of different parts of the model: a mean of their norms is no norm of the whole.
 * @param {import('../types/api.js').MetricSeries} one */
export function isOfParts(one) {
  return (
    one.name === 'gradient_norm' &&
    one.rank < 0 &&
    one.min.some((low, at) => low !== null && (one.max[at] ?? low) > 1.01 * low)
  );
}

/** The first line of a text, and how many follow. @param {string} text @returns {[string, number]} */
export function firstLine(text) {
  const end = text.indexOf('\n');
  if (end < 0) return [text, 0];
  return [text.slice(0, end), text.trimEnd().split('\n').length - 1];
}

/** @param {string} text */
function signed(text) {
  return text.replace('-', MINUS);
}

/** A kind of finding in words. @param {string} kind */
export function kindWords(kind) {
  return KINDS[kind] ?? words(kind);
}

/** What kinds of findings are called. @type {Record<string, string>} */
// labels of kinds: made by .ci/docs_tables.py
const KINDS = {
  slow_compute: 'Straggler: slow compute',
  slow_data: 'Waiting for data',
  garbage_collection: 'Straggler: garbage collection',
  host_contention: 'Straggler: other work on its processors',
  thermal_or_power: 'Straggler: GPU held down by heat or power',
  page_cache: 'Straggler: data not in memory',
  cpu_pinning: 'Straggler: too few processors',
  cpu_limit: 'Held up by a limit on processor time',
  busy_thread: 'Straggler: another thread holds it up',
  sequence_imbalance: 'More work than its peers',
  stopped_process: 'A process is stopped',
  unequal_ranks: 'Ranks unequal from the start',
  uneven_work: 'Uneven work from step to step',
  hang: 'Hang',
  desync: 'Desync: ranks call different collectives',
  crash: 'Crash',
  failed_start: 'Ended before its first step',
  stopped: 'Stopped from outside',
  lost_rank: 'A rank was lost, the others train on',
  clock_offset: 'A clock is ahead or behind',
  clock_drift: 'A clock runs too fast or too slowly',
  slow_link: 'Slow link, adapter, host or switch',
  communication_bound: 'Steps wait for the network',
  communication_advice: 'Communication could be faster',
  low_bus_bandwidth: 'Communication slower than it was',
  stage_imbalance: 'Pipeline stages are uneven',
  no_pipelining: 'Stages work one after the other',
  pipeline_bubble: 'Pipeline idles: few microbatches',
  version_drift: 'Versions differ between ranks',
  drift: 'Settings or hardware differ between ranks',
  replica_drift: 'Replicas of the model differ',
  nan: 'NaN or infinity',
  loss_spike: 'Spike of the loss or the gradients',
  divergence: 'Training diverges',
  nothing_learnt: 'Nothing is learnt',
  accumulation: 'Accumulated gradients are scaled wrongly',
  no_warm_up: 'No warm-up at a large batch',
  linear_scaling: 'Rate scaled in proportion to the batch, with Adam',
  corruption: 'One rank computes other numbers',
  corrupt_batch: 'One odd batch',
  same_samples: 'All ranks train on the same samples',
  same_order: 'Every epoch in the same order',
  memory_growth: 'Memory grows',
  fragmentation: 'GPU memory in fragments',
  unused_memory: 'GPU memory stays unused',
  slow_epoch_start: 'Slow start of every epoch',
  bad_shard: 'Some batches come late',
  xid: 'Xid error',
  gpu_error: 'GPU error reported by the driver',
  throttle: 'GPU held down by heat or power',
  power_cap: 'GPU held down by its power limit',
  ecc: 'Memory errors of a GPU',
  gpu_outlier: 'GPU unlike the others',
  gpu_underuse: 'GPUs with little to do',
  noise_scale: 'What a larger batch would give',
  staleness: 'Gradients applied late',
  server_bottleneck: 'Parameter servers are the bottleneck',
  hot_shard: 'One parameter shard gets most requests',
  goodput: 'Where the time went',
  crash_loop: 'Attempts fail alike',
  slow_checkpoint: 'Slow checkpoints',
  checkpoint_interval: 'Checkpoints badly spaced',
  lone_evaluation: 'One rank evaluates, the others wait',
  regression: 'Slower than earlier runs',
  slowdown: 'Slower than it was',
};
// end of labels
