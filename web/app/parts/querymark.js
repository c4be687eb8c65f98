/** Where in a query a mistake is. Pure. */

/**
 * The text before a mistake, the mistake, and the text behind it. The server counts characters,
 * a browser counts halves of them; a mistake at the end gets a place to stand on.
 * @param {string} text @param {number[] | null} at from and to which character, the end excluded
 * @returns {[string, string, string]}
 */
export function marked(text, at) {
  if (!at) return [text, '', ''];
  const characters = Array.from(text);
  const wrong = characters.slice(at[0], at[1]).join('');
  return [characters.slice(0, at[0]).join(''), wrong || '\u00a0', characters.slice(at[1]).join('')];
}
