/** Facts about a call: its text, its kind, and the calls that match it. */

import { shortened, showBytes } from "./format.js";

export const COMPUTE = 0;
export const COMM = 1;
export const WAIT = 2;
export const SLEEP = 3;
export const STUCK = 4;

/** Operations that never move data, even if a trace has times for them. */
const LOCAL = new Set(["compute", "assign", "sleep", "wait", "wait_stream", "synchronize", "exit", "fail"]);
const WAITS = new Set(["wait", "wait_stream", "synchronize"]);
const SENDS = new Set(["send", "isend"]);
const RECVS = new Set(["recv", "irecv"]);

/**
 * @param {Run} run
 * @param {number} row
 */
export function opOf(run, row) {
  return run.head.tables.op[run.op[row]] ?? "";
}

/** @param {string} op */
export function isCompute(op) {
  return op === "compute" || op === "assign";
}

/** @param {string} op */
export function isWait(op) {
  return WAITS.has(op);
}

/** @param {string} op */
export function isSend(op) {
  return SENDS.has(op);
}

/** @param {string} op */
export function isReceive(op) {
  return RECVS.has(op);
}

/**
 * Whether a compute runs on the host of a device backend, next to the work of its device.
 * @param {Run} run
 * @param {number} row
 */
export function onHost(run, row) {
  return onDevice(run) && isCompute(opOf(run, row)) && run.head.tables.queue[run.queue[row]] === "host";
}

/**
 * The rows of the parts of a batch; empty for other calls.
 * @param {Run} run
 * @param {number} row
 */
export function partsOf(run, row) {
  /** @type {number[]} */
  const found = [];
  if (run.part[row] >= 0) return found;
  for (let next = row + 1; next < run.first[run.rank[row] + 1] && run.part[next] >= 0 && run.position[next] === run.position[row]; next += 1) found.push(next);
  return found;
}

/**
 * The rows of the requests that a wait ends.
 * @param {Run} run
 * @param {number} row
 */
export function requestsOf(run, row) {
  /** @type {number[]} */
  const found = [];
  if (!isWait(opOf(run, row))) return found;
  for (let before = row - 1; before >= run.first[run.rank[row]]; before -= 1) {
    if (run.ended_by[before] === run.position[row] && run.posted[before] >= 0) found.push(before);
  }
  return found;
}

/**
 * Whether a call moves data once it has matched.
 * @param {Run} run
 * @param {number} row
 */
export function moves(run, row) {
  return run.match[row] >= 0 && !LOCAL.has(opOf(run, row));
}

/**
 * Whether hosts only enqueue calls and devices do the work.
 * @param {Run} run
 */
export function onDevice(run) {
  return run.head.backend === "nccl";
}

/**
 * `all_reduce(grad, replica, 4 MiB)`, `forward`, `send(x, to 3, tag 7, 16 B)`
 * @param {Run} run
 * @param {number} row
 */
export function callWords(run, row) {
  const tables = run.head.tables;
  const op = opOf(run, row);
  const name = tables.name[run.name[row]];
  if (op === "compute" && name) return shortened(name, 48);
  /** @type {string[]} */
  const words = [];
  const tensor = tables.tensor?.[run.tensor[row]];
  if (tensor && !LOCAL.has(op)) words.push(shortened(tensor, 40));
  if (SENDS.has(op)) words.push(`to ${run.peer[row]}`);
  if (RECVS.has(op)) words.push(run.peer[row] < 0 ? "from any" : `from ${run.peer[row]}`);
  if (run.tag[row]) words.push(`tag ${run.tag[row]}`);
  const group = tables.group[run.group[row]];
  if (group && group !== "world" && moves(run, row) && !SENDS.has(op) && !RECVS.has(op)) words.push(shortened(group, 32));
  if (run.nbytes[row] && !LOCAL.has(op)) words.push(showBytes(run.nbytes[row]));
  return words.length ? `${op}(${words.join(", ")})` : op;
}

/**
 * `line 24`; with the file name if it is not the file of the run.
 * @param {Run} run
 * @param {number} row
 */
export function placeWords(run, row) {
  const place = run.head.tables.place[run.place[row]];
  if (!place || !place[1]) return "";
  return place[0] === run.head.file ? `line ${place[1]}` : `${shortened(place[0], 40)}:${place[1]}`;
}

/**
 * The rows of every match.
 * @param {Run} run
 */
export function matchesOf(run) {
  let most = -1;
  for (let row = 0; row < run.count; row += 1) most = Math.max(most, run.match[row]);
  const at = new Int32Array(most + 2);
  for (let row = 0; row < run.count; row += 1) if (moves(run, row)) at[run.match[row] + 1] += 1;
  for (let m = 0; m <= most; m += 1) at[m + 1] += at[m];
  const rows = new Int32Array(at[most + 1]);
  const next = at.slice();
  for (let row = 0; row < run.count; row += 1) if (moves(run, row)) rows[next[run.match[row]]++] = row;
  return {
    /** @param {number} row */
    of(row) {
      const match = run.match[row];
      return match < 0 || !moves(run, row) ? Int32Array.of(row) : rows.subarray(at[match], at[match + 1]);
    },
  };
}

/**
 * The row of a rank's call at a position, or of its part in a batch; -1 if there is none.
 * @param {Run} run
 * @param {number} rank
 * @param {number} position
 * @param {number} part
 */
export function rowAt(run, rank, position, part = -1) {
  if (rank < 0 || rank >= run.world) return -1;
  let low = run.first[rank];
  let high = run.first[rank + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.position[middle] < position || (run.position[middle] === position && run.part[middle] < part)) low = middle + 1;
    else high = middle;
  }
  return low < run.first[rank + 1] && run.position[low] === position && run.part[low] === part ? low : -1;
}
