/** Terminal text as spans: colours become tokens, control bytes become visible. Pure. */

/** @typedef {{text: string, look: string}} Span */

const COLOURS = ['black', 'red', 'green', 'yellow', 'blue', 'magenta', 'cyan', 'white'];
// biome-ignore lint/suspicious/noControlCharactersInRegex: control bytes are what this looks for
const SEQUENCE = /\x1b\[([0-9;]*)m|\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*(?:\x07|$)/g;
// biome-ignore lint/suspicious/noControlCharactersInRegex: control bytes are what this looks for
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f]/g;

/** @param {string} text @returns {Span[]} */
export function spans(text) {
  /** @type {Span[]} */
  const found = [];
  let look = '';
  let from = 0;
  for (const match of text.matchAll(SEQUENCE)) {
    push(found, text.slice(from, match.index), look);
    from = match.index + match[0].length;
    if (match[1] !== undefined) look = nextLook(look, match[1]);
  }
  push(found, text.slice(from), look);
  return found;
}

/** @param {Span[]} found @param {string} text @param {string} look */
function push(found, text, look) {
  if (text)
    found.push({
      text: text.replace(CONTROL, (byte) =>
        String.fromCharCode(byte === '\x7f' ? 0x2421 : 0x2400 + byte.charCodeAt(0)),
      ),
      look,
    });
}

/** @param {string} look @param {string} codes */
function nextLook(look, codes) {
  let next = look;
  for (const code of (codes || '0').split(';').map(Number)) {
    if (code === 0 || code === 39) next = '';
    else if (code >= 30 && code <= 37) next = `ansi-${COLOURS[code - 30]}`;
    else if (code >= 90 && code <= 97) next = `ansi-${COLOURS[code - 90]}`;
  }
  return next;
}
