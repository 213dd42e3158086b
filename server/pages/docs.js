// The API reference: shows /openapi.json as endpoints, types and tables of fields.

import { get } from "./api.js";
import { at, coded, el } from "./dom.js";
import "./key.js";

try {
  const { paths, components } = await get("openapi.json");
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      at("endpoints").append(endpoint(method, path, operation, components.schemas));
    }
  }
  for (const [name, schema] of Object.entries(components.schemas).sort()) {
    at("types").append(el("details", { class: "card endpoint", id: `type-${name}` },
      el("summary", {}, name), ...described(schema)));
  }
  addEventListener("hashchange", open);
  open();
} catch (error) {
  at("problem").textContent = error.message;
  at("problem").hidden = false;
}

// Opens the type that the URL fragment names.
function open() {
  const named = at(location.hash.slice(1));
  if (named?.tagName !== "DETAILS") return;
  named.open = true;
  named.scrollIntoView();
}

function endpoint(method, path, { requestBody, parameters = [], responses }, schemas) {
  const asked = requestBody?.content["application/json"].schema;
  const name = asked?.$ref?.split("/").at(-1);
  return el("details", { class: "card endpoint" },
    el("summary", {}, el("span", { class: "method" }, method.toUpperCase()), path),
    ...parameters.map(({ name, schema }) => el("p", {}, el("code", {}, name), ": ", ...typed(schema))),
    ...(asked ? [el("h3", {}, "Request fields"), ...described(schemas[name] ?? asked)] : []),
    el("h3", {}, "Responses"),
    table(["Status", "Body", "When"], Object.entries(responses).map(([status, reply]) =>
      [status, [...bodies(reply.content)], [reply.description]])));
}

function* bodies(content = {}) {
  for (const [index, [type, { schema }]] of Object.entries(content).entries()) {
    if (index) yield ", or ";
    if (type !== "application/json") yield `${type}: `;
    yield* typed(schema ?? {});
  }
}

// A schema as elements: its description, and the table of its fields or its type.
function described({ description, properties, required = [], ...schema }) {
  const intro = description ? [el("p", {}, ...coded(description))] : [];
  if (!properties) return [...intro, el("p", {}, ...typed(schema))];
  const rows = Object.entries(properties).sort(([a], [b]) => required.includes(b) - required.includes(a));
  return [...intro, table(["Field", "Type and limits", "Meaning"], rows.map(([name, field]) =>
    [required.includes(name) ? `${name} *` : name, [...typed(field)], coded(field.description ?? "")]))];
}

function table(heads, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heads.join(", ") },
    el("table", {},
      el("thead", {}, el("tr", {}, ...heads.map(head => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...rows.map(([first, ...rest]) =>
        el("tr", {}, el("td", {}, first), ...rest.map(cell => el("td", {}, ...cell)))))));
}

// A type in words, with links to named types.
function* typed(schema) {
  const options = (schema.anyOf ?? schema.oneOf)?.filter(({ type }) => type !== "null");
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    yield el("a", { href: `#type-${name}` }, name);
  } else if (options) {
    for (const [index, option] of options.entries()) {
      if (index) yield " or ";
      yield* typed(option);
    }
  } else if ("const" in schema || schema.enum) {
    yield (schema.enum ?? [schema.const]).map(value => JSON.stringify(value)).join(", ");
  } else if (schema.type === "array") {
    yield `list${bounds(schema.minItems, schema.maxItems)} of `;
    yield* typed(schema.items ?? {});
  } else if (typeof schema.additionalProperties === "object") {
    yield `object${bounds(schema.minProperties, schema.maxProperties)} of `;
    yield* typed(schema.additionalProperties);
  } else {
    const { type = "any type", exclusiveMinimum: above, exclusiveMaximum: below } = schema;
    const least = above === undefined ? schema.minimum : `above ${above}`;
    const most = below === undefined ? schema.maximum : `below ${below}`;
    const lengths = bounds(schema.minLength, schema.maxLength, " characters");
    yield `${type}${bounds(least, most)}${lengths}`;
  }
}

function bounds(least, most, unit = "") {
  if (least === undefined && most === undefined) return "";
  if (most === undefined) return ` (from ${least}${unit})`;
  return least === undefined ? ` (up to ${most}${unit})` : ` (${least} to ${most}${unit})`;
}
