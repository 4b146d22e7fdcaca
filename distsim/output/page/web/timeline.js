/** The timeline: a line for each rank. Only the visible part is drawn. */

import { colour, h, replace, rgb } from "./dom.js";
import { APART, AXIS, WIDE, drawArrows, drawAxis, drawChoice, drawNames, drawPath, drawWords } from "./drawing.js";
import { showNs } from "./format.js";
import { LANES, reaching, spanAt } from "./lanes.js";
import { messagesOf } from "./model.js";
import { Raster } from "./raster.js";
import { around, clamped, panned, zoomed } from "./viewport.js";

const TALLEST = 66;
const LOWEST = 14;
/** Share of a line's height for each lane: for hosts that wait, and for hosts that only enqueue. */
const SHARES = [0.42, 0.36, 0.22];
const SHARES_OF_DEVICES = [0.54, 0.46, 0];

export class Timeline {
  /**
   * @param {import("./model.js").Model} model
   */
  constructor(model) {
    this.model = model;
    this.canvas = /** @type {HTMLCanvasElement} */ (h("canvas", {
      tabindex: 0, role: "application", "aria-roledescription": "timeline", "aria-label":
        "Timeline of the run. Plus and minus zoom, left and right arrows pan, up and down arrows select a rank, brackets select calls, "
        + "Enter describes the selected call, question mark lists all keys.",
    }));
    this.tip = h("div", { class: "tip", hidden: true });
    this.said = h("p", { class: "unseen", "aria-live": "polite" });
    this.box = h("div", { class: "canvas" }, this.canvas, this.tip, this.said);
    /** @type {View} */
    this.view = clamped({ from: 0, to: model.end * 1.02 }, model.end);
    this.scroll = 0;
    this.height = 0;
    this.gutter = 84;
    /** Whether any host has visible activity. */
    this.hosts = model.lanes.some((lanes) => lanes.some((three) => three[2].row.length > 0));
    this.showPath = true;
    this.showArrows = true;
    this.drawn = 0;
    this.lines = model.lines();
    /** Number of the line of each rank of a run. @type {{of: unknown, line: Int32Array[]}} */
    this.numbered = { of: null, line: [] };
    /** @type {Raster | null} */
    this.raster = null;
    this.messages = model.runs.map((run, i) => messagesOf(run, model.walk(i)));
    /** Called after each paint. */
    this.after = () => {};
    /** Called when the view has changed. */
    this.moved = () => {};
    /** Durations of the last paints, in ms. @type {number[]} */
    this.took = [];
    this.theme();
    model.on((what) => this.changed(what));
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  /** Read the colours from the current style. */
  theme() {
    const names = ["compute", "comm", "wait", "sleep", "stuck"];
    this.palette = {
      back: rgb(colour("--canvas")), fill: names.map((name) => rgb(colour(`--${name}`))), mark: names.map((name) => rgb(colour(`--${name}-mark`))),
    };
    this.ink = colour("--ink");
    this.back = colour("--canvas");
    this.label = colour("--label");
    this.veil = colour("--veil");
    this.inkOnCompute = colour("--compute-ink");
    this.grey = colour("--grey");
    this.line = colour("--line");
    this.accent = colour("--accent");
    this.critical = colour("--critical");
    this.raster = null;
  }

  /** @param {string} what */
  changed(what) {
    if (what === "theme") this.theme();
    if (what === "rows" || what === "choice") {
      const chosen = this.model.chosen;
      const known = this.lines.some((line) => line.run === chosen.run && line.ranks.length === 1 && line.ranks[0] === this.rankOf(chosen));
      if (what === "rows" || (this.model.folded && chosen.row >= 0 && !known)) this.lines = this.model.lines();
    }
    if (what === "rows") this.fit();
    if (what === "choice") this.reveal();
    this.draw();
  }

  /** @param {{run: number, row: number}} chosen */
  rankOf(chosen) {
    return chosen.row < 0 ? -1 : this.model.runs[chosen.run].rank[chosen.row];
  }

  resize() {
    const dots = window.devicePixelRatio || 1;
    const { clientWidth, clientHeight } = this.box;
    if (!clientWidth) return;
    this.canvas.width = Math.round(clientWidth * dots);
    this.canvas.height = Math.round(clientHeight * dots);
    this.raster = null;
    this.gutter = clientWidth < 560 ? 56 : 84;
    this.fit();
    this.paint();
  }

  /** Choose a height for the lines: all lines at once if they stay distinguishable. */
  fit() {
    this.box.style.height = this.lines.length < 12 ? `${AXIS + 8 + this.lines.length * TALLEST}px` : "";
    const room = this.box.clientHeight - AXIS - 4;
    this.height = Math.min(Math.max(Math.floor(room / Math.max(this.lines.length, 1)), LOWEST), TALLEST);
    this.scrollTo(this.scroll);
  }

  /** @param {number} factor */
  taller(factor) {
    this.height = Math.min(Math.max(Math.round(this.height * factor), LOWEST), 2 * TALLEST);
    this.scrollTo(this.scroll);
  }

  /** @param {number} to */
  scrollTo(to) {
    const most = this.lines.length * this.height - (this.box.clientHeight - AXIS - 4);
    this.scroll = Math.max(0, Math.min(to, most));
    this.draw();
  }

  /** @param {View} view */
  show(view) {
    this.view = clamped(view, this.model.end);
    this.moved();
    this.draw();
  }

  /**
   * @param {number} factor
   * @param {number} [at]
   */
  zoom(factor, at) {
    const middle = (this.view.from + this.view.to) / 2;
    const now = this.model.now;
    const inside = now >= this.view.from && now <= this.view.to;
    this.show(zoomed(this.view, factor, at ?? (inside ? now : middle), this.model.end));
  }

  /** @param {number} share */
  pan(share) {
    this.show(panned(this.view, share, this.model.end));
  }

  /** Zoom to the selected call. */
  closer() {
    const { run: index, row } = this.model.chosen;
    if (row < 0) return;
    const [from, to] = this.spanOf(index, row);
    this.show(around(from, to, this.model.end));
  }

  /**
   * @param {number} index
   * @param {number} row
   */
  spanOf(index, row) {
    const run = this.model.runs[index];
    const times = [run.posted[row], run.started[row], run.finished[row], run.returned[row]].filter((time) => time >= 0);
    return [Math.min(...times), run.finished[row] < 0 ? run.end : Math.max(...times)];
  }

  /** Scroll and pan until the selected call is visible. */
  reveal() {
    const { run: index, row } = this.model.chosen;
    if (row < 0) return;
    const at = this.model.now;
    if (at < this.view.from || at > this.view.to) {
      const half = (this.view.to - this.view.from) / 2;
      this.view = clamped({ from: at - half, to: at + half }, this.model.end);
    }
    const line = this.lineOf(index, this.model.runs[index].rank[row]);
    const room = this.box.clientHeight - AXIS;
    if (line * this.height < this.scroll) this.scroll = line * this.height;
    if ((line + 1) * this.height > this.scroll + room) this.scroll = (line + 1) * this.height - room;
    replace(this.said, this.model.words(index, row));
  }

  /**
   * @param {number} run
   * @param {number} rank
   */
  lineOf(run, rank) {
    if (this.numbered.of !== this.lines) {
      this.numbered = { of: this.lines, line: this.model.runs.map((one) => new Int32Array(one.world)) };
      this.lines.forEach((line, i) => line.ranks.forEach((r) => { this.numbered.line[line.run][r] = i; }));
    }
    return this.numbered.line[run][rank];
  }

  draw() {
    this.drawn ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.drawn);
    this.drawn = 0;
    const context = this.canvas.getContext("2d", { alpha: false });
    if (!context || !this.canvas.width) return;
    const began = performance.now();
    const dots = this.canvas.width / this.box.clientWidth;
    context.setTransform(1, 0, 0, 1, 0, 0);
    const labels = this.pixels(context, dots);
    context.setTransform(dots, 0, 0, dots, 0, 0);
    drawAxis(this, context);
    drawNames(this, context);
    this.inside(context, () => {
      drawWords(this, context, labels);
      if (this.showArrows) drawArrows(this, context);
      if (this.showPath) drawPath(this, context);
      drawChoice(this, context);
    });
    this.after();
    this.took = [...this.took.slice(-299), performance.now() - began];
  }

