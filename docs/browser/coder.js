// Codes descriptions with the flat head of an exported model, in the browser: what OnnxCoder does in the mode flat.
// Text goes in as code points; words and n-grams are hashed within the graph, so that nothing of that is done here.

import * as ort from "./ort/ort.wasm.min.mjs";

ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;
ort.env.wasm.numThreads = 1; // more threads need headers that a plain web server does not send

const CLS = 0xe000, SEP = 0xe001, PAD = 0;
const SPACE = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/u; // Python's str.split()
const INVISIBLE = /[\p{Cf}\p{Default_Ignorable_Code_Point}\u2800]|(?![\t-\r\x1c-\x1f\x85])\p{Cc}/gu;
const KEPT = /[\p{No}\xb5]/u; // 1½ is not 11/2
const nfc = (text) => text.normalize("NFC");
const lower = (text) => nfc(nfc(text).toLowerCase().split(SPACE).filter(Boolean).join(" "));
const NORMALIZATIONS = {
  none: (text) => text,
  nfc,
  lower,
  nfc2: (text) => nfc(plainLetters(text)),
  lower2: (text) => lower(plainLetters(text)),
};

// What text/normalize.py does: HTML entities are decoded until nothing changes. The browser knows their names, and reads
// the beginning of others, of which ";" is left.
const paragraph = globalThis.document?.createElement("p");

function withoutEntities(text) {
  const decoded = text.replace(/&#?[0-9A-Za-z]+;/g, (entity) => {
    paragraph.innerHTML = entity;
    const characters = paragraph.textContent;
    return characters.length > 2 && characters.endsWith(";") ? entity : characters;
  });
  return decoded === text ? text : withoutEntities(decoded);
}

// What text/characters.py does: no invisible characters, and usual letters for presentation forms.
function plainLetters(text) {
  return Array.from(text.replace(INVISIBLE, ""), plainForm).join("");
}

function plainForm(character) {
  const plain = character.normalize("NFKC");
  if (KEPT.test(character)) return character;
  if (plain.length > 1 && (plain.includes(" ") || (isWord(character) && !isWord(plain)))) return character;
  return plain;
}

function isWord(text) {
  return /^\p{L}+$/u.test(text);
}

export class Coder {
  static async open(folder) {
    const config = await (await fetched(`${folder}/config.json`)).json();
    if (!["canine", "ngram", undefined].includes(config.encoder.model_type))
      throw new Error("This model reads tokens; the page runs models that read characters.");
    if (!(config.text_normalization in NORMALIZATIONS))
      throw new Error(`This page does not know the text normalisation ${config.text_normalization}.`);
    const graph = await (await fetched(`${folder}/encoder.onnx`)).arrayBuffer();
    return new Coder(config, await ort.InferenceSession.create(graph, { executionProviders: ["wasm"] }));
  }

  constructor(config, session) {
    this.config = config;
    this.session = session;
  }

  // The k most probable codes of a description, each with its probability and meaning; none of a blank one.
  async code(text, lang, k = 5) {
    if (!lower(plainLetters(withoutEntities(text)))) return [];
    const { codes, descriptions, flat_loss } = this.config;
    const ids = BigInt64Array.from(this.characters(text, lang), BigInt);
    const input = new ort.Tensor("int64", ids, [1, ids.length]);
    const logits = (await this.session.run({ input_ids: input })).flat_logits.data;
    return Array.from((flat_loss === "softmax" ? softmax : sigmoid)(logits), (probability, i) => ({
      code: codes[i],
      probability,
      meaning: descriptions[codes[i]] ?? "",
    }))
      .filter((one) => one.code)
      .sort((a, b) => b.probability - a.probability)
      .slice(0, k);
  }

  // Code points between CLS and SEP, padded as the encoder needs it; see tokenizers.trimmed_length.
  characters(text, lang) {
    const { max_len, pad_to, text_normalization } = this.config;
    const joined = `${lang}[SEP]${NORMALIZATIONS[text_normalization](withoutEntities(text))}`;
    const points = Array.from(joined, (character) => character.codePointAt(0)).slice(0, max_len - 2);
    const length = pad_to ?? Math.min(max_len, 4 * (Math.ceil((points.length + 4) / 4) + 1));
    const ids = [CLS, ...points, SEP];
    return ids.concat(Array(length - ids.length).fill(PAD));
  }
}

async function fetched(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`There is no ${path}. Build it: make browser-page.`);
  return answer;
}

function softmax(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b));
  const powers = Array.from(logits, (x) => Math.exp(x - most));
  const total = powers.reduce((a, b) => a + b);
  return powers.map((x) => x / total);
}

function sigmoid(logits) {
  return Array.from(logits, (x) => 1 / (1 + Math.exp(-x)));
}
