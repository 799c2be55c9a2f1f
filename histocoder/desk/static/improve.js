// Train on the corrections: show the command, run it, and show what it brought.
import { api, count, doing, el, get, say } from "./lib.js";

let timer;

export function start() {}

export const show = doing(async () => draw(await api("improve")));

export function hide() {
  clearTimeout(timer);
}

const post = (what) => doing(async () => draw(await api(`improve/${what}`, { method: "POST" })));

async function copy(command) {
  await api("improve/keep", { method: "POST" });
  await navigator.clipboard.writeText(command);
  say("Copied. The corrections are saved in the file that the command names.");
}

function draw(now) {
  clearTimeout(timer);
  const run = now.may_train ? [
    el("div", { class: "row" }, now.state === "running" ? el("button", { onclick: post("stop") }, "Stop training")
      : el("button", { class: "primary", onclick: post("train"), disabled: !now.corrections || !now.is_complete }, "Train now")),
    now.state === "failed" ? el("p", { class: "error", role: "alert" }, "Training ended early. Start it again to resume it. Its last output is below.") : null,
    now.log ? el("pre", { tabindex: "0", "aria-label": "Output of the training" }, now.log) : null,
  ] : [el("p", { class: "quiet" }, "Run it in a terminal, in the folder where the server was started. A server started with --allow-training has a button here.")];
  get("improving").replaceChildren(el("ol", { class: "steps panel" },
    el("li", {}, el("strong", {}, `${count(now.corrections)} checked descriptions`), " are settled under ", el("a", { href: "#review" }, "Review"), ". ",
      now.corrections ? el("a", { href: "/api/corrections.csv", download: true }, "Export them as CSV") : null),
    el("li", {}, el("strong", {}, "Train on them."), " They are added to the training data, and override earlier codes of the same descriptions. None is added to the validation data. If there are 20 or more, a fifth is held out to compare the models.",
      el("pre", { tabindex: "0", "aria-label": "Command" }, now.command),
      now.is_complete ? el("button", { onclick: doing(() => copy(now.command)) }, "Copy the command") : null, run.filter(Boolean)),
    el("li", {}, el("strong", {}, "Serve the new model"), ", and code the file again.",
      now.serve ? el("pre", { tabindex: "0", "aria-label": "Command to serve" }, now.serve) : null,
      now.gains.map((sentence) => el("p", { class: "gain" }, sentence)))));
  if (now.state === "running" && !get("improve").hidden) timer = setTimeout(show, 2000);
}
