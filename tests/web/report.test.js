/** What the parts of the report's script that draw nothing promise. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { fragmentOf, restore } from "../../distsim/output/page/web/address.js";
import { frames } from "../../distsim/output/page/web/animate.js";
import { COMM, COMPUTE, STUCK, WAIT, callWords, rowAt } from "../../distsim/output/page/web/calls.js";
import { Walk, mergedPieces, stuckChain } from "../../distsim/output/page/web/chain.js";
import { unfolded, varints } from "../../distsim/output/page/web/decode.js";
import { detailsPanel } from "../../distsim/output/page/web/details.js";
import { shortened, showBytes, showMoment, showNs, showRanks } from "../../distsim/output/page/web/format.js";
import { longestWaits, speedupsTable } from "../../distsim/output/page/web/helps.js";
import { foldedRanks, lanesOf, lowest, reaching, spanAt } from "../../distsim/output/page/web/lanes.js";
import { Model } from "../../distsim/output/page/web/model.js";
import { inFlight, instants, neighbour, running } from "../../distsim/output/page/web/moment.js";
import { breakdownTable, equalTimes, foldedBlocks } from "../../distsim/output/page/web/numbers.js";
import { sharesOf } from "../../distsim/output/page/web/overview.js";
import { Raster } from "../../distsim/output/page/web/raster.js";
import { search, termsOf } from "../../distsim/output/page/web/search.js";
import { sorted } from "../../distsim/output/page/web/tables.js";
import { clamped, ticks, zoomed } from "../../distsim/output/page/web/viewport.js";
import { coreOf } from "../../distsim/output/page/web/waitgraph.js";
import { fakeDocument } from "./dom.js";
import { chainOfTwo, made } from "./made.js";

test("numbers are written as the command line writes them", () => {
  assert.deepEqual([0, 999, 3216004, 19082525, 2e9].map(showNs), ["0 ns", "999 ns", "3.216 ms", "19.08 ms", "2 s"]);
  assert.deepEqual([0, 4096, 4194304].map(showBytes), ["0 B", "4 KiB", "4 MiB"]);
  assert.equal(showRanks([0, 1, 2, 3, 8]), "0-3, 8");
  assert.equal(showRanks([0, 2, 4, 6], 2), "0, 2 and 2 more");
});

test("a moment has the digits that its view can tell apart", () => {
  assert.equal(showMoment(1500000, 100000), "1.5 ms");
  assert.equal(showMoment(1500001, 1), "1.500001 ms");
});

test("a long text is cut in the middle, letters and not halves of them", () => {
  const cut = shortened("😀".repeat(5000), 11);
  assert.equal([...cut].length, 11);
  assert.ok([...cut].every((letter) => letter === "😀" || letter === "…"));
});

test("numbers of any size come back from their bytes", () => {
  assert.deepEqual([...varints(Uint8Array.of(0, 127, 128, 1, 172, 2), 4)], [0, 127, 128, 300]);
  assert.deepEqual([0, 1, 2, 3, 4].map(unfolded).map((v) => v + 0), [0, -1, 1, -2, 2]);
});

test("a call is told with what it names", () => {
  const run = chainOfTwo();
  assert.equal(callWords(run, 0), "forward");
  assert.equal(callWords(run, 1), "send(x, to 1, 4 KiB)");
  assert.equal(rowAt(run, 1, 1), 3);
  assert.equal(rowAt(run, 1, 9), -1);
});

test("a lane has what was done and a host's lane has the wait before the match alone", () => {
  const run = chainOfTwo();
  const [, [work, comm, host]] = lanesOf(run);
  assert.deepEqual([[...work.kind], [...work.start], [...work.end]], [[COMPUTE], [12], [17]]);
  assert.deepEqual([[...comm.kind], [...comm.start], [...comm.end]], [[COMM], [10], [12]]);
  assert.deepEqual([[...host.kind], [...host.start], [...host.end]], [[WAIT], [0], [10]]);
});

test("a call that never returns is stuck to the end of the run", () => {
  const run = made([{ rank: 0, op: "recv", peer: 1, posted: 3 }, { rank: 1, op: "compute", posted: 0, started: 0, finished: 9, returned: 9 }]);
  const [[, , host]] = lanesOf(run);
  assert.deepEqual([[...host.kind], [...host.start], [...host.end]], [[STUCK], [3], [9]]);
});

test("a device that waits is told from its last work on, however early its host enqueued the call", () => {
  const run = made([
    { rank: 0, op: "compute", posted: 0, returned: 0, started: 0, finished: 4 },
    { rank: 0, op: "all_reduce", posted: 0, returned: 0, started: 9, finished: 11, match: 0 },
    { rank: 1, op: "all_reduce", posted: 0, returned: 0, started: 9, finished: 11, match: 0 },
  ], { backend: "nccl" });
  const [, comm] = lanesOf(run)[0];
  assert.deepEqual([[...comm.kind], [...comm.start], [...comm.end]], [[WAIT, COMM], [4, 9], [9, 11]]);
});

test("spans that reach into a view are found, long ones before it too", () => {
  const lane = { start: Float64Array.of(0, 1, 5), end: Float64Array.of(9, 2, 6), reach: Float64Array.of(9, 9, 9), row: Int32Array.of(0, 1, 2), kind: new Uint8Array(3) };
  assert.deepEqual(reaching(lane, 4, 5.5), [0, 3]);
  assert.equal(spanAt(lane, 1.5, 0), 1);
  assert.equal(lowest(Float64Array.of(1, 3, 3, 7), 3), 1);
});

test("ranks whose lanes are equal are one line, and whoever stands alone is none of it", () => {
  const call = (rank, finished) => ({ rank, op: "compute", posted: 0, started: 0, finished, returned: finished });
  const run = made([call(0, 5), call(1, 5), call(2, 6), call(3, 5)]);
  assert.deepEqual(foldedRanks(run, lanesOf(run), new Set()), [[0, 1, 3], [2]]);
  assert.deepEqual(foldedRanks(run, lanesOf(run), new Set([1])), [[0, 3], [1], [2]]);
});

test("the chain of a wait tiles it, and leads to who made it wait", () => {
  const run = chainOfTwo();
  const walk = new Walk(run);
  const pieces = walk.why(2, 0);
  assert.deepEqual(pieces.map((p) => [p.rank, p.why, p.start, p.end]), [[0, "compute", 0, 10]]);
  assert.deepEqual(walk.why(3, 0).map((p) => [p.rank, p.why, p.start, p.end]), [[1, "transfer", 10, 12], [0, "compute", 0, 10]]);
});

test("a chain continues on the peer whose arrival released a host that was creating a communicator", () => {
  const run = made([
    { rank: 0, op: "irecv", peer: 1, posted: 0, returned: 8, started: 12, finished: 14, match: 0 },
    { rank: 0, op: "compute", name: "launches", posted: 8, returned: 10, started: 8, finished: 10 },
    { rank: 1, op: "compute", name: "late", posted: 0, returned: 8, started: 0, finished: 8 },
    { rank: 1, op: "isend", peer: 0, posted: 8, returned: 8, started: 12, finished: 12, match: 0 },
  ], { backend: "nccl" });
  assert.deepEqual(new Walk(run).why(1, 0).map((p) => [p.rank, p.why, p.start, p.end]), [[1, "compute", 0, 8]]);
});

test("equal neighbours of a chain are one", () => {
  const run = made([0, 1, 2].map((i) => ({ rank: 0, op: "compute", name: "f", posted: i, started: i, finished: i + 1, returned: i + 1, line: 3 })));
  const pieces = [2, 1].map((row) => ({ row, rank: 0, start: row, end: row + 1, why: "compute" }));
  assert.deepEqual(mergedPieces(run, pieces).map(([p, n]) => [p.start, p.end, n]), [[1, 3, 2]]);
});

test("a stuck rank leads into its circle, or to who has left", () => {
  const waits = { blocked: [[0, 0, 0, 0, [[0, -1, 0, 0]]], [1, 0, 0, 0, [[0, -1, 1, 0]]], [2, 0, 0, 0, [[0, -1, 1, 0]]], [3, 0, 0, 0, [[0, -1, 2, 0]]]],
    sets: [[1], [0], [4]], ends: [] };
  assert.deepEqual(stuckChain(waits, 2), { ranks: [2, 0, 1], closes: 1 });
  assert.deepEqual(stuckChain(waits, 3), { ranks: [3, 4], closes: -1 });
  const { core, gone } = coreOf(waits);
  assert.deepEqual([core, gone], [[0, 1, 3], [4]]);
});

test("steps go from instant to instant, and a moment has what is under way then", () => {
  const run = chainOfTwo();
  const times = instants(run);
  assert.deepEqual([...times], [0, 10, 12, 17]);
  assert.deepEqual([neighbour(times, 10, 1), neighbour(times, 10, -1), neighbour(times, 17, 1)], [12, 0, 17]);
  const lanes = lanesOf(run);
  assert.deepEqual(inFlight(run, lanes, 11), [[1, 2]]);
  assert.deepEqual(inFlight(run, lanes, 12), []);
  assert.deepEqual(running(lanes[0][0], 10), []);
});

test("a search reads fields, stretches and plain words, and finds in order of time", () => {
  const run = chainOfTwo();
  assert.deepEqual(termsOf('op:send rank3 "a b" line:4'), [{ field: "op", word: "send" }, { field: "rank", word: "3" }, { field: "", word: "a b" }, { field: "line", word: "4" }]);
  assert.deepEqual(search(run, "tensor:x"), [1, 2]);
  assert.deepEqual(search(run, "rank:1 backward"), [3]);
  assert.deepEqual(search(run, "line:4-5"), [0, 1]);
  assert.deepEqual(search(run, "nowhere"), []);
  assert.equal(search(run, "  "), null);
});

test("a view keeps the moment under the pointer, stays in the run and goes down to nanoseconds", () => {
  const closer = zoomed({ from: 0, to: 1000 }, 2, 250, 1000);
  assert.deepEqual(closer, { from: 125, to: 625 });
  assert.equal(clamped({ from: -50, to: 50 }, 1000).from, 0);
  const closest = zoomed({ from: 0, to: 1e9 }, 1e12, 5e8, 1e9);
  assert.ok(closest.to - closest.from <= 20);
  const { step, at } = ticks({ from: 0, to: 1000 }, 500, 100);
  assert.deepEqual([step, at], [200, [0, 200, 400, 600, 800, 1000]]);
});

test("tables sort by number and by text, and equal rows keep their order", () => {
  assert.deepEqual(sorted([[3], [1], [2]], 0, true), [1, 2, 0]);
  assert.deepEqual(sorted([["b"], ["a"], ["b"]], 0, false), [0, 2, 1]);
  assert.deepEqual(sorted([[["9 us", 9]], [["1 ms", 1000]]], 0, false), [1, 0]);
});

test("an animation ends with every rank holding every contribution once", () => {
  const held = [[[0, [[0, 0]]], [1, [[0, 0]]]], [[0, [[1, 0]]], [1, [[1, 0]]]]];
  const of = { op: "all_reduce", algorithm: "ring", n: 2, full: 2, chunking: "split", held, rounds: [[[0, 1, 1, 1], [1, 0, 0, 1]], [[0, 1, 0, 0], [1, 0, 1, 0]]] };
  const all = frames(of);
  assert.equal(all.length, 3);
  for (const chunks of all[2]) assert.deepEqual([...chunks.values()], [["0.0", "1.0"], ["0.0", "1.0"]]);
});

test("what is narrower than a pixel is as pale as its share of the pixel's time", () => {
  globalThis.ImageData = class {
    constructor(width, height) {
      this.data = new Uint8ClampedArray(4 * width * height);
    }
  };
  const grey = (v) => [v, v, v];
  const raster = new Raster(10, 4, { back: grey(250), fill: [0, 50, 200, 230, 100].map(grey), mark: [0, 0, 0, 0, 0].map(grey) }, 1);
  const lane = (start, end, kind) => ({ row: Int32Array.of(0), start: Float64Array.of(start), end: Float64Array.of(end), kind: Uint8Array.of(kind), reach: Float64Array.of(end) });
  raster.clear();
  raster.paint([lane(30, 31, COMPUTE), ], { from: 0, to: 100 }, 0, 4, null);
  const column = (x) => raster.pixels[x] & 255;
  assert.equal(column(3), 225); // a tenth of the way from 250 to 0
  assert.deepEqual([column(2), column(4)], [250, 250]);
  raster.clear();
  raster.paint([lane(0, 100, WAIT), lane(50, 55, COMPUTE)], { from: 0, to: 100 }, 0, 1, null);
  assert.equal(column(5), 100); // half of it compute, half the wait below
});

test("what a search leaves out is pale, and what it finds is not", () => {
  const grey = (v) => [v, v, v];
  const raster = new Raster(4, 1, { back: grey(250), fill: [0, 50, 200, 230, 100].map(grey), mark: [0, 0, 0, 0, 0].map(grey) }, 1);
  const lane = { row: Int32Array.of(0, 1), start: Float64Array.of(0, 2), end: Float64Array.of(2, 4), kind: Uint8Array.of(0, 0), reach: Float64Array.of(2, 4) };
  raster.clear();
  raster.paint([lane], { from: 0, to: 4 }, 0, 1, Uint8Array.of(1, 0));
  assert.deepEqual([raster.pixels[1] & 255, raster.pixels[3] & 255], [0, 200]);
});

test("blocks that come round again and again stand there once, with their number", () => {
  const folded = (text) => foldedBlocks([...text], (piece) => piece).map(({ piece, times }) => `${piece}${times}`).join(" ");
  assert.equal(folded("xababababy"), "x1 a4 b4 y1");
  assert.equal(folded("aaab"), "a3 b1");
  assert.equal(folded("abcab"), "a1 b1 c1 a1 b1");
  assert.equal(folded(""), "");
});

/** Rank 0 sends in a batch at 0 and receives what rank 1 sends at 9. */
function batchThatWaits(backend) {
  return made([
    { rank: 0, op: "compute", name: "forward", queue: "host", posted: 0, started: 0, finished: 4, returned: 0 },
    { rank: 0, op: "batch_isend_irecv", position: 1, posted: 0, returned: 0, started: 0, finished: 12 },
    { rank: 0, op: "isend", peer: 1, position: 1, part: 0, posted: 0, returned: 0, started: 0, finished: 1, match: 0, ended_by: 2 },
    { rank: 0, op: "irecv", peer: 1, position: 1, part: 1, posted: 0, returned: 0, started: 9, finished: 12, match: 1, ended_by: 2 },
    { rank: 0, op: "wait", position: 2, posted: 0, returned: backend === "nccl" ? 0 : 12 },
    { rank: 1, op: "irecv", peer: 0, posted: 0, returned: 0, started: 0, finished: 1, match: 0 },
    { rank: 1, op: "compute", name: "late", posted: 1, started: 1, finished: 9, returned: 9 },
    { rank: 1, op: "isend", peer: 0, posted: 9, returned: 9, started: 9, finished: 12, match: 1 },
  ], { backend });
}