  /** @param {number} time */
  x(time) {
    return this.gutter + ((time - this.view.from) / (this.view.to - this.view.from)) * (this.box.clientWidth - this.gutter);
  }

  /** @param {number} x */
  time(x) {
    return this.view.from + ((x - this.gutter) / (this.box.clientWidth - this.gutter)) * (this.view.to - this.view.from);
  }

  /** @param {number} line */
  y(line) {
    return AXIS + line * this.height - this.scroll;
  }

  /**
   * Top and height of a lane inside its line.
   * @param {number} lane
   */
  lane(lane) {
    const room = this.height - 3;
    if (this.height < APART) return { top: 0, height: room };
    const shares = this.hosts ? SHARES : SHARES_OF_DEVICES;
    const before = shares.slice(0, lane).reduce((a, b) => a + b, 0);
    return { top: Math.round(before * room), height: Math.round((before + shares[lane]) * room) - Math.round(before * room) - 1 };
  }

  /** The first visible line, and the one after the last. */
  seen() {
    const first = Math.max(0, Math.floor(this.scroll / this.height));
    const last = Math.min(this.lines.length, Math.ceil((this.scroll + this.box.clientHeight - AXIS) / this.height));
    return { first, last };
  }

  /**
   * Draw the lanes; returns the spans that have room for text.
   * @param {CanvasRenderingContext2D} context
   * @param {number} dots
   */
  pixels(context, dots) {
    const width = this.canvas.width - Math.round(this.gutter * dots);
    const height = this.canvas.height - Math.round(AXIS * dots);
    context.fillStyle = this.back ?? "";
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    /** @type {{run: number, lane: Lane, i: number, line: number, k: number}[]} */
    const labels = [];
    if (width < 1 || height < 1 || !this.palette) return labels;
    this.raster ??= new Raster(width, height, this.palette, dots);
    this.raster.clear();
    const { first, last } = this.seen();
    for (let line = first; line < last; line += 1) {
      const { run, ranks } = this.lines[line];
      const lanes = this.model.lanes[run][ranks[0]];
      for (const k of this.height < APART ? [0] : [2, 1, 0]) {
        const place = this.lane(k);
        const top = Math.round((this.y(line) - AXIS + place.top + 1) * dots);
        const over = this.height < APART ? [lanes[2], lanes[1], lanes[0]] : [lanes[k]];
        this.raster.paint(over, this.view, top, Math.max(1, Math.round(place.height * dots)), this.model.marks[run]);
        over.forEach((lane) => this.wide(lane, run, line, k, labels));
      }
    }
    context.putImageData(this.raster.image, Math.round(this.gutter * dots), Math.round(AXIS * dots));
    return labels;
  }

