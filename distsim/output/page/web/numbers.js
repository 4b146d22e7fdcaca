/** Tables of numbers: ranks, collectives, the critical path, memory, values at the end. */

import { callWords, placeWords } from "./calls.js";
import { ranksLike } from "./decode.js";
import { h } from "./dom.js";
import { plural, shortened, showBytes, showNs, showRanks, showRate, showShare } from "./format.js";
import { table } from "./tables.js";

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./tables.js").Cell} Cell */

/** The largest number of pieces in a repeated block of the critical path. */
const MOST_BLOCK = 24;

/**
 * A table cell with a duration, sorted by its ns.
 * @param {number} ns
 * @returns {Cell}
 */
function time(ns) {
  return [ns > 0 ? showNs(ns) : "-", ns];
}

/**
 * Ranks with equal times share a row.
 * @param {Run} run
 */
export function equalTimes(run) {
  /** @type {Map<string, {ranks: number[], times: number[]}>} */
  const found = new Map();
  for (const [rank, ...times] of run.head.ranks) {
    const key = times.join();
    const known = found.get(key);
    if (known) known.ranks.push(...ranksLike(run, rank));
    else found.set(key, { ranks: [...ranksLike(run, rank)], times });
  }
  found.forEach(({ ranks }) => ranks.sort((a, b) => a - b));
  return [...found.values()];
}

