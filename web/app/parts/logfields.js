/** Fields of log lines: what came with the record, and what a line that is a JSON object says. Pure. */

import { runPath, withQuery } from '../url.js';

/** @typedef {import('../../types/api.js').LogRow} LogRow */

const DEEP = 3; // objects within objects
const MOST = 64; // fields of one line

/** @type {WeakMap<LogRow, Record<string, string>>} */
const known = new WeakMap();

/** @param {LogRow} line @returns {Record<string, string>} */
export function fieldsOf(line) {
  const before = known.get(line);
  if (before) return before;
  /** @type {Record<string, string>} */
  const fields = { ...line.fields };
  if (line.message.startsWith('{')) collect(parsed(line.message), '', fields, DEEP);
  known.set(line, fields);
  return fields;
}

/** @param {string} text @returns {unknown} */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** @param {unknown} value @param {string} name @param {Record<string, string>} into @param {number} deep */
function collect(value, name, into, deep) {
  if (Object.keys(into).length >= MOST) return;
  if (value !== null && typeof value === 'object' && !Array.isArray(value) && deep > 0) {
    for (const [key, inner] of Object.entries(value)) collect(inner, name ? `${name}.${key}` : key, into, deep - 1);
  } else if (name) into[name] ??= typeof value === 'string' ? value : JSON.stringify(value);
}

/** The fields that lines have, those of most lines first. @param {LogRow[]} lines @returns {[string, number][]} */
export function fieldNames(lines) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const line of lines)
    for (const name of Object.keys(fieldsOf(line))) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0]));
}

/** The columns that an address names, and back. A comma within a name is written as two. @param {string | undefined} text */
export function readColumns(text) {
  return (text ?? '')
    .split(/(?<!,),(?!,)/)
    .map((name) => name.replaceAll(',,', ','))
    .filter(Boolean);
}

/** @param {string[]} names */
export function writeColumns(names) {
  return names.map((name) => name.replaceAll(',', ',,')).join(',') || null;
}

/** Where a line's rank was in its step; null where no step is known, or the one to come never began.
 * @param {LogRow} line @param {string} run @param {number} last step of the run */
export function stepHref(line, run, last) {
  if (!line.step || line.step > last) return null;
  const sel = line.rank >= 0 ? `${line.rank}@${line.step}` : null;
  return withQuery(runPath(run, 'steps', String(line.step)), { sel });
}

/** In which step a line was written; between two it has the number of the one to come. @param {LogRow} line @param {number} last step of the run */
export function stepWords(line, last) {
  if (!line.step || line.step <= last) return line.step ? String(line.step) : '';
  return last > 0 ? `after ${last}` : '';
}
