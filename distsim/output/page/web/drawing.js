/** Everything drawn over the lanes of the timeline: axis, names, labels, arrows, critical path and selection. */

import { callWords, isCompute, opOf } from "./calls.js";
import { showMoment, showRanks } from "./format.js";
import { lowest, reaching } from "./lanes.js";
import { ticks } from "./viewport.js";

/** Height of the time axis, and the height from which on a rank's lanes are drawn below each other. In pixels. */
export const AXIS = 24;
export const APART = 30;
/** The width from which on a span has a label, in pixels. */
export const WIDE = 34;
const MOST_ARROWS = 300;
const HANG_WORDS = "▸ hang: no more progress";

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {CanvasRenderingContext2D} context
 */
export function drawAxis(t, context) {
  const width = t.box.clientWidth;
  const { step, at } = ticks(t.view, width - t.gutter, 110);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const hang = hangLabel(t, context);
  for (const time of at) {
    const x = Math.round(t.x(time)) + 0.5;
    context.strokeStyle = t.line ?? "";
    context.globalAlpha = 0.5;
    context.beginPath();
    context.moveTo(x, AXIS - 5);
    context.lineTo(x, t.box.clientHeight);
    context.stroke();
    context.globalAlpha = 1;
    context.fillStyle = t.grey ?? "";
    const words = time ? showMoment(time, step) : "0";
    const isHidden = hang !== null && x + 3 < hang.right && x + 9 + context.measureText(words).width > hang.left;
    if (x < width - 70 && !isHidden) context.fillText(words, x + 3, 11);
  }
  if (hang === null) return;
  context.fillStyle = t.critical ?? "";
  context.fillText(HANG_WORDS, hang.left + 3, 11);
}

/**
 * Where the axis says that the run hangs; null if that place is not visible.
 * @param {import("./timeline.js").Timeline} t
 * @param {CanvasRenderingContext2D} context
 */
function hangLabel(t, context) {
  const { head, end } = t.model.runs[0];
  if (end <= head.makespan) return null;
  const left = t.x(head.makespan);
  const right = left + context.measureText(HANG_WORDS).width + 9;
  return left >= t.gutter && right <= t.box.clientWidth ? { left, right } : null;
}

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {CanvasRenderingContext2D} context
 */
export function drawNames(t, context) {
  const { first, last } = t.seen();
  const chosen = t.lineOf(t.model.chosen.run, Math.max(0, t.rankOf(t.model.chosen)));
  context.save();
  context.beginPath();
  context.rect(0, AXIS, t.box.clientWidth, t.box.clientHeight - AXIS);
  context.clip();
  for (let line = first; line < last; line += 1) {
    const { run, ranks } = t.lines[line];
    const y = t.y(line);
    const mark = t.model.chosen.row >= 0 && line === chosen;
    context.fillStyle = (mark ? t.accent : t.ink) ?? "";
    context.font = `${mark ? "bold " : ""}12px system-ui, sans-serif`;
    const side = t.model.runs.length > 1 ? `${"AB"[run]} ` : "";
    const words = ranks.length > 1 ? `${showRanks(ranks, 1)}` : String(ranks[0]);
    context.fillText(`${side}${words}`, 6, y + Math.min(t.height / 2, 16), t.gutter - 10);
    if (ranks.length > 1 && t.height >= 28) {
      context.fillStyle = t.grey ?? "";
      context.font = "11px system-ui, sans-serif";
      context.fillText(`× ${ranks.length} identical`, 6, y + Math.min(t.height / 2, 16) + 14, t.gutter - 10);
    }
    context.fillStyle = t.line ?? "";
    context.fillRect(0, Math.round(y + t.height) - 1, t.box.clientWidth, 1);
  }
  context.restore();
}

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {CanvasRenderingContext2D} context
 * @param {{run: number, lane: Lane, i: number, line: number, k: number}[]} labels
 */
export function drawWords(t, context, labels) {
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  for (const { run, lane, i, line, k } of labels) {
    const left = Math.max(t.x(lane.start[i]), t.gutter);
    const right = Math.min(t.x(lane.end[i]), t.box.clientWidth);
    const place = t.lane(k);
    const marks = t.model.marks[run];
    if (right - left < WIDE || (marks && !marks[lane.row[i]])) continue;
    const words = fitting(context, callWords(t.model.runs[run], lane.row[i]), right - left - 8);
    if (!words) continue;
    const y = t.y(line) + place.top + place.height / 2 + 1;
    const long = Math.min(context.measureText(words).width, right - left - 8);
    if (lane.kind[i] > 0) {
      context.fillStyle = t.label ?? "";
      context.fillRect(left + 3, y - 7, long + 4, 13);
    }
    context.fillStyle = lane.kind[i] > 0 ? t.ink ?? "" : t.inkOnCompute ?? "";
    context.fillText(words, left + 5, y);
  }
}

/**
 * As much of a text as fits; empty if fewer than four letters fit.
 * @param {CanvasRenderingContext2D} context
 * @param {string} text
 * @param {number} room
 */
function fitting(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = [...text.slice(0, 200)];
  let n = Math.min(letters.length, Math.floor(room / 4));
  while (n > 3 && context.measureText(`${letters.slice(0, n).join("")}…`).width > room) n -= 1;
  return n > 3 ? `${letters.slice(0, n).join("")}…` : "";
}

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {CanvasRenderingContext2D} context
 */
