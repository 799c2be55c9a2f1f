// Say how to train on the corrections.
import { api, count, doing, el, get } from "./lib.js";

export function start() {}

export const show = doing(async () => {
  const now = await api("improve", { method: "POST" });
  get("improving").replaceChildren(el("ol", { class: "steps panel" },
    el("li", {}, el("strong", {}, `${count(now.corrections)} checked descriptions`), " are settled under ", el("a", { href: "#review" }, "Review"), ". ",
      now.corrections ? el("a", { href: "/api/corrections.csv", download: true }, "Export them as CSV") : null),
    el("li", {}, el("strong", {}, "Train on them"), " in a terminal, in the folder where the server was started. They are saved in the file that the command names. They override earlier codes of the same descriptions. If there are 20 or more, a fifth is kept aside, to measure whether the new model is better.",
      el("pre", { tabindex: "0", "aria-label": "Command" }, now.next_step.split("\n").at(-1))),
    el("li", {}, el("strong", {}, "Serve the new model"), ", and code the file again.")));
});
