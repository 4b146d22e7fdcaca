/** The activity of a rank over time: lanes of spans for its compute, its communication and its host. */

import { COMM, COMPUTE, SLEEP, STUCK, WAIT, isCompute, isWait, moves, onDevice, onHost, opOf } from "./calls.js";
import { ranksLike } from "./decode.js";

/** Names of the three lanes of a rank. */
export const LANES = ["compute", "communication", "host"];

/** Gathers spans, and sorts them once. */
class Spans {
  constructor() {
    /** @type {[number, number, number, number][]} */
    this.found = [];
  }

  /**
   * @param {number} row
   * @param {number} start
   * @param {number} end
   * @param {number} kind
   */
  add(row, start, end, kind) {
    if (end >= start) this.found.push([row, start, end, kind]);
  }

  /** @returns {Lane} */
  lane() {
    const spans = this.found.sort((a, b) => a[1] - b[1] || b[2] - a[2] || a[0] - b[0]);
    const end = Float64Array.from(spans, (s) => s[2]);
    let latest = -1;
    return {
      row: Int32Array.from(spans, (s) => s[0]), start: Float64Array.from(spans, (s) => s[1]), end,
      kind: Uint8Array.from(spans, (s) => s[3]), reach: end.map((e) => (latest = Math.max(latest, e))),
    };
  }
}

/**
 * When each rank's process ended: at its exit, else at the end of the run.
 * @param {Run} run
 */
function ends(run) {
  const found = new Float64Array(run.world).fill(run.end);
  for (const [rank, status, at] of run.head.ends) {
    if (status !== "ended" && status !== "blocked" && rank < run.world) found[rank] = Math.min(run.end, at);
  }
  return found;
}

/**
 * The three lanes of every rank.
 * @param {Run} run
 * @returns {Lane[][]}
 */
export function lanesOf(run) {
  const gone = ends(run);
  const device = onDevice(run);
  const empty = LANES.map(() => new Spans().lane());
  return Array.from({ length: run.world }, (_, rank) => {
    if (run.first[rank] === run.first[rank + 1]) return empty;
    const lanes = [new Spans(), new Spans(), new Spans()];
    for (let row = run.first[rank]; row < run.first[rank + 1]; row += 1) {
      if (run.posted[row] >= 0) addCall(run, row, gone[rank], lanes, device);
    }
    if (device) addGaps(run, rank, gone[rank], lanes);
    return lanes.map((spans) => spans.lane());
  });
}

/**
 * @param {Run} run
 * @param {number} row
 * @param {number} gone
 * @param {Spans[]} lanes
 * @param {boolean} device
 */
function addCall(run, row, gone, [work, comm, host], device) {
  const op = opOf(run, row);
  const [posted, started, finished] = [run.posted[row], run.started[row], run.finished[row]];
  const back = run.returned[row] >= 0 ? run.returned[row] : gone;
  if (isCompute(op)) {
    // The host's own work overlaps that of its device, so it has the host's lane.
    if (started >= 0) (onHost(run, row) ? host : work).add(row, started, finished >= 0 ? finished : gone, COMPUTE);
    return;
  }
  if (op === "sleep") {
    work.add(row, started >= 0 ? started : posted, finished >= 0 ? finished : back, SLEEP);
    return;
  }
  const met = moves(run, row) && started >= 0;
  if (met && finished >= 0) comm.add(row, started, finished, COMM);
  if (run.part[row] >= 0) return;
  if (run.returned[row] < 0) host.add(row, posted, gone, STUCK);
  else if (!device || isWait(op)) {
    const till = met ? Math.min(Math.max(started, posted), back) : back;
    if (till > posted) host.add(row, posted, till, WAIT);
  }
}

/**
 * Waits of a device: from the end of its previous work until the start of a call that it already has.
 * @param {Run} run
 * @param {number} rank
 * @param {number} gone
 * @param {Spans[]} lanes
 */
