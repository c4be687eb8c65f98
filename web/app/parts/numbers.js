/** Numbers of training over the steps: of a whole run, or of one rank. */

import { useApi } from '../api.js';
import { Series } from '../charts/series.js';
import { count, isOfParts, metricTitle } from '../format.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { Card } from './bits.js';

/** @typedef {import('../../types/api.js').MetricsAnswer} MetricsAnswer */
/** @typedef {import('../../types/api.js').MetricSeries} MetricSeries */

const WIDTH = 480;
const MOST = 6;
/** What people look for first; other names follow. */
const FIRST = [
  'logged_loss',
  'printed_loss',
  'loss',
  'gradient_norm',
  'learning_rate',
  'tokens_per_second',
  'samples_per_second',
  'mfu_ratio',
  'gradient_norm_local',
  'cuda_allocated_bytes',
  'rss_bytes',
  'workers_rss_bytes',
];
/** Flags and constants say nothing as a curve. */
const NOT_DRAWN =
  /_nonfinite$|^(alternating_losses|samples|tokens|parameters|parameter_bytes|model_parameters|model_layers|layer_parameters|optimizer_state_bytes|replica_checksum|rss_peak_bytes)$/;
const FLAGS = {
  loss_nonfinite: 'the loss was not finite',
  gradient_nonfinite: 'gradients were not finite',
  gradient_local_nonfinite: 'a rank’s own gradients were not finite before reduction',
};

/** @param {{run: string, topic: string | null}} props */
export function NumbersCard({ run, topic }) {
  const names = [...FIRST.slice(0, 8), ...Object.keys(FLAGS)].join(',');
  const path = withQuery(runPath(run, 'metrics'), { names, merged: 'true', width: WIDTH });
  const answer = /** @type {import('../api.js').Answer<MetricsAnswer>} */ (
    useApi(path, { topic, on: ['metrics', 'steps'] })
  );
  const series = answer.data?.series ?? [];
  const drawn = toDraw(series);
  if (drawn.length === 0) return null;
  const ranks = 'means over the ranks; a band holds the least and the largest';
  return el(
    Card,
    { title: 'Numbers of training', api: path, note: [ranks, ...troubles(series)].join('; ') },
    t.div({ class: 'charts' }, drawn.slice(0, MOST).map(chart)),
  );
}

/** The series worth a curve, what people look for first first. @param {MetricSeries[]} series */
export function toDraw(series) {
  const place = (/** @type {MetricSeries} */ one) => (FIRST.indexOf(one.name) + 1 || FIRST.length + 1) - 1;
  return series
    .filter((one) => one.step.length > 1 && !NOT_DRAWN.test(one.name))
    .sort((a, b) => place(a) - place(b) || a.name.localeCompare(b.name));
}

/** The first step of each flag that was ever set, in words. @param {MetricSeries[]} series */
export function troubles(series) {
  return Object.entries(FLAGS).flatMap(([name, text]) => {
    const at = series.find((one) => one.name === name);
    const first = at?.max.indexOf(1) ?? -1;
    return at && first >= 0 ? [`${text} at step ${count(at.step[first])}`] : [];
  });
}

/** @param {MetricSeries} one */
export function chart(one) {
  return el(Series, {
    key: `m${one.name}`,
    title: isOfParts(one) ? 'Gradient norm of each stage or shard' : metricTitle(one.name, one.rank),
    x: one.step,
    low: one.min,
    high: one.max,
    line: one.value,
    unit: one.name.endsWith('_bytes') ? 'bytes' : one.name.endsWith('_ratio') ? 'ratio' : '',
    time: false,
  });
}
