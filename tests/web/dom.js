/** As much of a document as `dom.js` of the report needs, so that tests can read the text of a panel without a browser. */

class Element {
  /** @param {string} tag */
  constructor(tag) {
    this.tag = tag;
    this.children = [];
    this.style = {};
  }

  setAttribute() {}

  addEventListener() {}

  append(child) {
    this.children.push(child);
  }

  replaceChildren(...children) {
    this.children = children;
  }

  set textContent(text) {
    this.children = [text];
  }

  get textContent() {
    return this.children.map((child) => (typeof child === "string" ? child : child.textContent)).join(" ");
  }
}

/** Put the document in place. */
export function fakeDocument() {
  globalThis.Node = Element;
  globalThis.document = { createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag) };
}
