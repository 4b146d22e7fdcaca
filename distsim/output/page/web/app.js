/** The report page: builds all sections, in the order in which readers ask questions. */

import { animationView } from "./animate.js";
import { compareView } from "./compareview.js";
import { bandwidth, flightCurve } from "./curveview.js";
import { runOf, unpack } from "./decode.js";
import { detailsPanel } from "./details.js";
import { button, h, replace, section } from "./dom.js";
import { findingsList, firstPlace, sourceView } from "./findings.js";
import { plural, shortened, showRanks } from "./format.js";
import { groupsView, trafficView } from "./groupview.js";
import { longestWaitsTable, speedupsTable } from "./helps.js";
import { keysDialog, listen, listenKeys } from "./input.js";
import { memoryView } from "./memoryview.js";
import { Model } from "./model.js";
import { breakdownTable, collectivesTable, pathTable, ranksTable, stepsTable, valuesTable } from "./numbers.js";
import { keepInAddress } from "./address.js";
import { overview } from "./overview.js";
import { presentPanel } from "./present.js";
import { hitWords } from "./search.js";
import { Timeline } from "./timeline.js";
import { waitGraph } from "./waitgraph.js";

/**
 * The figures at the head of the page.
 * @param {Head} head
 * @param {string} side
 */
function figures(head, side) {
  if (!head.figures.length) return null;
  return h("dl", { class: "figures", "aria-label": `${side}Key figures` }, ...head.figures.map(([name, value, meaning]) => h("div", {},
    h("dt", {}, side, name), h("dd", {}, h("strong", {}, value), h("span", { class: "grey" }, meaning)))));
}

/** @param {Model} model */
function summary(model) {
  return h("div", { class: "summary" }, ...model.runs.map((run, index) => {
    const { head } = run;
    const nodes = head.nodes > 1 ? `${head.nodes} nodes of ${head.local}` : "1 node";
    const side = model.runs.length > 1 ? `${"AB"[index]}: ` : "";
    return h("div", {}, head.about && h("p", { dir: "auto" }, side, head.about), figures(head, side),
      h("p", {}, `${head.about ? "" : side}${plural(head.world, "rank")} on ${nodes}, backend ${head.backend || "unknown"}, cluster ${head.cluster || "unknown"}; ${plural(run.count, "call")}${run.like ? ` on ${plural(run.shown.length, "representative rank")}, each of which stands for identical ranks` : ""}`
        + `. ${head.note}`),
      head.cost && !head.note && h("p", { class: "grey" }, `Hardware model ${head.cost.name}: ${head.cost.band}.`),
      head.profiles.length > 0 && h("ul", { class: "plain" }, ...head.profiles.map(([name, outcome, possible, ranks]) => h("li", {}, h("strong", {}, `${name} `),
        outcome, possible.length > 1 ? `, or ${possible.filter((o) => o !== outcome).join(", ")}` : "", ranks.length ? `; ranks ${showRanks(ranks)}` : ""))),
      head.source === "recorded" && head.ended.length > 0 && h("ul", { class: "plain" }, ...head.ended.map((line) => h("li", {}, line))));
  }));
}

/**
 * The buttons above the timeline.
 * @param {Model} model
 * @param {Timeline} timeline
 * @param {HTMLDialogElement} keys
 */
