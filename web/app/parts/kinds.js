/** What kinds of findings are called. `tests/server/test_docs.py` holds it against the detectors. */

import { words } from '../format.js';

/** @type {Record<string, string>} */
const KINDS = {
  slow_compute: 'Straggler: slow compute',
  slow_data: 'Waiting for data',
  garbage_collection: 'Straggler: garbage collection',
  host_contention: 'Straggler: other work on its processors',
  thermal_or_power: 'Straggler: GPU held down by heat or power',
  page_cache: 'Straggler: data not in memory',
  sequence_imbalance: 'More tokens than its peers',
  hang: 'Hang',
  desync: 'Desync: ranks call different collectives',
  crash: 'Crash',
  stopped: 'Stopped from outside',
  clock_offset: 'A clock is ahead or behind',
  clock_drift: 'A clock runs too fast or too slowly',
  slow_link: 'Slow link, adapter, host or switch',
  communication_bound: 'Steps wait for the network',
  communication_advice: 'Communication could be faster',
  low_bus_bandwidth: 'Communication slower than it was',
  stage_imbalance: 'Pipeline stages are uneven',
  pipeline_bubble: 'Pipeline idles: few microbatches',
  version_drift: 'Versions differ between ranks',
  drift: 'Settings or hardware differ between ranks',
  replica_drift: 'Replicas of the model differ',
  nan: 'NaN or infinity',
  loss_spike: 'Spike of the loss or the gradients',
  divergence: 'Training diverges',
  corruption: 'One rank computes other numbers',
  corrupt_batch: 'One odd batch',
  memory_growth: 'Memory grows',
  fragmentation: 'GPU memory in fragments',
  slow_epoch_start: 'Slow start of every epoch',
  bad_shard: 'Some batches come late',
  xid: 'Xid error',
  gpu_error: 'GPU error told by the driver',
  throttle: 'GPU held down by heat or power',
  power_cap: 'GPU held down by its power limit',
  ecc: 'Memory errors of a GPU',
  gpu_outlier: 'GPU unlike the others',
  gpu_underuse: 'GPUs with little to do',
  noise_scale: 'What a larger batch would give',
  staleness: 'Gradients applied late',
  hot_shard: 'One parameter shard gets most requests',
  goodput: 'Where the time went',
  slow_checkpoint: 'Slow checkpoints',
  checkpoint_interval: 'Checkpoints badly spaced',
  regression: 'Slower than earlier runs',
  slowdown: 'Slower than it was',
};

/** @param {string} kind */
export function kindWords(kind) {
  return KINDS[kind] ?? words(kind);
}
