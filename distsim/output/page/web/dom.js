/** Creates elements of the page. Every text is set as text: nothing from a run is parsed as HTML. */

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * @param {string} tag
 * @param {Record<string, unknown>} [attributes] `on…`: a listener; `class`, `title`, …: attributes; null and false are omitted
 * @param {Child[]} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

/**
 * The same for pictures.
 * @param {string} tag
 * @param {Record<string, unknown>} [attributes]
 * @param {Child[]} children
 * @returns {SVGElement}
 */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, attributes, children);
  return element;
}

/**
 * @param {Element} element
 * @param {Record<string, unknown>} attributes
 * @param {Child[]} children
 */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : shown(String(child)));
  }
}

/** Control characters, and marks that change the direction of text. */
// eslint-disable-next-line no-control-regex
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]/gu;

/**
 * The text with control characters escaped, as on the command line.
 * @param {string} text
 */
export function shown(text) {
  return text.replace(CONTROL, (letter) => {
    const code = letter.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

/**
 * @param {Element} element
 * @param {Child[]} children
 */
export function replace(element, ...children) {
  element.replaceChildren();
  fill(element, {}, children);
}

/**
 * A button with a title that states its action. The title is also the name for screen readers if the label is a symbol or a number.
 * @param {string} label
 * @param {string} title
 * @param {() => void} act
 * @param {Record<string, unknown>} [more]
 */
export function button(label, title, act, more = {}) {
  return h("button", { type: "button", title, "aria-label": /[a-z]{2}/i.test(label) ? null : title, onclick: act, ...more }, label);
}

/**
 * A section of the page with its heading.
 * @param {string} id
 * @param {string} title
 * @param {string} about
 * @param {Child[]} children
 */
export function section(id, title, about, ...children) {
  return h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title),
    about && h("p", { class: "about" }, about), ...children);
}

/** @param {string} name of a custom property of the style */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * `#rrggbb` as three numbers.
 * @param {string} hex
 */
export function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}
