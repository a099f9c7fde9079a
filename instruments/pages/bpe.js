// Text <-> ids by a byte-level BPE, as in tokenizer.py: text is cut into pieces, each piece begins
// as bytes, and the pair of neighbours that was learned first is merged, again and again.

const utf8 = (text) => [...new TextEncoder().encode(text)];
const decode = (bytes, how) => new TextDecoder("utf-8", {ignoreBOM: true, ...how})
  .decode(new Uint8Array(bytes));

class BPE {
  constructor({model, added, splits, nfc}) {  // parts of tokenizer.json; splits: patterns
    this.nfc = nfc;
    this.isWholeFirst = model.ignore_merges;
    this.ranks = new Map(model.merges.map((pair, rank) => [pair.join(" "), rank]));
    this.ids = new Map(Object.entries(model.vocab));
    // The characters that stand for bytes in `vocab` (GPT-2's table).
    const isPrintable = (b) => b > 32 && b < 127 || b > 160 && b < 173 || b > 173;
    let others = 256;
    this.symbols = Array.from({length: 256}, (_, b) =>
      String.fromCharCode(isPrintable(b) ? b : others++));
    const byteOf = new Map(this.symbols.map((symbol, byte) => [symbol, byte]));
    this.bytes = [];  // id -> bytes
    for (const [token, id] of this.ids) this.bytes[id] = [...token].map((s) => byteOf.get(s));
    for (const {content, id} of added) this.bytes[id] = utf8(content);
    // Of added tokens, only special ones are plain text when they are typed.
    const words = added.filter((token) => !token.special).map((token) => token.content);
    const escaped = words.sort((a, b) => b.length - a.length)
      .map((word) => word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
    this.added = new Map(added.filter((t) => !t.special).map((t) => [t.content, t.id]));
    this.splits = [...(words.length ? [escaped.join("|")] : []), ...splits]
      .map((pattern) => new RegExp(pattern, "gu"));
  }

  pieces(text) {  // each pattern cuts the pieces of the one before: matches, and what is between
    const cut = (pieces, split) => pieces.flatMap((piece) => {
      if (this.added.has(piece)) return [piece];
      const parts = [];
      let end = 0;
      for (const {0: match, index} of piece.matchAll(split)) {
        parts.push(piece.slice(end, index), match);
        end = index + match.length;
      }
      return [...parts, piece.slice(end)];
    });
    return this.splits.reduce(cut, [text]).filter((piece) => piece);
  }

  merged(symbols) {  // ["Ġ", "t", "h", "e"] -> ["Ġthe"]
    for (;;) {
      const ranks = symbols.slice(1).map((right, i) => this.ranks.get(`${symbols[i]} ${right}`));
      const first = ranks.reduce((a, b) => (b < a ? b : a), Infinity);
      if (first === Infinity) return symbols;
      const next = [];
      for (let i = 0; i < symbols.length; i++) {
        const isPair = ranks[i] === first;  // wherever it stands
        next.push(isPair ? symbols[i] + symbols[++i] : symbols[i]);
      }
      symbols = next;
    }
  }

  encode(text) {  // a special token that is typed is plain text; a lone surrogate is U+FFFD
    const whole = decode(utf8(text));
    return this.pieces(this.nfc ? whole.normalize("NFC") : whole).flatMap((piece) => {
      if (this.added.has(piece)) return this.added.get(piece);
      const symbols = utf8(piece).map((byte) => this.symbols[byte]);
      const known = this.isWholeFirst ? this.ids.get(symbols.join("")) : undefined;
      return known ?? this.merged(symbols).map((symbol) => this.ids.get(symbol));
    });
  }

  shown(id) {  // a token's text; a part of a character as its bytes: \xe4
    try {
      return decode(this.bytes[id], {fatal: true});
    } catch {
      const seen = (b) => (b < 128 ? String.fromCharCode(b) : `\\x${b.toString(16)}`);
      return this.bytes[id].map(seen).join("");
    }
  }
}
