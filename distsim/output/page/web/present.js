/** The section "Step by step": the state of each rank at one instant, and the transfers in flight. */

import { STUCK, WAIT, callWords, isReceive, isSend, opOf } from "./calls.js";
import { ranksLike } from "./decode.js";
import { button, h, replace } from "./dom.js";
import { plural, shortened, showBytes, showMoment, showNs, showRanks } from "./format.js";
import { inFlight, lastCall, running } from "./moment.js";

/** The largest numbers of rows and of messages. */
const MOST_LINES = 24;
const MOST_MESSAGES = 12;

/** @param {import("./model.js").Model} model */
export function presentPanel(model) {
  const clock = h("output", { class: "clock" }, "no time selected");
  const body = h("div", { class: "present" });
  const draw = () => {
    clock.textContent = model.now < 0 ? "no time selected" : showMoment(model.now, 1);
    replace(body, ...(model.now < 0 ? [h("p", { class: "grey" }, "Press a step button, or click a call or the time axis. This section then shows the state of each rank at that time.")]
      : model.runs.map((run, index) => momentOf(model, run, index))));
  };
  model.on((what) => { if (what === "now" || what === "choice") draw(); });
  draw();
  return h("div", {}, h("p", { class: "bar-of-buttons" },
    button("start", "Go to the start", () => model.look(0)), button("‹ step", "Step back (,)", () => model.step(-1)), clock,
    button("step ›", "Step forward (.)", () => model.step(1)), button("end", "Go to the end", () => model.look(model.end))), body);
}

/**
 * @param {import("./model.js").Model} model
 * @param {Run} run
 * @param {number} index
 */
function momentOf(model, run, index) {
  const at = model.now;
  /** @type {Map<string, {ranks: number[], doing: string, held: [string, string, boolean][]}>} */
  const lines = new Map();
  for (const rank of run.shown) {
    const doing = doingOf(model, run, index, rank);
    const held = model.held(index).at(rank, at);
    const key = JSON.stringify([doing, held]);
    const line = lines.get(key);
    if (line) line.ranks.push(...ranksLike(run, rank));
    else lines.set(key, { ranks: [...ranksLike(run, rank)], doing, held });
  }
  const all = [...lines.values()];
  const values = all.some((line) => line.held.length);
  const side = model.runs.length > 1 ? `${"AB"[index]}: ` : "";
  return h("div", {}, h("table", {}, h("caption", {}, `${side}${plural(run.world, "rank")} at ${showMoment(at, 1)}`),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "rank"), h("th", { scope: "col" }, "activity"), values && h("th", { scope: "col" }, "values"))),
    h("tbody", {}, ...all.slice(0, MOST_LINES).map((line) => h("tr", {}, h("td", {}, showRanks(line.ranks.sort((a, b) => a - b))), h("td", {}, line.doing),
      values && h("td", { class: "held" }, ...line.held.map(([label, text, fresh]) => h("div", { class: fresh ? "fresh" : null },
        h("b", {}, shortened(label, 30)), " ", shortened(text, 70), fresh && h("span", { class: "tag" }, "new")))))))),
  all.length > MOST_LINES && h("p", { class: "grey" }, `and ${all.length - MOST_LINES} more rows`), flight(model, run, index));
}

/**
 * The activity of a rank: of its device and of its host.
 * @param {import("./model.js").Model} model
 * @param {Run} run
 * @param {number} index
 * @param {number} rank
 */
function doingOf(model, run, index, rank) {
  const at = model.now;
  const found = model.lanes[index][rank].flatMap((lane) => running(lane, at).map((i) => ({ row: lane.row[i], kind: lane.kind[i] })));
  const words = found.map(({ row, kind }) => {
    const what = callWords(run, row);
    return kind === STUCK ? `blocked in ${what}` : kind === WAIT ? `waits in ${what}` : what;
  });
  if (words.length) return [...new Set(words)].slice(0, 4).join("; ");
  const last = lastCall(run, rank, at);
  if (last < 0) return "before its first call";
  return last + 1 >= run.first[rank + 1] ? "finished" : `after ${callWords(run, last)}`;
}

/**
 * @param {import("./model.js").Model} model
 * @param {Run} run
 * @param {number} index
 */
function flight(model, run, index) {
  const found = inFlight(run, model.lanes[index], model.now);
  if (!found.length) return h("p", { class: "grey" }, "No transfers in flight.");
  return h("div", {}, h("h3", {}, `In flight: ${plural(found.length, "transfer")}`), h("ul", { class: "plain" },
    ...found.slice(0, MOST_MESSAGES).map((rows) => {
      const row = rows[0];
      const left = Math.max(...rows.map((r) => run.finished[r])) - model.now;
      const text = `${flightWords(model, run, index, rows)}, ${showBytes(run.nbytes[row])}, ${showNs(left)} left`;
      return h("li", {}, button(text, `Select ${text}`, () => model.choose(index, row), { class: "quiet" }));
    })), found.length > MOST_MESSAGES && h("p", { class: "grey" }, `and ${found.length - MOST_MESSAGES} more`));
}

/**
 * @param {import("./model.js").Model} model
 * @param {Run} run
 * @param {number} index
 * @param {number[]} rows
 */
function flightWords(model, run, index, rows) {
  const op = opOf(run, rows[0]);
  const all = [...model.walk(index).matches.of(rows[0])];
  const sender = all.find((row) => isSend(opOf(run, row)));
  const receiver = all.find((row) => isReceive(opOf(run, row)));
  if (sender === undefined || receiver === undefined) return `${op} among ranks ${showRanks(all.map((row) => run.rank[row]).sort((a, b) => a - b))}`;
  return `a message from rank ${run.rank[sender]} to rank ${run.rank[receiver]}`;
}
