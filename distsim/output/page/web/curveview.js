/** Bandwidth by message size, and bytes in flight over time: curves drawn by uPlot. */

import { moves } from "./calls.js";
import { colour, h } from "./dom.js";
import { plural, shortened, showBytes, showNs, showRate } from "./format.js";

/** Dashes that distinguish curves without colour. @type {number[][]} */
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [12, 4]];
const HEIGHT = 280;

/**
 * A plot that adapts to the width of its container and to the theme.
 * @param {import("./model.js").Model} model
 * @param {string} label
 * @param {(width: number) => {options: object, data: (number | null)[][]}} make
 */
function plot(model, label, make) {
  const box = h("div", { class: "plot", role: "img", "aria-label": label });
  /** @type {uPlot | null} */
  let made = null;
  let width = 0;
  const draw = () => {
    made?.destroy();
    const { options, data } = make(width);
    made = new uPlot(options, data, box);
  };
  new ResizeObserver(() => {
    if (Math.abs(box.clientWidth - width) < 2 || !box.clientWidth) return;
    width = box.clientWidth;
    if (made) made.setSize({ width, height: HEIGHT });
    else draw();
  }).observe(box);
  model.on((what) => { if (what === "theme" && made) draw(); });
  return box;
}

/** Round steps of bytes. */
const BYTE_STEPS = Array.from({ length: 50 }, (_, k) => 2 ** k);

/**
 * @param {string} label of a horizontal axis; a vertical axis has none
 * @param {(value: number) => string} show
 */
function axis(label, show) {
  return { ...(label ? { label, size: 34, labelSize: 20 } : { size: 78 }), stroke: colour("--ink"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") },
    font: "12px system-ui", labelFont: "12px system-ui", values: (/** @type {unknown} */ _, /** @type {(number | null)[]} */ values) => values.map((v) => (v === null ? "" : show(v))) };
}

/**
 * algbw or busbw of every collective by the size of its buffer; points: the calls of this run.
 * @param {import("./model.js").Model} model
 * @param {Curve[]} curves
 */
export function bandwidth(model, curves) {
  const strokes = ["--series-1", "--series-2", "--series-3", "--series-4", "--series-5", "--series-6"];
  let bus = true;
  const sizes = [...new Set(curves.flatMap((c) => [...c.sizes, ...c.points.map(([size]) => size)]))].sort((a, b) => a - b);
  const scaled = (/** @type {Curve} */ c) => (bus ? c.factor : 1);
  const chart = () => plot(model, "Bandwidth by message size", (width) => ({
    options: {
      width, height: HEIGHT, scales: { x: { distr: 3, time: false, log: 2 }, y: { distr: 1, range: (/** @type {unknown} */ _, /** @type {number} */ _low, /** @type {number} */ high) => [0, high * 1.05] } },
      axes: [{ ...axis("buffer size", showBytes), space: 70 }, axis("", (v) => `${v} GB/s`)],
      series: [{ label: "bytes", value: (/** @type {unknown} */ _, /** @type {number | null} */ v) => (v === null ? "-" : showBytes(v)) }, ...curves.flatMap((c, i) => [
        { label: curveName(c), stroke: colour(strokes[i]), width: 2, dash: DASHES[i], spanGaps: true, points: { show: false }, value: rate },
        ...edges(c, strokes[i]),
        { label: "this run", stroke: colour(strokes[i]), fill: colour(strokes[i]), paths: () => null, points: { show: true, size: 9 }, value: rate }])],
    },
    data: [sizes, ...curves.flatMap((c) => {
      const modelled = new Map(c.sizes.map((size, i) => [size, c.algbw[i] * scaled(c)]));
      const own = new Map(c.points.map(([size, gbs]) => [size, gbs * scaled(c)]));
      const within = (c.band ?? []).map((factors) => new Map(c.sizes.map((size, k) => [size, (c.algbw[k] * scaled(c)) / factors[k]])));
      return [modelled, ...within, own].map((of) => sizes.map((size) => of.get(size) ?? null));
    })],
  }));
  const place = h("div", {}, chart());
  const toggle = h("p", { class: "bar-of-buttons" }, ...[["busbw", true], ["algbw", false]].map(([name, value]) => {
    const element = h("button", { type: "button", "aria-pressed": String(value === bus), title: value ? "Bus bandwidth, comparable with the bandwidth of the links" : "Algorithm bandwidth: buffer size divided by time",
      onclick: () => {
        bus = value === true;
        toggle.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b === element)));
        place.replaceChildren(chart());
      } }, String(name));
    return element;
  }));
  const band = curves.some((c) => c.band) ? " 90 % of measured times are between the thin lines." : "";
  return h("div", {}, toggle, place, h("p", { class: "grey" }, `Lines: predicted. Dots: calls of this run.${band}`));
}