/** The text of the panel of a call. */
function panelText(model, row) {
  fakeDocument();
  const panel = detailsPanel(model, { source() {}, line() {} });
  model.choose(0, row);
  return panel.textContent;
}

test("the panel of every call states the wait that the timeline draws, and a batch names its part that waits", () => {
  for (const backend of ["nccl", "gloo"]) {
    const model = new Model({ runs: [], sources: {} }, [batchThatWaits(backend)]);
    const waits = model.waitsIn(0);
    assert.deepEqual([...waits.keys()], [backend === "nccl" ? 3 : 4]);
    for (let row = 0; row < 8; row += 1) {
      const text = panelText(model, row);
      const wait = waits.get(row);
      if (wait) assert.match(text, new RegExp(`Why it waits ${wait.end - wait.start} ns.*rank 1 computes late`));
      else assert.doesNotMatch(text, /Why it waits/);
    }
    assert.match(panelText(model, 1), backend === "nccl" ? /irecv\(from 1\) waits \d+ ns/ : /No wait/);
    assert.match(panelText(model, 3), backend === "nccl" ? /Why it waits/ : /wait waits 12 ns/);
  }
});

test("a search finds the part that waits instead of its batch", () => {
  const model = new Model({ runs: [], sources: {} }, [batchThatWaits("nccl")]);
  model.find("rank:0 irecv");
  assert.deepEqual(model.hits, [[3]]);
  model.find("rank:0");
  assert.deepEqual(model.hits, [[0, 3, 2, 4]]);
});

