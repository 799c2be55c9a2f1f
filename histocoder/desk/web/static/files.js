// Send tables in, choose their columns, watch them being coded.
import { api, bar, count, doing, duration, el, get, languageSelect, percent } from "./lib.js";
import { dropZone, firstRows, option, previewOf, formChoices, upload } from "./upload.js";

const begun = {}; // file -> when its first rows were coded, and how many
let timer, files = [];

export function start() {
  get("to-code").replaceChildren(dropZone({
    id: "file", use: "code", title: "Drop a table here, or choose one",
    hint: "CSV, Parquet, Excel or Stata, up to 2 GB. The file stays on the machine that runs this server.",
    then: async (file) => {
      await choose(file);
      await list();
    },
  }));
}

export function use() {}

export const show = doing(list);

export function hide() {
  clearTimeout(timer);
}

async function choose(file) {
  const form = get("file-form");
  const preview = await previewOf(file);
  const before = file.options || {};
  const texts = before.input_col || preview.input_col;
  const langs = before.language_col || preview.language_col;
  const input = el("select", { id: "input-col", required: true }, option("", texts, "Choose…"), preview.columns.map((name) => option(name, texts)));
  const column = el("select", { id: "language-col" }, option("", langs, "no column: one for all rows"), preview.columns.map((name) => option(name, langs)));
  const language = languageSelect("file-language", before.language || preview.language);
  const known = el("input", { type: "checkbox", id: "known", checked: before.known });
  const classes = el("select", { id: "classes" });
  const tables = (chosen) => classes.replaceChildren(option("", chosen, "none"),
    ...files.filter((one) => one.use === "classes").map((one) => option(one.id, chosen, one.name)), option("new", chosen, "upload a table of classes…"));
  tables(before.classes || "");
  const note = el("div", {});
  const crosswalk = el("input", { type: "file", class: "unseen", id: "crosswalk", tabindex: "-1", "aria-label": "Table of classes" });
  crosswalk.onchange = doing(async () => {
    try {
      const sent = await upload(crosswalk.files[0], "classes", (...children) => note.replaceChildren(...children));
      note.replaceChildren();
      files = await api("files");
      tables(sent?.id || "");
    } catch (error) {
      note.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
      tables("");
    }
  });
  classes.onchange = () => classes.value === "new" && (crosswalk.click(), tables(""));
  const [rows, mark] = firstRows(preview);
  const chosen = () => {
    language.disabled = column.value !== "";
    mark([input.value, column.value]);
  };
  input.onchange = column.onchange = chosen;
  chosen();
  form.replaceChildren(...[
    el("h2", { tabindex: "-1" }, file.name),
    ...preview.notices.map((text) => el("p", { class: "notice" }, text)),
    rows,
    el("div", { class: "row" }, ...formChoices(file, choose),
      el("label", {}, "Descriptions are in ", input),
      el("label", {}, "Languages are in ", column),
      el("label", {}, "Language ", language),
      el("label", {}, "Add classes, such as HISCLASS ", classes)),
    crosswalk, note,
    el("label", { class: "inline" }, known, " Descriptions that occur in the training data keep their hand-coded codes"),
    el("div", { class: "row" },
      el("button", { class: "primary", type: "submit" }, "Code this file"),
      el("button", { type: "button", onclick: () => (form.hidden = true) }, "Not now")),
  ]);
  form.onsubmit = doing(async () => {
    const options = { input_col: input.value, language_col: column.value || null, known: known.checked, classes: classes.value || null };
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
  const isBusy = () => !get("files").hidden && files.some((file) => ["queued", "running"].includes(file.state));
  if (isBusy()) timer = setTimeout(doing(list), 5000); // also after an error
  files = await api("files");
  clearTimeout(timer);
  const shown = files.filter((file) => file.use === "code");
  get("sent-title").hidden = !shown.length;
  const focused = document.activeElement?.dataset?.key;
  get("sent").replaceChildren(...shown.map(panel));
  if (focused) get("sent").querySelector(`[data-key="${focused}"]`)?.focus();
  if (isBusy()) timer = setTimeout(doing(list), 1000);
}

const button = (file, text, action, kind = "") =>
  el("button", { class: kind, "data-key": `${file.id}-${text}`, onclick: doing(action), "aria-label": `${text}: ${file.name}` }, text);

const actions = {
  new: (file) => [code(file, "Choose columns"), remove(file)],
  queued: (file) => [remove(file)],
  running: (file) => [remove(file)],
  failed: (file) => [code(file, "Choose columns"), remove(file)],
  done: (file) => [
    button(file, "Review", async () => {
      const source = await api(`files/${file.id}/review`, { method: "POST" });
      sessionStorage.setItem("source", source.id);
      location.hash = "review";
    }, "primary"),
    el("a", { class: "button", href: `/api/files/${file.id}/result`, download: true, "data-key": `${file.id}-get`, "aria-label": `Download: ${file.name}`, title: "The table with its codes, those of people where they have decided" }, "Download"),
    el("a", { class: "button", href: `/api/files/${file.id}/result?as_coded=true`, download: true, "aria-label": `As the model coded it: ${file.name}` }, "As the model coded it"),
    el("a", { class: "button", href: `/api/files/${file.id}/provenance`, download: true, "aria-label": `Provenance: ${file.name}` }, "Provenance"),
    code(file, "Code again"),
    remove(file),
  ],
};
const code = (file, text) => button(file, text, () => choose(file), file.state === "new" ? "primary" : "");
const remove = (file) => button(file, "Delete", async () => {
  const decided = (await api("review")).filter((source) => source.file === file.id).reduce((sum, source) => sum + source.decided, 0);
  const decisions = decided ? `, its cards under Review and what was decided on ${decided === 1 ? "one of them" : `${count(decided)} of them`}` : "";
  if (confirm(`Delete ${file.name}, its codes${decisions} from the server?`)) await api(`files/${file.id}`, { method: "DELETE" });
  await list();
});

function panel(file) {
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
  const sum = file.state === "done" && file.summary.rows ? file.summary : null;
  return el("article", { class: "panel file" },
    el("span", { class: "name" }, file.name),
    el("span", { class: "buttons" }, (actions[file.state] || actions.new)(file)),
    file.state === "running" ? el("span", { class: "whole" }, bar(share, "Coded", true)) : null,
    el("span", { class: "whole quiet" }, states[file.state] || states.new),
    sum ? el("dl", { class: "whole figures" },
      figure(count(sum.rows - sum.blank), "rows coded"), figure(count(sum.blank), "blank"),
      sum.expected_right == null ? null : figure(percent(sum.expected_right), "of the rows are expected to be right: the mean confidence"),
      sum.sure == null ? null : figure(count(sum.to_check ?? sum.unsure), `to check: a confidence below ${percent(sum.sure)}`)) : null,
    sum ? el("p", { class: "whole quiet" }, "Check first what is frequent and unsure: Review begins with that, and after thirty cards says how many rows of this file are right.") : null,
    file.message ? el("span", { class: "whole error" }, file.message) : null,
    file.notices.length ? el("ul", { class: "whole notices" }, file.notices.map((text) => el("li", {}, text))) : null);
}

const figure = (number, meaning) => el("div", {}, el("dt", {}, meaning), el("dd", { class: "figure" }, number));
