/** The memory of ranks: at the peak, and over a step. */

import { h, s } from "./dom.js";
import { showBytes, shortened, showNs, showRanks } from "./format.js";

/** Size of a panel, room for the labels on its left, and the height from which on an area has a label inside. In pixels. */
const PANEL_WIDTH = 900;
const PANEL_HEIGHT = 150;
const PANEL_LEFT = 90;
const NAMED = 14;

/**
 * A bar for each kind of rank, by kind of memory, with the capacity of its device.
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
      h("td", { class: totals[i] > device.nbytes ? "number bad" : "number" }, `${showBytes(totals[i])}${totals[i] > device.nbytes ? " ✕ out of memory" : ""}`));
  });
  return h("div", {}, h("p", { class: "legend" }, ...kinds.map((kind, i) => h("span", {}, h("i", { class: `kind${i % 6}` }), kind)),
    h("span", {}, h("i", { class: "limit" }), `memory of ${device.name}: ${showBytes(device.nbytes)}`)),
  h("div", { class: "table" }, h("table", {}, h("caption", {}, "Peak memory per rank"), h("tbody", {}, ...lines))), overTime(run, kinds));
}

/**
 * A panel for each kind of rank: constant kinds of memory as bands, and activations on top as a curve.
 * @param {Run} run
 * @param {string[]} kinds
 */
function overTime(run, kinds) {
  const { filled } = run.head;
  if (!filled) return null;
  const most = Math.max(...filled.curves.map(([, parts]) => Object.values(parts).reduce((a, b) => a + b, 0)), 1);
  const words = "Activations grow during forward passes and shrink during backward passes, up to the stated peak. All other memory is drawn as constant.";
  return h("div", {}, h("h3", {}, `Memory over ${filled.note ? `a step: ${filled.note}` : "the run"}`), h("p", { class: "grey" }, words),
    ...filled.curves.map((one) => h("figure", {}, h("figcaption", {}, `${one[0].length > 1 ? "ranks" : "rank"} ${showRanks(one[0])}`), panel(filled, one, kinds, most))),
    filled.more > 0 && h("p", { class: "grey" }, `${filled.more} ranks with lower peaks are not drawn.`));
}

/**
 * @param {Filled} filled
 * @param {Filled["curves"][0]} curve
 * @param {string[]} kinds
 * @param {number} most bytes of the panel's height
 */
function panel(filled, [ranks, parts, at, share], kinds, most) {
  const x = (/** @type {number} */ ns) => PANEL_LEFT + (PANEL_WIDTH * (ns - filled.from)) / Math.max(filled.to - filled.from, 1);
  const high = (/** @type {number} */ nbytes) => (PANEL_HEIGHT * nbytes) / most;
  const drawn = [];
  let foot = PANEL_HEIGHT;
  for (const kind of kinds.filter((one) => parts[one] && one !== "activations")) {
    const tall = high(parts[kind]);
    drawn.push(s("rect", { x: PANEL_LEFT, y: foot - tall, width: PANEL_WIDTH, height: tall, class: `area fill${kinds.indexOf(kind) % 6}` }, s("title", {}, `${kind}: ${showBytes(parts[kind])}`)),
      tall >= NAMED ? s("text", { x: PANEL_LEFT + 8, y: foot - tall / 2 + 4 }, `${kind} ${showBytes(parts[kind])}`) : null);
    foot -= tall;
  }
  const points = at.map((ns, i) => `${x(ns).toFixed(1)} ${(foot - share[i] * high(parts.activations)).toFixed(1)}`);
  const words = `activations: at most ${showBytes(parts.activations)}`;
  drawn.push(s("path", { d: `M${x(at[0]).toFixed(1)} ${foot.toFixed(1)}L${points.join("L")}L${x(at[at.length - 1]).toFixed(1)} ${foot.toFixed(1)}z`,
    class: `area fill${kinds.indexOf("activations") % 6}` }, s("title", {}, words)));
  const peak = at[share.indexOf(Math.max(...share))];
  if (high(parts.activations) >= NAMED) drawn.push(s("text", { x: Math.min(Math.max(x(peak), PANEL_LEFT + 110), PANEL_LEFT + PANEL_WIDTH - 110), y: foot - 4, class: "middle" }, `activations up to ${showBytes(parts.activations)}`));
  const scale = [0, most / 2, most].map((nbytes) => s("text", { x: PANEL_LEFT - 8, y: PANEL_HEIGHT - high(nbytes) + 4, class: "end" }, nbytes ? showBytes(nbytes) : "0"));
  const times = [filled.from, (filled.from + filled.to) / 2, filled.to].map((ns, i) => s("text", { x: x(ns), y: PANEL_HEIGHT + 18, class: ["", "middle", "end"][i] }, showNs(ns)));
  return s("svg", { viewBox: `0 -8 ${PANEL_LEFT + PANEL_WIDTH + 8} ${PANEL_HEIGHT + 32}`, class: "filled", role: "img",
    "aria-label": `Memory of ranks ${showRanks(ranks)}: ${kinds.filter((one) => parts[one]).map((one) => `${one} ${showBytes(parts[one])}`).join(", ")}` },
  s("rect", { x: PANEL_LEFT, y: 0, width: PANEL_WIDTH, height: PANEL_HEIGHT, class: "ground" }), ...drawn, ...scale, ...times);
}
