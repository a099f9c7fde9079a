// The forward pass of model.py in plain JavaScript, one position at a time: from a token to the
// logits of the next one. This is all of inference. Letters as in model.py: C = n_embd, H query
// heads, G key/value heads, D = head_dim, V = vocab_size; t is a position, from 0.

function matmul({values, scale, rows, cols}, x) {  // (rows, cols), (cols,) -> (rows,)
  const y = new Float32Array(rows);
  const four = rows - rows % 4;
  for (let r = 0; r < four; r += 4) {  // four rows at a time: their sums do not wait for each other
    const at = r * cols;
    let a = 0, b = 0, c = 0, d = 0;
    for (let i = 0; i < cols; i++) {
      const factor = x[i];
      a += values[at + i] * factor;
      b += values[at + cols + i] * factor;
      c += values[at + 2 * cols + i] * factor;
      d += values[at + 3 * cols + i] * factor;
    }
    y.set([a, b, c, d], r);
  }
  for (let r = four; r < rows; r++) {
    for (let i = 0; i < cols; i++) y[r] += values[r * cols + i] * x[i];
  }
  return y.map((value, r) => value * scale[r]);
}

const rowOf = ({values, scale, cols}, r) =>  // (rows, cols) -> (cols,): one row
  Float32Array.from(values.subarray(r * cols, (r + 1) * cols), (value) => value * scale[r]);
const sigmoid = (z) => 1 / (1 + Math.exp(-z));
const add = (x, y) => x.map((value, i) => value + y[i]);

function rmsNorm(x) {  // (n,) -> (n,)
  const square = x.reduce((sum, value) => sum + value * value, 0);
  const size = Math.sqrt(square / x.length + 1e-6);
  return x.map((value) => value / size);
}

function softmax(x) {  // (n,) -> (n,), which sums to 1
  const most = x.reduce((a, b) => Math.max(a, b), -Infinity);
  const p = x.map((value) => Math.exp(value - most));
  const sum = p.reduce((a, b) => a + b, 0);
  return p.map((value) => value / sum);
}

function applyRope(x, angles) {  // (D,), (D/2,) -> (D,): pairs of channels i and i + D/2 are turned
  const half = angles.length;
  return x.map((value, i) => {
    const other = i < half ? -x[i + half] : x[i - half];
    return value * Math.cos(angles[i % half]) + other * Math.sin(angles[i % half]);
  });
}

class GPT {
  constructor(config, weights) {  // weights: name -> {values, scale, rows, cols}
    const layers = () => Array.from({length: config.n_layer}, () => []);
    this.config = config;
    this.weights = weights;
    this.ids = [];           // of the positions that have been read
    this.keys = layers();    // [layer][t] (G * D,)
    this.values = layers();  // [layer][t] (G * D,)
    this.own = layers();     // [layer][t] (G * D,): keys as the matrix gives them
    const D = config.head_dim;
    this.frequency = Float32Array.from({length: D / 2}, (_, i) =>
      1 / Math.fround(config.rope_theta ** Math.fround(2 * i / D)));
  }

