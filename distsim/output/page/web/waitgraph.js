/** The wait-for graph: cycles as circles, and a list of the ranks that are blocked behind them. */

import { standing, endWords } from "./details.js";
import { h, s } from "./dom.js";
import { plural, showRanks } from "./format.js";
import { stuckChain } from "./chain.js";

/** The largest numbers of drawn ranks and of lines about ranks behind them. */
const MOST_NODES = 24;
const MOST_BEHIND = 12;
const SIZE = 400;
const NODE = 20;

/**
 * The ranks of the cause (on a cycle, or waiting for a rank that has exited), and the ranks that have exited.
 * @param {Waits} waits
 */
export function coreOf(waits) {
  const blocked = new Map(waits.blocked.map((one) => [one[0], one]));
  /** @type {Set<number>} */
  const core = new Set();
  /** @type {Set<number>} */
  const gone = new Set();
  for (const rank of blocked.keys()) {
    if (core.has(rank)) continue;
    const { ranks, closes } = stuckChain(waits, rank);
    if (closes >= 0) ranks.slice(closes).forEach((one) => core.add(one));
    else if (ranks.length > 1) {
      gone.add(ranks[ranks.length - 1]);
      core.add(ranks[ranks.length - 2]);
    }
  }
  return { core: [...core].sort((a, b) => a - b), gone: [...gone].sort((a, b) => a - b), blocked };
}

/**
 * The ranks in the order in which they wait for each other, so that a cycle is drawn as a circle.
 * @param {Waits} waits
 * @param {number[]} core
 */
function inOrder(waits, core) {
  const inside = new Set(core);
  /** @type {number[]} */
  const order = [];
  for (const rank of core) {
    if (order.includes(rank)) continue;
    for (const one of stuckChain(waits, rank).ranks) if (inside.has(one) && !order.includes(one)) order.push(one);
  }
  return order;
}

/**
 * @param {import("./model.js").Model} model
 * @param {number} index
 */
export function waitGraph(model, index) {
  const run = model.runs[index];
  const waits = run.head.waits;
  if (!waits) return null;
  const { core, gone, blocked } = coreOf(waits);
  const behind = [...blocked.keys()].filter((rank) => !core.includes(rank));
  const of = run.head.waits_of === "this run" ? "" : ` This is ${run.head.waits_of}; the simulated run itself completes.`;
  return h("div", { class: "beside" },
    h("figure", {}, picture(waits, inOrder(waits, core).slice(0, MOST_NODES), gone.slice(0, MOST_NODES)), h("figcaption", {}, howToRead(gone.length > 0), of)),
    h("div", {}, h("h3", {}, `${plural(blocked.size, "rank")} blocked; cause: ${core.length === 1 ? "rank" : "ranks"} ${showRanks(core)}`),
      h("ul", { class: "plain" }, ...[...inOrder(waits, core), ...gone].slice(0, MOST_NODES).map((rank) => h("li", {}, standing(model, index, waits, rank)))),
      core.length > MOST_NODES && h("p", { class: "grey" }, `and ${core.length - MOST_NODES} more ranks of the cause are not drawn`),
      behind.length > 0 && h("p", {}, `${plural(behind.length, "rank")} blocked by the cause: ${showRanks(behind)}.`),
      behind.length > 0 && h("ul", { class: "plain" }, ...behind.slice(0, MOST_BEHIND).map((rank) => h("li", {}, standing(model, index, waits, rank)))),
      gone.length > 0 && h("p", {}, `Not blocked: ${gone.slice(0, 8).map((rank) => `rank ${rank} ${endWords(waits, rank)}`).join("; ")}.`)));
}

/** @param {boolean} gone */
function howToRead(gone) {
  return `An arrow points to the rank that is awaited; a dashed arrow means any one of several.${gone ? " A square is a rank that has exited." : ""}`;
}

/**
 * @param {Waits} waits
 * @param {number[]} core
 * @param {number[]} gone
 */
function picture(waits, core, gone) {
  const nodes = [...core, ...gone.filter((rank) => !core.includes(rank))];
  const radius = nodes.length < 2 ? 0 : nodes.length < 4 ? 90 : SIZE / 2 - NODE - 18;
  /** @type {Map<number, [number, number]>} */
  const at = new Map(nodes.map((rank, i) => {
    const angle = (2 * Math.PI * i) / nodes.length - Math.PI / 2;
    return [rank, [SIZE / 2 + radius * Math.cos(angle), SIZE / 2 + radius * Math.sin(angle)]];
  }));
  const edges = waits.blocked.filter((one) => core.includes(one[0])).flatMap(([rank, , , , needs]) => {
    const seen = new Map(needs.flatMap((need) => waits.sets[need[2]].map((to) => [to, need[3]])));
    return [...seen].filter(([to]) => at.has(to) && to !== rank).map(([to, any]) => edge(at, rank, to, any === 1));
  });
  const words = core.length ? `Ranks ${core.join(", ")} wait for each other or for ranks that have exited` : "There is no wait-for cycle";
  return s("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": words, class: "graph" },
    s("defs", {}, s("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" },
      s("path", { d: "M0 0L8 4L0 8z", class: "head" }))),
    ...edges, ...nodes.map((rank) => node(at.get(rank) ?? [0, 0], rank, !core.includes(rank))));
}

/**
 * @param {[number, number]} place
 * @param {number} rank
 * @param {boolean} gone
 */
function node([x, y], rank, gone) {
  const shape = gone ? s("rect", { x: x - NODE, y: y - NODE, width: 2 * NODE, height: 2 * NODE, rx: 3, class: "gone" }) : s("circle", { cx: x, cy: y, r: NODE, class: "core" });
  return s("g", {}, shape, s("text", { x, y, class: "label" }, String(rank)));
}

/**
 * An arrow from rim to rim. It is curved, so that two ranks that wait for each other have two arrows.
 * @param {Map<number, [number, number]>} at
 * @param {number} from
 * @param {number} to
 * @param {boolean} any
 */
function edge(at, from, to, any) {
  const [[x0, y0], [x1, y1]] = [at.get(from) ?? [0, 0], at.get(to) ?? [0, 0]];
  const [dx, dy] = [x1 - x0, y1 - y0];
  const length = Math.hypot(dx, dy) || 1;
  const bend = Math.min(26, length / 8);
  const middle = [(x0 + x1) / 2 - (dy / length) * bend, (y0 + y1) / 2 + (dx / length) * bend];
  const rim = (/** @type {number} */ x, /** @type {number} */ y) => {
    const far = Math.hypot(middle[0] - x, middle[1] - y) || 1;
    return [x + ((middle[0] - x) / far) * (NODE + 3), y + ((middle[1] - y) / far) * (NODE + 3)];
  };
  const [a, b] = [rim(x0, y0), rim(x1, y1)];
  return s("path", { d: `M${a[0].toFixed(1)} ${a[1].toFixed(1)}Q${middle[0].toFixed(1)} ${middle[1].toFixed(1)} ${b[0].toFixed(1)} ${b[1].toFixed(1)}`,
    class: any ? "edge any" : "edge", "marker-end": "url(#head)" });
}