export function drawArrows(t, context) {
  const { first, last } = t.seen();
  t.messages.forEach((lane, index) => {
    const run = t.model.runs[index];
    const [from, to] = reaching(lane, t.view.from, t.view.to);
    if (to - from > MOST_ARROWS * 4) return;
    const found = [];
    for (let i = from; i < to && found.length <= MOST_ARROWS; i += 1) {
      const lines = [lane.row[i], lane.to[i]].map((row) => t.lineOf(index, run.rank[row]));
      if (Math.max(...lines) >= first && Math.min(...lines) < last) found.push({ i, lines });
    }
    if (found.length > MOST_ARROWS) return;
    context.strokeStyle = t.grey ?? "";
    context.lineWidth = 1;
    context.globalAlpha = found.length > 80 ? 0.35 : 0.7;
    for (const { i, lines } of found) drawArrow(t, context, lane.start[i], lines[0], lane.end[i], lines[1]);
    context.globalAlpha = 1;
  });
}

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {CanvasRenderingContext2D} context
 * @param {number} start
 * @param {number} from
 * @param {number} end
 * @param {number} to
 */
function drawArrow(t, context, start, from, end, to) {
  const middle = t.height < APART ? t.height / 2 : t.lane(1).top + t.lane(1).height / 2;
  const [x0, y0, x1, y1] = [t.x(start), t.y(from) + middle, t.x(end), t.y(to) + middle];
  const angle = Math.atan2(y1 - y0, x1 - x0);
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  for (const turn of [0.5, -0.5]) {
    context.moveTo(x1, y1);
    context.lineTo(x1 - 6 * Math.cos(angle + turn), y1 - 6 * Math.sin(angle + turn));
  }
  context.stroke();
}

/**
 * The critical path as a line below its calls. If its pieces are too narrow to follow, it is a line below each rank that it is on, without
 * jumps between ranks.
 * @param {import("./timeline.js").Timeline} t
 * @param {CanvasRenderingContext2D} context
 */
export function drawPath(t, context) {
  context.strokeStyle = t.critical ?? "";
  context.lineWidth = 2;
  context.lineJoin = "round";
  t.model.runs.forEach((run, index) => {
    const { start, end } = run.path;
    const from = Math.max(0, lowest(end, t.view.from) - 1);
    const to = lowest(start, t.view.to);
    const scale = (t.box.clientWidth - t.gutter) / (t.view.to - t.view.from);
    const zero = t.gutter - t.view.from * scale;
    const dense = to - from > (t.box.clientWidth - t.gutter) / 8;
    context.beginPath();
    let [lastX, lastY] = [-Infinity, -1];
    for (let i = from; i < to; i += 1) {
      const x0 = zero + start[i] * scale;
      const x1 = zero + end[i] * scale;
      const y = pathY(t, index, i, dense);
      if (dense && x1 - lastX < 1 && y === lastY) continue;
      if (dense || lastY < 0) context.moveTo(dense && y === lastY ? lastX : x0, y);
      else context.lineTo(x0, y);
      context.lineTo(dense ? Math.max(x1, x0 + 1) : x1, y);
      [lastX, lastY] = [x1, y];
    }
    context.stroke();
  });
}

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {number} index
 * @param {number} i
 * @param {boolean} dense
 */
function pathY(t, index, i, dense) {
  const run = t.model.runs[index];
  const { rank, row, why } = run.path;
  const top = t.y(t.lineOf(index, rank[i]));
  if (dense) return top + t.height - 3;
  const op = row[i] < 0 ? "" : opOf(run, row[i]);
  const lane = t.lane(why[i] === 3 && t.hosts ? 2 : isCompute(op) || op === "sleep" ? 0 : 1);
  return top + lane.top + lane.height;
}

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {CanvasRenderingContext2D} context
 */
export function drawChoice(t, context) {
  const { chosen, now } = t.model;
  if (now >= 0) {
    context.strokeStyle = t.accent ?? "";
    context.lineWidth = 1.5;
    context.setLineDash([5, 3]);
    context.beginPath();
    context.moveTo(t.x(now), AXIS);
    context.lineTo(t.x(now), t.box.clientHeight);
    context.stroke();
    context.setLineDash([]);
  }
  if (chosen.row < 0) return;
  const run = t.model.runs[chosen.run];
  context.strokeStyle = t.accent ?? "";
  const mates = t.model.walk(chosen.run).matches.of(chosen.row);
  for (const row of mates.length > 256 ? mates.subarray(0, 256) : mates) drawOutline(t, context, chosen.run, row, row === chosen.row ? 3 : 1.5);
  const message = t.messages[chosen.run];
  const i = [...mates].map((row) => message.row.indexOf(row)).find((at) => at >= 0);
  if (i !== undefined) {
    context.lineWidth = 2;
    drawArrow(t, context, message.start[i], t.lineOf(chosen.run, run.rank[message.row[i]]), message.end[i],
      t.lineOf(chosen.run, run.rank[message.to[i]]));
  }
}

/**
 * @param {import("./timeline.js").Timeline} t
 * @param {CanvasRenderingContext2D} context
 * @param {number} index
 * @param {number} row
 * @param {number} width
 */
function drawOutline(t, context, index, row, width) {
  const line = t.lineOf(index, t.model.runs[index].rank[row]);
  t.model.lanes[index][t.model.runs[index].rank[row]].forEach((lane, k) => {
    for (let i = lowest(lane.start, 0); i < lane.row.length; i += 1) {
      if (lane.row[i] !== row) continue;
      const place = t.lane(k);
      const [x0, x1] = [t.x(lane.start[i]), t.x(lane.end[i])];
      context.lineWidth = width;
      context.strokeRect(x0, t.y(line) + place.top + 1, Math.max(x1 - x0, 1), place.height);
    }
  });
}
