/** The comparison of two runs: their differences, and what makes one of them longer. */

import { h } from "./dom.js";
import { plural, shortened, showBytes, showNs } from "./format.js";
import { table } from "./tables.js";

/**
 * @param {number} ns
 * @returns {import("./tables.js").Cell}
 */
function signed(ns) {
  return [ns === 0 ? "-" : `${ns > 0 ? "+" : "−"}${showNs(Math.abs(ns))}`, ns];
}

/** @param {Comparison} found */
export function compareView(found) {
  const [a, b] = found.makespan_ns;
  const longer = a === b ? "Both runs take the same time." : `B takes ${showNs(Math.abs(b - a))}${a ? ` (${Number(((100 * Math.abs(b - a)) / a).toPrecision(3))} %)` : ""} ${b > a ? "longer" : "less"} than A.`;
  return h("div", {},
    h("p", {}, h("strong", {}, found.same ? "The runs are equal within the tolerance. " : "The runs differ. "), longer,
      ` ${plural(found.aligned, "call")} in both runs; ${found.only_a} only in A, ${found.only_b} only in B.`),
    found.causes.length > 0 && table("Causes of the difference, along both critical paths", [{ title: "operation" }, { title: "name" }, { title: "group" }, { title: "bytes", number: true },
      { title: "A", number: true }, { title: "B", number: true }, { title: "B − A", number: true }], found.causes.map((c) => [
      c.why === "wait" ? "waiting" : c.op || "nothing runs", shortened(c.name, 32), shortened(c.group, 32), [c.nbytes ? showBytes(c.nbytes) : "", c.nbytes], [`${showNs(c.a_ns)} × ${c.a_calls}`, c.a_ns],
      [`${showNs(c.b_ns)} × ${c.b_calls}`, c.b_ns], signed(c.delta_ns)])),
    found.divergences.length > 0 && table(`Differences${found.more_divergences ? ` (the first ${found.divergences.length})` : ""}`, [{ title: "kind" }, { title: "rank", number: true }, { title: "difference" }],
      found.divergences.map((p) => [p.kind, p.rank, shortened(p.text, 200)])),
    table("Time of each rank, B − A", [{ title: "rank", number: true }, { title: "compute", number: true }, { title: "exposed", number: true }, { title: "waiting", number: true },
      { title: "idle", number: true }], found.ranks.map((r) => [r.rank, ...[r.compute_ns, r.exposed_ns, r.waiting_ns, r.idle_ns].map(([x, y]) => signed(y - x))])));
}
