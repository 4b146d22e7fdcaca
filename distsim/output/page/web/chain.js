/**
 * Why a call started when it did, followed back in time from any call. This is the walk of distsim/analysis/critical_path.py, which explains
 * the rules.
 */

import { isCompute, isReceive, isSend, matchesOf, moves, opOf } from "./calls.js";
import { lowest } from "./lanes.js";

/** The largest number of pieces of a chain. */
const MOST_PIECES = 2000;

/** Looks up which calls ended when on which rank, and which calls matched. */
export class Walk {
  /** @param {Run} run */
  constructor(run) {
    this.run = run;
    this.matches = matchesOf(run);
    /** When the work of every row began: its start, or the start of a message that was sent earlier. */
    this.began = Float64Array.from({ length: run.count }, (_, row) => this.beganAt(row));
    /** For every rank: rows that did work, sorted by their ends. @type {{row: number[], end: Float64Array}[]} */
    this.ended = Array.from({ length: run.world }, (_, rank) => {
      /** @type {number[]} */
      const rows = [];
      for (let row = run.first[rank]; row < run.first[rank + 1]; row += 1) if (this.works(row)) rows.push(row);
      rows.sort((a, b) => run.finished[a] - run.finished[b] || a - b);
      return { row: rows, end: Float64Array.from(rows, (row) => run.finished[row]) };
    });
  }

  /** @param {number} row */
  works(row) {
    const { run } = this;
    const op = opOf(run, row);
    return (isCompute(op) || op === "sleep" || moves(run, row)) && run.started[row] >= 0 && run.finished[row] >= run.started[row];
  }

  /**
   * When a row's work began. A message that was sent before its receive could start began with the send, which did not wait.
   * @param {number} row
   */
  beganAt(row) {
    const { run } = this;
    const mates = this.matches.of(row);
    if (!isReceive(opOf(run, row)) || mates.length !== 2) return run.started[row];
    const send = mates[0] === row ? mates[1] : mates[0];
    const [began, left] = [run.started[send], run.finished[send]];
    const isEager = began >= 0 && began < run.started[row] && began <= left && left < run.finished[row];
    return isEager ? began : run.started[row];
  }

  /**
   * The rows of a row's match, with the row itself first.
   * @param {number} row
   */
  members(row) {
    return [row, ...[...this.matches.of(row)].filter((other) => other !== row)];
  }

  /**
   * When a row's work began, the row that ended then (-1 if there is none), and the row among the members that waited.
   * @param {number} row
   * @returns {[number, number, number]}
   */
  startAndCause(row) {
    const { run } = this;
    const [start, own] = [this.began[row], run.started[row]];
    const members = this.members(row);
    const [cause, waiter] = this.cause(start < own ? members.slice(1) : members, start);
    if (cause < 0 && start > 0 && start < own && own < run.finished[row]) {
      // The message was on its way, but its receive waited for an earlier kernel.
      const [ownCause, ownWaiter] = this.cause(members, own);
      if (ownCause >= 0) return [own, ownCause, ownWaiter];
    }
    return [start, cause, waiter];
  }

  /**
   * The row that ended at this instant on the rank that arrived last (-1 if there is none), and that rank's row among the members.
   * @param {number[]} members
   * @param {number} at
   * @returns {[number, number]}
   */
  cause(members, at) {
    const { run } = this;
    const late = members.filter((row) => run.posted[row] >= at);
    const todo = [...late, ...members.filter((row) => run.posted[row] < at)];
    const first = todo[0];
    const seen = new Set();
    /** @type {[number, number] | null} */
    let arrival = null;
    for (let i = 0; i < todo.length; i += 1) {
      const rank = run.rank[todo[i]];
      if (seen.has(rank)) continue;
      seen.add(rank);
      for (const row of this.ending(rank, at)) {
        if (run.started[row] < at) return [row, todo[i]];
        if (this.began[row] < at) arrival ??= [row, todo[i]];
        const mates = this.matches.of(row);
        if (isSend(opOf(run, row)) || mates.every((mate) => run.finished[mate] === at)) todo.push(...mates);
      }
      todo.push(...this.latePeers(rank, at));
    }
    return arrival ?? [-1, first];
  }

