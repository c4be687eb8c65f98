/** Typed tags: `t.div({class: 'card'}, child)` for elements, `el(Verdict, {finding})` for components. */

import { h } from 'preact';

/** @typedef {import('preact').JSX.IntrinsicElements} Elements */
/** @typedef {import('preact').ComponentChildren} Children */
/** @typedef {import('preact').VNode<any>} Node */

/**
 * One function per HTML and SVG element. The types are Preact's own, so an unknown attribute, a
 * wrong handler or a bad ARIA word is an error of the type check.
 * @type {{[K in keyof Elements]: (props?: (Elements[K] & {[data: `data-${string}`]: string | undefined}) | null, ...children: Children[]) => Node}}
 */
export const t = /** @type {any} */ (
  new Proxy(
    {},
    {
      get:
        (_, /** @type {string} */ name) =>
        (/** @type {any} */ props, /** @type {Children[]} */ ...children) =>
          h(name, props, ...children),
    },
  )
);

/**
 * Make an element of a component.
 * @template P
 * @param {import('preact').ComponentType<P>} component
 * @param {P & {key?: string | number}} props
 * @param {Children[]} children
 * @returns {Node}
 */
export function el(component, props, ...children) {
  return h(/** @type {any} */ (component), /** @type {any} */ (props), ...children);
}
