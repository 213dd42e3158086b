// The dialog that asks for an API key. The key stays in this tab (api.js).

import { onKeyWanted } from "./api.js";
import { el } from "./dom.js";

onKeyWanted(wrong => new Promise(resolve => open(wrong, resolve)));

function open(wrong, resolve) {
  const input = el("input", { id: "key", type: "password", autocomplete: "off", required: true });
  const said = wrong ? "The server does not know this key." : "This server asks for an API key.";
  const form = el("form", {},
    el("h2", { id: "key-title" }, "API key"),
    el("p", { id: "key-said" }, `${said} It is kept in this tab only, until the tab is closed.`),
    el("label", { for: "key" }, "Key"), input,
    el("div", { class: "buttons" },
      el("button", { class: "primary" }, "Use this key"),
      el("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
  const dialog = el("dialog",
    { "aria-labelledby": "key-title", "aria-describedby": "key-said" }, form);
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