/** @param {Model} model */
export function ranksTable(model) {
  const two = model.runs.length > 1;
  const rows = model.runs.flatMap((run, index) => equalTimes(run).map(({ ranks, times: [compute, exposed, waiting, idle, finished] }) => [
    ...(two ? ["AB"[index]] : []), /** @type {Cell} */ ([showRanks(ranks), ranks[0]]), sharesBar(run.head.makespan, compute, exposed, waiting), time(compute), time(exposed), time(waiting), time(idle),
    /** @type {Cell} */ ([finished < 0 ? "never" : showNs(finished), finished < 0 ? Infinity : finished])]));
  return table("Time of each rank", [...(two ? [{ title: "run" }] : []), { title: "ranks", number: true }, { title: "shares" }, { title: "compute", number: true },
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

/**
 * Where the time goes, as a bar and as a table; two runs next to each other.
 * @param {Model} model
 */
export function breakdownTable(model) {
  const runs = model.runs.map((run) => run.head.breakdown);
  const names = [...new Set(runs.flatMap((parts) => parts.map(([name]) => name)))];
  if (!names.length) return null;
  const two = runs.length > 1;
  const share = (/** @type {number} */ i, /** @type {string} */ name) => runs[i].find((part) => part[0] === name)?.[2] ?? 0;
  const bars = runs.map((parts, i) => h("div", { class: "breakdown", role: "img", "aria-label": parts.map(([name, , part]) => `${name} ${percent(part)}`).join(", ") },
    ...parts.map(([name, category, part], k) => {
      const element = h("i", { class: `${category} shade${k % 4}`, title: `${name}: ${percent(part)}` }, part > 0.06 && h("span", {}, name));
      element.style.width = `${100 * part}%`;
      return element;
    }), two && h("b", {}, "AB"[i])));
  const rows = names.map((name) => [name, ...runs.flatMap((_, i) => {
    const part = share(i, name);
    return [/** @type {Cell} */ ([percent(part), part]), time(Math.round(part * model.runs[i].head.makespan))];
  }), ...(two ? [/** @type {Cell} */ ([`${share(1, name) >= share(0, name) ? "+" : "−"}${percent(Math.abs(share(1, name) - share(0, name)))}`, share(1, name) - share(0, name)])] : [])]);
  const columns = runs.flatMap((_, i) => [{ title: two ? `${"AB"[i]}, share` : "share", number: true }, { title: two ? `${"AB"[i]}, time per rank` : "time per rank", number: true }]);
  return h("div", {}, ...bars, table("Mean over all ranks", [{ title: "part" }, ...columns, ...(two ? [{ title: "B − A", number: true }] : [])], rows));
}

/** @param {number} share */
function percent(share) {
  return share < 0.1 ? `${(100 * share).toFixed(1)} %` : `${Math.round(100 * share)} %`;
}

/**
 * The iterations of the run; consecutive identical ones share a row.
 * @param {Model} model
 * @param {number} index
 * @param {(from: number, to: number) => void} show shows a stretch of time
 */
export function stepsTable(model, index, show) {
  const { steps } = model.runs[index].head;
  if (!steps.length) return null;
  const side = model.runs.length > 1 ? `${"AB"[index]}: ` : "";
  const rows = steps.map(([first, times, start, end]) => [/** @type {Cell} */ ([times > 1 ? `${first} to ${first + times - 1}` : String(first), first]),
    /** @type {Cell} */ ([times > 1 ? `× ${times}` : "", times]), /** @type {Cell} */ ([showNs(start), start]), time(end - start)]);
  return table(`${side}${plural(steps.reduce((sum, [, times]) => sum + times, 0), "step")}, ${plural(steps.length, "group")} of consecutive identical steps`,
    [{ title: "step", number: true }, { title: "count", number: true }, { title: "first starts at", number: true }, { title: "time each", number: true }],
    rows, (i) => show(steps[i][2] - (steps[i][3] - steps[i][2]) * 0.02, steps[i][3] + (steps[i][3] - steps[i][2]) * 0.02));
}

/** @param {Model} model */
export function collectivesTable(model) {
  const two = model.runs.length > 1;
  const rows = model.runs.flatMap((run, index) => run.head.collectives.map((c) => [...(two ? ["AB"[index]] : []), c.op, shortened(c.group, 32), c.n,
    /** @type {Cell} */ ([showBytes(c.nbytes), c.nbytes]), c.calls, time(c.duration_ns), time(c.duration_ns * c.calls), /** @type {Cell} */ ([showRate(c.algbw), c.algbw]),
    /** @type {Cell} */ ([showRate(c.busbw), c.busbw])]));
  if (!rows.length) return null;
  return table("Collectives", [...(two ? [{ title: "run" }] : []), { title: "operation" }, { title: "group" }, { title: "ranks", number: true }, { title: "bytes", number: true },
    { title: "calls", number: true }, { title: "time", number: true }, { title: "total time", number: true }, { title: "algbw", number: true }, { title: "busbw", number: true }], rows);
}

/**
 * The critical path; consecutive equal pieces are joined.
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
 * Repeated blocks, once each: pieces with the number of repetitions of their block.
 * @template T
 * @param {T[]} pieces
 * @param {(piece: T) => string} key equal for equal pieces
 * @returns {{piece: T, times: number}[]}
 */
export function foldedBlocks(pieces, key) {
  const keys = pieces.map(key);
  const repeats = (/** @type {number} */ at, /** @type {number} */ size) => {
    let end = at + size;
    while (end < keys.length && keys[end] === keys[end - size]) end += 1;
    return Math.floor((end - at) / size);
  };
  const found = [];
  for (let at = 0; at < keys.length;) {
    const sizes = Array.from({ length: Math.min(MOST_BLOCK, Math.floor((keys.length - at) / 2)) }, (_, k) => k + 1);
    const size = sizes.find((one) => repeats(at, one) > 1) ?? 1;
    const times = repeats(at, size);
    for (let k = 0; k < size; k += 1) found.push({ piece: pieces[at + k], times });
    at += size * times;
  }
  return found;
}

/**
 * @param {Model} model
 * @param {number} index
 */
export function pathTable(model, index) {
  const run = model.runs[index];
  const folded = foldedBlocks(pathPieces(run), (p) => `${p.rank} ${p.why} ${p.calls} ${p.end - p.start} ${p.row < 0 ? "" : `${run.op[p.row]} ${run.name[p.row]} ${run.place[p.row]}`}`);
  const pieces = folded.map((one) => one.piece);
  if (!pieces.length) return null;
  const again = folded.some((one) => one.times > 1);
  const what = (/** @type {typeof pieces[0]} */ p) => (p.row < 0 ? "nothing runs" : `${p.why === 3 ? "waits before " : ""}${callWords(run, p.row)}${p.calls > 1 ? ` × ${p.calls}` : ""}`);
  const rows = folded.map(({ piece: p, times }) => [/** @type {Cell} */ ([showNs(p.start), p.start]), time(p.end - p.start), ...(again ? [/** @type {Cell} */ ([times > 1 ? `× ${times}` : "", times])] : []),
    /** @type {Cell} */ ([showShare((times * (p.end - p.start)) / Math.max(run.head.makespan, 1)), times * (p.end - p.start)]), p.rank, what(p), p.row < 0 ? "" : placeWords(run, p.row)]);
  const side = model.runs.length > 1 ? `${"AB"[index]}: ` : "";
  return table(`${side}Critical path: the chain of calls that determines the run time${again ? "; repeated blocks are listed once" : ""}`,
  [{ title: "start", number: true }, { title: "time", number: true }, ...(again ? [{ title: "repeats", number: true }] : []), { title: "share", number: true },
    { title: "rank", number: true }, { title: "call" }, { title: "line" }], rows, (i) => { if (pieces[i].row >= 0) model.choose(index, pieces[i].row); });
}

/**
 * The final values of tensors: a row for each tensor and set of ranks with equal values.
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
  return table("Final values of tensors", [{ title: "tensor" }, { title: "value" }, { title: "ranks" }],
    rows.map((one) => [shortened(one.label, 40), shortened(one.text, 120), showRanks(one.ranks)]));
}
