/**
 * The view of the timeline, the selected call and the search as the fragment of the page's address, so that a copied address restores them.
 * `#time=0-1200;call=0.3.17.-1;find=rank:3`. The call is its run, rank, position and part.
 */

import { rowAt } from "./calls.js";

/** The address follows changes after this pause, in ms: browsers limit the number of changes. */
const PAUSE = 250;

/** @typedef {import("./timeline.js").Timeline} Timeline */

/**
 * @param {Timeline} timeline
 * @returns {string} empty for the view that the page starts with
 */
export function fragmentOf(timeline) {
  const { model, view } = timeline;
  /** @type {string[]} */
  const parts = [];
  if (view.from > 0 || view.to < model.end) parts.push(`time=${Math.round(view.from)}-${Math.round(view.to)}`);
  const { run: index, row } = model.chosen;
  const run = model.runs[index];
  if (row >= 0) parts.push(`call=${[index, run.rank[row], run.position[row], run.part[row]].join(".")}`);
  if (model.sought) parts.push(`find=${encodeURIComponent(model.sought)}`);
  return parts.join(";");
}

/**
 * Restore what a fragment names. Unknown and damaged parts are ignored: anybody may edit an address.
 * @param {Timeline} timeline
 * @param {string} fragment
 */
export function restore(timeline, fragment) {
  const { model } = timeline;
  const parts = new Map(fragment.replace(/^#/, "").split(";").filter((part) => part.includes("=")).map((part) => /** @type {[string, string]} */ ([part.slice(0, part.indexOf("=")), part.slice(part.indexOf("=") + 1)])));
  const [, index, rank, position, part] = /^(\d+)\.(\d+)\.(\d+)\.(-?\d+)$/.exec(parts.get("call") ?? "") ?? [];
  const run = model.runs[Number(index ?? -1)];
  const row = run ? rowAt(run, Number(rank), Number(position), Number(part)) : -1;
  if (row >= 0) model.choose(Number(index), row);
  const find = parts.get("find");
  if (find !== undefined) model.find(decoded(find));
  const [, from, to] = /^(\d+)-(\d+)$/.exec(parts.get("time") ?? "") ?? [];
  if (from !== undefined && Number(to) > Number(from)) timeline.show({ from: Number(from), to: Number(to) });
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

/**
 * Restore the view of the address, and keep the address up to date.
 * @param {Timeline} timeline
 */
export function keepInAddress(timeline) {
  restore(timeline, window.location.hash);
  if (fragmentOf(timeline)) document.getElementById("timeline")?.scrollIntoView({ block: "start" });
  let written = fragmentOf(timeline);
  let timer = 0;
  const write = () => {
    const fragment = fragmentOf(timeline);
    if (fragment === written) return;
    written = fragment;
    window.history.replaceState(null, "", `#${fragment}`);
  };
  const later = () => {
    window.clearTimeout(timer);
    timer = window.setTimeout(write, PAUSE);
  };
  timeline.model.on(later);
  timeline.moved = later;
  window.addEventListener("hashchange", () => restore(timeline, window.location.hash));
}
