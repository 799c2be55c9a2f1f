// Review cards: the least certain and most frequent descriptions first, and random ones among them, by keys or by mouse.
import * as listing from "./list.js";
import { STATES } from "./list.js";
import * as pair from "./pair.js";
import { api, bar, codeNames, codeWithBar, count, decidedOn, doing, el, get, languageName, nearest, once, percent, Refused, say } from "./lib.js";

const KEYS = [["↵", "accept the codes"], ["1–9", "choose an alternative"], ["⇧ 1–9", "add it as a further code"], ["/", "search the codes"],
  ["0", "no occupation"], ["n", "not sure"], ["u", "undo"], ["← →", "move"], ["?", "show or hide this list"]];
let about, source, way = "cards", helps = false, cards = [], at = 0, chosen = [], note = "", isBusy = false, isOver = false;

const who = () => about.user || localStorage.getItem("who");
const usesKeys = () => localStorage.getItem("keys") !== "off";
const present = () => cards[at];

const views = { cards: [document.querySelector("#desk .desk")], list: [get("listing"), listing], pair: [get("pair"), pair] };

export function use(now) {
  about = now;
}

export function start() {
  for (const name of Object.keys(views)) get(`as-${name}`).onclick = doing(() => turn(name));
  document.addEventListener("keydown", key);
  get("who-form").onsubmit = doing(() => {
    const name = get("who").value.trim();
    if (!name) return;
    localStorage.setItem("who", name);
    return show();
  });
}

export const show = doing(async () => {
  if (!about.model) return;
  get("who-form").hidden = Boolean(who());
  get("desk").hidden = !who();
  if (!who()) return get("who").focus();
  const sources = await api("review");
  source = sources.find((one) => one.id === Number(sessionStorage.getItem("source"))) || sources[0];
  cards = [];
  at = 0;
  isOver = false;
  round += 1;
  fetching = null;
  if (!source) {
    get("trust").replaceChildren();
    await turn("cards");
    return get("card").replaceChildren(el("div", { class: "panel" }, el("p", {}, "There is no coded file to review yet. Code one under ",
      el("a", { href: "#files" }, "Files"), " and choose Review there.")));
  }
  get("as-pair").hidden = !(await api(`review/${source.id}/agreement`)).cards;
  await fetchMore();
  choose(0);
  await trust(sources);
  await turn(get("as-pair").hidden && way === "pair" ? "cards" : way);
});

// Show the file one card at a time, as a list, or what two coders make of it.
async function turn(name) {
  way = name;
  for (const [other, [part, module]] of Object.entries(views)) {
    get(`as-${other}`).setAttribute("aria-pressed", String(other === name));
    part.hidden = other !== name;
    if (other === name) await module?.show({ about, source, who: who(), open: openCard, changed: () => trust() });
  }
}

// Show a card that was found in a list.
const openCard = async (id) => {
  const one = await api(`review/cards/${id}?who=${encodeURIComponent(who())}`);
  cards = [...cards.slice(0, at), one, ...cards.slice(at).filter((other) => other.card.id !== id)];
  await turn("cards");
  choose(at);
};

let fetching = null, round = 0;

// Fetch further cards ahead of need; a reviewer waits for them only if no card is left to show.
function fetchMore() {
  const ofRound = round;
  fetching ??= fetchCards().finally(() => {
    if (ofRound === round) fetching = null;
  });
  return fetching;
}

// Cards that arrive once another file is shown are not that file's.
async function fetchCards() {
  const ofRound = round;
  const after = cards.length ? Math.max(...cards.map((one) => one.card.place)) : -1;
  const more = await api(`review/${source.id}/cards?who=${encodeURIComponent(who())}&count=8&after=${after}`);
  if (ofRound !== round) return;
  isOver = !more.length;
  cards.push(...more.filter((one) => !cards.some((other) => other.card.id === one.card.id)));
}

// Show a card, with the codes as they were decided, or as the model gave them.
function choose(place, message = "") {
  at = place;
  note = message;
  const one = present();
  if (!one) return finished();
  chosen = one.card.codes ? one.card.codes.map(named(one)) : [...one.predicted];
  draw();
  get("card").querySelector(".text").focus({ preventScroll: true });
}

const named = (one) => (code) =>
  [...one.predicted, ...one.answer.codes, ...one.answer.alternatives].find((other) => other.code === code) || { code };

