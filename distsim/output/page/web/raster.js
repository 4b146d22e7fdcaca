/**
 * Lanes as pixels. Spans narrower than a pixel are not widened: a column mixes the colours by their share of its time.
 * Kinds differ in lightness and hatching, so that they are distinct without colour.
 */

import { COMM, COMPUTE, SLEEP, STUCK, WAIT } from "./calls.js";
import { reaching } from "./lanes.js";

/** The number of kinds of spans. There are as many pale kinds, for calls that a search did not find. */
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

/** Steps from transparent to the full colour. */
const STEPS = 255;

/** An image to which lanes are painted one by one. */
export class Raster {
  /**
   * @param {number} width
   * @param {number} height
   * @param {Palette} palette
   * @param {number} dots device pixels per CSS pixel
   */
  constructor(width, height, palette, dots) {
    this.width = width;
    this.height = height;
    this.period = Math.max(6, Math.round(6 * dots));
    this.image = new ImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    /** For each column: 1 + the kind that fills it; plus 128 if a span begins there; 0 if no kind fills it. */
    this.solid = new Uint8Array(width);
    /** For each column: 1 + the kind that covers a part of it; 255 if several kinds do. */
    this.used = new Uint8Array(width);
    this.share = new Float32Array(width * KINDS * 2);
    this.plain = new Uint32Array(width);
    /** The hatched columns. */
    this.hatched = new Int32Array(width);
    const { back, fill, mark } = palette;
    const pale = (/** @type {number[]} */ colour) => mixed(colour, back, 0.8);
    /** Colours of kinds, plain and then pale. */
    this.fills = [...fill, ...fill.map(pale)];
    this.fill = Uint32Array.from(this.fills, pixel);
    this.mark = Uint32Array.from([...mark, ...mark.map(pale)], pixel);
    this.back = pixel(back);
    this.backColour = back;
    /** Each kind's colour over the background, by its share of a column. */
    this.faint = this.fills.map((colour) => Uint32Array.from({ length: STEPS + 1 }, (_, i) => pixel(mixed(back, colour, i / STEPS))));
  }

  clear() {
    this.pixels.fill(this.back);
  }

  /**
   * Lanes between two lines of the picture, each over the one before.
   * @param {Lane[]} lanes
   * @param {View} view
   * @param {number} top
   * @param {number} height
   * @param {Uint8Array | null} found marks of rows that a search found
   */
  paint(lanes, view, top, height, found) {
    const phase = Math.round(view.from * (this.width / (view.to - view.from))) % (2 * this.period);
    let any = false;
    this.plain.fill(this.back);
    this.solid.fill(0);
    for (const lane of lanes) {
      const [from, to] = reaching(lane, view.from, view.to);
      if (from >= to) continue;
      any = true;
      this.used.fill(0);
      this.spans(lane, from, to, view, found);
      this.blend();
    }
    if (any) this.write(top, height, phase);
  }

  /**
   * @param {Lane} lane
   * @param {number} from
   * @param {number} to
   * @param {View} view
   * @param {Uint8Array | null} found
   */
  spans(lane, from, to, view, found) {
    const { width, used, share } = this;
    const { start, end, kind: kinds, row } = lane;
    const scale = width / (view.to - view.from);
    const zero = view.from;
    for (let i = from; i < to; i += 1) {
      let left = (start[i] - zero) * scale;
      let right = (end[i] - zero) * scale;
      const begins = left >= 0;
      if (!begins) left = 0;
      if (right > width) right = width;
      if (right <= left) continue;
      const kind = kinds[i] + (found !== null && found[row[i]] === 0 ? KINDS : 0);
      const x = left | 0;
      if (x === (right | 0)) {
        const at = x * KINDS * 2;
        if (used[x] === 0) {
          used[x] = kind + 1;
          share[at + kind] = right - left;
        } else this.add(x, kind, right - left);
      } else this.span(left, right, kind, begins);
    }
  }

