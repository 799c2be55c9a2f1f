// Review a file as a list: search, filter, sort, and accept many at once.
import { api, bandBadge, bands, count, decidedOn, doing, el, get, languageName, once, percent, say } from "./lib.js";
import { option } from "./upload.js";

const PAGE = 50;
export const STATES = { "": "any", open: "open", settled: "settled", unsure: "not sure", disputed: "to settle" };
const SORTS = { worth: "most worth checking first", times: "most rows first", conf: "least sure first", text: "by text" };
let at, offset = 0, found;

export async function show(place) {
  const same = at?.source.id === place.source.id;
  at = place;
  if (!same || !get("list-rows")) build();
  await load();
}

function build() {
  offset = 0;
  const field = (name, label, input) => el("label", {}, `${label} `, input);
  const select = (name, entries) => el("select", { name }, entries.map(([value, text]) => option(value, "", text)));
  const named = bands(at.about.surety.sure).map(([name, low, high]) => [`${low},${high}`, `${name}: ${percent(low)} to ${percent(high)}`]);
  const form = el("form", { class: "row filters", onsubmit: (event) => event.preventDefault() },
    field("q", "Text", el("input", { type: "search", name: "q" })),
    field("code", "Code begins with", el("input", { type: "search", name: "code", size: "8" })),
    field("lang", "Language", select("lang", [["", "any"], ...at.about.languages.map((one) => [one.code, one.name])])),
    field("conf", "Confidence", select("conf", [["", "any"], ...named])),
    field("status", "State", select("status", Object.entries(STATES))),
    field("sort", "Order", select("sort", Object.entries(SORTS))));
  let timer;
  form.oninput = () => {
    clearTimeout(timer);
    timer = setTimeout(doing(() => ((offset = 0), load())), 250);
  };
  get("listing").replaceChildren(form,
    el("div", { class: "row" },
      el("button", { id: "accept-many", class: "primary", disabled: true, onclick: once(accept) }, "Accept"),
      el("button", { onclick: once(undo) }, "Undo"),
      el("span", { id: "list-total", class: "quiet", "aria-live": "polite" })),
    el("div", { id: "list-rows" }));
}

async function load() {
  const given = new FormData(get("listing").querySelector("form"));
  const [low, high] = (given.get("conf") || "0,1").split(",");
  given.delete("conf");
  const query = new URLSearchParams([...given].filter(([, value]) => value));
  for (const [name, value] of Object.entries({ who: at.who, low, high, offset, limit: PAGE })) query.set(name, value);
  found = await api(`review/${at.source.id}/list?${query}`);
  get("list-total").textContent = `${count(found.total)} descriptions`;
  const all = el("input", { type: "checkbox", onchange: () => {
    for (const box of boxes()) box.checked = all.checked;
    chosen();
  } });
  const pages = [offset ? el("button", { onclick: doing(() => ((offset -= PAGE), load())) }, "← Previous") : null,
    offset + PAGE < found.total ? el("button", { onclick: doing(() => ((offset += PAGE), load())) }, "Next →") : null];
  get("list-rows").replaceChildren(...(found.cards.length ? [
    el("label", { class: "inline all" }, all, " all open ones on this page"),
    el("ul", { class: "list rows", onchange: chosen }, found.cards.map(row)),
    el("div", { class: "row" }, pages)] : [el("p", { class: "quiet" }, "Nothing is found.")]));
  chosen();
}

const boxes = () => [...get("list-rows").querySelectorAll("li input")];

function chosen() {
  const number = boxes().filter((box) => box.checked).length;
  get("accept-many").disabled = !number;
  get("accept-many").textContent = number ? `Accept ${count(number)}` : "Accept";
}

function row(card) {
  const codes = card.codes || card.predicted;
  const state = card.status === "open" ? bandBadge(card.confidence, at.about.surety.sure)
    : el("span", { class: "badge" }, `${STATES[card.status]}: ${card.who}${decidedOn(card)}`);
  return el("li", {},
    card.status === "open" ? el("input", { type: "checkbox", value: card.id, "aria-label": `Choose ${card.text}` }) : el("span"),
    el("button", { class: "plain open", onclick: doing(() => at.open(card.id)) }, card.text),
    el("span", { class: "as" }, codes.map((code) => el("span", {}, el("span", { class: "code" }, code), ` ${found.titles[code] || ""} `))),
    el("span", { class: "of quiet" }, `${count(card.times)} ${card.times === 1 ? "row" : "rows"} · ${languageName(card.lang)}`), state);
}

async function accept() {
  const ids = boxes().filter((box) => box.checked).map((box) => Number(box.value));
  const cards = Object.fromEntries(found.cards.filter((card) => ids.includes(card.id)).map((card) => [card.id, card.version]));
  try {
    await api("review/accept", { json: { who: at.who, cards } });
    say(`Accepted: ${count(ids.length)}`);
  } finally {
    await Promise.all([load(), at.changed()]);
  }
}

async function undo() {
  const undone = await api(`review/${at.source.id}/undo`, { json: { who: at.who } });
  say(`Undone: ${undone.length === 1 ? undone[0].text : `${count(undone.length)} decisions`}`);
  await Promise.all([load(), at.changed()]);
}
