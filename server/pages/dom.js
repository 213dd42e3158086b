// Helpers that make elements. Text is always inserted as text, never as markup.

export const at = id => document.getElementById(id);

// Makes an element. A boolean attribute is set or left out; `on...` attributes are listeners.
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") made.toggleAttribute(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

// A number with about three significant digits; "?" if it is unknown.
export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "?";
  if (value === 0) return "0";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toFixed(digits);
}

export function seconds(value) {
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${figure(value)} s`;
}

// Converts text to nodes; parts in backticks become <code>.
export const coded = text =>
  text.split("`").map((part, index) => (index % 2 ? el("code", {}, part) : part));

export const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
