/** A picture of a panel as it stands on the screen: title, legend, axes, in the theme that is on. */

import { theme } from '../page.js';

const LEAST_RATIO = 2; // a picture is read enlarged
const MOST_PIXELS = 16_000; // of one side, as far as browsers draw

/** The rules that hold now: a picture has no window whose width could be asked. @param {CSSRuleList} rules @returns {string[]} */
function rulesOf(rules) {
  return [...rules].flatMap((rule) =>
    rule instanceof CSSMediaRule
      ? matchMedia(rule.conditionText).matches
        ? rulesOf(rule.cssRules)
        : []
      : rule.cssText,
  );
}

/** What canvases and fields show, and how far a box is scrolled, is not in their elements: put it there. @param {HTMLElement} from @param {HTMLElement} copy */
function carryOver(from, copy) {
  const boxes = [...copy.querySelectorAll('*')];
  [...from.querySelectorAll('*')].forEach((one, i) => {
    const content = boxes[i].firstElementChild;
    if (one.scrollTop > 0 && content instanceof HTMLElement) content.style.marginTop = `${-one.scrollTop}px`;
  });
  const copies = copy.querySelectorAll('canvas, select');
  from.querySelectorAll('canvas, select').forEach((one, i) => {
    if (one instanceof HTMLSelectElement) {
      copies[i].querySelectorAll('option')[one.selectedIndex]?.setAttribute('selected', '');
    } else if (one instanceof HTMLCanvasElement) {
      const image = document.createElement('img');
      image.src = one.toDataURL();
      image.className = one.className;
      image.style.cssText = one.style.cssText;
      image.style.width ||= `${one.clientWidth}px`;
      image.style.height ||= `${one.clientHeight}px`;
      copies[i].replaceWith(image);
    }
  });
  for (const one of copy.querySelectorAll('.tools a, .tools button, .buttons, .sharebox, .cursor')) one.remove();
}

/** The panel within its ancestors, which have no boxes of their own here. @param {HTMLElement} panel */
function standing(panel) {
  const copy = /** @type {HTMLElement} */ (panel.cloneNode(true));
  carryOver(panel, copy);
  // What it inherits comes from a rule that browsers do not write out whole.
  const { fontFamily, fontSize, lineHeight, color } = getComputedStyle(panel);
  Object.assign(copy.style, { fontFamily, fontSize, lineHeight, color });
  copy.style.width = `${panel.offsetWidth}px`;
  copy.style.height = `${panel.offsetHeight}px`;
  let whole = copy;
  for (let around = panel.parentElement; around && around !== document.documentElement; around = around.parentElement) {
    const frame = /** @type {HTMLElement} */ (around.cloneNode(false));
    frame.style.display = 'contents';
    frame.append(whole);
    whole = frame;
  }
  return whole;
}

/** @param {HTMLElement} panel @returns {Promise<Blob>} */
export async function pictureOf(panel) {
  const { offsetWidth: width, offsetHeight: height } = panel;
  const styles = [...document.styleSheets].flatMap((sheet) => rulesOf(sheet.cssRules)).join('\n');
  const body = new XMLSerializer().serializeToString(standing(panel));
  const svg = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" data-theme="${theme.value}">`,
    `<style><![CDATA[${styles}]]></style><foreignObject width="100%" height="100%">${body}</foreignObject></svg>`,
  ].join('');
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const ratio = Math.min(Math.max(LEAST_RATIO, devicePixelRatio), MOST_PIXELS / Math.max(width, height));
  const canvas = document.createElement('canvas');
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext('2d'));
  context.fillStyle = getComputedStyle(panel).backgroundColor; // also behind its round corners
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, fail) => {
    canvas.toBlob((blob) => (blob ? done(blob) : fail(new Error('The browser made no picture'))), 'image/png');
  });
}