function tools(model, timeline, keys) {
  const pressed = (/** @type {string} */ label, /** @type {string} */ title, /** @type {() => boolean} */ flip, /** @type {boolean} */ on) => {
    const one = button(label, title, () => one.setAttribute("aria-pressed", String(flip())), { "aria-pressed": String(on) });
    return one;
  };
  const fold = pressed("fold identical", "Draw identical ranks as one line (g)", () => { model.fold(!model.folded); return model.folded; }, model.folded);
  model.on((what) => { if (what === "rows") fold.setAttribute("aria-pressed", String(model.folded)); });
  return h("div", { class: "bar-of-buttons", role: "toolbar", "aria-label": "Timeline" },
    button("+", "Zoom in (+)", () => timeline.zoom(2)), button("−", "Zoom out (-)", () => timeline.zoom(0.5)),
    button("all", "Show the whole run (0)", () => timeline.show({ from: 0, to: model.end * 1.02 })), button("call", "Zoom to the selected call (f)", () => timeline.closer()),
    button("‹", "Move back in time (←)", () => timeline.pan(-0.4)), button("›", "Move forward in time (→)", () => timeline.pan(0.4)),
    button("⇕", "Taller lines", () => timeline.taller(1.4)), button("≡", "Shorter lines", () => timeline.taller(1 / 1.4)), fold,
    pressed("critical path", "Show the critical path", () => { timeline.showPath = !timeline.showPath; timeline.draw(); return timeline.showPath; }, true),
    pressed("messages", "Show messages (if there are few enough)", () => { timeline.showArrows = !timeline.showArrows; timeline.draw(); return timeline.showArrows; }, true),
    button("keys", "Keyboard shortcuts (?)", () => keys.showModal()));
}

/** @param {Model} model */
function searchBar(model) {
  const input = /** @type {HTMLInputElement} */ (h("input", { type: "search", placeholder: "send, rank:3, line:24, tensor:x …",
    "aria-label": "Search calls by operation, rank, group, tensor or line", size: 30 }));
  const count = h("output", { "aria-live": "polite" });
  input.addEventListener("input", () => model.find(input.value));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") model.nextHit(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") {
      input.value = "";
      model.find("");
      input.blur();
    }
  });
  model.on((what) => {
    if (what !== "search" && what !== "choice") return;
    if (input.value !== model.sought) input.value = model.sought;
    const hits = model.hits.flatMap((rows, run) => (rows ?? []).map((row) => ({ run, row })));
    const at = hits.findIndex((hit) => hit.run === model.chosen.run && hit.row === model.chosen.row);
    count.textContent = model.hits.every((rows) => rows === null) ? "" : at < 0 ? plural(hits.length, "call") : `${at + 1} of ${hits.length}: ${hitWords(model.runs[hits[at].run], hits[at].row)}`;
  });
  const find = (/** @type {string} */ text) => model.find(text);
  const box = h("div", { class: "search", role: "search" }, input, button("‹", "Previous result (N)", () => model.nextHit(-1)), button("›", "Next result (n)", () => model.nextHit(1)), count);
  return { box, find, focus: () => input.focus() };
}

/**
 * The fills that occur in the timeline, and their meanings.
 * @param {Model} model
 */
function legend(model) {
  const kinds = [["compute", "compute"], ["comm", "communication"], ["wait", "waiting"], ["sleep", "sleep"], ["stuck", "blocked"]];
  const used = new Set(model.lanes.flat(2).flatMap((lane) => [...new Set(lane.kind)]));
  const path = model.runs.some((run) => run.path.row.length > 0);
  return h("p", { class: "legend" }, ...kinds.filter((_, kind) => used.has(kind)).map(([name, words]) => h("span", {}, h("i", { class: `sample ${name}` }), words)),
    path && h("span", {}, h("i", { class: "sample path" }), "critical path"));
}

/** @param {Model} model */
function themeSwitch(model) {
  const choice = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "Colours", title: "Colours" },
    ...[["", "system theme"], ["light", "light"], ["dark", "dark"]].map(([value, words]) => h("option", { value }, words))));
  choice.addEventListener("change", () => {
    document.documentElement.dataset.theme = choice.value;
    model.tell("theme");
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => model.tell("theme"));
  return choice;
}

/**
 * @param {Model} model
 * @param {Timeline} timeline
 */
