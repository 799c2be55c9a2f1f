// Show one part of the page at a time: the one that the address names after #.
import { api, count, doing, fillLanguages, get } from "./lib.js";
import * as code from "./code.js";
import * as files from "./files.js";
import * as improve from "./improve.js";
import * as review from "./review.js";

const parts = { code, files, review, improve };
let shown;

function route() {
  const name = location.hash.slice(1) in parts ? location.hash.slice(1) : "code";
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

doing(async () => {
  if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token is in a cookie now
  const about = await api("about");
  get("model").textContent = `${about.model} · ${about.system}, ${count(about.num_codes)} codes`;
  fillLanguages(about.languages);
  for (const part of Object.values(parts)) part.start(about);
  addEventListener("hashchange", route);
  route();
})();
