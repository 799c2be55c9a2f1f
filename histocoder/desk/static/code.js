// Code descriptions that are typed or pasted, and show what the codes rest on.
import { api, codeNames, codeWithBar, count, doing, el, get, nearest, percent } from "./lib.js";

export function start() {
  get("code-form").onsubmit = doing(code);
  get("texts").onkeydown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) get("code-form").requestSubmit();
  };
}

export function show() {}

async function code() {
  const texts = get("texts").value.split("\n").map((line) => line.trim()).filter(Boolean);
  if (!texts.length) return get("texts").focus();
  const button = get("code-form").querySelector("button");
  button.disabled = true;
  get("answers").setAttribute("aria-busy", "true");
  try {
    const answers = await api("code", { json: { texts, lang: get("code-language").value } });
    get("answers").replaceChildren(
      el("h2", { tabindex: "-1" }, answers.length === 1 ? "1 description" : `${count(answers.length)} descriptions`),
      ...answers.map(answer));
    get("answers").querySelector("h2").focus();
  } finally {
    button.disabled = false;
    get("answers").removeAttribute("aria-busy");
  }
}

function answer(found) {
  const codes = found.codes.map((one) => el("li", {}, codeWithBar(one)));
  const known = found.known && el("p", {}, el("span", { class: "badge" }, "Coded by hand"), " ",
    `${codeNames(found.known)}, in ${percent(found.known_share)} of its rows in the training data`);
  return el("article", { class: "answer" },
    el("h3", { class: "text" }, found.text),
    el("ul", { class: "codes", "aria-label": "Codes" }, codes.length ? codes : el("li", { class: "quiet" }, "no code")),
    known,
    el("div", { class: "columns" },
      found.alternatives.length ? el("div", {}, el("h3", {}, "Alternatives"),
        el("ul", { class: "list ranked" }, found.alternatives.slice(0, 5).map((one) =>
          el("li", {}, el("span", { class: "code" }, one.code), el("span", {}, one.title || ""), el("span", { class: "percent" }, percent(one.probability, 1)))))) : null,
      found.neighbours.length ? el("div", {}, el("h3", {}, "Nearest in the training data, by similarity"), nearest(found.neighbours)) : null));
}