function body(model, timeline) {
  const keys = keysDialog();
  const find = searchBar(model);
  const toTimeline = () => document.getElementById("timeline")?.scrollIntoView({ block: "start" });
  const view = sourceView(model.data, (line) => { find.find(`line:${line}`); toTimeline(); });
  const first = firstPlace(model);
  if (first) view.show(first.file, first.line);
  const source = (/** @type {string} */ file, /** @type {number} */ line) => {
    if (view.show(file, line)) document.getElementById("findings")?.scrollIntoView({ block: "nearest" });
    find.find(`line:${line}`);
  };
  const details = detailsPanel(model, { source, line: find.find });
  listen(timeline);
  listenKeys(timeline, { search: find.focus, tell: () => details.focus(), keys: () => keys.showModal() });
  const { comparison } = model.data;
  const each = (/** @type {(run: Run, index: number) => Node | null} */ make) => model.runs.map((run, index) => make(run, index)).filter((one) => one !== null);
  const animations = model.runs[0].head.animations;
  const curves = model.runs.flatMap((run) => run.head.curves ?? []).slice(0, 6);
  const waits = each((_, index) => waitGraph(model, index));
  const memory = each((run) => memoryView(run));
  const steps = each((_, index) => stepsTable(model, index, (from, to) => { timeline.show({ from, to }); toTimeline(); }));
  const values = each((_, index) => valuesTable(model, index));
  const paths = each((_, index) => pathTable(model, index));
  const breakdown = breakdownTable(model);
  const helps = [...each((_, index) => longestWaitsTable(model, index)), ...each((_, index) => speedupsTable(model, index))];
  const collectives = collectivesTable(model);
  const flight = flightCurve(model);
  return [
    section("overview", "The run", "", summary(model)),
    comparison && section("comparison", "Comparison of A and B", "", compareView(comparison)),
    section("findings", "Findings", "", h("div", { class: "beside" }, findingsList(model, source), view.box)),
    waits.length > 0 && section("waits", "Wait-for graph", "", ...waits),
    section("timeline", "Timeline", "", h("div", { class: "top" }, tools(model, timeline, keys), find.box),
      h("div", { class: "frame" }, h("div", { class: "left" }, overview(model, timeline), timeline.box, legend(model)), details)),
    section("step", "Step by step", "", presentPanel(model)),
    breakdown && section("breakdown", "Where the time goes", "Shares of the time of all ranks.", breakdown),
    helps.length > 0 && section("helps", "What would help", "", ...helps),
    steps.length > 0 && section("steps", "Steps", "Consecutive identical steps share a row. Click a row to show its first step.", ...steps),
    paths.length > 0 && section("path", "Critical path", "", ...paths),
    section("ranks", "Ranks", "Compute: the device or the host works. Exposed: communication without compute. Waiting: blocked in a call before its peers arrive.", ranksTable(model)),
    (collectives || flight) && section("collectives", "Collectives and bandwidth", collectives ? "algbw and busbw as defined by nccl-tests." : "", collectives,
      curves.length > 0 && bandwidth(model, curves), flight && h("h3", {}, "Bytes in flight"), flight),
    memory.length > 0 && section("memory", "Memory", "", ...memory),
    values.length > 0 && section("values", "Values", "", ...values),
    section("groups", "Nodes, ranks and groups", "", ...each((run, i) => (i === 0 ? groupsView(run) : null)), ...each((run) => trafficView(run))),
    animations.length > 0 && section("rounds", "Collective algorithms, round by round", "", animationView(animations)), keys,
  ];
}

/** @param {Element} page */
function navigation(page) {
  const links = [...page.querySelectorAll("section[id]")].map((one) => h("a", { href: `#${one.id}` }, shortened(one.querySelector("h2")?.textContent ?? "", 40)));
  return h("nav", { "aria-label": "Sections of the report" }, ...links);
}

async function start() {
  const page = /** @type {HTMLElement} */ (document.getElementById("page"));
  const text = document.getElementById("data")?.textContent ?? "";
  try {
    const { data, columns } = await unpack(text);
    const model = new Model(data, data.runs.map((head, i) => runOf(i, head, columns)));
    const timeline = new Timeline(model);
    replace(page, ...body(model, timeline));
    document.querySelector(".outcomes")?.prepend(h("a", { class: "skip", href: "#page" }, "Skip to the report"));
    page.prepend(h("div", { class: "head" }, navigation(page), themeSwitch(model)));
    keepInAddress(timeline);
    Object.assign(window, { distsim: { model, timeline } });
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    replace(page, h("p", { class: "failed" }, `This browser cannot show the report: ${error}. Use a browser of 2023 or later, or read the text report below.`));
    document.querySelectorAll("details.plain").forEach((one) => one.setAttribute("open", ""));
    throw error;
  }
}

start();
