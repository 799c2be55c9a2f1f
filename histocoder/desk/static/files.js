// Send tables in, choose their columns, watch them being coded.
import { api, bar, count, doing, el, get, languageSelect, say } from "./lib.js";

const MOST_BYTES = 2 * 2 ** 30;
const begun = {}; // file -> when its first rows were coded, and how many
let timer;

export function start() {
  get("file").onchange = (event) => event.target.files[0] && send(event.target.files[0]);
  const drop = get("drop");
  for (const kind of ["dragover", "dragleave", "drop"])
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files[0]) send(event.dataTransfer.files[0]);
    });
}

export const show = doing(list);

export function hide() {
  clearTimeout(timer);
}

// XMLHttpRequest, since fetch does not tell how much is sent.
function send(file, sheet = "") {
  if (file.size > MOST_BYTES) {
    get("file").value = "";
    return refuse(`${file.name} is larger than 2 GB; code it with histocoder predict instead.`);
  }
  const request = new XMLHttpRequest();
  const stop = el("button", { onclick: () => request.abort() }, "Cancel");
  const progress = (share) =>
    get("sending").replaceChildren(el("p", {}, `Uploading ${file.name}`), bar(share, "Uploaded", true), stop);
  const end = (text) => {
    get("sending").hidden = true;
    get("file").value = "";
    if (text) say(text);
  };
  get("file-form").hidden = true;
  get("sending").hidden = false;
  progress(0);
  request.upload.onprogress = (event) => progress(event.loaded / event.total);
  request.onabort = () => end("Cancelled.");
  request.onerror = () => end("The file could not be uploaded: the server closed the connection.");
  request.onload = doing(async () => {
    const body = JSON.parse(request.responseText || "{}");
    if (request.status !== 201) {
      end();
      const named = body.detail?.includes("--sheet") && prompt(body.detail, sheet); // of a workbook with several
      if (named) return send(file, named);
      return refuse(body.detail || `The server answered ${request.status}.`);
    }
    end();
    await choose(body);
    await list();
  });
  request.open("POST", `/api/files?name=${encodeURIComponent(file.name)}${sheet && `&sheet=${encodeURIComponent(sheet)}`}`);
  request.send(file);
}

function refuse(reason) {
  get("file-form").replaceChildren(el("p", { class: "error", role: "alert" }, reason));
  get("file-form").hidden = false;
}

const option = (value, chosen, text = value) => el("option", { value, selected: value === chosen }, text);

async function choose(file) {
  const form = get("file-form");
  const preview = await api(`files/${file.id}/preview`);
  const before = file.options || {};
  const texts = before.input_col || preview.input_col;
  const langs = before.language_col || preview.language_col;
  const input = el("select", { id: "input-col", required: true }, option("", texts, "Choose…"), preview.columns.map((name) => option(name, texts)));
  const column = el("select", { id: "language-col" }, option("", langs, "no column: one for all rows"), preview.columns.map((name) => option(name, langs)));
  const language = languageSelect("file-language");
  const known = el("input", { type: "checkbox", id: "known", checked: before.known });
  const table = el("table", {});
  const mark = () => {
    language.disabled = column.value !== "";
    const row = (kind, cells) => el("tr", {}, cells.map((cell, i) =>
      el(kind, { "data-chosen": [input.value, column.value].includes(preview.columns[i]), scope: kind === "th" && "col" }, cell)));
    table.replaceChildren(el("thead", {}, row("th", preview.columns)), el("tbody", {}, preview.rows.map((cells) => row("td", cells))));
  };
  input.onchange = column.onchange = mark;
  mark();
  form.replaceChildren(...[
    el("h2", { tabindex: "-1" }, file.name),
    ...preview.notices.map((text) => el("p", { class: "notice" }, text)),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "First rows" }, table),
    el("div", { class: "row" },
      el("label", {}, "Descriptions are in ", input),
      el("label", {}, "Languages are in ", column),
      el("label", {}, "Language ", language)),
    el("label", { class: "inline" }, known, " Descriptions that occur in the training data keep their hand-coded codes"),
    el("div", { class: "row" },
      el("button", { class: "primary", type: "submit" }, "Code this file"),
      el("button", { type: "button", onclick: () => (form.hidden = true) }, "Not now")),
  ]);
  form.onsubmit = doing(async () => {
    const options = { input_col: input.value, language_col: column.value || null, known: known.checked };
    if (!column.value) options.language = language.value;
    await api(`files/${file.id}/code`, { json: options });
    form.hidden = true;
    await list();
  });
  form.hidden = false;
  form.querySelector("h2").focus();
}

async function list() {
  clearTimeout(timer);
  const files = await api("files");
  get("sent-title").hidden = !files.length;
  const focused = document.activeElement?.dataset?.key;
  get("sent").replaceChildren(...files.map(shown));
  if (focused) get("sent").querySelector(`[data-key="${focused}"]`)?.focus();
  if (!get("files").hidden && files.some((file) => ["queued", "running"].includes(file.state))) timer = setTimeout(doing(list), 1000);
}

const button = (file, text, action) => el("button", { "data-key": `${file.id}-${text}`, onclick: doing(action), "aria-label": `${text}: ${file.name}` }, text);

const actions = {
  new: (file) => [code(file, "Choose columns"), remove(file)],
  queued: (file) => [remove(file)],
  running: (file) => [remove(file)],
  failed: (file) => [code(file, "Choose columns"), remove(file)],
  done: (file) => [
    el("a", { class: "button", href: `/api/files/${file.id}/result`, download: true, "data-key": `${file.id}-get`, "aria-label": `Download: ${file.name}` }, "Download"),
    button(file, "Review", async () => {
      await api(`files/${file.id}/review`, { method: "POST" });
      location.hash = "review";
    }),
    remove(file),
  ],
};
const code = (file, text) => button(file, text, () => choose(file));
const remove = (file) => button(file, "Delete", async () => {
  if (confirm(`Delete ${file.name} and its codes from the server?`)) await api(`files/${file.id}`, { method: "DELETE" });
  await list();
});

function shown(file) {
  const share = file.num_rows ? file.rows_done / file.num_rows : 0;
  if (file.state !== "running") delete begun[file.id];
  const first = file.rows_done ? (begun[file.id] ??= { at: Date.now(), rows: file.rows_done }) : null;
  const perSecond = first && (1000 * (file.rows_done - first.rows)) / (Date.now() - first.at);
  const speed = perSecond ? `, ${count(perSecond)} rows/s, ${duration((file.num_rows - file.rows_done) / perSecond)} left` : "";
  const states = {
    new: "Uploaded. Choose its columns.",
    queued: "Waiting in the queue.",
    running: !file.num_rows ? "Reading the file." : `${count(file.rows_done)} of about ${count(file.num_rows)} rows${speed}`,
    failed: "Not coded.",
    done: "Coded.",
  };
  return el("article", { class: "panel file" },
    el("span", { class: "name" }, file.name),
    el("span", { class: "buttons" }, (actions[file.state] || actions.new)(file)),
    file.state === "running" ? el("span", { class: "whole" }, bar(share, "Coded", true)) : null,
    el("span", { class: "whole quiet" }, states[file.state] || states.new),
    file.message ? el("span", { class: file.state === "failed" ? "whole error" : "whole quiet" }, file.message) : null);
}

function duration(seconds) {
  if (seconds < 90) return `${Math.ceil(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
