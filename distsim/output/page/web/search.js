/** Finds calls by their operation, rank, group, tensor or line. */

import { partsOf, placeWords } from "./calls.js";

const FIELDS = ["op", "rank", "group", "tensor", "line", "name", "peer", "tag", "iteration"];

/**
 * The terms of a search: `rank:3`, `op:send`, `line:24`, or a plain word that occurs in any text of a call.
 * @param {string} text
 * @returns {{field: string, word: string}[]}
 */
export function termsOf(text) {
  const words = text.match(/"[^"]*"|[^\s"]+/g) ?? [];
  return words.map((word) => {
    const plain = word.replaceAll('"', "").toLowerCase();
    const at = plain.indexOf(":");
    const field = plain.slice(0, at);
    const alone = /^(rank|line)(\d+)$/.exec(plain);
    if (alone) return { field: alone[1], word: alone[2] };
    return at > 0 && FIELDS.includes(field) ? { field, word: plain.slice(at + 1) } : { field: "", word: plain };
  }).filter((term) => term.word);
}

/**
 * Which of a table's texts contain a word.
 * @param {string[]} table
 * @param {string} word
 */
function holding(table, word) {
  return Uint8Array.from(table, (text) => (text.toLowerCase().includes(word) ? 1 : 0));
}

/**
 * A number, or a range `4-7`.
 * @param {string} word
 * @returns {(value: number) => boolean}
 */
function within(word) {
  const [, low, high] = /^(\d+)(?:-(\d+))?$/.exec(word) ?? [];
  if (low === undefined) return () => false;
  return (value) => value >= Number(low) && value <= Number(high ?? low);
}

/**
 * @param {Run} run
 * @param {{field: string, word: string}} term
 * @returns {(row: number) => boolean}
 */
function test(run, { field, word }) {
  const tables = run.head.tables;
  /** @type {(name: "op" | "group" | "tensor" | "name") => (row: number) => boolean} */
  const text = (name) => {
    const hits = holding(tables[name] ?? [], word);
    return (row) => hits[run[name][row]] === 1;
  };
  const number = within(word);
  if (field === "op" || field === "group" || field === "tensor" || field === "name") return text(field);
  if (field === "rank") return (row) => number(run.rank[row]);
  if (field === "peer") return (row) => number(run.peer[row]);
  if (field === "tag") return (row) => number(run.tag[row]);
  if (field === "iteration") return (row) => number(run.iteration[row]);
  if (field === "line") return (row) => number(tables.place[run.place[row]]?.[1] ?? -1);
  const any = [text("op"), text("group"), text("tensor"), text("name")];
  const places = Uint8Array.from(tables.place, (place) => (`${place[0]}:${place[1]}`.toLowerCase().includes(word) ? 1 : 0));
  const isNumber = /^\d+$/.test(word);
  return (row) => any.some((one) => one(row)) || (!isNumber && places[run.place[row]] === 1);
}

/**
 * Rows that match every term, in order of time; null for an empty search.
 *
 * A batch gives way to those of its parts that match, and a part that waits comes before the others: the wait is what a reader looks for.
 * @param {Run} run
 * @param {string} text
 * @param {Map<number, unknown>} waits by row
 */
export function search(run, text, waits = new Map()) {
  const terms = termsOf(text);
  if (!terms.length) return null;
  const tests = terms.map((term) => test(run, term));
  /** @type {number[]} */
  const rows = [];
  for (let row = 0; row < run.count; row += 1) {
    if (run.posted[row] >= 0 && tests.every((fits) => fits(row))) rows.push(row);
  }
  const found = new Set(rows);
  const calls = rows.filter((row) => !partsOf(run, row).some((part) => found.has(part)));
  const time = (/** @type {number} */ row) => (run.started[row] >= 0 ? run.started[row] : run.posted[row]);
  const start = Float64Array.from({ length: run.count }, (_, row) => (run.part[row] < 0 ? time(row) : run.posted[row]));
  const calm = (/** @type {number} */ row) => (waits.has(row) ? 0 : 1);
  return calls.sort((a, b) => start[a] - start[b] || run.rank[a] - run.rank[b] || run.position[a] - run.position[b] || calm(a) - calm(b) || a - b);
}

/**
 * The text next to the number of results.
 * @param {Run} run
 * @param {number} row
 */
export function hitWords(run, row) {
  return `rank ${run.rank[row]}${placeWords(run, row) ? `, ${placeWords(run, row)}` : ""}`;
}
