/** Time and pixels: zoom, pan, ticks. */

/** The narrowest view, in ns. */
const NARROWEST = 20;

/**
 * The view moved and shrunk to fit into the run.
 * @param {View} view
 * @param {number} end
 * @returns {View}
 */
export function clamped(view, end) {
  const most = Math.max(end * 1.02, NARROWEST);
  const width = Math.min(Math.max(view.to - view.from, NARROWEST), most);
  const from = Math.min(Math.max(view.from, 0), Math.max(most - width, 0));
  return { from, to: from + width };
}

/**
 * Zoom by a factor (above 1: in) around an instant that keeps its place.
 * @param {View} view
 * @param {number} factor
 * @param {number} at
 * @param {number} end
 */
export function zoomed(view, factor, at, end) {
  const width = Math.max((view.to - view.from) / factor, NARROWEST);
  const share = (at - view.from) / (view.to - view.from);
  return clamped({ from: at - share * width, to: at + (1 - share) * width }, end);
}

/**
 * @param {View} view
 * @param {number} share of the view's width
 * @param {number} end
 */
export function panned(view, share, end) {
  const by = share * (view.to - view.from);
  return clamped({ from: view.from + by, to: view.to + by }, end);
}

/**
 * A view of a stretch of time with margins on both sides.
 * @param {number} from
 * @param {number} to
 * @param {number} end
 */
export function around(from, to, end) {
  const room = Math.max((to - from) * 0.4, NARROWEST / 2);
  return clamped({ from: from - room, to: to + room }, end);
}

/**
 * Round instants with about this distance.
 * @param {View} view
 * @param {number} width of the picture
 * @param {number} apart pixels
 */
export function ticks(view, width, apart) {
  const least = ((view.to - view.from) * apart) / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= least) ?? 10 * power;
  /** @type {number[]} */
  const found = [];
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) found.push(at);
  return { step, at: found };
}
