/** Runs for the tests of the report's script, written as lists of calls. */

/** A run of the calls given: {rank, op, posted, started, finished, returned, match, …}, in order of ranks. */
export function made(calls, head = {}) {
  const table = (name) => [...new Set(calls.map((c) => c[name] ?? ""))].filter((t) => t !== "");
  const tables = {
    op: table("op"), group: table("group"), dtype: [], reduce_op: [], queue: table("queue"), name: table("name"), tensor: table("tensor"),
    place: [...new Set(calls.map((c) => c.line ?? 0))].filter((l) => l).map((line) => ["a.yaml", line, 1]),
  };
  const world = head.world ?? Math.max(...calls.map((c) => c.rank)) + 1;
  const first = new Int32Array(world + 1);
  calls.forEach((c) => { first[c.rank + 1] += 1; });
  for (let r = 0; r < world; r += 1) first[r + 1] += first[r];
  const whole = (name, other = -1) => Int32Array.from(calls, (c) => c[name] ?? other);
  const real = (name, other = -1) => Float64Array.from(calls, (c) => c[name] ?? other);
  const index = (name) => Int32Array.from(calls, (c) => tables[name].indexOf(c[name] ?? ""));
  const end = Math.max(...calls.flatMap((c) => [c.finished ?? 0, c.returned ?? 0, c.posted ?? 0]));
  return {
    index: 0, count: calls.length, world, shown: Array.from({ length: world }, (_, r) => r), like: null, end: head.makespan ?? end, first, rank: whole("rank"), op: index("op"), group: index("group"),
    peer: whole("peer"), dtype: whole("dtype"), reduce_op: whole("reduce_op"), queue: index("queue"), name: index("name"), part: whole("part"),
    place: Int32Array.from(calls, (c) => tables.place.findIndex((p) => p[1] === c.line)), tensor: index("tensor"), root: whole("root"),
    price: whole("price"), tag: real("tag", 0), nbytes: real("nbytes", 0), iteration: whole("iteration", 0),
    position: Int32Array.from(calls, (c, i) => c.position ?? i - first[c.rank]), match: whole("match"), ended_by: whole("ended_by"),
    posted: real("posted"), returned: real("returned"), started: real("started"), finished: real("finished"),
    path: { row: new Int32Array(0), rank: new Int32Array(0), start: new Float64Array(0), end: new Float64Array(0), why: new Int32Array(0) },
    held: null,
    head: { file: "a.yaml", backend: "gloo", makespan: end, world, ends: [], groups: [], waits: null, waits_of: "", verdict: null, ...head, tables },
  };
}

/** Rank 0 computes for 10 and sends for 2; rank 1 waits for it from the start, and computes for 5. */
export function chainOfTwo() {
  return made([
    { rank: 0, op: "compute", name: "forward", posted: 0, started: 0, finished: 10, returned: 10, line: 4 },
    { rank: 0, op: "send", tensor: "x", peer: 1, posted: 10, started: 10, finished: 12, returned: 12, match: 0, nbytes: 4096, line: 5 },
    { rank: 1, op: "recv", tensor: "x", peer: 0, posted: 0, started: 10, finished: 12, returned: 12, match: 0, nbytes: 4096, line: 7 },
    { rank: 1, op: "compute", name: "backward", posted: 12, started: 12, finished: 17, returned: 17, line: 8 },
  ]);
}
