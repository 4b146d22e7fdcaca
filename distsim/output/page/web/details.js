/** The panel of the selected call: its match, the terms of its cost, and why it waits. */

import { STUCK, callWords, moves, opOf, partsOf, placeWords, requestsOf, rowAt } from "./calls.js";
import { mergedPieces, stuckChain } from "./chain.js";
import { button, h, replace } from "./dom.js";
import { plural, shortened, showBytes, showNs, showRanks } from "./format.js";

/** Limits: steps of a chain, calls of a match, and alternative forms of a cost. */
const MOST_STEPS = 14;
const MOST_MATES = 16;
const MOST_FORMS = 8;

/** How a rank ended, by its status. @type {Record<string, string>} */
const END_TEXT = { raised: "raised an error", crashed: "crashed", killed: "was killed", absent: "never started", ended: "finished its program" };

/** @typedef {import("./model.js").Model} Model */
/** @typedef {import("./dom.js").Child} Child */

/**
 * @param {Model} model
 * @param {{source: (file: string, line: number) => void, line: (words: string) => void}} page
 */
export function detailsPanel(model, page) {
  const panel = h("aside", { class: "details", tabindex: -1, "aria-label": "Selected call" });
  const draw = () => replace(panel, ...told(model, page));
  model.on((what) => { if (what === "choice") draw(); });
  draw();
  return panel;
}

/**
 * @param {Model} model
 * @param {{source: (file: string, line: number) => void, line: (words: string) => void}} page
 * @returns {Child[]}
 */
function told(model, page) {
  const { run: index, row } = model.chosen;
  if (row < 0) {
    return [h("h3", {}, "No call selected"), h("p", { class: "grey" }, "Click a call, or press ", h("kbd", {}, "↓"),
      " in the timeline. This panel then shows its match, its cost and why it waits.")];
  }
  const run = model.runs[index];
  return [
    h("h3", {}, h("bdi", {}, callWords(run, row))),
    h("p", { class: "nav" }, button("‹ previous", "Previous call on this rank", () => model.besides(-1)),
      button("next ›", "Next call on this rank", () => model.besides(1))),
    facts(model, page), waiting(model), match(model), price(model),
  ];
}

/**
 * @param {Model} model
 * @param {{source: (file: string, line: number) => void, line: (words: string) => void}} page
 */
function facts(model, page) {
  const { run: index, row } = model.chosen;
  const run = model.runs[index];
  const tables = run.head.tables;
  const place = tables.place[run.place[row]];
  const where = place && place[1] ? button(placeWords(run, row), "Show this line in the source", () => page.source(place[0], place[1]), { class: "quiet" }) : null;
  /** @type {[string, Child][]} */
  const rows = [
    ["rank", `${model.runs.length > 1 ? `${"AB"[index]}, ` : ""}${run.rank[row]}${run.head.nodes > 1 ? ` on node ${Math.floor(run.rank[row] / run.head.local)}` : ""}`],
    ["call", `${run.position[row]}${run.part[row] >= 0 ? `, part ${run.part[row]}` : ""}${run.iteration[row] > 0 ? `, iteration ${run.iteration[row]}` : ""}`],
    ["source", where], ["group", groupOf(run, row)], ["tensor", tables.tensor?.[run.tensor[row]]],
    ["size", run.nbytes[row] ? `${showBytes(run.nbytes[row])}${tables.dtype[run.dtype[row]] ? ` of ${tables.dtype[run.dtype[row]]}` : ""}` : null],
    ["reduce op", tables.reduce_op[run.reduce_op[row]]], ["queue", tables.queue[run.queue[row]]],
    ["called", at(run.posted[row])], ["returned", at(run.returned[row], "never")],
    ["started", at(run.started[row], run.posted[row] >= 0 ? "never" : "")], ["finished", at(run.finished[row], "never")],
    ["took", run.finished[row] >= 0 && run.started[row] >= 0 ? showNs(run.finished[row] - run.started[row]) : null],
  ];
  return h("dl", { class: "facts" }, ...rows.filter(([, value]) => value).flatMap(([name, value]) => [
    h("dt", {}, name), h("dd", {}, typeof value === "string" ? h("bdi", { title: value.length > 80 ? value : null }, shortened(value, 80)) : value)]));
}

