// Train models on coded tables, compare them, and switch between them.
import { api, bar, count, doing, duration, el, get, languageSelect, percent, say } from "./lib.js";
import { dropZone, firstRows, option, previewOf, formChoices } from "./upload.js";

const FIXES = {
  zero_pad_codes: ["--zero-pad-codes", "Restore lost leading zeros of codes"],
  drop_bad_labels: ["--drop-bad-labels", "Leave out rows whose codes do not fit"],
  allow_codes_shorter_than_block_size: ["--allow-codes-shorter-than-block-size", "Short codes are right as they are"],
  blank_means_no_occupation: ["--blank-means-no-occupation", "Rows without a code have no occupation"],
};
// What a run says -> what it does from then on, and the share of the time that is over by then.
const STAGES = [["Training finished.", "Choosing how to predict", 0.8], ["Writing the report", "Writing the report", 0.86],
  ["Evaluation finished.", "Learning from the validation rows, too", 0.9]];
const STEPS = /^steps +([\d,]+) in /m;
const BUSY = ["queued", "running"];
let about, used, timer, busy = false, open = null;

export function start() {}

export function use(now) {
  about = now;
}

export const show = doing(async () => {
  await draw();
});

export function hide() {
  clearTimeout(timer);
}

// While a model is trained, again and again, also after an error.
async function draw() {
  clearTimeout(timer);
  try {
    await drawNow();
  } finally {
    if (!get("models").hidden && busy) timer = setTimeout(doing(draw), 2000);
  }
}

async function drawNow() {
  const models = await api("models");
  busy = models.some((one) => BUSY.includes(one.state));
  const news = models.find((one) => one.in_use)?.id;
  if (news !== used) dispatchEvent(new Event("model")); // as when training has ended
  used = news;
  const details = await Promise.all(models.map(about.may_train || models.length ? detail : () => ({})));
  const corrections = news ? await api("improve", { method: "POST" }) : null;
  welcome(models);
  const focused = document.activeElement?.dataset?.key;
  get("made").replaceChildren(...models.map((model, i) => panel(model, details[i], corrections)));
  if (focused) get("made").querySelector(`[data-key="${focused}"]`)?.focus();
}

function welcome(models) {
  const made = models.some((model) => model.id !== "given" || !about.in_the_box);
  if (get("welcome").dataset.made === String(made)) return;
  get("welcome").dataset.made = made;
  const table = about.may_train ? dropZone({
    id: "coded-table", use: "train", title: "Drop a coded table here, or choose one",
    hint: "Descriptions in one column, codes in others: CSV, Excel, Stata, SPSS or Parquet", then: choose,
  }) : el("p", { class: "quiet" }, "Training on this page is off at this server (histocoder serve --allow-training).");
  get("welcome").replaceChildren(...(made ? [table] : doors(table)));
}

// What to begin with, where nothing was done yet.
function doors(table) {
  const door = (title, text, ...content) => el("section", { class: "panel door" }, el("h2", {}, title), el("p", {}, text), ...content.filter(Boolean));
  return [
    about.in_the_box ? door("Code a file now", "The model in the box codes it into HISCO at once, and says how sure it is. You check some codes, and train a model of your own from them.",
      el("p", {}, el("a", { class: "button primary", id: "code-now", href: "#files" }, "Choose a file"), " ", el("a", { class: "button", href: "#code" }, "Code a few descriptions"))) : null,
    about.may_train ? door("Try the sample", "Coded titles in four languages to train on, and a census to code.", ...beginnings()) : null,
    door("Train on your own coded table", "A model learns from it here, on this machine; some hundreds of rows that people have coded are a beginning.", table),
  ].filter(Boolean);
}

function beginnings() {
  const one = (id, work, text, hint) => el("p", {}, el("button", { id, onclick: doing(work) }, text), " ", el("span", { class: "quiet" }, hint));
  return [
    one("sample", sample, "Try it with a sample", "It trains a model in a minute or two."),
    about.in_the_box ? null : one("titles", titles, "Begin without coded rows", "A model learns HISCO's titles in twelve languages. It proposes, you decide under Review: it is no coder yet."),
  ];
}

async function titles() {
  await choose(await api("titles", { method: "POST" }), { titles: "none" });
}

async function sample() {
  const [coded] = await api("sample", { method: "POST" });
  await choose(coded, { titles: "none" }); // which are what the sample is made of
  get("quick").checked = true;
}

