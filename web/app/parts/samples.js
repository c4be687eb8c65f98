/** A rank's own numbers over its steps and its host's over time, loaded with the charts. */

import { useApi } from '../api.js';
import { Series } from '../charts/series.js';
import { words } from '../format.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { Card } from './bits.js';
import { chart, toDraw, troubles } from './numbers.js';

/** @typedef {import('../../types/api.js').Samples} Samples */
/** @typedef {import('../../types/api.js').MetricsAnswer} MetricsAnswer */

const WIDTH = 480;
const HOST_NAMES = ['cpu_user_us_total', 'memory_used_bytes', 'cpu_iowait_us_total'];
const GPU_NAMES = ['utilization_ratio', 'sm_clock_mhz', 'temperature_celsius'];
const MOST = 6;
const MOST_NUMBERS = 9;

/** @param {{run: string, rank: number, host: string, topic: string | null}} props */
export function RankSamples({ run, rank, host, topic }) {
  const live = { topic, on: ['steps', 'ranks'] };
  const paths = {
    host: withQuery(runPath(run, 'samples'), { kind: 'host', host, names: HOST_NAMES.join(','), width: WIDTH }),
    gpu: withQuery(runPath(run, 'samples'), { kind: 'gpu', host, names: GPU_NAMES.join(','), width: WIDTH }),
    metrics: withQuery(runPath(run, 'metrics'), { rank, width: WIDTH }),
  };
  const ofHost = /** @type {import('../api.js').Answer<Samples>} */ (useApi(paths.host, live));
  const ofGpu = /** @type {import('../api.js').Answer<Samples>} */ (useApi(paths.gpu, live));
  const metrics = /** @type {import('../api.js').Answer<MetricsAnswer>} */ (useApi(paths.metrics, live));
  const numbers = toDraw(metrics.data?.series ?? []);
  const samples = [...(ofGpu.data?.series ?? []), ...(ofHost.data?.series ?? [])].filter(
    (one) => one.time_ms.length > 1,
  );
  if (numbers.length === 0 && samples.length === 0) return null;
  return el(
    Card,
    {
      title: 'Over time',
      api: Object.values(paths).join(' '),
      note: [
        `numbers of training, and samples of ${host}; a band holds the least and the largest of its slice`,
        ...troubles(metrics.data?.series ?? []),
      ].join('; '),
    },
    t.div(
      { class: 'charts' },
      numbers.slice(0, MOST_NUMBERS).map(chart),
      samples.slice(0, MOST).map((one) =>
        el(Series, {
          key: `${one.gpu} ${one.name}`,
          title:
            one.gpu === null
              ? words(one.name.replace(/_(ratio|bytes)$/, ''))
              : `GPU ${one.gpu}: ${words(one.name.replace(/_(ratio|celsius|mhz)$/, ''))}`,
          x: one.time_ms,
          low: one.min,
          high: one.max,
          line: null,
          unit: one.unit,
          time: true,
        }),
      ),
    ),
  );
}
