/** The findings, and next to them the source lines that they point to. */

import { button, h } from "./dom.js";
import { plural, shortened, showRanks } from "./format.js";

/** The largest number of places listed per finding. */
const MOST_PLACES = 12;

/** @typedef {import("./model.js").Model} Model */

/**
 * The source with one marked line; `show(file, line)` shows another line.
 * @param {Data} data
 * @param {(line: number) => void} onLine called if a line number is clicked
 */
export function sourceView(data, onLine) {
  const names = Object.keys(data.sources);
  const body = h("ol", { class: "lines", tabindex: 0, "aria-label": "Source" });
  const tabs = h("p", { class: "bar-of-buttons" });
  const box = h("div", { class: "source" }, tabs, body);
  /** @param {string} file */
  const draw = (file) => {
    tabs.replaceChildren(...names.map((name) => button(shortened(name, 50), `Show ${name}`, () => show(name, 0), {
      "aria-pressed": name === file ? "true" : "false", class: "quiet" })));
    const lines = data.sources[file].replace(/\n$/, "").split("\n");
    body.replaceChildren(...lines.map((text, i) => h("li", { "data-line": i + 1 },
      button(String(i + 1), `Find the calls of line ${i + 1}`, () => onLine(i + 1), { class: "lineno", tabindex: -1 }), h("code", { dir: "ltr" }, text || " "))));
    body.dataset.file = file;
  };
  /**
   * @param {string} file
   * @param {number} line
   */
  const show = (file, line) => {
    if (!(file in data.sources)) return false;
    if (body.dataset.file !== file) draw(file);
    body.querySelectorAll(".marked").forEach((before) => before.classList.remove("marked"));
    const found = /** @type {HTMLElement | null} */ (body.querySelector(`[data-line="${line}"]`));
    if (found) {
      found.classList.add("marked");
      body.scrollTop = found.offsetTop - body.offsetTop - body.clientHeight / 3;
    }
    return true;
  };
  if (names.length) show(names[0], 0);
  return { box: names.length ? box : h("p", { class: "grey" }, "The source file is not included in this report."), show };
}

/**
 * @param {Model} model
 * @param {(file: string, line: number) => void} source
 */
export function findingsList(model, source) {
  const order = ["error", "warning", "note"];
  const all = model.runs.flatMap((run, index) => run.head.findings.map((finding) => ({ finding, index })));
  all.sort((a, b) => order.indexOf(a.finding.severity) - order.indexOf(b.finding.severity));
  const more = model.runs.reduce((sum, run) => sum + run.head.more_findings, 0);
  if (!all.length) return h("p", { class: "none" }, "No findings.");
  return h("div", { class: "findings" }, ...all.map(({ finding, index }) => findingBox(model, index, finding, source)),
    more > 0 && h("p", { class: "grey" }, `and ${plural(more, "more finding")}; --format json lists all`));
}

/**
 * @param {Model} model
 * @param {number} index
 * @param {Finding} finding
 * @param {(file: string, line: number) => void} source
 */
function findingBox(model, index, finding, source) {
  const [head, ...rest] = finding.message.replaceAll(`${model.runs[index].head.file}:`, "line ").split("\n");
  const side = model.runs.length > 1 ? `${"AB"[index]} ` : "";
  const mark = { error: "✕", warning: "!", note: "i" }[finding.severity] ?? "";
  return h("article", { class: `finding ${finding.severity}` },
    h("h3", {}, h("span", { class: "mark", "aria-hidden": "true" }, mark), `${side}${finding.severity} ${finding.code}: `, h("bdi", {}, shortened(head, 400))),
    rest.length > 0 && h("pre", { tabindex: 0 }, rest.join("\n")), placesOf(model, index, finding, source),
    ...finding.help.map((text) => h("p", { class: "help" }, h("strong", {}, "help "), text.replaceAll(`${model.runs[index].head.file}:`, "line "))));
}

/**
 * @param {Model} model
 * @param {number} index
 * @param {Finding} finding
 * @param {(file: string, line: number) => void} source
 */
function placesOf(model, index, finding, source) {
  /** @type {Map<string, {file: string, line: number, op: string, ranks: number[]}>} */
  const places = new Map();
  for (const place of finding.places) {
    const key = `${place.file}:${place.line}:${place.op}`;
    const known = places.get(key) ?? { file: place.file, line: place.line, op: place.op, ranks: [] };
    if (place.rank !== null && !known.ranks.includes(place.rank)) known.ranks.push(place.rank);
    places.set(key, known);
  }
  const listed = [...places.values()];
  if (!listed.length) return null;
  return h("ul", { class: "plain" }, ...listed.slice(0, MOST_PLACES).map(({ file, line, op, ranks }) => {
    const where = file === model.runs[index].head.file ? `line ${line}` : `${shortened(file, 48)}:${line}`;
    const onRanks = ranks.length ? `, rank${ranks.length > 1 ? "s" : ""} ${showRanks(ranks.sort((a, b) => a - b))}` : "";
    return h("li", {}, line ? button(where, "Show this line and find its calls", () => source(file, line), { class: "quiet" }) : null, ` ${op}${onRanks}`);
  }), listed.length > MOST_PLACES && h("li", { class: "grey" }, `and ${plural(listed.length - MOST_PLACES, "more place")}`));
}

/**
 * The first line that a finding points to.
 * @param {Model} model
 */
export function firstPlace(model) {
  return model.runs.flatMap((run) => run.head.findings).flatMap((finding) => finding.places).find((place) => place.line > 0);
}
