// Show openapi.json as a page.
import { el, get } from "./lib.js";

const api = await (await fetch("/openapi.json")).json();
const name = (schema) => {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(name).filter((one) => one !== "null").join(" or ");
  if (schema.type === "array") return `list of ${name(schema.items)}`;
  return schema.enum ? schema.enum.join(" | ") : schema.type || "";
};
const body = (content) => name(Object.values(content?.content || {})[0]?.schema);

for (const [path, methods] of Object.entries(api.paths))
  for (const [method, route] of Object.entries(methods)) {
    const [, answer] = Object.entries(route.responses).find(([status]) => status.startsWith("2"));
    const takes = [...(route.parameters || []).map((one) => `${one.name}: ${name(one.schema)}${one.required ? "" : ", optional"}`), body(route.requestBody)].filter(Boolean);
    get("routes").append(el("article", { class: "panel" },
      el("h2", { class: "code" }, `${method.toUpperCase()} ${path}`),
      el("p", {}, route.description),
      takes.length ? el("p", { class: "quiet" }, `Parameters: ${takes.join("; ")}`) : null,
      body(answer) ? el("p", { class: "quiet" }, `Returns ${body(answer)}`) : null));
  }
get("routes").append(el("h2", {}, "Schemas"));
for (const [title, schema] of Object.entries(api.components.schemas))
  get("routes").append(el("article", { class: "panel" }, el("h3", {}, title), el("p", {}, schema.description || ""),
    el("ul", { class: "list" }, Object.entries(schema.properties || {}).map(([field, of]) => el("li", {}, `${field}: ${name(of)}`)))));
