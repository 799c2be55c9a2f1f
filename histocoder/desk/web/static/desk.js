// Show one part of the page at a time: the one that the address names after #.
import { api, count, doing, el, fillLanguages, get } from "./lib.js";
import * as code from "./code.js";
import * as files from "./files.js";
import * as models from "./models.js";
import * as review from "./review.js";

const parts = { models, code, files, review };
let shown, about;

function route() {
  const wanted = location.hash.slice(1);
  const name = wanted in parts ? wanted : about.model && !about.in_the_box ? "code" : "models";
  if (name === shown) return;
  parts[shown]?.hide?.();
  shown = name;
  for (const part of Object.keys(parts)) get(part).hidden = part !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${get(name).querySelector("h1").textContent} · histocoder`;
  parts[name].show();
}

// Tell all parts which model is in use.
async function learn() {
  about = await api("about");
  get("model").textContent = about.model ? `${about.model} · ${about.system}, ${count(about.num_codes)} codes` : "no model yet";
  get("signed-in").hidden = !about.user;
  get("signed-in").replaceChildren(`${about.user} `, el("button", { class: "plain" }, "Sign out"));
  for (const hint of document.querySelectorAll(".no-model")) {
    hint.hidden = Boolean(about.model);
    hint.replaceChildren(el("p", {}, "There is no model yet. ", el("a", { href: "#models" }, "Train one"), " on a table that is coded already."));
    hint.parentElement.classList.toggle("without-model", !about.model);
  }
  fillLanguages(about.languages, about.all_languages);
  for (const part of Object.values(parts)) part.use(about);
}

doing(async () => {
  if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token is in a cookie now
  for (const part of Object.values(parts)) part.start();
  await learn();
  addEventListener("hashchange", route);
  addEventListener("model", doing(learn));
  route();
})();
