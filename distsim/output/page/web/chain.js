/** Why a call began when it did, back in time: the walk that finds the critical path (distsim/analysis/timeline.py), from any call. */

import { isCompute, isReceive, matchesOf, moves, opOf } from "./calls.js";
import { lowest } from "./lanes.js";

/** Pieces of a chain that are followed at most. */
const MOST_PIECES = 2000;

/** Looks up what ended when on which rank, and who met whom. */
export class Walk {
  /** @param {Run} run */
  constructor(run) {
    this.run = run;
    this.matches = matchesOf(run);
    /** Of every rank: rows that worked, by their ends. @type {{row: number[], end: Float64Array}[]} */
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
   * When a row's work began, and the rows of which the last to come decided that. A message that was sent before its receive was
   * there began with the send, which waited for nobody.
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
   * The row that ended at this instant on the rank that came last, -1 when none did; and that rank's row among the members.
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
   * The last row of a rank that ended before an instant and took time, -1 when there is none.
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
   * What went on from `since` until a row's work began, the latest piece first: its pieces tile that stretch of time.
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
   * Since when a call waits for others: since it was made, or since its rank's device had nothing else to do.
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
 * Neighbours of a chain that are the same work again become one: [piece, how often].
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
 * From a stuck rank along whom it waits for, until a circle closes or somebody does not wait.
 * @param {Waits} waits
 * @param {number} rank
 * @returns {{ranks: number[], closes: number}} `closes`: index of the rank at which the circle closes, -1 where it ends
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