test("work of the host has the host's lane and does not end a wait of the device", () => {
  const run = made([
    { rank: 0, op: "compute", name: "launches", queue: "host", posted: 0, started: 0, finished: 8, returned: 8 },
    { rank: 0, op: "irecv", peer: 1, posted: 0, returned: 0, started: 9, finished: 10, match: 0 },
    { rank: 1, op: "isend", peer: 0, posted: 9, returned: 9, started: 9, finished: 10, match: 0 },
  ], { backend: "nccl" });
  const [work, comm, host] = lanesOf(run)[0];
  assert.deepEqual([[...work.kind], [...comm.start], [...host.end]], [[], [0, 9], [8]]);
});

test("a representative rank stands for all ranks of its class, in lines, tables and shares", () => {
  const call = (rank, finished) => ({ rank, op: "compute", posted: 0, started: 0, finished, returned: finished });
  const run = { ...made([call(0, 5), call(3, 10)], { world: 6, ranks: [[0, 5, 0, 0, 5, 5], [3, 10, 0, 0, 0, 10]] }), shown: [0, 3], like: new Map([[0, [0, 1, 2, 4]], [3, [3, 5]]]) };
  const model = new Model({ runs: [], sources: {} }, [run]);
  assert.deepEqual(model.lines().map((line) => line.ranks), [[0, 1, 2, 4], [3, 5]]);
  assert.deepEqual(equalTimes(run).map((one) => one.ranks), [[0, 1, 2, 4], [3, 5]]);
  const [compute] = sharesOf(model);
  assert.deepEqual([compute[0], compute.at(-1).toFixed(6)], [1, (2 / 6).toFixed(6)]);
});