/**
 * @param {number} ns
 * @param {string} never
 */
function at(ns, never = "") {
  return ns < 0 ? never : `at ${showNs(ns)}`;
}

/**
 * @param {Run} run
 * @param {number} row
 */
function groupOf(run, row) {
  const group = run.head.groups[run.group[row]];
  return group && moves(run, row) ? `${shortened(group[0], 40)}: ${plural(group[1].length, "rank")}` : null;
}

/**
 * @param {Model} model
 * @param {number} index
 * @param {number} row
 * @param {string} words
 */
function link(model, index, row, words) {
  return button(words, `Choose ${words}`, () => model.choose(index, row), { class: "quiet" });
}

/** @param {Model} model */
function match(model) {
  const { run: index, row } = model.chosen;
  const run = model.runs[index];
  if (!moves(run, row)) return null;
  const mates = [...model.walk(index).matches.of(row)].filter((mate) => mate !== row);
  const late = mates.concat(row).reduce((a, b) => (run.posted[b] > run.posted[a] ? b : a), row);
  const all = run.head.groups[run.group[row]]?.[1].length ?? 0;
  return h("section", {}, h("h4", {}, `Matches ${plural(mates.length, "call")}`),
    run.like && all > mates.length + 1 && h("p", { class: "grey" }, `of representative ranks; the group has ${plural(all, "rank")}`),
    h("ul", { class: "plain" }, ...mates.slice(0, MOST_MATES).map((mate) => h("li", {}, link(model, index, mate, model.words(index, mate)),
      h("span", { class: "grey" }, ` called at ${showNs(run.posted[mate])}${mate === late ? ", last to arrive" : ""}`)))),
    mates.length > MOST_MATES && h("p", { class: "grey" }, `and ${mates.length - MOST_MATES} more`));
}

/** @param {Model} model */
function price(model) {
  const { run: index, row } = model.chosen;
  const run = model.runs[index];
  const known = run.head.prices?.[run.price[row]];
  if (!known) return null;
  const took = run.finished[row] >= 0 && run.started[row] >= 0 ? run.finished[row] - run.started[row] : -1;
  const most = Math.max(known.ns, 1);
  return h("section", {}, h("h4", {}, `Predicted cost: ${showNs(known.ns)}`),
    h("p", { class: "grey" }, `${known.form}; ${showBytes(known.nbytes)} among ${plural(known.n, "rank")} on ${plural(known.nodes, "node")}`
      + `${took >= 0 && took !== known.ns ? `; in this run ${showNs(took)}${took < known.ns ? " (the call returns before the transfer ends)" : ""}` : ""}`),
    h("table", { class: "terms" }, h("tbody", {}, ...known.terms.map(([what, how, ns]) => h("tr", {}, h("th", { scope: "row" }, what),
      h("td", { class: "number" }, showNs(ns)), h("td", { class: "bar" }, bar(ns / most)), h("td", { class: "grey" }, how))))),
    known.others.length > 0 && h("details", {}, h("summary", {}, `Other algorithms and protocols (${known.others.length})`),
      h("ul", { class: "plain" }, ...known.others.slice(0, MOST_FORMS).map(([form, ns]) => h("li", {}, `${form}: ${showNs(ns)}`)))),
    known.band && h("p", { class: "grey" }, `90 % of measured times are between ${showNs(known.band[0])} and ${showNs(known.band[1])}. `
      + `Lower bound on these links: ${showNs(known.bound_ns ?? 0)}.`));
}

/** @param {number} share */
function bar(share) {
  const element = h("div", { class: "fill" });
  element.style.width = `${Math.min(100, Math.max(0, 100 * share)).toFixed(1)}%`;
  return element;
}

