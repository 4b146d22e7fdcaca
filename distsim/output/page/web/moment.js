/** The run at one instant: the call of each rank, the values of its tensors, and the transfers in flight. */

import { moves } from "./calls.js";
import { lowest, reaching } from "./lanes.js";

/**
 * Every instant at which a call starts or ends, ascending.
 * @param {Run} run
 */
export function instants(run) {
  const times = new Float64Array(4 * run.count);
  let n = 0;
  for (const column of [run.posted, run.returned, run.started, run.finished]) {
    for (let row = 0; row < run.count; row += 1) if (column[row] >= 0) times[n++] = column[row];
  }
  const sorted = times.subarray(0, n).sort();
  return sorted.filter((time, i) => i === 0 || time !== sorted[i - 1]);
}

/**
 * The next or previous instant; the same instant if there is none.
 * @param {Float64Array} times
 * @param {number} at
 * @param {number} direction 1 or -1
 */
export function neighbour(times, at, direction) {
  const i = direction > 0 ? lowest(times, at + 0.5) : lowest(times, at) - 1;
  return times[Math.min(Math.max(i, 0), times.length - 1)] ?? at;
}

/**
 * Spans that contain an instant; a span without duration contains its own instant.
 * @param {Lane} lane
 * @param {number} at
 */
export function running(lane, at) {
  const [from, to] = reaching(lane, at, at + 0.5);
  /** @type {number[]} */
  const rows = [];
  for (let i = from; i < to; i += 1) {
    if (lane.end[i] > at || (lane.start[i] === at && lane.end[i] === at)) rows.push(i);
  }
  return rows;
}

/**
 * The last call that a rank made before an instant; -1 before its first call.
 * @param {Run} run
 * @param {number} rank
 * @param {number} at
 */
export function lastCall(run, rank, at) {
  let found = -1;
  for (let row = run.first[rank]; row < run.first[rank + 1]; row += 1) {
    if (run.posted[row] >= 0 && run.posted[row] <= at && run.part[row] < 0) found = row;
  }
  return found;
}

/** The values of tensors at an instant. */
export class Held {
  /** @param {Run} run */
  constructor(run) {
    this.run = run;
    this.labels = run.head.holdings?.labels ?? [];
    this.texts = run.head.holdings?.texts ?? [];
    /** By rank: [time, label, text], by time. @type {[number, number, number][][]} */
    this.changes = Array.from({ length: run.world }, () => []);
    const held = run.held;
    if (!held) return;
    for (let i = 0; i < held.rank.length; i += 1) {
      const row = held.row[i];
      this.changes[held.rank[i]].push([row < 0 ? -1 : run.finished[row], held.label[i], held.text[i]]);
    }
    for (const changes of this.changes) changes.sort((a, b) => a[0] - b[0]);
  }

  /**
   * Label and text of each tensor of a rank, and whether it has just changed.
   * @param {number} rank
   * @param {number} at
   * @returns {[string, string, boolean][]}
   */
  at(rank, at) {
    /** @type {Map<number, [string, string, boolean]>} */
    const found = new Map();
    for (const [time, label, text] of this.changes[rank]) {
      if (time > at) break;
      const before = found.get(label)?.[1];
      found.set(label, [this.labels[label], this.texts[text], time === at && before !== this.texts[text]]);
    }
    return [...found.values()].sort((a, b) => (a[0] < b[0] ? -1 : 1));
  }
}

/**
 * The transfers in flight: the rows of each match.
 * @param {Run} run
 * @param {Lane[][]} lanes
 * @param {number} at
 */
export function inFlight(run, lanes, at) {
  /** @type {Map<number, number[]>} */
  const found = new Map();
  lanes.forEach((three) => {
    for (const i of running(three[1], at)) {
      const row = three[1].row[i];
      if (!moves(run, row) || run.started[row] > at) continue;
      found.set(run.match[row], [...(found.get(run.match[row]) ?? []), row]);
    }
  });
  return [...found.values()];
}