function finished() {
  get("card").replaceChildren(el("div", { class: "panel" }, el("p", { class: "text", tabindex: "-1" }, "Nothing more to review"),
    el("p", {}, "Each description here is decided, skipped, or with another reviewer. ",
      el("button", { onclick: show }, "Look again"), " ", el("button", { onclick: doing(undo) }, "Undo ", el("kbd", {}, "u")))));
  get("card").querySelector(".text").focus();
}

const alternatives = (one) => one.answer.alternatives.filter((code) => !one.predicted.some((own) => own.code === code.code)).slice(0, 9);

function draw() {
  const one = present(), { card, answer } = one;
  const state = card.status === "open" ? null : el("span", { class: "badge" }, `${STATES[card.status]}: ${card.who}${decidedOn(card)}`);
  const others = Object.entries(card.row);
  get("card").replaceChildren(el("div", { class: "panel" },
    el("p", { class: "quiet" }, `No. ${count(card.place + 1)} of ${count(source.cards)} · occurs in ${count(card.times)} ${card.times === 1 ? "row" : "rows"} · ${languageName(card.lang)} `, state),
    el("h2", { class: "text", tabindex: "-1" }, card.text),
    others.length ? el("dl", { class: "beside", title: card.times > 1 ? `of the first of ${count(card.times)} rows` : null }, others.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))) : null,
    card.opinions.length ? el("ul", { class: "notices" }, card.opinions.map((said) => el("li", {}, `${said.who}: `, said.codes ? codeNames(said.codes.map(named(one))) : "not sure"))) : null,
    note ? el("p", { class: "notice", role: "alert" }, note) : null,
    el("h3", {}, "Codes"),
    el("ul", { class: "chosen" }, chosen.length ? chosen.map((code) => el("li", {}, codeWithBar(code),
      el("button", { class: "plain", "aria-label": `Remove ${code.code}`, onclick: () => toggle(code, true) }, "×"))) : el("li", { class: "none" }, "none chosen")),
    answer.attributes.length ? el("p", {}, answer.attributes.map((one) => `${one.attribute} ${one.label ?? "none"} (${percent(one.probability)})`).join(" · ")) : null,
    el("div", { class: "row actions" },
      el("button", { class: "primary", onclick: once(() => decide(own())) }, "Accept", el("kbd", {}, "↵")),
      el("button", { onclick: once(() => decide([about.no_occupation.code])), disabled: !about.no_occupation, title: about.no_occupation ? null : "This classification has no code for it" }, "No occupation", el("kbd", {}, "0")),
      el("button", { onclick: once(() => decide(null)) }, "Not sure", el("kbd", {}, "n")),
      el("button", { onclick: once(undo) }, "Undo", el("kbd", {}, "u")),
      el("button", { "aria-label": "Previous", onclick: doing(() => move(-1)), disabled: at === 0 }, "←"),
      el("button", { "aria-label": "Next, without a decision", onclick: doing(() => move(1)) }, "→")),
    el("div", { class: "columns" },
      el("div", {}, el("h3", {}, "Alternatives"), alternatives(one).length ? choices(alternatives(one), true) : el("p", { class: "quiet" }, "None reaches 0.5\u00a0%.")),
      el("div", {},
        el("label", { for: "search" }, "Search codes by number or title ", el("kbd", {}, "/")),
        el("input", { type: "search", id: "search", autocomplete: "off", oninput: doing(search), onkeydown: inSearch }),
        el("div", { id: "found", "aria-live": "polite" }),
        answer.neighbours.length ? el("div", {}, el("h3", { class: "spaced" }, "Nearest in the training data, by similarity"), nearest(answer.neighbours)) : null))));
}

function choices(codes, numbered) {
  const row = (code, i) => el("li", {},
    el("button", { class: "choice", "aria-pressed": String(has(code)), onclick: () => toggle(code, false), title: "Take as the only code" },
      numbered ? el("kbd", { "aria-hidden": "true" }, String(i + 1)) : el("span"), el("span", { class: "code" }, code.code), el("span", {}, code.title || ""),
      el("span", { class: "percent" }, code.probability == null ? "" : percent(code.probability, 1))),
    about.most_codes > 1 ? el("button", { class: "plain", "aria-label": `Add ${code.code} as a further code`, title: "Add as a further code", onclick: () => toggle(code, true) }, "+") : null);
  return el("ul", { class: "list choices" }, codes.map(row));
}

const has = (code) => chosen.some((one) => one.code === code.code);

