// Code descriptions that are typed or pasted, and show what the codes rest on.
import { api, band, bandBadge, bandsNote, codeName, codeNames, codeWithBar, count, doing, el, get, languageName, nearest, percent } from "./lib.js";

const EXAMPLES = {
  en: ["boot and shoe maker", "retired schoolmaster", "farmer and innkeeper"], da: ["husmand og væver", "skrædersvend", "tjenestepige"],
  se: ["dräng", "skräddare", "torpare"], no: ["gårdbruker", "skipper", "tjenestepike"], nl: ["landbouwer", "timmerman", "dienstmeid"],
  ge: ["Schuhmacher", "Tagelöhner", "Bäckermeister"], fr: ["cultivateur", "tisserand", "domestique"], es: ["labrador", "jornalero", "zapatero"],
  it: ["contadino", "calzolaio", "falegname"], pt: ["lavrador", "sapateiro", "criada"], ca: ["pagès", "teixidor", "sabater"], is: ["bóndi", "vinnukona", "sjómaður"],
};
let about, answers = [];

export function start() {
  get("code-form").onsubmit = doing(code);
  get("texts").onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) get("code-form").requestSubmit();
  };
  get("example").onclick = doing(() => {
    const select = get("code-language");
    if (!EXAMPLES[select.value]) select.value = [...select.options].map((one) => one.value).find((one) => EXAMPLES[one]) || select.value;
    get("texts").value = (EXAMPLES[select.value] || EXAMPLES.en).join("\n");
    return code();
  });
}

export function use(now) {
  about = now;
  answers = [];
  get("answers").replaceChildren();
}

export function show() {}

async function code() {
  const texts = get("texts").value.split("\n").map((line) => line.trim()).filter(Boolean);
  if (!texts.length) return get("texts").focus();
  const button = get("code-form").querySelector("button.primary");
  button.disabled = true;
  get("answers").setAttribute("aria-busy", "true");
  try {
    answers = await api("code", { json: { texts, lang: get("code-language").value } });
    const sure = answers.filter((one) => band(one.confidence, about.surety.sure) === "sure").length;
    const number = `${count(answers.length)} descriptions`;
    get("answers").replaceChildren(
      el("div", { class: "row" },
        el("h2", { tabindex: "-1" }, answers.length === 1 ? "1 description" : about.surety.sure == null ? number : `${number}, ${count(sure)} sure`),
        el("button", { onclick: download }, "Download as CSV")),
      ...answers.map(answer),
      el("p", { class: "quiet" }, bandsNote(about.surety)));
    get("answers").querySelector("h2").focus();
  } finally {
    button.disabled = false;
    get("answers").removeAttribute("aria-busy");
  }
}

// One line, which opens; a doubtful one is open.
function answer(found) {
  const known = found.known && el("p", {}, el("span", { class: "badge" }, "Coded by hand"), " ",
    `${codeNames(found.known)}, in ${percent(found.known_share)} of its rows in the training data`);
  const codes = found.codes.length ? found.codes.map((one) => el("span", {}, codeName(one))) : el("span", { class: "quiet" }, "no code");
  return el("details", { class: "answer", open: band(found.confidence, about.surety.sure) === "doubtful" },
    el("summary", {}, el("span", { class: "text" }, found.text), el("span", { class: "codes" }, codes), bandBadge(found.confidence, about.surety.sure)),
    el("ul", { class: "codes", "aria-label": "Codes" }, found.codes.map((one) => el("li", {}, codeWithBar(one)))),
    known,
    el("div", { class: "columns" },
      found.alternatives.length ? el("div", {}, el("h3", {}, "Alternatives"),
        el("ul", { class: "list ranked" }, found.alternatives.slice(0, 5).map((one) =>
          el("li", {}, el("span", { class: "code" }, one.code), el("span", {}, one.title || ""), el("span", { class: "percent" }, percent(one.probability, 1)))))) : null,
      found.neighbours.length ? el("div", {}, el("h3", {}, "Nearest in the training data, by similarity"), nearest(found.neighbours)) : null));
}

// A cell of CSV; an apostrophe precedes what a spreadsheet would run as a formula, by the rule of the server's files.
const RUN = /^'*[=+\-@\t\r\n＝＋－＠][^]*[\p{L}\p{N}]/u;
const SHOWN = /^[+-]?[0-9][0-9.,]*([eE][+-]?[0-9]+)?$/;
export const safe = (text) => (RUN.test(text) && !SHOWN.test(text) ? `'${text}` : text);
const cell = (value) => `"${safe(String(value ?? "")).replaceAll('"', '""')}"`;

function download() {
  const most = Math.max(1, ...answers.map((one) => one.codes.length));
  const numbers = [...Array(most).keys()];
  const rows = [["description", "language", ...numbers.flatMap((i) => [`code_${i + 1}`, `title_${i + 1}`]), "confidence"],
    ...answers.map((one) => [one.text, languageName(one.lang), ...numbers.flatMap((i) => [one.codes[i]?.code, one.codes[i]?.title]), one.confidence?.toFixed(4)])];
  const blob = new Blob(["\ufeff", rows.map((row) => row.map(cell).join(",")).join("\r\n"), "\r\n"], { type: "text/csv" });
  const link = el("a", { href: URL.createObjectURL(blob), download: "coded.csv" });
  link.click();
  URL.revokeObjectURL(link.href);
}
