/** The samples of one machine over time, in groups; what it does not report is named, never drawn as zero. */

import { csvHref, useApi } from '../api.js';
import { Series } from '../charts/series.js';
import { inside, words } from '../format.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { CappedNote, Card, LeftOutNote, Loaded } from './bits.js';

/** @typedef {import('../../types/api.js').Samples} Samples */
/** @typedef {import('../../types/api.js').SampleSeries} SampleSeries */
/** @typedef {{title: string, kind: string, names: string[], note: string}} Group */

const WIDTH = 480;
const MOST = 24;
const EVERY_MS = 10_000; // samples come each second from every machine: no reader follows charts that fast

/** Which columns of which kind stand together. @type {Group[]} */
export const GROUPS = [
  {
    title: 'Processors',
    kind: 'host',
    names: [
      'cpu_user_us_total',
      'cpu_system_us_total',
      'cpu_iowait_us_total',
      'cpu_steal_us_total',
      'cpu_busiest_ratio',
      'runnable',
    ],
    note: 'share of all processors; busiest: the one with most to do',
  },
  {
    title: 'Memory and disk',
    kind: 'host',
    names: [
      'memory_used_bytes',
      'memory_cached_bytes',
      'memory_dirty_bytes',
      'swap_used_bytes',
      'major_faults_total',
      'run_disk_free_bytes',
    ],
    note: 'used is what is not available',
  },
  {
    title: 'Pressure',
    kind: 'pressure',
    names: [],
    note: 'share of time in which some or all tasks waited',
  },
  {
    title: 'GPUs',
    kind: 'gpu',
    names: [
      'utilization_ratio',
      'memory_used_bytes',
      'sm_clock_mhz',
      'power_watts',
      'temperature_celsius',
      'memory_temperature_celsius',
    ],
    note: 'as the driver reports',
  },
  { title: 'GPU activity', kind: 'gpu_activity', names: [], note: 'what the parts of a GPU were doing' },
  {
    title: 'GPU health',
    kind: 'gpu_health',
    names: ['ecc_uncorrected', 'ecc_corrected', 'remap_pending', 'remap_failed', 'pcie_generation', 'pcie_width'],
    note: 'errors since the driver was loaded; the PCIe link may sleep while a GPU is idle',
  },
  {
    title: 'NVLink',
    kind: 'nvlink',
    names: ['sent_bytes_total', 'received_bytes_total', 'crc_errors_total', 'replay_errors_total'],
    note: 'each link',
  },
  {
    title: 'Network interfaces',
    kind: 'nic',
    names: [
      'received_bytes_total',
      'sent_bytes_total',
      'received_errors_total',
      'sent_errors_total',
      'received_drops_total',
      'link_mbps',
    ],
    note: 'each interface that ever carried a byte',
  },
  {
    title: 'TCP',
    kind: 'tcp',
    names: ['retransmitted_segments_total', 'timeouts_total', 'sent_segments_total', 'listen_drops_total'],
    note: 'of the machine, or of the network of its container',
  },
  {
    title: 'InfiniBand',
    kind: 'infiniband',
    names: [
      'sent_bytes_total',
      'received_bytes_total',
      'sent_wait_total',
      'symbol_errors_total',
      'link_downs_total',
      'out_of_sequence_total',
    ],
    note: 'each port',
  },
  {
    title: 'Disks',
    kind: 'disk',
    names: ['read_bytes_total', 'written_bytes_total', 'busy_us_total', 'in_flight'],
    note: 'busy: share of time with at least one request',
  },
  {
    title: 'Control groups',
    kind: 'cgroup',
    names: [
      'memory_bytes',
      'memory_limit_bytes',
      'cpu_us_total',
      'cpu_limit_cores',
      'throttled_us_total',
      'oom_kills_total',
    ],
    note: 'limits of the ranks’ containers or jobs; CPU above 100 % is more than one processor',
  },
  {
    title: 'Ranks as processes',
    kind: 'process',
    names: [
      'user_us_total',
      'rss_bytes',
      'num_threads',
      'open_files',
      'involuntary_switches_total',
      'run_delay_us_total',
    ],
    note: 'CPU above 100 % is more than one processor; run delay: ready, but no processor free',
  },
  { title: 'Processes on GPUs', kind: 'gpu_process', names: ['memory_bytes'], note: 'a stranger has no rank' },
];

const MINUTE_MS = 60_000;

/** @type {Record<string, {title: string, ms: number}>} */
export const SPANS = {
  quarter: { title: 'Last 15 minutes', ms: 15 * MINUTE_MS },
  hour: { title: 'Last hour', ms: 60 * MINUTE_MS },
  all: { title: 'Everything', ms: 0 },
};

/**
 * Where the charts begin: the span before the last sample, in whole tenths of it so that the address
 * stays the same for a while. Null for everything.
 * @param {string | undefined} span @param {number | null} lastMs
 */
export function spanStart(span, lastMs) {
  const { ms } = SPANS[span ?? 'hour'] ?? SPANS.hour;
  if (ms === 0 || lastMs === null) return null;
  const step = ms / 10;
  return Math.max(Math.floor(lastMs / step) * step - ms, 0);
}

/** @param {{run: string, host: string, group: Group, fromMs: number | null, ended: boolean}} props */
export function SampleGroup({ run, host, group, fromMs, ended }) {
  const path = withQuery(runPath(run, 'samples'), {
    kind: group.kind,
    host,
    names: group.names.join(','),
    from_ms: fromMs,
    width: WIDTH,
  });
  const answer = /** @type {import('../api.js').Answer<Samples>} */ (useApi(path, { everyMs: ended ? 0 : EVERY_MS }));
  return el(
    Card,
    { title: group.title, note: group.note, tools: t.a({ href: csvHref(path) }, 'CSV') },
    Loaded({ answer, height: 160, what: group.title.toLowerCase(), children: (data) => el(Charts, { data }) }),
  );
}

/** @param {{data: Samples}} props */
function Charts({ data }) {
  const reported = data.series.filter((one) => one.max.some((value) => value !== null));
  const missing = [...new Set(data.series.filter((one) => !reported.includes(one)).map(title))];
  const still = reported.filter((one) => [...one.min, ...one.max].every((value) => !value));
  const moving = reported.filter((one) => !still.includes(one));
  return t.div(
    null,
    t.div(
      { class: 'charts' },
      moving.slice(0, MOST).map((one) =>
        el(Series, {
          key: `${one.label} ${one.name}`,
          title: title(one),
          x: one.time_ms,
          low: one.min,
          high: one.max,
          line: null,
          unit: one.unit,
          time: true,
        }),
      ),
    ),
    reported.length === 0 ? t.p({ class: 'note padded' }, 'No values yet: a rate needs two samples.') : null,
    still.length > 0 ? t.p({ class: 'note padded' }, `0 all the time: ${still.map(title).join(', ')}.`) : null,
    missing.length > 0 && reported.length > 0
      ? t.p({ class: 'note padded' }, `Not reported by this machine: ${missing.join(', ')}.`)
      : null,
    moving.length > MOST
      ? el(CappedNote, { capped: { shown: MOST, total: moving.length }, noun: 'charts; the CSV has all' })
      : el(CappedNote, { capped: data.capped, noun: 'series' }),
    el(LeftOutNote, { parts: data.left_out }),
  );
}

/** @param {SampleSeries} one */
function title(one) {
  const name = words(one.name.replace(/_(ratio|bytes|celsius|mhz|watts|mbps|cores)(_per_second)?$/, ''));
  return one.label ? `${one.label}: ${inside(name)}` : name;
}