// Take a code as the only one; or, with `further`, add it, or remove one that is there.
function toggle(code, further) {
  if (!further) chosen = [code];
  else if (has(code)) chosen = chosen.filter((one) => one.code !== code.code);
  else if (chosen.length >= about.most_codes) return say(`A description has ${about.most_codes} codes at most.`);
  else chosen = [...chosen, code];
  note = "";
  draw();
  get("card").querySelector(".text").focus({ preventScroll: true });
  say(`Codes: ${codeNames(chosen) || "none"}`);
}

let asked = 0;
async function search() {
  const number = ++asked, query = get("search").value.trim();
  const codes = query ? await api(`codes?limit=8&q=${encodeURIComponent(query)}`) : [];
  if (number !== asked || !get("found")) return;
  const own = query && !codes.some((one) => one.code === query) && /^\S+$/.test(query) && /\d/.test(query) ? [{ code: query, title: "a code that the model does not know" }] : [];
  get("found").replaceChildren(choices([...codes, ...own], false));
  get("found").dataset.query = query;
}

// Enter takes the first code that is found for what is in the field, which may not have arrived yet.
async function takeFirst(isFurther) {
  const one = present(), query = get("search").value.trim();
  if (get("found").dataset.query !== query) await search();
  if (present() !== one || get("found")?.dataset.query !== query) return;
  const first = get("found").querySelector("button.choice");
  if (first) (isFurther ? first.nextSibling || first : first).click();
}

function inSearch(event) {
  const found = [...get("found").querySelectorAll("button.choice")];
  if (event.key === "Enter") {
    event.preventDefault();
    doing(() => takeFirst(event.shiftKey))();
  } else if (event.key === "ArrowDown" && found.length) {
    event.preventDefault();
    found[0].focus();
  } else if (event.key === "Escape") get("card").querySelector(".text").focus();
}

// One decision at a time: none is made on a card that is not shown yet.
async function alone(action) {
  if (isBusy) return;
  isBusy = true;
  try {
    await action();
  } finally {
    isBusy = false;
  }
}

const own = () => chosen.map((code) => code.code);

// Decide on codes; null is unsure.
const decide = (codes) => alone(async () => {
  const one = present();
  if (!one) return;
  if (codes && !codes.length) return say("No code is chosen. Choose one, or say that there is no occupation, or that you are not sure.");
  try {
    one.card = await api(`review/cards/${one.card.id}`, { json: { who: who(), version: one.card.version, codes } });
  } catch (error) {
    if (!(error instanceof Refused && error.status === 409)) throw error;
    // the codes that the message speaks of are those that were refused
    const refused = codes?.map((code) => chosen.find((mine) => mine.code === code) || named(one)(code));
    one.card = error.body.card;
    choose(at, decidedBy(one.card));
    if (!refused) return;
    chosen = refused;
    draw();
    return get("card").querySelector(".text").focus({ preventScroll: true });
  }
  say(`Saved: ${one.card.codes ? codeNames(one.card.codes.map(named(one))) : "not sure"}`);
  await forward();
  trust().catch(() => {});
});

const decidedBy = (card) => {
  const what = card.status === "unsure" ? "is not sure" : card.status === "open" ? "undid a decision" : card.status === "disputed" ? "differ" : `has decided: ${card.codes.join(", ")}`;
  return `${card.who || "Another reviewer"} ${what}. Accept to replace that with the codes below, or continue with →.`;
};

async function go(place) {
  if (place >= cards.length - 4 && !isOver) {
    const more = fetchMore();
    if (place >= cards.length) await more;
    else more.catch(() => {});
  }
  choose(Math.min(place, cards.length));
}

async function forward() {
  let place = at + 1;
  while (cards[place] && cards[place].card.status !== "open") place += 1;
  await go(place);
}

const move = (by) => alone(async () => at + by >= 0 && go(at + by));

const undo = () => alone(async () => {
  const undone = await api(`review/${source.id}/undo`, { json: { who: who() } });
  if (undone.length > 1) return say(`Undone: ${count(undone.length)} decisions`);
  const back = await api(`review/cards/${undone[0].id}?who=${encodeURIComponent(who())}`);
  const place = cards.findIndex((one) => one.card.id === back.card.id);
  if (place < 0) cards.splice(at, 0, back);
  else cards[place] = back;
  choose(place < 0 ? at : place);
  say(`Undone: ${back.card.text}`);
  trust().catch(() => {});
});

