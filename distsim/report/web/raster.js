/**
 * Lanes as pixels. What is narrower than a pixel is not widened: a column takes as much of a colour as of its time was spent on it.
 * Kinds are told apart by lightness and by hatching, so that neither colour nor a good screen is needed.
 */

import { COMM, SLEEP, STUCK, WAIT } from "./calls.js";
import { reaching } from "./lanes.js";

/** Kinds, one more for the beginning of a span, and as many for what a search leaves pale. */
const KINDS = 5;

/**
 * @typedef {object} Palette colours as [red, green, blue]
 * @property {number[]} back
 * @property {number[][]} fill by kind
 * @property {number[][]} mark by kind: stripes, dots, edges
 */

/**
 * @param {number[]} a
 * @param {number[]} b
 * @param {number} share of b
 */
function mixed(a, b, share) {
  return a.map((value, i) => value + (b[i] - value) * share);
}

/** @param {number[]} rgb */
function pixel(rgb) {
  return (0xff000000 | (Math.round(rgb[2]) << 16) | (Math.round(rgb[1]) << 8) | Math.round(rgb[0])) >>> 0;
}

/** A picture of lanes that are painted one by one. */
export class Raster {
  /**
   * @param {number} width
   * @param {number} height
   * @param {Palette} palette
   * @param {number} dots device pixels of one of the page
   */
  constructor(width, height, palette, dots) {
    this.width = width;
    this.height = height;
    this.palette = palette;
    this.period = Math.max(6, Math.round(6 * dots));
    this.image = new ImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.solid = new Uint8Array(width);
    this.share = new Float32Array(width * KINDS * 2);
    this.used = new Uint8Array(width);
    this.plain = new Uint32Array(width);
    this.marked = new Uint32Array(width);
    const { back, fill, mark } = palette;
    const pale = (/** @type {number[]} */ colour) => mixed(colour, back, 0.8);
    /** Colours of kinds, plain and then pale. */
    this.fills = [...fill, ...fill.map(pale)];
    this.fill = Uint32Array.from(this.fills, pixel);
    this.mark = Uint32Array.from([...mark, ...mark.map(pale)], pixel);
    this.back = pixel(back);
  }

  clear() {
    this.pixels.fill(this.back);
  }

  /**
   * Spans of a lane between two lines of the picture.
   * @param {Lane} lane
   * @param {View} view
   * @param {number} top
   * @param {number} height
   * @param {Uint8Array | null} found rows that a search found
   */
  paint(lane, view, top, height, found) {
    const { width, solid, used } = this;
    const scale = width / (view.to - view.from);
    const [from, to] = reaching(lane, view.from, view.to);
    if (from >= to) return;
    solid.fill(0);
    used.fill(0);
    for (let i = from; i < to; i += 1) {
      const left = Math.max((lane.start[i] - view.from) * scale, 0);
      const right = Math.min((lane.end[i] - view.from) * scale, width);
      if (right <= left) continue;
      const kind = lane.kind[i] + (found && !found[lane.row[i]] ? KINDS : 0);
      this.span(left, right, kind, lane.start[i] >= view.from);
    }
    this.write(top, height, Math.round(view.from * scale) % (2 * this.period));
  }

  /**
   * @param {number} left
   * @param {number} right
   * @param {number} kind
   * @param {boolean} begins whether its beginning is in the picture
   */
  span(left, right, kind, begins) {
    const first = Math.floor(left);
    const last = Math.min(Math.floor(right), this.width - 1);
    if (first === last) {
      this.part(first, kind, right - left);
      return;
    }
    if (left > first) this.part(first, kind, first + 1 - left);
    const whole = left > first ? first + 1 : first;
    const edge = begins && right - left >= 4 ? 1 : 0;
    if (edge && whole < this.width) this.solid[whole] = 128 | (kind + 1);
    if (whole + edge < last) this.solid.fill(kind + 1, whole + edge, last);
    if (right > last && last < this.width) this.part(last, kind, right - last);
  }

  /**
   * @param {number} x
   * @param {number} kind
   * @param {number} share
   */
  part(x, kind, share) {
    const at = x * KINDS * 2;
    if (!this.used[x]) {
      this.used[x] = 1;
      this.share.fill(0, at, at + KINDS * 2);
    }
    this.share[at + kind] += share;
  }

  /**
   * @param {number} x
   * @param {number[]} under
   */
  blended(x, under) {
    const at = x * KINDS * 2;
    let [r, g, b] = under;
    let total = 0;
    for (let kind = 0; kind < 2 * KINDS; kind += 1) total += this.share[at + kind];
    const scale = total > 1 ? 1 / total : 1;
    const rest = Math.max(0, 1 - total);
    [r, g, b] = [r * rest, g * rest, b * rest];
    for (let kind = 0; kind < 2 * KINDS; kind += 1) {
      const share = this.share[at + kind] * scale;
      if (!share) continue;
      const rgb = this.fills[kind];
      r += rgb[0] * share;
      g += rgb[1] * share;
      b += rgb[2] * share;
    }
    return pixel([r, g, b]);
  }

  /**
   * Columns into the rows of the picture; what they leave free stays as it is.
   * @param {number} top
   * @param {number} height
   * @param {number} phase of the hatching, so that it moves with the time
   */
  write(top, height, phase) {
    const { width, solid, used, plain, marked, pixels, period } = this;
    const { back } = this.palette;
    for (let x = 0; x < width; x += 1) {
      const value = solid[x];
      if (value) {
        const kind = (value & 127) - 1;
        plain[x] = value & 128 ? this.mark[kind] : this.fill[kind];
        marked[x] = this.mark[kind];
      } else if (used[x]) plain[x] = this.blended(x, back);
    }
    const bottom = Math.min(top + height, this.height);
    const stripe = Math.max(1, period >> 2);
    for (let y = Math.max(top, 0); y < bottom; y += 1) {
      const line = y * width;
      for (let x = 0; x < width; x += 1) {
        const value = solid[x];
        if (!value) {
          if (used[x]) pixels[line + x] = plain[x];
          continue;
        }
        const at = x + phase;
        pixels[line + x] = isMarked(((value & 127) - 1) % KINDS, at, y, period, stripe) ? marked[x] : plain[x];
      }
    }
  }
}

/**
 * @param {number} kind
 * @param {number} x
 * @param {number} y
 * @param {number} period
 * @param {number} stripe
 */
function isMarked(kind, x, y, period, stripe) {
  if (kind === COMM) return (x + y) % period < stripe;
  if (kind === WAIT) return x % period < stripe && y % period < stripe;
  if (kind === STUCK) return (x + y) % period < stripe || (x - y + 4096 * period) % period < stripe;
  if (kind === SLEEP) return y % period < 1;
  return false;
}