/**
 * The range of a curve as two thin lines.
 * @param {Curve} c
 * @param {string} stroke
 */
function edges(c, stroke) {
  return (c.band ?? []).map((_, k) => ({ label: k ? "lower bound" : "upper bound", stroke: colour(stroke), width: 0.6, dash: [2, 2], spanGaps: true, points: { show: false }, value: rate }));
}

/** @param {Curve} c */
function curveName(c) {
  return `${c.op}, ${plural(c.n, "rank")} on ${plural(c.nodes, "node")}`;
}

/**
 * @param {unknown} _
 * @param {number | null} gbs
 */
function rate(_, gbs) {
  return gbs === null ? "-" : showRate(gbs);
}

/**
 * Bytes in flight from each instant on: [time, bytes].
 * @param {Run} run
 */
export function bytesInFlight(run) {
  /** @type {Map<number, number>} */
  const change = new Map();
  const seen = new Set();
  for (let row = 0; row < run.count; row += 1) {
    if (!moves(run, row) || run.started[row] < 0 || run.finished[row] <= run.started[row] || !run.nbytes[row] || seen.has(run.match[row])) continue;
    seen.add(run.match[row]);
    change.set(run.started[row], (change.get(run.started[row]) ?? 0) + run.nbytes[row]);
    change.set(run.finished[row], (change.get(run.finished[row]) ?? 0) - run.nbytes[row]);
  }
  let now = 0;
  const found = [...change].sort((a, b) => a[0] - b[0]).map(([time, by]) => /** @type {[number, number]} */ ([time, (now += by)]));
  return found.length ? [/** @type {[number, number]} */ ([0, 0]), ...found] : [];
}

/** The largest number of points of a curve over time. Of a longer curve, the largest values remain. */
const MOST_POINTS = 4000;

/** @param {import("./model.js").Model} model */
export function flightCurve(model) {
  // A folded run has the transfers of representative ranks only: their sum would be wrong.
  const curves = model.runs.map((run) => (run.like ? [] : thinned(bytesInFlight(run), model.end)));
  if (!curves.some((c) => c.length)) return null;
  const times = [...new Set(curves.flatMap((c) => c.map(([time]) => time)))].sort((a, b) => a - b);
  const columns = curves.map((curve) => {
    let at = 0;
    let value = 0;
    return times.map((time) => {
      while (at < curve.length && curve[at][0] <= time) value = curve[at++][1];
      return value;
    });
  });
  const side = (/** @type {number} */ i) => (model.runs.length > 1 ? `${"AB"[i]}: ${shortened(model.runs[i].head.name, 30)}` : "in flight");
  return plot(model, "Bytes in flight over time", (width) => ({
    options: {
      width, height: HEIGHT, scales: { x: { time: false } }, axes: [axis("time", (v) => (v ? showNs(v) : "0")), { ...axis("", showBytes), incrs: BYTE_STEPS }],
      series: [{ label: "time", value: (/** @type {unknown} */ _, /** @type {number | null} */ v) => (v === null ? "-" : showNs(v)) }, ...columns.map((__, i) => ({
        label: side(i), stroke: colour(i ? "--series-2" : "--series-1"), fill: columns.length > 1 ? undefined : colour("--flight"), width: 1.5, dash: DASHES[i], points: { show: false },
        paths: stepped, value: (/** @type {unknown} */ _, /** @type {number | null} */ v) => (v === null ? "-" : showBytes(v)) }))],
    },
    data: [times, ...columns],
  }));
}

/**
 * @param {object} self
 * @param {number} series
 * @param {number} from
 * @param {number} to
 */
function stepped(self, series, from, to) {
  const made = /** @type {{paths: {stepped: (o: object) => (...a: unknown[]) => unknown}}} */ (/** @type {unknown} */ (uPlot)).paths.stepped({ align: 1 });
  return made(self, series, from, to);
}

/**
 * @param {[number, number][]} curve
 * @param {number} end
 */
function thinned(curve, end) {
  if (curve.length <= MOST_POINTS) return curve;
  const width = (end * 2) / MOST_POINTS;
  /** @type {Map<number, [number, number]>} */
  const best = new Map();
  for (const point of curve) {
    const bin = Math.floor(point[0] / width);
    const known = best.get(bin);
    if (!known || point[1] > known[1]) best.set(bin, point);
  }
  return [...best.values()].sort((a, b) => a[0] - b[0]);
}
