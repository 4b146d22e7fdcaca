/** The state of the page: its data and the selection. Sections of the page listen for changes. */

import { callWords, isReceive, isSend, moves, opOf, placeWords } from "./calls.js";
import { Walk } from "./chain.js";
import { ranksLike } from "./decode.js";
import { foldedRanks, lanesOf, waitsOf } from "./lanes.js";
import { Held, instants, neighbour } from "./moment.js";
import { search } from "./search.js";

/** Up to this many ranks, every rank has a line at first; more ranks are folded. */
const FEW_RANKS = 32;

export class Model {
  /**
   * @param {Data} data
   * @param {Run[]} runs
   */
  constructor(data, runs) {
    this.data = data;
    this.runs = runs;
    this.lanes = runs.map(lanesOf);
    this.end = Math.max(...runs.map((run) => run.end), 1);
    /** The run and row of the selected call; row -1: no call. */
    this.chosen = { run: 0, row: -1 };
    /** The selected instant; -1: none. */
    this.now = -1;
    /** Rows that a search found, by run, and a mark for each row; null: no search. @type {(number[] | null)[]} */
    this.hits = runs.map(() => null);
    /** @type {(Uint8Array | null)[]} */
    this.marks = runs.map(() => null);
    /** The text of the search. */
    this.sought = "";
    this.folded = runs[0].shown.length > FEW_RANKS;
    /** @type {((what: string) => void)[]} */
    this.listeners = [];
    /** @type {Walk[]} */
    this.walks = [];
    /** @type {Held[]} */
    this.helds = [];
    /** @type {ReturnType<typeof waitsOf>[]} */
    this.waits = [];
    /** @type {Float64Array | null} */
    this.times = null;
  }

  /** @param {(what: string) => void} listener */
  on(listener) {
    this.listeners.push(listener);
  }

  /** @param {string} what the part that changed: choice, now, search, rows, theme */
  tell(what) {
    this.listeners.forEach((listener) => listener(what));
  }

  /** @param {number} run */
  walk(run) {
    return (this.walks[run] ??= new Walk(this.runs[run]));
  }

  /**
   * The waits of a run, by row.
   * @param {number} run
   */
  waitsIn(run) {
    return (this.waits[run] ??= waitsOf(this.lanes[run]));
  }

  /** @param {number} run */
  held(run) {
    return (this.helds[run] ??= new Held(this.runs[run]));
  }

  /**
   * @param {number} run
   * @param {number} row
   */
  choose(run, row) {
    this.chosen = { run, row };
    const found = this.runs[run];
    if (row >= 0) this.now = found.started[row] >= 0 ? found.started[row] : Math.max(found.posted[row], 0);
    this.tell("choice");
  }

  /** @param {number} now */
  look(now) {
    this.now = Math.min(Math.max(now, 0), this.end);
    this.tell("now");
  }

  /** @param {number} direction 1 or -1 */
  step(direction) {
    this.times ??= this.runs.map(instants).reduce((a, b) => Float64Array.from([...new Set([...a, ...b])].sort((x, y) => x - y)));
    if (this.now < 0) this.look(this.times[0] ?? 0);
    else this.look(neighbour(this.times, this.now, direction));
  }

  /** @param {string} text */
  find(text) {
    this.sought = text;
    this.hits = this.runs.map((run, i) => search(run, text, this.waitsIn(i)));
    this.marks = this.hits.map((rows, i) => {
      if (!rows) return null;
      const marks = new Uint8Array(this.runs[i].count);
      rows.forEach((row) => { marks[row] = 1; });
      return marks;
    });
    this.tell("search");
  }

  /** @param {number} direction 1 or -1: to the next call that the search found */
  nextHit(direction) {
    const hits = this.hits.flatMap((rows, run) => (rows ?? []).map((row) => ({ run, row })));
    if (!hits.length) return;
    const at = hits.findIndex((hit) => hit.run === this.chosen.run && hit.row === this.chosen.row);
    const next = hits[(at + direction + hits.length) % hits.length];
    this.choose(next.run, next.row);
  }

  /** @param {boolean} folded */
  fold(folded) {
    this.folded = folded;
    this.tell("rows");
  }

  /**
   * The lines of the timeline. If folded, identical ranks share a line; ranks that are critical, selected or blocked have their own.
   * @returns {{run: number, ranks: number[]}[]}
   */
  lines() {
    const lines = this.runs.flatMap((run, i) => {
      const ranks = this.folded ? foldedRanks(run, this.lanes[i], this.special(i)) : run.shown.map((rank) => [...ranksLike(run, rank)]);
      return ranks.map((members) => ({ run: i, ranks: members }));
    });
    return lines.sort((a, b) => a.ranks[0] - b.ranks[0] || a.run - b.run);
  }

  /** @param {number} index */
  special(index) {
    const run = this.runs[index];
    const found = new Set(run.head.waits_of === "this run" ? (run.head.verdict?.core ?? []).slice(0, 64) : []);
    if (this.chosen.run === index && this.chosen.row >= 0) found.add(run.rank[this.chosen.row]);
    if (run.path.rank.length) found.add(run.path.rank[run.path.rank.length - 1]);
    return found;
  }

  /**
   * A one-line description of a call.
   * @param {number} index
   * @param {number} row
   */
  words(index, row) {
    const run = this.runs[index];
    const side = this.runs.length > 1 ? `${"AB"[index]}, ` : "";
    const place = placeWords(run, row);
    return `${side}rank ${run.rank[row]}: ${callWords(run, row)}${place ? `, ${place}` : ""}`;
  }

  /**
   * Select the previous or next call on the rank, if there is one.
   * @param {number} direction 1 or -1
   */
  besides(direction) {
    const { run: index, row } = this.chosen;
    const run = this.runs[index];
    if (row < 0) return;
    let next = row + direction;
    const [low, high] = [run.first[run.rank[row]], run.first[run.rank[row] + 1]];
    while (next >= low && next < high && run.posted[next] < 0) next += direction;
    if (next >= low && next < high) this.choose(index, next);
  }

  /** Select the next call of the same match. */
  mate() {
    const { run, row } = this.chosen;
    if (row < 0) return;
    const mates = [...this.walk(run).matches.of(row)];
    this.choose(run, mates[(mates.indexOf(row) + 1) % mates.length]);
  }
}

/**
 * The messages of a run as a lane: the row of the send, from its start to the arrival; `to`: the row of the receive.
 * @param {Run} run
 * @param {import("./chain.js").Walk} walk
 */
export function messagesOf(run, walk) {
  /** @type {[number, number, number, number][]} */
  const found = [];
  for (let row = 0; row < run.count; row += 1) {
    if (!isSend(opOf(run, row)) || !moves(run, row) || run.started[row] < 0) continue;
    const other = [...walk.matches.of(row)].find((mate) => mate !== row && isReceive(opOf(run, mate)));
    if (other !== undefined && run.finished[other] >= 0) found.push([row, run.started[row], run.finished[other], other]);
  }
  found.sort((a, b) => a[1] - b[1]);
  let latest = -1;
  const end = Float64Array.from(found, (f) => f[2]);
  return {
    row: Int32Array.from(found, (f) => f[0]), start: Float64Array.from(found, (f) => f[1]), end,
    kind: new Uint8Array(found.length), reach: end.map((e) => (latest = Math.max(latest, e))), to: Int32Array.from(found, (f) => f[3]),
  };
}
