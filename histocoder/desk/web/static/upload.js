// Send tables to the server, by a drop or a choice, and show their first rows.
import { api, bar, doing, el, say } from "./lib.js";

const MOST_BYTES = 2 * 2 ** 30;
let number = 0;

// A place to drop a file on; `then` gets the file as the server knows it.
export function dropZone({ id, use, title, hint, then }) {
  const input = el("input", { type: "file", id, class: "unseen", onchange: () => input.files[0] && send(input.files[0]) });
  const sending = el("div", { class: "panel", hidden: true });
  const zone = el("label", { class: "drop" }, input, el("strong", {}, title), el("span", { class: "quiet" }, hint));
  for (const kind of ["dragover", "dragleave", "drop"])
    zone.addEventListener(kind, (event) => {
      event.preventDefault();
      zone.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files[0]) send(event.dataTransfer.files[0]);
    });
  const show = (...children) => {
    sending.replaceChildren(...children);
    sending.hidden = !children.length;
  };
  const send = doing(async (file) => {
    try {
      const sent = await upload(file, use, show);
      show();
      if (sent) await then(sent);
    } catch (error) {
      show(el("p", { class: "error", role: "alert" }, error.message));
    }
    input.value = "";
  });
  return el("div", {}, zone, sending);
}

// XMLHttpRequest, since fetch does not tell how much is sent; nothing is returned if it was cancelled.
export function upload(file, use, show) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} is larger than 2 GB; use it with histocoder in a terminal instead.`);
  const request = new XMLHttpRequest();
  const stop = el("button", { type: "button", onclick: () => request.abort() }, "Cancel");
  const progress = (share) => show(el("p", {}, `Uploading ${file.name}`), bar(share, "Uploaded", true), stop);
  progress(0);
  request.upload.onprogress = (event) => progress(event.loaded / event.total);
  return new Promise((resolve, reject) => {
    request.onabort = () => (say("Cancelled."), resolve(null));
    request.onerror = () => reject(new Error("The file could not be uploaded: the server closed the connection."));
    request.onload = () => {
      let body = {};
      try {
        body = JSON.parse(request.responseText);
      } catch {
        // a page of a proxy, such as on a file that is too large for it
      }
      if (request.status === 201 && body.id) return resolve(body);
      return reject(new Error(body.detail || `The server answered ${request.status}.`));
    };
    request.open("POST", `/api/files?use=${use}&name=${encodeURIComponent(file.name)}`);
    request.send(file);
  });
}

export const option = (value, chosen, text = value) => el("option", { value, selected: value === chosen }, text);

// The first rows of a file; `mark` shows which columns are chosen.
export function firstRows(preview) {
  const table = el("table", {});
  const id = `rows-${(number += 1)}`;
  const mark = (chosen) => {
    const row = (kind, cells) => el("tr", {}, cells.map((cell, i) =>
      el(kind, { "data-chosen": chosen.includes(preview.columns[i]), scope: kind === "th" && "col" }, cell)));
    table.replaceChildren(el("thead", {}, row("th", preview.columns)), el("tbody", {}, preview.rows.map((cells) => row("td", cells))));
  };
  return [el("div", { id, class: "scroll", tabindex: "0", role: "region", "aria-label": "First rows" }, table), mark];
}

// Lists of a workbook's sheets, and of the encodings of a text file with examples, where there are several; `then` shows the file
// again with what was chosen.
export const formChoices = (file, then) => [
  choice(file, then, "sheet", "Sheet ", file.sheets.map((name) => [name, name])),
  choice(file, then, "encoding", "Letters are read as ", file.encodings.map((one) => [one.encoding, `${one.examples.join(", ")} (${one.name})`])),
].filter(Boolean);

function choice(file, then, name, label, values) {
  if (values.length < 2) return null;
  const select = el("select", { name }, values.map(([value, text]) => option(value, file[name], text)));
  select.onchange = doing(async (event) => {
    event.stopPropagation(); // the form would ask about the columns as they were
    try {
      await api(`files/${file.id}/${name}`, { json: { [name]: select.value } });
      file[name] = select.value;
      await then(file);
    } catch (error) {
      select.value = file[name];
      throw error;
    }
  });
  return el("label", {}, label, select);
}

export const previewOf = (file) => api(`files/${file.id}/preview`);
