/** Tables of numbers: ranks, collectives, the critical path, memory, values at the end. */

import { callWords, placeWords } from "./calls.js";
import { h } from "./dom.js";
import { shortened, showBytes, showNs, showRanks, showRate, showShare } from "./format.js";
import { table } from "./tables.js";

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./tables.js").Cell} Cell */

/**
 * A duration that sorts by its ns.
 * @param {number} ns
 * @returns {Cell}
 */
function time(ns) {
  return [ns > 0 ? showNs(ns) : "-", ns];
}

/** @param {Model} model */
export function ranksTable(model) {
  const two = model.runs.length > 1;
  const rows = model.runs.flatMap((run, index) => run.head.ranks.map(([rank, compute, exposed, waiting, idle, finished]) => [
    ...(two ? ["AB"[index]] : []), rank, sharesBar(run.head.makespan, compute, exposed, waiting), time(compute), time(exposed), time(waiting), time(idle),
    /** @type {Cell} */ ([finished < 0 ? "never" : showNs(finished), finished < 0 ? Infinity : finished])]));
  return table("Where the time of each rank goes", [...(two ? [{ title: "run" }] : []), { title: "rank", number: true }, { title: "shares" }, { title: "compute", number: true },
    { title: "exposed", number: true }, { title: "waiting", number: true }, { title: "idle", number: true }, { title: "finished", number: true }], rows);
}

/**
 * @param {number} end
 * @param {number} compute
 * @param {number} exposed
 * @param {number} waiting
 * @returns {Cell}
 */
function sharesBar(end, compute, exposed, waiting) {
  const part = (/** @type {string} */ name, /** @type {number} */ ns) => {
    const element = h("i", { class: name, title: `${name}: ${showShare(ns / Math.max(end, 1))}` });
    element.style.width = `${(100 * ns) / Math.max(end, 1)}%`;
    return element;
  };
  return [h("div", { class: "shares" }, part("compute", compute), part("exposed", exposed), part("waiting", waiting)), compute];
}

/** @param {Model} model */
export function collectivesTable(model) {
  const two = model.runs.length > 1;
  const rows = model.runs.flatMap((run, index) => run.head.collectives.map((c) => [...(two ? ["AB"[index]] : []), c.op, shortened(c.group, 32), c.n,
    /** @type {Cell} */ ([showBytes(c.nbytes), c.nbytes]), c.calls, time(c.duration_ns), time(c.duration_ns * c.calls), /** @type {Cell} */ ([showRate(c.algbw), c.algbw]),
    /** @type {Cell} */ ([showRate(c.busbw), c.busbw])]));
  if (!rows.length) return null;
  return table("Collectives", [...(two ? [{ title: "run" }] : []), { title: "operation" }, { title: "group" }, { title: "ranks", number: true }, { title: "bytes", number: true },
    { title: "calls", number: true }, { title: "time", number: true }, { title: "in all", number: true }, { title: "algbw", number: true }, { title: "busbw", number: true }], rows);
}

/**
 * The critical path, equal neighbours as one.
 * @param {Run} run
 */
export function pathPieces(run) {
  const { row, rank, start, end, why } = run.path;
  /** @type {{row: number, rank: number, start: number, end: number, why: number, calls: number}[]} */
  const found = [];
  for (let i = 0; i < row.length; i += 1) {
    const last = found[found.length - 1];
    const same = last && last.rank === rank[i] && last.why === why[i] && row[i] >= 0 && last.row >= 0 && run.op[last.row] === run.op[row[i]]
      && run.name[last.row] === run.name[row[i]] && run.place[last.row] === run.place[row[i]];
    if (same) [last.end, last.calls] = [end[i], last.calls + 1];
    else found.push({ row: row[i], rank: rank[i], start: start[i], end: end[i], why: why[i], calls: 1 });
  }
  return found;
}

/**
 * @param {Model} model
 * @param {number} index
 */