  attention(layer, x, t) {  // x (C,) -> [(C,), where each head looks: H times (t + 1,)]
    const {n_head: H, n_kv_head: G, head_dim: D, extras, nope_every: every} = this.config;
    const weight = (name) => this.weights[`blocks.${layer}.attn.${name}.weight`];
    const id = this.ids[t];
    const q = matmul(weight("q"), x);  // (H * D,)
    const k = matmul(weight("k"), x);  // (G * D,)
    const v = matmul(weight("v"), x);  // (G * D,)
    const table = this.weights[`value_embeds.${layer}.weight`];
    if (table) {
      const gate = matmul(weight("value_gate"), x);  // (G,): it has a few columns, x more channels
      const embed = rowOf(table, id);                // (G * D,)
      for (let i = 0; i < G * D; i++) v[i] += 3 * sigmoid(gate[Math.floor(i / D)]) * embed[i];
    }
    this.own[layer][t] = k.slice();
    if (extras.includes("key_offset") && t > 0 && id !== this.config.bos_id) {
      const before = this.own[layer][t - 1];
      const isSlow = (i) => i % (D / 2) >= Math.floor(D / 4);  // frequencies fall from pair to pair
      for (let i = 0; i < G * D; i++) if (isSlow(i)) k[i] = before[i];
    }
    const hasRope = every === 0 || (layer + 1) % every !== 0;
    const angles = this.frequency.map((f) => (hasRope ? t * f : 0));  // (D/2,)
    const placed = (name, heads, h) => {  // (n * D,) -> (D,): one head
      let head = heads.subarray(h * D, (h + 1) * D);
      if (this.config.qk_norm) head = rmsNorm(head);
      const gain = this.weights[`blocks.${layer}.attn.${name}_gain`];  // in a column, (D, 1)
      if (gain) head = head.map((value, i) => value * gain.values[i] * gain.scale[i]);
      return applyRope(head, angles);
    };
    for (let g = 0; g < G; g++) k.set(placed("k", k, g), g * D);
    this.keys[layer][t] = k;
    this.values[layer][t] = v;
    const y = new Float32Array(H * D);
    const looks = [];
    for (let h = 0; h < H; h++) {
      const query = placed("q", q, h);       // (D,)
      const at = Math.floor(h * G / H) * D;  // where its key/value head begins
      const scores = new Float32Array(t + 1);
      for (let s = 0; s <= t; s++) {
        const key = this.keys[layer][s];
        for (let i = 0; i < D; i++) scores[s] += query[i] * key[at + i];
      }
      looks[h] = softmax(scores.map((score) => score / Math.sqrt(D)));
      for (let s = 0; s <= t; s++) {
        const value = this.values[layer][s];
        for (let i = 0; i < D; i++) y[h * D + i] += looks[h][s] * value[at + i];
      }
    }
    return [matmul(weight("out"), y), looks];
  }

  mlp(layer, x) {  // (C,) -> (C,)
    const weight = (name) => this.weights[`blocks.${layer}.mlp.${name}.weight`];
    let up = matmul(weight("up"), x);  // (mlp_hidden,)
    if (this.config.mlp === "swiglu") {
      const gate = matmul(weight("gate"), x);  // (mlp_hidden,)
      up = up.map((value, i) => gate[i] * sigmoid(gate[i]) * value);
    } else {
      up = up.map((value) => Math.max(0, value) ** 2);
    }
    return matmul(weight("down"), up);
  }

  logits(x) {  // (C,) -> (V,)
    const y = matmul(this.weights["head.weight"] ?? this.weights["embed.weight"], rmsNorm(x));
    const cap = this.config.logit_softcap;
    return cap ? y.map((value) => cap * Math.tanh(value / cap)) : y;
  }

  // The forward pass at position t. Returns the residual stream after the embedding and after each
  // layer, (C,) each, and where each head looks: [layer][head] (t + 1,).
  forward(t) {
    let x = rowOf(this.weights["embed.weight"], this.ids[t]);  // (C,)
    if (this.config.embed_norm) x = rmsNorm(x);
    const stream = [x];
    const heads = [];
    for (let layer = 0; layer < this.config.n_layer; layer++) {
      const [y, looks] = this.attention(layer, rmsNorm(x), t);
      x = add(x, y);
      x = add(x, this.mlp(layer, rmsNorm(x)));
      stream.push(x);
      heads.push(looks);
    }
    return {stream, heads};
  }

  // Read the first n of ids; positions that were read before, of the same tokens, are in the cache.
  after(ids, n) {
    let t = 0;
    while (t < n - 1 && this.ids[t] === ids[t]) t++;
    let found;
    for (; t < n; t++) {
      if (this.ids[t] !== ids[t]) this.ids.length = t;
      this.ids[t] = ids[t];
      found = this.forward(t);
    }
    return found;
  }
}
