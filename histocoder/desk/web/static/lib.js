// Helpers for all parts of the page. Text reaches the page through text nodes alone, so that nothing in it is markup.

export class Refused extends Error {
  constructor(status, body) {
    super(body?.detail || `The server answered ${status}.`);
    this.status = status;
    this.body = body;
  }
}

export async function api(path, options = {}) {
  const { json, ...rest } = options;
  if (json !== undefined) {
    rest.method = rest.method || "POST";
    rest.headers = { "Content-Type": "application/json" };
    rest.body = JSON.stringify(json);
  }
  let response;
  try {
    response = await fetch(`/api/${path}`, rest);
  } catch {
    throw new Refused(0, { detail: "The server does not respond. Check that it is running. Everything that was saved is kept." });
  }
  const body = response.headers.get("content-type")?.startsWith("application/json") ? await response.json() : null;
  if (!response.ok) throw new Refused(response.status, body);
  return body;
}

// Make an element: el("p", { class: "quiet", onclick: f }, "text", other, …); null children are left out.
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

export const get = (id) => document.getElementById(id);
export const count = (number) => Math.round(number).toLocaleString("en");
export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}\u00a0%`;

let quiet;
export function say(text) {
  get("status").textContent = text;
  clearTimeout(quiet);
  quiet = setTimeout(() => (get("status").textContent = ""), 6000);
}

// Run what a button does, and say what went wrong.
export const doing = (action) => async (event) => {
  event?.preventDefault?.();
  try {
    await action(event);
  } catch (error) {
    say(error.message);
    if (!(error instanceof Refused)) throw error;
  }
};

// The same for what can't be meant twice: the second click of a double click would be on what comes next.
export const once = (action) => (event) => (event.detail > 1 ? undefined : doing(action)(event));

// The band of a confidence: from `sure` on, 95 % are right by the model's report; without such a confidence none is sure.
const HALF = 0.45;
export const bands = (sure) => sure == null ? [["likely", HALF, 1], ["doubtful", 0, HALF]]
  : [["sure", sure, 1], ["likely", sure / 2, sure], ["doubtful", 0, sure / 2]];
// What the bands rest on, in a sentence.
export function bandsNote({ sure, most_right: most, of_titles: ofTitles, of_few: few }) {
  const data = ofTitles ? " of titles of codes, which are easier than descriptions" : "";
  if (sure != null) return `Sure: a confidence of ${percent(sure)} or more, from which on 95\u00a0% are right${data}, by the model's report; doubtful: less than half of it.`;
  if (most != null) return `Nothing is marked as sure: this model is right in at most ${percent(most)} of what it is surest of${data}. Doubtful: a confidence below ${percent(HALF)}.`;
  return `Nothing is marked as sure: this model ${few ? "was measured on few descriptions" : "has no report"}. Doubtful: a confidence below ${percent(HALF)}.`;
}
export const band = (confidence, sure) => (confidence == null ? null : bands(sure).find(([, low]) => confidence >= low)[0]);
export const bandBadge = (confidence, sure) => confidence == null ? null :
  el("span", { class: `badge ${band(confidence, sure)}`, title: `confidence ${percent(confidence, 1)}` }, band(confidence, sure));

// When a card was settled by a decision on the same description in another file.
export const decidedOn = (card) => card.carried ? `, decided on ${new Date(1000 * card.at).toLocaleDateString()}` : "";

export function duration(seconds) {
  if (seconds < 90) return `${Math.ceil(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function bar(share, label, wide = false) {
  const filled = el("i");
  filled.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span", { class: wide ? "bar wide" : "bar", role: "img", "aria-label": `${label} ${percent(share)}` }, filled);
}

export const codeName = (code) => [el("span", { class: "code" }, code.code), " ", code.title || ""];

// A code with its probability, where it has one: the one measure of a card, of chosen codes and of alternatives alike.
export const codeWithBar = (code) => [...codeName(code), code.probability == null ? null : el("span", { class: "likely" },
  bar(code.probability, "Probability"), el("span", { class: "percent" }, percent(code.probability, 1)))];

export const codeNames = (codes) => codes.map((code) => (code.title ? `${code.code} ${code.title}` : code.code)).join(", ");

let languages = [], allLanguages = [];
// The language that was chosen last; at first the model's own, where it has one.
const usual = () => localStorage.getItem("language") || (languages.length === 2 ? languages[1].code : "unk");
export const languageName = (code) => languages.find((one) => one.code === code)?.name || code;

// Languages of the model in use, and all that there are, of which a new model may learn any.
export function fillLanguages(ofModel, all) {
  languages = ofModel;
  allLanguages = all;
  for (const select of document.querySelectorAll("select.languages")) {
    select.replaceChildren(...languageOptions(usual()));
    select.onchange = () => localStorage.setItem("language", select.value);
  }
}

const languageOptions = (chosen, from = languages) => from.map((one) => el("option", { value: one.code, selected: one.code === chosen }, one.name));

// A guess that is not among the languages is unknown.
export function languageSelect(id, chosen, { all = false } = {}) {
  const from = all ? allLanguages : languages;
  const isListed = from.some((one) => one.code === chosen);
  return el("select", { id }, languageOptions(isListed ? chosen : chosen ? "unk" : usual(), from));
}

export function nearest(neighbours) {
  return el("ul", { class: "list near" }, neighbours.map((one) =>
    el("li", {}, el("span", {}, one.text), el("span", { class: "percent", title: "similarity of their spelling: 1 is the same" }, one.similarity.toFixed(2)),
      el("span", { class: "of" }, `${codeNames(one.codes)} · ${languageName(one.lang)}`))));
}