// The columns of a table, checked while one looks.
async function choose(file, more = {}) {
  const form = get("train-form");
  const preview = await previewOf(file);
  const input = el("select", { id: "train-input", required: true }, option("", preview.input_col, "Choose…"), preview.columns.map((name) => option(name, preview.input_col)));
  const column = el("select", { id: "train-language-col" }, option("", preview.language_col, "no column: one for all rows"),
    preview.columns.map((name) => option(name, preview.language_col)));
  const language = languageSelect("train-language", preview.language, { all: true });
  const box = (name, text, checked) => el("label", { class: "inline" }, el("input", { type: "checkbox", name, value: text, checked }), ` ${text}`);
  const codes = el("fieldset", { class: "choose" }, el("legend", {}, "Codes are in"), preview.columns.map((name) => box("codes", name, preview.target_cols.includes(name))));
  const few = preview.attribute_cols.filter((name) => ![preview.input_col, preview.language_col, ...preview.target_cols].includes(name));
  const attributes = el("fieldset", { class: "choose", hidden: !few.length }, el("legend", {}, "Also learn the attributes"), few.map((name) => box("attributes", name, false)));
  const fixes = el("fieldset", { class: "choose" }, el("legend", {}, "If codes do not fit"), Object.entries(FIXES).map(([name, [, text]]) => box(name, text, false)));
  const quick = el("input", { type: "checkbox", id: "quick" });
  const found = el("div", { "aria-live": "polite" });
  const [rows, mark] = firstRows(preview);
  const train = el("button", { class: "primary", type: "submit", disabled: true }, "Train a model");
  const options = () => ({
    input_col: input.value, language_col: column.value || null, language: column.value ? "unk" : language.value,
    target_cols: [...codes.querySelectorAll(":checked")].map((one) => one.value),
    attribute_cols: [...attributes.querySelectorAll(":checked")].map((one) => one.value),
    ...Object.fromEntries(Object.keys(FIXES).map((name) => [name, fixes.querySelector(`[name=${name}]`).checked])), quick: quick.checked, ...more,
  });
  let asked = 0;
  const check = doing(async () => {
    const number = (asked += 1), now = options();
    language.disabled = column.value !== "";
    mark([now.input_col, column.value, ...now.target_cols]);
    train.disabled = true;
    if (!now.input_col || !now.target_cols.length)
      return found.replaceChildren(el("p", { class: "notice" }, "Choose the column of descriptions, and the columns of codes."));
    found.replaceChildren(el("p", { class: "quiet" }, "Checking the table …"));
    let result;
    try {
      result = await api(`files/${file.id}/check`, { json: now });
    } catch (error) {
      result = { problems: [error.message], fixes: {} };
    }
    if (number !== asked) return;
    train.disabled = result.problems.length > 0;
    found.replaceChildren(...checked(result, (chosen) => {
      for (const [name, value] of Object.entries(chosen)) if (fixes.querySelector(`[name=${name}]`)) fixes.querySelector(`[name=${name}]`).checked = value;
      if (typeof chosen.input_col === "string") input.value = chosen.input_col;
      check();
    }));
  });
  form.onchange = check;
  form.replaceChildren(...[
    el("h2", { tabindex: "-1" }, file.name),
    ...preview.notices.map((text) => el("p", { class: "notice" }, text)),
    rows,
    el("div", { class: "row" }, ...formChoices(file, (other) => choose(other, more)),
      el("label", {}, "Descriptions are in ", input),
      el("label", {}, "Languages are in ", column),
      el("label", {}, preview.language_col ? "Language " : "Language, guessed from the descriptions ", language)),
    codes, attributes, fixes, found,
    el("label", { class: "inline" }, quick, " Quick trial: three passes over the table"),
    el("div", { class: "row" }, train, el("button", { type: "button", onclick: () => (form.hidden = true) }, "Not now"))]);
  form.onsubmit = doing(async () => {
    await api(`files/${file.id}/train`, { json: options() });
    form.hidden = true;
    await draw();
    get("made").scrollIntoView({ block: "start" });
  });
  form.hidden = false;
  form.querySelector("h2").focus();
  await check();
}

// Flags, in the words of this page.
const inWords = (text) => Object.values(FIXES).reduce((now, [flag, words]) => now.replaceAll(flag, `“${words}”`), text.replace("; --titles none leaves them out", ""));

function checked(result, apply) {
  if (result.problems.length) {
    const ways = Object.keys(result.fixes).filter((name) => FIXES[name]).map((name) => FIXES[name][1]);
    const others = Object.keys(result.fixes).some((name) => name === "input_col" && typeof result.fixes[name] === "string");
    return [el("div", { class: "notice", role: "alert" },
      el("strong", {}, result.problems.length === 1 ? "One problem" : `${result.problems.length} problems`),
      el("ul", {}, result.problems.map((text) => el("li", {}, inWords(text)))),
      ways.length || others ? el("button", { type: "button", id: "apply", onclick: () => apply(result.fixes) }, ways.length ? `Apply: ${ways.join("; ")}` : "Correct the columns") : null)];
  }
  const table = (title, rows) => rows.length ? el("details", {}, el("summary", {}, title),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, el("table", {},
      el("thead", {}, el("tr", {}, Object.keys(rows[0]).map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, Object.values(row).map((cell) => el("td", {}, cell)))))))) : null;
  return [el("div", { class: "good" },
    el("p", {}, el("strong", {}, "The table can be trained on. "), `${count(result.train)} rows to learn from, ${count(result.val)} kept aside to measure, ${count(result.codes)} codes.`),
    result.notices.length ? el("ul", { class: "notices" }, result.notices.map((text) => el("li", {}, inWords(text)))) : null,
    table(`${count(result.rejected)} rows are left out`, result.rejected_rows),
    table(`${count(result.conflicts)} descriptions have different codes in different rows`, result.conflict_rows))];
}

