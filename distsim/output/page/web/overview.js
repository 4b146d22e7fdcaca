/** The whole run in one strip: the shares of all ranks' time, and the part that the timeline shows. */

import { COMM, COMPUTE, SLEEP } from "./calls.js";
import { ranksLike } from "./decode.js";
import { colour, h } from "./dom.js";

const BINS = 500;

/**
 * Shares of compute, exposed communication and waiting in each bin, over all ranks of all runs.
 * @param {import("./model.js").Model} model
 */
export function sharesOf(model) {
  const found = [0, 1, 2].map(() => new Float64Array(BINS));
  const width = model.end / BINS;
  let ranks = 0;
  const one = [0, 1, 2].map(() => new Float64Array(BINS));
  model.lanes.forEach((lanes, index) => {
    const run = model.runs[index];
    for (const rank of run.shown) {
      const three = lanes[rank];
      const many = ranksLike(run, rank).length;
      ranks += many;
      one.forEach((bins) => bins.fill(0));
      for (const lane of three) {
        for (let i = 0; i < lane.row.length; i += 1) {
          const kind = lane.kind[i];
          if (kind === SLEEP) continue;
          spread(one[kind === COMPUTE ? 0 : kind === COMM ? 1 : 2], lane.start[i], lane.end[i], width);
        }
      }
      for (let b = 0; b < BINS; b += 1) {
        const compute = Math.min(one[0][b], 1);
        const comm = Math.min(one[1][b], 1 - compute);
        found[0][b] += many * compute;
        found[1][b] += many * comm;
        found[2][b] += many * Math.min(one[2][b], 1 - compute - comm);
      }
    }
  });
  return found.map((bins) => bins.map((value) => value / Math.max(ranks, 1)));
}

/**
 * @param {Float64Array} bins
 * @param {number} start
 * @param {number} end
 * @param {number} width
 */
function spread(bins, start, end, width) {
  const last = Math.min(Math.floor(end / width), BINS - 1);
  for (let b = Math.floor(start / width); b <= last; b += 1) {
    bins[b] += Math.max(0, Math.min(end, (b + 1) * width) - Math.max(start, b * width)) / width;
  }
}

/**
 * @param {import("./model.js").Model} model
 * @param {import("./timeline.js").Timeline} timeline
 */
export function overview(model, timeline) {
  const canvas = /** @type {HTMLCanvasElement} */ (h("canvas", { class: "overview", "aria-hidden": "true", title: "Overview of the whole run: drag to pan" }));
  const shares = sharesOf(model);
  const strip = document.createElement("canvas");
  /** The size and theme for which the strip was drawn. */
  let drawn = "";
  const draw = () => {
    const dots = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const context = canvas.getContext("2d");
    if (!context || !width) return;
    const key = `${width} ${height} ${dots} ${timeline.back}`;
    if (key !== drawn) {
      [canvas.width, canvas.height] = [Math.round(width * dots), Math.round(height * dots)];
      drawStrip(strip, shares, canvas.width, canvas.height);
      drawn = key;
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(strip, 0, 0);
    context.setTransform(dots, 0, 0, dots, 0, 0);
    const scale = width / (model.end * 1.02);
    const [left, right] = [timeline.view.from * scale, timeline.view.to * scale];
    context.fillStyle = timeline.veil ?? "";
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.strokeStyle = timeline.accent ?? "";
    context.lineWidth = 2;
    context.strokeRect(left + 1, 1, Math.max(right - left - 2, 2), height - 2);
  };
  const go = (/** @type {PointerEvent} */ event) => {
    if (!event.buttons) return;
    const at = (event.offsetX / canvas.clientWidth) * model.end * 1.02;
    const half = (timeline.view.to - timeline.view.from) / 2;
    timeline.show({ from: at - half, to: at + half });
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); go(event); });
  canvas.addEventListener("pointermove", go);
  timeline.after = draw;
  return canvas;
}

/**
 * Draw the strip without the frame of the view.
 * @param {HTMLCanvasElement} strip
 * @param {Float64Array[]} shares
 * @param {number} width
 * @param {number} height
 */
function drawStrip(strip, shares, width, height) {
  [strip.width, strip.height] = [width, height];
  const context = strip.getContext("2d");
  if (!context) return;
  context.fillStyle = colour("--canvas");
  context.fillRect(0, 0, width, height);
  const fills = ["--compute", "--comm", "--wait"].map(colour);
  for (let x = 0; x < width; x += 1) {
    const bin = Math.min(BINS - 1, Math.floor((x / width) * 1.02 * BINS));
    let top = height;
    fills.forEach((fill, k) => {
      const size = (x / width) * 1.02 > 1 ? 0 : shares[k][bin] * (height - 2);
      context.fillStyle = fill;
      context.fillRect(x, top - size, 1, size);
      top -= size;
    });
  }
}
