// A page without a browser: reads its file, runs its engine as the worker would, and answers each
// request in a list of JSON: {do: "next", ...}, or {js: "an expression"}.
//
//     node page_driver.js PAGE [WEIGHTS] < REQUESTS > REPLIES

const fs = require("fs");
const vm = require("vm");

const [page, beside] = process.argv.slice(2);
const html = fs.readFileSync(page, "utf8");
const part = (id) => new RegExp(`<script id="${id}"[^>]*>([^]*?)</script>`).exec(html)[1];
let reply;
globalThis.postMessage = (given) => { reply = given; };
vm.runInThisContext(part("engine"));

function ask(request) {
  if (request.js) return vm.runInThisContext(request.js);
  onmessage({data: request});
  return reply;
}

const weights = beside ? new Uint8Array(fs.readFileSync(beside)).buffer : part("weights");
const requests = JSON.parse(fs.readFileSync(0, "utf8"));
const load = {do: "load", model: JSON.parse(part("model")), weights};
const plain = (key, value) => (ArrayBuffer.isView(value) ? [...value] : value);
process.stdout.write(JSON.stringify([load, ...requests].map(ask), plain));