/**
 * The wait of the selected call, as the timeline draws it, and its reasons.
 * @param {Model} model
 */
function waiting(model) {
  const { run: index, row } = model.chosen;
  const run = model.runs[index];
  const stuck = stuckWords(model);
  if (stuck) return stuck;
  if (run.posted[row] < 0) return null;
  const wait = model.waitsIn(index).get(row);
  if (!wait) return waitElsewhere(model) ?? h("section", {}, h("h4", {}, "No wait: this call returned without blocking."));
  const waited = wait.end - wait.start;
  if (wait.kind === STUCK) return h("section", {}, h("h4", {}, `Blocked for ${showNs(waited)}, until the end of the run`));
  const pieces = mergedPieces(run, reasonsOf(model, index, row, wait));
  return h("section", {}, h("h4", {}, `Why it waits ${showNs(waited)}`), mostOfIt(model, pieces, waited),
    h("ol", { class: "chain" }, ...pieces.slice(0, MOST_STEPS).map(([piece, times]) => h("li", {},
      h("span", { class: "when" }, showNs(piece.end - piece.start)), link(model, index, piece.row, pieceWords(model, index, piece, times)))),
    pieces.length > MOST_STEPS && h("li", { class: "grey" }, `and ${pieces.length - MOST_STEPS} earlier steps`)));
}

/**
 * Of a batch: its parts that wait. Of a request: the later call that waits for it.
 * @param {Model} model
 */
function waitElsewhere(model) {
  const { run: index, row } = model.chosen;
  const run = model.runs[index];
  const waits = model.waitsIn(index);
  const ender = run.ended_by[row] > run.position[row] ? rowAt(run, run.rank[row], run.ended_by[row]) : -1;
  const rows = [...partsOf(run, row), ...(ender >= 0 ? [ender] : [])].filter((other) => waits.has(other));
  if (!rows.length) return null;
  return h("section", {}, h("h4", {}, "This call returned without blocking. Its request is waited for here:"),
    h("ul", { class: "plain" }, ...rows.slice(0, MOST_MATES).map((other) => {
      const { start, end } = /** @type {{start: number, end: number}} */ (waits.get(other));
      return h("li", {}, link(model, index, other, `${callWords(run, other)} waits ${showNs(end - start)}`));
    })));
}

/**
 * The longest part of a wait in words; empty if the call does not wait, or if nothing happened during the wait.
 * @param {Model} model
 * @param {number} index
 * @param {number} row
 */
export function mainReason(model, index, row) {
  const wait = model.waitsIn(index).get(row);
  const pieces = wait ? mergedPieces(model.runs[index], reasonsOf(model, index, row, wait)) : [];
  return pieces.length ? pieceWords(model, index, longestPiece(pieces), 1) : "";
}

/** @param {[Piece, number][]} pieces */
function longestPiece(pieces) {
  return pieces.reduce((a, b) => (b[0].end - b[0].start > a[0].end - a[0].start ? b : a))[0];
}

/**
 * The chain of work and transfers during a wait, the latest first.
 * @param {Model} model
 * @param {number} index
 * @param {number} row
 * @param {{start: number, end: number}} wait
 * @returns {Piece[]}
 */
function reasonsOf(model, index, row, wait) {
  const run = model.runs[index];
  const walk = model.walk(index);
  const requests = requestsOf(run, row).filter((request) => run.finished[request] > wait.start);
  if (!requests.length) return walk.why(row, wait.start);
  const last = requests.reduce((a, b) => (run.finished[b] > run.finished[a] ? b : a));
  const began = Math.max(walk.began[last], wait.start);
  const transfer = { row: last, rank: run.rank[last], start: began, end: run.finished[last], why: walk.kind(last) };
  return [transfer, ...walk.why(last, wait.start)];
}

/**
 * @param {Model} model
 * @param {number} index
 * @param {Piece} piece
 * @param {number} times
 */
