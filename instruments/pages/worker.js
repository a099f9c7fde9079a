// What runs beside the page, so that the page never freezes: it opens the model, and answers one
// request at a time, {do: "next", ...} -> {...}, or {error} with a sentence for the user.

let model;      // what export.py wrote of the model
let gpt;        // gpt.js
let tokenizer;  // bpe.js

const isSpecial = (id) => Object.values(model.special).includes(id);

const answers = {
  load({model: given, weights}) {
    model = given;
    gpt = new GPT(model.config, unpack(weights));
    tokenizer = new BPE(model.tokenizer);
    check();
    return {};
  },

  encode: ({text}) => ({ids: tokenizer.encode(text)}),

  next({ids, n, options}) {
    const logits = gpt.logits(gpt.after(ids, n).stream.at(-1));  // (V,)
    const p = softmax(logits);
    const id = n < ids.length ? ids[n] : draw(logits, options, n);
    const token = (i) => ({id: i, text: tokenizer.shown(i), p: p[i]});
    const top = likeliest(logits, 10).map(token);
    return {...token(id), bytes: tokenizer.bytes[id], ends: isSpecial(id), top};
  },

  look({ids, n}) {
    const {stream, heads} = gpt.after(ids, n);
    const guesses = stream.map((x) => {
      const logits = gpt.logits(x);
      const p = softmax(logits);
      const [id] = likeliest(logits, 1);
      return {text: tokenizer.shown(id), p: p[id], own: n < ids.length ? p[ids[n]] : null};
    });
    return {heads, guesses};
  },
};

onmessage = ({data}) => {
  let reply;
  try {
    reply = answers[data.do](data);
  } catch (error) {
    reply = {error: error.message};
  }
  postMessage(reply);
};

// ------------------------------------------------------------------------------------- drawing

function likeliest(logits, k) {  // ids of the k largest, the largest first
  if (k >= logits.length) return [...logits.keys()].sort((a, b) => logits[b] - logits[a]);
  const top = [];
  for (let id = 0; id < logits.length; id++) {
    if (top.length === k && !(logits[id] > logits[top[k - 1]])) continue;
    let at = top.length;
    while (at > 0 && logits[id] > logits[top[at - 1]]) at--;
    top.splice(at, 0, id);
    top.length = Math.min(top.length, k);
  }
  return top;
}

function uniform(seed, n) {  // from 0 to 1, always the same for a seed and a position (murmur3)
  const mix = (h) => {
    h = Math.imul(h ^ h >>> 16, 0x85ebca6b);
    h = Math.imul(h ^ h >>> 13, 0xc2b2ae35);
    return h ^ h >>> 16;
  };
  return (mix(mix(seed + 0x9e3779b9) + n) >>> 0) / 2 ** 32;
}

// As GPT.stream in model.py draws: among the top_k likeliest, cut to the fewest that make up top_p.
function draw(logits, {temperature, top_k: k, top_p: share, seed}, n) {
  if (temperature < 1e-5) return likeliest(logits, 1)[0];
  const ids = likeliest(logits, Math.min(k || Infinity, logits.length));
  const p = softmax(ids.map((id) => logits[id] / temperature));
  let kept = 0;
  let sum = 0;
  while (kept < p.length && sum < share) sum += p[kept++];
  let left = uniform(seed, n) * sum;
  let i = 0;
  while (i < kept - 1 && left >= p[i]) left -= p[i++];
  return ids[i];
}

// -------------------------------------------------------------------------- what the page holds

function unpack(given) {  // base64 or an ArrayBuffer -> name -> {values, scale, rows, cols}
  let bytes = given;
  if (typeof given === "string") {
    const text = atob(given);
    const array = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) array[i] = text.charCodeAt(i);
    bytes = array.buffer;
  }
  const mark = new TextDecoder().decode(bytes.slice(0, 16));
  if (mark !== model.weights.mark || bytes.byteLength !== model.weights.bytes) {
    const file = model.weights.file || "model";
    throw new Error(`This is not the whole ${file} that was written with this page.`);
  }
  let at = 16;
  const take = (Kind, count) => {
    const array = new Kind(bytes, at, count);
    at += Math.ceil(array.byteLength / 4) * 4;  // each array begins at a multiple of 4
    return array;
  };
  const weights = {};
  for (const [name, rows, cols] of model.tensors) {
    const isHalf = model.form === "fp16";
    const scale = isHalf ? new Float32Array(rows).fill(1) : take(Float32Array, rows);
    const values = isHalf ? Float32Array.from(take(Uint16Array, rows * cols), half)
      : take(Int8Array, rows * cols);
    weights[name] = {values, scale, rows, cols};
  }
  return weights;
}

function half(bits) {  // the 16 bits of an fp16 -> its value
  const exponent = bits >> 10 & 31;
  const fraction = (bits & 1023) / 1024;
  const size = exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14;
  return bits & 0x8000 ? -size : size;
}

function check() {  // ids and numbers must be those that Python computed
  for (const [text, ids] of model.check.texts) {
    if (tokenizer.encode(text).join() !== ids.join()) {
      throw new Error("This browser cuts text into other tokens than those that the model knows.");
    }
  }
  const {stream} = gpt.after(model.check.ids, model.check.ids.length);
  const p = softmax(gpt.logits(stream.at(-1)));
  if (!model.check.top.every(([id, logP]) => Math.abs(Math.log(p[id]) - logP) < 0.01)) {
    throw new Error("What is computed here is not what the model computes. Was model.py changed, "
      + "and gpt.js not?");
  }
}
