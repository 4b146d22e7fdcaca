/** What would make the run shorter: its longest waits with their reasons, and the effect of faster hardware. */

import { WAIT, callWords, placeWords } from "./calls.js";
import { ranksLike } from "./decode.js";
import { mainReason } from "./details.js";
import { h } from "./dom.js";
import { showNs, showRanks, showShare } from "./format.js";
import { table } from "./tables.js";

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./tables.js").Cell} Cell */

const MOST_WAITS = 10;
/** Waits below this share of the run are not listed. */
const NEGLIGIBLE = 0.001;
/** Smaller changes round to zero. */
const VISIBLE_PERCENT = 0.05;

/**
 * Waits in the same call of the program, of the same rank. `row`: the longest of them.
 * @typedef {{row: number, longest: number, total: number, count: number, ranks: number[]}} WaitGroup
 */

/**
 * The longest waits. Waits of one rank at one line are added up; ranks with equal waits for the same reason share an entry.
 * @param {Model} model
 * @param {number} index
 * @returns {(WaitGroup & {reason: string})[]}
 */
export function longestWaits(model, index) {
  const run = model.runs[index];
  /** @type {Map<string, WaitGroup>} */
  const groups = new Map();
  for (const [row, wait] of model.waitsIn(index)) {
    if (wait.kind !== WAIT) continue;
    const key = [run.rank[row], run.op[row], run.name[row], run.place[row], run.peer[row]].join();
    const ns = wait.end - wait.start;
    const known = groups.get(key) ?? { row, longest: 0, total: 0, count: 0, ranks: ranksLike(run, run.rank[row]) };
    if (ns > known.longest) [known.row, known.longest] = [row, ns];
    known.total += ns;
    known.count += 1;
    groups.set(key, known);
  }
  const least = NEGLIGIBLE * run.head.makespan;
  const longest = [...groups.values()].filter((group) => group.total > least).sort((a, b) => b.total - a.total || a.row - b.row);
  /** @type {Map<string, WaitGroup & {reason: string}>} */
  const found = new Map();
  for (const group of longest.slice(0, 4 * MOST_WAITS)) {
    const reason = mainReason(model, index, group.row);
    const key = [run.op[group.row], run.place[group.row], group.total, group.count, reason].join();
    const known = found.get(key);
    if (known) known.ranks = [...known.ranks, ...group.ranks].sort((a, b) => a - b);
    else found.set(key, { ...group, reason });
  }
  return [...found.values()].slice(0, MOST_WAITS);
}

/**
 * @param {Model} model
 * @param {number} index
 */
export function longestWaitsTable(model, index) {
  const run = model.runs[index];
  const waits = longestWaits(model, index);
  if (!waits.length) return null;
  const rows = waits.map((wait) => [/** @type {Cell} */ ([showRanks(wait.ranks), wait.ranks[0]]), callWords(run, wait.row), placeWords(run, wait.row), wait.count,
    /** @type {Cell} */ ([showNs(wait.total), wait.total]), /** @type {Cell} */ ([showShare(wait.total / Math.max(run.head.makespan, 1)), wait.total]), wait.reason]);
  return table(`${side(model, index)}Longest waits of a rank in one call of the program`, [{ title: "ranks", number: true }, { title: "call" }, { title: "line" }, { title: "waits", number: true },
    { title: "time per rank", number: true }, { title: "share", number: true }, { title: "longest work meanwhile" }], rows, (i) => model.choose(index, waits[i].row));
}

/**
 * @param {Model} model
 * @param {number} index
 */
export function speedupsTable(model, index) {
  const { speedups, makespan } = model.runs[index].head;
  const change = (/** @type {number} */ ns) => 100 * (ns / makespan - 1);
  if (!speedups.some(([, ns]) => Math.abs(change(ns)) >= VISIBLE_PERCENT)) return null;
  const rows = speedups.map(([resource, ns]) => [resource, /** @type {Cell} */ ([showNs(ns), ns]),
    /** @type {Cell} */ ([Math.abs(change(ns)) < VISIBLE_PERCENT ? "unchanged" : `${change(ns).toFixed(1)} %`, ns])]);
  return h("div", {}, h("p", { class: "grey" }, "Times that were measured, or that the scenario states, do not change with the hardware."), table(`${side(model, index)}Run time if one resource were twice as fast (now ${showNs(makespan)})`,
    [{ title: "resource" }, { title: "run time", number: true }, { title: "change", number: true }], rows));
}

/**
 * @param {Model} model
 * @param {number} index
 */
function side(model, index) {
  return model.runs.length > 1 ? `${"AB"[index]}: ` : "";
}