  /**
   * @param {number} left
   * @param {number} right
   * @param {number} kind
   * @param {boolean} begins whether its start is visible
   */
  span(left, right, kind, begins) {
    const first = left | 0;
    const last = Math.min(right | 0, this.width);
    if (left > first) this.add(first, kind, first + 1 - left);
    const whole = left > first ? first + 1 : first;
    const edge = begins && right - left >= 4 ? 1 : 0;
    if (edge && whole < last) this.solid[whole] = 128 | (kind + 1);
    if (whole + edge < last) this.solid.fill(kind + 1, whole + edge, last);
    if (right > last && last < this.width) this.add(last, kind, right - last);
  }

  /**
   * A part of a column.
   * @param {number} x
   * @param {number} kind
   * @param {number} part
   */
  add(x, kind, part) {
    const at = x * KINDS * 2;
    if (this.used[x] === 0) {
      this.used[x] = kind + 1;
      this.share[at + kind] = part;
    } else if (this.used[x] === kind + 1) this.share[at + kind] += part;
    else this.mix(at, x, kind, part);
  }

  /**
   * A further kind in a column.
   * @param {number} at
   * @param {number} x
   * @param {number} kind
   * @param {number} part
   */
  mix(at, x, kind, part) {
    const { share, used } = this;
    if (used[x] !== 255) {
      const before = share[at + used[x] - 1];
      share.fill(0, at, at + KINDS * 2);
      share[at + used[x] - 1] = before;
      used[x] = 255;
    }
    share[at + kind] += part;
  }

  /** Paint the collected spans of a lane over the earlier lanes. */
  blend() {
    const { width, solid, used, plain, share } = this;
    for (let x = 0; x < width; x += 1) {
      const value = solid[x];
      if (value !== 0) {
        plain[x] = value & 128 ? this.mark[(value & 127) - 1] : this.fill[value - 1];
        if (used[x] === 0) continue;
      }
      const one = used[x];
      if (one === 0) continue;
      if (one !== 255 && value === 0 && plain[x] === this.back) {
        plain[x] = this.faint[one - 1][Math.min(STEPS, (share[x * KINDS * 2 + one - 1] * STEPS + 0.5) | 0)];
      } else plain[x] = this.blended(x, one);
      solid[x] = 0;
    }
  }

  /**
   * @param {number} x
   * @param {number} one
   */
  blended(x, one) {
    const at = x * KINDS * 2;
    const { share, fills } = this;
    const under = this.plain[x];
    let total = 0;
    for (let kind = 0; kind < 2 * KINDS; kind += 1) if (one === 255 || one === kind + 1) total += share[at + kind];
    const scale = total > 1 ? 1 / total : 1;
    const rest = total > 1 ? 0 : 1 - total;
    let [r, g, b] = [(under & 255) * rest, ((under >> 8) & 255) * rest, ((under >> 16) & 255) * rest];
    for (let kind = 0; kind < 2 * KINDS; kind += 1) {
      if (one !== 255 && one !== kind + 1) continue;
      const part = share[at + kind] * scale;
      r += fills[kind][0] * part;
      g += fills[kind][1] * part;
      b += fills[kind][2] * part;
    }
    return (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
  }

  /**
   * Copy the columns into the rows of the image.
   * @param {number} top
   * @param {number} height
   * @param {number} phase of the hatching, so that it moves with the time
   */
  write(top, height, phase) {
    const { width, solid, plain, pixels, period, hatched } = this;
    let count = 0;
    for (let x = 0; x < width; x += 1) {
      const value = solid[x];
      if (value !== 0 && value < 128 && (value - 1) % KINDS !== COMPUTE) hatched[count++] = x;
    }
    const bottom = Math.min(top + height, this.height);
    const stripe = Math.max(1, period >> 2);
    for (let y = Math.max(top, 0); y < bottom; y += 1) {
      const line = y * width;
      pixels.set(plain, line);
      for (let i = 0; i < count; i += 1) {
        const x = hatched[i];
        const kind = solid[x] - 1;
        if (isMarked(kind % KINDS, x + phase, y, period, stripe)) pixels[line + x] = this.mark[kind];
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
