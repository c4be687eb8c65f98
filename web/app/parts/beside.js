/** What a finding about one rank looks like: its steps beside those of its peers, around the onset. */

import { useApi } from '../api.js';
import { Series } from '../charts/series.js';
import { count, plural, words } from '../format.js';
import { el, t } from '../tags.js';
import { runPath, withQuery } from '../url.js';
import { Card, Loaded } from './bits.js';

/** @typedef {import('../../types/api.js').BesidePeers} BesidePeers */
/** @typedef {import('../../types/api.js').ShownFinding} Finding */

const WIDTH = 900;
const BEFORE = 60; // steps before the onset, and at least as many after it
const MOST = 400;
/** What to look at; of other kinds the self time. @type {Record<string, string>} */
const METRICS = {
  slow_data: 'data',
  bad_shard: 'data',
  slow_epoch_start: 'data',
  page_cache: 'data',
  slow_checkpoint: 'step',
  lone_evaluation: 'step',
};

/** @param {{run: string, finding: Finding, lastStep: number, topic: string | null}} props */
export function BesideCard({ run, finding, lastStep, topic }) {
  const rank = finding.ranks[0];
  const onset = finding.onset_step ?? 1;
  const metric = METRICS[finding.kind] ?? 'own_work';
  const to = Math.max(onset + BEFORE, Math.min(lastStep, finding.ended_step ?? lastStep, onset + MOST));
  const path = withQuery(runPath(run, 'ranks', String(rank), 'steps'), {
    metric,
    from: Math.max(1, onset - BEFORE),
    to,
    width: WIDTH,
  });
  const answer = /** @type {import('../api.js').Answer<BesidePeers>} */ (useApi(path, { topic, on: ['steps'] }));
  const what = metric === 'own_work' ? 'Self time' : metric === 'step' ? 'Step time' : words(metric);
  return el(
    Card,
    { title: `${what} of rank ${count(rank)} beside its peers` },
    Loaded({
      answer,
      height: 220,
      what: 'its steps',
      children: (data) =>
        t.div(
          { class: 'padded' },
          el(Series, {
            title: `${what}, each step`,
            note: legend(data, onset),
            x: data.step,
            low: data.peers_lo_ms,
            high: data.peers_hi_ms,
            line: data.peers_median_ms,
            over: data.bin === 1 ? data.value_ms : data.worst_ms,
            mark: onset,
            unit: 'ms',
            time: false,
            height: 200,
          }),
        ),
    }),
  );
}

/** @param {BesidePeers} data @param {number} onset */
function legend(data, onset) {
  const band =
    data.num_peers === 0
      ? 'no other rank has its role'
      : data.num_peers <= 20
        ? `band and grey line: its ${plural(data.num_peers, 'peer')} and their median`
        : `band and grey line: nine tenths of its ${plural(data.num_peers, 'peer')} and their median`;
  const bin = data.bin === 1 ? '' : `, the longest of ${count(data.bin)} steps`;
  return `orange: rank ${count(data.rank)}${bin}; ${band}; dashed: step ${count(onset)}`;
}
