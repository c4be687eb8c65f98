/** Panels as text that other programs read: Markdown, CSV, and names of files. Pure. */

/** A table for a chat or a page of documents; its first row is the head. @param {string[][]} rows */
export function asMarkdown([head, ...rows]) {
  const line = (/** @type {string[]} */ cells) => `| ${cells.map(oneLine).join(' | ')} |`;
  return [line(head), line(head.map(() => '---')), ...rows.map(line)].join('\n');
}

/** @param {string} text */
function oneLine(text) {
  return text.replaceAll('\\', '\\\\').replaceAll('|', '\\|').replace(/\s+/g, ' ').trim();
}

/** A table for a spreadsheet, which takes no cell for a formula. @param {string[][]} rows */
export function asCsv(rows) {
  return rows
    .map((cells) => cells.map(quoted).join(','))
    .join('\r\n')
    .concat('\r\n');
}

/** @param {string} text */
function quoted(text) {
  const isNumber = /^[+-][\d.,]+(?: ?[%\p{L}/]+)?$/u.test(text);
  const safe = !isNumber && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

/** "demo-run-where-a-step-goes.csv". @param {string} run @param {string} title @param {string} ending */
export function fileName(run, title, ending) {
  const words = [run || 'rankscope', title].map((text) =>
    text.replace(/[^\p{L}\p{N}._]+/gu, '-').replace(/^[-.]+|-+$/g, ''),
  );
  return `${words.filter(Boolean).join('-').slice(0, 120).toLowerCase()}.${ending}`;
}

/**
 * Cells that reach over several columns or rows count in each of them.
 * @param {{text: string, columns: number, rows: number}[][]} lines
 * @returns {string[][]}
 */
export function asGrid(lines) {
  /** @type {string[][]} */
  const grid = lines.map(() => []);
  lines.forEach((cells, y) => {
    for (const { text, columns, rows } of cells) {
      let x = 0;
      while (grid[y][x] !== undefined) x += 1;
      for (let down = 0; down < rows && y + down < grid.length; down += 1)
        grid[y + down].splice(x, columns, ...Array(columns).fill(text));
    }
  });
  return grid;
}
