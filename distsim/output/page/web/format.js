/** Formats numbers as the command line does. */

/** @type {[string, number][]} */
const TIMES = [["s", 1e9], ["ms", 1e6], ["us", 1e3], ["ns", 1]];
/** @type {[string, number][]} */
const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];

/**
 * Four significant digits in the largest unit that gives at least 1.
 * @param {number} number
 * @param {[string, number][]} units
 */
function rounded(number, units) {
  for (const [name, factor] of units) {
    const digits = Number((number / factor).toPrecision(4));
    if (Math.abs(digits) >= 1 || factor === 1) return `${digits} ${name}`;
  }
  return String(number);
}

/** @param {number} ns */
export function showNs(ns) {
  return rounded(ns, TIMES);
}

/** @param {number} nbytes */
export function showBytes(nbytes) {
  return rounded(nbytes, SIZES);
}

/**
 * An instant with as many digits as the view can resolve.
 * @param {number} ns
 * @param {number} step
 */
export function showMoment(ns, step) {
  const [name, factor] = TIMES.find(([, f]) => Math.abs(ns) >= f) ?? ["ns", 1];
  const digits = Math.max(0, Math.ceil(Math.log10(factor / Math.max(step, 1)) - 1e-9));
  return `${(ns / factor).toFixed(Math.min(digits, 9))} ${name}`;
}

/** @param {number} gbs */
export function showRate(gbs) {
  return gbs ? `${Number(gbs.toPrecision(3))} GB/s` : "-";
}

/** @param {number} share */
export function showShare(share) {
  return share > 0 && share < 0.005 ? "<1 %" : `${Math.round(100 * share)} %`;
}

/**
 * `3`, `0, 1`, `0-3, 8`; ranges of three or more are shortened; of a long list, the rest is counted.
 * @param {ArrayLike<number>} numbers ascending
 * @param {number} most
 */
export function showRanks(numbers, most = 12) {
  /** @type {string[]} */
  const words = [];
  let told = 0;
  for (let i = 0; i < numbers.length && words.length < most;) {
    let j = i;
    while (j + 1 < numbers.length && numbers[j + 1] === numbers[j] + 1) j += 1;
    const last = j - i < 2 ? i : j;
    words.push(last === i ? String(numbers[i]) : `${numbers[i]}-${numbers[last]}`);
    told += last - i + 1;
    i = last + 1;
  }
  const left = numbers.length - told;
  return words.join(", ") + (left ? ` and ${left} more` : "");
}

/**
 * @param {number} count
 * @param {string} word
 */
export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

/**
 * The text, cut in the middle if it is too long for a line.
 * @param {string} text
 * @param {number} most
 */
export function shortened(text, most = 60) {
  const letters = [...text.slice(0, 4 * most), ...(text.length > 4 * most ? ["…", ...text.slice(-most)] : [])];
  if (letters.length <= most) return text;
  const head = Math.ceil((most - 1) * 0.65);
  return `${letters.slice(0, head).join("")}…${letters.slice(head + 1 - most).join("")}`;
}
