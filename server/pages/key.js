// The dialog that asks for an API key. api.js keeps the key, for this tab only.

import { onKeyWanted } from "./api.js";
import { el } from "./dom.js";

onKeyWanted(why => new Promise(resolve => open(why, resolve)));

function open(why, resolve) {
  const input = el("input", { id: "key", type: "password", autocomplete: "off", required: true });
  const form = el("form", {},
    el("h2", { id: "key-title" }, "API key"),
    el("p", { id: "key-about" }, `${why} The key is kept in this tab only, until you close it.`),
    el("label", { for: "key" }, "Key"), input,
    el("div", { class: "buttons" },
      el("button", { class: "primary" }, "Use this key"),
      el("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
  const dialog = el("dialog",
    { "aria-labelledby": "key-title", "aria-describedby": "key-about" }, form);
  let given = null;
  form.addEventListener("submit", event => {
    event.preventDefault();
    given = input.value.trim();
    dialog.close();
  });
  dialog.addEventListener("close", () => {
    dialog.remove();
    resolve(given || null);
  });
  document.body.append(dialog);
  dialog.showModal();
}