export function pathTable(model, index) {
  const run = model.runs[index];
  const pieces = pathPieces(run);
  if (!pieces.length) return null;
  const what = (/** @type {typeof pieces[0]} */ p) => (p.row < 0 ? "nothing runs" : `${p.why === 3 ? "waits before " : ""}${callWords(run, p.row)}${p.calls > 1 ? ` × ${p.calls}` : ""}`);
  const rows = pieces.map((p) => [/** @type {Cell} */ ([showNs(p.start), p.start]), time(p.end - p.start),
    /** @type {Cell} */ ([showShare((p.end - p.start) / Math.max(run.head.makespan, 1)), p.end - p.start]), p.rank, what(p), p.row < 0 ? "" : placeWords(run, p.row)]);
  const side = model.runs.length > 1 ? `${"AB"[index]}: ` : "";
  return table(`${side}Critical path: what the run could not be shorter than`, [{ title: "from", number: true }, { title: "takes", number: true }, { title: "share", number: true },
    { title: "rank", number: true }, { title: "what" }, { title: "where" }], rows, (i) => { if (pieces[i].row >= 0) model.choose(index, pieces[i].row); });
}

/**
 * A bar for each kind of rank, by what its memory holds, beside what its device has.
 * @param {Run} run
 */
export function memoryView(run) {
  const { memory, device } = run.head;
  if (!memory.length || !device) return null;
  const kinds = [...new Set(memory.flatMap(([, , parts]) => Object.keys(parts)))];
  const totals = memory.map(([, , parts]) => Object.values(parts).reduce((a, b) => a + b, 0));
  const most = Math.max(device.nbytes, ...totals);
  const lines = memory.map(([name, ranks, parts], i) => {
    const bars = kinds.filter((kind) => parts[kind]).map((kind) => {
      const element = h("i", { class: `kind${kinds.indexOf(kind) % 6}`, title: `${kind}: ${showBytes(parts[kind])}` });
      element.style.width = `${(100 * parts[kind]) / most}%`;
      return element;
    });
    const limit = h("i", { class: "limit", title: `${device.name}: ${showBytes(device.nbytes)}` });
    limit.style.left = `${(100 * device.nbytes) / most}%`;
    return h("tr", {}, h("th", { scope: "row" }, shortened(name, 30)), h("td", {}, showRanks(ranks)), h("td", { class: "wide" }, h("div", { class: "memory" }, ...bars, limit)),
      h("td", { class: totals[i] > device.nbytes ? "number bad" : "number" }, `${showBytes(totals[i])}${totals[i] > device.nbytes ? " ✕ too much" : ""}`));
  });
  return h("div", {}, h("p", { class: "legend" }, ...kinds.map((kind, i) => h("span", {}, h("i", { class: `kind${i % 6}` }), kind)),
    h("span", {}, h("i", { class: "limit" }), `${device.name} has ${showBytes(device.nbytes)}`)),
  h("div", { class: "table" }, h("table", {}, h("caption", {}, "Memory of a rank at its peak"), h("tbody", {}, ...lines))));
}

/**
 * What tensors hold in the end, a line for each tensor and set of ranks that hold the same.
 * @param {Model} model
 * @param {number} index
 */
export function valuesTable(model, index) {
  const run = model.runs[index];
  if (!run.held) return null;
  const held = model.held(index);
  /** @type {Map<string, {label: string, text: string, ranks: number[]}>} */
  const found = new Map();
  for (let rank = 0; rank < run.world; rank += 1) {
    for (const [label, text] of held.at(rank, Infinity)) {
      const key = JSON.stringify([label, text]);
      const known = found.get(key) ?? { label, text, ranks: [] };
      known.ranks.push(rank);
      found.set(key, known);
    }
  }
  const rows = [...found.values()].sort((a, b) => (a.label < b.label ? -1 : a.label > b.label ? 1 : a.ranks[0] - b.ranks[0]));
  return table("What tensors hold at the end", [{ title: "tensor" }, { title: "holds" }, { title: "ranks" }],
    rows.map((one) => [shortened(one.label, 40), shortened(one.text, 120), showRanks(one.ranks)]));
}