  /**
   * The rows, posted by peers at this instant, for which the host of a rank was waiting in its last call.
   * @param {number} rank
   * @param {number} at
   */
  latePeers(rank, at) {
    const { run } = this;
    let last = -1;
    /** @type {number[]} */
    let rows = [];
    for (let row = run.first[rank]; row < run.first[rank + 1]; row += 1) {
      if (run.posted[row] >= at || run.posted[row] < last || !moves(run, row)) continue;
      if (run.posted[row] > last) [last, rows] = [run.posted[row], []];
      rows.push(row);
    }
    /** @type {number[]} */
    const peers = [];
    for (const row of rows) {
      const posts = [...this.matches.of(row)].map((mate) => run.posted[mate]);
      if (Math.max(...posts) === at) peers.push(...[...this.matches.of(row)].filter((mate) => run.posted[mate] === at));
    }
    return peers;
  }

  /**
   * Rows of a rank that ended at an instant, the latest call first.
   * @param {number} rank
   * @param {number} at
   */
  ending(rank, at) {
    const { row, end } = this.ended[rank];
    return row.slice(lowest(end, at), lowest(end, at + 1)).reverse();
  }

  /**
   * The last row of a rank that took time and ended before an instant; -1 if there is none.
   * @param {number} rank
   * @param {number} at
   */
  before(rank, at) {
    const { row, end } = this.ended[rank];
    for (let i = lowest(end, at) - 1; i >= 0; i -= 1) {
      if (this.run.finished[row[i]] > this.began[row[i]]) return row[i];
    }
    return -1;
  }

  /**
   * The pieces from `since` until a row's work started, the latest first. They cover this time without gaps.
   * @param {number} row
   * @param {number} since
   * @returns {Piece[]}
   */
  why(row, since) {
    const { run } = this;
    /** @type {Piece[]} */
    const found = [];
    let at = row;
    let [start, cause, waiter] = this.startAndCause(at);
    while (start > since && found.length < MOST_PIECES) {
      if (cause < 0) {
        const before = this.before(run.rank[waiter], start);
        const until = before < 0 ? 0 : run.finished[before];
        found.push({ row: waiter, rank: run.rank[waiter], start: Math.max(until, since), end: start, why: "wait" });
        if (before < 0 || until <= since) break;
        at = before;
        start = until;
      } else at = cause;
      const end = start;
      [start, cause, waiter] = this.startAndCause(at);
      found.push({ row: at, rank: run.rank[at], start: Math.max(Math.min(start, end), since), end, why: this.kind(at) });
    }
    return found;
  }

  /** @param {number} row */
  kind(row) {
    const op = opOf(this.run, row);
    return isCompute(op) ? "compute" : op === "sleep" ? "sleep" : "transfer";
  }
}

/**
 * Joins consecutive pieces of the same work: [piece, number of repetitions].
 * @param {Run} run
 * @param {Piece[]} pieces
 * @returns {[Piece, number][]}
 */
export function mergedPieces(run, pieces) {
  /** @type {[Piece, number][]} */
  const merged = [];
  for (const piece of pieces) {
    const last = merged[merged.length - 1];
    const same = last && last[0].rank === piece.rank && last[0].why === piece.why && run.op[last[0].row] === run.op[piece.row]
      && run.name[last[0].row] === run.name[piece.row] && run.place[last[0].row] === run.place[piece.row];
    if (same) merged[merged.length - 1] = [{ ...last[0], start: piece.start }, last[1] + 1];
    else merged.push([piece, 1]);
  }
  return merged;
}

/**
 * Follows awaited ranks from a blocked rank, until a wait-for cycle closes or a rank is not blocked.
 * @param {Waits} waits
 * @param {number} rank
 * @returns {{ranks: number[], closes: number}} `closes`: index of the rank at which the cycle closes; -1 if there is no cycle
 */
export function stuckChain(waits, rank) {
  const blocked = new Map(waits.blocked.map((one) => [one[0], one]));
  const ranks = [rank];
  for (;;) {
    const needs = blocked.get(ranks[ranks.length - 1])?.[4];
    if (!needs) return { ranks, closes: -1 };
    const awaited = needs.flatMap((need) => waits.sets[need[2]]).filter((other) => other !== ranks[ranks.length - 1]);
    if (!awaited.length) return { ranks, closes: -1 };
    const gone = awaited.find((other) => !blocked.has(other));
    const next = gone ?? awaited.find((other) => ranks.includes(other)) ?? awaited[0];
    if (ranks.includes(next)) return { ranks, closes: ranks.indexOf(next) };
    ranks.push(next);
  }
}
