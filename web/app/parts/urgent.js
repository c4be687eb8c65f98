/** Runs that a person should look at now, the worst first. Pure. */

/** @typedef {import('../../types/api.js').RunSummary} RunSummary */

export const LIVE = new Set(['running', 'stuck', 'silent', 'starting']);
const DAY_MS = 86_400_000;
const SEVERITIES = ['critical', 'warning'];

/** Live runs with a fault or without a sign, and those that failed within a day.
 * @param {RunSummary} run @param {number} now ms */
function isUrgent(run, now) {
  if (run.status === 'failed') return now - (run.ended_ms ?? run.last_seen_ms ?? 0) < DAY_MS;
  const bad = run.verdict !== null && run.verdict.severity !== 'info';
  return LIVE.has(run.status) && (bad || run.status === 'stuck' || run.status === 'silent');
}

/** Those that need attention: by severity, then by what their verdict costs, the newest first of equals.
 * @param {RunSummary[]} runs the newest first @param {number} now ms */
export function urgentOf(runs, now) {
  const place = (/** @type {RunSummary} */ run) => {
    const at = SEVERITIES.indexOf(run.verdict?.severity ?? '');
    return at < 0 ? SEVERITIES.length : at;
  };
  return runs
    .filter((run) => isUrgent(run, now))
    .sort(
      (a, b) =>
        place(a) - place(b) || (b.verdict?.cost_throughput_ratio ?? 0) - (a.verdict?.cost_throughput_ratio ?? 0),
    );
}
