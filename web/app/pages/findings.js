/** Every finding of a run: open ones by cost, then what recovered, then who looked. */

import { useEffect, useRef } from 'preact/hooks';
import { csvHref, useApi } from '../api.js';
import { sentence as asSentence, count } from '../format.js';
import { useHeld } from '../live.js';
import { setTitle } from '../page.js';
import { AdviceCard } from '../parts/advice.js';
import { CappedNote, Card, Icon, Problem, Skeleton } from '../parts/bits.js';
import { FindingsTable } from '../parts/finding.js';
import { el, t } from '../tags.js';
import { runPath } from '../url.js';
import { noFindings, useFindingKeys } from './overview.js';

/** @typedef {import('../../types/api.js').Findings} Findings */

/** What is wrong: the verdict's finding or that which costs most, and how many there are besides.
 * @param {Findings} list @param {boolean} ended @param {number | null} verdict */
export function findingsSentence(list, ended, verdict) {
  const recovered = list.recovered_capped?.total ?? list.recovered.length;
  const past = recovered > 0 ? `${count(recovered)} recovered` : '';
  const first = list.open.find((one) => one.id === verdict) ?? list.open[0];
  if (!first) return past ? `Nothing is wrong ${ended ? 'at the end' : 'now'}: ${past}` : noFindings(list);
  const others = list.open.length - 1;
  const more = others > 0 ? `${count(others)} more ${ended ? 'at the end' : 'open'}` : '';
  return [first.what, ...[more, past].filter(Boolean)].join('; ');
}

/** @param {import('../main.js').PageProps & {ended: boolean}} props */
export function Page({ run, topic, overview, ended }) {
  const path = runPath(run, 'findings');
  const answer = /** @type {import('../api.js').Answer<Findings>} */ (
    useApi(path, { topic, on: ['findings', 'verdict'] })
  );
  const list = useRef(/** @type {HTMLDivElement | null} */ (null));
  const { shown, held } = useHeld(answer.data, list, path);
  useFindingKeys(run, shown?.open.map((one) => one.id) ?? []);
  const sentence = shown ? findingsSentence(shown, ended, overview.data?.verdict?.id ?? null) : '';
  useEffect(() => setTitle(sentence || 'Findings', run), [sentence]);
  if (!shown)
    return answer.error
      ? el(Problem, { error: answer.error, retry: answer.refresh, what: 'the findings' })
      : el(Skeleton, { height: 240, waitsFor: 'the findings' });
  return t.div(
    { class: 'stack', ref: list },
    t.header(
      { class: 'pagehead' },
      t.h1({ id: 'verdict' }, sentence),
      held ? t.p({ class: 'note', role: 'status' }, 'New findings are in; they show when you stop pointing.') : null,
    ),
    shown.open.length > 0
      ? el(
          Card,
          { title: ended ? 'At the end, by cost' : 'Open, by cost', tools: t.a({ href: csvHref(path) }, 'CSV') },
          el(FindingsTable, { findings: shown.open, run, ended }),
        )
      : null,
    shown.recovered.length > 0
      ? el(
          Card,
          { title: 'Recovered' },
          el(FindingsTable, { findings: shown.recovered, run, ended }),
          el(CappedNote, { capped: shown.recovered_capped, noun: 'findings' }),
        )
      : null,
    el(AdviceCard, { run, topic }),
    el(
      Card,
      { title: 'Who looked', note: 'a detector without its input is skipped, which is not the same as healthy' },
      t.ul(
        { class: 'detectors' },
        shown.detectors.map((one) =>
          t.li(
            { key: one.name, class: one.state },
            el(Icon, { name: one.state === 'ran' ? 'ok' : 'unknown' }),
            t.b(null, one.name),
            t.span({ class: 'pill' }, one.state),
            t.span(null, one.text),
            one.state !== 'ran' && one.reason
              ? t.span({ class: 'reason' }, asSentence(one.reason), one.remedy ? ` ${asSentence(one.remedy)}` : '')
              : null,
          ),
        ),
      ),
    ),
  );
}
