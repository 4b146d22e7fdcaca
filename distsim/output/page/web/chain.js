/** Why a call started when it did, followed back in time: the walk that finds the critical path (distsim/analysis/timeline.py), from any call. */

import { isCompute, isReceive, matchesOf, moves, opOf } from "./calls.js";
import { lowest } from "./lanes.js";

/** The largest number of pieces of a chain. */
const MOST_PIECES = 2000;

/** Looks up which calls ended when on which rank, and which calls matched. */
export class Walk {
  /** @param {Run} run */
  constructor(run) {
    this.run = run;
    this.matches = matchesOf(run);
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
   * When a row's work started, and the rows of which the last one determined this start. A message that was sent before its
   * receive was posted started with the send, which did not wait.
   * @param {number} row
   * @returns {[number, number[]]}
   */
  origin(row) {
    const { run } = this;
    const others = [...this.matches.of(row)].filter((other) => other !== row);
    if (isReceive(opOf(run, row)) && others.length === 1) {
      const [began, left] = [run.started[others[0]], run.finished[others[0]]];
      if (began >= 0 && began <= left && left < run.finished[row]) return [began, others];
    }
    return [run.started[row], [row, ...others]];
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
    for (let i = 0; i < todo.length; i += 1) {
      const rank = run.rank[todo[i]];
      if (seen.has(rank)) continue;
      seen.add(rank);
      for (const row of this.ending(rank, at)) {
        if (run.started[row] < at) return [row, todo[i]];
        const mates = this.matches.of(row);
        if (mates.every((mate) => run.finished[mate] === at)) todo.push(...mates);
      }
    }
    return [-1, first];
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
      if (this.run.finished[row[i]] > this.run.started[row[i]]) return row[i];
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
    let [start, members] = this.origin(at);
    while (start > since && found.length < MOST_PIECES) {
      const [cause, waiter] = this.cause(members, start);
      if (cause < 0) {
        const before = this.before(run.rank[waiter], start);
        const until = before < 0 ? 0 : run.finished[before];
        found.push({ row: waiter, rank: run.rank[waiter], start: Math.max(until, since), end: start, why: "wait" });
        if (before < 0 || until <= since) break;
        at = before;
        start = until;
      } else at = cause;
      const end = start;
      [start, members] = this.origin(at);
      found.push({ row: at, rank: run.rank[at], start: Math.max(Math.min(start, end), since), end, why: this.kind(at) });
    }
    return found;
  }

  /** @param {number} row */
  kind(row) {
    const op = opOf(this.run, row);
    return isCompute(op) ? "compute" : op === "sleep" ? "sleep" : "transfer";
  }

  /**
   * The start of a call's wait: when it was called, or when its rank's device had finished all earlier work.
   * @param {number} row
   */
  since(row) {
    const { run } = this;
    const before = this.before(run.rank[row], run.started[row] + 1);
    const free = before >= 0 && before !== row ? run.finished[before] : 0;
    return run.returned[row] < run.started[row] ? Math.max(run.posted[row], Math.min(free, run.started[row])) : run.posted[row];
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