function key(event) {
  if (get("review").hidden || get("desk").hidden || way !== "cards" || event.ctrlKey || event.altKey || event.metaKey || !usesKeys()) return;
  if (event.target.closest("input, textarea, select")) return;
  if (event.key === "Enter" && event.target.closest("button, a")) return;
  if (event.repeat) return; // a key that is held down decides once
  const digit = event.code.match(/^(?:Digit|Numpad)([1-9])$/);
  const other = digit && present() && alternatives(present())[digit[1] - 1];
  const actions = { Enter: () => decide(own()), 0: () => decide([about.no_occupation.code]), "?": toggleHelp, n: () => decide(null), u: undo, ArrowLeft: () => move(-1), ArrowRight: () => move(1), "/": () => get("search")?.focus() };
  const action = event.key === "/" || event.key === "?" ? actions[event.key] : other ? () => toggle(other, event.shiftKey) : actions[event.key];
  if (!action || (event.key === "0" && !about.no_occupation)) return;
  event.preventDefault();
  doing(action)();
}

// Remove a file from the review, once it is said what goes.
async function removeSource() {
  const now = (await api("review")).find((one) => one.id === source.id);
  const decided = now?.decided ? ` and what people decided on ${count(now.decided)} of them` : "";
  if (!confirm(`Remove ${source.name} from the review? Its ${count(source.cards)} cards with their other columns${decided} are deleted. The coded file stays under Files, without these decisions; models that have learned from them stay as they are.`)) return;
  await api(`review/${source.id}`, { method: "DELETE" });
  sessionStorage.removeItem("source");
  await show();
}

function toggleHelp() {
  helps = !helps;
  get("keys").hidden = !helps;
  get("key-help").setAttribute("aria-expanded", String(helps));
}

async function trust(sources) {
  const now = await api(`review/${source.id}/trust`);
  const others = sources || (await api("review"));
  get("trust").className = "trust";
  const select = others.length > 1 ? el("select", { "aria-label": "File", onchange: (event) => (sessionStorage.setItem("source", event.target.value), show()) },
    others.map((one) => el("option", { value: one.id, selected: one.id === source.id }, one.name))) : el("p", { class: "quiet" }, source.name);
  const keys = el("input", { type: "checkbox", checked: usesKeys(), onchange: (event) => localStorage.setItem("keys", event.target.checked ? "on" : "off") });
  get("trust").replaceChildren(...[
    select,
    el("p", {}, el("span", { class: "figure" }, `${count(now.rows_settled)} of ${count(now.rows)}`), `rows settled, with ${count(now.cards_settled)} of ${count(now.cards)} descriptions`,
      now.cards_unsure ? `; not sure of ${count(now.cards_unsure)}` : ""),
    bar(now.rows ? now.rows_settled / now.rows : 0, "Settled", true),
    now.right ? el("p", {}, el("span", { class: "figure" }, percent(now.right.mean)), `of the file's rows are right as the model coded them, by ${count(now.random_cards)} cards drawn at random; 95\u00a0% interval ${percent(now.right.low)} to ${percent(now.right.high)}`)
      : now.share_right != null ? el("p", {}, el("span", { class: "figure" }, percent(now.share_right)), "of the settled rows are right as the model coded them: every description is decided.")
      : now.random_cards_needed ? el("p", { class: "quiet" },
        `Every third card is drawn at random. After ${now.random_cards_needed} of them, this shows how many of the file's rows are right: ${count(now.random_cards)} so far.`) : null,
    now.skipped ? el("p", { class: "quiet" }, "A card drawn at random is not decided; those drawn after it do not count yet. ", el("button", { class: "plain", onclick: doing(() => openCard(now.skipped)) }, "Show it")) : null,
    el("p", {}, "Export: ", el("a", { href: "/api/corrections.csv", download: true }, "what is settled"), " · ", el("a", { href: "/api/decisions.csv", download: true }, "who decided what")),
    el("p", {}, el("button", { class: "plain", onclick: doing(removeSource) }, "Remove from review")),
    el("p", {}, "Enough is checked? ", el("a", { href: "#models" }, "Train again")),
    el("div", { class: "by-keys" }, el("button", { id: "key-help", "aria-expanded": String(helps), "aria-controls": "keys", onclick: toggleHelp }, "Keys ", el("kbd", {}, "?")),
      el("div", { id: "keys", hidden: !helps },
        el("dl", { class: "keys" }, KEYS.flatMap(([name, meaning]) => [el("dt", {}, el("kbd", {}, name)), el("dd", {}, meaning)])),
        el("label", { class: "inline" }, keys, " Use these keys"))),
    about.user ? null : el("p", { class: "quiet" }, `You are ${who()}. `, el("button", { class: "plain", onclick: () => (localStorage.removeItem("who"), show()) }, "Change")),
  ].filter(Boolean));
}
