// Perfetto's trace_processor (WebAssembly, as its page runs it) behind pipes: a request of its RPC
// in base64 is a line of stdin, its answer a line of stdout.
// usage: node trace_processor.js FOLDER, in which engine_bundle.js and the .wasm are

"use strict";

const fs = require("fs");
const path = require("path");
const readline = require("readline");
const vm = require("vm");

const folder = process.argv[2];
const read = (name) => fs.readFileSync(path.join(folder, path.basename(String(name))));

// All that a worker of a browser has and the program uses.
class XMLHttpRequest {
  open(_method, name) {
    this.name = name;
  }
  send() {
    this.response = new Uint8Array(read(this.name)).buffer;
    this.status = 200;
  }
}
const worker = { location: { href: "file:///engine_bundle.js" } };
const sandbox = {
  self: worker,
  location: worker.location,
  importScripts: () => {},
  WorkerGlobalScope: function WorkerGlobalScope() {},
  XMLHttpRequest,
  console: { log: () => {}, warn: (text) => process.stderr.write(`${text}\n`), error: console.error },
  fetch: (name) =>
    Promise.resolve(
      new Response(read(name), { headers: { "Content-Type": "application/wasm" } }),
    ),
};
for (const name of ["TextDecoder", "TextEncoder", "setTimeout", "performance", "crypto", "URL"]) {
  sandbox[name] = globalThis[name];
}
Object.assign(worker, sandbox);
vm.createContext(sandbox); // with its own WebAssembly, TypeError and so on
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), sandbox);
const bytesOf = vm.runInContext("(data) => new Uint8Array(data)", sandbox);

const port = {
  postMessage: (bytes) => process.stdout.write(`${Buffer.from(bytes).toString("base64")}\n`),
};
worker.onmessage({ data: port });
const lines = [];
let isReady = false;
function take(line) {
  port.onmessage({ data: bytesOf(Buffer.from(line, "base64")) });
}
// the page too gives it requests before it is there, and it holds none back
const wait = setInterval(() => {
  try {
    if (lines.length) {
      take(lines[0]);
      lines.shift();
      isReady = true;
    }
  } catch (error) {
    if (isReady) throw error;
  }
  if (isReady) {
    clearInterval(wait);
    lines.splice(0).forEach(take);
  }
}, 20);
readline.createInterface({ input: process.stdin }).on("line", (line) => {
  if (isReady) take(line);
  else lines.push(line);
});
