/** Machines and ranks as a grid, the groups of each axis, and who talks to whom. */

import { isSend, moves, opOf } from "./calls.js";
import { h, replace } from "./dom.js";
import { plural, shortened, showBytes, showRanks } from "./format.js";
import { table } from "./tables.js";

/** Ranks of a grid and of a matrix that are drawn. */
const MOST_CELLS = 1024;
const MOST_MATRIX = 64;

/**
 * Groups by what they are called before a bracket: `replica[stage=0]` and `replica[stage=1]` are of one axis.
 * @param {[string, number[]][]} groups
 * @returns {[string, number[][]][]}
 */
export function axesOf(groups) {
  /** @type {Map<string, number[][]>} */
  const found = new Map();
  for (const [name, ranks] of groups) {
    const axis = name.split("[")[0];
    found.set(axis, [...(found.get(axis) ?? []), ranks]);
  }
  return [...found];
}

/** @param {Run} run */
export function groupsView(run) {
  const axes = axesOf(run.head.groups);
  const choice = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "Groups of which axis" },
    ...axes.map(([axis, groups]) => h("option", { value: axis }, `${shortened(axis, 40)}: ${plural(groups.length, "group")} of ${groups[0].length}`))));
  const grid = h("div", { class: "machines" });
  const words = h("p", { class: "grey", "aria-live": "polite" });
  const draw = () => {
    const groups = axes[choice.selectedIndex]?.[1] ?? [];
    replace(grid, ...machines(run, groups));
    words.textContent = groups.slice(0, 8).map((ranks) => showRanks([...ranks].sort((a, b) => a - b))).join("  |  ") + (groups.length > 8 ? `  | and ${groups.length - 8} more` : "");
  };
  choice.selectedIndex = axes.length > 1 ? 1 : 0;
  choice.addEventListener("change", draw);
  draw();
  const mesh = Object.entries(run.head.mesh).map(([axis, n]) => `${axis} ${n}`).join(" × ");
  return h("div", {}, mesh && h("p", {}, "Mesh, outermost first: ", h("strong", {}, mesh)),
    h("label", {}, "Groups of ", choice, " have one number and shade"), grid, words);
}

/**
 * A box for each machine, a cell for each rank, with the number of its group.
 * @param {Run} run
 * @param {number[][]} groups
 */
function machines(run, groups) {
  /** @type {Map<number, number>} */
  const group = new Map();
  groups.forEach((ranks, i) => ranks.forEach((rank) => { if (!group.has(rank)) group.set(rank, i); }));
  const shown = Math.min(run.world, MOST_CELLS);
  const found = [];
  for (let first = 0; first < shown; first += run.head.local) {
    const cells = [];
    for (let rank = first; rank < Math.min(first + run.head.local, shown); rank += 1) {
      const mine = group.get(rank);
      cells.push(h("div", { class: `cell ${mine === undefined ? "out" : `tone${mine % 6}`}`, title: `rank ${rank}${mine === undefined ? ", in no group of this axis" : `, group ${mine}`}` },
        h("b", {}, rank), mine !== undefined && groups.length > 1 && h("span", {}, `g${mine}`)));
    }
    found.push(h("div", { class: "machine" }, h("h4", {}, `machine ${first / run.head.local}`), h("div", { class: "cells" }, ...cells)));
  }
  if (run.world > shown) found.push(h("p", { class: "grey" }, `and ${run.world - shown} more ranks, not drawn`));
  return found;
}

/**
 * Bytes of messages by sender and receiver, and of collectives by group.
 * @param {Run} run
 */
export function trafficOf(run) {
  /** @type {Map<string, {src: number, dst: number, count: number, nbytes: number}>} */
  const pairs = new Map();
  for (let row = 0; row < run.count; row += 1) {
    if (!isSend(opOf(run, row)) || !moves(run, row) || run.started[row] < 0) continue;
    const key = `${run.rank[row]}>${run.peer[row]}`;
    const one = pairs.get(key) ?? { src: run.rank[row], dst: run.peer[row], count: 0, nbytes: 0 };
    one.count += 1;
    one.nbytes += run.nbytes[row];
    pairs.set(key, one);
  }
  return [...pairs.values()].sort((a, b) => b.nbytes - a.nbytes || a.src - b.src || a.dst - b.dst);
}

/** @param {Run} run */
export function trafficView(run) {
  const pairs = trafficOf(run);
  if (!pairs.length) return null;
  const rows = pairs.map((p) => [p.src, p.dst, p.count, /** @type {[string, number]} */ ([showBytes(p.nbytes), p.nbytes])]);
  return h("div", { class: "beside" }, run.world <= MOST_MATRIX && run.world > 2 ? matrix(run, pairs) : null,
    table("Messages, by sender and receiver", [{ title: "from", number: true }, { title: "to", number: true }, { title: "messages", number: true },
      { title: "bytes", number: true }], rows));
}

/**
 * @param {Run} run
 * @param {{src: number, dst: number, nbytes: number}[]} pairs
 */
function matrix(run, pairs) {
  const most = Math.log(1 + pairs[0].nbytes) || 1;
  const cells = new Map(pairs.map((p) => [`${p.src}>${p.dst}`, p]));
  const ranks = Array.from({ length: run.world }, (_, rank) => rank);
  const grid = h("div", { class: "matrix", role: "img", "aria-label": "Who sends to whom: a row for each sender, a column for each receiver" },
    ...ranks.flatMap((src) => ranks.map((dst) => {
      const pair = cells.get(`${src}>${dst}`);
      const cell = h("i", pair ? { title: `rank ${src} to rank ${dst}: ${showBytes(pair.nbytes)}` } : {});
      if (pair) cell.style.opacity = String(0.25 + 0.75 * (Math.log(1 + pair.nbytes) / most));
      if (pair) cell.className = "on";
      return cell;
    })));
  grid.style.gridTemplateColumns = `repeat(${run.world}, 1fr)`;
  grid.style.maxWidth = `${Math.min(26, 2 + 2 * run.world)}rem`;
  return h("figure", {}, grid, h("figcaption", {}, "Down: who sends, rank 0 on top. Across: who receives. The darker, the more bytes."));
}