  /**
   * @param {Lane} lane
   * @param {number} run
   * @param {number} line
   * @param {number} k
   * @param {{run: number, lane: Lane, i: number, line: number, k: number}[]} labels
   */
  wide(lane, run, line, k, labels) {
    const [from, to] = reaching(lane, this.view.from, this.view.to);
    const least = (WIDE / (this.box.clientWidth - this.gutter)) * (this.view.to - this.view.from);
    if (to - from > 3000 || this.lane(k).height < 11) return;
    for (let i = from; i < to; i += 1) if (lane.end[i] - lane.start[i] >= least) labels.push({ run, lane, i, line, k });
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {() => void} act
   */
  inside(context, act) {
    context.save();
    context.beginPath();
    context.rect(this.gutter, AXIS, this.box.clientWidth - this.gutter, this.box.clientHeight - AXIS);
    context.clip();
    act();
    context.restore();
  }

  /**
   * The call under a point of the picture; null if there is none.
   * @param {number} x
   * @param {number} y
   */
  under(x, y) {
    const line = Math.floor((y - AXIS + this.scroll) / this.height);
    const found = this.lines[line];
    if (!found || y < AXIS || x < this.gutter) return null;
    const inside = y - this.y(line);
    const slack = 3 * ((this.view.to - this.view.from) / (this.box.clientWidth - this.gutter));
    const places = LANES.map((_, k) => ({ k, ...this.lane(k) })).filter((p) => inside >= p.top && inside <= p.top + p.height + 1);
    for (const exact of [0, slack]) {
      for (const { k } of places) {
        const lane = this.model.lanes[found.run][found.ranks[0]][k];
        const i = spanAt(lane, this.time(x), exact);
        if (i >= 0) return { run: found.run, row: lane.row[i], ns: lane.end[i] - lane.start[i], kind: lane.kind[i], ranks: found.ranks };
      }
    }
    return null;
  }

  /**
   * @param {number} x
   * @param {number} y
   */
  hint(x, y) {
    const found = this.under(x, y);
    this.tip.hidden = !found;
    if (!found) return;
    const doing = ["computes", "communicates", "waits", "sleeps", "is blocked"][found.kind];
    const many = found.ranks.length > 1 ? h("div", { class: "grey" }, `and ${found.ranks.length - 1} identical ranks`) : null;
    replace(this.tip, h("strong", {}, this.model.words(found.run, found.row)), h("div", {}, `${doing} for ${showNs(found.ns)}`), many);
    const right = x + 16 + this.tip.offsetWidth > this.box.clientWidth;
    this.tip.style.left = `${Math.max(0, right ? x - this.tip.offsetWidth - 10 : x + 14)}px`;
    this.tip.style.top = `${Math.min(y + 16, this.box.clientHeight - this.tip.offsetHeight - 4)}px`;
  }
}
