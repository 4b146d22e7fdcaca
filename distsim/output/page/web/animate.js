/** The algorithm of a collective, round by round: the transfers, and the chunks that each rank holds. */

import { button, h, replace, s } from "./dom.js";
import { plural } from "./format.js";

const SIZE_OF_PICTURE = 520;
const CELL = 15;
const ROUND_MS = 1100;

/**
 * The chunks of the ranks before each round, and at the end: by rank, chunk -> contributions as `rank.part`.
 * @param {Animation} of
 * @returns {Map<number, string[]>[][]}
 */
export function frames(of) {
  let held = of.held.map((chunks) => new Map(chunks.map(([chunk, what]) => [chunk, what.map(([rank, part]) => `${rank}.${part}`)])));
  const found = [held];
  for (const round of of.rounds) {
    const next = held.map((chunks) => new Map(chunks));
    for (const [src, dst, chunk, reduce] of round) {
      const what = held[src].get(chunk) ?? [];
      next[dst].set(chunk, reduce ? [...(next[dst].get(chunk) ?? []), ...what].sort() : what);
    }
    held = next;
    found.push(held);
  }
  return found;
}

/** @param {Animation[]} animations */
export function animationView(animations) {
  if (!animations.length) return null;
  const choice = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": "Collective and algorithm" },
    ...animations.map((a, i) => h("option", { value: i }, `${a.op}, ${a.algorithm}, ${a.n} ranks`))));
  const slider = /** @type {HTMLInputElement} */ (h("input", { type: "range", min: 0, step: 1, "aria-label": "Round" }));
  const words = h("p", { "aria-live": "polite" });
  const stage = h("div", { class: "stage" });
  let timer = 0;
  let of = animations[0];
  let all = frames(of);
  const draw = (/** @type {number} */ moving) => {
    const round = Number(slider.value);
    replace(stage, scene(of, all[round], moving >= 0 ? of.rounds[moving] : of.rounds[round] ?? []));
    words.textContent = tellRound(of, round);
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶ play";
  };
  const to = (/** @type {number} */ round) => {
    slider.value = String(Math.min(Math.max(round, 0), of.rounds.length));
    draw(-1);
  };
  const play = button("▶ play", "Play the rounds", () => {
    if (timer) {
      stop();
      return;
    }
    if (Number(slider.value) >= of.rounds.length) to(0);
    play.textContent = "❚❚ pause";
    timer = window.setInterval(() => {
      if (Number(slider.value) >= of.rounds.length) stop();
      else to(Number(slider.value) + 1);
    }, ROUND_MS);
  });
  const load = () => {
    stop();
    of = animations[choice.selectedIndex];
    all = frames(of);
    slider.max = String(of.rounds.length);
    to(0);
  };
  choice.addEventListener("change", load);
  slider.addEventListener("input", () => { stop(); draw(-1); });
  load();
  return h("div", {}, h("p", { class: "bar-of-buttons" }, choice, button("‹", "Previous round", () => { stop(); to(Number(slider.value) - 1); }), play,
    button("›", "Next round", () => { stop(); to(Number(slider.value) + 1); }), slider), words, stage);
}

/**
 * @param {Animation} of
 * @param {number} round
 */
function tellRound(of, round) {
  const shown = of.full > of.n ? ` (${of.n} of ${of.full} ranks shown)` : "";
  if (round >= of.rounds.length) return `Done after ${plural(of.rounds.length, "round")}${shown}: each filled cell is a chunk that the rank holds; numbers count combined contributions.`;
  const sends = of.rounds[round].length;
  const combined = of.rounds[round].some((t) => t[3]) ? "receivers combine the data with their own" : "receivers store the data";
  return `Round ${round + 1} of ${of.rounds.length}${shown}: ${plural(sends, "transfer")}; ${combined}.`;
}

/**
 * Ranks in a circle, with a cell for each chunk, and arrows for the transfers of this round.
 * @param {Animation} of
 * @param {Map<number, string[]>[]} held
 * @param {[number, number, number, number][]} moving
 */