test("an address restores the view, the call and the search, and a damaged one changes nothing", () => {
  const opened = () => {
    const model = new Model({ runs: [], sources: {} }, [chainOfTwo()]);
    const timeline = { model, view: { from: 0, to: 17.34 }, show(view) { this.view = view; } };
    return timeline;
  };
  const first = opened();
  assert.equal(fragmentOf(first), "");
  first.model.choose(0, 2);
  first.model.find("rank:1 50%");
  first.show({ from: 3, to: 9 });
  assert.equal(fragmentOf(first), "time=3-9;call=0.1.0.-1;find=rank%3A1%2050%25");
  const second = opened();
  restore(second, `#${fragmentOf(first)}`);
  assert.deepEqual([second.view, second.model.chosen, second.model.sought], [{ from: 3, to: 9 }, { run: 0, row: 2 }, "rank:1 50%"]);
  const third = opened();
  for (const damaged of ["#findings", "#call=9.0.0.-1", "#call=0.7.7.-1;time=9-3", "#find=%E0%A4%A"]) restore(third, damaged);
  assert.deepEqual([third.view.to, third.model.chosen.row, third.model.sought], [17.34, -1, ""]);
});

test("the breakdown lists the parts of both runs and their difference", () => {
  fakeDocument();
  const run = (shares) => ({ ...chainOfTwo(), head: { ...chainOfTwo().head, breakdown: shares } });
  const model = new Model({ runs: [], sources: {} }, [run([["forward", "compute", 0.4], ["waiting", "waiting", 0.6]]), run([["forward", "compute", 1]])]);
  assert.match(breakdownTable(model).textContent, /forward 40 % 7 ns 100 % 17 ns \+60 % waiting 60 % 10 ns 0\.0 % - −60 %/);
});

test("the longest waits name the rank, the call and the main reason", () => {
  const model = new Model({ runs: [], sources: {}, columns: [], format: 1 }, [chainOfTwo()]);
  const [first, ...others] = longestWaits(model, 0);
  assert.deepEqual([first.ranks, first.total, first.count, first.reason], [[1], 10, 1, "rank 0 computes forward, line 4"]);
  assert.deepEqual(others, []);
});

test("faster resources are listed only if one of them changes the run time", () => {
  fakeDocument();
  const table = (speedups) => speedupsTable(new Model({ runs: [], sources: {}, columns: [], format: 1 }, [made([{ rank: 0, op: "compute", finished: 100, started: 0, posted: 0 }], { speedups })]), 0);
  assert.equal(table([["links inside a node", 100]]), null);
  const text = table([["compute (FLOP/s)", 60], ["links inside a node", 100]]).textContent;
  assert.match(text, /compute \(FLOP\/s\).*-40\.0 %/);
  assert.match(text, /links inside a node.*unchanged/);
});