// The files of a model's run that are shown.
async function detail(model) {
  const text = async (name) => {
    const answer = await fetch(`/api/models/${model.id}/${name}`);
    return answer.ok ? answer.text() : null;
  };
  if (model.state === "done") return model.has_metrics ? { metrics: JSON.parse(await text("metrics.json")) } : {};
  if (model.state === "queued") return {};
  const said = (await text("training.log")) || "";
  return progress(said, STEPS.test(said) ? (await text("logs.csv")) || "" : "");
}

function progress(said, logs) {
  const number = (pattern) => Number(said.match(pattern)?.[1].replaceAll(",", "") || 0);
  const steps = number(STEPS), perStep = number(/= ([\d,]+) rows a step/);
  const [names, ...rows] = logs.trim().split("\n").map((line) => line.split(","));
  const get = (row, name) => Number(row[names.indexOf(name)] || NaN);
  if (!steps || !rows.length) return { stage: steps ? "Learning" : "Reading the table", share: 0, curve: [] };
  const step = get(rows.at(-1), "step");
  const speed = rows.map((row) => get(row, "samples_per_sec")).filter(Boolean).at(-1);
  const [, stage, share] = STAGES.filter(([words]) => said.includes(words)).at(-1) || [null, "Learning", (0.8 * step) / steps];
  const left = stage === "Learning" && speed ? ((steps - step + 0.25 * steps) * perStep) / speed : null;
  const curve = rows.map((row) => [get(row, "step") / steps, get(row, "flat_acc") / 100]).filter(([, right]) => !Number.isNaN(right));
  return { stage, share, left, curve };
}

function curveOf(points) {
  if (points.length < 2) return null;
  const svg = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  };
  const at = ([x, y]) => [30 + 265 * x, 84 - 74 * y];
  const picture = svg("svg", { viewBox: "0 0 340 100", class: "curve", role: "img", "aria-label": `Share of validation rows that are right: ${points.map(([, y]) => percent(y)).join(", ")}` });
  for (const y of [0, 0.5, 1]) {
    picture.append(svg("line", { x1: 30, x2: 295, y1: at([0, y])[1], y2: at([0, y])[1], class: "grid" }),
      svg("text", { x: 25, y: at([0, y])[1] + 4, "text-anchor": "end" }, `${100 * y}`));
  }
  const [x, y] = at(points.at(-1));
  picture.append(svg("polyline", { points: points.map((one) => at(one).join(",")).join(" ") }),
    svg("circle", { cx: x, cy: y, r: 3.5 }), svg("text", { x: x + 7, y: y + 4 }, percent(points.at(-1)[1])));
  return el("figure", {}, picture, el("figcaption", { class: "quiet" }, "Validation rows that are right, in percent, as training goes on"));
}

const act = (model, text, path, { method = "POST", kind = "", ask, then } = {}) => el("button", {
  class: kind, "data-key": `${model.id}-${text}`, "aria-label": `${text}: ${model.id}`,
  onclick: doing(async (event) => {
    if (ask && !confirm(ask)) return;
    event.target.disabled = true;
    try {
      await api(`models/${model.id}${path}`, { method });
      then?.();
    } finally {
      event.target.disabled = false;
      await draw();
    }
  }),
}, text);

