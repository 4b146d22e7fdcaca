/** Input for the timeline: mouse, touch pad and keys. */

import { h } from "./dom.js";
import { AXIS } from "./drawing.js";

/** Keys and their actions, as the page lists them. @type {[string[], string][]} */
export const KEYS = [
  [["+", "-"], "zoom in, zoom out"], [["0"], "show the whole run"], [["f"], "zoom to the selected call"],
  [["ArrowLeft", "ArrowRight"], "move in time"], [["ArrowUp", "ArrowDown"], "select a call on the rank above, below"],
  [["[", "]"], "previous, next call on this rank"], [["m"], "next call of the same match"],
  [[",", "."], "step back, step forward: to the next instant at which a call starts or ends"],
  [["/"], "search"], [["n", "N"], "next, previous search result"],
  [["g"], "fold or unfold identical ranks"], [["Enter"], "describe the selected call"], [["Escape"], "clear the selection"],
  [["?"], "show this list"],
];

/** @typedef {import("./timeline.js").Timeline} Timeline */
/** @typedef {import("./model.js").Model} Model */

/**
 * The wheel zooms with Ctrl (or a pinch) and pans with Shift. Alone, it scrolls the ranks if they do not all fit, else the page.
 * @param {Timeline} timeline
 */
export function listen(timeline) {
  const { canvas } = timeline;
  canvas.addEventListener("wheel", (event) => wheel(timeline, event), { passive: false });
  canvas.addEventListener("pointerdown", (event) => press(timeline, event));
  canvas.addEventListener("pointermove", (event) => {
    if (!event.buttons) timeline.hint(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointerleave", () => { timeline.tip.hidden = true; });
  canvas.addEventListener("dblclick", (event) => {
    const found = timeline.under(event.offsetX, event.offsetY);
    if (found) timeline.closer();
    else timeline.zoom(4, timeline.time(event.offsetX));
  });
}

/**
 * @param {Timeline} timeline
 * @param {WheelEvent} event
 */
function wheel(timeline, event) {
  const width = timeline.canvas.clientWidth;
  if (event.ctrlKey || event.metaKey) timeline.zoom(Math.exp(-event.deltaY * 0.004), timeline.time(event.offsetX));
  else if (event.shiftKey) timeline.pan((event.deltaY + event.deltaX) / width);
  else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) timeline.pan(event.deltaX / width);
  else {
    const before = timeline.scroll;
    timeline.scrollTo(before + event.deltaY);
    if (timeline.scroll === before) return; // the page moves
  }
  timeline.tip.hidden = true;
  event.preventDefault();
}

/**
 * Dragging pans the picture; dragging on the axis selects a stretch of time; a click selects a call.
 * @param {Timeline} timeline
 * @param {PointerEvent} event
 */
function press(timeline, event) {
  if (event.button !== 0) return;
  const { canvas } = timeline;
  const from = { x: event.offsetX, y: event.offsetY, view: timeline.view, scroll: timeline.scroll };
  const onAxis = from.y < AXIS;
  let moved = false;
  canvas.setPointerCapture(event.pointerId);
  timeline.tip.hidden = true;
  const move = (/** @type {PointerEvent} */ to) => {
    const [dx, dy] = [to.offsetX - from.x, to.offsetY - from.y];
    moved ||= Math.abs(dx) + Math.abs(dy) > 4;
    if (!moved || onAxis) return;
    const perPixel = (from.view.to - from.view.from) / (canvas.clientWidth - timeline.gutter);
    timeline.show({ from: from.view.from - dx * perPixel, to: from.view.to - dx * perPixel });
    timeline.scrollTo(from.scroll - dy);
  };
  const end = (/** @type {PointerEvent} */ to) => {
    canvas.removeEventListener("pointermove", move);
    canvas.removeEventListener("pointerup", end);
    canvas.removeEventListener("pointercancel", end);
    if (onAxis && moved) stretch(timeline, from.x, to.offsetX);
    else if (onAxis) timeline.model.look(timeline.time(from.x));
    else if (!moved) pick(timeline, from.x, from.y);
  };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
}

/**
 * @param {Timeline} timeline
 * @param {number} a
 * @param {number} b
 */
function stretch(timeline, a, b) {
  timeline.show({ from: timeline.time(Math.min(a, b)), to: timeline.time(Math.max(a, b)) });
}

/**
 * @param {Timeline} timeline
 * @param {number} x
 * @param {number} y
 */
function pick(timeline, x, y) {
  const found = timeline.under(x, y);
  if (found) timeline.model.choose(found.run, found.row);
  else timeline.model.choose(0, -1);
}

/**
 * Selects the rank above or below, and its call at this instant.
 * @param {Timeline} timeline
 * @param {number} direction
 */
export function toRank(timeline, direction) {
  const { model, lines } = timeline;
  const { run, row } = model.chosen;
  const at = row < 0 ? -direction : timeline.lineOf(run, model.runs[run].rank[row]);
  const line = Math.min(Math.max(row < 0 ? 0 : at + direction, 0), lines.length - 1);
  const { run: index, ranks } = lines[line];
  const found = model.runs[index];
  const moment = model.now >= 0 ? model.now : timeline.view.from;
  let best = -1;
  for (let i = found.first[ranks[0]]; i < found.first[ranks[0] + 1]; i += 1) {
    const start = found.started[i] >= 0 ? found.started[i] : found.posted[i];
    if (found.posted[i] >= 0 && (best < 0 || start <= moment)) best = i;
  }
  if (best >= 0) model.choose(index, best);
}

/**
 * Keys of the whole page. A control that handles a key itself keeps it.
 * @param {Timeline} timeline
 * @param {{search: () => void, tell: () => void, keys: () => void}} page
 */
export function listenKeys(timeline, page) {
  const { model } = timeline;
  /** @type {Record<string, () => void>} */
  const anywhere = {
    "+": () => timeline.zoom(1.5), "=": () => timeline.zoom(1.5), "-": () => timeline.zoom(1 / 1.5),
    0: () => timeline.show({ from: 0, to: model.end * 1.02 }), f: () => timeline.closer(), "[": () => model.besides(-1), "]": () => model.besides(1),
    m: () => model.mate(), ",": () => model.step(-1), ".": () => model.step(1), "/": page.search, n: () => model.nextHit(1),
    N: () => model.nextHit(-1), g: () => model.fold(!model.folded), Escape: () => model.choose(0, -1), "?": page.keys,
  };
  /** @type {Record<string, () => void>} */
  const onCanvas = {
    ArrowLeft: () => timeline.pan(-0.15), ArrowRight: () => timeline.pan(0.15), ArrowUp: () => toRank(timeline, -1),
    ArrowDown: () => toRank(timeline, 1), Enter: page.tell, Home: () => timeline.show({ from: 0, to: model.end * 1.02 }),
  };
  document.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || target.closest("input, select, textarea, dialog")) return;
    const act = (target === timeline.canvas ? onCanvas[event.key] : undefined) ?? anywhere[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  });
}

/** The dialog that lists all keys. */
export function keysDialog() {
  const dialog = /** @type {HTMLDialogElement} */ (h("dialog", { "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keyboard shortcuts"),
    h("dl", { class: "keys" }, ...KEYS.flatMap(([keys, what]) => [
      h("dt", {}, ...keys.map((key) => h("kbd", {}, ARROWS[key] ?? key))), h("dd", {}, what)])),
    h("p", { class: "grey" }, "The address of the page holds the view, the selected call and the search: copy it to show them to others. Mouse: drag to move, drag on the axis to zoom to a stretch, Ctrl and the wheel to zoom, Shift and the wheel "
      + "to move, double click for a call. Arrow keys and Enter need the timeline to be in focus (Tab)."),
    h("form", { method: "dialog" }, h("button", {}, "Close"))));
  return dialog;
}

/** @type {Record<string, string>} */
const ARROWS = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc" };
