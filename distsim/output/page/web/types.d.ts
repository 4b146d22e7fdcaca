/* Types of the page's data, for the type checker. */

interface Finding {
  code: string; severity: string; ranks: number[]; core: number[]; message: string; help: string[];
  places: { rank: number | null; file: string; line: number; column: number; op: string }[];
}
/** A cost: [name, explanation, ns] of each term, and [form, ns] of each alternative. */
interface Price {
  op: string; n: number; nodes: number; nbytes: number; ns: number; form: string;
  terms: [string, string, number][]; others: [string, number][]; bound_ns?: number; band?: [number, number];
}
interface Curve {
  op: string; n: number; nodes: number; group: string; factor: number; sizes: number[]; algbw: number[];
  points: [number, number][];
  /** The smallest and largest factor on the predicted time, by size. */
  band: [number[], number[]] | null;
}
interface Animation {
  op: string; algorithm: string; n: number; full: number; chunking: string;
  held: [number, [number, number][]][][]; rounds: [number, number, number, number][][];
}
/** [position, part, number of the set of awaited ranks, 1 if any of them suffices] */
type Need = [number, number, number, number];
interface Waits {
  /** [rank, position, since, 1 if the device is blocked, needs] */
  blocked: [number, number, number, number, Need[]][];
  sets: number[][];
  /** [rank, status, position, at, message] */
  ends: [number, string, number, number, string][];
}
interface Collective {
  op: string; group: string; n: number; nbytes: number; calls: number; duration_ns: number; algbw: number; busbw: number;
}
/** Traffic: ranks per block, [from, to, bytes] with the largest first, and the algorithm of each collective. */
interface Traffic {
  block: number; by: Record<string, string>; pairs: [number, number, number][];
}
/** Memory over one step: [ranks, bytes at the peak by kind, instants, activations as shares of their peak]. */
interface Filled {
  note: string; from: number; to: number; more: number; curves: [number[], Record<string, number>, number[], number[]][];
}
interface Tables {
  op: string[]; group: string[]; dtype: string[]; reduce_op: string[]; queue: string[]; name: string[];
  place: [string, number, number][]; tensor?: string[];
}
interface Head {
  name: string; file: string; note: string; about: string; outcome: string; headline: string; source: string; backend: string;
  cluster: string; world: number; makespan: number; iteration_ns: number | null; nodes: number; local: number;
  mesh: Record<string, number>; groups: [string, number[]][]; ended: string[]; ends: [number, string, number][];
  /** For each shown rank, all ranks that it stands for, itself first; null if all ranks are shown. */
  classes: number[][] | null;
  /** [name, value, meaning] */
  figures: [string, string, string][];
  /** [name, category, share of the time of all ranks] */
  breakdown: [string, string, number][];
  /** [resource, run time if it were twice as fast] */
  speedups: [string, number][];
  findings: Finding[]; more_findings: number;
  /** [rank, compute, exposed, waiting, idle, finished or -1] */
  ranks: [number, number, number, number, number, number][];
  collectives: Collective[];
  verdict: { word: string; text: string; complete: boolean; core: number[]; ranks: number[] } | null;
  cost: { name: string; source: string; band: string; makespan: [number, number] | null } | null;
  device?: { name: string; nbytes: number };
  memory: [string, number[], Record<string, number>][]; filled: Filled | null; traffic: Traffic | null;
  /** [first, number of identical steps, start, end of the first] */
  steps: [number, number, number, number][];
  /** [backend, outcome, possible outcomes, ranks] */
  profiles: [string, string, string[], number[]][];
  waits: Waits | null; waits_of: string; tables: Tables; animations: Animation[];
  prices?: Price[]; curves?: Curve[]; holdings?: { labels: string[]; texts: string[] };
}
interface Cause {
  why: string; op: string; name: string; group: string; nbytes: number; a_ns: number; b_ns: number; a_calls: number; b_calls: number;
  delta_ns: number;
}
interface Comparison {
  a: string; b: string; same: boolean; makespan_ns: number[]; outcome: string[]; aligned: number; only_a: number; only_b: number;
  worst_ns: number; causes: Cause[]; divergences: { kind: string; rank: number; text: string }[]; more_divergences: number;
  ranks: { rank: number; compute_ns: number[]; exposed_ns: number[]; waiting_ns: number[]; idle_ns: number[] }[];
}
interface Data {
  format: number; runs: Head[]; sources: Record<string, string>; comparison?: Comparison; columns: [string, number, number][];
}
/** The calls of a run; -1: no value. Times are in ns since the start. */
interface Run {
  index: number; head: Head; count: number; world: number; end: number;
  /** Ranks whose calls are known, and (in a folded run) the ranks that each of them stands for. */
  shown: number[]; like: Map<number, number[]> | null;
  /** Row of each rank's first call, and the number of rows at the end. */
  first: Int32Array;
  rank: Int32Array; op: Int32Array; group: Int32Array; peer: Int32Array; dtype: Int32Array; reduce_op: Int32Array; place: Int32Array;
  queue: Int32Array; name: Int32Array; part: Int32Array; tensor: Int32Array; root: Int32Array; price: Int32Array;
  tag: Float64Array; nbytes: Float64Array; iteration: Int32Array; position: Int32Array; match: Int32Array; ended_by: Int32Array;
  posted: Float64Array; returned: Float64Array; started: Float64Array; finished: Float64Array;
  path: { row: Int32Array; rank: Int32Array; start: Float64Array; end: Float64Array; why: Int32Array };
  held: { rank: Int32Array; label: Int32Array; text: Int32Array; row: Int32Array } | null;
}
/** Spans of one lane in order of their starts; `reach[i]` is the latest end of spans 0 to i. */
interface Lane {
  row: Int32Array; start: Float64Array; end: Float64Array; kind: Uint8Array; reach: Float64Array;
}
/** A piece of a chain back in time: why a call started when it did. */
interface Piece {
  row: number; rank: number; start: number; end: number; why: string;
}
interface View {
  from: number; to: number;
}

declare class uPlot {
  constructor(options: object, data: (number | null)[][], target: HTMLElement);
  setSize(size: { width: number; height: number }): void;
  destroy(): void;
}
