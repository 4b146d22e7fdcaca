/** Decodes the data in the page to typed columns: the counterpart of `distsim/output/page/data_encoding.py` and `call_columns.py`. */

/**
 * Decodes base64 of deflated bytes: the JSON, and the numbers of each column.
 * @param {string} text
 * @returns {Promise<{data: Data, columns: Map<string, Float64Array>}>}
 */
export async function unpack(text) {
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const data = /** @type {Data} */ (JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length))));
  const columns = new Map();
  let at = 4 + length;
  for (const [name, count, size] of data.columns) {
    columns.set(name, varints(bytes.subarray(at, at + size), count));
    at += size;
  }
  return { data, columns };
}

/**
 * @param {Uint8Array} bytes
 * @param {number} count
 */
export function varints(bytes, count) {
  const found = new Float64Array(count);
  let at = 0;
  for (let i = 0; i < count; i += 1) {
    let value = 0;
    let factor = 1;
    let byte = bytes[at++];
    while (byte > 127) {
      value += (byte - 128) * factor;
      factor *= 128;
      byte = bytes[at++];
    }
    found[i] = value + byte * factor;
  }
  return found;
}

/**
 * 0, 1, 2, 3, 4 encode 0, -1, 1, -2, 2.
 * @param {number} value
 */
export function unfolded(value) {
  return value % 2 ? -(value + 1) / 2 : value / 2;
}

/**
 * Sums up a column of differences.
 * @param {Float64Array} column
 */
function summed(column) {
  const found = new Float64Array(column.length);
  let value = 0;
  for (let i = 0; i < column.length; i += 1) {
    value += unfolded(column[i]);
    found[i] = value;
  }
  return found;
}

/**
 * 0 means never; other numbers are 1 + the encoded difference to `base`.
 * @param {Float64Array} column
 * @param {(i: number) => number} base
 */
function after(column, base) {
  return column.map((value, i) => (value ? base(i) + unfolded(value - 1) : -1));
}

/**
 * @param {number} index
 * @param {Head} head
 * @param {Map<string, Float64Array>} columns
 * @returns {Run}
 */
export function runOf(index, head, columns) {
  const take = (/** @type {string} */ name) => columns.get(`${index}.${name}`) ?? null;
  const need = (/** @type {string} */ name) => take(name) ?? new Float64Array(0);
  const plain = (/** @type {string} */ name) => Int32Array.from(need(name), (v) => v - 1);
  const optional = (/** @type {string} */ name, /** @type {number} */ n) => (take(name) ? plain(name) : new Int32Array(n).fill(-1));
  const counts = need("rank");
  const first = new Int32Array(counts.length + 1);
  counts.forEach((n, rank) => { first[rank + 1] = first[rank] + n; });
  const count = first[counts.length];
  const rank = new Int32Array(count);
  counts.forEach((_, r) => rank.fill(r, first[r], first[r + 1]));
  const posted = summed(need("posted"));
  const position = Int32Array.from(summed(need("position")));
  const started = after(need("started"), (i) => posted[i]);
  const returned = after(need("returned"), (i) => posted[i]);
  return {
    index, head, count, world: counts.length, ...classesOf(head, counts.length), end: endOf(head, posted, returned), first, rank, posted, position, started,
    returned,
    finished: after(need("finished"), (i) => (started[i] >= 0 ? started[i] : posted[i])),
    op: plain("op"), group: plain("group"), peer: plain("peer"), dtype: plain("dtype"), reduce_op: plain("reduce_op"),
    place: plain("place"), queue: plain("queue"), name: plain("name"), part: plain("part"),
    tensor: optional("tensor", count), root: optional("root", count), price: optional("price", count),
    tag: need("tag").map(unfolded), nbytes: summed(need("nbytes")), iteration: Int32Array.from(summed(need("iteration"))),
    match: Int32Array.from(summed(need("match"))),
    ended_by: Int32Array.from(after(need("ended_by"), (i) => position[i])),
    path: {
      row: plain("path_row"), rank: Int32Array.from(need("path_rank")), start: summed(need("path_start")), end: summed(need("path_end")),
      why: Int32Array.from(need("path_why")),
    },
    held: take("held_rank") ? {
      rank: Int32Array.from(summed(need("held_rank"))), label: Int32Array.from(need("held_label")),
      text: Int32Array.from(need("held_text")), row: Int32Array.from(summed(need("held_row")), (v) => v - 1),
    } : null,
  };
}

/**
 * The ranks whose calls the report has, and by rank all ranks that it stands for.
 * @param {Head} head
 * @param {number} world
 */
function classesOf(head, world) {
  if (!head.classes) return { shown: Array.from({ length: world }, (_, rank) => rank), like: null };
  return { shown: head.classes.map((ranks) => ranks[0]), like: new Map(head.classes.map((ranks) => [ranks[0], ranks])) };
}

/**
 * All ranks that a shown rank stands for, itself first.
 * @param {Run} run
 * @param {number} rank
 */
export function ranksLike(run, rank) {
  return run.like?.get(rank) ?? [rank];
}

/**
 * The end of the timeline. In a hang, it is later than the last event, so that blocked calls are visible.
 * @param {Head} head
 * @param {Float64Array} posted
 * @param {Float64Array} returned
 */
function endOf(head, posted, returned) {
  const hangs = posted.some((time, i) => time >= 0 && returned[i] < 0) || head.waits_of === "this run";
  return hangs ? Math.max(head.makespan * 1.15, 1000) : head.makespan;
}
