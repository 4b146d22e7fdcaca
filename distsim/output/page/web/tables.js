/** Tables that can be sorted by any column, also with the keyboard. */

import { button, h } from "./dom.js";
import { plural } from "./format.js";

/** The number of rows that are shown at first. */
const MOST_ROWS = 40;

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {boolean} [number] aligned right and sorted in descending order first
 */
/**
 * A cell: its content, or its content and its sort key.
 * @typedef {string | number | Node | [string | Node, number | string]} Cell
 */

/** @param {Cell} cell */
function keyOf(cell) {
  if (Array.isArray(cell)) return cell[1];
  return typeof cell === "object" ? cell.textContent ?? "" : cell;
}

/** @param {Cell} cell */
function shownOf(cell) {
  return Array.isArray(cell) ? cell[0] : cell;
}

/**
 * @param {string} caption
 * @param {Column[]} columns
 * @param {Cell[][]} rows
 * @param {(row: number) => void} [choose] called if a row is clicked, or selected with Enter
 */
export function table(caption, columns, rows, choose) {
  let order = rows.map((_, i) => i);
  let limit = MOST_ROWS;
  const body = h("tbody");
  const more = button("", "Show all rows", () => { limit = rows.length; draw(); }, { class: "more", "aria-label": null });

  /** @param {number} i */
  const line = (i) => h("tr", choose ? {
    tabindex: 0, class: "link", onclick: () => choose(i),
    onkeydown: (/** @type {KeyboardEvent} */ event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(i); } },
  } : {}, ...rows[i].map((cell, k) => h("td", { class: columns[k].number ? "number" : null }, shownOf(cell))));

  function draw() {
    body.replaceChildren(...order.slice(0, limit).map(line));
    const left = rows.length - Math.min(limit, rows.length);
    more.hidden = left === 0;
    more.textContent = `Show ${plural(left, "more row")}`;
  }

  const heads = columns.map((column, k) => {
    const head = h("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": "none" });
    head.append(button(column.title, `Sort by ${column.title}`, () => {
      const up = head.getAttribute("aria-sort") === "none" ? !column.number : head.getAttribute("aria-sort") === "descending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      order = sorted(rows, k, up);
      draw();
    }));
    return head;
  });
  draw();
  return h("div", { class: "table" }, h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...heads)), body), more);
}

/**
 * Row numbers sorted by a column; equal rows keep their order.
 * @param {Cell[][]} rows
 * @param {number} column
 * @param {boolean} up
 */
export function sorted(rows, column, up) {
  const keys = rows.map((row) => keyOf(row[column]));
  return rows.map((_, i) => i).sort((a, b) => {
    const [x, y] = up ? [keys[a], keys[b]] : [keys[b], keys[a]];
    const less = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return less || a - b;
  });
}