function pieceWords(model, index, piece, times) {
  const run = model.runs[index];
  const what = callWords(run, piece.row);
  const doing = { compute: `computes ${what}`, sleep: "sleeps", transfer: `moves data in ${what}`, wait: `waits before ${what}` };
  const place = placeWords(run, piece.row);
  const words = doing[/** @type {keyof typeof doing} */ (piece.why)];
  return `rank ${piece.rank} ${words}${times > 1 ? ` × ${times}` : ""}${place ? `, ${place}` : ""}`;
}

/**
 * A sentence about the main reason for a wait.
 * @param {Model} model
 * @param {[Piece, number][]} pieces
 * @param {number} waited
 */
function mostOfIt(model, pieces, waited) {
  if (!pieces.length) return null;
  const most = longestPiece(pieces);
  const share = (most.end - most.start) / waited;
  if (pieces.length < 2 || share < 0.3) return null;
  return h("p", {}, `${Math.round(100 * share)} % of the wait: ${pieceWords(model, model.chosen.run, most, 1)}.`);
}

/**
 * The ranks that a blocked call waits for, along the wait-for graph.
 * @param {Model} model
 */
function stuckWords(model) {
  const { run: index, row } = model.chosen;
  const run = model.runs[index];
  const { waits, waits_of: of } = run.head;
  const blocked = waits?.blocked.find((one) => one[0] === run.rank[row]);
  if (!waits || of !== "this run" || !blocked || run.finished[row] >= 0) return null;
  const mine = blocked[4].some((need) => need[0] === run.position[row]) || blocked[1] === run.position[row];
  if (!mine) return null;
  const { ranks, closes } = stuckChain(waits, run.rank[row]);
  const end = ranks[ranks.length - 1];
  const words = closes >= 0 ? `Rank ${end} waits for rank ${ranks[closes]}: a wait-for cycle.` : `Rank ${end} does not wait: it ${endWords(waits, end)}.`;
  return h("section", {}, h("h4", {}, "Why this call never returns"),
    ...blocked[4].map((need) => h("p", {}, `It waits for ${need[3] ? "any of " : ""}${waits.sets[need[2]].length === 1 ? "rank" : "ranks"} ${showRanks(waits.sets[need[2]])}.`)),
    h("ol", { class: "chain" }, ...ranks.slice(0, MOST_STEPS).map((rank) => h("li", {}, standing(model, index, waits, rank)))),
    ranks.length > MOST_STEPS && h("p", { class: "grey" }, `… and ${ranks.length - MOST_STEPS} more ranks`), h("p", {}, words));
}

/**
 * @param {Model} model
 * @param {number} index
 * @param {Waits} waits
 * @param {number} rank
 */
export function standing(model, index, waits, rank) {
  const run = model.runs[index];
  const one = waits.blocked.find((b) => b[0] === rank);
  const row = one ? rowAt(run, rank, one[4][0]?.[0] ?? one[1], one[4][0]?.[1] ?? -1) : lastRow(run, rank);
  if (row < 0) return `rank ${rank}${one ? " waits" : ` ${endWords(waits, rank)}`}`;
  return one ? link(model, index, row, `rank ${rank} in ${callWords(run, row)}${placeWords(run, row) ? `, ${placeWords(run, row)}` : ""}`)
    : link(model, index, row, `rank ${rank} ${endWords(waits, rank)} after ${opOf(run, row)}`);
}

/**
 * @param {Run} run
 * @param {number} rank
 */
function lastRow(run, rank) {
  let found = -1;
  for (let row = run.first[rank]; row < run.first[rank + 1]; row += 1) if (run.posted[row] >= 0 && run.part[row] < 0) found = row;
  return found;
}

/**
 * How a rank that is not blocked ended.
 * @param {Waits} waits
 * @param {number} rank
 */
export function endWords(waits, rank) {
  const end = waits.ends.find((one) => one[0] === rank);
  return end ? `${END_TEXT[end[1]] ?? end[1]}${end[4] ? ` (${shortened(end[4], 80)})` : ""}` : "finished its program";
}