function addGaps(run, rank, gone, [work, comm]) {
  const done = [...work.found, ...comm.found].sort((a, b) => a[1] - b[1]);
  let until = 0;
  for (const [row, start, end, kind] of done) {
    const from = Math.max(until, run.posted[row]);
    if (kind === COMM && start > from) comm.add(row, from, start, WAIT);
    until = Math.max(until, end);
  }
  for (let row = run.first[rank]; row < run.first[rank + 1]; row += 1) {
    const meets = !isCompute(opOf(run, row)) && (run.match[row] >= 0 || run.peer[row] >= 0);
    if (run.posted[row] >= 0 && run.returned[row] >= 0 && run.finished[row] < 0 && meets) {
      comm.add(row, Math.max(until, run.posted[row]), gone, STUCK);
      return; // all later calls wait for this one
    }
  }
}

/**
 * The wait of each row that waits, as the timeline draws it. All other texts about waits use this table.
 * @param {Lane[][]} lanes of all ranks
 * @returns {Map<number, {start: number, end: number, kind: number}>}
 */
export function waitsOf(lanes) {
  const found = new Map();
  for (const lane of lanes.flat()) {
    for (let i = 0; i < lane.row.length; i += 1) {
      if (lane.kind[i] !== WAIT && lane.kind[i] !== STUCK) continue;
      found.set(lane.row[i], { start: lane.start[i], end: lane.end[i], kind: lane.kind[i] });
    }
  }
  return found;
}

/**
 * Indices [from, to) of the spans that may overlap a stretch of time.
 * @param {Lane} lane
 * @param {number} from
 * @param {number} to
 */
export function reaching(lane, from, to) {
  return [lowest(lane.reach, from), lowest(lane.start, to)];
}

/**
 * The first index whose value is at least this.
 * @param {Float64Array} sorted
 * @param {number} value
 */
export function lowest(sorted, value) {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * The span at an instant: the shortest one that contains it, or the nearest one within the slack.
 * @param {Lane} lane
 * @param {number} at
 * @param {number} slack
 */
export function spanAt(lane, at, slack) {
  const [from, to] = reaching(lane, at - slack, at + slack + 1e-9);
  let best = -1;
  let distance = Infinity;
  for (let i = to - 1; i >= from; i -= 1) {
    const off = Math.max(lane.start[i] - at, at - lane.end[i], 0);
    if (off > slack) continue;
    const measure = off * 1e6 + (lane.end[i] - lane.start[i]) * 1e-6;
    if (measure < distance) [best, distance] = [i, measure];
  }
  return best;
}

/**
 * Groups ranks whose lanes are equal, call for call: [[0, 1, 3], [2]].
 * @param {Run} run
 * @param {Lane[][]} lanes
 * @param {Set<number>} alone ranks that always get a line of their own
 */
export function foldedRanks(run, lanes, alone) {
  /** @type {Map<string, number[][]>} */
  const seen = new Map();
  /** @type {number[][]} */
  const rows = [];
  for (const rank of run.shown) {
    const key = lanes[rank].map((lane) => `${lane.start.length}:${lane.reach.at(-1) ?? 0}:${lane.start.at(-1) ?? 0}`).join("|");
    const same = alone.has(rank) ? undefined : seen.get(key)?.find((ranks) => equalRanks(run, lanes, ranks[0], rank));
    if (same) {
      same.push(...ranksLike(run, rank));
      continue;
    }
    rows.push([...ranksLike(run, rank)]);
    if (!alone.has(rank)) seen.set(key, [...(seen.get(key) ?? []), rows[rows.length - 1]]);
  }
  return rows;
}

/**
 * @param {Run} run
 * @param {Lane[][]} lanes
 * @param {number} a
 * @param {number} b
 */
function equalRanks(run, lanes, a, b) {
  return lanes[a].every((mine, k) => {
    const theirs = lanes[b][k];
    return mine.start.length === theirs.start.length && mine.start.every((start, i) => start === theirs.start[i]
      && mine.end[i] === theirs.end[i] && run.op[mine.row[i]] === run.op[theirs.row[i]] && run.name[mine.row[i]] === run.name[theirs.row[i]]);
  });
}
