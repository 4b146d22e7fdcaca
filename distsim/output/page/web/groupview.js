/** Nodes and ranks as a grid, the groups of each axis, and the traffic between ranks. */

import { isSend, moves, opOf } from "./calls.js";
import { h, replace } from "./dom.js";
import { plural, shortened, showBytes, showRanks, showShare } from "./format.js";
import { table } from "./tables.js";

/** The largest number of ranks in the grid. */
const MOST_CELLS = 256;

/**
 * Groups by the part of their name before the bracket: `replica[stage=0]` and `replica[stage=1]` belong to one axis.
 * @param {[string, number[]][]} groups
 * @returns {[string, number[][]][]}
 */
export function axesOf(groups) {
  /** @type {Map<string, number[][]>} */
  const found = new Map();
  for (const [name, ranks] of groups) {
    const axis = name.split("[")[0];
    const known = found.get(axis);
    if (known) known.push(ranks);
    else found.set(axis, [ranks]);
  }
  return [...found];
}

/** @param {Run} run */
export function groupsView(run) {
  const axes = axesOf(run.head.groups);
  const choice = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "Axis of the groups" },
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
    h("label", {}, "Show the groups of ", choice, "; ranks of one group have the same number and colour"), grid, words);
}

/**
 * A box for each node, a cell for each rank, with the number of its group.
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
    found.push(h("div", { class: "machine" }, h("p", { class: "name" }, `node ${first / run.head.local}`), h("div", { class: "cells" }, ...cells)));
  }
  if (run.world > shown) found.push(h("p", { class: "grey" }, `and ${run.world - shown} more ranks are not drawn`));
  return found;
}

/**
 * The number of messages from each block of ranks to each other block.
 * @param {Run} run
 * @param {number} block
 */
export function messageCounts(run, block) {
  /** @type {Map<string, number>} */
  const found = new Map();
  for (let row = 0; row < run.count; row += 1) {
    if (!isSend(opOf(run, row)) || !moves(run, row) || run.started[row] < 0) continue;
    const key = `${Math.floor(run.rank[row] / block)}>${Math.floor(run.peer[row] / block)}`;
    found.set(key, (found.get(key) ?? 0) + 1);
  }
  return found;
}

/**
 * The name of a block of ranks.
 * @param {Run} run
 * @param {number} i
 */
function blockWords(run, i) {
  const block = run.head.traffic?.block ?? 1;
  if (block === 1) return String(i);
  return block === run.head.local ? `node ${i}` : `${i * block}-${Math.min((i + 1) * block, run.world) - 1}`;
}

/**
 * The bytes from rank to rank: messages as sent, collectives by their first algorithm.
 * @param {Run} run
 */
export function trafficView(run) {
  const { block, by, pairs } = run.head.traffic ?? { block: 1, by: {}, pairs: [] };
  if (!pairs.length) return null;
  const counts = messageCounts(run, block);
  const total = pairs.reduce((sum, pair) => sum + pair[2], 0);
  const algorithms = Object.entries(by).map(([op, name]) => `${op} by ${name}`).join(", ");
  const rows = pairs.map(([src, dst, nbytes]) => [/** @type {[string, number]} */ ([blockWords(run, src), src]), /** @type {[string, number]} */ ([blockWords(run, dst), dst]),
    /** @type {[string, number]} */ ([showBytes(nbytes), nbytes]), /** @type {[string, number]} */ ([showShare(nbytes / total), nbytes]), counts.get(`${src}>${dst}`) ?? 0]);
  return h("div", {}, h("h3", {}, "Bytes from rank to rank"),
    h("p", { class: "grey" }, `${showBytes(total)} in total; messages as sent${algorithms && `; ${algorithms}`}${block > 1 ? `; ${run.world} ranks, ${block} per row` : ""}.`),
    h("div", { class: "beside" }, run.world > 2 ? matrix(run, pairs) : null,
      table("By sender and receiver", [{ title: "from", number: true }, { title: "to", number: true }, { title: "bytes", number: true }, { title: "share", number: true },
        { title: "messages", number: true }], rows)));
}

/**
 * @param {Run} run
 * @param {[number, number, number][]} pairs the most bytes first
 */
function matrix(run, pairs) {
  const block = run.head.traffic?.block ?? 1;
  const size = Math.ceil(run.world / block);
  const [most, least] = [pairs[0][2], pairs[pairs.length - 1][2]];
  const shade = (/** @type {number} */ nbytes) => (most > least ? 0.2 + 0.8 * (Math.log(nbytes / least) / Math.log(most / least)) : 0.8);
  const cells = new Map(pairs.map(([src, dst, nbytes]) => [`${src}>${dst}`, nbytes]));
  const blocks = Array.from({ length: size }, (_, i) => i);
  const grid = h("div", { class: "matrix", role: "img", "aria-label": "Bytes from rank to rank: one row per sender, one column per receiver; the table next to it has the numbers" },
    ...blocks.flatMap((src) => blocks.map((dst) => {
      const nbytes = cells.get(`${src}>${dst}`);
      if (nbytes === undefined) return h("i");
      const cell = h("i", { class: "on", title: `${blockWords(run, src)} to ${blockWords(run, dst)}: ${showBytes(nbytes)}` });
      cell.style.opacity = String(shade(nbytes));
      return cell;
    })));
  grid.style.gridTemplateColumns = `repeat(${size}, 1fr)`;
  grid.style.maxWidth = `${Math.min(26, 2 + 2 * size)}rem`;
  const words = most > least ? ` Darker cells mean more bytes: ${showBytes(least)} to ${showBytes(most)}.` : "";
  return h("figure", {}, grid, h("figcaption", {}, `Rows: senders, ${block > 1 ? blockWords(run, 0) : "rank 0"} on top. Columns: receivers.${words}`));
}