function panel(model, found, improve) {
  const name = model.id === "given" ? model.table : model.id;
  const when = new Date(model.made * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  const made = [model.table && model.id !== "given" ? `from ${model.table}` : null, model.base ? `${model.base} trained further with ${count(model.corrections)} corrections` : null,
    when, model.seconds ? `trained in ${duration(model.seconds)}` : null].filter(Boolean).join(" · ");
  const switched = { then: () => (dispatchEvent(new Event("model")), say(`${name} codes from now on.`)) };
  const buttons = {
    queued: () => [act(model, "Stop", "/stop")],
    running: () => [act(model, "Stop", "/stop")],
    stopped: () => [act(model, "Resume", "/resume", { kind: "primary" }), remove(model)],
    failed: () => [act(model, "Try again", "/resume"), remove(model)],
    done: () => [
      model.in_use ? null : act(model, "Switch to this model", "/use", { kind: "primary", ...switched }),
      found.metrics ? el("button", { "data-key": `${model.id}-report`, "aria-expanded": String(open === model.id),
        onclick: doing(() => ((open = open === model.id ? null : model.id), draw())) }, open === model.id ? "Close the report" : "Report") : null,
      model.in_use ? null : remove(model)],
  }[model.state]().filter((one) => one && (about.may_train || !/Stop|Resume|Try|Delete/.test(one.textContent)));
  return el("article", { class: "panel file made", "aria-label": name },
    el("span", { class: "name" }, name, " ", model.in_use ? el("span", { class: "badge" }, "in use") : null),
    el("span", { class: "buttons" }, buttons),
    el("span", { class: "whole quiet" }, made),
    ["running", "stopped"].includes(model.state) && found.stage ? el("div", { class: "whole" }, bar(found.share, "Trained", true),
      el("p", { class: "quiet" }, model.state === "stopped" ? "Stopped; what it has learned is kept." : `${found.stage}${found.left ? `, about ${duration(found.left)} left` : " …"}`), curveOf(found.curve)) : null,
    model.state === "queued" ? el("span", { class: "whole quiet" }, "Waiting in the queue.") : null,
    model.state === "failed" ? el("span", { class: "whole error" }, inWords(model.message), " ", el("a", { href: `/api/models/${model.id}/training.log`, target: "_blank" }, "Log")) : null,
    found.metrics ? (model.of_titles ? titled(found.metrics) : figures(found.metrics)) : null,
    found.metrics?.corrections?.validation ? beforeAfter(model, found.metrics.corrections) : null,
    model.in_use && model.state === "done" ? next(model, improve) : null,
    open === model.id ? el("iframe", { class: "whole report", src: `/api/models/${model.id}/report.html`, title: `Report of ${name}` }) : null);
}

const remove = (model) => act(model, "Delete", "", { method: "DELETE", ask: `Delete the model ${model.id}?` });

function titled(metrics) {
  return el("p", { class: "whole notice" }, `Of ${count(metrics.num_rows)} titles that were kept aside, ${percent(metrics.answer.overall.accuracy)} are right; of descriptions in a source, expect far fewer. After thirty cards, Review estimates how many.`);
}

function figures(metrics) {
  const { accuracy, share } = metrics.answer.production;
  const automatic = Math.max(0, ...share.filter((_, i) => (accuracy[i] ?? 0) >= 0.95));
  const one = (number, meaning) => el("div", {}, el("dt", {}, meaning), el("dd", { class: "figure" }, number));
  return el("dl", { class: "whole figures" },
    one(percent(metrics.answer.overall.accuracy, 1), `right, of ${count(metrics.num_rows)} rows that were kept aside`),
    one(percent(automatic), "can be coded with 95\u00a0% right; a person does the others"));
}

function beforeAfter(model, found) {
  const line = ([part, name]) => {
    const one = found[part];
    if (!one) return null;
    const { mean, low, high } = one.difference.rows;
    const points = (value) => `${value > 0 ? "+" : ""}${(100 * value).toFixed(1)}`;
    return el("li", {}, el("strong", {}, `${percent(one.before.rows, 1)} → ${percent(one.after.rows, 1)}`), ` of the same ${count(one.num_rows)} ${name} (${points(mean)} points; ${low == null ? "too few for an interval" : `95\u00a0% interval ${points(low)} to ${points(high)}`})`);
  };
  return el("div", { class: "whole" }, el("h3", {}, `Before → after: ${model.base} and this model`),
    el("ul", { class: "notices" }, [["validation", "validation rows"], ["held_out", "corrections that were held out"]].map(line)));
}

// What to do with the model that is in use.
function next(model, improve) {
  const number = improve?.learned ? 0 : improve?.corrections || 0;
  const links = el("p", {}, el("a", { href: "#files" }, "Code a file"), " · ", el("a", { href: "#code" }, "Code a few descriptions"), " · ", el("a", { href: "#review" }, "Review"));
  const settled = number ? `${count(number)} checked descriptions are settled under Review. ` : "";
  const exported = number ? el("a", { href: "/api/corrections.csv", download: true }, "Export them as CSV") : null;
  const train = about.in_the_box ? `Train my own from these ${count(number)} decisions` : `Train again with ${count(number)} corrections`;
  if (about.may_train) return el("div", { class: "whole" }, links, number ? el("p", {}, settled,
    act(model, train, "/correct", { kind: "primary" }), " ", exported) : null);
  return el("div", { class: "whole" }, links, el("p", {}, settled, exported), number ? el("pre", { tabindex: "0", "aria-label": "Command" }, improve.next_step.split("\n").at(-1)) : null);
}
