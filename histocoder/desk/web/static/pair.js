// What two coders make of the same cards: agreement by digit, and what they have to settle.
import { api, count, doing, el, get, once, percent, say } from "./lib.js";

export async function show(at) {
  const [now, list] = await Promise.all([api(`review/${at.source.id}/agreement`), api(`review/${at.source.id}/list?status=disputed&limit=200`)]);
  const number = (value) => (value == null ? "–" : value.toFixed(2));
  const row = (one) => el("tr", {}, el("th", { scope: "row" }, one.digits ? `first ${one.digits === 1 ? "digit" : `${one.digits} digits`}` : "whole codes"),
    el("td", {}, percent(one.share, 1)), el("td", {}, `${percent(one.low)} to ${percent(one.high)}`), el("td", {}, number(one.kappa)), el("td", {}, number(one.alpha)));
  const settle = (card, codes) => once(async () => {
    await api(`review/cards/${card.id}`, { json: { who: at.who, version: card.version, codes } });
    say(`Settled: ${card.text}`);
    await Promise.all([show(at), at.changed()]);
  });
  const name = (codes) => codes ? codes.map((code) => `${code} ${list.titles[code] || ""}`).join(", ") : "not sure";
  get("pair").replaceChildren(...[
    el("div", { class: "panel" },
      el("p", {}, `${count(now.cards)} descriptions are for two people, who do not see each other's decisions; both have decided on ${count(now.both)}.`),
      now.by_digits.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Agreement" }, el("table", {},
        el("caption", {}, `Agreement on ${count(now.by_digits[0].n)} descriptions`),
        el("thead", {}, el("tr", {}, ["compared", "the same", "95\u00a0% interval", "Cohen's κ", "Krippendorff's α"].map((text) => el("th", { scope: "col" }, text)))),
        el("tbody", {}, now.by_digits.map(row)))) : null),
    el("h2", {}, `To settle: ${count(now.disputed)}`),
    el("ul", { class: "list settle" }, list.cards.map((card) => el("li", {},
      el("button", { class: "plain open", onclick: doing(() => at.open(card.id)) }, card.text),
      el("span", { class: "buttons" }, card.opinions.map((said) => said.codes ? el("button", { onclick: settle(card, said.codes) }, `${said.who}: ${name(said.codes)}`)
        : el("span", { class: "quiet" }, `${said.who}: not sure`)))))),
  ]);
}