function scene(of, held, moving) {
  const pieces = [...new Set([...held.flatMap((chunks) => [...chunks.keys()]), ...of.rounds.flat().map((t) => t[2])])].sort((a, b) => a - b);
  const across = of.chunking === "pair" ? of.n : Math.min(pieces.length, 8);
  const size = of.n < 3 ? 300 : of.n < 5 ? 400 : SIZE_OF_PICTURE;
  const middle = size / 2;
  const radius = middle - 78;
  const at = held.map((_, rank) => {
    const angle = (2 * Math.PI * rank) / of.n - Math.PI / 2;
    return /** @type {[number, number]} */ ([middle + radius * Math.cos(angle), middle + radius * Math.sin(angle)]);
  });
  const most = Math.max(1, of.n);
  return s("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", class: "rounds", style: `max-width: ${size * 1.15}px`, "aria-label": `${of.op} among ${of.n} ranks` },
    s("defs", {}, s("marker", { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, s("path", { d: "M0 0L8 4L0 8z", class: "head" }))),
    ...pairsOf(moving).map(([src, dst, chunks]) => transfer(at[src], at[dst], chunks, middle)),
    ...held.map((chunks, rank) => rankBox(at[rank], rank, chunks, pieces, across, most)));
}

/**
 * Transfers between the same two ranks travel as one.
 * @param {[number, number, number, number][]} moving
 * @returns {[number, number, number[]][]}
 */
function pairsOf(moving) {
  /** @type {Map<string, [number, number, number[]]>} */
  const found = new Map();
  for (const [src, dst, chunk] of moving) {
    const one = found.get(`${src}>${dst}`) ?? [src, dst, []];
    one[2].push(chunk);
    found.set(`${src}>${dst}`, one);
  }
  return [...found.values()];
}

/**
 * @param {[number, number]} from
 * @param {[number, number]} to
 * @param {number[]} chunks
 * @param {number} middle
 */
function transfer([x0, y0], [x1, y1], chunks, middle) {
  const far = Math.hypot(x1 - x0, y1 - y0) || 1;
  const cut = Math.min(52, far / 3) / far;
  const [ax, ay, bx, by] = [x0 + (x1 - x0) * cut, y0 + (y1 - y0) * cut, x1 - (x1 - x0) * cut, y1 - (y1 - y0) * cut];
  const [cx, cy] = [(ax + bx) / 2 + ((ax + bx) / 2 - middle) * 0.12, (ay + by) / 2 + ((ay + by) / 2 - middle) * 0.12];
  const way = `M${ax.toFixed(1)} ${ay.toFixed(1)}Q${cx.toFixed(1)} ${cy.toFixed(1)} ${bx.toFixed(1)} ${by.toFixed(1)}`;
  const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  return s("g", {}, s("path", { d: way, class: "move", "marker-end": "url(#tip)" }),
    !still && s("circle", { r: 5, class: "dot" }, s("animateMotion", { path: way, dur: `${ROUND_MS}ms`, repeatCount: "indefinite" })),
    s("text", { x: cx, y: cy, class: "piece" }, chunks.length > 3 ? `${chunks.length} pieces` : chunks.join(", ")));
}

/**
 * @param {[number, number]} place
 * @param {number} rank
 * @param {Map<number, string[]>} chunks
 * @param {number[]} pieces
 * @param {number} across
 * @param {number} most
 */
function rankBox([x, y], rank, chunks, pieces, across, most) {
  const down = Math.ceil(pieces.length / across);
  const [left, top] = [x - (across * CELL) / 2, y - (down * CELL) / 2 + 6];
  return s("g", {}, s("rect", { x: left - 6, y: top - 20, width: across * CELL + 12, height: down * CELL + 26, rx: 5, class: "rank" }),
    s("text", { x, y: top - 8, class: "label" }, `rank ${rank}`),
    ...pieces.flatMap((piece, i) => {
      const count = chunks.get(piece)?.length ?? 0;
      const [cx, cy] = [left + (i % across) * CELL, top + Math.floor(i / across) * CELL];
      return [s("rect", { x: cx, y: cy, width: CELL - 1, height: CELL - 1, class: count ? "full" : "empty", "fill-opacity": count ? (0.25 + (0.75 * count) / most).toFixed(2) : 1 }),
        count > 1 && s("text", { x: cx + CELL / 2 - 0.5, y: cy + CELL / 2, class: count * 2 > most ? "count light" : "count" }, String(count))];
    }));
}
